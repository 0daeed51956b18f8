import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal.errors import ConfigError
from omnibal.pipeline.schedule import Instruction, Operation, Schedule, one_f_one_b, zero_bubble
from omnibal.pipeline.simulate import simulate
from tests.pipeline.oracles import overlap_ends, rendezvous_ends, schedule_of
from tests.pipeline.test_schedule import ZERO_BUBBLE

MODES = ("rendezvous", "overlap")


def equal_stages(num_stages, micro_batches, *, mode, forward=1.0, backward=2.0, transfer=0.0):
    shape = (micro_batches, num_stages)
    return simulate(
        one_f_one_b(num_stages, micro_batches),
        np.full(shape, forward),
        np.full(shape, backward),
        transfer_seconds=np.full((micro_batches, num_stages - 1), transfer),
        mode=mode,
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8, 16])
def test_equal_stages_take_the_time_of_the_textbook(num_stages, micro_batches, mode):
    result = equal_stages(num_stages, micro_batches, mode=mode)
    assert result.makespan_seconds == pytest.approx((micro_batches + num_stages - 1) * 3.0)
    np.testing.assert_allclose(result.busy_seconds, micro_batches * 3.0)
    np.testing.assert_allclose(result.idle_seconds, (num_stages - 1) * 3.0)
    assert result.bubble_ratio == pytest.approx((num_stages - 1) / (micro_batches + num_stages - 1))


@pytest.mark.parametrize("mode", MODES)
def test_one_micro_batch_passes_every_stage_and_link_twice(mode):
    rng = np.random.default_rng(0)
    forward, backward, transfer = rng.random((1, 5)), rng.random((1, 5)), rng.random((1, 4))
    result = simulate(one_f_one_b(5, 1), forward, backward, transfer_seconds=transfer, mode=mode)
    assert result.makespan_seconds == pytest.approx(forward.sum() + backward.sum() + 2 * transfer.sum())


@pytest.mark.parametrize("mode", MODES)
def test_the_slowest_stage_sets_the_pace(mode):
    stages, micro_batches = np.array([1.0, 4.0, 1.0]), 50
    times = np.tile(stages, (micro_batches, 1))
    result = simulate(one_f_one_b(3, micro_batches), times, times, mode=mode)
    assert result.makespan_seconds == pytest.approx(8 * micro_batches + 2 + 2, abs=4)


def test_blocking_transfers_take_stage_time_overlapped_ones_do_not():
    micro_batches = 20
    blocking = equal_stages(2, micro_batches, mode="rendezvous", transfer=0.5).makespan_seconds
    overlapped = equal_stages(2, micro_batches, mode="overlap", transfer=0.5).makespan_seconds
    assert overlapped == pytest.approx((micro_batches + 1) * 3.0 + 2 * 0.5 * micro_batches / 2, rel=0.06)
    # each micro-batch costs both stages their computation and two transfers
    assert blocking == pytest.approx((micro_batches + 1) * 3.0 + 2 * 0.5 * micro_batches)


def test_overlap_literally():
    forward, backward = [[1, 1], [1, 1]], [[2, 2], [2, 2]]
    result = simulate(one_f_one_b(2, 2), forward, backward, transfer_seconds=[[1], [1]], mode="overlap")
    assert [tuple(event) for event in result.events] == [
        (0, Operation.F, 0, 0, 1),
        (0, Operation.F, 1, 1, 2),
        (0, Operation.BW, 0, 6, 8),
        (0, Operation.BW, 1, 9, 11),
        (1, Operation.F, 0, 2, 3),
        (1, Operation.BW, 0, 3, 5),
        (1, Operation.F, 1, 5, 6),
        (1, Operation.BW, 1, 6, 8),
    ]
    np.testing.assert_array_equal(result.finish_seconds, [11, 8])


def test_a_link_carries_one_message_at_a_time():
    result = simulate(one_f_one_b(2, 2), np.ones((2, 2)), np.ones((2, 2)), transfer_seconds=[[5], [5]], mode="overlap")
    arrivals = [event.start_seconds for event in result.events if event.stage == 1 and event.operation == Operation.F]
    assert arrivals == [6, 11]


def split_backward(schedule, rng):
    """The same order with every BW as B, and its W at a random later place."""
    stages = []
    for instructions in schedule.stages:
        result = []
        for operation, m in instructions:
            result.append((Operation.B if operation == Operation.BW else operation, m))
        for m in range(schedule.micro_batches):
            place = rng.integers(result.index((Operation.B, m)) + 1, len(result) + 1)
            result.insert(place, (Operation.W, m))
        stages.append(tuple(Instruction(*entry) for entry in result))
    return Schedule(tuple(stages), schedule.micro_batches)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 2**32 - 1), st.sampled_from(MODES), st.booleans())
def test_times_are_those_of_the_longest_paths(num_stages, micro_batches, seed, mode, split):
    rng = np.random.default_rng(seed)
    shape = (micro_batches, num_stages)
    forward, backward, weight = rng.random((3, *shape)).round(2)
    transfer = rng.random((micro_batches, num_stages - 1)) * rng.choice([0.0, 0.1, 3.0])
    schedule = one_f_one_b(num_stages, micro_batches)
    if split and mode == "overlap":  # moved weight gradients deadlock with blocking transfers
        schedule = split_backward(schedule, rng)
    result = simulate(schedule, forward, backward, weight, transfer, mode=mode)
    oracle = rendezvous_ends if mode == "rendezvous" else overlap_ends
    expected = oracle(schedule, forward, backward, weight, transfer)
    assert {event[:3]: event.end_seconds for event in result.events} == pytest.approx(expected)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_overlap_is_never_slower_than_blocking(num_stages, micro_batches, seed):
    rng = np.random.default_rng(seed)
    forward, backward = rng.random((2, micro_batches, num_stages))
    transfer = rng.random((micro_batches, num_stages - 1))
    times = [
        simulate(
            one_f_one_b(num_stages, micro_batches), forward, backward, transfer_seconds=transfer, mode=mode
        ).makespan_seconds
        for mode in MODES
    ]
    assert times[1] <= times[0] + 1e-9


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 4, 24])
def test_zero_bubble_leaves_a_third_of_the_bubble(num_stages, more):
    ones = np.ones((num_stages + more, num_stages))
    split = simulate(zero_bubble(num_stages, num_stages + more), ones, ones, ones, mode="overlap")
    unsplit = simulate(one_f_one_b(num_stages, num_stages + more), ones, ones, ones, mode="overlap")
    busy = 3 * (num_stages + more)
    assert split.makespan_seconds == busy + num_stages - 1
    assert unsplit.makespan_seconds == busy + 3 * (num_stages - 1)


def test_zero_bubble_in_the_papers_setting():
    ones = np.ones((8, 4))
    assert simulate(one_f_one_b(4, 8), ones, ones, ones).makespan_seconds / 24 == 1.375
    assert simulate(zero_bubble(4, 8), ones, ones, ones, mode="overlap").makespan_seconds / 24 == 1.125
    at_once = simulate(zero_bubble(4, 8, (0, 0, 0, 0)), ones, ones, ones, mode="overlap")
    assert at_once.makespan_seconds / 24 == 1.25  # as much memory as 1F1B, half the gain


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_zero_bubble_comes_to_an_end_for_any_lag(num_stages, micro_batches, seed):
    rng = np.random.default_rng(seed)
    schedule = zero_bubble(num_stages, micro_batches, tuple(rng.integers(0, num_stages + 2, num_stages).tolist()))
    forward, backward, weight = rng.random((3, micro_batches, num_stages))
    result = simulate(schedule, forward, backward, weight, mode="overlap")
    assert {event[:3]: event.end_seconds for event in result.events} == pytest.approx(
        overlap_ends(schedule, forward, backward, weight, np.zeros((micro_batches, num_stages - 1)))
    )


def test_weights_given_apart_belong_to_an_unsplit_backward():
    ones = np.ones((4, 2))
    schedule = one_f_one_b(2, 4)
    assert simulate(schedule, ones, ones, ones).makespan_seconds == simulate(schedule, ones, 2 * ones).makespan_seconds


def test_in_flight_counts_are_the_schedules():
    assert one_f_one_b(4, 8).in_flight == (4, 3, 2, 1)


def test_nothing_takes_no_time():
    result = equal_stages(2, 2, mode="overlap", forward=0.0, backward=0.0)
    assert result.makespan_seconds == result.bubble_ratio == 0


def test_a_deadlock_is_an_error():
    ones = np.ones((2, 2))
    stuck = schedule_of("F0 BW0 F1 BW1\nF0 F1 BW0 BW1")
    for mode in MODES:
        with pytest.raises(ConfigError, match="must come to an end, got one that deadlocks"):
            simulate(stuck, ones, ones, mode=mode)
    moved = schedule_of("F0 F1 B0 W0 F2 B1 B2 W1 W2\nF0 B0 W0 F1 B1 W1 F2 B2 W2")
    threes = np.ones((3, 2))
    simulate(moved, threes, threes, threes, mode="overlap")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_seconds": np.ones((2, 2))}, r"forward_seconds must have the shape \(3, 2\) of the schedule, got"),
        ({"backward_seconds": np.ones(3)}, r"backward_seconds must have the shape"),
        ({"transfer_seconds": np.ones((3, 2))}, r"transfer_seconds must have the shape \(3, 1\)"),
        (
            {"forward_seconds": [[1, 1], [1, np.nan], [1, 1]]},
            "forward_seconds must be finite and not negative, got nan",
        ),
        ({"weight_seconds": -np.ones((3, 2))}, "weight_seconds must be finite and not negative, got -1"),
        ({"mode": "magic"}, "mode must be one of rendezvous, overlap, got 'magic'"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    arguments = {"forward_seconds": np.ones((3, 2)), "backward_seconds": np.ones((3, 2)), **change}
    with pytest.raises(ConfigError, match=message):
        simulate(one_f_one_b(2, 3), **arguments)


def test_a_split_backward_needs_both_times():
    ones = np.ones((3, 3))
    with pytest.raises(ConfigError, match="weight_seconds must be given"):
        simulate(schedule_of(ZERO_BUBBLE), ones, ones)
