import pytest

from omnibal.data.agreement import check_agreement
from omnibal.errors import ConfigError


def record(rank, **others):
    return {"rank": rank, "seed": 1, "content_hash": "ab", **others}


def test_equal_records_agree():
    check_agreement([record(1), record(0)], num_replicas=2)
    check_agreement([record(0), record(0), record(1), record(1)], num_replicas=2)  # two stages each


def test_the_rank_and_the_field_that_differ_are_named():
    with pytest.raises(
        ConfigError, match=r"rank 2: content_hash must be the same on all ranks, got 'cd' where rank 0 has 'ab'"
    ):
        check_agreement([record(0), record(1), record(2, content_hash="cd")], num_replicas=3)


def test_a_missing_field_differs():
    with pytest.raises(ConfigError, match="rank 1: seed must be the same on all ranks, got None"):
        check_agreement([record(0), {"rank": 1, "content_hash": "ab"}], num_replicas=2)


def test_every_rank_must_be_there():
    with pytest.raises(ConfigError, match=r"ranks must be 0 … 2, .* got \[0, 1\]; 2 missing"):
        check_agreement([record(0), record(1), record(1)], num_replicas=3)
