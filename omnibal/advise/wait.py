"""Where ranks wait for each other when no pipeline joins them, and for which phase of a step.

Assumptions:

- Ranks are equally fast, and only their packs differ.
- A rank never runs ahead of a meeting: what follows one begins when the last rank has come.
- Where parameters are gathered layer by layer, every layer of a phase takes its share of the phase on all ranks alike,
  so the waits before its layers add up to one before its end; and no rank skips a phase.
- Communication itself costs nothing here: it is the same for balanced and unbalanced packs.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike

from omnibal.cost import FloatArray
from omnibal.errors import ConfigError

Trainer = Literal["ddp", "zero1", "zero2", "zero3", "fsdp"]
"""How data-parallel ranks share their work; plain DDP accumulates under ``no_sync``, as Trainer and Accelerate do."""
Meeting = Literal["step", "micro_batch", "phase"]

MEETINGS: Final[Mapping[Trainer, Meeting]] = MappingProxyType(
    {
        "ddp": "step",  # gradients are reduced in the last micro-batch only
        "zero1": "step",
        "zero2": "micro_batch",  # DeepSpeed reduces each micro-batch's gradients to the rank that keeps them
        "zero3": "phase",  # parameters are gathered as layers run, forward and backward
        "fsdp": "phase",
    }
)
"""What ranks do on their own before they wait for each other."""


def wait(costs: Mapping[str, ArrayLike], layout: Trainer) -> dict[str, FloatArray]:
    """Seconds that each rank of each step waits, by the phase that causes it.

    A meeting is reached last by the rank with the largest sum of the phases before it (the first of several). Another
    rank waits for the difference, and a phase causes what the last rank spends more in it. Where ranks meet after
    several phases, that is negative for a phase in which the last rank spends less. Over all phases the sum is what the
    rank waits; with its own seconds it is the same on all ranks of a step.

    Args:
        costs: Of each phase, in any order ("vision forward", "language backward", …), the seconds that it takes alone:
            arrays of one shape (steps, ranks, micro-batches), finite and not negative.
        layout: How the ranks share their work.

    Returns:
        Under each phase's name, in the order of ``costs``, an array of shape (steps, ranks).

    Raises:
        ConfigError: The layout is unknown, there is no phase, or an array's shape or values are not as above.

    Under DDP one rank's long texts make up for the other's many tiles; under ZeRO 3 each phase is waited for:

    >>> costs = {"vision": [[[3.0], [1.0]]], "language": [[[1.0], [3.0]]]}
    >>> {phase: seconds.tolist() for phase, seconds in wait(costs, "zero3").items()}
    {'vision': [[0.0, 2.0]], 'language': [[2.0, 0.0]]}
    >>> sum(wait(costs, "ddp").values()).tolist()
    [[0.0, 0.0]]
    """
    if layout not in MEETINGS:
        raise ConfigError(f"layout must be one of {', '.join(MEETINGS)}, got {layout!r}")
    seconds = _phases(costs)  # (phases, steps, ranks, micro-batches)
    meeting = MEETINGS[layout]
    if meeting == "phase":
        waited = (seconds.max(axis=2, keepdims=True) - seconds).sum(axis=3)
    elif meeting == "micro_batch":
        waited = _after_all_phases(seconds).sum(axis=3)
    else:
        waited = _after_all_phases(seconds.sum(axis=3, keepdims=True))[..., 0]
    return dict(zip(costs, waited, strict=True))


def _after_all_phases(seconds: FloatArray) -> FloatArray:
    """Waits where ranks meet after all phases of each entry of the last axis; shapes as given."""
    last = seconds.sum(axis=0).argmax(axis=1)[:, None]  # (steps, 1, meetings)
    return np.take_along_axis(seconds, last[None], axis=2) - seconds


def _phases(costs: Mapping[str, ArrayLike]) -> FloatArray:
    """All phases in one array of shape (phases, steps, ranks, micro-batches)."""
    if not costs:
        raise ConfigError("costs must hold at least one phase, got none")
    arrays = {phase: np.asarray(seconds, dtype=np.float64) for phase, seconds in costs.items()}
    shapes = {phase: array.shape for phase, array in arrays.items()}
    shape = next(iter(shapes.values()))
    if len(shape) != 3 or 0 in shape or set(shapes.values()) != {shape}:
        raise ConfigError(f"costs must be of one shape (steps, ranks, micro-batches), none of them 0, got {shapes}")
    for phase, array in arrays.items():
        wrong = ~(np.isfinite(array) & (array >= 0))
        if wrong.any():
            raise ConfigError(f"costs[{phase!r}] must be finite and not negative, got {array[wrong].flat[0]:g}")
    return np.stack(list(arrays.values()))
