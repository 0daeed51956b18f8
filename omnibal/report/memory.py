"""What every stage of a plan holds, recomputes and waits for: tables, and a picture of its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np
from rich import box
from rich.table import Table

from omnibal.families.base import Module
from omnibal.memory.footprint import Level, StageMemory
from omnibal.plan import Plan
from omnibal.report.style import GREY, SERIES, VERMILION, new_figure, save, styled

GIB: Final = 2**30
MIB: Final = 2**20
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


def stage_plan_table(plan: Plan, modules: Sequence[Module]) -> Table:
    """A row per stage: its layers, how many recompute, its time for a micro-batch, how much of a step it is idle.

    Args:
        plan: With a prediction.
        modules: Of the model's layers.
    """
    assert plan.predicted is not None
    table = _table("V+L", "full", "selective", "forward ms", "backward ms", "recompute ms", "idle")
    for stage, row in enumerate(plan.predicted.stages):
        layers = plan.partition.layers(stage)
        table.add_row(
            f"{stage}",
            _count(modules, layers),
            _count(modules, _at(plan, layers, "full")),
            _count(modules, _at(plan, layers, "selective")),
            f"{1e3 * row.forward_seconds:,.1f}",
            f"{1e3 * row.backward_seconds:,.1f}",
            f"{1e3 * row.recompute_seconds:,.1f}",
            f"{row.idle_ratio:.1%}",
        )
    return table


def memory_table(stages: Sequence[StageMemory], budget_bytes: Sequence[int]) -> Table:
    """A row per stage: what a device holds at its peak, term by term, in GiB, or MiB where none holds a GiB.

    Of weight gradients that wait there is a column only where some do.

    Args:
        stages: Their memory.
        budget_bytes: What a device of each may hold.
    """
    unit, name = unit_of(memory.total for memory in stages)
    heads = {term: head for term, head in HEADS.items() if term != "pending" or any(m.pending for m in stages)}
    table = _table(*heads.values(), name, "used")
    for stage, (memory, budget) in enumerate(zip(stages, budget_bytes, strict=True)):
        sizes = [f"{asdict(memory)[term] / unit:,.1f}" for term in heads]
        table.add_row(f"{stage}", *sizes, f"{memory.total / unit:,.1f}", f"{memory.total / budget:.1%}")
    return table


def unit_of(sizes: Iterable[int]) -> tuple[int, str]:
    """Bytes and name of the unit to show sizes in, by the largest.

    >>> unit_of([2**20, 2**31]), unit_of([2**20])
    ((1073741824, 'GiB'), (1048576, 'MiB'))
    """
    return (GIB, "GiB") if max(sizes) >= GIB else (MIB, "MiB")


def plot_memory(variants: Mapping[str, Sequence[StageMemory]], budget_bytes: Sequence[int], path: Path) -> None:
    """Draw what a device of each stage holds, variants side by side, against its budget.

    Args:
        variants: Each stage's memory, by title; from left to right.
        budget_bytes: The most that a device of each stage may hold.
        path: The PNG.
    """
    places = np.arange(len(budget_bytes))
    width = 2 * BAR / len(variants)
    unit, name = unit_of(memory.total for stages in variants.values() for memory in stages)
    shown = visible_terms(variants.values(), budget_bytes)
    with styled():
        figure = new_figure(max(5.0, 1.6 + 1.1 * len(places)), 4.2)
        axes = figure.subplots()
        for number, stages in enumerate(variants.values()):
            left, bottom = places - BAR + (number + 0.5) * width, np.zeros(len(places))
            for term, colour in TERMS.items():
                sizes = np.array([asdict(memory)[term] for memory in stages]) / unit
                label = term if number == 0 and term in shown else None
                axes.bar(left, sizes, 0.92 * width, bottom=bottom, color=colour, label=label)
                bottom += sizes
        budgets = np.array(budget_bytes) / unit
        axes.hlines(budgets, places - 1.1 * BAR, places + 1.1 * BAR, color=VERMILION, linewidth=1.4, label="budget")
        axes.set_xticks((places[:, None] - BAR + (np.arange(len(variants)) + 0.5) * width).ravel(), minor=True)
        axes.set_xticklabels([*variants] * len(places), minor=True, rotation=90, fontsize=7, color=GREY)
        axes.set_xticks(places, [f"stage {stage}" for stage in places])
        axes.tick_params(axis="x", which="major", length=0, pad=8 + 4 * max(map(len, variants)))
        axes.set_ylabel(f"{name} of a device at its peak")
        axes.grid(False, axis="x")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right center")
        save(figure, path)


def visible_terms(variants: Iterable[Sequence[StageMemory]], budget_bytes: Sequence[int]) -> list[str]:
    """The terms that are seen in a picture of some memory and its budgets: half a percent of the height or more."""
    held = [asdict(memory) | {"total": memory.total} for stages in variants for memory in stages]
    height = max(*budget_bytes, *(sizes["total"] for sizes in held))
    return [term for term in TERMS if max(sizes[term] for sizes in held) >= VISIBLE_SHARE * height]


def _at(plan: Plan, layers: range, level: Level) -> list[int]:
    return [layer for layer in layers if plan.recompute[layer] == level]


def _count(modules: Sequence[Module], layers: Sequence[int]) -> str:
    """Layers of the ViT and of the LLM."""
    vision = sum(modules[layer] != "language" for layer in layers)
    return f"{vision}+{len(layers) - vision}"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in ("stage", *columns):
        table.add_column(name, justify="right")
    return table
