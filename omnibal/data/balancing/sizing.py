"""Sizing: how many packs an epoch needs, and by which load a random stream of samples is cut into steps."""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from omnibal.cost import CostModel, Load
from omnibal.data.balancing.tables import Int32Array
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import MOST_ROUNDINGS, rounded_shares

FULL: Final = 1 << 16
"""A pack's room for the driving load."""
NOTABLE: Final = 1.002
"""Weights that know which samples do not fit together count where they ask for this many times the volume's packs."""
RESERVE: Final = 0.0025
"""Least share of packs beyond the bound: room to move samples."""
CLOSING: Final = 0.001
"""Share of packs beyond the bound that is left where chance takes the rest."""
STEP_SIGMAS: Final = 3
"""Standard deviations of a step's load beyond which it may exceed its packs' limit: exchanges put that right."""
COUNTED: Final = 1 << 23
"""Most samples that are all looked at, if only at their sizes: that takes some hundredths of a second."""
SIGMAS: Final = 6
"""Standard deviations of chance that the reserve covers: about one failure in a billion windows."""


@dataclass(frozen=True, eq=False)
class Demand:
    """What samples ask of the packs in one dimension.

    Args:
        weights: Share of a pack that a sample of each size from 0 to the limit takes, in units of 1 / ``FULL``; no
            pack holds more than ``FULL``.
        is_volume: Whether the weights are proportional to the sizes.
        shares: What each of the surveyed samples takes.
        mean: Mean share of all samples.
        error: Standard deviation of ``mean``, relative to it; 0 where it is exact.
    """

    weights: Int32Array
    is_volume: bool
    shares: npt.NDArray[np.float64]
    mean: float
    error: float

    def spread(self, other: "Demand | None" = None) -> float:
        """Relative standard deviation of the shares, or of their difference from another dimension's."""
        if self.mean == 0:
            return 0.0
        relative = self.shares / self.mean
        if other is not None and other.mean > 0:
            relative = relative - other.shares / other.mean
        return float(relative.std())


def demand(sizes: Int32Array, limit: int, *, mean_size: float, all_sizes: Int32Array | None) -> Demand:
    """Weigh sizes by what they ask of packs with a limit: by volume, or by shares that cannot be combined.

    A limit of 9 holds no two samples of 5: then each of them weighs a whole pack, and 4 and less weigh nothing. See
    ``min_packs`` for these weights.

    Args:
        sizes: Sizes of the surveyed samples, at most ``limit``.
        limit: The most a pack may hold.
        mean_size: Mean size of all samples.
        all_sizes: Sizes of all samples; None where there are too many to look at.
    """
    counts = np.bincount(sizes, minlength=limit + 1)
    volume = _shares(np.arange(limit + 1), max(limit, 1))
    best, packs = volume, NOTABLE * float(counts @ volume)
    for k in range(1, MOST_ROUNDINGS + 1 if limit else 1):
        weights = _shares(rounded_shares(limit, k), k * limit)
        if counts @ weights > packs:
            best, packs = weights, float(counts @ weights)
    shares = best[sizes] / FULL
    if best is volume:
        return Demand(best, True, shares, mean_size / max(limit, 1), 0.0)
    if all_sizes is not None:
        counts = np.bincount(all_sizes, minlength=limit + 1)
        return Demand(best, False, shares, float(counts @ best) / (FULL * len(all_sizes)), 0.0)
    mean = float(shares.mean())
    return Demand(best, False, shares, mean, float(shares.std()) / mean / math.sqrt(len(sizes)))


def _shares(weights: npt.NDArray[np.int64], room: int) -> Int32Array:
    return (weights * FULL // room).astype(np.int32)


class MeanPack(NamedTuple):
    """What packs hold on average."""

    vision: float
    tokens: float
    cost: float


@dataclass(frozen=True, eq=False)
class Survey:
    """What the planner knows of the samples before it plans; those that exceed a limit count as if at both.

    Args:
        num_samples: Number of samples.
        vision: What their vision units ask of packs.
        tokens: What their tokens ask of packs.
        mean_vision: Mean vision units of a sample.
        mean_tokens: Mean tokens of a sample.
        mean_cost: Mean cost of a sample.
    """

    num_samples: int
    vision: Demand
    tokens: Demand
    mean_vision: float
    mean_tokens: float
    mean_cost: float

    @property
    def tokens_drive(self) -> bool:
        """Whether tokens ask for more packs than vision units."""
        return self.tokens.mean > self.vision.mean

    @property
    def driver(self) -> Demand:
        """The dimension that asks for more packs."""
        return self.tokens if self.tokens_drive else self.vision

    @property
    def other(self) -> Demand:
        """The dimension that asks for fewer packs."""
        return self.vision if self.tokens_drive else self.tokens

    def mean_pack(self, num_packs: float) -> MeanPack:
        """What each of so many packs holds on average."""
        samples = self.num_samples / max(num_packs, 1)
        return MeanPack(samples * self.mean_vision, samples * self.mean_tokens, samples * self.mean_cost)

    def other_load_overflows(self, num_packs: float, step_packs: int) -> bool:
        """Tell whether some random steps of their share of the driving load would exceed the other limit."""
        samples_per_step = self.num_samples * step_packs / max(num_packs, 1)
        deviation = self.other.spread(self.driver) / math.sqrt(max(samples_per_step, 1))
        return self.num_samples * self.other.mean * (1 + STEP_SIGMAS * deviation) > num_packs


def survey(
    lengths: SampleLengths, limits: PackLimits, cost: CostModel, samples: IntArray | None, drawn: IntArray | None
) -> Survey:
    """Look at all samples, or at the totals of all and at some that were drawn.

    Args:
        lengths: Loads of every sample.
        limits: The most a pack may hold.
        cost: Cost of a sample.
        samples: Samples that take part; None for all.
        drawn: A random part of them; None to look at all.
    """
    looked_at = samples if drawn is None else drawn
    vision, tokens = _capped(lengths if looked_at is None else lengths.take(looked_at), limits)
    num_samples = len(lengths) if samples is None else len(samples)
    everyone: tuple[Int32Array, Int32Array] | None = None
    if drawn is None:
        everyone = vision, tokens
    elif num_samples <= COUNTED:
        everyone = _capped(lengths if samples is None else lengths.take(samples), limits)
    totals = _totals(lengths, limits, samples) if everyone is None else (_total(everyone[0]), _total(everyone[1]))
    mean_vision, mean_tokens = (total / max(num_samples, 1) for total in totals)
    all_vision, all_tokens = everyone or (None, None)
    squared = lengths.vision_squared
    loads = Load(vision, tokens, tokens.astype(np.int64) ** 2, _chosen(squared, looked_at))
    return Survey(
        num_samples,
        demand(vision, limits.vision_units, mean_size=mean_vision, all_sizes=all_vision),
        demand(tokens, limits.llm_tokens, mean_size=mean_tokens, all_sizes=all_tokens),
        mean_vision,
        mean_tokens,
        float(cost(loads).sum()) / max(len(vision), 1),
    )


def _chosen(squared: IntArray | None, samples: IntArray | None) -> IntArray | int:
    if squared is None:
        return 0
    return squared if samples is None else squared[samples]


def _capped(lengths: SampleLengths, limits: PackLimits) -> tuple[Int32Array, Int32Array]:
    over = limits.oversized(lengths)
    if len(over) == 0:
        return lengths.vision_units, lengths.llm_tokens
    vision, tokens = lengths.vision_units.copy(), lengths.llm_tokens.copy()
    vision[over], tokens[over] = limits.vision_units, limits.llm_tokens
    return vision, tokens


def _total(values: IntArray) -> int:
    """Exactly the same on all machines."""
    return int(values.sum(dtype=np.int64))


def _totals(lengths: SampleLengths, limits: PackLimits, samples: IntArray | None) -> tuple[int, int]:
    """Vision units and tokens of more samples than are all looked at."""
    if samples is None:
        over, summary = limits.oversized(lengths), lengths.summary
        beyond = lengths.take(over).summary
        return (
            summary.total_vision_units - beyond.total_vision_units + len(over) * limits.vision_units,
            summary.total_llm_tokens - beyond.total_llm_tokens + len(over) * limits.llm_tokens,
        )
    total_vision = total_tokens = 0
    for begin in range(0, len(samples), COUNTED):
        vision, tokens = _totals(lengths.take(samples[begin : begin + COUNTED]), limits, None)
        total_vision, total_tokens = total_vision + vision, total_tokens + tokens
    return total_vision, total_tokens


def packs_needed(known: Survey, *, blocks: int, window: int, reserve: float = RESERVE) -> float:
    """Packs for all samples: the bound, and a reserve for what chance makes of the parts that are planned alone.

    Args:
        known: What is known of the samples. Windows get exact shares of the driving load and random ones of the other.
        blocks: Parts of the samples that get equal numbers of steps whatever they hold.
        window: Samples in the parts that are planned alone.
        reserve: Least share of packs beyond the bound, besides what chance makes.
    """
    driver, other, num_samples = known.driver, known.other, known.num_samples
    # Means over parts of a population that is drawn without return vary less, the larger the parts are.
    by_block = driver.spread() * math.sqrt((blocks - 1) / max(num_samples, 1))
    by_window = other.spread(driver) * math.sqrt(max(1 / max(window, 1) - 1 / max(num_samples, 1), 0))
    return num_samples * max(
        driver.mean * (1 + max(reserve, CLOSING + SIGMAS * math.hypot(driver.error, by_block))),
        other.mean * (1 + CLOSING + SIGMAS * math.hypot(other.error, by_block, by_window)),
    )
