"""What each stage of a pipeline does in a step and holds at its peak: figures, tables, and pictures of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rich.table import Table

from omnibal.cost import Load
from omnibal.families.base import vision_unit_of
from omnibal.memory.footprint import StageMemory
from omnibal.pipeline.partition import frozen_stages
from omnibal.pipeline.schedule import Operation, Schedule
from omnibal.pipeline.search import METHODS, search_partition
from omnibal.pipeline.simulate import Event, Simulation, StepSimulation
from omnibal.pipeline.times import IMAGES
from omnibal.plan import Plan
from omnibal.planner.packings import Packing
from omnibal.profile.records import ModelProfile
from omnibal.report.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SERIES,
    VERMILION,
    Column,
    Row,
    cells_of,
    drawing,
    excess,
    in_milliseconds,
    legend_below,
    make_table,
    milliseconds,
    scaled,
    short,
    stacked_bars,
    table_of,
    unit_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

# Terms of a stage's memory, in the order of a picture: colour, and head of a table's column.
TERMS: Final = {
    "parameters": (SERIES[0], "weights"),
    "gradients": (SERIES[4], "grads"),
    "optimizer": (SERIES[7], "opt"),
    "activations": (SERIES[1], "kept"),
    "pending": (SERIES[9], "wait"),
    "buffers": (SERIES[2], "pipe"),
    "transient": (SERIES[3], "runs"),
    "logits": (SERIES[6], "logits"),
    "overhead": (SERIES[8], "else"),
}
# Operations on a timeline: name in the legend, and colour.
COLOURS: Final = {
    Operation.F: ("forward", BLUE),
    Operation.BW: ("backward", ORANGE),
    Operation.B: ("backward to inputs", PINK),
    Operation.W: ("backward to weights", GREEN),
}
TRANSFER: Final = ("transfer", "#B0B7BF")
TIMELINE_BAR: Final = 0.82  # height of a row's bars
VISIBLE_WIDTH: Final = 0.001  # a bar of a smaller share of the picture is not a dot wide
DIGIT_WIDTH: Final = 0.008  # micro-batches are numbered where a bar takes at least this share of the picture per digit


def step_figures(profile: ModelProfile, plan: Plan, step: StepSimulation, load: Load) -> Row:
    """A step that was simulated under a plan, as JSON values; memory is that of micro-batches like ``load``."""
    memory = enumerate(plan.memory(profile, load))
    schedule = plan.make_schedule().with_frozen_front(int(frozen_stages(profile, np.array(plan.partition.boundaries))))
    return {
        "boundaries": plan.partition.boundaries,
        "micro_batches": plan.micro_batches,
        "step_seconds": step.step_seconds,
        "pipeline_seconds": step.pipeline_seconds,
        "bubble_ratio": step.bubble_ratio,
        "stages": [
            _stage(profile, plan, step, schedule, stage) | {"memory_bytes": held.total} for stage, held in memory
        ],
    }


def stage_layers(plan: Plan, layers: Sequence[Any], stage: int) -> dict[str, Any]:
    """What a plan puts on a stage, of the layers of a profile or a model's records; the projector counts as vision."""
    own = plan.partition.layers(stage)
    vision = sum(layers[layer].module != "language" for layer in own)
    return {
        "first_layer": layers[own[0]].name,
        "last_layer": layers[own[-1]].name,
        "vision_layers": vision,
        "language_layers": len(own) - vision,
        "recomputed": sum(plan.recompute[layer] != "none" for layer in own),
    }


def _stage(profile: ModelProfile, plan: Plan, step: StepSimulation, schedule: Schedule, stage: int) -> dict[str, Any]:
    simulation = step.replicas[step.slowest_replica]
    micro_batches, makespan = schedule.micro_batches_of(stage), simulation.makespan_seconds
    busy = float(simulation.stage_busy_seconds[stage])
    idle = makespan - busy  # does not compute until the last stage is done; transfers among it
    transfers = [operation for operation in Operation if operation.is_transfer]
    return {
        "stage": stage,
        **stage_layers(plan, profile.layers, stage),
        # of a mean micro-batch
        "forward_seconds": _seconds(simulation, stage, Operation.F) / micro_batches,
        "backward_seconds": _seconds(simulation, stage, Operation.BW, Operation.B, Operation.W) / micro_batches,
        "busy_seconds": busy,
        "transfer_seconds": _seconds(simulation, stage, *transfers),
        "idle_seconds": idle,
        "idle_ratio": idle / makespan if makespan else 0.0,
        "in_flight": schedule.in_flight[stage],
        "reduce_seconds": float(step.reduce_seconds[stage]),
        "optimizer_seconds": float(step.optimizer_seconds[stage]),
    }


def _seconds(simulation: Simulation, stage: int, *operations: Operation) -> float:
    rows = simulation.stage_rows[stage]
    ran = np.isin(simulation.table.operations[rows], operations)
    ran &= np.arange(ran.shape[1]) < simulation.table.lengths[rows, None]  # rows of shorter stages are filled up
    return float((simulation.ends[rows] - simulation.starts[rows])[ran].sum()) / len(rows)


def stage_cells(stages: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows, one a stage: its layers, its peak memory, its time for a micro-batch, how much it is idle."""
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
    return [head for head, _ in columns], cells_of(stages, columns)


def cut_of(boundaries: Sequence[int]) -> str:
    """Boundaries as people read them.

    >>> cut_of((0, 5, 14))
    '0 5 14'
    """
    return " ".join(map(str, boundaries))


def _methods_table(methods: Mapping[str, Row]) -> Table:
    """The best partition of each method, and how far it is above what any partition can reach."""

    def slowest(row: Row) -> str:  # 1.00 where stages are even
        busy = [stage["busy_seconds"] for stage in row["stages"]]
        return f"{max(busy) / (sum(busy) / len(busy)):.2f}"

    columns: list[Column] = [
        ("method", "{method}"),
        ("boundaries", lambda row: cut_of(row["boundaries"])),
        ("step ms", in_milliseconds("step_seconds")),
        ("over bound", lambda row: f"+{excess(row['step_seconds'], bound):.2%}" if bound else "–"),
        ("bubble", "{bubble_ratio:.1%}"),
        ("slowest / mean", slowest),
    ]
    bound = next(iter(methods.values()))["lower_bound_seconds"]
    table = table_of([{"method": method, **figures} for method, figures in methods.items()], columns, words=2)
    table.add_section()
    table.add_row("(lower bound)", "", milliseconds(bound))
    return table


@dataclass(frozen=True)
class Explanation:
    profile: ModelProfile
    plan: Plan
    packing: Packing  # one step of real packs

    @cached_property
    def step(self) -> StepSimulation:
        return self.plan.simulate(self.profile, self.packing.steps[0])

    @cached_property
    def figures(self) -> Row:
        return step_figures(self.profile, self.plan, self.step, self.packing.largest)

    @cached_property
    def cuts(self) -> dict[str, Row]:
        """The step under 1F1B and the cut of each method; none where an encoder has devices of its own."""
        plan, loads = replace(self.plan, schedule="1f1b", predicted=None), self.packing.steps[0]
        if plan.num_stages == 1 or plan.layout.encoder is not None:
            return {}
        found: dict[str, Row] = {}
        searched = partial(search_partition, zero_stage=plan.layout.zero_stage, recompute=plan.recompute, top=1)
        for method in METHODS:
            search = searched(self.profile, loads, plan.num_stages, plan.links, method=method)
            cut = replace(plan, partition=search.best.partition)
            figures = step_figures(self.profile, cut, cut.simulate(self.profile, loads), self.packing.largest)
            found[method] = {**figures, "gap": search.gap, "lower_bound_seconds": search.lower_bound_seconds}
        return found

    def to_record(self) -> dict[str, Any]:
        profile, plan, limits = self.profile, self.plan, self.plan.limits
        return {
            "profile": {"hash": profile.content_hash, "device": profile.devices, "dtype": profile.dtype},
            "cluster": str(plan.known_cluster),
            "layout": plan.to_record()["layout"],
            "links": asdict(plan.links),
            "schedule": plan.schedule,
            "limits": {"vision_units": limits.vision_units, "llm_tokens": limits.llm_tokens},
            "step": self.packing.numbers[0] if self.packing.numbers else None,
            **self.figures,
            "cuts": self.cuts,
        }

    def parts(self) -> list[str | Table]:
        plan, limits, figures, numbers = self.plan, self.plan.limits, self.figures, self.packing.numbers
        step, pipeline = figures["step_seconds"], figures["pipeline_seconds"]
        packs = f"step {numbers[0]} of an epoch, packs of at most" if numbers else "equal packs of"
        cuts: list[str | Table] = ["cuts of all methods, under 1F1B", _methods_table(self.cuts)] if self.cuts else []
        return [
            f"{len(self.profile.layers)} layers on {plan.known_cluster} ({self.profile.dtype}): {plan.layout}, "
            f"{plan.schedule}\n{plan.micro_batches} micro-batches; {packs} {limits.vision_units:,} "
            f"{vision_unit_of(self.profile.layers)} and {limits.llm_tokens:,} LLM tokens",
            *cuts,
            f"cut at {cut_of(plan.partition.boundaries)}",
            make_table(*stage_cells(figures["stages"]), words=2),
            f"step {milliseconds(step)} ms: pipeline {milliseconds(pipeline)} ms (bubble ratio "
            f"{figures['bubble_ratio']:.1%}), gradients and optimizer {milliseconds(step - pipeline)} ms",
        ]

    def draw(self, path: Path) -> None:
        replicas = self.step.replicas
        order = sorted(range(len(replicas)), key=lambda number: replicas[number].makespan_seconds)
        ends = {order[0]: "fastest", order[-1]: "slowest"}  # the slowest alone where there is but one
        panels = {f"replica {number}, the {which}": replicas[number] for number, which in ends.items()}
        plot_timeline(panels, path)


def memory_table(stages: Sequence[StageMemory], budget_bytes: Sequence[int]) -> Table:
    """A row per stage: what a device holds at its peak, term by term, in GiB, or MiB where none holds a GiB."""
    unit, name = unit_of(memory.total for memory in stages)
    rows = [
        asdict(memory) | {"total": memory.total, "used": memory.total / budget}
        for memory, budget in zip(stages, budget_bytes, strict=True)
    ]
    # Inputs that wait for weight gradients have a column only where there are some.
    has_pending = any(memory.pending for memory in stages)
    terms = [(head, scaled(term, unit)) for term, (_, head) in TERMS.items() if term != "pending" or has_pending]
    return table_of(rows, [("stage", "{place}"), *terms, (name, scaled("total", unit)), ("used", "{used:.1%}")])


def plot_memory(variants: Mapping[str, Sequence[StageMemory]], budget_bytes: Sequence[int], path: Path) -> None:
    """Draw what a device of each stage holds, term by term, variants one below the other, against its budget."""
    unit, name = unit_of(memory.total for stages in variants.values() for memory in stages)
    bars = [
        (f"stage {place}, {variant}", stages[place], budget)
        for place, budget in enumerate(budget_bytes)
        for variant, stages in variants.items()
    ]
    parts = {head: [getattr(memory, term) / unit for _, memory, _ in bars] for term, (_, head) in TERMS.items()}
    with drawing(path, 7.6, 1.6 + 0.3 * len(bars)) as figure:
        axes = figure.subplots()
        places = stacked_bars(axes, [title for title, *_ in bars], parts, [colour for colour, _ in TERMS.values()])
        for place, (*_, budget) in zip(places, bars, strict=True):
            axes.plot([budget / unit] * 2, [place - 0.45, place + 0.45], color=VERMILION)
        axes.set_xlabel(f"{name} of a device at its peak; the red line is its budget")
        axes.grid(False, axis="y")
        legend_below(figure, axes)


def plot_timeline(simulations: Mapping[str, Simulation], path: Path) -> None:
    """Draw a panel per pipeline on a common time axis: a row per stage, a bar per instruction, its idle time beside."""
    end = max(simulation.makespan_seconds for simulation in simulations.values())
    unit, name = (1.0, "seconds") if end >= 10 else (1e3, "milliseconds")
    rows = [len(simulation.ends) for simulation in simulations.values()]
    with drawing(path, 11.0, 0.9 + sum(0.34 * count + 0.45 for count in rows)) as figure:
        axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
        for panel, (title, simulation) in zip(axes, simulations.items(), strict=True):
            _draw(panel, simulation, unit, unit * end)
            bubble = f"{short(unit * simulation.makespan_seconds)} {name}, bubble ratio {simulation.bubble_ratio:.1%}"
            panel.set_title(f"{title}: {bubble}" if title else bubble, loc="left")
        axes[-1].set_xlabel(f"{name} since the start of the step")
        figure.legend(handles=_legend(simulations), loc="outside lower center", ncols=4)


def _draw(axes: Axes, simulation: Simulation, unit: float, end: float) -> None:
    stages = range(len(simulation.ends))
    # Events sort by stage and then by operation: each group is one colour in one row.
    rows = groupby(sorted(simulation.events), key=lambda event: (event.stage, event.operation))
    for (stage, operation), events in rows:
        _draw_bars(axes, stage, operation, [*events], unit, end)
    for stage in stages:
        idle = float(simulation.idle_seconds[stage])
        share = idle / simulation.makespan_seconds if simulation.makespan_seconds else 0.0
        axes.annotate(
            f"idle {short(unit * idle)} ({share:.0%})",
            (1.0, stage),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=GREY,
        )
    axes.axvline(unit * simulation.makespan_seconds, color=GREY, linewidth=0.8, linestyle=":")
    # stage 0 on top
    axes.set(ylim=(len(stages) - 0.5, -0.5), xlim=(0, end), yticks=[*stages])
    axes.set_yticklabels(simulation.row_names)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)


def _draw_bars(axes: Axes, stage: int, operation: Operation, events: Sequence[Event], unit: float, end: float) -> None:
    """Draw all bars of one colour in one row as one collection: thousands of single ones take a minute."""
    bars = [(unit * event.start_seconds, unit * (event.end_seconds - event.start_seconds)) for event in events]
    place = (stage - TIMELINE_BAR / 2, TIMELINE_BAR)
    if operation.is_transfer:
        axes.broken_barh(bars, place, facecolor=TRANSFER[1], linewidth=0)
        return
    axes.broken_barh(bars, place, facecolor=COLOURS[operation][1], edgecolor="white", linewidth=0.4)
    for event, (start, width) in zip(events, bars, strict=True):
        number = "ViT" if event.micro_batch == IMAGES else str(event.micro_batch)
        if width >= DIGIT_WIDTH * len(number) * end:
            axes.text(start + width / 2, stage, number, ha="center", va="center", fontsize=7, color="white")


def _legend(simulations: Mapping[str, Simulation]) -> list[Patch]:
    from matplotlib.patches import Patch

    events = [event for simulation in simulations.values() for event in simulation.events]
    least = VISIBLE_WIDTH * max(simulation.makespan_seconds for simulation in simulations.values())
    ran = {event.operation for event in events if event.end_seconds - event.start_seconds > least}
    entries = [COLOURS[operation] for operation in COLOURS if operation in ran]
    entries += [TRANSFER] * any(operation.is_transfer for operation in ran)
    return [Patch(facecolor=colour, label=name) for name, colour in entries]
