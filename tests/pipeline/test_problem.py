import numpy as np
import pytest

from omnibal.pipeline.search import PartitionProblem
from tests.pipeline.oracles import schedule_of
from tests.pipeline.profiles import fixed_profile
from tests.pipeline.random_problems import all_partitions, problem_of, random_arguments
from tests.pipeline.test_schedule import ZERO_BUBBLE


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
