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
from functools import lru_cache

import numpy as np

from omnibal.cluster import Layout, Links
from omnibal.cost import FloatArray, IntArray, Load
from omnibal.errors import ConfigError
from omnibal.pipeline.partition import Partition, frozen_stages
from omnibal.pipeline.schedule import SCHEDULES, Instruction, Schedule, ScheduleName, Table, as_table, stage_order
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


def check_units(layout: Layout) -> None:
    """Refuse a layout that gives the encoder no devices of its own, or numbers of replicas that do not divide."""
    encoder = layout.encoder
    if encoder is None or encoder.placement != "own":
        raise ConfigError(f"layout must give the encoder devices of its own, got {layout}")
    fewer, more = sorted((encoder.num_replicas, layout.num_replicas))
    if more % fewer:
        raise ConfigError(
            f"replicas of encoder and LLM must divide each other, got {encoder.num_replicas} and {layout.num_replicas}"
            "; omnibal.pipeline.encoder says the encoder's"
        )


def encoder_schedule(layout: Layout, micro_batches: int) -> Schedule:
    """What the stages of an encoder's replica run, its own micro-batches numbered from 0: 1F1B, as deep as units need.

    ``micro_batches`` are those of an LLM's replica. An encoder that serves k replicas keeps k micro-batches for each
    stage behind it in flight; one of k encoders that serve the same replica keeps a k-th.
    """
    check_units(layout)
    encoder = layout.encoder
    assert encoder is not None, "checked above"
    behind = layout.num_stages - encoder.num_stages
    served = -(-behind * layout.num_replicas // encoder.num_replicas)
    own = -(-micro_batches * layout.num_replicas // encoder.num_replicas)
    depths = [served + encoder.num_stages - stage for stage in range(encoder.num_stages)]
    return Schedule(tuple(stage_order(depth, own) for depth in depths), own)


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
    return Schedule(encoder.stages + behind.stages, micro_batches, replicas)


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
    """Predict one optimizer step; transfers run beside the computations.

    Args:
        profile: What the layers cost, each on as many tensor ranks as its module has.
        partition: The stages of the encoder, then those of the LLM.
        loads: One Load per replica of the LLM, each with one entry per micro-batch in the order in which they run.
        layout: ``layout.encoder`` says which stages are the encoder's, and how many replicas there are.
        links: Between stages, and between the LLM's replicas.
        encoder_links: Between the encoder's replicas; by default as ``links``.
        recompute: A level for each layer; by default ``"none"``.
        schedule: What the LLM's stages run.

    Raises:
        ConfigError: Partition, loads and layout do not fit together, or neither number of replicas divides the other.
    """
    check_partition(profile, partition)
    check_units(layout)
    encoder = layout.encoder
    assert encoder is not None, "checked above"
    load = Load.stack(loads)
    if load.shape[0] != layout.num_replicas or partition.num_stages != layout.num_stages:
        raise ConfigError(
            f"layout must have the loads' {load.shape[0]} replicas and the partition's {partition.num_stages} stages, "
            f"got {layout}"
        )
    if load.shape[0] * load.shape[1] < encoder.num_replicas:
        raise ConfigError(
            f"micro-batches must be at least one for each of {encoder.num_replicas} encoder replicas, "
            f"got {load.shape[0] * load.shape[1]}"
        )
    # All micro-batches in the order of their numbers, as if they were those of one replica.
    numbers = np.arange(load.shape[0] * load.shape[1])
    numbered = load[numbers % load.shape[0], numbers // load.shape[0]]
    boundaries, border = np.array(partition.boundaries), encoder.num_stages
    frozen = int(frozen_stages(profile, boundaries))
    parts = [
        _Part(
            step_times(
                profile, [numbered], linked, zero_stage=layout.zero_stage, recompute=recompute, num_replicas=replicas
            ),
            boundaries[first : last + 1],
            replicas,
        )
        for replicas, linked, first, last in (
            (encoder.num_replicas, encoder_links or links, 0, border),
            (layout.num_replicas, links, border, partition.num_stages),
        )
    ]
    micro_batches = load.shape[1]
    own = encoder_schedule(layout, micro_batches).stages
    behind = SCHEDULES[schedule](layout.num_stages - border, micro_batches).stages
    table, wiring = _wire((_frozen(own, frozen), _frozen(behind, frozen - border)), *_shape(parts, micro_batches))
    seconds, transfers = _per_row(parts, len(table.lengths))
    # A replica's first micro-batch has its own number.
    release = np.concatenate(
        [release_of(part.times, 0, part.boundaries, first) for part in parts for first in range(part.replicas)]
    )
    starts, ends = np.zeros(table.operations.shape), np.zeros(table.operations.shape)
    if not run_overlapped(table, wiring, seconds, transfers, release, starts, ends):
        raise ConfigError(f"units must come to an end, got a deadlock of {layout} under {schedule}")
    # A layer's gradient is complete when the last replica of its own part has it.
    ready, row = np.zeros(len(profile.layers)), 0
    for part in parts:
        for _ in range(part.replicas):
            rows = slice(row, row + part.num_stages)
            own_table = Table(table.operations[rows], table.micro_batches[rows], table.lengths[rows])
            complete_gradients(part.times, 0, part.boundaries, own_table, starts[rows], ready)
            row += part.num_stages
    reduced = np.concatenate([reduced_at(part.times, part.boundaries, ready) for part in parts])
    optimizer = np.concatenate([np.diff(part.times.optimizer[part.boundaries]) for part in parts])
    return UnitSimulation(table, starts, ends, layout, reduced, optimizer)


@dataclass(frozen=True, eq=False)
class _Part:
    """Encoder or LLM."""

    times: StepTimes  # of all micro-batches by their numbers, as of one replica
    boundaries: IntArray  # of its own stages, in layers of the whole model
    replicas: int

    @property
    def num_stages(self) -> int:
        return len(self.boundaries) - 1


def _shape(parts: Sequence[_Part], micro_batches: int) -> tuple[tuple[int, int], int]:
    replicas = (parts[0].replicas, parts[1].replicas)
    return replicas, micro_batches * replicas[1]


def _frozen(stages: Sequence[tuple[Instruction, ...]], count: int) -> tuple[tuple[Instruction, ...], ...]:
    """The first ``count`` stages run forward only: no gradient comes back to them."""
    return tuple(
        tuple(entry for entry in stage if place >= count or entry.operation == 0) for place, stage in enumerate(stages)
    )


@lru_cache(maxsize=16)
def _wire(
    stages: tuple[tuple[tuple[Instruction, ...], ...], ...], replicas: tuple[int, int], count: int
) -> tuple[Table, Wiring]:
    """Rows of all replicas of both parts, and who neighbours whom for each of ``count`` numbered micro-batches."""
    rows: list[list[Instruction]] = []
    # first[part, replica]: the row of its first stage.
    first = [np.zeros(number, dtype=np.int64) for number in replicas]
    for part, number in enumerate(replicas):
        for replica in range(number):
            first[part][replica] = len(rows)
            for stage in stages[part]:
                # The replica's m-th micro-batch has the number m · replicas + replica; the last ones may not exist.
                numbered = [Instruction(entry.operation, entry.micro_batch * number + replica) for entry in stage]
                rows.append([entry for entry in numbered if entry.micro_batch < count])
    before, behind = np.full((2, count, len(rows)), -1, dtype=np.int64)
    for n in range(count):
        path = [first[part][n % replicas[part]] + stage for part in range(2) for stage in range(len(stages[part]))]
        before[n, path[1:]], behind[n, path[:-1]] = path[:-1], path[1:]
    before.flags.writeable = behind.flags.writeable = False  # as those of `chain`, so that loops are compiled once
    return as_table(rows), Wiring(before, behind)


def _per_row(parts: Sequence[_Part], num_rows: int) -> tuple[FloatArray, FloatArray]:
    """Seconds of each row's computations, (4, micro-batches, rows), and of what it sends on, (micro-batches, rows)."""
    seconds, transfers = [], []
    for part in parts:
        durations = durations_of(part.times, 0, part.boundaries)
        crossing = part.times.crossing[0][:, part.boundaries[1:]]  # nothing behind the last layer
        seconds += [durations] * part.replicas
        transfers += [crossing] * part.replicas
    return np.concatenate(seconds, axis=2), np.concatenate(transfers, axis=1)
