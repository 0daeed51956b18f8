"""Simulation of a step where encoder and LLM have devices, and numbers of replicas, of their own (units).

Micro-batch m of the LLM's replica d has the number ``n = m · replicas + d`` in the whole step. LLM replica ``n mod
replicas`` runs it, and so does encoder replica ``n mod encoder replicas``: as one number divides the other, either an
encoder serves several LLMs, or several encoders serve one in turns.

    encoder 0   F0 F1 F2 F3 …             encoder 0   F0 F2 …
    LLM 0          F0    F2 …             encoder 1   F1 F3 …
    LLM 1             F1    F3 …          LLM 0          F0 F1 F2 F3 …

Source: Zhang et al., DistTrain, SIGCOMM 2025, section 4, which brokers micro-batches between units; here they follow
from their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from omnibal.cluster import Encoder, Layout, Links
from omnibal.cost import FloatArray, IntArray, Load
from omnibal.errors import ConfigError
from omnibal.families.base import encoder_layers
from omnibal.pipeline.partition import Partition, frozen_stages
from omnibal.pipeline.problem import MeanSeconds, PartitionProblem, differences
from omnibal.pipeline.schedule import SCHEDULES, Operation, Schedule, ScheduleName, Table, as_table, stage_order
from omnibal.pipeline.simulate import TableRun, Wiring, run_overlapped
from omnibal.pipeline.times import (
    StepTimes,
    check_partition,
    complete_gradients,
    durations_of,
    reduced_at,
    release_of,
    step_times,
)
from omnibal.profile.records import ModelProfile


@dataclass(frozen=True, eq=False)
class UnitSimulation(TableRun):
    """One optimizer step of all units; the rows are the stages of all replicas, those of the encoder first."""

    layout: Layout
    reduced_seconds: FloatArray
    """When each stage has added up its gradients over its replicas; shape (stages,)."""
    optimizer_seconds: FloatArray
    """Each stage's optimizer step; shape (stages,)."""

    @property
    def replicas(self) -> tuple[UnitSimulation]:
        """The runs that do not meet within the step, as `StepSimulation` has one for each replica: here all meet."""
        return (self,)

    @property
    def slowest_replica(self) -> int:
        return 0

    @property
    def pipeline_seconds(self) -> float:
        """Until the last row is done."""
        return self.makespan_seconds

    @property
    def step_seconds(self) -> float:
        """Until all gradients are added up and the optimizers are done."""
        return max(self.pipeline_seconds, float(self.reduced_seconds.max())) + float(self.optimizer_seconds.max())

    @property
    def reduce_seconds(self) -> FloatArray:
        """How long each stage still waits for its gradients' sums when all its replicas are done; shape (stages,)."""
        finish = self.finish_seconds
        waits: FloatArray = self.reduced_seconds - [finish[rows].max() for rows in self.stage_rows]
        return waits.clip(min=0)

    @property
    def stage_rows(self) -> list[list[int]]:
        layout, encoder = self.layout, self.layout.encoder
        assert encoder is not None, "units have an encoder of their own"
        own, behind = encoder.num_stages, layout.num_stages - encoder.num_stages
        first = own * encoder.num_replicas
        return [
            *([replica * own + stage for replica in range(encoder.num_replicas)] for stage in range(own)),
            *([first + replica * behind + stage for replica in range(layout.num_replicas)] for stage in range(behind)),
        ]

    @property
    def row_names(self) -> list[str]:
        encoder = self.layout.encoder
        assert encoder is not None, "units have an encoder of their own"
        parts = (
            ("encoder", encoder.num_replicas, encoder.num_stages),
            ("LLM", self.layout.num_replicas, self.layout.num_stages - encoder.num_stages),
        )
        return [
            f"{name} {replica}" + (f", stage {stage}" if stages > 1 else "")
            for name, replicas, stages in parts
            for replica in range(replicas)
            for stage in range(stages)
        ]


def check_units(layout: Layout) -> Encoder:
    """Refuse a layout that gives the encoder no devices of its own, or numbers of replicas that do not divide."""
    encoder = layout.encoder
    if encoder is None or encoder.placement != "own":
        raise ConfigError(f"layout must give the encoder devices of its own, got {layout}")
    if not layout.has_even_units:
        raise ConfigError(
            f"replicas of encoder and LLM must divide each other, got {encoder.num_replicas} and {layout.num_replicas}"
            "; omnibal.pipeline.encoder says the encoder's"
        )
    return encoder


def encoder_schedule(layout: Layout, micro_batches: int) -> Schedule:
    """What the stages of an encoder's replica run, its own micro-batches numbered from 0: 1F1B, as deep as units need.

    ``micro_batches`` are those of an LLM's replica. An encoder that serves k replicas keeps k micro-batches for each
    stage behind it in flight; one of k encoders that serve the same replica keeps a k-th.
    """
    encoder = check_units(layout)
    behind = layout.num_stages - encoder.num_stages
    served = -(-behind * layout.num_replicas // encoder.num_replicas)
    own = -(-micro_batches * layout.num_replicas // encoder.num_replicas)
    depths = [served + encoder.num_stages - stage for stage in range(encoder.num_stages)]
    return Schedule.of_orders(tuple(stage_order(depth, own) for depth in depths), own)


@lru_cache(maxsize=64)
def unit_schedule(layout: Layout, micro_batches: int, schedule: ScheduleName) -> Schedule:
    """What all stages run in one step of units, each the micro-batches of its own replica.

    Args:
        layout: ``layout.encoder`` has devices of its own.
        micro_batches: Micro-batches of one of the LLM's replicas in a step.
        schedule: What the LLM's stages run; the encoder's run `encoder_schedule`.

    Raises:
        ConfigError: Neither number of replicas divides the other, or the encoder's cannot share the step alike.

    Example:
        >>> from omnibal.cluster import Encoder
        >>> print(unit_schedule(Layout(2, 2, encoder=Encoder(num_stages=1, num_replicas=1)), 2, "1f1b"))
        F0 F1 F2 BW0 F3 BW1 BW2 BW3
        F0 BW0 F1 BW1
    """
    encoder, step = encoder_schedule(layout, micro_batches), micro_batches * layout.num_replicas
    own = layout.shape(0)[0]
    if step % own:
        raise ConfigError(
            f"omnibal.pipeline.encoder.num_replicas must divide the {step} packs of a step (micro-batches "
            f"{micro_batches}, replicas of the language model {layout.num_replicas}), got {own}"
        )
    behind = SCHEDULES[schedule](layout.num_stages - encoder.num_stages, micro_batches)
    replicas = tuple(layout.shape(stage)[0] for stage in range(layout.num_stages))
    return Schedule.of_orders(encoder.stages + behind.stages, micro_batches, replicas)


def schedule_of(layout: Layout, micro_batches: int, schedule: ScheduleName) -> Schedule:
    """What all stages of a layout run in one step: `unit_schedule` where the encoder has devices of its own."""
    if layout.has_units:
        return unit_schedule(layout, micro_batches, schedule)
    return SCHEDULES[schedule](layout.num_stages, micro_batches)


def simulate_units(
    profile: ModelProfile,
    partition: Partition,
    loads: Iterable[Load],
    layout: Layout,
    links: Links,
    *,
    encoder_links: Links | None = None,
    recompute: Sequence[str] | None = None,
    schedule: ScheduleName = "1f1b",
) -> UnitSimulation:
    """Predict one optimizer step; transfers run beside the computations. Other arguments are those of `simulate_step`.

    Args:
        partition: The stages of the encoder, then those of the LLM.
        loads: One Load per replica of the LLM.
        links: Between stages, and between the LLM's replicas.
        encoder_links: Between the encoder's replicas; by default as ``links``.
        schedule: What the LLM's stages run.

    Raises:
        ConfigError: Partition, loads and layout do not fit together, or neither number of replicas divides the other.
    """
    check_partition(profile, partition)
    encoder = check_units(layout)
    load = Load.stack(loads)
    if load.shape[0] != layout.num_replicas or partition.num_stages != layout.num_stages:
        raise ConfigError(
            f"layout must have the loads' {load.shape[0]} replicas and the partition's {partition.num_stages} stages, "
            f"got {layout}"
        )
    border = partition.boundaries[encoder.num_stages]
    times = unit_times(
        profile, [numbered(load)], layout, border, links, encoder_links=encoder_links, recompute=recompute
    )
    return _run(profile, times, np.array(partition.boundaries), layout, schedule)


def numbered(load: Load) -> Load:
    """The micro-batches of a step, (replicas, micro-batches), in the order of their numbers."""
    replicas, micro_batches = load.shape
    numbers = np.arange(replicas * micro_batches)
    return load[numbers % replicas, numbers // replicas]


def unit_times(
    profile: ModelProfile,
    loads: Iterable[Load],
    layout: Layout,
    border: int,
    links: Links,
    *,
    encoder_links: Links | None = None,
    recompute: Sequence[str] | None = None,
) -> StepTimes:
    """Seconds of every layer, where gradients of the layers before ``border`` are summed over the encoder's replicas.

    ``loads`` are `numbered`, one Load for each step; other arguments are those of `simulate_units`.
    """
    loads = tuple(loads)
    encoder, language = (
        step_times(
            profile, loads, linked, zero_stage=layout.zero_stage, recompute=recompute,
            num_replicas=layout.shape(stage)[0],
        )
        for linked, stage in ((encoder_links or links, 0), (links, layout.num_stages - 1))
    )  # fmt: skip

    def joined(name: str) -> FloatArray:
        first, behind = getattr(encoder, name), getattr(language, name)
        added: FloatArray = np.concatenate([first[: border + 1], first[border] + behind[border + 1 :] - behind[border]])
        return added

    def crossing(name: str) -> FloatArray:
        parts = getattr(encoder, name)[..., : border + 1], getattr(language, name)[..., border + 1 :]
        return np.concatenate(parts, axis=-1)

    return language._replace(
        **{name: joined(name) for name in ("reduce", "gather", "optimizer")},
        **{name: crossing(name) for name in ("crossing", "gradient_crossing")},
    )


@dataclass(frozen=True, eq=False)
class UnitProblem(PartitionProblem):
    """Cut encoder and LLM, each on devices of its own, into the stages of ``schedule``."""

    layout: Layout
    schedule_name: ScheduleName

    @classmethod
    def of(cls, profile: ModelProfile, times: StepTimes, layout: Layout, schedule: ScheduleName) -> UnitProblem:
        """``times`` are those of `unit_times`, of one step or of several steps."""
        table = unit_schedule(layout, times.forward.shape[1] // layout.num_replicas, schedule)
        return cls(profile, times, table, "overlap", layout, schedule)

    def evaluate(self, partitions: IntArray) -> FloatArray:
        runs = (_run(self.profile, self.times, row, self.layout, self.schedule_name) for row in partitions)
        return np.array([run.step_seconds for run in runs])

    @cached_property
    def _stage_bounds(self) -> FloatArray:
        # A replica's stage waits until its first micro-batch has passed all layers before it, and computes all of its
        # micro-batches; under 1F1B the last one's gradient then passes all layers before it, too. In between, each
        # micro-batch passes all layers behind the stage, there and back: with few of them the stage waits for that.
        times, size = self.times, len(self.profile.layers) + 1
        forward, back, weight = times.forward[0], times.backward[0], times.weight[0]
        seconds = {Operation.F: forward, Operation.BW: back + weight, Operation.B: back, Operation.W: weight}
        splits, result = any(self.schedule.pending_weights), np.zeros((self.num_stages, size, size))
        passing = forward + (back if splits else back + weight)
        behind = passing[:, -1:] - passing + times.crossing[0] + times.gradient_crossing[0]
        for stage, order in enumerate(self.schedule.stages):
            replicas = self.layout.shape(stage)[0]
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
        return result + differences(self.times.optimizer) + self._elsewhere

    @cached_property
    def mean(self) -> MeanSeconds:
        """What an average micro-batch takes; infinity for stages with layers of the other part."""
        found = super().mean
        return found._replace(stage=found.stage + self._elsewhere, pace=found.pace + self._elsewhere)

    @cached_property
    def _elsewhere(self) -> FloatArray:
        """Infinity for stages with layers of the other part, else 0; shape (stages, layers + 1, layers + 1)."""
        border, size = encoder_layers(self.profile.layers), len(self.profile.layers) + 1
        found = np.full((self.num_stages, size, size), np.inf)
        found[: self.layout.encoder_stages, : border + 1, : border + 1] = 0
        found[self.layout.encoder_stages :, border:, border:] = 0
        return found


class _Wired(NamedTuple):
    """Rows of all replicas, those of the encoder first, and what each of them is."""

    table: Table
    wiring: Wiring
    stages: IntArray
    replicas: IntArray


@lru_cache(maxsize=64)
def _wire(layout: Layout, micro_batches: int, schedule: ScheduleName, frozen: int) -> _Wired:
    """Who runs what, and who neighbours whom for each number of a micro-batch; the first stages may be frozen."""
    stages = unit_schedule(layout, micro_batches, schedule).with_frozen_front(frozen).stages
    own, count = layout.encoder_stages, micro_batches * layout.num_replicas
    parts = (range(own), layout.shape(0)[0]), (range(own, layout.num_stages), layout.num_replicas)
    places = [(stage, replica) for part, replicas in parts for replica in range(replicas) for stage in part]
    row_of = np.zeros((layout.num_stages, max(replicas for _, replicas in parts)), dtype=np.int64)
    row_of[tuple(np.transpose(places))] = np.arange(len(places))
    # The replica's m-th micro-batch has the number n = m · replicas + replica.
    of_stage, (row_stages, row_replicas) = as_table(stages), np.transpose(places)
    replicas_of = np.array([layout.shape(stage)[0] for stage in range(layout.num_stages)])
    numbers = of_stage.micro_batches[row_stages] * replicas_of[row_stages, None] + row_replicas[:, None]
    table = Table(of_stage.operations[row_stages], numbers.astype(np.int32), of_stage.lengths[row_stages])
    before, behind = np.full((2, count, len(places)), -1, dtype=np.int64)
    every = np.arange(count)
    paths = row_of[np.arange(layout.num_stages)[:, None], every % replicas_of[:, None]]  # (stages, numbers)
    for above, below in pairwise(paths):
        before[every, below], behind[every, above] = above, below
    before.flags.writeable = behind.flags.writeable = False  # as those of `chain`, so that loops are compiled once
    return _Wired(table, Wiring(before, behind), row_stages, row_replicas)


def _run(
    profile: ModelProfile, times: StepTimes, boundaries: IntArray, layout: Layout, schedule: ScheduleName
) -> UnitSimulation:
    """One step under its `unit_times`."""
    frozen = int(frozen_stages(profile, boundaries))
    micro_batches = times.forward.shape[1] // layout.num_replicas
    table, wiring, stages, replicas = _wire(layout, micro_batches, schedule, frozen)
    seconds = np.take(durations_of(times, 0, boundaries), stages, axis=2)
    transfers = np.take(times.crossing[0][:, boundaries[1:]], stages, axis=1)  # nothing behind the last layer
    # A replica's first micro-batch has its own number.
    firsts = np.stack([release_of(times, 0, boundaries, first) for first in range(replicas.max() + 1)])
    release = firsts[replicas, stages]
    starts, ends = np.zeros(table.operations.shape), np.zeros(table.operations.shape)
    if not run_overlapped(table, wiring, seconds, transfers, release, starts, ends):
        raise ConfigError(f"units must come to an end, got a deadlock of {layout} under {schedule}")
    # A layer's gradient is complete when the last replica of its own part has it.
    ready, own = np.zeros(len(profile.layers)), layout.encoder_stages
    for row in np.flatnonzero((stages == 0) | (stages == own)):
        first, last = (0, own) if stages[row] == 0 else (own, layout.num_stages)
        rows = slice(row, row + last - first)
        own_table = Table(table.operations[rows], table.micro_batches[rows], table.lengths[rows])
        complete_gradients(times, 0, boundaries[first : last + 1], own_table, starts[rows], ready)
    reduced, optimizer = reduced_at(times, boundaries, ready), np.diff(times.optimizer[boundaries])
    return UnitSimulation(table, starts, ends, layout, reduced, optimizer)
