"""A picture of how full packs are in both dimensions, before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.report.style import BLUE, VERMILION, new_figure, save, styled, subtitle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

BINS: Final = 60
"""About as many below a limit; bins hold whole numbers, and each limit is the end of one."""

FloatArray = npt.NDArray[np.float64]


class _Panel(NamedTuple):
    """The axes of one method: packs by both loads, and by each."""

    joint: Axes
    tokens: Axes
    vision: Axes


def plot_fill(loads: Mapping[str, Load], limits: PackLimits, path: Path) -> None:
    """Draw how many packs hold how many vision units and LLM tokens, with the limits, one panel per method.

    Args:
        loads: What the packs of each method hold; drawn from left to right on common axes and colours.
        limits: Drawn as lines.
        path: The PNG.
    """
    from matplotlib.colors import LogNorm

    edges = (
        bin_edges(limits.llm_tokens, max(load.llm_tokens.max(initial=0) for load in loads.values())),
        bin_edges(limits.vision_units, max(load.vision_units.max(initial=0) for load in loads.values())),
    )
    counts = {
        method: np.histogram2d(load.llm_tokens, load.vision_units, bins=edges)[0] for method, load in loads.items()
    }
    norm = LogNorm(1, max(2, *(array.max() for array in counts.values())))
    with styled():
        figure = new_figure(4.7 * len(loads) + 0.7, 4.6)
        panels = _panels(figure, len(loads))
        for panel, method in zip(panels, loads, strict=True):
            mesh = _draw(panel, counts[method], edges, norm)
            _draw_limits(panel, limits)
            panel.tokens.set_title(method, fontsize=11, pad=18)
            _annotate(panel.tokens, loads[method], limits)
        panels[0].joint.set_ylabel("vision units in a pack")
        label = f"limits: {limits.vision_units:,} vision units, {limits.llm_tokens:,} LLM tokens"
        figure.legend(panels[0].joint.lines, [label], loc="outside lower center")
        figure.colorbar(mesh, ax=[panel.vision for panel in panels], label="packs", pad=0.02)
        save(figure, path)


def bin_edges(limit: int, most: float) -> FloatArray:
    """Edges of bins from 0 to one bin beyond the limit, or beyond ``most`` where that is more."""
    width = -(-(limit + 1) // BINS)
    below, above = -(-(limit + 1) // width), max(math.ceil((most - limit) / width), 0) + 1
    edges: FloatArray = limit + 0.5 + width * np.arange(-below, above + 1, dtype=np.float64)
    return edges


def _panels(figure: Figure, count: int) -> list[_Panel]:
    grid = figure.add_gridspec(2, 2 * count, height_ratios=(1, 4), width_ratios=(4, 0.8) * count)
    panels: list[_Panel] = []
    for column in range(0, 2 * count, 2):
        first = panels[0].joint if panels else None
        joint = figure.add_subplot(grid[1, column], sharex=first, sharey=first)
        tokens = figure.add_subplot(grid[0, column], sharex=joint, sharey=panels[0].tokens if panels else None)
        vision = figure.add_subplot(grid[1, column + 1], sharey=joint, sharex=panels[0].vision if panels else None)
        for margin, baseline in ((tokens, "bottom"), (vision, "left")):
            margin.tick_params(labelbottom=False, labelleft=False, length=0)
            margin.spines[:].set_visible(False)
            margin.spines[baseline].set_visible(True)
            margin.grid(visible=False)
        joint.set_xlabel("LLM tokens in a pack")
        panels.append(_Panel(joint, tokens, vision))
    return panels


def _draw(panel: _Panel, counts: FloatArray, edges: tuple[FloatArray, FloatArray], norm: LogNorm) -> QuadMesh:
    mesh = panel.joint.pcolormesh(*edges, np.ma.masked_equal(counts.T, 0), norm=norm, cmap="viridis", rasterized=True)
    panel.tokens.stairs(counts.sum(axis=1), edges[0], fill=True, color=BLUE, alpha=0.6)
    panel.vision.stairs(counts.sum(axis=0), edges[1], fill=True, color=BLUE, alpha=0.6, orientation="horizontal")
    return mesh


def _draw_limits(panel: _Panel, limits: PackLimits) -> None:
    right, top = limits.llm_tokens + 0.5, limits.vision_units + 0.5
    panel.joint.plot((0, right, right), (top, top, -0.5), color=VERMILION, linewidth=1.2)
    panel.joint.set(xlim=(0, None), ylim=(-0.5, None))
    from matplotlib.ticker import MaxNLocator

    panel.joint.yaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in (panel.joint.xaxis, panel.joint.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _annotate(axes: Axes, load: Load, limits: PackLimits) -> None:
    vision = load.vision_units.mean() / max(limits.vision_units, 1)
    tokens = load.llm_tokens.mean() / limits.llm_tokens
    subtitle(axes, f"{len(load):,} packs; vision {vision:.1%} full, LLM {tokens:.1%}")
