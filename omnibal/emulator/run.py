"""An emulated cluster: DeepSpeed's real engine on as many local processes, whose layers sleep in place of computing."""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Final

import numpy as np

from omnibal.cluster import Layout
from omnibal.cost import Load
from omnibal.emulator.device import DeviceReport, StepLog
from omnibal.engine.launch import reason_of
from omnibal.errors import ConfigError, OmnibalError
from omnibal.memory.footprint import Footprint
from omnibal.pipeline.schedule import Schedule
from omnibal.pipeline.simulate import Simulation, StepSimulation
from omnibal.plan import Plan
from omnibal.profile.records import ModelProfile

LEAST_SLEEP_SECONDS = 0.1
"""Time is scaled so that an average forward pass of a stage sleeps so long: DeepSpeed's own work is then a few percent
of it where eight processes share a core."""
SIZE_SCALE = 1e-3
"""Tensors are sent at this share of their size, and the links' time is slept."""
TASK_FILE, FAILURE_FILE = "task.pickle", "failure.pickle"


MOST_PROCESSES: Final = 256
"""Each is a whole Python with torch and DeepSpeed."""


@dataclass(frozen=True)
class EmulationTask:
    """A run to be emulated.

    Args:
        profile: What the layers cost.
        plan: With the cluster that is emulated.
        steps: For each step a Load per replica with an entry per micro-batch, as a sampler yields them.
        time_scale: Seconds slept for each second of the cluster; None chooses.

    Raises:
        ConfigError: The plan has no cluster, or steps or scale do not fit it.
    """

    profile: ModelProfile
    plan: Plan
    steps: tuple[tuple[Load, ...], ...]
    time_scale: float | None = None

    def __post_init__(self) -> None:
        shapes = {Load.stack(step).shape for step in self.steps}
        wanted = (self.plan.layout.num_replicas, self.plan.micro_batches)
        if shapes != {wanted}:
            raise ConfigError(
                f"steps must be at least one, of {wanted} replicas and micro-batches, got {sorted(shapes)}"
            )
        self.plan.known_cluster.check(self.plan.layout)
        if self.num_processes > MOST_PROCESSES:
            raise ConfigError(
                f"stages x replicas must be at most {MOST_PROCESSES} processes of one machine, got {self.num_processes}"
            )
        if self.time_scale is not None and not 0 < self.time_scale < inf:
            raise ConfigError(f"time_scale must be positive and finite, got {self.time_scale}")

    @property
    def ranks(self) -> Layout:
        """The processes: one stands for all tensor ranks of a replica."""
        return replace(self.plan.layout, num_tensor=1)

    @property
    def num_processes(self) -> int:
        """Stages × replicas."""
        return self.ranks.num_devices

    @property
    def budget_bytes(self) -> tuple[int, ...]:
        """The most that a device of each stage may hold."""
        return self.plan.known_cluster.stage_memory_bytes(self.plan.layout)

    @property
    def schedule(self) -> Schedule:
        """What every replica's stages run."""
        return self.predicted[0].replicas[0].schedule

    @cached_property
    def predicted(self) -> tuple[StepSimulation, ...]:
        """What the simulator says of each step."""
        return tuple(self.plan.simulate(self.profile, loads) for loads in self.steps)

    @property
    def scale(self) -> float:
        """Seconds slept for each second of the cluster."""
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

    def footprint(self, load: Load) -> Footprint:
        """The memory of stages for micro-batches of one size."""
        return self.plan.footprint(self.profile, load)


@dataclass(frozen=True, eq=False)
class Emulation:
    """The result of an emulated run, in seconds of the cluster.

    Attributes:
        steps: When each stage of each replica ran what, step by step.
        peak_bytes: The most that a device of each stage held.
        start_seconds: Seconds of the wall clock until the first step began.
    """

    steps: tuple[StepSimulation, ...]
    peak_bytes: tuple[int, ...]
    start_seconds: float


def run_emulation(task: EmulationTask) -> Emulation:
    """Run the steps on DeepSpeed's engine, one local process per device; no accelerator takes part.

    One step goes before, to warm up. All processes are forked from one that has imported everything, and none outlives
    this one.

    Raises:
        InfeasibleError: A device ran out of its emulated memory: the message says which, when, and how much it lacks.
        OmnibalError: A process failed otherwise.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / TASK_FILE).write_bytes(pickle.dumps(task))
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        environment.pop("LOCAL_SIZE", None)  # a launcher's; DeepSpeed would leave files of 66 MiB in shared memory
        command = [sys.executable, "-m", "omnibal.emulator.engine", name]
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
    """The file in which a process leaves its report."""
    return folder / f"rank{rank}.pickle"


def _gather(task: EmulationTask, reports: Sequence[DeviceReport]) -> Emulation:
    """Put the processes' logs together."""
    ranks = task.ranks
    stages = [
        [reports[ranks.rank(stage, replica)] for replica in range(ranks.num_replicas)]
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
    """One step from the logs of its stages and replicas."""
    start = min(log.start for replicas in logs for log in replicas)

    def seconds(wall: float) -> float:
        return (wall - start) / task.scale

    pipelines = tuple(
        _pipeline(task, [replicas[replica] for replicas in logs], start)
        for replica in range(task.plan.layout.num_replicas)
    )
    reduced = np.array([max(seconds(log.reduced) for log in replicas) for replicas in logs])
    updated = np.array([max(seconds(log.updated) for log in replicas) for replicas in logs])
    return StepSimulation(pipelines, reduced, updated - reduced.max())


def _pipeline(task: EmulationTask, logs: Sequence[StepLog], start: float) -> Simulation:
    table = task.predicted[0].replicas[0].table  # simulation and engine run the same instructions
    starts, ends = np.zeros(table.operations.shape), np.zeros(table.operations.shape)
    for stage, log in enumerate(logs):
        length = table.lengths[stage]
        assert [entry.operation for entry in log.entries] == table.operations[stage, :length].tolist()
        starts[stage, :length] = [(entry.start - start) / task.scale for entry in log.entries]
        ends[stage, :length] = [(entry.end - start) / task.scale for entry in log.entries]
    return Simulation(task.schedule, table, starts, ends)
