"""Tables of data balance: methods side by side, and limits that were tried."""

import math
from collections.abc import Callable, Sequence
from typing import Final

from rich import box
from rich.table import Table

from omnibal.data.limit_search import ScoredLimits
from omnibal.report.packing import PackingFigures


def packing_table(figures: Sequence[PackingFigures]) -> Table:
    """Figures row by row, methods side by side; a figure that no method has is left out."""
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("", no_wrap=True)
    for entry in figures:
        table.add_column(entry.method, justify="right", no_wrap=True)
    for section in _SECTIONS:
        for name, cell in section.items():
            cells = [cell(entry) for entry in figures]
            if any(cells):
                table.add_row(name, *cells)
        table.add_section()
    return table


_SECTIONS: Final[tuple[dict[str, Callable[[PackingFigures], str]], ...]] = (
    {
        "packs": lambda entry: f"{entry.packs:,}",
        "  fewest possible": lambda entry: f"{entry.fewest_packs:,}",
        "  over the fewest": lambda entry: f"{entry.packs_over_fewest:+.2%}",
        "  empty": lambda entry: f"{entry.empty_packs:,}",
        "steps": lambda entry: f"{entry.steps:,}",
        "samples per pack": lambda entry: f"{entry.samples_per_pack:.2f}",
        "Pad Ratio": lambda entry: f"{entry.pad_ratio:.2g}",
        "  if packs were padded": lambda entry: f"{entry.pad_ratio_if_padded:.3f}",
    },
    {
        "Dist Ratio, vision units": lambda entry: f"{entry.dist_ratio_vision:.4f}",
        "Dist Ratio, LLM tokens": lambda entry: f"{entry.dist_ratio_tokens:.4f}",
        "Dist Ratio, LLM cost": lambda entry: f"{entry.dist_ratio_cost:.4f}",
        "χ² of steps (1: shuffled)": lambda entry: _number(entry.randomness, ".2f"),
    },
    {
        "rank means, vision units": lambda entry: _spread(entry.rank_means.vision_units, ",.2f"),
        "rank means, LLM tokens": lambda entry: _spread(entry.rank_means.llm_tokens, ",.0f"),
        "rank means, LLM cost": lambda entry: _spread(entry.rank_means.llm_cost, ".3f"),
        "largest, vision units": lambda entry: f"{entry.largest.vision_units:,}",
        "largest, LLM tokens": lambda entry: f"{entry.largest.llm_tokens:,}",
        "largest, memory kept": lambda entry: _gibibytes(entry.largest_bytes),
    },
    {
        "lost, repeated, over limit": lambda entry: f"{entry.lost}, {entry.repeated}, {entry.over_limit}",
        "seconds": lambda entry: f"{entry.seconds:.2f}",
    },
)


def _gibibytes(size: float | None) -> str:
    return "" if size is None else f"{size / 2**30:.2f} GiB"


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)


def _spread(values: Sequence[float], form: str) -> str:
    return f"{min(values, default=0):{form}} – {max(values, default=0):{form}}"


def limits_table(scored: Sequence[ScoredLimits]) -> Table:
    """Limits that a search tried, one row each."""
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in ("limits", "packs over volume", "Dist Ratio vision", "LLM cost", "samples per pack", "trap"):
        table.add_column(name, justify="right")
    for entry in scored:
        table.add_row(
            f"{entry.limits.vision_units} / {entry.limits.llm_tokens}",
            f"+{entry.packs_over_volume:.2%}",
            f"{entry.dist_ratio_vision:.4f}",
            f"{entry.dist_ratio_cost:.4f}",
            f"{entry.samples_per_pack:.2f}",
            "yes" if entry.trap else "",
        )
    return table
