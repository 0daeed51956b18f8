from dataclasses import replace

import numpy as np
import pytest

from omnibal.cluster import Links
from omnibal.cost import CostModel, Load
from omnibal.errors import ConfigError
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import SCHEDULES, Operation, one_f_one_b, zero_bubble
from omnibal.pipeline.simulate import simulate, simulate_step
from tests.pipeline.oracles import schedule_of
from tests.pipeline.profiles import fixed_profile, layer, profile

FREE = {"links": Links(np.inf)}


def packs(micro_batches=4, replicas=1):
    return [Load(np.ones(micro_batches), np.ones(micro_batches))] * replicas


def test_a_step_of_one_replica_is_its_pipeline():
    # forward, input gradient and weight gradient cost the same
    step = simulate_step(fixed_profile([1, 2, 3]), Partition((0, 2, 3)), packs(), **FREE)
    assert step.step_seconds == step.pipeline_seconds == (4 + 1) * 9
    assert step.bubble_ratio == pytest.approx(step.replicas[0].bubble_ratio) == pytest.approx(1 / 5)


def test_seconds_follow_each_micro_batchs_load():
    vision = layer("vision")
    vision = replace(vision, forward_seconds=CostModel(vision_units=1), backward_seconds=CostModel(vision_units=2),
                     weight_seconds=CostModel(), output_bytes=CostModel(vision_units=10))  # fmt: skip
    text = replace(
        vision, name="text", forward_seconds=CostModel(llm_tokens=1), backward_seconds=CostModel(llm_tokens=2)
    )
    units, tokens = np.array([3, 0, 5]), np.array([1, 7, 2])
    for mode in ("rendezvous", "overlap"):
        step = simulate_step(
            profile([vision, text]), Partition((0, 1, 2)), [Load(units, tokens)],
            Links(20, latency_seconds=0.25), mode=mode,
        )  # fmt: skip
        forward = np.stack([units, tokens], axis=1)
        transfers = 0.25 + units[:, None] / 2
        expected = simulate(one_f_one_b(2, 3), forward, 2 * forward, transfer_seconds=transfers, mode=mode)
        assert step.step_seconds == pytest.approx(expected.makespan_seconds)


def test_backward_passes_take_longer_where_they_are_split():
    model = profile([layer(name, split_seconds=CostModel(fixed=0.5)) for name in "abc"])
    seconds = {}
    for schedule in (one_f_one_b(2, 4), zero_bubble(2, 4)):
        (replica,) = simulate_step(model, Partition((0, 1, 3)), packs(), schedule=schedule, **FREE).replicas
        for event in replica.events:
            seconds.setdefault((event.stage, event.operation), set()).add(event.end_seconds - event.start_seconds)
    assert seconds[0, Operation.BW] == {2} and seconds[1, Operation.BW] == {4}
    assert seconds[1, Operation.B] == {3} and seconds[1, Operation.W] == {2}


def test_the_slowest_replica_the_all_reduce_and_the_optimizer_end_the_step():
    cost = layer("a", gradient_bytes=100, optimizer_seconds=8.0)
    cost = replace(cost, forward_seconds=CostModel(llm_tokens=1))
    model, cut = profile([cost, replace(cost, name="b", gradient_bytes=300, optimizer_seconds=4.0)]), Partition((0, 2))
    loads = [Load(0, [1, 1]), Load(0, [5, 6])]
    step = simulate_step(model, cut, loads, Links(50), zero_stage=0)
    assert step.pipeline_seconds == 2 * 11 + 2 * 4
    # a ring moves 2 (2 - 1) / 2 = 1 times the bytes: layer b's 300 from second 28 on, when its gradient is complete
    np.testing.assert_allclose(step.reduced_seconds, [28 + 6 + 2])
    np.testing.assert_allclose(step.reduce_seconds, [6])
    assert step.step_seconds == pytest.approx(36 + 12)
    sharded = simulate_step(
        model, cut, loads, Links(50, reduce_bandwidth_bytes_per_second=100)
    )  # ZeRO 1, as of a layout: the first pass waits a second for the weights of layer a
    assert sharded.pipeline_seconds == 1 + 30
    assert sharded.step_seconds == pytest.approx(1 + 28 + 3 + 1 + 6)


def test_a_later_stage_reduces_while_earlier_ones_still_run():
    model = profile([layer("a", gradient_bytes=0), layer("b", gradient_bytes=2)])
    step = simulate_step(model, Partition((0, 1, 2)), packs(1, replicas=2), Links(1), zero_stage=0)
    # stage 1 is done 2 s before stage 0 and then reduces for 2 s
    np.testing.assert_allclose(step.reduce_seconds, [0, 2])
    assert step.step_seconds == step.pipeline_seconds == 6


@pytest.mark.parametrize(("schedule", "reduced"), [("1f1b", [36, 36]), ("zero-bubble-lean", [36, 33])])
def test_gradients_leave_in_the_last_pass_to_the_weights(schedule, reduced):
    model = profile([layer(name, gradient_bytes=12) for name in "abcd"])
    step = simulate_step(
        model, Partition((0, 2, 4)), packs(1, replicas=2), Links(2), schedule=SCHEDULES[schedule](2, 1), zero_stage=0
    )
    # forward until 4, then back through d until 6 and through c until 8, or to both weights from 6 on: d's is complete
    # at 7; each gradient takes 6 seconds
    starts = {"1f1b": [10, 6], "zero-bubble-lean": [8, 7]}[schedule]
    np.testing.assert_allclose(step.reduced_seconds, [start + 12 for start in starts])


@pytest.mark.parametrize(("bytes_of_a", "begins"), [(0, 0), (4, 2), (8, 4)])
def test_a_stage_waits_for_weights_only_where_their_turn_comes_first(bytes_of_a, begins):
    costs = [layer("a", gradient_bytes=bytes_of_a), layer("b", gradient_bytes=2), layer("c", gradient_bytes=4)]
    step = simulate_step(profile(costs), Partition((0, 2, 3)), packs(2, replicas=2), Links(2))
    first, last = (step.replicas[0].starts[stage, 0] for stage in range(2))
    # layer b's come a second behind layer a's, as its turn does; those of stage 1 are there before its first activation
    assert (first, last) == (begins, begins + 2)


def frozen_then_trained():
    vision = [layer(f"vision.{i}", weight=0.0, trainable=False) for i in range(2)]
    return profile([*vision, layer("projector"), layer("text", weight=0.0, trainable=False)])


@pytest.mark.parametrize(
    ("boundaries", "seconds"),
    [
        # forward 4, backward of the projector 2 and of the frozen text layer after it 1
        ((0, 4), [7]),
        # nothing before the projector is trained: no gradient goes there, wherever it is cut
        ((0, 1, 4), [1, 3 + 3]),
        ((0, 2, 4), [2, 2 + 3]),
        ((0, 1, 2, 4), [1, 1, 2 + 3]),
        # the text layer is frozen, but the projector before it is not
        ((0, 3, 4), [3 + 2, 1 + 1]),
    ],
)
def test_frozen_layers_run_backward_behind_a_trained_layer_alone(boundaries, seconds):
    step = simulate_step(frozen_then_trained(), Partition(boundaries), packs(1), **FREE)
    np.testing.assert_allclose(step.replicas[0].busy_seconds, seconds)


@pytest.mark.parametrize(("schedule", "seconds"), [("1f1b", 32), ("zero-bubble", 26), ("zero-bubble-lean", 26)])
def test_gradients_are_not_sent_to_a_frozen_front(schedule, seconds):
    model, cut = frozen_then_trained(), Partition((0, 1, 2, 4))
    step = simulate_step(model, cut, packs(4), Links(np.inf, latency_seconds=2), schedule=SCHEDULES[schedule](3, 4))
    operations = [[event.operation for event in step.replicas[0].events if event.stage == stage] for stage in range(3)]
    front = {Operation.F, Operation.SEND_ACTIVATION, Operation.RECEIVE_ACTIVATION}
    assert set(operations[0] + operations[1]) <= front and Operation.SEND_GRADIENT not in operations[2]
    # a micro-batch passes the front in 1 + 2 + 1 + 2 seconds; then the last stage is busy with four for 5 each, and
    # where transfers block it waits 2 for each of the other three
    assert step.step_seconds == seconds


def test_recomputation_repeats_the_forward_pass_before_the_backward():
    model, cut = fixed_profile([1, 2, 3]), Partition((0, 1, 3))
    step = simulate_step(model, cut, packs(1), recompute=["none", "full", "none"], **FREE)
    np.testing.assert_allclose(step.replicas[0].busy_seconds, [3, 15 + 2])


def test_frozen_layers_without_backward_do_not_recompute():
    step = simulate_step(frozen_then_trained(), Partition((0, 4)), packs(1), recompute=["full"] * 4, **FREE)
    np.testing.assert_allclose(step.replicas[0].busy_seconds, [7 + 2])


def test_any_schedule_can_be_simulated():
    schedule = schedule_of("F0 F1 B0 W0 B1 W1\nF0 B0 F1 B1 W0 W1")
    step = simulate_step(
        fixed_profile([1, 1]), Partition((0, 1, 2)), packs(2), schedule=schedule, mode="overlap", **FREE
    )
    assert step.step_seconds < simulate_step(fixed_profile([1, 1]), Partition((0, 1, 2)), packs(2), **FREE).step_seconds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partition": Partition((0, 2))}, "partition must be of the profile's 3 layers, got one of 2"),
        ({"loads": Load([1, 1], [1, 1])}, "loads must be one Load per replica with one entry per micro-batch"),
        ({"loads": []}, "loads must be one or more of one shape"),
        ({"loads": [Load([1], [1]), Load([1, 2], [1, 2])]}, "loads must be one or more of one shape"),
        ({"loads": [Load([], [])]}, r"got shape \(1, 0\)"),
        ({"zero_stage": 2}, "zero_stage must be 0 or 1 under a pipeline, got 2"),
        ({"recompute": ["none"]}, "recompute must have a level for each of 3 layers, got 1"),
        ({"recompute": ["none", "half", "none"]}, "recompute must be one of none, full for block.1, got 'half'"),
        ({"schedule": one_f_one_b(2, 3)}, "schedule must be for 2 stages and 4 micro-batches, got 2 and 3"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    arguments = {"partition": Partition((0, 1, 3)), "loads": packs(), **FREE, **change}
    with pytest.raises(ConfigError, match=message):
        simulate_step(fixed_profile([1, 1, 1]), arguments.pop("partition"), arguments.pop("loads"), **arguments)
