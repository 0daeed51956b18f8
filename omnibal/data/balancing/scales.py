"""Scales: the integers in which the balanced planner measures samples.

Costs are numbers of any size and samples of different machines must weigh the same to the last bit, so each load is
scaled to a mean pack's and rounded once.
"""

import math
from typing import Any, Final, NamedTuple

import numpy as np

from omnibal.compiled import compiled
from omnibal.cost import CostModel
from omnibal.data.balancing.tables import DIMENSIONS, LOADS, NEXT, NOWHERE, SIZES, Int64Array
from omnibal.data.lengths import IntArray, SampleLengths

PACK: Final = 1 << 20
"""A mean pack's load in the cost dimension and, where they are levelled, in tokens."""
VISION_WEIGHT: Final = 3
"""A mean pack's vision units weigh this many ``PACK``: they come in few sizes and are to be even before all else."""
MOST_LOAD: Final = 1 << 24
"""Largest load of a sample in any dimension: sums stay within 32 bits."""


class Columns(NamedTuple):
    """The lengths' arrays that decide packs, for compiled code."""

    vision_units: IntArray
    llm_tokens: IntArray
    vision_squared: IntArray
    """Empty where it is unknown."""


class Scales(NamedTuple):
    """How samples are measured."""

    most_vision: int
    """Vision units that a pack may hold."""
    most_tokens: int
    """Tokens that a pack may hold."""
    vision: int
    """Weight of a vision unit."""
    tokens: int
    """Weight of a token; 1, which is next to nothing, where tokens need no levelling but must keep their limit."""
    costs: tuple[float, float, float, float]
    """Weights in the cost dimension of a vision unit, a token, a squared token and a squared vision unit."""


def columns_of(lengths: SampleLengths) -> Columns:
    """Take the arrays out of lengths."""
    squared = lengths.vision_squared
    if squared is None:
        squared = np.zeros(0, dtype=np.int64)
        squared.flags.writeable = False  # as the others are: compiled code then exists once
    return Columns(lengths.vision_units, lengths.llm_tokens, squared)


def scales_for(
    most_vision: int, most_tokens: int, cost: CostModel, *, pack_vision: float, pack_tokens: float, pack_cost: float,
    level_tokens: bool, in_proportion: bool,
) -> Scales:  # fmt: skip
    """Choose weights such that a mean pack weighs ``PACK`` in each dimension, ``VISION_WEIGHT`` times that in vision.

    Args:
        most_vision: Vision units that a pack may hold.
        most_tokens: Tokens that a pack may hold.
        cost: What is to be even, besides vision units.
        pack_vision: Vision units of a mean pack.
        pack_tokens: Tokens of a mean pack.
        pack_cost: Cost of a mean pack.
        level_tokens: Whether tokens are to be even too.
        in_proportion: Whether a pack's cost is to be in proportion to its vision units, in the place of even.
    """
    # A power of two: the rounding of the mean cost, which may differ between machines, does not reach the samples.
    unit = 2.0 ** math.floor(math.log2(max(pack_cost, 1e-300))) / PACK
    # Packs are in proportion where what their vision units do not account for is even. Rounded as said above.
    share = round(pack_cost / pack_vision / unit) if in_proportion else 0
    return Scales(
        most_vision,
        most_tokens,
        _weight(VISION_WEIGHT * PACK, pack_vision, most_vision),
        _weight(PACK, pack_tokens, most_tokens) if level_tokens else 1,
        (
            cost.vision_units / unit - share,
            cost.llm_tokens / unit,
            cost.llm_tokens_squared / unit,
            cost.vision_squared / unit,
        ),
    )


def _weight(pack: int, mean: float, most: int) -> int:
    return int(max(min(pack // max(mean, 1e-9), MOST_LOAD // max(most, 1)), 1))


@compiled
def measure(chosen: Int64Array, columns: Columns, scales: Scales) -> Any:
    """Measure samples; one that exceeds a limit as if it were at both.

    Args:
        chosen: Their indices.
        columns: The dataset's lengths.
        scales: The units.

    Returns:
        A row per sample as ``omnibal.data.balancing.tables`` has them.
    """
    samples = np.empty((len(chosen), LOADS + DIMENSIONS), dtype=np.int32)
    per_vision, per_token, per_squared_token, per_squared_vision = scales.costs
    for place in range(len(chosen)):
        vision, tokens = capped_sizes(columns, chosen[place], scales)
        cost = per_vision * vision + per_token * tokens + per_squared_token * np.float64(tokens) * np.float64(tokens)
        if len(columns.vision_squared):
            cost += per_squared_vision * columns.vision_squared[chosen[place]]
        samples[place, NEXT] = NOWHERE
        samples[place, SIZES], samples[place, SIZES + 1] = vision, tokens
        samples[place, LOADS] = min(vision * scales.vision, MOST_LOAD)
        samples[place, LOADS + 1] = np.int64(min(max(cost, -np.float64(MOST_LOAD)), np.float64(MOST_LOAD)))
        samples[place, LOADS + 2] = min(tokens * scales.tokens, MOST_LOAD)
    return samples


@compiled
def capped_sizes(columns: Columns, sample: int, scales: Scales) -> Any:
    """Vision units and tokens of a sample, those of the limits where it exceeds one.

    At least one token: then nothing fits beside a sample that exceeds a limit.
    """
    units, length = np.int64(columns.vision_units[sample]), np.int64(columns.llm_tokens[sample])
    if units > scales.most_vision or length > scales.most_tokens:
        return np.int64(scales.most_vision), np.int64(scales.most_tokens)
    return units, max(length, np.int64(1))
