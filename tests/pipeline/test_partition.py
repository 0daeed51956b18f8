"""The record, and DeepSpeed's own cuts."""

import numpy as np
import pytest
from deepspeed.runtime.utils import partition_balanced, partition_uniform
from hypothesis import given
from hypothesis import strategies as st

from omnibal.errors import ConfigError, InfeasibleError
from omnibal.pipeline.partition import (
    Partition,
    balanced_boundaries,
    descend,
    least_maximum,
    model_optima,
    neighbours,
    parameter_cut,
)
from tests.pipeline.profiles import layer, profile
from tests.pipeline.random_problems import all_partitions


@pytest.mark.parametrize("boundaries", [(), (0,), (1, 2), (0, 2, 2), (0, 3, 1), (0, -1), (-1, 3)])
def test_boundaries_that_do_not_increase_from_zero_are_refused(boundaries):
    with pytest.raises(ConfigError, match="boundaries must start at 0 and increase"):
        Partition(boundaries)


def test_boundaries_that_are_no_integers_are_refused():
    with pytest.raises(ConfigError, match="boundaries must be integers"):
        Partition((0, 1.5, 3))


def test_every_layer_is_in_one_stage():
    cut = Partition([0, 1, 4, 9])
    assert cut.boundaries == (0, 1, 4, 9)
    assert [layer for stage in range(cut.num_stages) for layer in cut.layers(stage)] == list(range(cut.num_layers))


def test_unknown_stages_are_refused():
    cut = Partition((0, 1, 4))
    for stage in (-1, 2):
        with pytest.raises(ConfigError, match=r"stage must lie in \[0, 2\)"):
            cut.layers(stage)


def test_partitions_compare_by_their_boundaries():
    assert Partition([0, 2, 4]) == Partition((0, 2, 4))
    assert len({Partition([0, 2, 4]), Partition((0, 2, 4)), Partition((0, 1, 4))}) == 2


@pytest.mark.parametrize("num_stages", range(1, 8))
@pytest.mark.parametrize("num_layers", [8, 9, 15, 17, 48])
def test_uniform_is_deepspeeds(num_layers, num_stages):
    assert list(Partition.uniform(num_layers, num_stages).boundaries) == partition_uniform(num_layers, num_stages)


@pytest.mark.parametrize("num_stages", [0, 6])
def test_each_stage_needs_a_layer(num_stages):
    with pytest.raises(ConfigError, match=r"num_stages must lie in \[1, 5\]"):
        Partition.uniform(5, num_stages)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=14), st.data())
def test_parameters_are_cut_as_deepspeed_does(weights, data):
    num_stages = data.draw(st.integers(1, len(weights)))
    assert list(balanced_boundaries(weights, num_stages)) == list(partition_balanced(weights, num_stages))


def test_it_minimises_a_difference_and_not_the_heaviest_stage():
    # stages of 10, 4, 4 differ less than stages of 2, 8, 8, which would be faster
    assert balanced_boundaries([2, 8, 2, 2, 4], 3) == (0, 2, 4, 5)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_stages_of_one_layer_or_all(num_stages):
    assert balanced_boundaries([5, 1, 1], num_stages) == (0, *range(1, num_stages), 3)


def test_frozen_parameters_do_not_count():
    first, second = (layer(name, parameter_bytes=1, gradient_bytes=1) for name in ("first", "second"))
    frozen = layer("frozen", parameter_bytes=9)
    assert parameter_cut(profile([frozen, first, second]), 2).boundaries == (0, 2, 3)


# Cuts for given costs: dynamic programming and descent


def stage_costs(rng, num_layers, num_stages):
    return rng.random((num_stages, num_layers + 1, num_layers + 1))


def costs_of(partitions, costs):
    return costs[np.arange(len(costs)), partitions[:, :-1], partitions[:, 1:]]


@pytest.mark.parametrize("seed", range(20))
def test_the_least_maximum_is_that_of_all_partitions(seed):
    rng = np.random.default_rng(seed)
    num_layers = int(rng.integers(1, 10))
    num_stages = int(rng.integers(1, num_layers + 1))
    costs = stage_costs(rng, num_layers, num_stages)
    value, boundaries = least_maximum(costs)
    assert value == costs_of(all_partitions(num_layers, num_stages), costs).max(axis=1).min()
    assert value == costs_of(np.array([boundaries]), costs).max()


def test_without_a_finite_partition_there_is_none():
    costs = np.full((2, 4, 4), np.inf)
    costs[0, 0, 1] = 1
    with pytest.raises(InfeasibleError, match="must have stages of finite cost only"):
        least_maximum(costs)


def modelled(partitions, pace, passing, micro_batches):
    """The formula of the makespan model, by definition."""
    passed = costs_of(partitions, passing)
    num_stages = passed.shape[1]
    trips = np.cumsum(passed[:, ::-1], axis=1)[:, ::-1] / (num_stages - np.arange(num_stages))
    slowest = np.maximum(costs_of(partitions, pace), trips).max(axis=1)
    return passed.sum(axis=1) + (micro_batches - 1) * slowest


@pytest.mark.parametrize("seed", range(40))
def test_the_best_partition_by_the_model_is_found(seed):
    rng = np.random.default_rng(seed)
    num_layers = int(rng.integers(2, 11))
    num_stages = int(rng.integers(1, min(5, num_layers) + 1))
    sums = np.concatenate([[0], np.cumsum(rng.random(num_layers))])
    crossing = np.pad(rng.random(num_layers - 1) * rng.choice([0, 0.1, 1, 3]), 1)
    seconds = np.stack([sums[None, :] - sums[:, None]] * num_stages)
    seconds[0] *= rng.choice([1, 0.7])
    passing = seconds + 2 * crossing
    pace = seconds + rng.choice([0, 2]) * (crossing[:, None] + crossing)
    micro_batches = int(rng.choice([1, 2, 8, 32]))
    found = np.array(model_optima(pace, passing, micro_batches))
    best = modelled(all_partitions(num_layers, num_stages), pace, passing, micro_batches).min()
    assert modelled(found, pace, passing, micro_batches).min() <= best * 1.012


def test_transfers_alone_make_a_model_too():
    crossing = np.array([0.0, 2.0, 1.0, 0.0])
    nothing = np.zeros((2, 4, 4))
    assert (0, 2, 3) in model_optima(nothing, nothing + 2 * crossing, 8)
    assert model_optima(nothing, nothing, 8)


def test_neighbours_move_one_boundary_far_or_several_in_a_row_by_one():
    moved = {tuple(row[1:-1]) for row in neighbours((0, 5, 8, 12), reach=2).tolist()}
    one = {(5 + d, 8) for d in (-2, -1, 1, 2)} | {(5, 8 + d) for d in (-2, -1, 1, 2)}
    assert moved == one | {(4, 7), (6, 9)}


def test_neighbours_leave_every_stage_a_layer():
    assert neighbours((0, 1, 2), reach=3).tolist() == []
    assert neighbours((0, 5), reach=3).tolist() == []


class Hills:
    """Distance to a target as seconds; counts what it evaluates."""

    def __init__(self, target):
        self.target, self.evaluated = np.array(target), []

    def evaluate(self, partitions):
        self.evaluated += [tuple(row) for row in partitions.tolist()]
        return np.abs(partitions - self.target).sum(axis=1).astype(float)

    def bound(self, partitions):
        return np.zeros(len(partitions))


def test_a_descent_reaches_the_bottom_and_evaluates_nothing_twice():
    hills = Hills((0, 20, 23, 40, 50))
    starts = [(0, 1, 2, 3, 50), (0, 30, 31, 32, 50)]
    known = dict(zip(starts, hills.evaluate(np.array(starts)).tolist(), strict=True))
    seconds = descend(starts, known, hills.evaluate, hills.bound)
    assert seconds[0, 20, 23, 40, 50] == 0
    assert len(hills.evaluated) == len(set(hills.evaluated)) == len(seconds)
    assert known.keys() <= seconds.keys()


def test_partitions_whose_bound_is_no_better_are_not_evaluated():
    hills = Hills((0, 9, 10))
    seconds = descend([(0, 5, 10)], {(0, 5, 10): 4.0}, hills.evaluate, lambda p: np.where(p[:, 1] > 6, 4.0, 0.0))
    assert set(seconds) == {(0, 2, 10), (0, 3, 10), (0, 4, 10), (0, 5, 10), (0, 6, 10)}
