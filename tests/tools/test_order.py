from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal.errors import ConfigError
from omnibal.pipeline.schedule import Operation, one_f_one_b, zero_bubble
from omnibal.pipeline.simulate import simulate
from tools.disttrain.order import fill_intervals, order_micro_batches

PLENTY = 10_000
sizes = st.tuples(st.integers(1, 5), st.integers(1, 12), st.integers(0, 2**32))


def uneven(num_stages, micro_batches, seed):
    """Seconds of forward and backward passes and transfers: micro-batches and stages differ, by chance."""
    rng = np.random.default_rng(seed)
    forward = rng.lognormal(sigma=0.7, size=(micro_batches, 1)) * rng.uniform(0.5, 1.5, (micro_batches, num_stages))
    return forward, forward * rng.uniform(1, 2, (micro_batches, 1)), rng.random((micro_batches, num_stages - 1)) / 10


def makespan(schedule, forward, backward, transfer, order, mode="overlap"):
    order = list(order)
    return simulate(
        schedule, forward[order], backward[order], transfer_seconds=transfer[order], mode=mode
    ).makespan_seconds


def ordered(schedule, forward, backward, transfer, mode="overlap", **options):
    return order_micro_batches(schedule, forward, backward, transfer_seconds=transfer, mode=mode, **options)


def test_small_micro_batches_begin_and_end_and_the_wait_is_filled_by_what_matches_it():
    # The gradient of micro-batch 2 (of 1 second) comes back 1 + 2 seconds after its forward pass on the first stage:
    # micro-batch 1 (of 3 seconds) fills that wait. The second smallest one is last.
    forward = np.array([[8.0, 8.0], [3.0, 3.0], [1.0, 1.0], [2.0, 2.0], [4.0, 4.0]])
    assert fill_intervals(forward, 2 * forward).tolist() == [2, 1, 0, 4, 3]


def test_the_first_wait_is_filled_by_as_many_micro_batches_as_stages_behind():
    # Three stages: the first wait lasts 2 + 4 seconds, which 3 + 3 fill best. The two next smallest ones come last.
    forward = np.array([9.0, 3.0, 1.5, 1.0, 3.0, 2.0])[:, None] * np.ones(3)
    assert fill_intervals(forward, 2 * forward).tolist() == [3, 1, 4, 0, 5, 2]


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_few_micro_batches_run_from_the_smallest_and_then_downwards(micro_batches):
    forward = np.arange(micro_batches, 0.0, -1)[:, None] * np.ones(4)
    assert fill_intervals(forward, forward).tolist() == [micro_batches - 1, *range(micro_batches - 1)]


@given(sizes)
@settings(max_examples=100)
def test_every_wait_that_the_simulator_sees_is_filled_by_the_best_match_left(size):
    num_stages, micro_batches, _ = size
    forward, backward, _ = uneven(*size)
    order = fill_intervals(forward, backward)
    by_size = np.argsort((forward + backward).sum(axis=1))
    num_last = min(num_stages, micro_batches) - 1
    assert order[0] == by_size[0]
    assert order[micro_batches - num_last :].tolist() == by_size[1 : 1 + num_last][::-1].tolist()
    ran = simulate(one_f_one_b(num_stages, micro_batches), forward[order], backward[order], mode="overlap")
    ends = {(e.stage, e.micro_batch): e.end_seconds for e in ran.events if e.operation == Operation.BW}
    for turn in range(1, micro_batches - num_last - num_stages + 1):
        came = ends[1, turn] if num_stages > 1 else 0.0
        left = forward[order[turn + num_stages - 1 : micro_batches - num_last], 0]
        misses = np.abs(left - (came - ends[0, turn - 1]))
        assert misses[0] == pytest.approx(misses.min())


@given(sizes, st.sampled_from(["rendezvous", "overlap"]), st.sampled_from([3, 7, 200]))
@settings(max_examples=100, deadline=None)
def test_an_order_is_never_slower_than_the_one_given_or_those_of_rules(size, mode, most):
    forward, backward, transfer = uneven(*size)
    schedule = one_f_one_b(*size[:2])
    order = ordered(schedule, forward, backward, transfer, mode, max_simulations=most)
    assert sorted(order.tolist()) == list(range(size[1]))
    found = makespan(schedule, forward, backward, transfer, order, mode)
    falling = np.argsort(-(forward + backward).sum(axis=1))
    for other in (range(size[1]), fill_intervals(forward, backward), np.roll(falling, 1)):
        assert found <= makespan(schedule, forward, backward, transfer, other, mode)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", [4, 6, 7])
def test_swaps_end_near_the_best_of_all_orders(num_stages, micro_batches):
    schedule, by_rule, by_swaps = one_f_one_b(num_stages, micro_batches), [], []
    for seed in range(3):
        seconds = uneven(num_stages, micro_batches, seed)
        best = min(makespan(schedule, *seconds, order) for order in permutations(range(micro_batches)))
        for found, most in ((by_rule, 3), (by_swaps, PLENTY)):
            found.append(makespan(schedule, *seconds, ordered(schedule, *seconds, max_simulations=most)) / best)
    assert min(by_rule) >= 1
    assert max(by_rule) <= 1.2
    assert min(by_swaps) >= 1
    assert max(by_swaps) <= 1.05


def test_no_swap_shortens_what_a_search_has_ended_with():
    schedule, seconds = one_f_one_b(3, 6), uneven(3, 6, 5)
    order = ordered(schedule, *seconds, max_simulations=PLENTY)
    found = makespan(schedule, *seconds, order)
    for first in range(6):
        for second in range(first):
            swapped = order.copy()
            swapped[[first, second]] = order[[second, first]]
            assert makespan(schedule, *seconds, swapped) >= found


def test_equal_micro_batches_keep_their_order():
    ones = np.ones((6, 3))
    assert order_micro_batches(one_f_one_b(3, 6), ones, 2 * ones, max_simulations=PLENTY).tolist() == list(range(6))


def test_split_backward_passes_are_ordered_by_the_simulator():
    forward, backward, _ = uneven(3, 6, 0)
    schedule, weight = zero_bubble(3, 6), forward / 2
    order = order_micro_batches(schedule, forward, backward, weight, mode="overlap", max_simulations=PLENTY)
    given, found = (
        simulate(schedule, forward[o], backward[o], weight[o], mode="overlap").makespan_seconds
        for o in (np.arange(6), order)
    )
    assert found < given


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: fill_intervals(np.ones((2, 3)), np.ones((3, 2))), "must have one shape"),
        (lambda: fill_intervals(np.ones((0, 3)), np.ones((0, 3))), "must have one shape"),
        (lambda: order_micro_batches(one_f_one_b(2, 2), np.ones((3, 2)), np.ones((3, 2))), "must have the shape"),
        (
            lambda: order_micro_batches(one_f_one_b(2, 2), np.ones((2, 2)), np.ones((2, 2)), max_simulations=2),
            "max_simulations",
        ),
        (
            lambda: order_micro_batches(one_f_one_b(1, 1), np.ones((1, 1)), np.ones((1, 1)), mode="fast"),  # type: ignore[arg-type]
            "mode must be one of",
        ),
    ],
)
def test_bad_arguments_are_refused(function, message):
    with pytest.raises(ConfigError, match=message):
        function()
