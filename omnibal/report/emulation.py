"""An emulated run beside the simulator's prediction: steps, stages, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
from rich.table import Table

from omnibal.cost import FloatArray
from omnibal.pipeline.simulate import StepSimulation
from omnibal.report.style import GIB, Figures, make_table


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
