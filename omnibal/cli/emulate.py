"""omnibal emulate: a plan on DeepSpeed's real engine, with as many local processes as devices that only sleep."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from omnibal.cli.files import check_file, check_picture
from omnibal.cli.options import ClusterOption, JsonOption, LengthsOption, PictureOption, ProfileOption, TraceOption

if TYPE_CHECKING:
    from omnibal.emulator.run import Emulation, EmulationTask
    from omnibal.report.emulation import EmulationFigures


def emulate(
    source: Annotated[Path, typer.Argument(help="A ds_config or a plan.", show_default=False)],
    present: Annotated[
        bool, typer.Option("--present", help="What the ds_config spells out, and not the plan made for it.")
    ] = False,
    steps: Annotated[int, typer.Option(help="Steps to run behind one to warm up, spread over an epoch.", min=1)] = 3,
    profile: ProfileOption = None,
    lengths: LengthsOption = None,
    cluster: ClusterOption = None,
    time_scale: Annotated[
        float | None,
        typer.Option(
            help="Seconds slept for each second of the cluster; left out, as few as are exact.",
            min=0,
            max=1000,
            show_default=False,
        ),
    ] = None,
    plot: PictureOption = None,
    trace: TraceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a plan on an emulated cluster: no accelerator is needed.

    DeepSpeed's real engine, schedule and transfers run on this machine, one
    process per device; layers sleep as long as they are predicted to take for
    each pack of the real sampler, and memory is accounted against the devices'.
    Shows what the cluster would do, beside the simulator's prediction.

    Example: omnibal emulate ds_configs/mine.json --steps 5 --plot emulated.png
    """  # fmt: skip
    from omnibal.cli.present import present_plan, real_packs
    from omnibal.cli.run import Run
    from omnibal.emulator.run import EmulationTask

    check_file("--trace", trace)
    check_picture("--plot", plot)
    run = Run.open(source, kinds=("ds_config", "plan"), profile=profile, lengths=lengths, cluster=cluster)
    plan = present_plan(run) if present else run.plan
    task = EmulationTask(run.profile, plan, real_packs(run, plan, steps=steps).steps, time_scale)
    doing = f"{task.num_processes} processes start, emulate a step to warm up and {len(task.steps)} to count"
    with Console(stderr=True).status(f"{doing}: {task.wall_seconds:.0f} s and the start"):
        report = EmulationReport.run(task)
    written = report.write(trace, plot)
    if as_json:
        typer.echo(json.dumps(report.to_record() | {"written": written}, indent=2))
    else:
        report.print(Console(), written)


@dataclass(frozen=True)
class EmulationReport:
    """All that `omnibal emulate` says.

    Attributes:
        task: What was run.
        emulation: What came of it.
        figures: The same in figures.
    """

    task: "EmulationTask"
    emulation: "Emulation"
    figures: "EmulationFigures"

    @classmethod
    def run(cls, task: "EmulationTask") -> "EmulationReport":
        """Run the task."""
        from omnibal.cost import Load
        from omnibal.emulator.run import run_emulation
        from omnibal.report.emulation import EmulationFigures

        emulation = run_emulation(task)
        loads = Load.stack(Load.stack(step) for step in task.steps)
        memory = [stage.total for stage in task.plan.memory(task.profile, loads.max())]
        figures = EmulationFigures.of(emulation.steps, task.predicted, emulation.peak_bytes, memory, task.budget_bytes)
        return cls(task, emulation, figures)

    def write(self, trace: Path | None, plot: Path | None) -> list[str]:
        """Write the timeline of the median step as asked; the paths."""
        from omnibal.pipeline.simulate import chrome_trace
        from omnibal.report.timeline import plot_timeline

        seconds = self.figures.step_seconds
        number = min(range(len(seconds)), key=lambda step: abs(seconds[step] - median(seconds)))
        emulated, predicted = self.emulation.steps[number], self.task.predicted[number]
        if trace is not None:
            trace.parent.mkdir(parents=True, exist_ok=True)
            trace.write_text(json.dumps(chrome_trace(emulated.replicas)))
        if plot is not None:
            slowest = emulated.slowest_replica
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
        from omnibal.report.emulation import emulation_tables

        task, figures = self.task, self.figures
        lines = [
            f"{task.plan.layout}, {task.plan.micro_batches} micro-batches; a second of the cluster took "
            f"{task.scale:.3g} s"
        ]
        if task.scale < task.least_scale:
            lines.append(f"DeepSpeed's own work counts for more than a few percent; not so at {task.least_scale:.3g} s")
        for line in lines:
            console.print(line, highlight=False, markup=False)
        for table in emulation_tables(figures):
            console.print(table)
        over = f"{figures.over_prediction:+.1%} over the prediction"
        summary = f"median step {median(figures.step_seconds):.3f} s, {over}"
        for line in (summary, *(f"written: {path}" for path in written)):
            console.print(line, highlight=False, markup=False)
