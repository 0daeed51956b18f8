"""Plans that were tried on the real engine: time and memory, measured beside predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rich import box
from rich.table import Table

from omnibal.plan import Plan
from omnibal.report.memory import unit_of


@dataclass(frozen=True)
class PlanTrial:
    """A plan that was tried.

    Attributes:
        name: What it is.
        micro_batches: Per step and replica.
        recomputed: Layers of each stage that recompute.
        measured_seconds: Median of the timed steps; None where the trial failed.
        predicted_seconds: Of a step; None where nobody predicted.
        samples_per_step: Alike.
        peak_bytes: What a device of each stage held at its peak; empty where the trial ended before.
        predicted_bytes: Of each stage, without the overhead; empty where nobody predicted.
        outcome: Why it failed, and what followed.
    """

    name: str
    micro_batches: int
    recomputed: tuple[int, ...]
    measured_seconds: float | None
    predicted_seconds: float | None
    samples_per_step: float | None
    peak_bytes: tuple[int, ...]
    predicted_bytes: tuple[int, ...]
    outcome: str

    @classmethod
    def of(
        cls, name: str, plan: Plan, measured_seconds: float | None, peak_bytes: Sequence[int], outcome: str
    ) -> PlanTrial:
        """From a plan and what was measured."""
        predicted = plan.predicted
        levels = (plan.recompute[a:b] for a, b in pairwise(plan.partition.boundaries))
        return cls(
            name=name,
            micro_batches=plan.micro_batches,
            recomputed=tuple(sum(level != "none" for level in stage) for stage in levels),
            measured_seconds=measured_seconds,
            predicted_seconds=None if predicted is None else predicted.step_seconds,
            samples_per_step=None if predicted is None else predicted.samples_per_step,
            peak_bytes=tuple(peak_bytes),
            predicted_bytes=tuple(s.memory.total - s.memory.overhead for s in predicted.stages) if predicted else (),
            outcome=outcome,
        )

    def to_record(self) -> dict[str, Any]:
        """The trial as JSON values."""
        return asdict(self)


def plan_trials_table(trials: Sequence[PlanTrial]) -> Table:
    """A row per trial, in the order given: time and peak as measured, and as the plan predicted them."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("trial")
    unit, unit_name = unit_of(size for trial in trials for size in (*trial.peak_bytes, *trial.predicted_bytes, 0))
    names = ("packs", "recompute", "ms", "plan\nms", "samples\na second", unit_name, f"plan\n{unit_name}")
    for name in names:
        table.add_column(name, justify="right", overflow="fold", min_width=max(map(len, name.split("\n"))))
    for trial in trials:
        seconds, samples = trial.measured_seconds, trial.samples_per_step
        table.add_row(
            trial.name,
            f"{trial.micro_batches}",
            " ".join(map(str, trial.recomputed)),
            "–" if seconds is None else f"{1e3 * seconds:,.1f}",
            "–" if trial.predicted_seconds is None else f"{1e3 * trial.predicted_seconds:,.1f}",
            "–" if seconds is None or samples is None else f"{samples / seconds:,.1f}",
            _sizes(trial.peak_bytes, unit),
            _sizes(trial.predicted_bytes, unit),
        )
    return table


def _sizes(sizes: Sequence[int], unit: int) -> str:
    return " ".join(f"{size / unit:.1f}" for size in sizes) or "–"
