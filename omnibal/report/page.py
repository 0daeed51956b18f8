"""One self-contained page about a plan, a run, or both: why balance, what changes, what it gains, what was measured."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from omnibal.advise.estimate import Way, gain_over
from omnibal.cost import FloatArray, Load
from omnibal.data.metrics import dist_ratio
from omnibal.families.base import vision_unit_of
from omnibal.memory.footprint import StageMemory
from omnibal.plan import Plan
from omnibal.planner.prediction import RANDOM, Variant
from omnibal.profile.records import ModelProfile, every_layer
from omnibal.report.packing import Arranged, plot_rank_loads
from omnibal.report.stages import plot_memory, plot_timeline, stage_layers
from omnibal.report.style import (
    GIB,
    SERIES,
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

SHOWN: Final = 48  # micro-batches of the first replica that are looked at


@dataclass(frozen=True)
class Imbalance:
    """Forward time and memory of stages and micro-batches."""

    forward_seconds: FloatArray
    """Seconds of some micro-batches of one replica, shape (micro-batches, stages)."""
    memory_bytes: FloatArray
    """Bytes of a device of each stage if all micro-batches in flight are like this one; the same shape."""

    @classmethod
    def of(cls, profile: ModelProfile, loads: Load, plan: Plan) -> Imbalance:
        """The imbalance of micro-batches of shape (steps, replicas, micro-batches) under a plan."""
        # Seconds of layers, (micro-batches, layers), summed up to those of stages.
        shown = loads[:, 0].ravel()[:SHOWN]
        forward = np.stack([layer.forward_seconds(shown) for layer in profile.layers], axis=1)
        stages = [forward[:, a:b].sum(axis=1) for a, b in pairwise(plan.partition.boundaries)]
        memory = [[stage.total for stage in plan.memory(profile, one)] for one in shown]
        return cls(np.stack(stages, axis=1), np.array(memory, dtype=np.float64))

    def rows(self) -> list[tuple[str, str, str]]:
        """Mean and spread of time and memory across stages, and over time in the first stage."""
        means = self.forward_seconds.mean(axis=0), self.memory_bytes.mean(axis=0)
        first = self.forward_seconds[:, 0], self.memory_bytes[:, 0]
        return [("across stages", *_spread(*means)), ("in stage 0, over time", *_spread(*first))]


def _spread(seconds: FloatArray, size: FloatArray) -> tuple[str, str]:
    pairs = ((1e3 * seconds, "ms"), (size / GIB, "GiB"))
    time, memory = (f"{values.mean():,.1f} ± {values.std():,.1f} {unit}" for values, unit in pairs)
    return time, memory


def plot_imbalance(variants: Mapping[str, Imbalance], path: Path) -> None:
    """Draw each stage's forward time over micro-batches, a column per variant on common axes."""
    with drawing(path, 4.9 * len(variants), 3.2) as figure:
        axes = figure.subplots(1, len(variants), sharey=True, squeeze=False)[0]
        for panel, (title, imbalance) in zip(axes, variants.items(), strict=True):
            for stage, seconds in enumerate(1e3 * imbalance.forward_seconds.T):
                colour = SERIES[stage % len(SERIES)]
                panel.step(np.arange(len(seconds)), seconds, where="mid", color=colour, label=f"stage {stage}")
            panel.set_title(title, loc="left")
            panel.set_xlabel("micro-batch of a replica")
            panel.set_ylim(bottom=0)
        axes[0].set_ylabel("forward pass, milliseconds")
        legend_below(figure, axes[0])


@dataclass(frozen=True)
class PlanPart:
    variants: tuple[Variant, ...]
    """From random batches to the plan."""
    others: tuple[Way, ...]
    """What is done today, if that is not the plan, and the cheapest alternative."""
    largest: Load
    """A micro-batch that none within the plan's limits exceeds."""

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
        sections = [] if plan is None else [of(plan, folder) for of in (_imbalance, _data, _stages, _timeline, _gain)]
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


def _imbalance(part: PlanPart, folder: Path) -> str:
    first, last = part.variants[0], part.variants[-1]
    variants = {
        title: Imbalance.of(variant.profile, variant.load, variant.plan)
        for title, variant in ((first.name, first), ("with the plan", last))
    }
    plot_imbalance(variants, folder / "imbalance.png")
    rows = [(f"{title}, {where}", *cells) for title, entry in variants.items() for where, *cells in entry.rows()]
    return section(
        "How uneven the work is",
        paragraph(
            "Random micro-batches, padded to their longest sample, cut by parameters and recomputed everywhere: "
            "stages wait for the slowest stage, and every rank waits for the slowest rank. "
            "Means and standard deviations, predicted for your data and model:"
        ),
        html_table(("", "forward pass of a micro-batch", "memory of a device"), rows),
        picture(
            folder / "imbalance.png",
            "Forward time of every stage, micro-batch by micro-batch, on the first replica. Even stages lie on one "
            "line; even micro-batches make it level.",
        ),
    )


def _data(part: PlanPart, folder: Path) -> str:
    first, last = part.variants[0], part.variants[-1]
    rows = [_data_row(first.name, first), _data_row("with the plan", last)]
    unit, limits, has_ranks = vision_unit_of(last.profile.layers), part.plan.limits, part.plan.layout.num_replicas > 1
    plot_rank_loads({first.name: _arranged(first), "with the plan": _arranged(last)}, folder / "ranks.png", unit)
    names: tuple[str, ...] = ("", "samples in a micro-batch", unit, "LLM tokens", "Dist Ratio, ViT", "Dist Ratio, LLM")
    if not has_ranks:  # nobody waits
        names, rows = names[:4], [row[:4] for row in rows]
    waiting = " The Dist Ratio is the share of time that ranks would wait for the one with the largest load."
    return section(
        "Data: which samples share a micro-batch",
        paragraph(
            f"Packs hold at most {limits.vision_units:,} {unit} and {limits.llm_tokens:,} LLM tokens, without padding."
            + waiting * has_ranks
        ),
        html_table(names, rows),
        picture(
            folder / "ranks.png",
            "Loads of all ranks, micro-batch by micro-batch: a dot for each rank, a line for the slowest one. Shaded "
            "is how long the others wait on average.",
        ),
    )


def _data_row(name: str, variant: Variant) -> tuple[str, ...]:
    load, arranged = variant.load, _arranged(variant)
    columns = load.vision_units, load.llm_tokens
    ratios = [dist_ratio(arranged.by_rank(values.ravel())) for values in columns]
    samples = variant.samples_per_step / (load.shape[1] * load.shape[2])
    spreads = [f"{values.mean():,.1f} ± {values.std():,.1f}" for values in columns]
    return (name, f"{samples:.2f}", *spreads, *(f"{ratio:.3f}" for ratio in ratios))


def _arranged(variant: Variant) -> Arranged:
    flat = variant.load.ravel()
    return Arranged(flat, np.arange(len(flat)).reshape(variant.load.shape))


def _stages(part: PlanPart, folder: Path) -> str:
    plot_memory(
        {"all recomputed": part.recomputed_memory, "plan": part.memory}, part.budget_bytes, folder / "memory.png"
    )
    names = ("stage", "layers", "ViT + LLM", "that recompute", "busy", "GiB of a device", "of its budget")
    return section(
        "Model and memory: what each stage holds",
        html_table(names, [_stage_row(part, stage) for stage in range(part.plan.num_stages)]),
        picture(
            folder / "memory.png",
            "Memory of a device of each stage at its peak, with packs as large as the limits allow: if all layers "
            "recompute, and under the plan. The line is what it may hold.",
        ),
    )


def _stage_row(part: PlanPart, stage: int) -> tuple[str, ...]:
    variant = part.variants[-1]
    layers = stage_layers(part.plan, variant.profile.layers, stage)
    busy = np.mean([
        run.stage_busy_seconds[stage] / step.pipeline_seconds for step in variant.simulated for run in step.replicas
    ])  # fmt: skip
    memory, budget = part.memory[stage].total, part.budget_bytes[stage]
    return (
        f"{stage}", f"{layers['first_layer']} … {layers['last_layer']}",
        f"{layers['vision_layers']} + {layers['language_layers']}", f"{layers['recomputed']}", f"{busy:.0%}",
        f"{memory / GIB:,.1f}", f"{memory / budget:.0%}",
    )  # fmt: skip


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
        (variant.name, milliseconds(variant.step_seconds), f"{variant.samples_per_step:,.0f}",
         f"{variant.samples_per_second:,.1f}", f"{variant.bubble_ratio:.0%}",
         f"{variant.samples_per_second / first.samples_per_second:.2f} ×")
        for variant in part.variants
    ]  # fmt: skip
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
