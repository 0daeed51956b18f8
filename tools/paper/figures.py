"""Table 1 with Figure 2, and Figure 4: what is uneven in the paper's setting, and how ISF converges; see README.md."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from omnibal.cost import FloatArray, Load
from omnibal.data.isf import iterative_sampling_and_filtering
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio
from omnibal.plan import Plan
from omnibal.profile.records import ModelProfile
from omnibal.report.style import GIB, SERIES, drawing, legend_below
from tools.bench import table
from tools.paper.datasets import captions, cut_into, llava
from tools.paper.ladder import ladder
from tools.paper.setting import LIMITS, Setting

PUBLISHED = {"across stages": ("85 ± 93 ms", "39 ± 23 GB"), "in stage 0, over time": ("136 ± 155 ms", "73 ± 6 GB")}
RANKS, MOST_ITERATIONS = 4, 10
SHOWN = 48  # micro-batches of the first replica that are looked at
app = typer.Typer(help=__doc__)
Picture = Annotated[Path | None, typer.Option(help="Draw the figure, too, to this file.")]


@dataclass(frozen=True)
class Imbalance:
    """Forward time and memory of stages and micro-batches."""

    forward_seconds: FloatArray
    """Seconds of some micro-batches of one replica, shape (micro-batches, stages)."""
    memory_bytes: FloatArray
    """Bytes of a device of each stage if all micro-batches in flight are like this one; the same shape."""

    @classmethod
    def of(cls, profile: ModelProfile, loads: Load, plan: Plan) -> "Imbalance":
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


@app.command()
def table_1(picture: Picture = None) -> None:
    """Print Table 1: the baseline, and our plan. Figure 2 shows both."""
    setting = Setting()
    rungs = ladder(setting)
    found = {rung.name: Imbalance.of(rung.profile, rung.load, rung.plan) for rung in (rungs[0], rungs[-1])}
    rows = [(f"{name}, {where}", *cells) for name, entry in found.items() for where, *cells in entry.rows()]
    paper = [(f"the paper, {where}", *cells) for where, cells in PUBLISHED.items()]
    print(table(("", "forward pass of a micro-batch", "memory of a device"), [*paper, *rows]))
    if picture is not None:
        plot_imbalance(found, picture)


@app.command()
def figure_4(picture: Picture = None) -> None:
    """Print the Dist Ratios of ISF's packs after each iteration."""
    found = {
        name: [_ratios(lengths, limits, count) for count in range(1, MOST_ITERATIONS + 1)]
        for name, (lengths, limits) in _cases().items()
    }
    names = ("", *(f"{kind}, after {count}" for kind in ("ViT", "LLM") for count in (1, 2, 5, 10)))
    rows = [
        (name, *(f"{ratios[count - 1][kind]:.3f}" for kind in (0, 1) for count in (1, 2, 5, 10)))
        for name, ratios in found.items()
    ]
    print(table(names, rows))
    if picture is not None:
        _draw_convergence(found, picture)


def _draw_convergence(found: dict[str, list[tuple[float, float]]], path: Path) -> None:
    with drawing(path, 9.5, 3.4) as figure:
        for number, (panel, kind) in enumerate(zip(figure.subplots(1, 2, sharey=True), ("ViT", "LLM"), strict=True)):
            for colour, (name, ratios) in zip(SERIES, found.items(), strict=False):
                values = [ratio[number] for ratio in ratios]
                panel.plot(range(1, MOST_ITERATIONS + 1), values, color=colour, label=name, marker=".")
            panel.set(title=kind, xlabel="iterations of ISF")
        figure.axes[0].set(ylabel=f"Dist Ratio, {RANKS} ranks", ylim=(0, None))
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)


def _cases() -> dict[str, tuple[SampleLengths, PackLimits]]:
    mix = Setting().drawn
    return {
        "LLaVA-665K": (llava(), LIMITS),
        "InternVL-1.2M": (mix, LIMITS),
        "LCS-558K": (captions(), LIMITS),
        "1 tile": (cut_into(1), LIMITS),
        "6 tiles": (cut_into(6), PackLimits(14, 5120)),
        "12 tiles": (cut_into(12), PackLimits(14, 5120)),
        "224 pixels": (cut_into(pixels=224), PackLimits(20, 4096)),
        "336 pixels": (cut_into(pixels=336), PackLimits(11, 4096)),
    }


def _ratios(lengths: SampleLengths, limits: PackLimits, iterations: int) -> tuple[float, float]:
    """Of all packs in random order, of tiles and of tokens."""
    packs = iterative_sampling_and_filtering(lengths, limits, iterations=iterations, seed=0)
    packs = packs.take(np.random.default_rng(0).permutation(len(packs))[: len(packs) // RANKS * RANKS])
    vision, tokens = (values.reshape(-1, RANKS) for values in (packs.vision_units(lengths), packs.llm_tokens(lengths)))
    return dist_ratio(vision), dist_ratio(tokens)


if __name__ == "__main__":
    app()
