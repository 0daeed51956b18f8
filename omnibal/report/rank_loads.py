"""A picture of the ranks' loads, step by step, before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from omnibal.cost import Load
from omnibal.data.metrics import dist_ratio
from omnibal.data.policies import DEFAULT_COST
from omnibal.report.style import BLUE, ORANGE, VERMILION, new_figure, save, styled, subtitle

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN: Final = 48
"""Micro-batches that are drawn, from the middle of the epoch."""

FloatArray = npt.NDArray[np.float64]


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
    """Draw the ranks' vision units and LLM cost over some steps, one column per method.

    Args:
        arranged: By method; drawn from left to right on common axes.
        path: The PNG.
    """
    from matplotlib.ticker import MaxNLocator

    with styled():
        figure = new_figure(4.6 * len(arranged), 5.2)
        axes = figure.subplots(2, len(arranged), sharey="row", squeeze=False)
        for column, (method, entry) in enumerate(arranged.items()):
            cost = entry.by_rank(DEFAULT_COST(entry.load))
            _draw_waiting(axes[0, column], entry.by_rank(entry.load.vision_units))
            _draw_waiting(axes[1, column], cost / max(cost.mean(), np.finfo(float).tiny))
            axes[0, column].set_title(method, fontsize=11, pad=18)
            axes[1, column].set_xlabel("micro-batch of the epoch")
        axes[0, 0].set_ylabel("vision units in a micro-batch")
        axes[1, 0].set_ylabel("LLM cost, relative to the mean")
        axes[0, 0].yaxis.set_major_locator(MaxNLocator(integer=True))
        axes[0, 0].yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        for row in axes:
            row[0].set_ylim(bottom=0)  # after all is drawn: it ends the search for a top that fits all columns
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(handles))
        save(figure, path)


def _draw_waiting(axes: Axes, loads: FloatArray) -> None:
    """Draw (micro-batches, ranks): a dot per rank, the largest as a line, the area between it and the mean."""
    first = max((len(loads) - SHOWN) // 2, 0)
    shown = loads[first : first + SHOWN]
    number = np.arange(first, first + len(shown))
    largest, mean = shown.max(axis=1), shown.mean(axis=1)
    ranks = np.repeat(number, shown.shape[1])
    axes.scatter(ranks, shown.ravel(), s=9, color=BLUE, alpha=0.5, linewidth=0, label="a rank", zorder=3, clip_on=False)
    axes.step(number, largest, where="mid", color=VERMILION, linewidth=1.1, label="slowest rank")
    axes.fill_between(
        number,
        mean,
        largest,
        step="mid",
        color=ORANGE,
        alpha=0.4,
        linewidth=0,
        label="mean of the ranks to the slowest",
    )
    subtitle(axes, f"ranks wait {dist_ratio(loads):.2%} of the time")
