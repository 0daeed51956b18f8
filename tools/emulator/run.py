"""An emulated cluster: DeepSpeed's real engine on as many local processes, whose layers sleep in place of computing."""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from omnibal.cluster import Layout
from omnibal.cost import FloatArray, Load
from omnibal.errors import ConfigError, OmnibalError
from omnibal.memory.footprint import Footprint, SpreadFootprint
from omnibal.pipeline.partition import Partition, frozen_stages, language_partition
from omnibal.pipeline.schedule import Operation, Schedule, Table
from omnibal.pipeline.simulate import Simulation, StepSimulation
from omnibal.pipeline.times import EncoderWork, split_profile
from omnibal.plan import Plan
from omnibal.processes import reason_of
from omnibal.profile.records import ModelProfile

# Time is scaled so that an average forward pass of a stage sleeps so long: DeepSpeed's own work is then a few percent
# of it where eight processes share a core.
LEAST_SLEEP_SECONDS: Final = 0.1
SIZE_SCALE: Final = 1e-3  # tensors are sent at this share of their size, and the links' time is slept
MOST_PROCESSES: Final = 256  # each is a whole Python with torch and DeepSpeed
TASK_FILE, FAILURE_FILE = "task.pickle", "failure.pickle"


@dataclass(frozen=True)
class EmulationTask:
    """A run to be emulated."""

    profile: ModelProfile
    plan: Plan  # with the cluster that is emulated
    steps: tuple[tuple[Load, ...], ...]  # for each step a Load per replica, with an entry per micro-batch
    time_scale: float | None = None  # seconds slept for each second of the cluster; None chooses

    def __post_init__(self) -> None:
        shapes = {Load.stack(step).shape for step in self.steps}
        wanted = (self.plan.layout.num_replicas, self.plan.micro_batches)
        if shapes != {wanted}:
            raise ConfigError(
                f"steps must be at least one, of {wanted} replicas and micro-batches, got {sorted(shapes)}"
            )
        if self.plan.layout.is_spread and self.plan.layout.num_tensor > 1:
            raise ConfigError(f"num_tensor must be 1 where the encoder is spread, got {self.plan.layout.num_tensor}")
        self.plan.known_cluster.check(self.plan.layout)
        if self.num_processes > MOST_PROCESSES:
            raise ConfigError(
                f"stages x replicas must be at most {MOST_PROCESSES} processes of one machine, got {self.num_processes}"
            )
        if self.time_scale is not None and not 0 < self.time_scale < inf:
            raise ConfigError(f"time_scale must be positive and finite, got {self.time_scale}")

    @property
    def ranks(self) -> Layout:
        # A process stands for all tensor ranks of a replica.
        own = self.plan.layout.encoder
        encoder = None if own is None else replace(own, num_tensor=1)
        return replace(self.plan.layout, num_tensor=1, encoder=encoder)

    @property
    def num_processes(self) -> int:
        return self.ranks.num_devices

    @property
    def budget_bytes(self) -> tuple[int, ...]:
        return self.plan.known_cluster.stage_memory_bytes(self.plan.layout)

    @cached_property
    def pipelined(self) -> ModelProfile:
        """The layers of the pipeline: behind a spread encoder the LLM's."""
        return split_profile(self.profile)[1] if self.plan.layout.is_spread else self.profile

    @cached_property
    def partition(self) -> Partition:
        """Of `pipelined`."""
        own = self.plan.partition
        return language_partition(self.profile.layers, own) if self.plan.layout.is_spread else own

    @property
    def num_spread(self) -> int:
        """Layers of a spread encoder, which come first on every device; 0 without one."""
        return len(self.profile.layers) - len(self.pipelined.layers)

    @cached_property
    def schedule(self) -> Schedule:
        frozen = int(frozen_stages(self.pipelined, np.array(self.partition.boundaries)))
        return self.plan.make_schedule().with_frozen_front(frozen)

    @cached_property
    def predicted(self) -> tuple[StepSimulation, ...]:
        return tuple(self.plan.simulate(self.profile, loads) for loads in self.steps)

    @property
    def scale(self) -> float:
        return self.least_scale if self.time_scale is None else self.time_scale

    @cached_property
    def least_scale(self) -> float:
        """The scale from which on sleeps outweigh DeepSpeed's own work."""
        load = Load.stack(Load.stack(step) for step in self.steps)
        forward = sum(float(layer.forward_seconds(load).mean()) for layer in self.profile.layers)
        return LEAST_SLEEP_SECONDS * self.plan.num_stages / forward

    @property
    def wall_seconds(self) -> float:
        """What the steps will take, the first one twice, without the start of the processes."""
        seconds = [step.step_seconds for step in self.predicted]
        return self.scale * (seconds[0] + sum(seconds))

    def encoder_work(self, step: int) -> EncoderWork:
        """What all devices do for the images of a step, where the encoder is spread."""
        alone, levels = self.plan.layout.parts[0], self.plan.recompute[: self.num_spread]
        links = self.plan.known_cluster.links_of(alone)
        encoder, _ = split_profile(self.profile)
        return EncoderWork.of(encoder, Load.stack(self.steps[step]), self.plan.layout, links, levels)

    def footprint(self, load: Load) -> Footprint | SpreadFootprint:
        """For micro-batches of this size, and the images of the step that has most."""
        means = [Load.stack(step).mean() for step in self.steps]
        return self.plan.footprint(self.profile, load, max(means, key=lambda mean: float(mean.vision_units)))


class Entry(NamedTuple):
    """One instruction as it ran, in seconds of the wall clock."""

    operation: Operation
    start: float
    end: float


@dataclass
class StepLog:
    """The instructions that a device ran in a step, and when gradients were reduced and parameters updated."""

    entries: list[Entry] = field(default_factory=list)
    reduced: float = 0.0
    updated: float = 0.0
    exchange: float = inf  # when images of a spread encoder began to be exchanged, before the first instruction

    @property
    def start(self) -> float:
        return min(self.exchange, self.entries[0].start)


@dataclass(frozen=True)
class DeviceReport:
    """What a device reports at the end."""

    steps: list[StepLog]  # without the first one, which warms up
    peak_bytes: int
    start_seconds: float  # until the first step began


@dataclass(frozen=True, eq=False)
class Emulation:
    """The result of an emulated run, in seconds of the cluster."""

    steps: tuple[StepSimulation, ...]  # when each stage of each replica ran what
    peak_bytes: tuple[int, ...]  # the most that a device of each stage held
    start_seconds: float  # of the wall clock, until the first step began


def run_emulation(task: EmulationTask) -> Emulation:
    """Run the steps on DeepSpeed's engine, one local process per device; no accelerator takes part.

    A device that runs out of its emulated memory raises InfeasibleError, which says when and how much it lacks.
    """
    # A new process imports everything, forks one process per device, and ends them all when this process ends. They
    # find the task in a folder, meet by a file there, and leave their reports or the failure in it.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / TASK_FILE).write_bytes(pickle.dumps(task))
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        environment.pop("LOCAL_SIZE", None)  # a launcher's; DeepSpeed would leave files of 66 MiB in shared memory
        command = [sys.executable, "-m", "tools.emulator.engine", name]
        reader, writer = os.pipe()  # closes with this process: the others then end
        with os.fdopen(reader), os.fdopen(writer, "w"):
            done = subprocess.run(
                command, env=environment, stdin=reader, capture_output=True, text=True, check=False
            )  # fmt: skip
        if (folder / FAILURE_FILE).exists():
            raise pickle.loads((folder / FAILURE_FILE).read_bytes())
        if done.returncode != 0:
            raise OmnibalError(f"emulation must come to its end, got {reason_of(done.stdout + done.stderr)}")
        reports = [pickle.loads(report_file(folder, rank).read_bytes()) for rank in range(task.num_processes)]
    return _gather(task, reports)


def report_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pickle"


def _gather(task: EmulationTask, reports: Sequence[DeviceReport]) -> Emulation:
    ranks = task.ranks
    stages = [
        [reports[ranks.rank(stage, replica)] for replica in range(ranks.shape(stage)[0])]
        for stage in range(ranks.num_stages)
    ]
    steps = []
    for number in range(len(task.steps)):
        logs = [[report.steps[number] for report in replicas] for replicas in stages]
        steps.append(_step(task, logs))
    return Emulation(
        steps=tuple(steps),
        peak_bytes=tuple(max(report.peak_bytes for report in replicas) for replicas in stages),
        start_seconds=min(report.start_seconds for report in reports),
    )


def _step(task: EmulationTask, logs: Sequence[Sequence[StepLog]]) -> StepSimulation:
    start = min(log.start for replicas in logs for log in replicas)

    def seconds(wall: float) -> float:
        return (wall - start) / task.scale

    reduced = np.array([max(seconds(log.reduced) for log in replicas) for replicas in logs])
    updated = np.array([max(seconds(log.updated) for log in replicas) for replicas in logs])
    # The logs of each pipeline's rows; with units all replicas are rows of one.
    predicted, pipelines = task.predicted[0], list(zip(*logs, strict=False))
    if task.plan.layout.has_units:
        rows = zip(predicted.replicas[0].stage_rows, logs, strict=True)
        by_row = {row: log for stage in rows for row, log in zip(*stage, strict=True)}
        pipelines = [tuple(by_row[row] for row in range(len(by_row)))]
    ran = [
        Simulation(*_ran(task, simulation.table, of_rows, start), simulation.encoder_stages)
        for simulation, of_rows in zip(predicted.replicas, pipelines, strict=True)
    ]
    return StepSimulation(tuple(ran), reduced, updated - reduced.max())


def _ran(
    task: EmulationTask, table: Table, logs: Sequence[StepLog], start: float
) -> tuple[Table, FloatArray, FloatArray]:
    """The table, which simulation and engine both run, and when each of its instructions started and ended."""
    starts, ends = np.zeros(table.operations.shape), np.zeros(table.operations.shape)
    for row, log in enumerate(logs):
        length = table.lengths[row]
        assert [entry.operation for entry in log.entries] == table.operations[row, :length].tolist()
        starts[row, :length] = [(entry.start - start) / task.scale for entry in log.entries]
        ends[row, :length] = [(entry.end - start) / task.scale for entry in log.entries]
    return table, starts, ends
