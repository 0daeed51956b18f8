"""What each stage of a pipeline does in a step and holds at its peak: figures, tables, and a picture of its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.table import Table

from omnibal.cost import Load
from omnibal.memory.footprint import StageMemory
from omnibal.pipeline.schedule import Operation
from omnibal.pipeline.simulate import Simulation, StepSimulation
from omnibal.plan import Plan
from omnibal.profile.records import ModelProfile
from omnibal.report.style import (
    GREY,
    SERIES,
    VERMILION,
    Column,
    Row,
    drawing,
    excess,
    in_milliseconds,
    milliseconds,
    scaled,
    table_of,
    unit_of,
)

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


def step_figures(profile: ModelProfile, plan: Plan, step: StepSimulation, load: Load) -> Row:
    """A step that was simulated under a plan, as JSON values.

    Args:
        profile: What the layers cost.
        plan: What was simulated.
        step: What came of it; stages are those of its slowest replica.
        load: A micro-batch; memory is that of stages whose micro-batches are all like it.
    """
    memory = enumerate(plan.memory(profile, load))
    return {
        "boundaries": plan.partition.boundaries,
        "micro_batches": step.replicas[0].schedule.micro_batches,
        "step_seconds": step.step_seconds,
        "pipeline_seconds": step.pipeline_seconds,
        "bubble_ratio": step.bubble_ratio,
        "stages": [_stage(profile, plan, step, stage) | {"memory_bytes": held.total} for stage, held in memory],
    }


def _stage(profile: ModelProfile, plan: Plan, step: StepSimulation, stage: int) -> dict[str, Any]:
    """A stage of the slowest replica; forward and backward pass are those of a mean micro-batch.

    The projector counts as vision. Idle is what does not compute until the pipeline's last stage is done, transfers
    among it.
    """
    simulation = step.replicas[step.slowest_replica]
    layers = plan.partition.layers(stage)
    vision = sum(profile.layers[layer].module != "language" for layer in layers)
    micro_batches, makespan = simulation.schedule.micro_batches, simulation.makespan_seconds
    idle = float(simulation.idle_seconds[stage])
    transfers = [operation for operation in Operation if operation.is_transfer]
    return {
        "stage": stage,
        "first_layer": profile.layers[layers[0]].name,
        "last_layer": profile.layers[layers[-1]].name,
        "vision_layers": vision,
        "language_layers": len(layers) - vision,
        "recomputed": sum(plan.recompute[layer] != "none" for layer in layers),
        "forward_seconds": _seconds(simulation, stage, Operation.F) / micro_batches,
        "backward_seconds": _seconds(simulation, stage, Operation.BW, Operation.B, Operation.W) / micro_batches,
        "busy_seconds": float(simulation.busy_seconds[stage]),
        "transfer_seconds": _seconds(simulation, stage, *transfers),
        "idle_seconds": idle,
        "idle_ratio": idle / makespan if makespan else 0.0,
        "in_flight": simulation.schedule.in_flight[stage],
        "reduce_seconds": float(step.reduce_seconds[stage]),
        "optimizer_seconds": float(step.optimizer_seconds[stage]),
    }


def _seconds(simulation: Simulation, stage: int, *operations: Operation) -> float:
    """How long a stage runs some operations, in all."""
    ran = np.isin(simulation.table.operations[stage], operations)
    ran &= np.arange(len(ran)) < simulation.table.lengths[stage]
    return float((simulation.ends[stage] - simulation.starts[stage])[ran].sum())


def stage_table(stages: Sequence[Row]) -> Table:
    """A row per stage: its layers, its peak memory, its time for a micro-batch, and how much of the step it is idle."""
    unit, unit_name = unit_of(row["memory_bytes"] for row in stages)
    columns: list[Column] = [
        ("stage", "{stage}"),
        ("first layer", "{first_layer}"),
        ("V+L", "{vision_layers}+{language_layers}"),
        ("re-\ncomp", "{recomputed}"),
        (unit_name, scaled("memory_bytes", unit)),
        ("forward\nms", in_milliseconds("forward_seconds")),
        ("backward\nms", in_milliseconds("backward_seconds")),
        ("idle", "{idle_ratio:.1%}"),
        ("in\nflight", "{in_flight}"),
    ]
    return table_of(stages, columns, words=2)


def cut_of(boundaries: Sequence[int]) -> str:
    """Boundaries as people read them.

    >>> cut_of((0, 5, 14))
    '0 5 14'
    """
    return " ".join(map(str, boundaries))


def methods_table(methods: Mapping[str, Row], lower_bound_seconds: float) -> Table:
    """The best partition of each method, and how far it is above what any partition can reach."""

    def slowest(row: Row) -> str:
        busy = [stage["busy_seconds"] for stage in row["stages"]]
        return f"{max(busy) / (sum(busy) / len(busy)):.2f}"

    columns = [("method", "{method}"), *_cut_columns(lower_bound_seconds)]
    columns += [("bubble", "{bubble_ratio:.1%}"), ("slowest / mean", slowest)]
    table = table_of([{"method": method, **figures} for method, figures in methods.items()], columns, words=2)
    table.add_section()
    table.add_row("(lower bound)", "", milliseconds(lower_bound_seconds))
    return table


def candidates_table(candidates: Sequence[Row], lower_bound_seconds: float) -> Table:
    """Boundaries and predicted seconds, in the order given."""
    number: Column = ("", lambda row: f"{row['place'] + 1}")
    return table_of(candidates, [number, *_cut_columns(lower_bound_seconds)], words=2)


def _cut_columns(bound: float) -> list[Column]:
    """What there is to say of a partition alone."""
    return [
        ("boundaries", lambda row: cut_of(row["boundaries"])),
        ("step ms", in_milliseconds("step_seconds")),
        ("over bound", lambda row: f"+{excess(row['step_seconds'], bound):.2%}" if bound else "–"),
    ]


def memory_table(stages: Sequence[StageMemory], budget_bytes: Sequence[int]) -> Table:
    """A row per stage: what a device holds at its peak, term by term, in GiB, or MiB where none holds a GiB.

    Of weight gradients that wait there is a column only where some do.
    """
    unit, name = unit_of(memory.total for memory in stages)
    rows = [
        asdict(memory) | {"total": memory.total, "used": memory.total / budget}
        for memory, budget in zip(stages, budget_bytes, strict=True)
    ]
    heads = {term: head for term, head in HEADS.items() if term != "pending" or any(m.pending for m in stages)}
    terms = [(head, scaled(term, unit)) for term, head in heads.items()]
    return table_of(rows, [("stage", "{place}"), *terms, (name, scaled("total", unit)), ("used", "{used:.1%}")])


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
