"""What a sampler's saved position holds, and whether all ranks are at the same one with the same plan."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from omnibal.data.mixing import Origin
from omnibal.errors import ConfigError

VERSION: Final = 1
Shape = Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]
"""Ranks, and micro-batches of each."""
OTHER_DATA: Final = "; other samples or shares make other draws: keep the weights, and begin anew without the state"


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class OriginRecord(_Record):
    """Where other ranks left a mixture: see ``Origin``."""

    epoch: NonNegativeInt
    step: NonNegativeInt
    units: list[NonNegativeInt]

    def origin(self) -> Origin:
        """What it stands for."""
        return Origin(self.epoch, self.step, tuple(self.units))


class EpochStepsRecord(_Record):
    """What it takes to make the steps of an epoch again: see ``EpochSteps.record``."""

    arranged_for: Shape
    ranks: Shape
    packs_done: Annotated[list[NonNegativeInt], Field(min_length=1, max_length=1)]
    first_step: NonNegativeInt
    origin: OriginRecord | None = None


class State(_Record):
    """A position in the data, as ``BalancedBatchSampler.state_dict`` gives it."""

    version: int
    epoch: NonNegativeInt
    steps_done: NonNegativeInt
    epoch_steps: EpochStepsRecord
    next_packs: list[list[int]]
    made_from: dict[str, Any]


def read_state(state: Any, made_from: Mapping[str, Any]) -> State:
    """Check a state.

    Args:
        state: What was saved.
        made_from: What it must have been made from.

    Raises:
        ConfigError: It is no state of this version, or was made from something else.
    """
    found = state.get("version") if isinstance(state, Mapping) else type(state).__name__
    if found != VERSION:
        raise ConfigError(f"state must be of version {VERSION}, as state_dict() gave it, got {found!r}")
    try:
        read = State.model_validate(dict(state))
    except ValidationError as error:
        wrong = error.errors()[0]
        key = ".".join(map(str, wrong["loc"]))
        raise ConfigError(f"state must be as state_dict() gave it, got {key} that is not: {wrong['msg']}") from error
    if read.made_from.get("text_only", "mix") != "mix":
        raise ConfigError(
            f"text_only must be 'mix' in the saved state, got {read.made_from['text_only']!r}; finish the epoch with "
            "the version of omnibal that saved it"
        )
    for name, value in made_from.items():
        saved = read.made_from.get(name)
        if saved != value:
            remedy = OTHER_DATA if name in ("num_samples", "content_hash", "mixture") else ""
            raise ConfigError(f"{name} must be as in the saved state, {saved!r:.200}, got {value!r:.200}{remedy}")
    return read


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
