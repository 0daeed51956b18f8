"""Rates: how many packs a sample of any mix asks for, exactly and without trying."""

from typing import NamedTuple

import numpy as np

from omnibal.data.balance.demand import CLOSING, RESERVE, SIGMAS
from omnibal.data.balance.layout import WINDOW
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import MOST_ROUNDINGS, rounded_shares
from omnibal.data.mixing.draws import Draws
from omnibal.data.mixture import FloatArray


class Asked(NamedTuple):
    """What the samples of each source ask of packs by one load, weighed in several ways, shape (sources, ways)."""

    mean: FloatArray
    """Packs per sample."""
    variance: FloatArray
    """Of a sample: what its packs differ by from those that its share of what the source is to give asks for."""


class PackRates:
    """How many packs the samples of a mix ask for: the bound of ``min_packs``, and a reserve for what chance makes.

    A mix asks for the mean of what its sources do, weighed in the way that asks for most (see ``min_packs``). Chance
    is in what is drawn of each source; how much each gives is fixed, in samples or tokens: by tokens, how many samples
    that are is up to chance, too. Over whole passes of a source there is none.

    Args:
        lengths: Loads of every sample.
        limits: The most a pack may hold.
        draws: The sources.
    """

    def __init__(self, lengths: SampleLengths, limits: PackLimits, draws: Draws) -> None:
        self._sizes = draws.sizes
        most = limits.vision_units, limits.llm_tokens
        # Of each source and size: samples, what they give, and the squares of that.
        vision, tokens = (np.zeros((3, len(draws.sizes), limit + 1)) for limit in most)
        for source in range(len(draws.sizes)):
            members, given = draws.members(source), draws.given(source)
            units, llm_tokens = lengths.vision_units[members], lengths.llm_tokens[members]
            # One over a limit has a pack of its own, as if it were at both limits.
            over = (units > most[0]) | (llm_tokens > most[1])
            for load, sums, limit in ((units, vision, most[0]), (np.maximum(llm_tokens, 1), tokens, most[1])):
                sizes = np.where(over, limit, load)
                sums[:, source] = [np.bincount(sizes, given**power, limit + 1) for power in range(3)]
        self._asked = [_asked(sums, limit) for sums, limit in ((vision, most[0]), (tokens, most[1]))]

    def packs_per_sample(self, mix: FloatArray, num_draws: float) -> FloatArray:
        """Packs that a sample asks for, reserve included; at most one.

        Args:
            mix: What part of the samples each source gives, shape (…, sources).
            num_draws: Draws that get a fixed number of steps.
        """
        bounds = [(mix @ asked.mean).max(axis=-1) for asked in self._asked]
        drives = bounds[0] >= bounds[1]
        needs = []
        for asked, is_driver in zip(self._asked, (drives, ~drives), strict=True):
            # Windows are cut where they have their share of the load that asks for most; of the other one they get
            # what chance gives a window.
            many, few = (self._with_reserve(mix, asked, draws) for draws in (num_draws, min(num_draws, WINDOW)))
            needs.append(np.where(is_driver, many, few))
        packs: FloatArray = np.minimum(np.maximum(*needs), 1.0)
        return packs

    def _with_reserve(self, mix: FloatArray, asked: Asked, num_draws: float) -> FloatArray:
        mean = mix @ asked.mean
        by_chance = np.minimum(mix * num_draws, self._sizes / 2)  # the ends of two passes at most
        deviation = np.sqrt(by_chance @ asked.variance) / num_draws
        needed: FloatArray = np.maximum(mean * (1 + RESERVE), mean * (1 + CLOSING) + SIGMAS * deviation).max(axis=-1)
        return needed


def _asked(sums: FloatArray, limit: int) -> Asked:
    """Weigh every size in all ways, and average over the samples of each source.

    Args:
        sums: Samples, what they give, and its squares, by source and size, shape (3, sources, limit + 1).
        limit: The largest size.
    """
    counts, given, squares = sums
    sizes = np.arange(limit + 1)
    shares = [sizes / max(limit, 1)]
    shares += [rounded_shares(limit, k) / (k * limit) for k in range(1, MOST_ROUNDINGS + 1 if limit else 1)]
    weights = np.stack(shares, axis=1)
    numbers = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    mean = counts @ weights / numbers
    rate = counts @ weights / np.maximum(given.sum(axis=1, keepdims=True), 1)  # packs for what is given
    squared = counts @ weights**2
    by_number = squared / numbers - mean**2
    by_given = (squared - 2 * rate * (given @ weights) + rate**2 * squares.sum(axis=1, keepdims=True)) / numbers
    return Asked(mean, np.maximum(np.maximum(by_number, by_given), 0))
