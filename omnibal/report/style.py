"""How all plots look: colours that the colour-blind can tell apart, quiet axes, one way to write a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


BLUE: Final = "#0072B2"
ORANGE: Final = "#E69F00"
VERMILION: Final = "#D55E00"
GREY: Final = "#5F6368"
SERIES: Final = (
    BLUE,
    ORANGE,
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    VERMILION,
    "#F0E442",
    "#8C6BB1",
    "#7F7F7F",
    "#A6761D",
)
"""Okabe and Ito's colours, and three more."""

DOTS_PER_INCH: Final = 160
_STYLE: Final[Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


def styled() -> Any:
    """Return the context in which figures are drawn."""
    import matplotlib as mpl

    return mpl.rc_context(_STYLE)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of a size in inches, without a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def subtitle(axes: Axes, text: str) -> None:
    """Write a line above some axes; their title needs a ``pad`` of 18 to stand above it."""
    axes.annotate(text, (0.5, 1.02), xycoords="axes fraction", ha="center", va="bottom", color=GREY, fontsize=8.5)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS_PER_INCH, format="png")
