"""Partition search, and the paper's method."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal.cluster import Links
from omnibal.cost import Load
from omnibal.errors import ConfigError
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.search import METHODS, PartitionProblem, best_neighbours, greedy_anchor, search_partition
from omnibal.pipeline.simulate import simulate_step
from tests.pipeline.oracles import schedule_of
from tests.pipeline.profiles import fixed_profile, layer, profile
from tests.pipeline.random_problems import all_partitions, problem_of, random_arguments, random_loads, random_profile
from tests.pipeline.test_schedule import ZERO_BUBBLE

PACKS = [Load(np.ones(8), np.ones(8))]
FREE = {"links": Links(np.inf)}


@pytest.mark.parametrize("seed", range(80))
def test_search_meets_the_optimum_of_all_partitions(seed):
    arguments = random_arguments(seed)
    problem = problem_of(arguments)
    optimum = problem.evaluate(all_partitions(len(problem.profile.layers), problem.num_stages)).min()
    found = search_partition(**arguments)
    assert optimum * (1 - 1e-9) <= found.best.step_seconds <= 1.01 * optimum
    assert found.lower_bound_seconds <= optimum * (1 + 1e-9)
    assert found.gap == found.best.step_seconds / found.lower_bound_seconds - 1


@pytest.mark.parametrize("seed", range(5))
def test_search_is_never_worse_than_any_other_method(seed):
    rng = np.random.default_rng(seed)
    arguments = random_arguments(seed) | {"profile": random_profile(rng, 20, 30), "num_stages": 8}
    results = {method: search_partition(**arguments, method=method) for method in METHODS}
    for result in results.values():
        assert results["search"].best.step_seconds <= result.best.step_seconds
        assert result.lower_bound_seconds <= result.best.step_seconds * (1 + 1e-9)
        seconds = [candidate.step_seconds for candidate in result.candidates]
        assert seconds == sorted(seconds)
        assert len(set(result.candidates)) == len(result.candidates) <= 10


@pytest.mark.parametrize("mode", ["rendezvous", "overlap"])
def test_candidates_have_the_seconds_of_a_simulated_step(mode):
    rng = np.random.default_rng(3)
    links = Links(30.0, reduce_bandwidth_bytes_per_second=10.0, latency_seconds=0.5)
    arguments = {"links": links, "zero_stage": 1, "mode": mode}
    model, loads = random_profile(rng, 4, 5), random_loads(rng, replicas=2, micro_batches=4)
    levels = ["full", "none"] * (len(model.layers) // 2) + ["full"] * (len(model.layers) % 2)
    for candidate in search_partition(model, loads, 3, recompute=levels, **arguments).candidates:
        step = simulate_step(model, candidate.partition, loads, recompute=levels, **arguments)
        assert candidate.step_seconds == pytest.approx(step.step_seconds)


@pytest.mark.parametrize(
    ("method", "boundaries"),
    [
        ("uniform", (0, 3, 6)),
        ("parameters", (0, 5, 6)),
        ("slowest_stage", (0, 1, 6)),
        ("paper", (0, 1, 6)),
        ("model", (0, 1, 6)),
        ("search", (0, 1, 6)),
    ],
)
def test_each_method_balances_what_it_is_named_for(method, boundaries):
    seconds, parameters = [5, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 20]
    model = profile(
        layer(f"block.{i}", forward=s, parameter_bytes=p)
        for i, (s, p) in enumerate(zip(seconds, parameters, strict=True))
    )
    assert search_partition(model, PACKS, 2, method=method, **FREE).best.partition == Partition(boundaries)


def test_frozen_parameters_do_not_count_as_in_deepspeed():
    model = profile(layer(f"block.{i}", parameter_bytes=10, trainable=i > 3, weight=float(i > 3)) for i in range(6))
    assert search_partition(model, PACKS, 2, method="parameters", **FREE).best.partition == Partition((0, 5, 6))


def test_a_cut_moves_to_where_little_is_sent():
    model = fixed_profile([1.0] * 6, output=[50, 50, 50, 1, 50, 0])
    result = search_partition(model, PACKS, 2, Links(10))
    assert result.best.partition == Partition((0, 4, 6))
    assert search_partition(model, PACKS, 2, **FREE).best.partition == Partition((0, 3, 6))


def test_a_frozen_vit_belongs_to_the_first_stage():
    vision = [layer(f"vision.{i}", weight=0.0, trainable=False) for i in range(6)]
    model = profile([*vision, *(layer(f"text.{i}") for i in range(2))])
    # forward alone in the first stage: 6 seconds, as many as the two trained layers take
    assert search_partition(model, PACKS, 2, **FREE).best.partition == Partition((0, 6, 8))


def test_one_stage_and_as_many_stages_as_layers_have_one_partition():
    model = fixed_profile([1, 2, 3])
    for num_stages, boundaries in ((1, (0, 3)), (3, (0, 1, 2, 3))):
        for method in METHODS:
            result = search_partition(model, PACKS, num_stages, method=method, **FREE)
            assert [candidate.partition for candidate in result.candidates] == [Partition(boundaries)]


def test_searching_again_finds_the_same():
    arguments = random_arguments(1)
    assert search_partition(**arguments) == search_partition(**arguments)


def test_a_large_search_evaluates_few_partitions(monkeypatch):
    rng = np.random.default_rng(0)
    counted = []
    evaluate = PartitionProblem.evaluate
    monkeypatch.setattr(PartitionProblem, "evaluate", lambda self, p: counted.append(len(p)) or evaluate(self, p))
    model = random_profile(rng, 60, 64)
    result = search_partition(model, random_loads(rng, replicas=1, micro_batches=32), 16, Links(100))
    assert sum(counted) < 10_000
    assert result.gap < 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_stages": 7}, r"num_stages must lie in \[1, 6\] \(each stage holds a layer\), got 7"),
        ({"num_stages": 0}, "num_stages must lie in"),
        ({"method": "magic"}, "method must be one of uniform, parameters, paper, .* got 'magic'"),
        ({"mode": "magic"}, "mode must be one of rendezvous, overlap, got 'magic'"),
        ({"loads": Load([1], [1])}, "loads must be one Load per replica"),
        ({"zero_stage": 2}, "zero_stage must be 0 or 1 under a pipeline, got 2"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    arguments = {"loads": PACKS, "num_stages": 2, **FREE, **change}
    with pytest.raises(ConfigError, match=message):
        search_partition(fixed_profile([1] * 6), **arguments)


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


def cut_penalty(boundaries, forward_seconds, crossing_seconds):
    """VAR(forward time of the stages) / mean + SUM(communication), as the paper ranks."""
    stages = np.add.reduceat(forward_seconds, boundaries[:-1])
    variance = ((stages - stages.mean()) ** 2).sum()
    return (variance / stages.mean() if variance else 0.0) + crossing_seconds[list(boundaries[1:-1])].sum()


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
    penalties = sorted(cut_penalty(boundaries, forward, crossing) for boundaries in all_neighbours(anchor, radius))
    assert len(set(found)) == len(found) == min(10, len(penalties))
    np.testing.assert_allclose([cut_penalty(boundaries, forward, crossing) for boundaries in found], penalties[:10])


# Bounds


@pytest.mark.parametrize("seed", range(60))
def test_no_partition_is_faster_than_its_bound(seed):
    problem = problem_of(random_arguments(seed))
    partitions = all_partitions(len(problem.profile.layers), problem.num_stages)
    bounds, seconds = problem.bound(partitions), problem.evaluate(partitions)
    assert (bounds <= seconds * (1 + 1e-9)).all()
    assert problem.lower_bound_seconds == bounds.min()
    assert problem.bound(np.array([problem.least_bound])).item() == bounds.min()


@pytest.mark.parametrize("mode", ["rendezvous", "overlap"])
def test_for_equal_stages_the_bound_is_the_time(mode):
    arguments = random_arguments(0) | {"profile": fixed_profile([1.0] * 8), "num_stages": 4, "mode": mode}
    problem = problem_of(arguments)
    assert problem.lower_bound_seconds == pytest.approx((problem.micro_batches + 3) * 6)


def test_bounds_are_close():
    gaps = []
    for seed in range(30):
        problem = problem_of(random_arguments(seed, max_blocks=5))
        partitions = all_partitions(len(problem.profile.layers), problem.num_stages)
        gaps.append(problem.evaluate(partitions).min() / problem.lower_bound_seconds - 1)
    assert np.mean(gaps) < 0.05


@pytest.mark.parametrize("seed", range(20))
def test_a_split_backward_is_bounded_too(seed):
    schedule = schedule_of(ZERO_BUBBLE)
    arguments = random_arguments(seed) | {"num_stages": 3}
    rng = np.random.default_rng(seed)
    arguments["loads"] = [load[rng.integers(len(load), size=3)] for load in arguments["loads"]]
    times = problem_of(arguments).times
    problem = PartitionProblem(arguments["profile"], times, schedule, "overlap")
    partitions = all_partitions(len(arguments["profile"].layers), 3)
    assert (problem.bound(partitions) <= problem.evaluate(partitions) * (1 + 1e-9)).all()
