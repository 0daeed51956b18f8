"""What ways to train do on one's own machine, as `compare(make_trainer)` measured them: a table, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from omnibal.report.style import BLUE, GREEN, drawing, label_of, make_table, print_parts

if TYPE_CHECKING:
    from omnibal.integrations.trainer.clock import MeasuredWay

UNKNOWN: Final = "–"
MOST_OF_A_NAME: Final = 15  # characters of a way in a line


def table_of(found: Sequence[MeasuredWay]) -> Table:
    """A row of each way, in the columns that are known of any; lines below say why one could not be measured."""
    rows = [_cells(each, found[0]) for each in found]
    names = [name for name in rows[0] if any(row[name] != UNKNOWN for row in rows)]
    # A table that is too wide for its console would lose its last columns; so long names are folded.
    heads = [names[0].ljust(min(max(len(each.way) for each in found), MOST_OF_A_NAME)), *names[1:]]
    return make_table(heads, [[row[name] for name in names] for row in rows])


def _cells(measured: MeasuredWay, first: MeasuredWay) -> dict[str, str]:
    rate, error = measured.tokens_per_second, measured.error
    figures = {
        "samples\n/s": (measured.samples_per_second, ",.2f"),
        "tokens\n/s": (rate, ",.0f"),
        "±": (error, ".1%"),
        "×\nrow 1": (rate / first.tokens_per_second if first.tokens else None, ".2f"),
        "peak\nGiB": (measured.peak_gib, ".1f"),
        "real\ntokens": (measured.real_tokens, ".0%"),
        "ranks\nwait": (measured.waited, ".0%"),
        "loading\nms/step": (1e3 * measured.loading_seconds, ",.1f"),
    }
    known = measured.failed is None
    cells = {
        name: UNKNOWN if value is None or not known else format(value, form) for name, (value, form) in figures.items()
    }
    return {"way": measured.way} | cells


def lines(found: Sequence[MeasuredWay]) -> list[str]:
    """What the columns are, and why ways could not be measured."""
    steps = max((each.steps for each in found), default=0)
    told = [
        f"{steps} steps of each way, spread over an epoch; ± is the standard error of tokens/s, peak GiB that of the "
        "fullest rank and of the fullest batches; ranks wait while their device runs nothing but transfers"
    ]
    return told + [f"{each.way} could not be measured: {each.failed}" for each in found if each.failed is not None]


def show(found: Sequence[MeasuredWay]) -> None:
    console = Console(markup=False)  # also of cells: what users call ways may look like tags
    table = table_of(found)
    if not console.is_terminal:
        console.width = max(console.width, console.measure(table).maximum)
    print_parts(console, table, *lines(found))


def draw(found: Sequence[MeasuredWay], path: Path) -> None:
    """Draw the tokens a second of each way, and the memory of the fullest rank if it is known."""
    measured = [each for each in found if each.failed is None]
    has_peaks = any(each.peak_gib is not None for each in measured)
    names, places = [label_of(each.way) for each in measured], range(len(measured) - 1, -1, -1)
    with drawing(path, 9 if has_peaks else 6, 1 + 0.4 * len(measured)) as figure:
        axes = figure.subplots(1, 2 if has_peaks else 1, squeeze=False)[0]
        rates = [each.tokens_per_second for each in measured]
        spread = [each.error * each.tokens_per_second for each in measured]
        axes[0].barh(places, rates, xerr=spread, color=BLUE)
        axes[0].set_yticks(places, names)
        axes[0].set_title("real tokens a second")
        if has_peaks:
            axes[1].barh(places, [each.peak_gib or 0.0 for each in measured], color=GREEN)
            axes[1].set_yticks(places, [])
            axes[1].set_title("GiB of the fullest rank")
