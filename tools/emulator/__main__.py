"""Runs a plan on DeepSpeed's real engine, with as many local processes as devices that only sleep.

python -m tools.emulator ds_configs/mine.json --steps 5 --plot emulated.png
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Final

import numpy as np
import typer
from rich.table import Table

from omnibal.cli.options import (
    ClusterOption,
    JsonOption,
    LengthsOption,
    PictureOption,
    ProfileOption,
    answer,
    check_picture,
    open_workspace,
    working,
)
from omnibal.cli.planning import plan_of, present_plan, real_packs
from omnibal.cost import Load
from omnibal.errors import OmnibalError
from omnibal.pipeline.simulate import StepSimulation
from omnibal.report.stages import plot_timeline
from omnibal.report.style import GIB, Column, duration, scaled, table_of
from tools.emulator import run
from tools.emulator.run import Emulation, EmulationTask

Steps = Sequence[StepSimulation]
STAGE: Final = (
    "busy_seconds", "predicted_busy_seconds", "idle_ratio", "predicted_idle_ratio", "peak_bytes",
    "predicted_peak_bytes", "budget_bytes",
)  # fmt: skip
STEP_COLUMNS: Final = (
    ("step", "{place}"),
    ("emulated s", "{ran:.3f}"),
    ("predicted s", "{said:.3f}"),
    ("more", "{more:+.1%}"),
)
STAGE_COLUMNS: Final[Sequence[Column]] = (
    ("stage", "{place}"),
    ("busy s", "{busy_seconds:.3f}"),
    ("predicted", "{predicted_busy_seconds:.3f}"),
    ("idle", "{idle_ratio:.1%}"),
    ("predicted", "{predicted_idle_ratio:.1%}"),
    ("peak GiB", scaled("peak_bytes", GIB)),
    ("at most", scaled("predicted_peak_bytes", GIB)),
    ("budget", scaled("budget_bytes", GIB)),
)
REPLICA_COLUMNS: Final = (
    ("replica", "{place}"),
    ("waits for the slowest", "{waiting_ratio:.1%}"),
    ("predicted", "{predicted_waiting_ratio:.1%}"),
    ("slowest in steps", "{times_slowest}"),
)

PresentOption = Annotated[
    bool, typer.Option("--present", help="Take what the ds_config spells out, not the plan that was made for it.")
]


def emulate(
    source: Annotated[Path, typer.Argument(help="A ds_config or a plan.")],
    present: PresentOption = False,
    steps: Annotated[
        int, typer.Option(help="Steps to run, spread over an epoch; one goes before to warm up.", min=1)
    ] = 3,
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

    Example: python -m tools.emulator ds_configs/mine.json --steps 5 --plot emulated.png
    """  # fmt: skip
    check_picture("--plot", plot)
    workspace = open_workspace(source, kinds=("ds_config", "plan"), profile=profile, lengths=lengths, cluster=cluster)
    plan = present_plan(workspace) if present else plan_of(workspace)
    task = EmulationTask(workspace.profile, plan, real_packs(workspace, plan, steps=steps).steps)
    doing = f"{task.num_processes} processes start, emulate a step to warm up and {len(task.steps)} to count"
    with working(f"{doing}: {task.wall_seconds:.0f} s and the start"):
        emulation = run.run_emulation(task)
    # A bound, not what is expected: as if all micro-batches in flight were as large as the largest one in every size.
    # Plans hold the same for the limits' largest, so that no order of packs exceeds memory.
    largest = Load.stack(Load.stack(step) for step in task.steps).max()
    memory = [stage.total for stage in plan.memory(workspace.profile, largest)]
    figures = _figures(task, emulation, memory)
    written = [] if plot is None else [str(plot)]
    if plot is not None:
        _draw_median_step(task, emulation, plot)
    record = {
        "num_stages": plan.num_stages,
        "num_replicas": plan.layout.num_replicas,
        "micro_batches": plan.micro_batches,
        "time_scale": task.scale,
        "start_seconds": emulation.start_seconds,
        **figures,
        "written": written,
    }
    answer(
        record,
        f"{plan.layout}, {plan.micro_batches} micro-batches; a second of the cluster took {task.scale:.3g} s",
        *_tables(figures),
        f"median step {duration(median(figures['step_seconds']))}, {figures['over_prediction']:+.1%} over the "
        "prediction",
        *(f"written: {path}" for path in written),
        as_json=as_json,
    )


def _draw_median_step(task: EmulationTask, emulation: Emulation, plot: Path) -> None:
    """Draw the slowest replica of the median step beside the simulator's."""
    # With an even number of steps the median lies between two: the nearest step is drawn.
    seconds = [step.step_seconds for step in emulation.steps]
    number = min(range(len(seconds)), key=lambda step: abs(seconds[step] - median(seconds)))
    emulated, predicted = emulation.steps[number], task.predicted[number]
    slowest = emulated.slowest_replica
    panels = {
        f"step {number}, replica {slowest}, emulated": emulated.replicas[slowest],
        "the same, predicted": predicted.replicas[slowest],
    }
    plot_timeline(panels, plot)


def _figures(task: EmulationTask, emulation: Emulation, memory: Sequence[int]) -> dict[str, Any]:
    """The run beside what the simulator predicts, in the cluster's time, as JSON values.

    Stages are means over steps and replicas; a replica's waiting is the share of the pipelines' time in which it is
    done and waits for the slowest one.
    """
    ran, said = emulation.steps, task.predicted
    seconds, predicted = ([step.step_seconds for step in steps] for steps in (ran, said))
    slowest = [step.slowest_replica for step in ran]
    stages = zip(
        _busy(ran), _busy(said), _idle(ran), _idle(said), emulation.peak_bytes, memory, task.budget_bytes, strict=True
    )
    return {
        "step_seconds": seconds,
        "predicted_seconds": predicted,
        "over_prediction": median(seconds) / median(predicted) - 1,
        "stages": [dict(zip(STAGE, stage, strict=True)) for stage in stages],
        "replicas": [
            {"waiting_ratio": waits, "predicted_waiting_ratio": expected, "times_slowest": slowest.count(replica)}
            for replica, (waits, expected) in enumerate(zip(_waiting(ran), _waiting(said), strict=True))
        ],
    }


def _busy(steps: Steps) -> list[float]:
    busy = np.mean([replica.stage_busy_seconds for step in steps for replica in step.replicas], axis=0)
    return [float(seconds) for seconds in busy]


def _idle(steps: Steps) -> list[float]:
    shares = [replica.stage_busy_seconds / step.pipeline_seconds for step in steps for replica in step.replicas]
    return [float(1 - share) for share in np.mean(shares, axis=0)]


def _waiting(steps: Steps) -> list[float]:
    by_replica = zip(*(step.replicas for step in steps), strict=True)
    return [
        fmean(1 - run.makespan_seconds / step.pipeline_seconds for run, step in zip(runs, steps, strict=True))
        for runs in by_replica
    ]


def _tables(figures: Mapping[str, Any]) -> list[Table]:
    """A row per step, per stage and, where they are several, per replica; each beside the simulator's prediction."""
    seconds = zip(figures["step_seconds"], figures["predicted_seconds"], strict=True)
    steps = [{"ran": ran, "said": said, "more": ran / said - 1} for ran, said in seconds]
    tables = [table_of(steps, STEP_COLUMNS), table_of(figures["stages"], STAGE_COLUMNS)]
    replicas = figures["replicas"]
    return tables if len(replicas) == 1 else [*tables, table_of(replicas, REPLICA_COLUMNS)]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(emulate)

if __name__ == "__main__":
    try:
        app()
    except OmnibalError as error:
        sys.exit(f"error: {error}")
