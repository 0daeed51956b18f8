"""What a dataset's samples are like, source by source: statistics, their table, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from rich.table import Table

from omnibal.cost import FloatArray
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.report.style import SERIES, Figures, drawing, make_table, whole_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOKEN_BINS: Final = 80
MOST_BARS: Final = 40
WIDE: Final = 10
"""From this ratio of the longest sample to the shortest on, the axis of tokens is logarithmic."""


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


def source_statistics(lengths: SampleLengths, names: Sequence[str]) -> list[SourceStatistics]:
    """Statistics of every source, in the order of ``names``, which stand for the numbers in ``lengths.source``."""
    members = _members(lengths, len(names))
    return [SourceStatistics.of(name, lengths.take(samples)) for name, samples in zip(names, members, strict=True)]


def _members(lengths: SampleLengths, num_sources: int) -> list[npt.NDArray[np.int64]]:
    """The samples of every source."""
    source = np.zeros(len(lengths), dtype=np.int64) if lengths.source is None else lengths.source
    order = np.argsort(source, kind="stable")
    return np.split(order, np.searchsorted(source[order], np.arange(1, num_sources)))


def lengths_table(lengths: SampleLengths, names: Sequence[str]) -> Table:
    """A section per source, and one for all where there are several; a row per load."""
    entries = source_statistics(lengths, names)
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


def plot_lengths(lengths: SampleLengths, names: Sequence[str], path: Path) -> None:
    """Draw histograms of LLM tokens and vision units, stacked by source, the largest source at the bottom.

    Of more than ten sources the smallest are drawn together. There is at least one sample.
    """
    parts = _drawn(_members(lengths, len(names)), names)
    tokens = [np.maximum(lengths.llm_tokens[samples], 1) for samples in parts.values()]
    vision = [lengths.vision_units[samples] for samples in parts.values()]
    with drawing(path, 10, 3.9) as figure:
        axes = figure.subplots(1, 2)
        patches = _draw_tokens(axes[0], tokens)
        _draw_vision(axes[1], vision)
        for panel in axes:
            panel.set_ylabel("samples")
            panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        labels = [f"{name} ({len(samples):,})" for name, samples in parts.items()]
        figure.legend(patches, labels, loc="outside right upper")


def _drawn(members: list[npt.NDArray[np.int64]], names: Sequence[str]) -> dict[str, npt.NDArray[np.int64]]:
    """Samples by source, the largest first; the smallest together where there are more than colours."""
    order = sorted(range(len(names)), key=lambda number: -len(members[number]))
    kept = order if len(order) <= len(SERIES) else order[: len(SERIES) - 1]
    parts = {names[number]: members[number] for number in kept}
    if len(kept) < len(order):
        parts[f"{len(order) - len(kept)} others"] = np.concatenate([members[n] for n in order[len(kept) :]])
    return parts


def _draw_tokens(axes: Axes, parts: Sequence[IntArray]) -> list[Any]:
    """Draw an area for each part; what stands for them in a legend."""
    from matplotlib.ticker import LogLocator, NullLocator

    least, most = min(int(part.min()) for part in parts if len(part)), max(int(part.max(initial=0)) for part in parts)
    wide = most > WIDE * least
    edges = token_edges(least, most, wide=wide)
    patches = _stack(axes, parts, edges, histtype="stepfilled")
    axes.set(xscale="log" if wide else "linear", xlabel="LLM tokens in a sample", xlim=(edges[0], edges[-1]))
    whole_numbers(axes.xaxis)
    if wide:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    return patches


def _stack(axes: Axes, parts: Sequence[IntArray], edges: npt.NDArray[Any], **style: Any) -> list[Any]:
    """Draw a histogram of each part on top of the one before; a patch of each."""
    patches: Any = axes.hist([*parts], list(edges), stacked=True, color=SERIES[: len(parts)], **style)[2]
    return [part[0] for part in patches] if len(parts) > 1 else [patches[0]]


def token_edges(least: int, most: int, *, wide: bool) -> FloatArray:
    """Edges of at most 80 bins that hold whole numbers, equally many or, if ``wide``, in about equal ratios."""
    if wide:
        return np.asarray(np.unique(np.geomspace(least, most + 1, TOKEN_BINS + 1).round()) - 0.5, dtype=np.float64)
    width = -(-(most + 1 - least) // TOKEN_BINS)
    bins = -(-(most + 1 - least) // width)
    return np.asarray(least - 0.5 + width * np.arange(bins + 1), dtype=np.float64)


def _draw_vision(axes: Axes, parts: Sequence[IntArray]) -> None:
    """Draw a bar for each number of tiles, or for a range of numbers where there are many."""
    most = max(int(part.max(initial=0)) for part in parts)
    width = -(-(most + 1) // MOST_BARS)
    _stack(axes, parts, np.arange(0, most + 1 + width, width) - 0.5, rwidth=0.8)
    axes.set_xlabel("vision units in a sample")
    whole_numbers(axes.xaxis, 8)
