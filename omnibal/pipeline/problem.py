"""What a partition search searches: the step time of every partition of a profile, and bounds on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from omnibal.compiled import compiled, compiled_part
from omnibal.cost import FloatArray, IntArray
from omnibal.families.base import encoder_layers
from omnibal.pipeline.events import run_steps
from omnibal.pipeline.optimize import Boundaries, least_maximum
from omnibal.pipeline.partition import frozen_stages
from omnibal.pipeline.schedule import Operation, Schedule
from omnibal.pipeline.simulate import Mode, table_of
from omnibal.pipeline.times import StepTimes
from omnibal.profile.records import ModelProfile

_F, _BW, _W = int(Operation.F), int(Operation.BW), int(Operation.W)


class MeanSeconds(NamedTuple):
    """Seconds of an average micro-batch, for the formulas of `omnibal.pipeline.optimize`."""

    forward: FloatArray  # of each layer, (layers,)
    crossing: FloatArray  # of a transfer over each boundary, (layers + 1,)
    # By possible stage, (stages, layers + 1, layers + 1):
    stage: FloatArray  # what it computes
    pace: FloatArray  # how long it is busy
    passing: FloatArray  # until the micro-batch has passed the stage and the link behind it, there and back


@dataclass(frozen=True, eq=False)
class PartitionProblem:
    """Cut ``profile`` into the stages of ``schedule`` so that steps are short.

    ``times`` holds the replicas of one step, or of ``num_steps`` steps one after another. With units it holds the
    numbered micro-batches of each step in place of replicas.
    """

    profile: ModelProfile
    times: StepTimes
    schedule: Schedule
    mode: Mode
    num_steps: int = 1

    @property
    def micro_batches(self) -> int:
        return int(self.times.forward.shape[1])

    @property
    def num_stages(self) -> int:
        return self.schedule.num_stages

    def evaluate(self, partitions: IntArray) -> FloatArray:
        """Simulated seconds of a mean step under each partition, (partitions, stages + 1) -> (partitions,)."""
        return np.array([self.step_seconds(boundaries, self.times) for boundaries in partitions])

    def step_seconds(self, boundaries: IntArray, times: StepTimes) -> float:
        """Simulated seconds of a mean step that takes other times, under one partition."""
        schedule = self.schedule.with_frozen_front(int(frozen_stages(self.profile, boundaries)))
        table = table_of(schedule, self.mode)
        starts, ends = np.empty((2, 1, *table.operations.shape))
        reduced, blocking = np.empty(self.num_stages), self.mode == "rendezvous"
        return float(run_steps(times, table, boundaries, self.num_steps, blocking, 0.0, starts, ends, reduced).mean())

    def bound(self, partitions: IntArray) -> FloatArray:
        """Lower bounds of `evaluate`, of the same shapes."""
        stages = np.arange(self.num_stages)
        of_steps = [bounds[stages, partitions[:, :-1], partitions[:, 1:]].max(axis=1) for bounds in self._step_bounds]
        mean: FloatArray = np.mean(of_steps, axis=0)
        return mean

    @cached_property
    def lower_bound_seconds(self) -> float:
        return fmean(least_maximum(bounds)[0] for bounds in self._step_bounds)

    @property
    def least_bound(self) -> Boundaries:
        """The partition of the least bound, of a single step."""
        (bounds,) = self._step_bounds
        return least_maximum(bounds)[1]

    @cached_property
    def _step_bounds(self) -> list[FloatArray]:
        if self.schedule.replicas:
            return [self._unit_bounds(step) for step in range(self.num_steps)]
        of_steps = np.split(np.arange(len(self.times.forward)), self.num_steps)
        front = self.profile.frozen_front
        return [stage_bounds(self.times, replicas, self.schedule, self.mode, front) for replicas in of_steps]

    def _unit_bounds(self, step: int) -> FloatArray:
        # A replica's stage waits until its first micro-batch has passed all layers before it, and computes all of its
        # micro-batches; under 1F1B the last one's gradient then passes all layers before it, too. In between, each
        # micro-batch passes all layers behind the stage, there and back: with few of them the stage waits for that.
        times, size = self.times, len(self.profile.layers) + 1
        forward, back, weight = times.forward[step], times.backward[step], times.weight[step]
        seconds = {Operation.F: forward, Operation.BW: back + weight, Operation.B: back, Operation.W: weight}
        splits, result = any(self.schedule.pending_weights), np.zeros((self.num_stages, size, size))
        passing = forward + (back if splits else back + weight)
        behind = passing[:, -1:] - passing + times.crossing[step] + times.gradient_crossing[step]
        for stage, order in enumerate(self.schedule.stages):
            replicas = self.schedule.replicas[stage]
            for replica in range(replicas):
                ran = np.array([seconds[operation][m * replicas + replica] for operation, m in order])
                bounds = differences(ran.sum(axis=0))
                for m in {0, self.schedule.micro_batches_of(stage) - 1}:
                    # Work up to the forward pass of m, and from its backward pass on.
                    passes = [place for place, each in enumerate(order) if each.micro_batch == m]
                    there, again = passes[:2]
                    work = ran[: there + 1].sum(axis=0) + ran[again:].sum(axis=0)
                    bounds = np.maximum(bounds, differences(work) + behind[m * replicas + replica])
                around = forward[replica] + (back + weight)[replica::replicas].min(axis=0) * (not splits)
                result[stage] = np.maximum(result[stage], bounds + around[:, None])
        return result + differences(times.optimizer) + self._elsewhere

    @cached_property
    def _elsewhere(self) -> FloatArray:
        """With units, infinity for stages with layers of the other part, else 0; (stages, layers + 1, layers + 1)."""
        own, size = self.schedule.encoder_stages, len(self.profile.layers) + 1
        found = np.full((self.num_stages, size, size), np.inf if own else 0.0)
        if not own:
            return found
        border = encoder_layers(self.profile.layers)
        found[:own, : border + 1, : border + 1] = 0
        found[own:, border:, border:] = 0
        return found

    @cached_property
    def mean(self) -> MeanSeconds:
        times = self.times
        stage = differences((times.forward + times.backward + times.weight).mean(axis=(0, 1)))
        by_stage = np.stack([stage] * self.num_stages)
        crossing = times.crossing.mean(axis=(0, 1))
        there_and_back = crossing + times.gradient_crossing.mean(axis=(0, 1))
        pace = by_stage
        if self.mode == "rendezvous":  # a blocking transfer keeps both of its stages busy
            pace = by_stage + there_and_back[:, None] + there_and_back[None, :]
        # Other stages need not wait for W where it may wait itself.
        weight = differences(times.weight.mean(axis=(0, 1)))
        waiting = np.stack([weight * bool(pending) for pending in self.schedule.pending_weights])
        return MeanSeconds(
            forward=np.diff(times.forward.mean(axis=(0, 1))),
            crossing=crossing,
            stage=by_stage + self._elsewhere,
            pace=pace + self._elsewhere,
            passing=by_stage - waiting + there_and_back[None, :],
        )


def stage_bounds(
    times: StepTimes, replicas: IntArray, schedule: Schedule, mode: Mode, frozen_front: int = 0
) -> FloatArray:
    """Least seconds of a step of some replicas if a stage holds certain layers, by possible stage."""
    # The stage is simulated alone, and all other stages are pure delay. A micro-batch's gradient arrives when the
    # micro-batch has passed all layers behind the stage, forward and backward. A micro-batch's activation arrives when
    # the first stage has finished the micro-batch that its schedule runs before, whose gradient has to reach it. The
    # largest entry of a partition's stages bounds its step. O(replicas × stages × layers² × micro-batches).
    num_stages, size = schedule.num_stages, len(times.reduce)
    result = np.zeros((num_stages, size, size))
    for replica in replicas:
        for stage in range(num_stages):
            seen = _seen_from(stage, times, replica, schedule, frozen_front)
            bounds = _bound_all(seen, times.reduce, (stage, num_stages - 1 - stage), mode == "rendezvous")
            result[stage] = np.maximum(result[stage], bounds)
    return result + differences(times.optimizer)


def differences(sums: FloatArray) -> FloatArray:
    between: FloatArray = sums[None, :] - sums[:, None]  # [a, b]: the sum over layers a to b - 1
    return between


class _Seen(NamedTuple):
    # The stage's operations, in order, and the micro-batch of each:
    operations: NDArray[np.int8]
    micro_batches: NDArray[np.int32]
    # For each micro-batch m the last one whose backward pass the first stage runs before the forward pass of m, or -1:
    waits: IntArray
    # Layers before the first one that is trained; a stage of such layers alone runs no backward pass:
    frozen_front: int
    # Seconds by boundary and micro-batch, shape (layers + 1, micro-batches). Sums over the layers before a boundary:
    forward: FloatArray
    backward: FloatArray
    weight: FloatArray
    # One transfer over a boundary:
    crossing: FloatArray
    gradient_crossing: FloatArray
    # The least from one place to another, over as many cuts as lie between:
    to_stage: FloatArray  # from the start of the model, forward, over the boundary
    from_trained: FloatArray  # from the first trained layer, forward, over the boundary
    to_start: FloatArray  # from the boundary, backward, to the start of the model, or as far as gradients go
    rest: FloatArray  # from the boundary to the end of the model and back


def _seen_from(stage: int, times: StepTimes, replica: int, schedule: Schedule, frozen_front: int) -> _Seen:
    table, crossing, back = schedule.table, times.crossing[replica], times.gradient_crossing[replica]
    forward, backward, weight = times.forward[replica], times.backward[replica], times.weight[replica]
    # The stage before waits for the whole of a BW, but for no W.
    waited_for = 0.0 if any(schedule.pending_weights) else weight
    # ``stage`` cuts lie before this stage, one of them at its own start, and num_stages - stage - 1 behind it.
    backwards = (np.ascontiguousarray(each[:, ::-1]) for each in (crossing, back))
    to_stage, to_start = (
        each + _least_crossings(turned, stage - 1)[:, ::-1]
        for each, turned in zip((crossing, back), backwards, strict=True)
    )
    down, up = (each + _least_crossings(each, schedule.num_stages - stage - 2) for each in (crossing, back))
    there_and_back = forward + backward + waited_for
    to_stage = forward + to_stage
    seconds = (
        forward,
        backward,
        weight,
        crossing,
        back,
        to_stage,
        np.maximum(forward - forward[:, [frozen_front]], 0) if frozen_front else to_stage,
        backward + waited_for + to_start,
        down + up + there_and_back[:, -1:] - there_and_back,
    )
    own = table.operations[stage, : table.lengths[stage]], table.micro_batches[stage, : table.lengths[stage]]
    return _Seen(*own, _waits(schedule), frozen_front, *(np.ascontiguousarray(array.T) for array in seconds))


def _waits(schedule: Schedule) -> IntArray:
    # Read off the order in which the first stage runs its passes.
    waits, last = np.full(schedule.micro_batches, -1), -1
    for operation, micro_batch in schedule.stages[0]:
        if operation == Operation.F:
            waits[micro_batch] = last
        elif operation != Operation.W:
            last = micro_batch
    return waits


@compiled
def _least_crossings(crossing: FloatArray, cuts: int) -> FloatArray:
    """The least that ``cuts`` transfers at boundaries behind a boundary can take, by micro-batch and boundary."""
    micro_batches, size = crossing.shape
    result = np.zeros(crossing.shape)
    for m in range(micro_batches if cuts > 0 else 0):
        # Walk from the last boundary to the first, and keep the cheapest ``cuts`` boundaries seen so far, ascending.
        least = np.full(cuts, np.inf)
        for boundary in range(size - 3, -1, -1):
            entry = crossing[m, boundary + 1]
            for place in range(cuts):  # insert the new one; the most expensive one falls out
                if entry < least[place]:
                    least[place], entry = entry, least[place]
            for place in range(min(cuts, size - 2 - boundary)):
                result[m, boundary] += least[place]
    return result


@compiled
def _bound_all(seen: _Seen, reduce: FloatArray, stages_around: tuple[int, int], blocking: bool) -> FloatArray:
    # Every stage before and behind needs a layer, which limits a and b.
    stages_before, stages_behind = stages_around
    num_layers = len(reduce) - 1
    result = np.full((num_layers + 1, num_layers + 1), np.inf)
    scratch = np.zeros((2, seen.forward.shape[1]))
    for a in range(stages_before, num_layers if stages_before else 1):
        for b in range(a + 1 if stages_behind else num_layers, num_layers - stages_behind + 1):
            weights_start, weights_end, step = _bound(seen, (a, b), blocking, scratch)
            # All gradients are added up behind the start of the last weights' pass, the first layer's behind its end.
            result[a, b] = max(step, weights_start + reduce[b] - reduce[a], weights_end + reduce[a + 1] - reduce[a])
    return result


@compiled_part
def _bound(seen: _Seen, layers: tuple[int, int], blocking: bool, scratch: FloatArray) -> tuple[float, float, float]:
    """Least times at which the last backward pass to the weights starts and ends, and at which all stages end."""
    # The stage holds layers a to b - 1 and runs its operations one after another.
    a, b = layers
    forward_ends, backward_ends = scratch
    trains = b > seen.frozen_front
    # clock: when the stage is free; step: the latest end of any stage that is known so far.
    clock, step, weights_start, weights_end = 0.0, 0.0, 0.0, 0.0
    for position in range(len(seen.operations)):
        operation, m = seen.operations[position], seen.micro_batches[position]
        if operation == _F:
            # The activation has passed all layers before this stage. The first stage starts it only when it has
            # finished the micro-batch that it waits for, whose gradient travels from here to the start.
            waits, ready = seen.waits[m], seen.to_stage[a, m]
            if trains and waits >= 0:
                ready = max(ready, backward_ends[waits] + seen.to_start[a, waits] + seen.from_trained[a, m])
            up, down = (seen.crossing[a, m], seen.crossing[b, m]) if blocking else (0.0, 0.0)
            clock = forward_ends[m] = max(clock + up, ready) + seen.forward[b, m] - seen.forward[a, m]
            step = max(step, clock + seen.rest[b, m])  # the way to the end of the model and back is left
            clock += down  # a blocking transfer occupies the sender, too
        elif operation == _W:
            weights_start = clock
            clock += seen.weight[b, m] - seen.weight[a, m]
            weights_end = clock
        elif trains:
            # The gradient arrives when the micro-batch has been to the end of the model and back.
            up, down = (seen.gradient_crossing[a, m], seen.gradient_crossing[b, m]) if blocking else (0.0, 0.0)
            start = max(clock + down, forward_ends[m] + seen.rest[b, m])
            clock = start + seen.backward[b, m] - seen.backward[a, m]
            if operation == _BW:
                clock += seen.weight[b, m] - seen.weight[a, m]
                weights_start, weights_end = start, clock
            backward_ends[m] = clock
            # The first stage ends this micro-batch after its gradient has passed all layers before this stage.
            step = max(step, clock + seen.to_start[a, m])
            clock += up
    return weights_start, weights_end, max(step, clock)
