"""Partitions side by side: by method, by predicted time, by measured time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from omnibal.report.memory import unit_of
from omnibal.report.stages import PartitionFigures


@dataclass(frozen=True)
class TrialFigures:
    """A candidate that was tried on the real engine.

    Attributes:
        boundaries: The partition's.
        predicted_seconds: Of a step.
        measured_seconds: Median of the timed steps; None where the trial failed.
        peak_bytes: Most memory allocated on a device of each stage; zeros where the device does not count.
        error: Why it failed.
    """

    boundaries: tuple[int, ...]
    predicted_seconds: float
    measured_seconds: float | None
    peak_bytes: tuple[int, ...]
    error: str | None

    def to_record(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        measured = self.measured_seconds
        outcome = f"failed: {self.error}" if measured is None else f"measured {1e3 * measured:,.1f} ms"
        return f"{cut_of(self.boundaries)}: predicted {1e3 * self.predicted_seconds:,.1f} ms, {outcome}"


def cut_of(boundaries: Sequence[int]) -> str:
    """Boundaries as people read them.

    >>> cut_of((0, 5, 14))
    '0 5 14'
    """
    return " ".join(map(str, boundaries))


def methods_table(methods: Mapping[str, PartitionFigures], lower_bound_seconds: float) -> Table:
    """The best partition of each method, and how far it is above what any partition can reach."""
    table = _table("method", "boundaries")
    for name in ("step ms", "over bound", "bubble", "slowest / mean"):
        table.add_column(name, justify="right")
    for method, figures in methods.items():
        busy = [stage.busy_seconds for stage in figures.stages]
        table.add_row(
            method,
            cut_of(figures.boundaries),
            f"{1e3 * figures.step_seconds:,.1f}",
            _over(figures.step_seconds, lower_bound_seconds),
            f"{figures.bubble_ratio:.1%}",
            f"{max(busy) / (sum(busy) / len(busy)):.2f}",
        )
    table.add_section()
    table.add_row("(lower bound)", "", f"{1e3 * lower_bound_seconds:,.1f}", "", "", "")
    return table


def candidates_table(candidates: Sequence[tuple[tuple[int, ...], float]], lower_bound_seconds: float) -> Table:
    """Boundaries and predicted seconds, in the order given."""
    table = _table("", "boundaries")
    for name in ("step ms", "over bound"):
        table.add_column(name, justify="right")
    for place, (boundaries, seconds) in enumerate(candidates, start=1):
        table.add_row(f"{place}", cut_of(boundaries), f"{1e3 * seconds:,.1f}", _over(seconds, lower_bound_seconds))
    return table


def trials_table(trials: Sequence[TrialFigures]) -> Table:
    """Measured and predicted, in the order given."""
    table = _table("", "boundaries")
    counts = any(any(trial.peak_bytes) for trial in trials)
    unit, unit_name = unit_of(size for trial in trials for size in (*trial.peak_bytes, 0))
    for name in ("measured ms", "predicted ms", "off", *([f"peak {unit_name} by stage"] if counts else [])):
        table.add_column(name, justify="right")
    for place, trial in enumerate(trials, start=1):
        measured, predicted = trial.measured_seconds, trial.predicted_seconds
        table.add_row(
            f"{place}",
            cut_of(trial.boundaries),
            "failed" if measured is None else f"{1e3 * measured:,.1f}",
            f"{1e3 * predicted:,.1f}",
            "–" if measured is None else f"{predicted / measured - 1:+.1%}",
            *([" ".join(f"{size / unit:.1f}" for size in trial.peak_bytes)] if counts else []),
        )
    return table


def _over(seconds: float, bound: float) -> str:
    return f"+{seconds / bound - 1:.2%}" if bound else "–"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
