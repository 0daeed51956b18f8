"""What a dataset's samples are like, source by source: statistics and their table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from omnibal.data.lengths import IntArray, SampleLengths


@dataclass(frozen=True)
class Statistics:
    """How one load is distributed over samples: total, mean, median, 99th percentile and largest."""

    total: int
    mean: float
    p50: float
    p99: float
    max: int

    @classmethod
    def of(cls, values: IntArray) -> "Statistics":
        """Statistics of some values; zeros where there are none."""
        if len(values) == 0:
            return cls(0, 0.0, 0.0, 0.0, 0)
        p50, p99 = np.percentile(values, (50, 99)).tolist()
        return cls(int(values.sum(dtype=np.int64)), float(values.mean()), p50, p99, int(values.max()))


@dataclass(frozen=True)
class SourceStatistics:
    """The samples of one source, or of all.

    Attributes:
        name: What the source is called.
        samples: How many it has.
        with_image: How many of them bring vision units.
        vision_units: What they bring to the ViT.
        llm_tokens: What they bring to the LLM.
        target_tokens: What of that carries loss, where it is known.
    """

    name: str
    samples: int
    with_image: int
    vision_units: Statistics
    llm_tokens: Statistics
    target_tokens: Statistics | None

    @classmethod
    def of(cls, name: str, lengths: SampleLengths) -> "SourceStatistics":
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

    def to_record(self) -> dict[str, Any]:
        """The statistics as JSON values."""
        return asdict(self)


def source_statistics(lengths: SampleLengths, names: Sequence[str]) -> list[SourceStatistics]:
    """Statistics of every source, in the order of ``names``, which stand for the numbers in ``lengths.source``."""
    if lengths.source is None:
        return [SourceStatistics.of(names[0], lengths)]
    order = np.argsort(lengths.source, kind="stable")
    bounds = np.searchsorted(lengths.source[order], np.arange(1, len(names)))
    return [
        SourceStatistics.of(name, lengths.take(samples))
        for name, samples in zip(names, np.split(order, bounds), strict=True)
    ]


def lengths_table(lengths: SampleLengths, names: Sequence[str]) -> Table:
    """A section per source, and one for all where there are several; a row per load."""
    rows = source_statistics(lengths, names)
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("source", overflow="fold")
    for name in ("", "mean", "median", "99 %", "largest"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in [*rows, *([SourceStatistics.of("all", lengths)] if len(rows) > 1 else [])]:
        table.add_row(row.name, "vision units", *_cells(row.vision_units))
        table.add_row(f"  {row.samples:,} samples", "LLM tokens", *_cells(row.llm_tokens))
        targets = () if row.target_tokens is None else ("target tokens", *_cells(row.target_tokens))
        table.add_row(f"  {row.with_image / max(row.samples, 1):.1%} with image", *targets)
        table.add_section()
    return table


def _cells(load: Statistics) -> tuple[str, ...]:
    return f"{load.mean:,.1f}", f"{load.p50:,.0f}", f"{load.p99:,.0f}", f"{load.max:,}"
