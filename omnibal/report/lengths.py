"""What a dataset's samples are like, source by source: statistics, and their table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.table import Table

from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.report.style import Figures, make_table


@dataclass(frozen=True)
class Statistics:
    """How one load is distributed over samples: total, mean, median, 99th percentile and largest."""

    total: int
    mean: float
    p50: float
    p99: float
    max: int

    @classmethod
    def of(cls, values: IntArray) -> Statistics:
        """Statistics of some values; zeros where there are none."""
        if len(values) == 0:
            return cls(0, 0.0, 0.0, 0.0, 0)
        p50, p99 = np.percentile(values, (50, 99)).tolist()
        return cls(int(values.sum(dtype=np.int64)), float(values.mean()), p50, p99, int(values.max()))

    def cells(self) -> tuple[str, ...]:
        """Of a table's row."""
        return f"{self.mean:,.1f}", f"{self.p50:,.0f}", f"{self.p99:,.0f}", f"{self.max:,}"


@dataclass(frozen=True)
class SourceStatistics(Figures):
    """The samples of one source, or of all."""

    name: str
    samples: int
    with_image: int
    """Those that bring vision units."""
    vision_units: Statistics
    llm_tokens: Statistics
    target_tokens: Statistics | None
    """Tokens that carry loss, where that is known."""

    @classmethod
    def of(cls, name: str, lengths: SampleLengths) -> SourceStatistics:
        """Statistics of all samples of some lengths."""
        targets = lengths.target_tokens
        return cls(
            name=name,
            samples=len(lengths),
            with_image=int((lengths.vision_units > 0).sum()),
            vision_units=Statistics.of(lengths.vision_units),
            llm_tokens=Statistics.of(lengths.llm_tokens),
            target_tokens=None if targets is None else Statistics.of(targets),
        )


def source_statistics(lengths: SampleLengths) -> list[SourceStatistics]:
    """Statistics of every source, in the order of their numbers; of all samples where none has a source."""
    names = lengths.source_names or ("all",)
    members = _members(lengths, len(names))
    return [SourceStatistics.of(name, lengths.take(samples)) for name, samples in zip(names, members, strict=True)]


def _members(lengths: SampleLengths, num_sources: int) -> list[npt.NDArray[np.int64]]:
    """The samples of every source."""
    source = np.zeros(len(lengths), dtype=np.int64) if lengths.source is None else lengths.source
    order = np.argsort(source, kind="stable")
    return np.split(order, np.searchsorted(source[order], np.arange(1, num_sources)))


def lengths_table(lengths: SampleLengths) -> Table:
    """A section per source, and one for all where there are several; a row per load."""
    entries = source_statistics(lengths)
    rows: list[tuple[str, ...]] = []
    for entry in [*entries, *([SourceStatistics.of("all", lengths)] if len(entries) > 1 else [])]:
        targets = () if entry.target_tokens is None else ("target tokens", *entry.target_tokens.cells())
        rows += [
            (entry.name, "vision units", *entry.vision_units.cells()),
            (f"  {entry.samples:,} samples", "LLM tokens", *entry.llm_tokens.cells()),
            (f"  {entry.with_image / max(entry.samples, 1):.1%} with image", *targets),
            (),
        ]
    return make_table(("source", "", "mean", "median", "99 %", "largest"), rows, words=2)
