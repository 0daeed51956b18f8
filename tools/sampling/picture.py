"""All methods in one picture: how long ranks wait for each other, and what is left of randomness."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.ticker import LogLocator, NullLocator

from omnibal.report.packing import PackingFigures
from omnibal.report.style import BLUE, GREY, ORANGE, VERMILION, drawing

LEAST = 1e-4
"""Smaller Dist Ratios are drawn here."""


def draw_tradeoff(figures: Mapping[str, PackingFigures], title: str, path: Path) -> None:
    """Draw Dist Ratios and the χ² of the steps' mixes, a row per method, the one with the slowest ranks on top.

    Args:
        figures: By label; ours are in bold (``**label**``).
        title: What was packed.
        path: The PNG.
    """
    rows = sorted(figures.items(), key=lambda item: item[1].dist_ratio_cost)
    places = range(len(rows))
    with drawing(path, 9.6, 0.3 * len(rows) + 1.3) as figure:
        waiting, randomness = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        for values, colour, label in (
            ([entry.dist_ratio_vision for _, entry in rows], BLUE, "vision units"),
            ([entry.dist_ratio_cost for _, entry in rows], VERMILION, "LLM cost"),
        ):
            waiting.scatter([max(value, LEAST) for value in values], places, s=36, color=colour, label=label, zorder=3)
        randomness.scatter([entry.randomness for _, entry in rows], places, s=36, color=ORANGE, zorder=3)
        randomness.axvline(1, color=GREY, linewidth=1)
        waiting.set(xscale="log", xlabel="Dist Ratio: share of time that ranks wait")
        randomness.set(xscale="log", xlabel="χ² of steps (1: as shuffled, more: sorted)")
        randomness.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        randomness.xaxis.set_major_formatter("{x:g}")
        randomness.xaxis.set_minor_locator(NullLocator())
        waiting.set_yticks(places, [label.strip("*¹ ") for label, _ in rows])
        for tick, (label, _) in zip(waiting.get_yticklabels(), rows, strict=True):
            tick.set_fontweight("bold" if label.startswith("**") else "normal")
        waiting.legend(loc="lower right")
        figure.suptitle(title, fontsize=10)
