"""Tables 3 and 6 of the OmniBal paper, measured beside the paper's figures."""

from collections.abc import Sequence

import numpy as np
from measure import figures_of, plan_by_rule, plan_ours
from rules import Task

from omnibal.data.isf import iterative_sampling_and_filtering
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio
from omnibal.data.synthetic import TOKENS_PER_TILE
from omnibal.report.packing import PackingFigures

RANKS = 8
"""As in the published test script."""
LIMITS = PackLimits(9, 4096)
BATCH = 4

TABLE_3 = {
    "random": ("random_batches", (4, 0.31, 0.34, 0.30)),
    "length-group": ("length_grouped", (4, 0.20, 0.26, 0.13)),
    "device-group": ("device_grouped", (4, 0.378, 0.125, 0.15)),
    "ISF, as published": ("published_isf", (4.6, 0, 0.02, 0.14)),
}
"""Method, rule, and the paper's samples per micro-batch, Pad Ratio, Dist Ratio vision and LLM."""

TEXT_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Lengths of texts, as shares of the made-up ones."""

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


def shortened_texts(lengths: SampleLengths) -> list[Sequence[str]]:
    """Rows of ISF on the same samples with shorter texts: what the Dist Ratios depend on."""
    image_tokens = lengths.vision_units * TOKENS_PER_TILE
    rows = []
    for share in TEXT_SHARES:
        tokens = np.maximum(image_tokens + (lengths.llm_tokens - image_tokens) * share, 1).astype(np.int32)
        shorter = SampleLengths(lengths.vision_units, tokens)
        packs = iterative_sampling_and_filtering(shorter, LIMITS)
        whole = np.random.default_rng(0).permutation(len(packs) // RANKS * RANKS).reshape(-1, RANKS)
        vision, tokens_held = packs.vision_units(shorter), packs.llm_tokens(shorter)
        rows.append(
            [
                f"{share:.0%}",
                f"{len(shorter) / len(packs):.2f}",
                f"{(vision >= LIMITS.full_vision_units).mean():.1%}",
                f"{dist_ratio(vision[whole]):.4f}",
                f"{dist_ratio(tokens_held[whole]):.3f}",
            ]
        )
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
