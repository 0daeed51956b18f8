from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal.pipeline.anchor import best_neighbours, greedy_anchor, rank


def test_the_anchor_makes_stages_close():
    forward = np.array([1.0] * 8 + [2.0] * 4)
    assert greedy_anchor(forward, 4) == (0, 4, 8, 10, 12)


@given(st.lists(st.floats(0, 10), min_size=2, max_size=20), st.data())
def test_every_stage_of_an_anchor_has_a_layer(forward, data):
    num_stages = data.draw(st.integers(1, len(forward)))
    boundaries = greedy_anchor(np.array(forward), num_stages)
    assert len(boundaries) == num_stages + 1
    assert (boundaries[0], boundaries[-1]) == (0, len(forward))
    assert (np.diff(boundaries) > 0).all()


def test_the_rank_adds_variance_and_transfers_in_seconds():
    forward = np.array([1.0, 2.0, 3.0])
    crossing = np.array([0.0, 0.5, 0.25, 0.0])
    # stages of 1 and 5 seconds: (2² + 2²) / 3
    assert rank((0, 1, 3), forward, crossing) == pytest.approx(8 / 3 + 0.5)


def all_neighbours(anchor, radius):
    inner = [range(middle - radius, middle + radius + 1) for middle in anchor[1:-1]]
    candidates = [(0, *places, anchor[-1]) for places in product(*inner)]
    return [boundaries for boundaries in candidates if (np.diff(boundaries) > 0).all()]


def test_four_stages_have_27_neighbours():
    anchor = greedy_anchor(np.ones(16), 4)
    assert len(best_neighbours(anchor, np.ones(16), np.zeros(17), radius=1, top=100)) == 27


@pytest.mark.parametrize("seed", range(20))
def test_the_best_neighbours_are_those_of_the_full_list(seed):
    rng = np.random.default_rng(seed)
    num_layers, num_stages, radius = rng.integers(6, 12), rng.integers(1, 6), rng.integers(1, 4)
    forward, crossing = rng.random(num_layers), np.pad(rng.random(num_layers - 1), 1)
    anchor = greedy_anchor(forward, num_stages)
    found = best_neighbours(anchor, forward, crossing, radius=int(radius), top=10)
    ranks = sorted(rank(boundaries, forward, crossing) for boundaries in all_neighbours(anchor, radius))
    assert len(set(found)) == len(found) == min(10, len(ranks))
    np.testing.assert_allclose([rank(boundaries, forward, crossing) for boundaries in found], ranks[:10])
