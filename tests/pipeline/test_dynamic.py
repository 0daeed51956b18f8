import numpy as np
import pytest

from omnibal.errors import InfeasibleError
from omnibal.pipeline.dynamic import least_maximum, model_optima
from tests.pipeline.random_problems import all_partitions


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
