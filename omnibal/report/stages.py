"""What each stage of a pipeline does in a step and holds at its peak: figures, tables, and a picture of its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from rich.table import Table

from omnibal.cost import Load
from omnibal.memory.footprint import StageMemory
from omnibal.pipeline.schedule import Operation
from omnibal.pipeline.search import Candidate
from omnibal.pipeline.simulate import Simulation, StepSimulation
from omnibal.plan import Plan
from omnibal.profile.records import ModelProfile
from omnibal.report.style import GREY, SERIES, VERMILION, Figures, drawing, excess, make_table, milliseconds, unit_of

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


@dataclass(frozen=True)
class StageFigures:
    """A stage of one replica's pipeline in a step; a forward and a backward pass are those of a mean micro-batch."""

    stage: int
    first_layer: str
    last_layer: str
    vision_layers: int
    """The projector among them."""
    language_layers: int
    recomputed: int
    """Layers that recompute."""
    memory_bytes: int
    """What a device holds at its peak."""
    forward_seconds: float
    backward_seconds: float
    busy_seconds: float
    transfer_seconds: float
    """Of the idle time; 0 where transfers run beside the computations."""
    idle_seconds: float
    """Not computing until the pipeline's last stage is done."""
    idle_ratio: float
    in_flight: int
    """Most forward passes that await their backward."""
    reduce_seconds: float
    optimizer_seconds: float

    @classmethod
    def of(cls, profile: ModelProfile, plan: Plan, step: StepSimulation, stage: int, memory_bytes: int) -> StageFigures:
        """A stage of the slowest replica."""
        simulation = step.replicas[step.slowest_replica]
        indices = plan.partition.layers(stage)
        layers = [profile.layers[index] for index in indices]
        vision = sum(layer.module != "language" for layer in layers)
        micro_batches, makespan = simulation.schedule.micro_batches, simulation.makespan_seconds
        idle = float(simulation.idle_seconds[stage])
        transfers = [operation for operation in Operation if operation.is_transfer]
        return cls(
            stage=stage,
            first_layer=layers[0].name,
            last_layer=layers[-1].name,
            vision_layers=vision,
            language_layers=len(layers) - vision,
            recomputed=sum(plan.recompute[index] != "none" for index in indices),
            memory_bytes=memory_bytes,
            forward_seconds=_seconds(simulation, stage, Operation.F) / micro_batches,
            backward_seconds=_seconds(simulation, stage, Operation.BW, Operation.B, Operation.W) / micro_batches,
            busy_seconds=float(simulation.busy_seconds[stage]),
            transfer_seconds=_seconds(simulation, stage, *transfers),
            idle_seconds=idle,
            idle_ratio=idle / makespan if makespan else 0.0,
            in_flight=simulation.schedule.in_flight[stage],
            reduce_seconds=float(step.reduce_seconds[stage]),
            optimizer_seconds=float(step.optimizer_seconds[stage]),
        )


@dataclass(frozen=True)
class PartitionFigures(Figures):
    """A simulated step under a partition."""

    boundaries: tuple[int, ...]
    micro_batches: int
    """Per replica."""
    step_seconds: float
    """Until the optimizer is done."""
    pipeline_seconds: float
    """Until the slowest replica's pipeline is done."""
    bubble_ratio: float
    """Share of all stages' time in all replicas that is idle until then."""
    stages: tuple[StageFigures, ...]
    """Of the slowest replica."""

    @classmethod
    def of(cls, profile: ModelProfile, plan: Plan, step: StepSimulation, load: Load) -> PartitionFigures:
        """Of a step that was simulated under the plan; memory is that of a micro-batch of this load."""
        stages = enumerate(stage.total for stage in plan.memory(profile, load))
        return cls(
            boundaries=plan.partition.boundaries,
            micro_batches=step.replicas[0].schedule.micro_batches,
            step_seconds=step.step_seconds,
            pipeline_seconds=step.pipeline_seconds,
            bubble_ratio=step.bubble_ratio,
            stages=tuple(StageFigures.of(profile, plan, step, *stage) for stage in stages),
        )


def _seconds(simulation: Simulation, stage: int, *operations: Operation) -> float:
    """How long a stage runs some operations, in all."""
    ran = np.isin(simulation.table.operations[stage], operations)
    ran &= np.arange(len(ran)) < simulation.table.lengths[stage]
    return float((simulation.ends[stage] - simulation.starts[stage])[ran].sum())


def stage_table(stages: Sequence[StageFigures]) -> Table:
    """A row per stage: its layers, its peak memory, its time for a micro-batch, and how much of the step it is idle."""
    unit, unit_name = unit_of(row.memory_bytes for row in stages)
    heads = (
        "stage", "first layer", "V+L", "re-\ncomp", unit_name, "forward\nms", "backward\nms", "idle",
        "in\nflight",
    )  # fmt: skip
    rows = (
        (
            f"{row.stage}",
            row.first_layer,
            f"{row.vision_layers}+{row.language_layers}",
            f"{row.recomputed}",
            f"{row.memory_bytes / unit:,.1f}",
            milliseconds(row.forward_seconds),
            milliseconds(row.backward_seconds),
            f"{row.idle_ratio:.1%}",
            f"{row.in_flight}",
        )
        for row in stages
    )
    return make_table(heads, rows, words=2)


def cut_of(boundaries: Sequence[int]) -> str:
    """Boundaries as people read them.

    >>> cut_of((0, 5, 14))
    '0 5 14'
    """
    return " ".join(map(str, boundaries))


def methods_table(methods: Mapping[str, PartitionFigures], lower_bound_seconds: float) -> Table:
    """The best partition of each method, and how far it is above what any partition can reach."""
    rows: list[tuple[str, ...]] = []
    for method, figures in methods.items():
        busy = [stage.busy_seconds for stage in figures.stages]
        rows.append((
            method,
            cut_of(figures.boundaries),
            milliseconds(figures.step_seconds),
            _over(figures.step_seconds, lower_bound_seconds),
            f"{figures.bubble_ratio:.1%}",
            f"{max(busy) / (sum(busy) / len(busy)):.2f}",
        ))  # fmt: skip
    bound = ("(lower bound)", "", milliseconds(lower_bound_seconds), "", "", "")
    return make_table(
        ("method", "boundaries", "step ms", "over bound", "bubble", "slowest / mean"), [*rows, (), bound], words=2
    )


def candidates_table(candidates: Sequence[Candidate], lower_bound_seconds: float) -> Table:
    """Boundaries and predicted seconds, in the order given."""
    rows = (
        (
            f"{place}",
            cut_of(entry.partition.boundaries),
            milliseconds(entry.step_seconds),
            _over(entry.step_seconds, lower_bound_seconds),
        )
        for place, entry in enumerate(candidates, start=1)
    )
    return make_table(("", "boundaries", "step ms", "over bound"), rows, words=2)


def _over(seconds: float, bound: float) -> str:
    return f"+{excess(seconds, bound):.2%}" if bound else "–"


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
