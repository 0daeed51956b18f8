"""Samples that the sources of a mixture give, one after another without end, and the packs that these ask for."""

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from omnibal.cost import FloatArray
from omnibal.data.balance.planner import WINDOW, shuffle_keys, shuffled
from omnibal.data.balance.rules import CLOSING, RESERVE, SIGMAS
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import MOST_ROUNDINGS, rounded_shares
from omnibal.data.packing_spec import Mixture
from omnibal.errors import DataError

Int64Array = npt.NDArray[np.int64]

SMALL: Final = 1 << 10  # sources of fewer samples are drawn many passes at a time
DECK: Final = 1 << 16  # draws of a small source that are made at a time, about
SUMS_KEPT: Final = 2  # decks of each source whose token sums are remembered: cursors come in ascending order


class SourceDraws:
    """Samples by source: each is drawn in random order until it is used up, then in another order.

    The order is cut into *decks*, each computed without those before it: one pass of a source, or as many passes of a
    small one as make up ``DECK`` draws.
    """

    def __init__(self, lengths: SampleLengths, mixture: Mixture, *, seed: int, samples: IntArray | None = None) -> None:
        if lengths.source is None:
            raise DataError("lengths must have a source for every sample under a mixture, got none; name source")
        self._source, names = lengths.source, lengths.source_names
        # Samples in the order of their sources (None if they are), and where each source begins and the last one ends.
        of_samples = self._source if samples is None else self._source[samples]
        self._order: Int64Array | None = None
        if samples is not None or (of_samples[1:] < of_samples[:-1]).any():
            order = np.argsort(of_samples, kind="stable")
            of_samples = of_samples[order]
            self._order = order if samples is None else samples[order].astype(np.int64)
        self._starts: Int64Array = np.searchsorted(of_samples, np.arange(len(names) + 1))
        mixture.check_sources(names)
        self._mixture, self._seed = mixture, seed
        self._columns = [mixture.sources.index(name) for name in names]
        self._tokens: IntArray | None = None if mixture.by == "samples" else getattr(lengths, mixture.by)
        if self._tokens is None and mixture.by != "samples":
            raise DataError(f"lengths must have {mixture.by} for a mixture by {mixture.by}, got none")
        self.sizes: Int64Array = np.diff(self._starts)  # samples of each source
        self._decks = self.sizes * np.where(self.sizes < SMALL, DECK // np.maximum(self.sizes, 1), 1)
        self._half_sums = lru_cache(SUMS_KEPT * len(names))(self._sum_deck)
        # What a sample of each source counts for: 1, or its tokens.
        self.means = np.ones(len(self.sizes))
        if self._tokens is not None:
            sums = [self._tokens[self.members(source)].sum(dtype=np.int64) for source in range(len(self.sizes))]
            self.means = np.array(sums) / np.maximum(self.sizes, 1)
        for source in np.flatnonzero(self.ever_drawn & ((self.sizes == 0) | (self.means == 0))).tolist():
            wants = "samples" if self.sizes[source] == 0 else mixture.by
            raise DataError(
                f"sources of a mixture must have {wants}, got none in {names[source]!r}; give it the share 0"
            )

    @property
    def num_samples(self) -> int:
        return int(self._starts[-1])

    @property
    def ever_drawn(self) -> npt.NDArray[np.bool_]:
        return np.asarray((self.shares_at(self._mixture.steps) > 0).any(axis=0))

    def shares_at(self, step: npt.ArrayLike) -> FloatArray:
        return self._mixture.shares_at(step)[..., self._columns]

    def sample_shares_at(self, step: npt.ArrayLike) -> FloatArray:
        """What part of the samples each source gives, so that its share is met on average."""
        parts = self.shares_at(step) / np.maximum(self.means, 1e-300)
        shares: FloatArray = parts / parts.sum(axis=-1, keepdims=True)
        return shares

    def units_of(self, samples: IntArray) -> FloatArray:
        """Samples or tokens that each source gives to some samples, as the mixture counts them."""
        weights = None if self._tokens is None else self._tokens[samples]
        return np.bincount(self._source[samples], weights, minlength=len(self.sizes)).astype(np.float64)

    def members(self, source: int) -> Int64Array | slice:
        part = slice(int(self._starts[source]), int(self._starts[source + 1]))
        return part if self._order is None else self._order[part]

    def given(self, source: int) -> FloatArray:
        if self._tokens is None:
            return np.ones(int(self.sizes[source]))
        return np.asarray(self._tokens[self.members(source)], dtype=np.float64)

    def cursors(self, units: FloatArray) -> Int64Array:
        """How many draws of each source come nearest to so many samples or tokens, shape (…, sources)."""
        # By tokens, those of the draws themselves are summed: what a source has given in all never differs by more than
        # half of a sample's tokens from what it was to give.
        if self._tokens is None:
            return np.floor(units + 0.5).astype(np.int64)
        found = np.zeros(units.shape, dtype=np.int64)
        for source in np.flatnonzero(self.means > 0).tolist():
            of_deck = int(self._decks[source]) * self.means[source]
            decks = np.floor(units[..., source] / of_deck).astype(np.int64)
            for deck in np.unique(decks).tolist():
                inside = decks == deck
                rest = units[..., source][inside] - deck * of_deck
                found[..., source][inside] = deck * self._decks[source] + np.searchsorted(
                    self._half_sums(source, deck), rest, side="right"
                )
        return found

    def samples(self, source: int, first: int, last: int) -> Int64Array:
        parts, size = [np.zeros(0, dtype=np.int64)], int(self._decks[source])
        while first < last:
            deck, begin = divmod(first, size)
            end = min(begin + last - first, size)
            parts.append(self._deck(source, deck, begin, end))
            first += end - begin
        return np.concatenate(parts)

    def _deck(self, source: int, deck: int, begin: int, end: int) -> Int64Array:
        size = int(self.sizes[source])
        if size < SMALL:
            passes = np.tile(np.arange(size), (int(self._decks[source]) // size, 1))
            generator = np.random.default_rng([self._seed, source, deck])
            places = generator.permuted(passes, axis=1).ravel()[begin:end]
        else:
            places = shuffled(size, begin, end, shuffle_keys(self._seed, source, deck))
        numbers = self._starts[source] + places
        drawn: Int64Array = numbers if self._order is None else self._order[numbers]
        return drawn

    def _sum_deck(self, source: int, deck: int) -> FloatArray:
        """Cumulative tokens at the midpoint of each draw of a deck, where rounding changes."""
        assert self._tokens is not None, "asked by tokens only"
        tokens = self._tokens[self._deck(source, deck, 0, int(self._decks[source]))]
        sums: FloatArray = np.cumsum(tokens, dtype=np.int64) - tokens / 2
        return sums


class SourceRates(NamedTuple):
    """What a sample of each source asks of packs by one load, weighed in several ways, shape (sources, ways)."""

    mean: FloatArray  # packs per sample
    # Variance of a sample's packs around those that its share of what the source is to give asks for.
    variance: FloatArray


class PackRates:
    """How many packs the samples of a mix ask for: the bound of ``min_packs``, and a reserve for what chance makes.

    A mix asks for the mean of what its sources do, weighed in the way that asks for most (see ``min_packs``). Chance
    is in what is drawn of each source; how much each gives is fixed, in samples or tokens: by tokens, how many samples
    that are is up to chance, too. Over whole passes of a source there is none.
    """

    def __init__(self, lengths: SampleLengths, limits: PackLimits, draws: SourceDraws) -> None:
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
        self._rates = [_rates(sums, limit) for sums, limit in ((vision, most[0]), (tokens, most[1]))]

    def packs_per_sample(self, mix: FloatArray, num_draws: float) -> FloatArray:
        """Packs that a sample of a mix (…, sources) asks for, where ``num_draws`` get a fixed number of steps."""
        bounds = [(mix @ rates.mean).max(axis=-1) for rates in self._rates]
        drives = bounds[0] >= bounds[1]
        needs = []
        for rates, is_driver in zip(self._rates, (drives, ~drives), strict=True):
            # Windows are cut where they have their share of the load that asks for most; of the other one they get
            # what chance gives a window.
            many, few = (self._with_reserve(mix, rates, draws) for draws in (num_draws, min(num_draws, WINDOW)))
            needs.append(np.where(is_driver, many, few))
        packs: FloatArray = np.minimum(np.maximum(*needs), 1.0)
        return packs

    def _with_reserve(self, mix: FloatArray, rates: SourceRates, num_draws: float) -> FloatArray:
        mean = mix @ rates.mean
        by_chance = np.minimum(mix * num_draws, self._sizes / 2)  # the ends of two passes at most
        deviation = np.sqrt(by_chance @ rates.variance) / num_draws
        needed: FloatArray = np.maximum(mean * (1 + RESERVE), mean * (1 + CLOSING) + SIGMAS * deviation).max(axis=-1)
        return needed


def _rates(sums: FloatArray, limit: int) -> SourceRates:
    """Weigh every size in all ways, and average over the samples of each source."""
    counts, given, squares = sums  # samples, what they give, and its squares, each by (sources, limit + 1 sizes)
    sizes = np.arange(limit + 1)
    shares = [sizes / max(limit, 1)]
    shares += [rounded_shares(limit, k) / (k * limit) for k in range(1, MOST_ROUNDINGS + 1 if limit else 1)]
    weights = np.stack(shares, axis=1)
    numbers = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    mean = counts @ weights / numbers
    rate = counts @ weights / np.maximum(given.sum(axis=1, keepdims=True), 1)  # packs for what is given
    # Variance of a sample's packs x where the number of draws is fixed: E[x²] − E[x]²; and where what is given, g, is:
    # E[(x − rate · g)²]. The larger of both is safe for either.
    squared = counts @ weights**2
    by_number = squared / numbers - mean**2
    by_given = (squared - 2 * rate * (given @ weights) + rate**2 * squares.sum(axis=1, keepdims=True)) / numbers
    return SourceRates(mean, np.maximum(np.maximum(by_number, by_given), 0))


def typical_lengths(lengths: SampleLengths, mixture: Mixture | None) -> SampleLengths:
    """Samples that stand for the data where limits are chosen and costs expected; without a mixture all of them.

    They are as many as there are, as a mixture draws them at its first shares, and the largest that it ever draws.
    """
    if mixture is None:
        return lengths
    draws = SourceDraws(lengths, mixture, seed=0)
    numbers = np.rint(draws.sample_shares_at(0) * len(lengths)).astype(np.int64).tolist()
    drawn = [draws.samples(source, 0, number) for source, number in enumerate(numbers)]
    every, possible = np.arange(len(lengths)), np.flatnonzero(draws.ever_drawn).tolist()
    among = np.concatenate([every[draws.members(source)] for source in possible])
    largest = [among[np.argmax(load[among])] for load in (lengths.vision_units, lengths.llm_tokens)]
    return lengths.take(np.concatenate([*drawn, largest]))
