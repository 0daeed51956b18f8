"""What a device of every stage holds at its peak: a table and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np
from rich.table import Table

from omnibal.memory.footprint import StageMemory
from omnibal.report.style import GREY, SERIES, VERMILION, drawing, make_table, unit_of

TERMS: Final = {
    "parameters": SERIES[0],
    "gradients": SERIES[4],
    "optimizer": SERIES[7],
    "activations": SERIES[1],
    "pending": SERIES[9],
    "buffers": SERIES[2],
    "transient": SERIES[3],
    "logits": SERIES[6],
    "overhead": SERIES[8],
}
"""Terms of a stage's memory and their colours, from the bottom to the top."""
HEADS: Final = dict(
    zip(TERMS, ("weights", "grads", "opt", "kept", "wait", "pipe", "runs", "logits", "else"), strict=True)
)
"""The same, as heads of a table's columns."""
BAR: Final = 0.38
VISIBLE_SHARE: Final = 0.005


def memory_table(stages: Sequence[StageMemory], budget_bytes: Sequence[int]) -> Table:
    """A row per stage: what a device holds at its peak, term by term, in GiB, or MiB where none holds a GiB.

    Of weight gradients that wait there is a column only where some do.
    """
    unit, name = unit_of(memory.total for memory in stages)
    heads = {term: head for term, head in HEADS.items() if term != "pending" or any(m.pending for m in stages)}
    rows = (
        (
            f"{stage}",
            *(f"{getattr(memory, term) / unit:,.1f}" for term in heads),
            f"{memory.total / unit:,.1f}",
            f"{memory.total / budget:.1%}",
        )
        for stage, (memory, budget) in enumerate(zip(stages, budget_bytes, strict=True))
    )
    return make_table(("stage", *heads.values(), name, "used"), rows)


def plot_memory(variants: Mapping[str, Sequence[StageMemory]], budget_bytes: Sequence[int], path: Path) -> None:
    """Draw what a device of each stage holds, variants side by side, against its budget."""
    places = np.arange(len(budget_bytes))
    width = 2 * BAR / len(variants)
    unit, name = unit_of(memory.total for stages in variants.values() for memory in stages)
    shown = visible_terms(variants.values(), budget_bytes)
    with drawing(path, max(5.0, 1.6 + 1.1 * len(places)), 4.2) as figure:
        axes = figure.subplots()
        lefts = places[:, None] - BAR + (np.arange(len(variants)) + 0.5) * width  # (stages, variants)
        for number, stages in enumerate(variants.values()):
            bottom = np.zeros(len(places))
            for term, colour in TERMS.items():
                sizes = np.array([getattr(memory, term) for memory in stages]) / unit
                label = term if number == 0 and term in shown else None
                axes.bar(lefts[:, number], sizes, 0.92 * width, bottom=bottom, color=colour, label=label)
                bottom += sizes
        budgets = np.array(budget_bytes) / unit
        axes.hlines(budgets, places - 1.1 * BAR, places + 1.1 * BAR, color=VERMILION, linewidth=1.4, label="budget")
        axes.set_xticks(lefts.ravel(), minor=True)
        axes.set_xticklabels([*variants] * len(places), minor=True, rotation=90, fontsize=7, color=GREY)
        axes.set_xticks(places, [f"stage {stage}" for stage in places])
        axes.tick_params(axis="x", which="major", length=0, pad=8 + 4 * max(map(len, variants)))
        axes.set_ylabel(f"{name} of a device at its peak")
        axes.grid(False, axis="x")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right center")


def visible_terms(variants: Iterable[Sequence[StageMemory]], budget_bytes: Sequence[int]) -> list[str]:
    """The terms that are seen in a picture of some memory and its budgets: half a percent of the height or more."""
    held = [asdict(memory) | {"total": memory.total} for stages in variants for memory in stages]
    height = max(*budget_bytes, *(sizes["total"] for sizes in held))
    return [term for term in TERMS if max(sizes[term] for sizes in held) >= VISIBLE_SHARE * height]
