"""What each source gives: without replacement until it is used up, then anew, and by tokens to half a sample."""

import numpy as np
import pytest

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import min_packs
from omnibal.data.packing_spec import Mixture
from omnibal.data.source_draws import PackRates, SourceDraws
from tools.synthetic import tiled_lengths

SIZES = {"large": 3000, "small": 7, "none": 0, "one": 1}
MIXTURE = Mixture({"small": 1, "large": 1, "one": 1, "none": 0})


def lengths_of(*, scattered):
    source = np.repeat(np.arange(4), list(SIZES.values()))
    generator = np.random.default_rng(0)
    source = generator.permutation(source) if scattered else source
    tokens = generator.integers(1, 1000, len(source))
    return SampleLengths(tokens % 5, tokens, target_tokens=tokens // 2, source=source, source_names=tuple(SIZES))


@pytest.mark.parametrize("scattered", [False, True])
def test_every_pass_has_each_sample_once_in_another_order(scattered):
    lengths = lengths_of(scattered=scattered)
    draws = SourceDraws(lengths, MIXTURE, seed=1)
    for source, size in enumerate(SIZES.values()):
        if not size:
            continue
        members = np.flatnonzero(lengths.source == source)
        passes = draws.samples(source, 0, 3 * size).reshape(3, size)
        assert (np.sort(passes, axis=1) == members).all()
        assert size < 5 or len({tuple(order) for order in passes.tolist()}) == 3


def test_any_draws_are_known_without_those_before():
    draws = SourceDraws(lengths_of(scattered=True), MIXTURE, seed=1)
    for source in (0, 1, 3):
        first, last = 65_000, 66_500  # across the decks of the small ones, and passes of the large one
        whole = draws.samples(source, 0, last)
        assert (draws.samples(source, first, last) == whole[first:]).all()


def test_seeds_give_other_orders():
    first, second = (SourceDraws(lengths_of(scattered=False), MIXTURE, seed=seed).samples(0, 0, 100) for seed in (1, 2))
    assert (first != second).any()


@pytest.mark.parametrize("by", ["llm_tokens", "target_tokens"])
def test_cursors_by_tokens_follow_those_that_were_drawn(by):
    lengths = lengths_of(scattered=True)
    draws = SourceDraws(lengths, Mixture(MIXTURE.shares, by=by), seed=1)
    tokens = getattr(lengths, by)
    for source, most in ((0, 4_000_000), (1, 40_000_000), (3, 90_000)):
        asked = np.sort(np.random.default_rng(0).integers(0, most, 200)).astype(np.float64)
        units = np.zeros((200, 4))
        units[:, source] = asked
        found = draws.cursors(units)[:, source]
        sums = np.concatenate([[0], np.cumsum(tokens[draws.samples(source, 0, int(found[-1]) + 5)])])
        nearest = np.abs(sums[None, :] - asked[:, None]).min(axis=1)
        assert (np.abs(sums[found] - asked) == nearest).all()


def test_cursors_by_samples_are_rounded():
    draws = SourceDraws(lengths_of(scattered=False), MIXTURE, seed=1)
    assert draws.cursors(np.array([0.4, 0.5, 2.0, 7.9])).tolist() == [0, 1, 2, 8]


@pytest.mark.parametrize("limits", [PackLimits(16, 5120), PackLimits(9, 4096), PackLimits(33, 4096)])
def test_a_mix_asks_for_the_packs_of_the_bound(limits):
    """Over whole passes of all samples, chance makes nothing of them, and the bound is that of ``min_packs``."""
    lengths = tiled_lengths(20_000, seed=3)
    counts = np.bincount(lengths.source)
    draws = SourceDraws(lengths, Mixture({str(source): float(count) for source, count in enumerate(counts)}), seed=0)
    rate = PackRates(lengths, limits, draws)
    needed = rate.packs_per_sample(draws.sample_shares_at(0), 1e12) * len(lengths)
    assert needed == pytest.approx(1.0025 * min_packs(lengths, limits), rel=5e-4)
    assert rate.packs_per_sample(draws.sample_shares_at(0), 100) * len(lengths) > needed
