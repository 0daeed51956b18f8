import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omnibal.data.isf import iterative_sampling_and_filtering
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError
from tests.data.strategies import pack_limits, sample_lengths
from tests.oracles import transcribed_isf


@given(sample_lengths(), pack_limits(), st.integers(1, 12), st.integers(0, 5))
@example(SampleLengths([], []), PackLimits(9, 4096), 1, 0)
@example(SampleLengths([7, 7, 7], [1, 1, 1]), PackLimits(3, 9), 2, 0)  # every sample over the limit
@settings(max_examples=400)
def test_packs_are_those_of_algorithm_1(lengths, limits, iterations, seed):
    packs = iterative_sampling_and_filtering(lengths, limits, iterations=iterations, seed=seed)
    assert [pack.tolist() for pack in packs] == transcribed_isf(lengths, limits, iterations, seed)


@given(sample_lengths(), pack_limits(), st.integers(1, 4))
def test_every_sample_once_and_no_limit_broken_but_by_single_samples(lengths, limits, iterations):
    packs = iterative_sampling_and_filtering(lengths, limits, iterations=iterations)
    assert sorted(packs.samples.tolist()) == list(range(len(lengths)))
    assert (packs.sizes > 0).all()
    over = (packs.vision_units(lengths) > limits.vision_units) | (packs.llm_tokens(lengths) > limits.llm_tokens)
    assert (packs.sizes[over] == 1).all()
    assert sorted(packs[pack][0] for pack in np.flatnonzero(over)) == limits.oversized(lengths).tolist()


@given(sample_lengths(max_samples=20), pack_limits(), st.data())
def test_a_subset_is_packed_alone(lengths, limits, data):
    subset = data.draw(st.lists(st.sampled_from(range(len(lengths))), unique=True)) if len(lengths) else []
    packs = iterative_sampling_and_filtering(lengths, limits, iterations=3, seed=7, samples=subset)
    assert [pack.tolist() for pack in packs] == transcribed_isf(lengths, limits, 3, 7, samples=subset)


def test_full_packs_come_first_and_the_remainder_as_it_stands():
    lengths = SampleLengths([5, 4, 5, 4, 5], [10] * 5)
    packs = iterative_sampling_and_filtering(lengths, PackLimits(9, 100), iterations=50, seed=3)
    assert packs.vision_units(lengths).tolist() == [9, 9, 5]


def test_seeds_decide_the_packs():
    lengths = SampleLengths([1] * 50, [100] * 50)
    limits = PackLimits(9, 512)

    def packed(seed):
        return iterative_sampling_and_filtering(lengths, limits, seed=seed).samples.tolist()

    assert packed(1) == packed(1) == packed(np.random.default_rng(1))
    assert packed(1) != packed(2)


def test_at_least_one_iteration():
    with pytest.raises(ConfigError, match="iterations must be at least 1, got 0"):
        iterative_sampling_and_filtering(SampleLengths([1], [1]), PackLimits(1, 1), iterations=0)
