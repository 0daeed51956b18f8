"""The parts of `omnibal emulate`: the run that its options describe; what is shown, drawn and written of it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from omnibal.cli.planning import lengths_of, on_cluster
from omnibal.cluster import Links
from omnibal.cost import Load
from omnibal.data.epoch import arrange_epoch
from omnibal.data.policies import Method
from omnibal.emulator.run import Emulation, EmulationTask, run_emulation
from omnibal.pipeline.simulate import chrome_trace
from omnibal.plan import Plan
from omnibal.planner.packings import Packing, spread_steps
from omnibal.profile.records import ModelProfile
from omnibal.report.emulation import EmulationFigures, emulation_tables
from omnibal.report.stages import slowest_replica
from omnibal.report.timeline import plot_timeline


def emulation_task(
    profile: ModelProfile,
    plan_path: Path,
    links: Links,
    *,
    lengths: Sequence[Path] | None,
    method: Method,
    seed: int,
    num_replicas: int,
    steps: int,
    zero_stage: int,
    budget: str | None,
    overhead_bytes: int,
    time_scale: float | None,
) -> EmulationTask:
    """The run that the command's options describe; without lengths every pack is as large as the limits allow.

    Raises:
        ConfigError: Plan, profile, budget and lengths do not fit each other.
    """
    plan = on_cluster(
        Plan.load(plan_path), profile, links, num_replicas=num_replicas, zero_stage=zero_stage, budget=budget,
        overhead_bytes=overhead_bytes,
    )  # fmt: skip
    if lengths:
        samples = lengths_of(lengths)
        epoch = arrange_epoch(
            samples, plan.limits, num_replicas=num_replicas, micro_batches=plan.micro_batches, method=method, seed=seed
        )
        packing = Packing.of(epoch, samples, plan.limits, spread_steps(epoch.num_steps, steps))
    else:
        packing = Packing.alike(plan.limits, num_replicas=num_replicas, micro_batches=plan.micro_batches)
    return EmulationTask(profile, plan, packing.steps, time_scale)


@dataclass(frozen=True)
class EmulationReport:
    """All that `omnibal emulate` says.

    Attributes:
        task: What was run.
        emulation: What came of it.
        figures: The same in figures.
    """

    task: EmulationTask
    emulation: Emulation
    figures: EmulationFigures

    @classmethod
    def run(cls, task: EmulationTask) -> "EmulationReport":
        """Run the task."""
        emulation = run_emulation(task)
        loads = Load.stack(Load.stack(step) for step in task.steps)
        memory = task.footprint(loads.max()).stages(task.plan.partition, task.plan.recompute)
        figures = EmulationFigures.of(
            emulation.steps, task.predicted, emulation.peak_bytes, [stage.total for stage in memory], task.budget_bytes
        )
        return cls(task, emulation, figures)

    def write(self, trace: Path | None, plot: Path | None) -> list[str]:
        """Write the timeline of the median step as asked; the paths."""
        seconds = self.figures.step_seconds
        number = min(range(len(seconds)), key=lambda step: abs(seconds[step] - median(seconds)))
        emulated, predicted = self.emulation.steps[number], self.task.predicted[number]
        if trace is not None:
            trace.parent.mkdir(parents=True, exist_ok=True)
            trace.write_text(json.dumps(chrome_trace(emulated.replicas)))
        if plot is not None:
            slowest = slowest_replica(emulated)
            panels = {
                f"step {number}, replica {slowest}, emulated": emulated.replicas[slowest],
                "the same, predicted": predicted.replicas[slowest],
            }
            plot_timeline(panels, plot)
        return [str(path) for path in (trace, plot) if path is not None]

    def to_record(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "num_stages": self.task.plan.num_stages,
            "num_replicas": self.task.plan.layout.num_replicas,
            "micro_batches": self.task.plan.micro_batches,
            "time_scale": self.task.scale,
            "start_seconds": self.emulation.start_seconds,
            **self.figures.to_record(),
        }

    def print(self, console: Console, written: Sequence[str]) -> None:
        """Print tables and a summary."""
        task, figures = self.task, self.figures
        lines = [
            f"{task.plan.num_stages} stages × {task.plan.layout.num_replicas} replicas, {task.plan.micro_batches} "
            f"micro-batches; a second of the cluster took {task.scale:.3g} s",
        ]
        if task.scale < task.least_scale:
            lines.append(f"DeepSpeed's own work counts for more than a few percent; not so at {task.least_scale:.3g} s")
        for line in lines:
            console.print(line, highlight=False, markup=False)
        for table in emulation_tables(figures):
            console.print(table)
        summary = (
            f"median step {median(figures.step_seconds):.3f} s, {figures.over_prediction:+.1%} over the prediction"
        )
        for line in (summary, *(f"written: {path}" for path in written)):
            console.print(line, highlight=False, markup=False)
