"""Event simulation of a pipeline schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from omnibal.cluster import Links
from omnibal.compiled import compiled
from omnibal.cost import FloatArray, IntArray, Load
from omnibal.errors import ConfigError
from omnibal.pipeline.partition import Partition, frozen_stages
from omnibal.pipeline.schedule import Operation, Schedule, Table, one_f_one_b
from omnibal.pipeline.times import (
    check_partition,
    complete_gradients,
    durations_of,
    reduced_at,
    release_of,
    step_times,
    transfers_of,
)
from omnibal.profile.records import ModelProfile

Mode = Literal["rendezvous", "overlap"]


class Event(NamedTuple):
    stage: int
    operation: Operation
    micro_batch: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, eq=False)
class TableRun:
    """When each row of a table ran what; a row is a stage of one replica."""

    table: Table
    """The instructions that were run, transfers among them in mode ``"rendezvous"``."""
    starts: FloatArray
    """Seconds from the start of the step to the start of each instruction, of the shape of the table."""
    ends: FloatArray
    """Seconds from the start of the step to the end of each instruction, of the shape of the table."""

    @property
    def row_names(self) -> list[str]:
        return [f"stage {stage}" for stage in range(len(self.ends))]

    @property
    def stage_rows(self) -> list[list[int]]:
        """The rows of each stage."""
        return [[row] for row in range(len(self.ends))]

    @property
    def stage_busy_seconds(self) -> FloatArray:
        """How long a row of each stage computes on average; shape (stages,)."""
        busy = self.busy_seconds
        return np.array([busy[rows].mean() for rows in self.stage_rows])

    @property
    def finish_seconds(self) -> FloatArray:
        """When each row has done its last instruction; shape (rows,)."""
        finish: FloatArray = self.ends[np.arange(len(self.ends)), self.table.lengths - 1]
        return finish

    @property
    def makespan_seconds(self) -> float:
        """From the first forward to the last backward."""
        return float(self.finish_seconds.max())

    @property
    def busy_seconds(self) -> FloatArray:
        """How long each row computes; shape (rows,)."""
        computes = self.table.operations < Operation.SEND_ACTIVATION
        busy: FloatArray = np.where(computes, self.ends - self.starts, 0).sum(axis=1)
        return busy

    @property
    def idle_seconds(self) -> FloatArray:
        """How long each row does not compute until the last one is done; transfers are idle time; shape (rows,)."""
        return self.makespan_seconds - self.busy_seconds

    @property
    def bubble_ratio(self) -> float:
        """Share of all rows' time that is idle."""
        makespan = self.makespan_seconds
        return float(self.idle_seconds.mean() / makespan) if makespan else 0.0

    @property
    def events(self) -> list[Event]:
        """Every instruction, row by row in the order in which it ran."""
        return [
            Event(stage, Operation(int(self.table.operations[stage, i])), int(self.table.micro_batches[stage, i]),
                  float(self.starts[stage, i]), float(self.ends[stage, i]))
            for stage, length in enumerate(self.table.lengths)
            for i in range(length)
        ]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Simulation(TableRun):
    """When each stage of a pipeline ran what."""

    schedule: Schedule
    """The schedule that was run."""


@dataclass(frozen=True, eq=False)
class StepSimulation:
    """One optimizer step of all replicas.

    Args:
        replicas: The pipeline of each replica.
        reduced_seconds: When each stage has added up its gradients over the replicas; shape (stages,).
        optimizer_seconds: Each stage's optimizer step; shape (stages,).
    """

    replicas: tuple[Simulation, ...]
    reduced_seconds: FloatArray
    optimizer_seconds: FloatArray

    @property
    def slowest_replica(self) -> int:
        return int(np.argmax([replica.makespan_seconds for replica in self.replicas]))

    @property
    def pipeline_seconds(self) -> float:
        """Makespan of the slowest replica."""
        return max(replica.makespan_seconds for replica in self.replicas)

    @property
    def step_seconds(self) -> float:
        """Until the slowest replica, the sums of gradients and the optimizer are done."""
        # A layer's gradients leave when they are complete in every replica. The optimizers start when all sums are
        # there, since they need the norm of all gradients.
        return max(self.pipeline_seconds, float(self.reduced_seconds.max())) + float(self.optimizer_seconds.max())

    @property
    def reduce_seconds(self) -> FloatArray:
        """How long each stage still waits for its gradients' sums when it is done in all replicas; shape (stages,)."""
        finish = np.max([replica.finish_seconds for replica in self.replicas], axis=0)
        waits: FloatArray = np.maximum(self.reduced_seconds - finish, 0)
        return waits

    @property
    def bubble_ratio(self) -> float:
        """Share of all stages' time in all replicas that is idle until the slowest replica is done."""
        busy = np.mean([replica.busy_seconds for replica in self.replicas])
        return float(1 - busy / self.pipeline_seconds) if self.pipeline_seconds else 0.0


def simulate(
    schedule: Schedule,
    forward_seconds: ArrayLike,
    backward_seconds: ArrayLike,
    weight_seconds: ArrayLike | None = None,
    transfer_seconds: ArrayLike | None = None,
    *,
    mode: Mode = "rendezvous",
) -> Simulation:
    """Run a schedule on given durations.

    Args:
        schedule: What each stage runs.
        forward_seconds: Shape (micro-batches, stages).
        backward_seconds: Shape (micro-batches, stages); without the weights' part if ``weight_seconds`` is given.
        weight_seconds: Shape (micro-batches, stages): backward to the weights. ``B`` takes ``backward_seconds``, ``W``
            takes ``weight_seconds``, and ``BW`` their sum.
        transfer_seconds: Shape (micro-batches, stages - 1): what an activation takes from stage ``s`` to ``s + 1``, and
            its gradient back; by default nothing.
        mode: ``"rendezvous"``: transfers block both sides, in DeepSpeed's order (``Schedule.blocking``).
            ``"overlap"``: transfers run beside the computations, one at a time on each link and direction.

    Raises:
        ConfigError: A shape does not fit the schedule, a time is negative or not finite, the mode is unknown, a split
            backward has no ``weight_seconds``, or the schedule deadlocks.

    Example:
        >>> from omnibal.pipeline.schedule import one_f_one_b
        >>> result = simulate(one_f_one_b(2, 4), np.ones((4, 2)), 2 * np.ones((4, 2)))
        >>> result.makespan_seconds, result.idle_seconds, round(result.bubble_ratio, 3)
        (15.0, array([3., 3.]), 0.2)
    """
    durations, transfers = checked_seconds(
        schedule, forward_seconds, backward_seconds, weight_seconds, transfer_seconds, mode
    )
    return run(schedule, durations, transfers, mode)


def simulate_step(
    profile: ModelProfile,
    partition: Partition,
    loads: Iterable[Load],
    links: Links,
    *,
    zero_stage: int = 1,
    recompute: Sequence[str] | None = None,
    schedule: Schedule | None = None,
    mode: Mode = "rendezvous",
    num_replicas: int | None = None,
    head_start_seconds: float = 0.0,
) -> StepSimulation:
    """Predict one optimizer step.

    Args:
        profile: What the layers cost.
        partition: Which layers each stage holds.
        loads: One Load per replica, each with one entry per micro-batch in the order in which they run.
        links: How fast data moves.
        zero_stage: 0, or 1 as in Layout: each replica updates its share of the parameters only.
        recompute: A level for each layer; by default ``"none"``.
        schedule: By default 1F1B. Stages before the first trained layer run it forward only.
        mode: As in :func:`simulate`, for schedules with whole backward passes; others overlap (:func:`mode_of`).
        num_replicas: How many replicas there are, where ``loads`` stand for more of them.
        head_start_seconds: How long updated weights have been on their way when the step begins.

    Raises:
        ConfigError: The partition, the levels or the schedule do not fit, loads are not one per replica and equally
            long, there is no such ZeRO stage under a pipeline, or the schedule deadlocks.
    """
    check_partition(profile, partition)
    times = step_times(profile, loads, links, zero_stage=zero_stage, recompute=recompute, num_replicas=num_replicas)
    simulated, micro_batches, _ = times.forward.shape
    # Replicas do not meet within a step: each pipeline is simulated alone. ``ready`` collects when the last replica
    # has a layer's gradient, from which on the replicas can add it up.
    schedule = schedule or one_f_one_b(partition.num_stages, micro_batches)
    if (schedule.num_stages, schedule.micro_batches) != (partition.num_stages, micro_batches):
        raise ConfigError(
            f"schedule must be for {partition.num_stages} stages and {micro_batches} micro-batches, "
            f"got {schedule.num_stages} and {schedule.micro_batches}"
        )
    boundaries = np.array(partition.boundaries)
    schedule = schedule.with_frozen_front(int(frozen_stages(profile, boundaries)))
    mode = mode_of(schedule, mode)
    replicas, ready = [], np.zeros(len(profile.layers))
    for replica in range(simulated):
        durations, transfers, release = (
            of(times, replica, boundaries) for of in (durations_of, transfers_of, release_of)
        )
        release = (release - head_start_seconds).clip(min=0)
        replicas.append(run(schedule, durations, transfers, mode, release))
        complete_gradients(times, replica, boundaries, replicas[-1].table, replicas[-1].starts, ready)
    reduced = reduced_at(times, boundaries, ready)
    return StepSimulation(tuple(replicas), reduced, np.diff(times.optimizer[boundaries]))


def mode_of(schedule: Schedule, unsplit: Mode) -> Mode:
    """How transfers of a schedule run: beside the computations under our own tables, else as ``unsplit`` says."""
    # The engine runs schedules with a waiting W by its own tables, and all others by DeepSpeed's instructions.
    return "overlap" if any(schedule.pending_weights) else unsplit


def run(
    schedule: Schedule, durations: FloatArray, transfers: FloatArray, mode: Mode, release: FloatArray | None = None
) -> Simulation:
    """:func:`simulate` on checked arrays; ``durations`` are those of F, BW, B and W, (4, micro-batches, stages)."""
    table = schedule.blocking_table if mode == "rendezvous" else schedule.table
    starts, ends = np.zeros(table.operations.shape), np.zeros(table.operations.shape)
    release = np.zeros(schedule.num_stages) if release is None else release
    if mode == "rendezvous":
        has_ended = run_blocking(table, durations, transfers, release, starts, ends)
    else:
        wiring = chain(schedule.num_stages, schedule.micro_batches)
        has_ended = run_overlapped(table, wiring, durations, transfers, release, starts, ends)
    if not has_ended:
        remedy = '; try mode="overlap"' if mode == "rendezvous" else ""
        raise ConfigError(f"a schedule must come to an end, got one that deadlocks in mode {mode!r}{remedy}")
    return Simulation(table, starts, ends, schedule)


def checked_seconds(
    schedule: Schedule,
    forward_seconds: ArrayLike,
    backward_seconds: ArrayLike,
    weight_seconds: ArrayLike | None,
    transfer_seconds: ArrayLike | None,
    mode: Mode,
) -> tuple[FloatArray, FloatArray]:
    """Durations and transfers as :func:`run` takes them, from what :func:`simulate` takes."""
    if mode not in get_args(Mode):
        raise ConfigError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    shape = (schedule.micro_batches, schedule.num_stages)
    forward = _seconds("forward_seconds", forward_seconds, shape)
    backward = _seconds("backward_seconds", backward_seconds, shape)
    if weight_seconds is None and any(schedule.pending_weights):
        raise ConfigError("weight_seconds must be given for a schedule with B and W, got none")
    weight = np.zeros(shape) if weight_seconds is None else _seconds("weight_seconds", weight_seconds, shape)
    cuts = (shape[0], shape[1] - 1)
    transfer = np.zeros(cuts) if transfer_seconds is None else _seconds("transfer_seconds", transfer_seconds, cuts)
    # F, BW, B, W: the order of Operation
    return np.stack([forward, backward + weight, backward, weight]), transfer


def _seconds(name: str, values: ArrayLike, shape: tuple[int, int]) -> FloatArray:
    seconds = np.ascontiguousarray(values, dtype=np.float64)
    if seconds.shape != shape:
        raise ConfigError(f"{name} must have the shape {shape} of the schedule, got {seconds.shape}")
    wrong = ~(np.isfinite(seconds) & (seconds >= 0))
    if wrong.any():
        raise ConfigError(f"{name} must be finite and not negative, got {seconds[wrong][0]:g}")
    return seconds


_F, _BW, _B, _W = int(Operation.F), int(Operation.BW), int(Operation.B), int(Operation.W)
_SEND_ACTIVATION, _RECEIVE_GRADIENT = int(Operation.SEND_ACTIVATION), int(Operation.RECEIVE_GRADIENT)


# Both kernels take a schedule's table and fill in when each instruction starts and ends:
#
#     seconds        seconds of each computation, shape (4, micro-batches, stages), by Operation
#     transfers      seconds between stages s and s + 1, either way, shape (micro-batches, stages - 1)
#     release        when each stage may begin its first forward pass, shape (stages,)
#     starts, ends   output, seconds, shape of the table's operations
#
# They return whether every instruction could run; False means a deadlock. Stages are visited in turn and run as far as
# they can: O(instructions) for pipelines that keep busy, O(instructions × stages) at worst.


@compiled
def run_blocking(
    table: Table, seconds: FloatArray, transfers: FloatArray, release: FloatArray, starts: FloatArray, ends: FloatArray
) -> bool:
    """Run ``Schedule.blocking_table``: the two sides of a transfer wait for each other and are busy until it ends."""
    operations, micro_batches, lengths = table
    num_stages = len(lengths)
    clock = np.zeros(num_stages)  # when a stage has ended its last instruction
    done = np.zeros(num_stages, dtype=np.int64)  # instructions that a stage has run
    # Visit the stages in turn. Each one runs until it meets a transfer whose other side has not come to it; a round in
    # which no stage ran anything is the end of the step, or a deadlock.
    going_on = True
    while going_on:
        going_on = False
        for stage in range(num_stages):
            while done[stage] < lengths[stage]:
                here = done[stage]
                operation, micro_batch = operations[stage, here], micro_batches[stage, here]
                if operation <= _W:  # a computation waits for nobody
                    if operation == _F and micro_batch == 0:
                        clock[stage] = max(clock[stage], release[stage])
                    starts[stage, here] = clock[stage]
                    clock[stage] += seconds[operation, micro_batch, stage]
                    ends[stage, here] = clock[stage]
                    done[stage] += 1
                    going_on = True
                    continue
                # A transfer runs once both stages have come to it. Activations go to the next stage, and their
                # gradients come back from there; the other two operations face the stage before.
                peer = stage + 1 if operation in (_SEND_ACTIVATION, _RECEIVE_GRADIENT) else stage - 1
                there = done[peer]
                if there == lengths[peer] or micro_batches[peer, there] != micro_batch:
                    break
                if operations[peer, there] != operation ^ 1:  # a send and its receive differ in the last bit
                    break
                starts[stage, here] = starts[peer, there] = max(clock[stage], clock[peer])
                clock[stage] = starts[stage, here] + transfers[micro_batch, min(stage, peer)]
                clock[peer] = ends[stage, here] = ends[peer, there] = clock[stage]
                done[stage] += 1
                done[peer] += 1
                going_on = True
    return bool(np.all(done == lengths))


class Wiring(NamedTuple):
    """Which stages neighbour each other, by micro-batch; shape (micro-batches, stages) each, -1 where there is none.

    In a plain pipeline, neighbours are the stages before and behind; where encoder and LLM have unequal numbers of
    replicas (`omnibal.pipeline.units`), the neighbour across their border changes with the micro-batch.
    """

    before: IntArray
    behind: IntArray


@lru_cache(maxsize=64)
def chain(num_stages: int, micro_batches: int) -> Wiring:
    """The wiring of a plain pipeline."""
    stages = np.tile(np.arange(num_stages), (micro_batches, 1))
    wiring = Wiring(stages - 1, np.where(stages + 1 < num_stages, stages + 1, -1))
    for array in wiring:
        array.flags.writeable = False  # cached: shared by all callers
    return wiring


@compiled
def run_overlapped(
    table: Table, wiring: Wiring, seconds: FloatArray, transfers: FloatArray, release: FloatArray, starts: FloatArray,
    ends: FloatArray,
) -> bool:  # fmt: skip
    """Run ``Schedule.table``: transfers start by themselves and cost no stage time; a link carries one at a time.

    ``transfers[m, stage]`` is what micro-batch m takes from a stage to the one behind it, and back.
    """
    operations, micro_batches, lengths = table
    num_stages, num_micro_batches = len(lengths), seconds.shape[1]
    clock = np.zeros(num_stages)  # when a stage has ended its last instruction
    done = np.zeros(num_stages, dtype=np.int64)  # instructions that a stage has run
    # Arrival of a micro-batch's activation and of its gradient at each stage; infinity until its sender has run. The
    # first stage's pixels are there from the beginning, and so is the gradient of the last stage's loss.
    activation, gradient = np.full((2, num_micro_batches, num_stages), np.inf)
    for m in range(num_micro_batches):
        for stage in range(num_stages):
            if wiring.before[m, stage] < 0:
                activation[m, stage] = 0
            if wiring.behind[m, stage] < 0:
                gradient[m, stage] = 0
    down, up = np.zeros(num_stages), np.zeros(num_stages)  # when the links from a stage are free
    # As in run_blocking, but a stage stops only where the input of its next instruction has not been sent.
    going_on = True
    while going_on:
        going_on = False
        for stage in range(num_stages):
            while done[stage] < lengths[stage]:
                here = done[stage]
                operation, m = operations[stage, here], micro_batches[stage, here]
                ready = activation[m, stage] if operation == _F else gradient[m, stage]
                if ready == np.inf:
                    break
                if here == 0:
                    ready = max(ready, release[stage])
                starts[stage, here] = max(clock[stage], ready)
                clock[stage] = ends[stage, here] = starts[stage, here] + seconds[operation, m, stage]
                done[stage] += 1
                going_on = True
                # The result leaves when its stage has computed it and the link has carried all earlier ones.
                before, behind = wiring.before[m, stage], wiring.behind[m, stage]
                if operation == _F and behind >= 0:
                    down[stage] = activation[m, behind] = max(clock[stage], down[stage]) + transfers[m, stage]
                elif operation in (_BW, _B) and before >= 0:
                    up[stage] = gradient[m, before] = max(clock[stage], up[stage]) + transfers[m, before]
    return bool(np.all(done == lengths))
