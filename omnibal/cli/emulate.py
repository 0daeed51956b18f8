"""omnibal emulate: a plan on DeepSpeed's real engine, with as many local processes as devices that only sleep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from omnibal.cli.files import check_picture
from omnibal.cli.opening import open_run
from omnibal.cli.options import ClusterOption, JsonOption, LengthsOption, PictureOption, PresentOption, ProfileOption
from omnibal.cli.output import answer
from omnibal.cli.present import present_plan, real_packs
from omnibal.cost import FloatArray, Load
from omnibal.pipeline.simulate import StepSimulation
from omnibal.report.style import GIB, Figures, make_table
from omnibal.report.timeline import plot_timeline

if TYPE_CHECKING:
    from omnibal.emulator.run import Emulation, EmulationTask  # needs torch


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


def _draw_median_step(task: EmulationTask, emulation: Emulation, plot: Path) -> None:
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


@dataclass(frozen=True)
class EmulatedStage:
    """A stage, on average over steps and replicas; predictions are the simulator's."""

    busy_seconds: float
    predicted_busy_seconds: float
    idle_ratio: float
    """Share of the pipeline's time in which it does not compute."""
    predicted_idle_ratio: float
    peak_bytes: int
    predicted_peak_bytes: int
    """If a micro-batch were as large as the limits allow."""
    budget_bytes: int


@dataclass(frozen=True)
class EmulatedReplica:
    """A data-parallel rank."""

    waiting_ratio: float
    """Share of the pipelines' time in which it is done and waits for the slowest one."""
    predicted_waiting_ratio: float
    times_slowest: int
    """Steps in which the others waited for it."""


@dataclass(frozen=True)
class EmulationFigures(Figures):
    """An emulated run in figures, in the cluster's time."""

    step_seconds: tuple[float, ...]
    predicted_seconds: tuple[float, ...]
    stages: tuple[EmulatedStage, ...]
    replicas: tuple[EmulatedReplica, ...]

    @classmethod
    def of(
        cls,
        emulated: Sequence[StepSimulation],
        predicted: Sequence[StepSimulation],
        peak_bytes: Sequence[int],
        predicted_peak_bytes: Sequence[int],
        budget_bytes: Sequence[int],
    ) -> EmulationFigures:
        """Figures of steps that ran and were predicted; memory by stage."""
        columns = zip(
            _busy(emulated), _busy(predicted), _idle(emulated), _idle(predicted), peak_bytes, predicted_peak_bytes,
            budget_bytes, strict=True,
        )  # fmt: skip
        slowest = [step.slowest_replica for step in emulated]
        waiting = zip(_waiting(emulated), _waiting(predicted), strict=True)
        return cls(
            step_seconds=tuple(step.step_seconds for step in emulated),
            predicted_seconds=tuple(step.step_seconds for step in predicted),
            stages=tuple(EmulatedStage(*column) for column in columns),
            replicas=tuple(
                EmulatedReplica(ran, said, slowest.count(replica)) for replica, (ran, said) in enumerate(waiting)
            ),
        )

    @property
    def over_prediction(self) -> float:
        """How much longer the median step took than predicted, as a share."""
        return median(self.step_seconds) / median(self.predicted_seconds) - 1

    def to_record(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return super().to_record() | {"over_prediction": self.over_prediction}


def _busy(steps: Sequence[StepSimulation]) -> list[float]:
    busy: FloatArray = np.mean([replica.busy_seconds for step in steps for replica in step.replicas], axis=0)
    return [float(seconds) for seconds in busy]


def _idle(steps: Sequence[StepSimulation]) -> list[float]:
    shares = [replica.busy_seconds / step.pipeline_seconds for step in steps for replica in step.replicas]
    return [float(1 - share) for share in np.mean(shares, axis=0)]


def _waiting(steps: Sequence[StepSimulation]) -> list[float]:
    by_replica = zip(*(step.replicas for step in steps), strict=True)
    return [
        fmean(1 - run.makespan_seconds / step.pipeline_seconds for run, step in zip(runs, steps, strict=True))
        for runs in by_replica
    ]


def emulation_tables(figures: EmulationFigures) -> list[Table]:
    """A row per step, per stage and, where they are several, per replica; each beside the simulator's prediction."""
    tables = [_steps_table(figures), _stages_table(figures.stages)]
    return tables if len(figures.replicas) == 1 else [*tables, _replicas_table(figures.replicas)]


def _steps_table(figures: EmulationFigures) -> Table:
    seconds = enumerate(zip(figures.step_seconds, figures.predicted_seconds, strict=True))
    rows = ((f"{number}", f"{ran:.3f}", f"{said:.3f}", f"{ran / said - 1:+.1%}") for number, (ran, said) in seconds)
    return make_table(("step", "emulated s", "predicted s", "more"), rows)


def _stages_table(stages: Sequence[EmulatedStage]) -> Table:
    heads = ("stage", "busy s", "predicted", "idle", "predicted", "peak GiB", "predicted", "budget")
    rows = (
        (
            f"{number}",
            f"{stage.busy_seconds:.3f}",
            f"{stage.predicted_busy_seconds:.3f}",
            f"{stage.idle_ratio:.1%}",
            f"{stage.predicted_idle_ratio:.1%}",
            *(f"{size / GIB:,.1f}" for size in (stage.peak_bytes, stage.predicted_peak_bytes, stage.budget_bytes)),
        )
        for number, stage in enumerate(stages)
    )
    return make_table(heads, rows)


def _replicas_table(replicas: Sequence[EmulatedReplica]) -> Table:
    rows = (
        (f"{number}", f"{row.waiting_ratio:.1%}", f"{row.predicted_waiting_ratio:.1%}", f"{row.times_slowest}")
        for number, row in enumerate(replicas)
    )
    return make_table(("replica", "waits for the slowest", "predicted", "slowest in steps"), rows)
