"""Tables 3 and 6 of the OmniBal paper, and what the made-up mix was fitted to, beside the paper's figures."""

from collections.abc import Sequence

import numpy as np

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import PackingFigures
from tools.sampling.measure import figures_of, plan_by_rule, plan_ours
from tools.sampling.rules import Task
from tools.synthetic import TOKENS_PER_TILE

RANKS = 4
"""The paper's data-parallel ranks (TP 2, PP 4, DP 4 on 32 devices); the published test script has 8."""
LIMITS = PackLimits(9, 4096)
BATCH = 4

TABLE_3 = {
    "random": ("random_batches", (4, 0.31, 0.34, 0.30)),
    "length-group": ("length_grouped", (4, 0.20, 0.26, 0.13)),
    "device-group": ("device_grouped", (4, 0.378, 0.125, 0.15)),
    "ISF, as published": ("published_isf", (4.6, 0, 0.02, 0.14)),
}
"""Method, rule, and the paper's samples per micro-batch, Pad Ratio, Dist Ratio vision and LLM."""

MOST_TILES = 5
"""Four and a thumbnail."""
ROUNDED = 256
"""The published code takes the mean of lengths rounded up to multiples of this."""

TABLE_6 = (
    ((0, 64), (0.0159, 0.145)),
    ((0, 128), (0.0156, 0.144)),
    ((0, 256), (0.018, 0.141)),
    ((1, 128), (0.0417, 0.20)),
)
"""How far Q'v and Q't lie below Qv and Qt, and the paper's Dist Ratio vision and LLM."""


def table_3(lengths: SampleLengths) -> list[Sequence[str]]:
    """Rows of Table 3: measured / the paper's; the packs shuffled before they are dealt have no paper's figure."""
    task = Task(lengths, LIMITS, RANKS, BATCH)
    rows = [
        [method, *(f"{got} / {said:g}" for got, said in zip(_table_3_figures(rule, task), figures, strict=True))]
        for method, (rule, figures) in TABLE_3.items()
    ]
    for label, method in (("ISF, packs shuffled (ours)", "isf"), ("balanced (ours)", "balanced")):
        rows.append([label, *_cells(figures_of(method, plan_ours(method, task), task))])
    return rows


def table_6(lengths: SampleLengths) -> list[Sequence[str]]:
    """Rows of Table 6, with the packs dealt as the published code does."""
    rows = []
    for (less_vision, less_tokens), (vision, tokens) in TABLE_6:
        limits = PackLimits(
            LIMITS.vision_units,
            LIMITS.llm_tokens,
            full_vision_units=LIMITS.vision_units - less_vision,
            full_llm_tokens=LIMITS.llm_tokens - less_tokens,
        )
        task = Task(lengths, limits, RANKS, BATCH)
        found = figures_of("published_isf", plan_by_rule("published_isf", task), task)
        rows.append(
            [
                f"Qv{-less_vision or ''}, Qt−{less_tokens}".replace("-", "−"),
                f"{found.dist_ratio_vision:.4f} / {vision:g}",
                f"{found.dist_ratio_tokens:.3f} / {tokens:g}",
                f"{found.packs:,}",
            ]
        )
    return rows


def as_the_paper_counts(lengths: SampleLengths, most_tiles: int = MOST_TILES) -> SampleLengths:
    """At most so many tiles to a sample, and one for a blank image where it has none."""
    tiles = np.minimum(lengths.vision_units, most_tiles)
    fewer = (lengths.vision_units - tiles) * TOKENS_PER_TILE
    return SampleLengths(np.maximum(tiles, 1), lengths.llm_tokens - fewer, source=lengths.source)


def fit_of_the_mix(lengths: SampleLengths) -> list[Sequence[str]]:
    """Rows of what the made-up mix was fitted to, and of what else the paper says: what, paper, measured, fitted."""
    counted = as_the_paper_counts(lengths)
    tiles, rounded = counted.vision_units, -(-counted.llm_tokens // ROUNDED) * ROUNDED
    limit = LIMITS.llm_tokens * tiles.sum() / rounded.sum()
    parts = (
        ("whole mix (tables 3, 10)", counted, "4.6", "0.02 / 0.14"),
        ("one tile to an image (table 10)", as_the_paper_counts(lengths, 1), "7.6", "0.06 / 0.05"),
        ("LLaVA-665K (table 8)", counted.take(np.flatnonzero(counted.source == 0)), "", "0.02 / 0.145"),
    )
    rows = [
        ["tiles of a sample (table 1)", "1.9 ± 1.2", f"{tiles.mean():.2f} ± {tiles.std():.2f}", "yes"],
        ["Qv: 4096 over the tokens of a tile", "9", f"{limit:.2f}", ""],
    ]
    for name, part, samples, ratios in parts:
        task = Task(part, LIMITS, RANKS, BATCH)
        found = figures_of("published_isf", plan_by_rule("published_isf", task), task)
        if samples:
            rows.append([f"samples per pack, {name}", samples, f"{found.samples_per_pack:.2f}", "yes"])
        measured = f"{found.dist_ratio_vision:.4f} / {found.dist_ratio_tokens:.3f}"
        rows.append([f"DR vision / LLM, {name}", ratios, measured, ""])
    return rows


def _table_3_figures(rule: str, task: Task) -> list[str]:
    return _cells(figures_of(rule, plan_by_rule(rule, task), task))


def _cells(found: PackingFigures) -> list[str]:
    return [
        f"{found.samples_per_pack:.2f}",
        f"{found.pad_ratio:.3f}",
        f"{found.dist_ratio_vision:.4f}",
        f"{found.dist_ratio_tokens:.3f}",
    ]
