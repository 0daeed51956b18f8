"""Pictures of packs: how full they are, and how alike those are that run at the same time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from omnibal.cost import FloatArray, Load
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio
from omnibal.data.policies import DEFAULT_COST
from omnibal.report.style import BLUE, ORANGE, VERMILION, drawing, legend_below, titles, whole_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.colors import LogNorm

SHOWN: Final = 48
"""Micro-batches whose ranks are drawn, from the middle of the epoch."""
BINS: Final = 60
"""About as many below a limit; bins hold whole numbers, and each limit is the end of one."""


@dataclass(frozen=True)
class Arranged:
    """Packs and the order in which they run.

    Attributes:
        load: What each pack holds.
        steps: Pack numbers by (step, rank, micro-batch).
    """

    load: Load
    steps: npt.NDArray[np.int64]

    def by_rank(self, values: FloatArray) -> FloatArray:
        """What the ranks run at the same time, (steps · micro-batches, ranks)."""
        return values[self.steps].transpose(0, 2, 1).reshape(-1, self.steps.shape[1])


def plot_rank_loads(arranged: Mapping[str, Arranged], path: Path) -> None:
    """Draw the ranks' vision units and LLM cost over some steps, a column per method on common axes."""
    with drawing(path, 4.6 * len(arranged), 5.2) as figure:
        axes = figure.subplots(2, len(arranged), sharey="row", squeeze=False)
        for column, (method, entry) in enumerate(arranged.items()):
            cost = entry.by_rank(DEFAULT_COST(entry.load))
            _draw_waiting(axes[0, column], method, entry.by_rank(entry.load.vision_units))
            _draw_waiting(axes[1, column], "", cost / max(cost.mean(), np.finfo(float).tiny))
            axes[1, column].set_xlabel("micro-batch of the epoch")
        axes[0, 0].set_ylabel("vision units in a micro-batch")
        axes[1, 0].set_ylabel("LLM cost, relative to the mean")
        whole_numbers(axes[0, 0].yaxis)
        for row in axes:
            row[0].set_ylim(bottom=0)  # after all is drawn: it ends the search for a top that fits all columns
        legend_below(figure, axes[0, 0])


def _draw_waiting(axes: Axes, title: str, loads: FloatArray) -> None:
    """Draw (micro-batches, ranks): a dot per rank, the largest as a line, the area between it and the mean."""
    first = max((len(loads) - SHOWN) // 2, 0)
    shown = loads[first : first + SHOWN]
    number = np.arange(first, first + len(shown))
    largest, mean = shown.max(axis=1), shown.mean(axis=1)
    ranks = np.repeat(number, shown.shape[1])
    waiting: Any = {"label": "mean of the ranks to the slowest", "color": ORANGE, "alpha": 0.4, "linewidth": 0}
    axes.scatter(ranks, shown.ravel(), s=9, color=BLUE, alpha=0.5, linewidth=0, label="a rank", zorder=3, clip_on=False)
    axes.step(number, largest, where="mid", color=VERMILION, linewidth=1.1, label="slowest rank")
    axes.fill_between(number, mean, largest, step="mid", **waiting)
    titles(axes, title, f"ranks wait {dist_ratio(loads):.2%} of the time")


def plot_fill(loads: Mapping[str, Load], limits: PackLimits, path: Path) -> None:
    """Draw how many packs hold how many vision units and LLM tokens, with the limits as lines, a panel per method."""
    from matplotlib.colors import LogNorm

    edges = (
        bin_edges(limits.llm_tokens, max(load.llm_tokens.max(initial=0) for load in loads.values())),
        bin_edges(limits.vision_units, max(load.vision_units.max(initial=0) for load in loads.values())),
    )
    counts = [np.histogram2d(load.llm_tokens, load.vision_units, bins=edges)[0] for load in loads.values()]
    norm = LogNorm(1, max(2, *(array.max() for array in counts)))
    ratios: Any = {"height_ratios": (1, 4), "width_ratios": (4, 0.8) * len(loads)}
    with drawing(path, 4.7 * len(loads) + 0.7, 4.6) as figure:
        axes = figure.subplots(2, 2 * len(loads), sharex="col", sharey="row", **ratios)
        above, panels, right = axes[0, ::2], axes[1, ::2], axes[1, 1::2]
        for axes_of, (method, load), array in zip(
            zip(above, panels, right, strict=True), loads.items(), counts, strict=True
        ):
            mesh = _draw_fill(*axes_of, array, edges, norm)
            vision, tokens = load.vision_units.mean() / max(limits.vision_units, 1), load.llm_tokens.mean()
            full = f"vision {vision:.1%} full, LLM {tokens / limits.llm_tokens:.1%}"
            titles(axes_of[0], method, f"{len(load):,} packs; {full}")
            corner = limits.llm_tokens + 0.5, limits.vision_units + 0.5
            axes_of[1].plot((0, corner[0], corner[0]), (corner[1], corner[1], -0.5), color=VERMILION, linewidth=1.2)
            axes_of[2].set_xlim(0, max(array.sum(axis=0).max() for array in counts))
        for unused in axes[0, 1::2]:
            unused.set_axis_off()
        panels[0].set(ylim=(-0.5, edges[1][-1]), ylabel="vision units in a pack")
        label = f"limits: {limits.vision_units:,} vision units, {limits.llm_tokens:,} LLM tokens"
        figure.legend(panels[0].lines, [label], loc="outside lower center")
        figure.colorbar(mesh, ax=[*right], label="packs", pad=0.02)


def bin_edges(limit: int, most: float) -> FloatArray:
    """Edges of bins from 0 to one bin beyond the limit, or beyond ``most`` where that is more."""
    width = -(-(limit + 1) // BINS)
    below, above = -(-(limit + 1) // width), max(math.ceil((most - limit) / width), 0) + 1
    edges: FloatArray = limit + 0.5 + width * np.arange(-below, above + 1, dtype=np.float64)
    return edges


def _draw_fill(
    above: Axes, panel: Axes, right: Axes, counts: FloatArray, edges: tuple[FloatArray, FloatArray], norm: LogNorm
) -> QuadMesh:
    """Draw counts by (tokens, vision units); by tokens alone above, by vision units alone to the right."""
    for margin, baseline in ((above, "bottom"), (right, "left")):
        margin.tick_params(labelbottom=False, labelleft=False, length=0)
        margin.spines[:].set_visible(False)
        margin.spines[baseline].set_visible(True)
        margin.grid(visible=False)
    above.stairs(counts.sum(axis=1), edges[0], fill=True, color=BLUE, alpha=0.6)
    right.stairs(counts.sum(axis=0), edges[1], fill=True, color=BLUE, alpha=0.6, orientation="horizontal")
    panel.set(xlabel="LLM tokens in a pack", xlim=(0, edges[0][-1]))
    whole_numbers(panel.xaxis, 8)
    whole_numbers(panel.yaxis)
    return panel.pcolormesh(*edges, np.ma.masked_equal(counts.T, 0), norm=norm, cmap="viridis", rasterized=True)
