"""Simulated pipelines: a schedule on given durations, and whole steps of a partition under any layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn, get_args

import numpy as np
from numpy.typing import ArrayLike

from omnibal.cluster import Layout, Links
from omnibal.cost import FloatArray, Load, finite_sizes
from omnibal.errors import ConfigError
from omnibal.pipeline.events import run_steps, run_table
from omnibal.pipeline.partition import Partition, frozen_stages, language_partition
from omnibal.pipeline.schedule import Operation, Schedule, Table, check_units, schedule_of
from omnibal.pipeline.times import (
    IMAGES,
    EncoderWork,
    StepTimes,
    Unit,
    numbered,
    split_profile,
    stacked,
    step_times,
)
from omnibal.profile.records import ModelProfile

Mode = Literal["rendezvous", "overlap"]


class Event(NamedTuple):
    stage: int  # the row, where all replicas of units are simulated as one
    operation: Operation
    micro_batch: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, eq=False)
class Simulation:
    """When each row of a table ran what; a row is a stage, with units a stage of one of the replicas."""

    table: Table
    """The instructions that were run, transfers among them in mode ``"rendezvous"``."""
    starts: FloatArray
    """Seconds from the start of the step to the start of each instruction, of the shape of the table."""
    ends: FloatArray
    """Seconds from the start of the step to the end of each instruction, of the shape of the table."""
    encoder_stages: int = 0
    """With units, how many of the first stages are the encoder's."""

    @property
    def row_names(self) -> list[str]:
        """Such as ``stage 1``, or with units ``encoder 0`` and ``LLM 1, stage 0``."""
        own, behind = self.encoder_stages, int(self.table.stages.max()) + 1 - self.encoder_stages
        if not own:
            return [f"stage {stage}" for stage in self.table.stages]
        names, seen = list[str](), Counter[int]()
        for stage in self.table.stages.tolist():
            part, number, count = ("encoder", stage, own) if stage < own else ("LLM", stage - own, behind)
            names.append(f"{part} {seen[stage]}" + (f", stage {number}" if count > 1 else ""))
            seen[stage] += 1
        return names

    @property
    def stage_rows(self) -> list[list[int]]:
        stages = self.table.stages
        return [np.flatnonzero(stages == stage).tolist() for stage in range(stages.max() + 1)]

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
        columns = self.table.operations, self.table.micro_batches, self.starts, self.ends
        return [
            Event(stage, Operation(operation), micro_batch, start, end)
            for stage, length in enumerate(self.table.lengths)
            for operation, micro_batch, start, end in zip(*(c[stage, :length].tolist() for c in columns), strict=True)
        ]


@dataclass(frozen=True, eq=False)
class StepSimulation:
    """One optimizer step of all replicas.

    Args:
        replicas: The pipeline of each replica; with units, whose replicas meet, one simulation of all.
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
        rows = self.replicas[0].stage_rows
        finish = np.max([replica.finish_seconds for replica in self.replicas], axis=0)
        waits: FloatArray = self.reduced_seconds - np.array([finish[of_stage].max() for of_stage in rows])
        return waits.clip(min=0)

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
    if len(set(schedule.replicas)) > 1:
        raise ConfigError(f"replicas of a schedule must be as many on every stage, got {schedule.replicas}")
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
    durations = np.stack([forward, backward + weight, backward, weight])  # F, BW, B, W: the order of Operation
    table = table_of(schedule, mode)
    starts, ends = np.zeros((2, *table.operations.shape))
    transfers, release = np.pad(transfer, ((0, 0), (0, 1))), np.zeros(len(table.lengths))
    if not run_table(table, mode == "rendezvous", durations, transfers, release, starts, ends):
        _refuse_deadlock(mode)
    return Simulation(table, starts, ends)


def simulate_step(
    profile: ModelProfile,
    partition: Partition,
    loads: Iterable[Load],
    links: Links,
    *,
    layout: Layout | None = None,
    encoder_links: Links | None = None,
    zero_stage: int = 1,
    recompute: Sequence[str] | None = None,
    schedule: Schedule | None = None,
    mode: Mode = "rendezvous",
) -> StepSimulation:
    """Predict one optimizer step.

    Args:
        profile: Costs of the layers.
        partition: Which layers each stage holds. The first stage of the LLM counts the layers of a spread encoder.
        loads: One Load per replica (of the LLM), each with one entry per micro-batch in the order in which they run.
        links: How fast data moves between stages, and between replicas (of the LLM).
        layout: Where the encoder runs; by default in the pipeline's first stages.
        encoder_links: Between replicas of units' encoder, or all devices of a spread one; by default as ``links``.
        zero_stage: 0, or 1 as in Layout: each replica updates its share of the parameters only. A layout says its own.
        recompute: A level for each layer; by default ``"none"``.
        schedule: By default 1F1B. Stages before the first trained layer run it forward only.
        mode: As in :func:`simulate`; units and schedules with split backward passes overlap.

    Raises:
        ConfigError: The partition, the levels, the layout or the schedule do not fit, loads are not one per replica and
            equally long, there is no such ZeRO stage under a pipeline, or the schedule deadlocks.
    """
    count, load = len(profile.layers), stacked(loads)
    if partition.num_layers != count:
        raise ConfigError(f"partition must be of the profile's {count} layers, got one of {partition.num_layers}")
    layout = Layout(partition.num_stages, len(load), zero_stage=zero_stage) if layout is None else layout
    if (len(load), partition.num_stages) != (layout.num_replicas, layout.num_stages):
        raise ConfigError(
            f"layout must have the loads' {len(load)} replicas and the partition's {partition.num_stages} stages, "
            f"got {layout}"
        )
    schedule = schedule or schedule_of(layout, load.shape[1], "1f1b")
    if (schedule.num_stages, schedule.micro_batches) != (partition.num_stages, load.shape[1]):
        raise ConfigError(
            f"schedule must be for {partition.num_stages} stages and {load.shape[1]} micro-batches, "
            f"got {schedule.num_stages} and {schedule.micro_batches}"
        )
    mode = mode_of(schedule, mode)
    if layout.is_spread:
        behind, own = language_partition(profile.layers, partition), encoder_links or links
        return _simulate_spread(profile, behind, load, layout, (own, links), recompute, schedule, mode)
    unit, border = None, partition.boundaries[layout.encoder_stages]
    if layout.encoder is not None:
        check_units(layout)
        load = Load.stack([numbered(load)])
        unit = Unit(border, layout.encoder.num_replicas, encoder_links or links)
    zero, replicas = layout.zero_stage, layout.num_replicas
    times = step_times(profile, load, links, zero_stage=zero, recompute=recompute, num_replicas=replicas, unit=unit)
    return _run_step(profile, times, partition, schedule, mode)


def _simulate_spread(
    profile: ModelProfile,
    partition: Partition,
    load: Load,
    layout: Layout,
    links: tuple[Links, Links],
    recompute: Sequence[str] | None,
    schedule: Schedule,
    mode: Mode,
) -> StepSimulation:
    """The LLM's pipeline, cut by ``partition``, between the two passes of an encoder that is on all devices."""
    # `links` are those of the encoder and of the LLM.
    encoder, language = split_profile(profile)
    border = len(encoder.layers)
    levels = (None, None) if recompute is None else (recompute[:border], recompute[border:])
    work = EncoderWork.of(encoder, load, layout, links[0], levels[0])
    # Before the pipeline, all devices together; the LLM's weights come meanwhile, behind the encoder's.
    encodes = max(work.exchanges.pixels, work.release_seconds)
    encoded = encodes + work.forward_seconds
    begins = encoded + work.exchanges.features
    times = step_times(language, load, links[1], zero_stage=layout.zero_stage, recompute=levels[1])
    step = _run_step(language, times, partition, schedule, mode, head_start=begins - float(work.times.gather[-1]))
    # Behind it, all devices together again.
    passes, reduced = [(Operation.F, encodes, encoded)], begins + step.reduced_seconds
    if encoder.frozen_front < border:
        backward = begins + step.pipeline_seconds + work.exchanges.gradients
        passes.append((Operation.BW, backward, backward + work.backward_seconds))
        reduced = np.maximum(reduced, work.reduced_seconds(float(reduced.max()), backward))
    replicas = tuple(_with_images(replica, begins, passes) for replica in step.replicas)
    return StepSimulation(replicas, reduced, step.optimizer_seconds + float(work.times.optimizer[-1]))


def _with_images(simulation: Simulation, begins: float, passes: Sequence[tuple[Operation, float, float]]) -> Simulation:
    """A replica whose pipeline begins so late, with the encoder's passes (operation, start, end) on each stage."""
    # Their micro-batch is `IMAGES`.
    table, lengths = simulation.table, simulation.table.lengths
    rows, columns = table.operations.shape
    shape, inner = (rows, columns + len(passes)), np.s_[:, 1 : columns + 1]
    starts, ends = np.zeros(shape), np.zeros(shape)
    operations, micro_batches = np.zeros(shape, dtype=np.int8), np.zeros(shape, dtype=np.int32)
    operations[inner], micro_batches[inner] = table.operations, table.micro_batches
    starts[inner], ends[inner] = simulation.starts + begins, simulation.ends + begins
    # The first pass goes before, the second one behind what each row runs.
    for place, (operation, start, end) in zip((np.zeros(rows, dtype=int), lengths + 1), passes, strict=False):
        here = np.arange(rows), place
        operations[here], micro_batches[here], starts[here], ends[here] = operation, IMAGES, start, end
    wider = table._replace(operations=operations, micro_batches=micro_batches, lengths=lengths + len(passes))
    return Simulation(wider, starts, ends)


def _run_step(
    profile: ModelProfile,
    times: StepTimes,
    partition: Partition,
    schedule: Schedule,
    mode: Mode,
    head_start: float = 0.0,
) -> StepSimulation:
    boundaries = np.array(partition.boundaries)
    schedule = schedule.with_frozen_front(int(frozen_stages(profile, boundaries)))
    table = table_of(schedule, mode)
    starts, ends = np.zeros((2, len(times.forward), *table.operations.shape))
    reduced = np.zeros(schedule.num_stages)
    if not len(run_steps(times, table, boundaries, 1, mode == "rendezvous", head_start, starts, ends, reduced)):
        _refuse_deadlock(mode)
    replicas = tuple(Simulation(table, *each, schedule.encoder_stages) for each in zip(starts, ends, strict=True))
    return StepSimulation(replicas, reduced, np.diff(times.optimizer[boundaries]))


def table_of(schedule: Schedule, mode: Mode) -> Table:
    return schedule.blocking_table if mode == "rendezvous" else schedule.table


def mode_of(schedule: Schedule, unsplit: Mode) -> Mode:
    """How transfers of a schedule run: beside the computations under our own tables, else as ``unsplit`` says."""
    # The engine runs units and schedules with a waiting W by its own tables, all others by DeepSpeed's instructions.
    return "overlap" if schedule.replicas or any(schedule.pending_weights) else unsplit


def _refuse_deadlock(mode: Mode) -> NoReturn:
    remedy = '; try mode="overlap"' if mode == "rendezvous" else ""
    raise ConfigError(f"a schedule must come to an end, got one that deadlocks in mode {mode!r}{remedy}")


def _seconds(name: str, values: ArrayLike, shape: tuple[int, int]) -> FloatArray:
    seconds = finite_sizes(name, values)
    if seconds.shape != shape:
        raise ConfigError(f"{name} must have the shape {shape} of the schedule, got {seconds.shape}")
    return seconds
