"""Partition search: what a cut of a model takes in simulated steps, bounds on it, and every method to find a good cut.

    PartitionProblem  the step time of every partition of a profile, and lower bounds on it
    search_partition  the cuts that each method proposes, ranked by the simulator

`omnibal.planner` searches a PartitionProblem together with recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from statistics import fmean
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from omnibal.cluster import Links
from omnibal.compiled import compiled, compiled_part
from omnibal.cost import FloatArray, IntArray, Load
from omnibal.errors import ConfigError
from omnibal.families.base import encoder_layers
from omnibal.pipeline.events import run_steps
from omnibal.pipeline.partition import (
    Boundaries,
    Partition,
    best_neighbours,
    check_num_stages,
    descend,
    frozen_stages,
    greedy_anchor,
    least_maximum,
    model_optima,
    parameter_cut,
)
from omnibal.pipeline.schedule import Operation, Schedule, Table, one_f_one_b
from omnibal.pipeline.simulate import Mode, table_of
from omnibal.pipeline.times import StepTimes, step_times
from omnibal.profile.records import ModelProfile

_F, _BW, _W = int(Operation.F), int(Operation.BW), int(Operation.W)
# Yao et al. find the optimum within three layers of their anchor, and try 10 to 15 candidates.
_PAPER_RADIUS, _PAPER_TOP = 3, 15
_MODEL_STARTS = 4  # partitions of the makespan model that the search starts from


class MeanSeconds(NamedTuple):
    """Seconds of an average micro-batch, for the formulas of `omnibal.pipeline.partition`."""

    forward: FloatArray  # of each layer, (layers,)
    crossing: FloatArray  # of a transfer over each boundary, (layers + 1,)
    # By possible stage, (stages, layers + 1, layers + 1):
    stage: FloatArray  # what it computes
    pace: FloatArray  # how long it is busy
    passing: FloatArray  # until the micro-batch has passed the stage and the link behind it, there and back


@dataclass(frozen=True, eq=False)
class PartitionProblem:
    """Cut ``profile`` into the stages of ``schedule`` so that steps are short."""

    # `times` holds the replicas of one step, or of `num_steps` steps one after another. With units it holds the
    # numbered micro-batches of each step in place of replicas.

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
        """Least seconds of each step if a stage holds certain layers, by possible stage."""
        # A row of the table is simulated alone, and all other stages are pure delay. A micro-batch's gradient arrives
        # when the micro-batch has passed all layers behind the stage, forward and backward. Its activation arrives when
        # the first stage has finished the micro-batch that its schedule runs before, whose gradient has to reach it.
        # The largest entry of a partition's stages bounds its step. O(rows × layers² × micro-batches) for each replica.
        num_stages, size = self.num_stages, len(self.profile.layers) + 1
        result = []
        for replicas in np.split(np.arange(len(self.times.forward)), self.num_steps):
            step = np.zeros((num_stages, size, size))
            for replica, (row, stage) in product(replicas, enumerate(self.schedule.table.stages)):
                around = int(stage), num_stages - 1 - int(stage)
                bounds = _bound_all(self._seen(row, replica), self.times.reduce, around, self.mode == "rendezvous")
                step[stage] = np.maximum(step[stage], bounds)
            result.append(step + differences(self.times.optimizer) + self._elsewhere)
        return result

    def _seen(self, row: int, replica: int) -> _Seen:
        """What a row sees of a step; micro-batches in the row's own numbers."""
        schedule, times, front, table = self.schedule, self.times, self.profile.frozen_front, self.schedule.table
        stage, length = int(table.stages[row]), table.lengths[row]
        numbers, replicas = table.micro_batches[row, :length], schedule.replicas[stage] if schedule.replicas else 1
        own = replica, slice(int(numbers[0]) % replicas, None, replicas)
        forward, backward, weight = times.forward[own], times.backward[own], times.weight[own]
        crossing, back = (np.ascontiguousarray(each[own]) for each in (times.crossing, times.gradient_crossing))
        # The stage before waits for the whole of a BW, but for no W.
        waited_for = 0.0 if any(schedule.pending_weights) else weight
        # ``stage`` cuts lie before this stage, one of them at its own start, and num_stages - stage - 1 behind it.
        backwards = (np.ascontiguousarray(each[:, ::-1]) for each in (crossing, back))
        to_stage, to_start = (
            each + _least_crossings(turned, stage - 1)[:, ::-1]
            for each, turned in zip((crossing, back), backwards, strict=True)
        )
        down, up = (each + _least_crossings(each, self.num_stages - stage - 2) for each in (crossing, back))
        there_and_back = forward + backward + waited_for
        to_stage = forward + to_stage
        from_trained = np.maximum(forward - forward[:, [front]], 0) if front else to_stage
        rest = down + up + there_and_back[:, -1:] - there_and_back
        of_layers, crossings = (forward, backward, weight), (crossing, back)
        seconds = (*of_layers, *crossings, to_stage, from_trained, backward + waited_for + to_start, rest)
        transposed = (np.ascontiguousarray(array.T) for array in seconds)
        waits = _waits(table, row) // replicas
        return _Seen(table.operations[row, :length], numbers // replicas, waits, front, *transposed)

    @cached_property
    def _elsewhere(self) -> FloatArray:
        """With units, infinity for stages with layers of the other part, else 0; (stages, layers + 1, layers + 1)."""
        own, size = self.schedule.encoder_stages, len(self.profile.layers) + 1
        found = np.zeros((self.num_stages, size, size))
        if own:
            border = encoder_layers(self.profile.layers)
            found[:own, :, border + 1 :] = found[own:, :border] = np.inf
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


@dataclass(frozen=True)
class Candidate:
    partition: Partition
    step_seconds: float


@dataclass(frozen=True)
class PartitionSearch:
    method: str
    candidates: tuple[Candidate, ...]
    """Best first, at least one."""
    lower_bound_seconds: float
    """No partition has a faster step."""

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def gap(self) -> float:
        """How far the best candidate may be from the optimum at most, as a share of the lower bound."""
        return self.best.step_seconds / self.lower_bound_seconds - 1 if self.lower_bound_seconds else 0.0


def search_partition(
    profile: ModelProfile,
    loads: Iterable[Load],
    num_stages: int,
    links: Links,
    *,
    method: str = "search",
    mode: Mode = "rendezvous",
    zero_stage: int = 1,
    recompute: Sequence[str] | None = None,
    top: int = 10,
) -> PartitionSearch:
    """Find the partition with the shortest 1F1B step.

    Args:
        profile: What the layers cost.
        loads: One Load per replica, each with one entry per micro-batch.
        num_stages: At most the number of layers.
        links: How fast data moves.
        method: ``"uniform"`` and ``"parameters"``: DeepSpeed's. ``"paper"``: OmniBal's, its best candidates tried in
            the simulator. ``"slowest_stage"``: the slowest stage's time is least, exactly. ``"model"``: optima of a
            closed formula for the makespan. ``"bound"``: the least lower bound. ``"search"``: the results of all
            others, improved by local search in the simulator; so it is never worse than any of them.
        mode: How transfers run, see :func:`omnibal.pipeline.simulate.simulate`.
        zero_stage: 0 or 1, see :class:`omnibal.cluster.Layout`.
        recompute: A level for each layer; by default ``"none"``.
        top: The most candidates to return.

    Raises:
        ConfigError: There are fewer layers than stages, the method is unknown, or the step cannot be simulated.
    """
    if method not in METHODS:
        raise ConfigError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if mode not in get_args(Mode):
        raise ConfigError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    check_num_stages(len(profile.layers), num_stages)
    times = step_times(profile, loads, links, zero_stage=zero_stage, recompute=recompute)
    problem = PartitionProblem(profile, times, one_f_one_b(num_stages, times.forward.shape[1]), mode)
    seconds = _search(problem) if method == "search" else _simulate(problem, _PROPOSALS[method](problem))
    ranking = sorted(seconds, key=lambda boundaries: (seconds[boundaries], boundaries))[: max(1, top)]
    candidates = tuple(Candidate(Partition(boundaries), seconds[boundaries]) for boundaries in ranking)
    return PartitionSearch(method, candidates, problem.lower_bound_seconds)


def _paper(problem: PartitionProblem) -> list[Boundaries]:
    anchor = greedy_anchor(problem.mean.forward, problem.num_stages)
    return best_neighbours(anchor, problem.mean.forward, problem.mean.crossing, radius=_PAPER_RADIUS, top=_PAPER_TOP)


# What each method proposes; the simulator ranks the proposals.
_PROPOSALS: dict[str, Callable[[PartitionProblem], list[Boundaries]]] = {
    "uniform": lambda problem: [Partition.uniform(len(problem.profile.layers), problem.num_stages).boundaries],
    "parameters": lambda problem: [parameter_cut(problem.profile, problem.num_stages).boundaries],
    "paper": _paper,
    "slowest_stage": lambda problem: [least_maximum(problem.mean.stage)[1]],
    "model": lambda problem: model_optima(problem.mean.pace, problem.mean.passing, problem.micro_batches),
    "bound": lambda problem: [problem.least_bound],
}
METHODS = (*_PROPOSALS, "search")  # names of the methods of `search_partition`, from the simplest to the best


def _simulate(problem: PartitionProblem, partitions: list[Boundaries]) -> dict[Boundaries, float]:
    return dict(zip(partitions, problem.evaluate(np.array(partitions)).tolist(), strict=True))


def _search(problem: PartitionProblem) -> dict[Boundaries, float]:
    # All other methods' results are known before the descent begins, so it cannot end above any of them.
    seconds, starts = dict[Boundaries, float](), list[Boundaries]()
    for method, propose in _PROPOSALS.items():
        proposed = _simulate(problem, propose(problem))
        seconds |= proposed
        starts += sorted(proposed, key=proposed.__getitem__)[: _MODEL_STARTS if method == "model" else 1]
    return descend(starts, seconds, problem.evaluate, problem.bound)


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


def _waits(table: Table, row: int) -> IntArray:
    """For each micro-batch of a row the row's last one that ends on the first stage before it begins there, or -1."""
    first = table.stages == 0
    operations, numbers = table.operations[first], table.micro_batches[first]
    places = np.arange(operations.shape[1])
    used, own = places < table.lengths[first, None], table.micro_batches[row, : table.lengths[row]]
    ends = used & np.isin(numbers, own) & (operations != _F) & (operations != _W)
    latest = np.maximum.accumulate(np.where(ends, places, -1), axis=1)
    ended = np.where(latest < 0, -1, np.take_along_axis(numbers, latest.clip(min=0), axis=1))
    waits, begins = np.full(len(table.before), -1), used & (operations == _F)
    waits[numbers[begins]] = ended[begins]
    return waits[np.unique(own)]


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
