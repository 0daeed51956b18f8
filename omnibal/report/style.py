"""How everything looks: numbers and units, tables on a terminal, pictures by matplotlib, self-contained HTML pages."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE: Final = "#0072B2"
ORANGE: Final = "#E69F00"
GREEN: Final = "#009E73"
PINK: Final = "#CC79A7"
VERMILION: Final = "#D55E00"
GREY: Final = "#5F6368"
SKY: Final = "#56B4E9"
# Okabe and Ito's colours, which the colour-blind can tell apart, and three more.
SERIES: Final = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILION, "#F0E442", "#8C6BB1", "#7F7F7F", "#A6761D")
GIB: Final = 2**30
MIB: Final = 2**20

Row = Mapping[str, Any]  # figures by name, as JSON values
Column = tuple[str, str | Callable[[Row], str]]
"""Head, and a form to fill with a row's figures or what makes the cell of a row."""


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
    """Seconds with three decimals, in milliseconds below one.

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


def make_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> Table:
    """A table as all commands print them: no cell cut short, an empty row ends a section.

    So many columns from the left hold ``words``, flush left; the others hold numbers, flush right.
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


def cells_of(rows: Iterable[Row], columns: Sequence[Column]) -> list[list[str]]:
    """Cells of a table of figures as they go into JSON; ``place`` is the number of a row.

    >>> cells_of([{"busy": 0.25}], [("stage", "{place}"), ("busy", "{busy:.0%}")])
    [['0', '25%']]
    """
    numbered = [{"place": place, **row} for place, row in enumerate(rows)]
    return [[form.format_map(row) if isinstance(form, str) else form(row) for _, form in columns] for row in numbered]


def print_parts(console: Console, *parts: str | Table) -> None:
    """Print parts; long lines are broken on a terminal only: scripts read whole paths."""
    for part in parts:
        console.print(part, highlight=False, soft_wrap=isinstance(part, str) and not console.is_terminal)


def table_of(rows: Iterable[Row], columns: Sequence[Column], *, words: int = 1) -> Table:
    return make_table([head for head, _ in columns], cells_of(rows, columns), words=words)


def scaled(name: str, unit: float, form: str = ",.1f") -> Callable[[Row], str]:
    return lambda row: format(row[name] / unit, form)


def in_milliseconds(name: str) -> Callable[[Row], str]:
    return lambda row: milliseconds(row[name])


DOTS_PER_INCH: Final = 160
LABEL_LENGTH: Final = 40
_MATPLOTLIB: Final[Any] = {
    "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.labelsize": 9, "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.6,
    "legend.frameon": False, "legend.fontsize": 8, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "text.parse_math": False,  # what users call their sources is no formula
}  # fmt: skip


@contextmanager
def drawing(path: Path, width: float, height: float) -> Iterator[Figure]:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(_MATPLOTLIB):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)  # without pyplot, which keeps figures and looks for a display
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DOTS_PER_INCH, format="png")


def label_of(name: str) -> str:
    """A user's name as a legend shows it: in one line, cut where it is long."""
    line = " ".join(name.split())
    line = f"{line[:LABEL_LENGTH]}…" if len(line) > LABEL_LENGTH else line
    return f" {line}" if line.startswith("_") else line  # matplotlib hides what begins with "_"


def legend_below(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(handles), 8))


def stacked_bars(
    axes: Axes, names: Sequence[str], parts: Mapping[str, Sequence[float]], colours: Sequence[str]
) -> range:
    left, places = [0.0] * len(names), range(len(names) - 1, -1, -1)
    for (part, lengths), colour in zip(parts.items(), colours, strict=True):
        axes.barh(places, lengths, left=left, color=colour, label=part)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    axes.set_yticks(places, names)
    return places


CSS: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2433; max-width: 62rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.7rem; margin-bottom: 0; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 0.4rem; border-top: 1px solid #d9dde5; padding-top: 1.2rem; }
p.lead { color: #5f6368; margin-top: 0.2rem; }
div.scroll { overflow-x: auto; margin: 0.8rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.8rem; text-align: right; border-bottom: 1px solid #eceff4; }
th { font-weight: 600; color: #5f6368; vertical-align: bottom; }
pre { margin: 0; font-size: 0.9rem; }
th:first-child, td:first-child { text-align: left; }
td { white-space: nowrap; }
tr.mark td { font-weight: 700; }
figure { margin: 1rem 0; }
figure img { display: block; height: auto; max-width: 100%; }
figcaption { color: #5f6368; font-size: 0.9rem; }
"""


def page(title: str, lead: str, sections: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
        f'<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n' + "\n".join(sections) + "\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    return "\n".join([f"<section>\n<h2>{escape(title)}</h2>", *parts, "</section>"])


def paragraph(text: str) -> str:
    """Plain text; what stands between backticks is code."""
    content = re.sub("`(.*?)`", r"<code>\1</code>", escape(text))
    return f"<p>{content}</p>"


def html_table(names: Sequence[str], rows: Sequence[Sequence[str]], *, marked: int | None = None) -> str:
    """A table; heads may be broken into lines, as on a terminal."""
    plain = (name.replace("-\n", "").replace("\n", " ") for name in names)
    head = "".join(f"<th>{escape(name)}</th>" for name in plain)
    lines = []
    for number, row in enumerate(rows):
        mark = ' class="mark"' if number == marked else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    body = "\n".join(lines)
    table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    return f'<div class="scroll">{table}</div>'


def picture(path: Path, caption: str) -> str:
    text, source = escape(caption), f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return f'<figure><img alt="{text}" src="{source}"><figcaption>{text}</figcaption></figure>'
