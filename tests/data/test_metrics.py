import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import (
    MOST_ROUNDINGS,
    dist_ratio,
    histogram_bound,
    min_packs,
    pad_ratio,
    rounded_shares,
    rounded_totals,
    source_mix,
    step_randomness,
    volume_bound,
)
from omnibal.data.packs import Packs
from tests.data.strategies import pack_limits, sample_lengths
from tests.oracles import fewest_packs


def test_pad_ratio_is_the_mean_over_packs():
    lengths = SampleLengths([0] * 4, [100, 50, 30, 0])
    assert pad_ratio(lengths, Packs.from_lists([[0, 1], [2]])) == pytest.approx((50 / 200 + 0) / 2)
    assert pad_ratio(lengths, Packs.from_lists([[0, 1, 2], [], [3, 3]])) == pytest.approx((120 / 300 + 0) / 2)
    assert pad_ratio(lengths, Packs.from_lists([[], []])) == 0


def test_dist_ratio_is_the_mean_over_steps():
    assert dist_ratio([[10, 5], [4, 4], [0, 0]]) == pytest.approx((5 / 20 + 0 + 0) / 3)
    assert dist_ratio(np.zeros((0, 4))) == 0


def test_dist_ratio_compares_the_ranks_of_one_micro_batch():
    loads = np.array([[[10, 4], [5, 4]]])  # (1 step, 2 ranks, 2 micro-batches)
    assert dist_ratio(loads) == pytest.approx((5 / 20 + 0) / 2)
    assert dist_ratio(loads.transpose(0, 2, 1), axis=2) == dist_ratio(loads)


def test_source_mix_counts_the_samples_of_each_step():
    packs = Packs.from_lists([[0, 1], [], [2], [3, 4]])
    steps = np.array([[[0, 1]], [[3, 2]]])  # (2 steps, 1 rank, 2 micro-batches)
    source = np.array([0, 2, 2, 1, 0])
    assert source_mix(source, packs, steps).tolist() == [[1, 0, 1], [1, 1, 1]]
    assert source_mix(source, packs, np.zeros((0, 1), dtype=int)).shape == (0, 3)


def test_step_randomness_is_one_on_average_over_all_shuffles():
    sources, sizes = [0, 0, 0, 1, 1, 2, 2], [3, 2, 2]
    step = np.repeat([0, 1, 2], sizes)
    values = []
    for order in permutations(sources):
        mix = np.zeros((3, 3))
        np.add.at(mix, (step, list(order)), 1)
        values.append(step_randomness(mix))
    assert np.mean(values) == pytest.approx(1)


def test_step_randomness_of_plain_shuffling_is_near_one_and_of_sorted_steps_far_above():
    source = np.repeat([0, 1, 2], [4000, 3000, 1000])
    shuffled = np.random.default_rng(0).permutation(source)

    def mix(order):
        return np.array([np.bincount(step, minlength=3) for step in order.reshape(250, 32)])

    assert 0.8 < step_randomness(mix(shuffled)) < 1.2
    assert step_randomness(mix(source)) > 20


@pytest.mark.parametrize("mix", [np.zeros((0, 3)), [[5, 4]], [[5, 0], [3, 0]], [[0, 0], [3, 1]]])
def test_step_randomness_says_nothing_about_one_step_or_one_source(mix):
    assert math.isnan(step_randomness(mix))


@given(sample_lengths(max_samples=8), pack_limits())
@settings(max_examples=300)
def test_no_packing_beats_the_bound(lengths, limits):
    loads = list(zip(lengths.vision_units.tolist(), lengths.llm_tokens.tolist(), strict=True))
    assert volume_bound(lengths, limits) <= min_packs(lengths, limits)
    if any(vision or tokens for vision, tokens in loads):
        assert min_packs(lengths, limits) <= fewest_packs(loads, limits)
    else:
        assert min_packs(lengths, limits) == 0


@given(st.lists(st.integers(0, 12), max_size=9), st.integers(12, 24))
def test_the_bound_of_one_dimension(sizes, limit):
    counts = np.bincount(np.array(sizes, dtype=np.int64), minlength=limit + 1)
    fewest = fewest_packs([(size, 0) for size in sizes], PackLimits(limit, 1)) if any(sizes) else 0
    assert -(-sum(sizes) // limit) <= histogram_bound(counts) <= fewest


@given(st.integers(1, 40), st.integers(1, MOST_ROUNDINGS))
def test_rounded_shares_of_a_full_bin_weigh_at_most_one(limit, k):
    weights = rounded_shares(limit, k)
    heaviest = np.zeros(limit + 1, dtype=np.int64)  # heaviest[i]: most weight that sizes summing to i can have
    for total in range(1, limit + 1):
        heaviest[total] = max(heaviest[total - size] + weights[size] for size in range(1, total + 1))
    assert heaviest.max() <= k * limit


@given(st.lists(st.integers(0, 9), min_size=2, max_size=60), st.sampled_from([0, 1 << 16]))
def test_totals_are_those_of_rounded_shares(counts, full):
    limit = len(counts) - 1
    for k, total in enumerate(rounded_totals(np.array(counts), full), 1):
        shares = rounded_shares(limit, k)
        assert total == np.array(counts) @ (shares * full // (k * limit) if full else shares)


@pytest.mark.parametrize(
    ("vision_units", "limit", "packs"),
    [
        ([5] * 10, 9, 10),  # two never share a pack
        ([5] * 10 + [4] * 7, 9, 10),  # the fours fit beside them
        ([5] * 10 + [4] * 13, 9, 12),  # three more fours in two packs (L2 counts their volume)
        ([5] * 8 + [3] * 8, 12, 6),  # a third 5 does not fit, nor a 3 beside two: the volume asks for 6
        ([5] * 80 + [3] * 40, 12, 50),  # two 5s, or one and two 3s: the volume asks for 44
    ],
)
def test_bounds_that_see_what_does_not_fit(vision_units, limit, packs):
    lengths = SampleLengths(vision_units, [1] * len(vision_units))
    assert min_packs(lengths, PackLimits(limit, 10**6)) == packs


def test_samples_over_a_limit_take_packs_of_their_own():
    lengths = SampleLengths([20, 1, 1], [1, 99, 1])
    assert min_packs(lengths, PackLimits(9, 50)) == 3
    assert volume_bound(lengths, PackLimits(9, 50)) == 3


def test_sounds_ask_for_packs_where_they_have_a_limit():
    lengths = SampleLengths([1] * 10, [1] * 10, sound_units=[5] * 9 + [20])
    assert (min_packs(lengths, PackLimits(99, 99)), volume_bound(lengths, PackLimits(99, 99))) == (1, 1)
    limited = PackLimits(99, 99, sound_units=9)
    assert (min_packs(lengths, limited), volume_bound(lengths, limited)) == (1 + 9, 1 + 5)
