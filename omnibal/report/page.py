"""One self-contained page about a plan, a run, or both: why balance, what changes, what it gains, what was measured."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from omnibal.advise.estimate import Way, gain_over
from omnibal.cost import FloatArray, Load
from omnibal.data.metrics import dist_ratio
from omnibal.data.packing_spec import DEFAULT_COST
from omnibal.families.base import vision_unit_of
from omnibal.memory.footprint import StageMemory
from omnibal.plan import Plan
from omnibal.planner.search import RANDOM, Variant
from omnibal.profile.records import every_layer
from omnibal.report.stages import plot_memory, plot_timeline, stage_cells, step_figures
from omnibal.report.style import (
    BLUE,
    GREY,
    ORANGE,
    VERMILION,
    drawing,
    html_table,
    legend_below,
    milliseconds,
    page,
    paragraph,
    picture,
    section,
)
from omnibal.report.training import Metrics, plot_shares, plot_training, training_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN: Final = 48  # micro-batches whose ranks are drawn, from the middle of the epoch


@dataclass(frozen=True)
class PlanPart:
    variants: tuple[Variant, ...]  # from random batches to the plan
    others: tuple[Way, ...]  # what is done today, if that is not the plan, and the cheapest alternative
    largest: Load  # a micro-batch that none within the plan's limits exceeds

    @property
    def plan(self) -> Plan:
        return self.variants[-1].plan

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        return self.plan.memory(self.variants[-1].profile, self.largest)

    @property
    def recomputed_memory(self) -> tuple[StageMemory, ...]:
        levels = every_layer("full", self.plan.partition.num_layers)
        return replace(self.plan, recompute=levels).memory(self.variants[-1].profile, self.largest)

    @property
    def budget_bytes(self) -> tuple[int, ...]:
        return self.plan.known_cluster.stage_memory_bytes(self.plan.layout)


def write_page(path: Path, *, plan: PlanPart | None, run: Metrics | None) -> None:
    """Write an HTML file about a plan, a run's log, or both; its pictures are in it, and its folder is made."""
    # Pictures are drawn into a folder that goes; the page holds their bytes.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sections = [] if plan is None else [of(plan, folder) for of in (_data, _stages, _timeline, _gain)]
        if run is not None:
            sections.append(_measured(run, folder))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page("Balanced training", _lead(plan, run), sections))


def _lead(plan: PlanPart | None, run: Metrics | None) -> str:
    parts = []
    if plan is not None:
        last = plan.variants[-1]
        parts.append(
            f"{last.samples_per_second:,.1f} samples/s are predicted on {plan.plan.layout} of "
            f"{plan.plan.known_cluster}: {gain_over(last.samples_per_second, plan.others)}."
        )
    if run is not None:
        parts.append(f"{len(run.steps):,} steps were measured on {run.devices}.")
    return " ".join(parts)


def _data(part: PlanPart, folder: Path) -> str:
    first, last = part.variants[0], part.variants[-1]
    rows = [_data_row(first.name, first), _data_row("with the plan", last)]
    unit, limits, has_ranks = vision_unit_of(last.profile.layers), part.plan.limits, part.plan.layout.num_replicas > 1
    plot_rank_loads({first.name: first.load, "with the plan": last.load}, folder / "ranks.png", unit)
    names: tuple[str, ...] = ("", "samples in a micro-batch", unit, "LLM tokens", "Dist Ratio, ViT", "Dist Ratio, LLM")
    if not has_ranks:  # nobody waits
        names, rows = names[:4], [row[:4] for row in rows]
    waiting = " The Dist Ratio is the share of time that ranks would wait for the one with the largest load."
    return section(
        "Data: which samples share a micro-batch",
        paragraph(
            "Random micro-batches are padded to their longest sample, and every rank waits for the slowest one. "
            f"Packs hold at most {limits.vision_units:,} {unit} and {limits.llm_tokens:,} LLM tokens, without padding."
            + waiting
            * has_ranks
        ),
        html_table(names, rows),
        picture(
            folder / "ranks.png",
            "Loads of all ranks, micro-batch by micro-batch: a dot for each rank, a line for the slowest one. Shaded "
            "is how long the others wait on average.",
        ),
    )


def _data_row(name: str, variant: Variant) -> tuple[str, ...]:
    load = variant.load
    columns = load.vision_units, load.llm_tokens
    samples = variant.samples_per_step / (load.shape[1] * load.shape[2])
    spreads = [f"{values.mean():,.1f} ± {values.std():,.1f}" for values in columns]
    return (name, f"{samples:.2f}", *spreads, *(f"{dist_ratio(_by_rank(values)):.3f}" for values in columns))


def _by_rank(values: FloatArray) -> FloatArray:
    """Values of shape (steps, ranks, micro-batches) as ranks run them at once, shape (steps · micro-batches, ranks)."""
    return values.transpose(0, 2, 1).reshape(-1, values.shape[1])


def plot_rank_loads(loads: Mapping[str, Load], path: Path, vision_unit: str = "vision units") -> None:
    """Draw the ranks' vision units and LLM cost over some steps, a column for each entry on common axes.

    Loads have the shape (steps, ranks, micro-batches).
    """
    from matplotlib.ticker import MaxNLocator

    with drawing(path, 4.6 * len(loads), 5.2) as figure:
        axes = figure.subplots(2, len(loads), sharey="row", squeeze=False)
        for column, (name, load) in enumerate(loads.items()):
            cost = _by_rank(DEFAULT_COST(load))
            _draw_waiting(axes[0, column], name, _by_rank(load.vision_units))
            _draw_waiting(axes[1, column], "", cost / max(cost.mean(), np.finfo(float).tiny))
            axes[1, column].set_xlabel("micro-batch of the epoch")
        axes[0, 0].set_ylabel(f"{vision_unit} in a micro-batch")
        axes[1, 0].set_ylabel("LLM cost, relative to the mean")
        axes[0, 0].yaxis.set_major_locator(MaxNLocator(integer=True))
        for row in axes:
            row[0].set_ylim(bottom=0)  # after all is drawn: it ends the search for a top that fits all columns
        legend_below(figure, axes[0, 0])


def _draw_waiting(axes: Axes, title: str, loads: FloatArray) -> None:
    """Draw (micro-batches, ranks): a dot per rank, the largest as a line, the area between it and the mean."""
    # The middle of the epoch: its last steps may be short of samples.
    first = max((len(loads) - SHOWN) // 2, 0)
    shown = loads[first : first + SHOWN]
    number = np.arange(first, first + len(shown))
    largest, mean = shown.max(axis=1), shown.mean(axis=1)
    ranks = np.repeat(number, shown.shape[1])
    waiting: Any = {"label": "mean of the ranks to the slowest", "color": ORANGE, "alpha": 0.4, "linewidth": 0}
    axes.scatter(ranks, shown.ravel(), s=9, color=BLUE, alpha=0.5, linewidth=0, label="a rank", zorder=3, clip_on=False)
    axes.step(number, largest, where="mid", color=VERMILION, linewidth=1.1, label="slowest rank")
    axes.fill_between(number, mean, largest, step="mid", **waiting)
    # a title, which may be empty, above a quieter line
    style: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "center"}
    subtitle = f"ranks wait {dist_ratio(loads):.2%} of the time"
    axes.annotate(subtitle, (0.5, 1.0), xytext=(0, 4), color=GREY, fontsize=8.5, **style)
    axes.annotate(title, (0.5, 1.0), xytext=(0, 18), fontweight="bold", fontsize=11, **style)


def _stages(part: PlanPart, folder: Path) -> str:
    plot_memory(
        {"all recomputed": part.recomputed_memory, "plan": part.memory}, part.budget_bytes, folder / "memory.png"
    )
    last = part.variants[-1]
    figures = step_figures(last.profile, part.plan, last.simulated[0], part.largest)
    return section(
        "Model and memory: what each stage holds",
        html_table(*stage_cells(figures["stages"])),
        picture(
            folder / "memory.png",
            "Memory of a device of each stage at its peak, with packs as large as the limits allow: if all layers "
            "recompute, and under the plan. The line is what it may hold.",
        ),
    )


def _timeline(part: PlanPart, folder: Path) -> str:
    panels = {}
    for title, variant in ((RANDOM, part.variants[0]), ("with the plan", part.variants[-1])):
        step = variant.simulated[0]
        panels[f"{title}, slowest replica"] = step.replicas[step.slowest_replica]
    plot_timeline(panels, folder / "timeline.png")
    return section(
        "One step, stage by stage",
        picture(folder / "timeline.png", "What every stage runs when; numbers are micro-batches. Gaps are idle time."),
    )


def _gain(part: PlanPart, _: Path) -> str:
    first = part.variants[0]
    rows = [
        (
            variant.name,
            milliseconds(variant.step_seconds),
            f"{variant.samples_per_step:,.0f}",
            f"{variant.samples_per_second:,.1f}",
            f"{variant.bubble_ratio:.0%}",
            f"{variant.samples_per_second / first.samples_per_second:.2f} ×",
        )
        for variant in part.variants
    ]
    return section(
        "What it gains, one idea after the other",
        paragraph(
            f"Simulated on real packs, for {first.plan.known_cluster}; `omnibal plan --trials` measures it on yours."
        ),
        html_table(
            ("", "step, ms", "samples a step", "samples/s", "idle", "of random batches"), rows, marked=len(rows) - 1
        ),
    )


def _measured(run: Metrics, folder: Path) -> str:
    plot_training(run, folder / "training.png")
    pictures = [
        picture(folder / "training.png", "Loss over steps: each step and the mean of the last 20; on a log scale.")
    ]
    mixed = [record for record in run.steps if record.get("shares")]
    if mixed:
        shares = [record["shares"] for record in mixed]
        plot_shares([record["step"] for record in mixed], shares, folder / "shares.png")
        words = "What each source of the mixture gave, averaged over some steps each; dashed is what was asked for."
        pictures.append(picture(folder / "shares.png", words))
    return section("Measured", html_table(("", "this run"), [*training_rows(run).items()]), *pictures)
