"""What a sampler's state holds, and whether a state is one."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from omnibal.errors import ConfigError

VERSION: Final = 1
Shape = Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]
"""Ranks, and micro-batches of each."""


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class CourseRecord(_Record):
    """What it takes to make a course again: see ``Course.record``."""

    arranged_for: Shape
    ranks: Shape
    packs_done: Annotated[list[NonNegativeInt], Field(min_length=1)]
    first_step: NonNegativeInt


class State(_Record):
    """A position in the data, as ``BalancedBatchSampler.state_dict`` gives it."""

    version: int
    epoch: NonNegativeInt
    steps_done: NonNegativeInt
    course: CourseRecord
    next_packs: list[list[int]]
    recipe: dict[str, Any]


def read_state(state: Any, recipe: Mapping[str, Any]) -> State:
    """Check a state.

    Args:
        state: What was saved.
        recipe: What it must have been saved with.

    Raises:
        ConfigError: It is no state of this version, or was saved with another recipe.
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
    for name, value in recipe.items():
        saved = read.recipe.get(name)
        if saved != value:
            raise ConfigError(f"{name} must be as in the saved state, {saved!r}, got {value!r}")
    return read
