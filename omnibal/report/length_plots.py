"""A picture of a dataset's samples: how long they are, and what they bring to the ViT, source by source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.report.style import SERIES, new_figure, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOKEN_BINS: Final = 80
MOST_BARS: Final = 40
WIDE: Final = 10
"""From this ratio of the longest sample to the shortest on, the axis is logarithmic."""


def plot_lengths(lengths: SampleLengths, names: Sequence[str], path: Path) -> None:
    """Draw histograms of LLM tokens and vision units, stacked by source, the largest source at the bottom.

    Args:
        lengths: Loads of every sample, at least one.
        names: One per source; where there are more than ten, the smallest are drawn together.
        path: The PNG.
    """
    members = _members(lengths, names)
    with styled():
        figure = new_figure(10, 3.9)
        tokens, vision = figure.subplots(1, 2)
        _draw_tokens(tokens, [lengths.llm_tokens[samples] for samples in members.values()])
        _draw_vision(vision, [lengths.vision_units[samples] for samples in members.values()])
        for axes in (tokens, vision):
            axes.set_ylabel("samples")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        labels = [f"{name} ({len(samples):,})" for name, samples in members.items()]
        figure.legend(tokens.patches, labels, loc="outside right upper")
        save(figure, path)


def _members(lengths: SampleLengths, names: Sequence[str]) -> dict[str, npt.NDArray[np.int64]]:
    """Samples of each source, the largest first; the smallest together where there are more than colours."""
    source = lengths.source if lengths.source is not None else np.zeros(len(lengths), dtype=np.int32)
    sizes = np.bincount(source, minlength=len(names))
    order = np.argsort(-sizes, kind="stable")
    kept = order if len(order) <= len(SERIES) else order[: len(SERIES) - 1]
    members = {names[number]: np.flatnonzero(source == number) for number in kept}
    if len(kept) < len(order):
        members[f"{len(order) - len(kept)} others"] = np.flatnonzero(np.isin(source, order[len(kept) :]))
    return members


def _draw_tokens(axes: Axes, parts: Sequence[IntArray]) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    values = np.concatenate(parts)
    least, most = max(int(values.min()), 1), max(int(values.max()), 1)
    wide = most > WIDE * least
    edges = token_edges(least, most, wide=wide)
    below = np.zeros(len(edges) - 1)
    for part, colour in zip(parts, SERIES, strict=False):
        above = below + np.histogram(np.maximum(part, 1), edges)[0]
        axes.stairs(above, edges, baseline=below, fill=True, color=colour)
        below = above
    axes.set(xscale="log" if wide else "linear", xlabel="LLM tokens in a sample", xlim=(edges[0], edges[-1]))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if wide else MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_locator(NullLocator())


def token_edges(least: int, most: int, *, wide: bool) -> npt.NDArray[np.float64]:
    """Edges of at most 80 bins that hold whole numbers, equally many or, if ``wide``, in about equal ratios."""
    if wide:
        return np.asarray(np.unique(np.geomspace(least, most + 1, TOKEN_BINS + 1).round()) - 0.5, dtype=np.float64)
    width = -(-(most + 1 - least) // TOKEN_BINS)
    bins = -(-(most + 1 - least) // width)
    return np.asarray(least - 0.5 + width * np.arange(bins + 1), dtype=np.float64)


def _draw_vision(axes: Axes, parts: Sequence[IntArray]) -> None:
    """A bar for each number of tiles, or for a range of numbers where there are many."""
    from matplotlib.ticker import MaxNLocator

    most = max(int(part.max(initial=0)) for part in parts)
    width = -(-(most + 1) // MOST_BARS)
    edges = np.arange(0, most + 1 + width, width)
    places = edges[:-1] + (width - 1) / 2
    below = np.zeros(len(places))
    for part, colour in zip(parts, SERIES, strict=False):
        counts = np.histogram(part, edges)[0]
        axes.bar(places, counts, 0.8 * width, bottom=below, color=colour)
        below = below + counts
    axes.set_xlabel("vision units in a sample")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
