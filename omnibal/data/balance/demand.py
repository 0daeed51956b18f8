"""Demand: how many packs all samples ask for, and by which load a random stream of them is cut into steps."""

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from omnibal.cost import CostModel, Load
from omnibal.data.balance.tables import Int32Array
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import MOST_ROUNDINGS, rounded_shares

FloatArray = npt.NDArray[np.float64]

FULL: Final = 1 << 16
"""A pack's room for the driving load."""
NOTABLE: Final = 1.002
"""Weights that know which samples do not fit together count where they ask for this many times the volume's packs."""
RESERVE: Final = 0.0025
"""Least share of packs beyond the bound: room to move samples."""
CLOSING: Final = 0.001
"""Share of packs beyond the bound that is left where chance takes the rest."""
SIGMAS: Final = 6
"""Standard deviations of chance that the reserve covers: about one failure in a billion windows."""
CHUNK: Final = 1 << 20
"""Samples that are counted at a time."""


class Demand(NamedTuple):
    """What all samples ask for; one over a limit counts as if it were at both."""

    num_samples: int
    mean_vision: float
    """Vision units of a sample."""
    mean_cost: float
    """Cost of a sample."""
    by_tokens: bool
    """Whether tokens ask for more packs than vision units do: they drive."""
    by_volume: bool
    """Whether the driving load is proportional to the size."""
    shares: Int32Array
    """Driving load of each size from 0 to the limit, in units of 1 / ``FULL`` of a pack."""
    driver: float
    """Packs per sample that the driving load asks for."""
    other: float
    """Packs per sample that the other load asks for."""
    spread: float
    """Standard deviation of a sample's driving load, relative to the mean."""
    other_spread: float
    """The same of the other load's difference from the driving one."""

    def packs_needed(self, blocks: int, window: int, reserve: float = RESERVE) -> float:
        """Packs for all samples: the bound, and a reserve for what chance makes of the parts that are planned alone.

        Args:
            blocks: Parts of the samples that get equal numbers of steps whatever they hold.
            window: Samples in the parts that are planned alone: these get exact shares of the driving load only.
            reserve: Least share of packs beyond the bound.
        """
        number = max(self.num_samples, 1)
        by_block = self.spread * math.sqrt((blocks - 1) / number)
        by_window = self.other_spread * math.sqrt(max(1 / max(window, 1) - 1 / number, 0))
        return self.num_samples * max(
            self.driver * (1 + max(reserve, CLOSING + SIGMAS * by_block)),
            self.other * (1 + CLOSING + SIGMAS * math.hypot(by_block, by_window)),
        )


def survey(
    lengths: SampleLengths, limits: PackLimits, cost: CostModel, *, samples: IntArray | None, drawn: IntArray | None
) -> Demand:
    """Count what samples ask for.

    Args:
        lengths: Loads of every sample.
        limits: The most a pack may hold.
        cost: What a sample costs.
        samples: Which samples take part; None for all. The packs that they ask for are counted exactly.
        drawn: A random part of them that all other figures are known from; None for all of them.
    """
    chosen = samples if drawn is None else drawn
    vision, tokens = _sizes(lengths, limits, chosen)
    squared = 0 if lengths.vision_squared is None else lengths.vision_squared[slice(None) if chosen is None else chosen]
    costs = cost(Load(vision, tokens, tokens**2, squared)) - cost.fixed
    weights = _weigh(vision, limits.vision_units), _weigh(tokens, limits.llm_tokens)
    num_samples = len(lengths) if samples is None else len(samples)
    totals = _total_shares(lengths, limits, samples, weights)
    by_tokens = totals[1] > totals[0]
    driver, other = (
        weights[by_tokens][0][(vision, tokens)[by_tokens]],
        weights[not by_tokens][0][(tokens, vision)[by_tokens]],
    )
    number = max(len(vision), 1)
    return Demand(
        num_samples,
        float(vision.sum()) / number,
        float(costs.sum()) / number,
        by_tokens,
        weights[by_tokens][1],
        weights[by_tokens][0],
        totals[by_tokens] / FULL / max(num_samples, 1),
        totals[not by_tokens] / FULL / max(num_samples, 1),
        _spread(driver),
        _spread(driver, other),
    )


def _sizes(lengths: SampleLengths, limits: PackLimits, chosen: IntArray | slice | None) -> tuple[IntArray, IntArray]:
    """Vision units and tokens, at least one; those of the limits where a sample exceeds one."""
    part = slice(None) if chosen is None else chosen
    vision, tokens = lengths.vision_units[part].astype(np.int64), lengths.llm_tokens[part].astype(np.int64)
    tokens = np.maximum(tokens, 1)
    over = (vision > limits.vision_units) | (tokens > limits.llm_tokens)
    vision[over], tokens[over] = limits.vision_units, limits.llm_tokens
    return vision, tokens


Weights = tuple[Int32Array, bool]
"""What each size asks of a pack, in units of 1 / ``FULL``, and whether that is proportional to the size."""


def _total_shares(
    lengths: SampleLengths, limits: PackLimits, samples: IntArray | None, weights: tuple[Weights, Weights]
) -> tuple[float, float]:
    """What all samples ask for, in units of 1 / ``FULL`` of a pack."""
    summary = lengths.summary
    if (
        samples is None
        and all(by_volume for _, by_volume in weights)
        and summary.max_vision_units <= limits.vision_units
        and summary.max_llm_tokens <= limits.llm_tokens
    ):
        return (
            summary.total_vision_units * FULL / max(limits.vision_units, 1),
            summary.total_llm_tokens * FULL / limits.llm_tokens,
        )
    totals = [0, 0]
    for begin in range(0, len(lengths) if samples is None else len(samples), CHUNK):
        part = slice(begin, begin + CHUNK)
        sizes = _sizes(lengths, limits, part if samples is None else samples[part])
        for load in range(2):
            totals[load] += int(weights[load][0][sizes[load]].sum(dtype=np.int64))
    return totals[0], totals[1]


def _spread(load: Int32Array, other: Int32Array | None = None) -> float:
    if load.sum() == 0 or (other is not None and other.sum() == 0):
        return 0.0
    relative = load / load.mean()
    return float((relative if other is None else relative - other / other.mean()).std())


def _weigh(sizes: IntArray, limit: int) -> Weights:
    """Weigh sizes by what they ask of packs: by volume, or by shares that cannot be combined.

    A limit of 9 holds no two samples of 5: then each of them weighs a whole pack, and 4 and less weigh nothing. See
    ``min_packs`` for these weights.
    """
    counts = np.bincount(sizes, minlength=limit + 1)
    best = np.arange(limit + 1) * FULL // max(limit, 1)
    most, volume = NOTABLE * float(counts @ best), True
    for k in range(1, MOST_ROUNDINGS + 1 if limit else 1):
        weights = rounded_shares(limit, k) * FULL // (k * limit)
        if counts @ weights > most:
            best, most, volume = weights, float(counts @ weights), False
    return best.astype(np.int32), volume
