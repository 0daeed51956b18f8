"""Check that all ranks hold the same plan, before their first step rather than as a hang in a later one."""

from collections.abc import Mapping, Sequence
from typing import Any

from omnibal.errors import ConfigError


def check_agreement(records: Sequence[Mapping[str, Any]], *, num_replicas: int) -> None:
    """Compare what every process holds.

    Args:
        records: One mapping per process, all with the same keys; ``rank`` is its data-parallel rank, everything else
            must be equal. Several processes may share a rank (the stages of a pipeline).
        num_replicas: Data-parallel ranks there must be.

    Raises:
        ConfigError: Two processes differ: the message names both ranks, the field and the values; or a rank is missing.

    >>> check_agreement([{"rank": 0, "seed": 1}, {"rank": 1, "seed": 2}], num_replicas=2)
    Traceback (most recent call last):
    omnibal.errors.ConfigError: rank 1: seed must be the same on all ranks, got 2 where rank 0 has 1
    """
    first = records[0]
    for record in records[1:]:
        for name, value in first.items():
            if name != "rank" and record.get(name) != value:
                raise ConfigError(
                    f"rank {record['rank']}: {name} must be the same on all ranks, got {record.get(name)!r} "
                    f"where rank {first['rank']} has {value!r}"
                )
    ranks = {record["rank"] for record in records}
    missing = sorted(set(range(num_replicas)) - ranks)
    if missing:
        raise ConfigError(
            f"ranks must be 0 … {num_replicas - 1}, each on at least one process, got {sorted(ranks)}; "
            f"{', '.join(map(str, missing))} missing: pass every process its own data-parallel rank"
        )
