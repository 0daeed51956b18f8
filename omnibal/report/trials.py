"""Plans that were tried on the real engine: time and memory, measured beside predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.table import Table

from omnibal.errors import bytes_in_words
from omnibal.report.style import Figures, make_table, milliseconds, unit_of

if TYPE_CHECKING:
    from omnibal.trials import Trial


@dataclass(frozen=True)
class TrialFigures(Figures):
    """A plan that was tried."""

    name: str
    boundaries: tuple[int, ...]
    micro_batches: int
    recomputed: tuple[int, ...]
    """Layers of each stage that recompute."""
    measured_seconds: float | None
    """Median of the timed steps; None where the trial failed."""
    predicted_seconds: float | None
    """Of a step; None where nobody predicted, as the next one."""
    samples_per_step: float | None
    peak_bytes: tuple[int, ...]
    """What a device of each stage held, zeros where it does not count; empty where the trial ended before."""
    predicted_bytes: tuple[int, ...]
    """Without the overhead; empty where nobody predicted."""
    outcome: str
    """Whether it fits or why it failed, and what it is a retreat from."""

    @classmethod
    def of(cls, name: str, trial: Trial) -> TrialFigures:
        """Of a trial, beside what its plan predicted."""
        plan, predicted = trial.plan, trial.plan.predicted
        levels = (plan.recompute[a:b] for a, b in pairwise(plan.partition.boundaries))
        return cls(
            name=name,
            boundaries=plan.partition.boundaries,
            micro_batches=plan.micro_batches,
            recomputed=tuple(sum(level != "none" for level in stage) for stage in levels),
            measured_seconds=None if trial.error else trial.median_seconds,
            predicted_seconds=None if predicted is None else predicted.step_seconds,
            samples_per_step=None if predicted is None else predicted.samples_per_step,
            peak_bytes=trial.peak_bytes,
            predicted_bytes=tuple(s.memory.total - s.memory.overhead for s in predicted.stages) if predicted else (),
            outcome=_outcome(trial),
        )

    def __str__(self) -> str:
        """The trial in a line, as it is said when it is done."""
        measured, predicted = self.measured_seconds, self.predicted_seconds
        expected = "" if predicted is None else f"predicted {milliseconds(predicted)} ms, "
        done = "" if measured is None else f"measured {milliseconds(measured)} ms: "
        return f"{self.name}: {expected}{done}{self.outcome}"


def _outcome(trial: Trial) -> str:
    before = f"after a retreat by {_by_stage(trial.retreat_bytes)}: " if trial.retreat_bytes else ""
    if trial.missing_bytes:
        return f"{before}out of memory, {_by_stage(trial.missing_bytes)} missing"
    return before + (f"failed: {trial.error}" if trial.error else "fits")


def _by_stage(sizes: Sequence[int]) -> str:
    return ", ".join(
        f"{size} bytes ({bytes_in_words(size)}) on stage {stage}" for stage, size in enumerate(sizes) if size
    )


def trials_table(trials: Sequence[TrialFigures]) -> Table:
    """A row per trial, in the order given: time and peak as measured, and as the plan predicted them."""
    unit, name = unit_of(size for trial in trials for size in (*trial.peak_bytes, *trial.predicted_bytes))
    heads = ("trial", "packs", "recompute", "ms", "plan\nms", "samples\na second", name, f"plan\n{name}")
    rows = (
        (
            trial.name,
            f"{trial.micro_batches}",
            " ".join(map(str, trial.recomputed)),
            milliseconds(trial.measured_seconds),
            milliseconds(trial.predicted_seconds),
            _rate(trial),
            _sizes(trial.peak_bytes, unit),
            _sizes(trial.predicted_bytes, unit),
        )
        for trial in trials
    )
    return make_table(heads, rows)


def _rate(trial: TrialFigures) -> str:
    if trial.measured_seconds is None or trial.samples_per_step is None:
        return "–"
    return f"{trial.samples_per_step / trial.measured_seconds:,.1f}"


def _sizes(sizes: Sequence[int], unit: int) -> str:
    return " ".join(f"{size / unit:.1f}" for size in sizes) if any(sizes) else "–"
