"""omnibal emulate: a plan on DeepSpeed's real engine, with as many local processes as devices that only sleep."""

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from omnibal.cli.files import check_picture
from omnibal.cli.opening import open_run
from omnibal.cli.options import ClusterOption, JsonOption, LengthsOption, PictureOption, ProfileOption
from omnibal.cli.output import answer
from omnibal.cli.present import present_plan, real_packs
from omnibal.cost import Load
from omnibal.report.emulation import EmulationFigures, emulation_tables
from omnibal.report.timeline import plot_timeline

if TYPE_CHECKING:
    from omnibal.emulator.run import Emulation, EmulationTask  # needs torch


def emulate(
    source: Annotated[Path, typer.Argument(help="A ds_config or a plan.", show_default=False)],
    present: Annotated[
        bool, typer.Option("--present", help="What the ds_config spells out, and not the plan made for it.")
    ] = False,
    steps: Annotated[int, typer.Option(help="Steps to run behind one to warm up, spread over an epoch.", min=1)] = 3,
    profile: ProfileOption = None,
    lengths: LengthsOption = None,
    cluster: ClusterOption = None,
    plot: PictureOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a plan on an emulated cluster: no accelerator is needed.

    DeepSpeed's real engine, schedule and transfers run on this machine, one
    process per device; layers sleep as long as they are predicted to take for
    each pack of the real sampler, and memory is accounted against the devices'.
    Shows what the cluster would do, beside the simulator's prediction.

    Example: omnibal emulate ds_configs/mine.json --steps 5 --plot emulated.png
    """  # fmt: skip
    from omnibal.emulator.run import EmulationTask, run_emulation

    check_picture("--plot", plot)
    run = open_run(source, kinds=("ds_config", "plan"), profile=profile, lengths=lengths, cluster=cluster)
    plan = present_plan(run) if present else run.plan
    task = EmulationTask(run.profile, plan, real_packs(run, plan, steps=steps).steps)
    doing = f"{task.num_processes} processes start, emulate a step to warm up and {len(task.steps)} to count"
    with Console(stderr=True).status(f"{doing}: {task.wall_seconds:.0f} s and the start"):
        emulation = run_emulation(task)
    largest = Load.stack(Load.stack(step) for step in task.steps).max()
    memory = [stage.total for stage in plan.memory(run.profile, largest)]
    figures = EmulationFigures.of(emulation.steps, task.predicted, emulation.peak_bytes, memory, task.budget_bytes)
    written = [] if plot is None else [str(plot)]
    if plot is not None:
        _draw_median_step(task, emulation, plot)
    record = {
        "num_stages": plan.num_stages,
        "num_replicas": plan.layout.num_replicas,
        "micro_batches": plan.micro_batches,
        "time_scale": task.scale,
        "start_seconds": emulation.start_seconds,
        **figures.to_record(),
        "written": written,
    }
    answer(
        record,
        f"{plan.layout}, {plan.micro_batches} micro-batches; a second of the cluster took {task.scale:.3g} s",
        *emulation_tables(figures),
        f"median step {median(figures.step_seconds):.3f} s, {figures.over_prediction:+.1%} over the prediction",
        *(f"written: {path}" for path in written),
        as_json=as_json,
    )


def _draw_median_step(task: "EmulationTask", emulation: "Emulation", plot: Path) -> None:
    """Draw the slowest replica of the median step beside the simulator's."""
    seconds = [step.step_seconds for step in emulation.steps]
    number = min(range(len(seconds)), key=lambda step: abs(seconds[step] - median(seconds)))
    emulated, predicted = emulation.steps[number], task.predicted[number]
    slowest = emulated.slowest_replica
    panels = {
        f"step {number}, replica {slowest}, emulated": emulated.replicas[slowest],
        "the same, predicted": predicted.replicas[slowest],
    }
    plot_timeline(panels, plot)
