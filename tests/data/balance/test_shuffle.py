from collections import Counter
from math import factorial

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omnibal.data.balance.planner import shuffle_keys, shuffled


@given(st.integers(1, 3000), st.integers(0, 2**40))
@example(1, 0)
@example(1024, 3)
@example(1025, 3)
def test_everything_comes_once(size, seed):
    assert sorted(shuffled(size, 0, size, shuffle_keys(seed)).tolist()) == list(range(size))


@given(st.integers(1, 5000), st.data())
def test_a_part_is_the_same_without_the_rest(size, data):
    first = data.draw(st.integers(0, size))
    last = data.draw(st.integers(first, size))
    keys = shuffle_keys(5, 7)
    assert shuffled(size, first, last, keys).tolist() == shuffled(size, 0, size, keys)[first:last].tolist()


def test_all_permutations_are_equally_likely():
    draws = 12_000
    counts = Counter(tuple(shuffled(4, 0, 4, shuffle_keys(seed)).tolist()) for seed in range(draws))
    expected = draws / factorial(4)
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert len(counts) == factorial(4)
    assert chi_squared < 50  # 23 degrees of freedom: exceeded once in a thousand


@pytest.mark.parametrize("size", [1000, 1_000_003])
def test_neighbours_are_as_far_apart_as_by_chance(size):
    order = shuffled(size, 0, 1000, shuffle_keys(1))
    distances = np.abs(np.diff(order))
    assert abs(distances.mean() / size - 1 / 3) < 0.03
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.1


def test_seeds_decide():
    assert shuffle_keys(1, 2).tolist() == shuffle_keys(1, 2).tolist()
    orders = {tuple(shuffled(50, 0, 50, shuffle_keys(*seed)).tolist()) for seed in [(1,), (2,), (1, 2), (2, 1)]}
    assert len(orders) == 4
