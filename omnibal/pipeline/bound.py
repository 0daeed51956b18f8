"""What no partition can do better: lower bounds on the time of a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from omnibal.compiled import compiled
from omnibal.pipeline.schedule import Operation, Schedule
from omnibal.pipeline.simulate import Mode
from omnibal.pipeline.times import StepTimes

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_F, _BW, _W = int(Operation.F), int(Operation.BW), int(Operation.W)


def stage_bounds(times: StepTimes, schedule: Schedule, mode: Mode) -> FloatArray:
    """Seconds that a step takes at least if a stage holds certain layers, whatever the other stages hold.

    The stage is simulated alone, with everything else as pure delay: a micro-batch comes back from the stages behind it
    when it has passed their layers there and back, and one comes from the stages before it when an earlier one, which
    the first stage has to finish first, has gone back to the start.

    Returns:
        Shape (stages, layers + 1, layers + 1), as :mod:`omnibal.pipeline.dynamic` takes it: the largest entry of a
        partition's stages bounds its step, and the least such maximum bounds every partition's. Infinity where
        other stages would be left without a layer. O(replicas × stages × layers² × micro-batches).
    """
    num_stages, size = schedule.num_stages, len(times.reduce)
    result = np.zeros((num_stages, size, size))
    for replica in range(len(times.forward)):
        for stage in range(num_stages):
            seen = _seen_from(stage, times, replica, schedule)
            bounds = _bound_all(seen, times.reduce, (stage, num_stages - 1 - stage), mode == "rendezvous")
            result[stage] = np.maximum(result[stage], bounds)
    return result + differences(times.optimizer)


def differences(sums: FloatArray) -> FloatArray:
    """Entry [a, b] is what lies between boundaries a and b of sums over layers."""
    between: FloatArray = sums[None, :] - sums[:, None]
    return between


class _Seen(NamedTuple):
    """A step as one stage sees it; seconds have the shape (layers + 1, micro-batches)."""

    operations: NDArray[np.int8]
    """Of the stage, in order."""
    micro_batches: NDArray[np.int32]
    """The same length."""
    waits: IntArray
    """For each micro-batch the last one whose backward the first stage runs before this one's forward, or -1."""
    forward: FloatArray
    """Sum over the layers before a boundary, like the next two."""
    backward: FloatArray
    weight: FloatArray
    crossing: FloatArray
    """A transfer over a boundary."""
    to_stage: FloatArray
    """From the start of the model over a boundary, at the least."""
    to_start: FloatArray
    """Back."""
    rest: FloatArray
    """Over a boundary to the end of the model and back, at the least."""


def _seen_from(stage: int, times: StepTimes, replica: int, schedule: Schedule) -> _Seen:
    table, crossing = schedule.table, times.crossing[replica]
    forward, weight = times.forward[replica], times.weight[replica]
    first, later = times.first_backward[replica], times.backward[replica]
    waited_for = 0.0 if any(schedule.pending_weights) else weight  # the stage before waits for a BW, but not for a W
    up = crossing + _least_crossings(crossing[:, ::-1], stage - 1)[:, ::-1]
    down = crossing + _least_crossings(crossing, schedule.num_stages - stage - 2)
    there_and_back = forward + later + waited_for
    seconds = (
        forward,
        later if stage else first,
        weight,
        crossing,
        forward + up,
        first + waited_for + up,
        2 * down + there_and_back[:, -1:] - there_and_back,
    )
    own = table.operations[stage, : table.lengths[stage]], table.micro_batches[stage, : table.lengths[stage]]
    return _Seen(*own, _waits(schedule), *(np.ascontiguousarray(array.T) for array in seconds))


def _waits(schedule: Schedule) -> IntArray:
    waits, last = np.full(schedule.micro_batches, -1), -1
    for operation, micro_batch in schedule.stages[0]:
        if operation == Operation.F:
            waits[micro_batch] = last
        elif operation != Operation.W:
            last = micro_batch
    return waits


@compiled
def _least_crossings(crossing: FloatArray, cuts: int) -> FloatArray:
    """For each micro-batch and boundary: the least that so many cuts behind the boundary can take."""
    micro_batches, size = crossing.shape
    result = np.zeros(crossing.shape)
    for m in range(micro_batches if cuts > 0 else 0):
        least = np.full(cuts, np.inf)  # rising, of the boundaries behind
        for boundary in range(size - 3, -1, -1):
            entry = crossing[m, boundary + 1]
            for place in range(cuts):
                if entry < least[place]:
                    least[place], entry = entry, least[place]
            for place in range(min(cuts, size - 2 - boundary)):
                result[m, boundary] += least[place]
    return result


@compiled
def _bound_all(seen: _Seen, reduce: FloatArray, stages_around: tuple[int, int], blocking: bool) -> FloatArray:
    stages_before, stages_behind = stages_around
    num_layers = len(reduce) - 1
    result = np.full((num_layers + 1, num_layers + 1), np.inf)
    scratch = np.zeros((2, seen.forward.shape[1]))
    for a in range(stages_before, num_layers if stages_before else 1):
        for b in range(a + 1 if stages_behind else num_layers, num_layers - stages_behind + 1):
            finish, step = _bound(seen, (a, b), blocking, scratch)
            result[a, b] = max(step, finish + reduce[b] - reduce[a])
    return result


@compiled
def _bound(seen: _Seen, layers: tuple[int, int], blocking: bool, scratch: FloatArray) -> tuple[float, float]:
    """When the stage ends if it holds layers a to b, and when the first stage does, at the least."""
    a, b = layers
    forward_ends, backward_ends = scratch
    clock, step = 0.0, 0.0
    for position in range(len(seen.operations)):
        operation, m = seen.operations[position], seen.micro_batches[position]
        up, down = (seen.crossing[a, m], seen.crossing[b, m]) if blocking else (0.0, 0.0)
        if operation == _F:
            waits = seen.waits[m]
            ready = seen.to_stage[a, m] + (backward_ends[waits] + seen.to_start[a, waits] if waits >= 0 else 0.0)
            clock = forward_ends[m] = max(clock + up, ready) + seen.forward[b, m] - seen.forward[a, m]
            clock += down
        elif operation == _W:
            clock += seen.weight[b, m] - seen.weight[a, m]
        else:
            clock = max(clock + down, forward_ends[m] + seen.rest[b, m]) + seen.backward[b, m] - seen.backward[a, m]
            if operation == _BW:
                clock += seen.weight[b, m] - seen.weight[a, m]
            backward_ends[m] = clock
            step = max(step, clock + seen.to_start[a, m])
            clock += up
    return clock, max(step, clock)
