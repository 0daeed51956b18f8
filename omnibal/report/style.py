"""How everything looks: tables, numbers and units, the colours and axes of pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

BLUE: Final = "#0072B2"
ORANGE: Final = "#E69F00"
GREEN: Final = "#009E73"
PINK: Final = "#CC79A7"
VERMILION: Final = "#D55E00"
GREY: Final = "#5F6368"
SERIES: Final = (BLUE, ORANGE, GREEN, PINK, "#56B4E9", VERMILION, "#F0E442", "#8C6BB1", "#7F7F7F", "#A6761D")
"""Okabe and Ito's colours, which the colour-blind can tell apart, and three more."""

DOTS_PER_INCH: Final = 160
MOST_OF_A_LABEL: Final = 40
_STYLE: Final[Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "text.parse_math": False,  # what users call their sources is no formula
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}
GIB: Final = 2**30
MIB: Final = 2**20


Row = Mapping[str, Any]
"""Figures by name, as JSON values."""
Column = tuple[str, str | Callable[[Row], str]]
"""Head, and what is in the cells."""


def make_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> Table:
    """A table as all commands print them: no lines but one under the heads, no cell cut short.

    Args:
        heads: Of the columns; a line break in one breaks it.
        rows: Cells; an empty row ends a section.
        words: Columns from the left that hold words, flush left; the others hold numbers, flush right.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for place, head in enumerate(heads):
        least = max(map(len, head.split("\n")))
        table.add_column(head, justify="left" if place < words else "right", overflow="fold", min_width=least)
    for row in rows:
        if row:
            table.add_row(*row)
        else:
            table.add_section()
    return table


def table_of(rows: Iterable[Row], columns: Sequence[Column], *, words: int = 1) -> Table:
    """The same of rows as they go into JSON.

    Args:
        rows: Figures; a row's number is its ``place``.
        columns: Heads, and a form to fill with a row's figures, or what makes the cell of a row.
        words: As of :func:`make_table`.

    >>> table_of([{"busy": 0.25}], [("stage", "{place}"), ("busy", "{busy:.0%}")]).row_count
    1
    """
    numbered = ({"place": place, **row} for place, row in enumerate(rows))
    cells = ([form.format_map(row) if isinstance(form, str) else form(row) for _, form in columns] for row in numbered)
    return make_table([head for head, _ in columns], cells, words=words)


def scaled(name: str, unit: float, form: str = ",.1f") -> Callable[[Row], str]:
    """Makes cells of a figure in multiples of a unit."""
    return lambda row: format(row[name] / unit, form)


def in_milliseconds(name: str) -> Callable[[Row], str]:
    """Makes cells of seconds."""
    return lambda row: milliseconds(row[name])


def unit_of(sizes: Iterable[int]) -> tuple[int, str]:
    """Bytes and name of the unit to show sizes in, by the largest.

    >>> unit_of([2**20, 2**31]), unit_of([2**20])
    ((1073741824, 'GiB'), (1048576, 'MiB'))
    """
    return (GIB, "GiB") if max(sizes, default=0) >= GIB else (MIB, "MiB")


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds, below one with three digits; a dash where they are not known.

    >>> milliseconds(1.23456), milliseconds(0.0000123), milliseconds(None)
    ('1,234.6', '0.0123', '–')
    """
    if seconds is None:
        return "–"
    return f"{1e3 * seconds:,.1f}" if seconds >= 1e-3 else f"{1e3 * seconds:.3g}"


def duration(seconds: float) -> str:
    """Seconds with three digits and more before the point, in milliseconds below one.

    >>> duration(12.3456), duration(0.0004321)
    ('12.346 s', '0.432 ms')
    """
    return f"{seconds:,.3f} s" if seconds >= 1 else f"{milliseconds(seconds)} ms"


def excess(value: float, least: float) -> float:
    """By what share a value is above the least possible one; rounding puts none below it.

    >>> excess(1.1, 1.0) > 0, excess(0.3, 0.1 + 0.2)
    (True, 0.0)
    """
    return max(value / least - 1, 0.0)


def short(value: float) -> str:
    """A number with three digits, or all before the point.

    >>> short(0.01234), short(12.34), short(1234.5)
    ('0.0123', '12.3', '1,234')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


@contextmanager
def drawing(path: Path, width: float, height: float) -> Iterator[Figure]:
    """An empty figure to draw into, so many inches wide and high; in the end it is written as a PNG."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS_PER_INCH, format="png")


def titles(axes: Axes, title: str, subtitle: str) -> None:
    """Write a title, which may be empty, and a quieter line under it above some axes."""
    style: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "center"}
    axes.annotate(subtitle, (0.5, 1.0), xytext=(0, 4), color=GREY, fontsize=8.5, **style)
    axes.annotate(title, (0.5, 1.0), xytext=(0, 18), fontweight="bold", fontsize=11, **style)


def whole_numbers(axis: Axis) -> None:
    """Label an axis at whole numbers only, with commas in large ones."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def label_of(name: str) -> str:
    """A user's name as a legend shows it: in one line, cut where it is long; matplotlib hides what begins with "_"."""
    line = " ".join(name.split())
    line = f"{line[:MOST_OF_A_LABEL]}…" if len(line) > MOST_OF_A_LABEL else line
    return f" {line}" if line.startswith("_") else line


def legend_below(figure: Figure, axes: Axes) -> None:
    """What some axes name, in a line below all of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(handles), 8))
