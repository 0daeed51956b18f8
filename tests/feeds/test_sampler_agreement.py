import pytest

from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError
from omnibal.feeds.sampler import check_agreement
from tests.feeds.samplers import samplers
from tools.synthetic import tiled_lengths


def gathered(ranks):
    records = []
    for sampler in ranks:
        sampler.verify(lambda record: records.append(record) or [record | {"rank": r} for r in range(len(ranks))])
    return records


def test_ranks_that_agree():
    ranks = samplers((3, 2))
    records = gathered(ranks)
    assert [record["rank"] for record in records] == [0, 1, 2]
    assert all(sampler.verify(lambda _: records) is None for sampler in ranks)  # none raises


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"seed": 1}, "rank 1: seed must be the same on all ranks, got 1 where rank 0 has 0"),
        ({"limits": PackLimits(9, 4000)}, "rank 1: limits must be"),
        ({"lengths": tiled_lengths(401)}, "rank 1: num_samples must be .* got 401 where rank 0 has 400"),
        ({"lengths": tiled_lengths(400)}, "rank 1: content_hash must be"),
        ({"method": "isf"}, "rank 1: method must be"),
    ],
)
def test_the_rank_that_differs_is_named_on_all_ranks(odd, message):
    ranks = [samplers((3, 1))[0], samplers((3, 1), **odd)[1], samplers((3, 1))[2]]
    records = gathered(ranks)
    for sampler in ranks:
        with pytest.raises(ConfigError, match=message):
            sampler.verify(lambda _: records)


def test_positions_and_shapes_must_agree():
    ahead = samplers((2, 1))[1]
    ahead.load_state_dict(ahead.state_dict(2))
    with pytest.raises(ConfigError, match="rank 1: steps_done must be the same on all ranks, got 2"):
        ahead.verify(lambda _: gathered([samplers((2, 1))[0], ahead]))
    with pytest.raises(ConfigError, match="rank 1: num_replicas must be the same on all ranks"):
        ahead.verify(lambda _: gathered([samplers((1, 1))[0], ahead]))


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
