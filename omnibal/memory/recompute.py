"""Which layers recompute: the least recompute time that fits a memory budget, exactly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from omnibal.cost import Load
from omnibal.errors import InfeasibleError
from omnibal.memory.footprint import LEVELS, Footprint, Level, first_trainable
from omnibal.memory.frontier import NOT_OFFERED, extend, start
from omnibal.profile.records import LayerCost, ModelProfile

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_PICOSECONDS = 1e12


def choose_levels(
    footprint: Footprint, stage: int, layers: range, seconds: FloatArray, budget_bytes: int
) -> tuple[Level, ...]:
    """The levels of a stage's layers that cost the least time and fit.

    Args:
        footprint: What layers hold at each level.
        stage: The stage's place in the pipeline.
        layers: The layers it holds.
        seconds: What each level adds to a backward pass, shape (layers of the model, levels), as
            :func:`recompute_seconds` gives it.
        budget_bytes: The most that a device of this stage may hold.

    Raises:
        InfeasibleError: Nothing fits; the message says how many bytes are missing.
    """
    rows = slice(layers.start, layers.stop)
    kept, transient = footprint.kept_bytes(stage)[rows], footprint.transient_bytes(stage, layers.stop)[rows]
    floor, held = footprint.least_transient(stage), footprint.schedule.in_flight[stage]
    fixed, update = (
        int(sizes[layers.start, layers.stop]) for sizes in (footprint.fixed_bytes(stage), footprint.update_bytes(stage))
    )
    room = budget_bytes - fixed
    chosen = least_recompute(kept, transient, seconds[rows], room_bytes=room, held=held, least_transient=floor)
    if chosen is None or update > room:
        least = fixed + max(least_bytes(kept, transient, held=held, least_transient=floor), update)
        raise InfeasibleError(
            f"stage {stage} must fit its budget of {in_words(budget_bytes)}, got {in_words(least)} with as much "
            f"recomputed as possible ({least - budget_bytes} bytes are missing)"
        )
    return tuple(LEVELS[level] for level in chosen)


def least_recompute(
    kept: IntArray,
    transient: IntArray,
    seconds: FloatArray,
    *,
    room_bytes: int,
    held: int = 1,
    least_transient: int = 0,
) -> IntArray | None:
    """Choose a level for each layer: the least seconds in all while the peak keeps to the room.

    A backward pass runs the layers from the last to the first and frees what each has kept. So the peak is
    ``held × Σ kept + max over layers of (transient - Σ kept of the layers behind)``, or with ``least_transient`` as the
    maximum where that is more. Exact (:mod:`omnibal.memory.frontier`).

    Args:
        kept: Bytes at each level, shape (layers, levels); NOT_OFFERED where a layer lacks it.
        transient: Bytes while the layer runs, the same shape.
        seconds: What each level costs, the same shape.
        room_bytes: The most for all of it.
        held: Micro-batches whose activations are kept at the same time.
        least_transient: What comes and goes before the first backward pass.

    Returns:
        The column of each layer's level, shape (layers,), or None if nothing fits. Of equally fast choices, one of the
        least peak; of neighbours that are alike, the first ones keep least.

    Example:
        >>> kept, transient = np.array([[100, 10], [60, 10]]), np.zeros((2, 2), dtype=int)
        >>> seconds = np.array([[0.0, 3.0], [0.0, 2.0]])
        >>> least_recompute(kept, transient, seconds, room_bytes=110).tolist()
        [0, 1]
    """
    frontiers, time = [start(least_transient)], picoseconds(seconds)
    for layer in range(len(kept) - 1, -1, -1):
        frontiers.append(extend(frontiers[-1], kept[layer], time[layer], transient[layer], held, room_bytes))
    found = frontiers[-1]
    if not len(found.kept):
        return None
    fastest = np.flatnonzero(found.time == found.time[0])
    point = int(fastest[found.peak[fastest].argmin()])
    chosen = []
    for frontier in reversed(frontiers[1:]):
        chosen.append(frontier.level[point])
        point = frontier.origin[point]
    return np.array(chosen)


def least_bytes(kept: IntArray, transient: IntArray, *, held: int = 1, least_transient: int = 0) -> int:
    """The least peak of all choices; arguments as of :func:`least_recompute`."""
    frontier, no_time = start(least_transient), np.zeros(kept.shape[1], dtype=np.int64)
    for layer in range(len(kept) - 1, -1, -1):
        frontier = extend(frontier, kept[layer], no_time, transient[layer], held, NOT_OFFERED)
    return int(frontier.peak.min())


def recompute_seconds(profile: ModelProfile, loads: Load, stage: int) -> FloatArray:
    """What each level adds to a backward pass on average over micro-batches, shape (layers, levels).

    In stage 0 no backward pass reaches the layers before the first trainable one. Levels that a layer does not offer
    cost nothing; they keep NOT_OFFERED bytes.
    """
    mean = np.array([[_seconds(layer, level, loads) for level in LEVELS] for layer in profile.layers])
    if stage == 0:
        mean[: first_trainable(profile)] = 0
    return mean


def picoseconds(seconds: FloatArray) -> IntArray:
    """Seconds as whole numbers."""
    return np.rint(seconds * _PICOSECONDS).astype(np.int64)


def in_seconds(time: IntArray) -> FloatArray:
    """And back; infinity for negative ones."""
    return np.where(time < 0, np.inf, time / _PICOSECONDS)


def in_words(size: int) -> str:
    """Bytes as people read them.

    >>> in_words(5 * 2**29), in_words(3 * 2**19), in_words(0)
    ('2.50 GiB', '1.50 MiB', '0.00 MiB')
    """
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


def _seconds(layer: LayerCost, level: Level, loads: Load) -> float:
    return float(layer.recompute_seconds[level](loads).mean()) if level in layer.recompute_seconds else 0.0
