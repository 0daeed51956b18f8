import numpy as np
import pytest
from deepspeed.runtime.pipe.schedule import TrainSchedule

from omnibal.errors import ConfigError
from omnibal.pipeline.schedule import SCHEDULES, Operation, Schedule, one_f_one_b, zero_bubble, zero_bubble_lean
from tests.pipeline.oracles import schedule_of

DEEPSPEED_NAMES = {
    Operation.F: "ForwardPass",
    Operation.BW: "BackwardPass",
    Operation.SEND_ACTIVATION: "SendActivation",
    Operation.RECEIVE_ACTIVATION: "RecvActivation",
    Operation.SEND_GRADIENT: "SendGrad",
    Operation.RECEIVE_GRADIENT: "RecvGrad",
}
ZERO_BUBBLE = """
F0 F1 F2 BW0 BW1 BW2
F0 F1 B0 F2 B1 W0 B2 W1 W2
F0 B0 F1 B1 F2 B2 W0 W1 W2
"""


def test_one_f_one_b_of_four_stages_reads_like_a_picture():
    assert str(one_f_one_b(num_stages=4, micro_batches=6)) == "\n".join([
        "F0 F1 F2 F3 BW0 F4 BW1 F5 BW2 BW3 BW4 BW5",
        "F0 F1 F2 BW0 F3 BW1 F4 BW2 F5 BW3 BW4 BW5",
        "F0 F1 BW0 F2 BW1 F3 BW2 F4 BW3 F5 BW4 BW5",
        "F0 BW0 F1 BW1 F2 BW2 F3 BW3 F4 BW4 F5 BW5",
    ])  # fmt: skip


def test_with_fewer_micro_batches_than_stages_all_forwards_run_first():
    assert str(one_f_one_b(3, 2)) == "F0 F1 BW0 BW1\nF0 F1 BW0 BW1\nF0 BW0 F1 BW1"


def test_blocking_transfers_between_two_stages_literally():
    def words(stage):
        return " ".join(f"{i.operation.name}{i.micro_batch}" for i in one_f_one_b(2, 3).blocking[stage])

    assert words(0) == (
        "F0 SEND_ACTIVATION0 F1 RECEIVE_GRADIENT0 SEND_ACTIVATION1 BW0 F2 RECEIVE_GRADIENT1 SEND_ACTIVATION2 BW1 "
        "RECEIVE_GRADIENT2 BW2"
    )
    assert words(1) == (
        "RECEIVE_ACTIVATION0 F0 BW0 SEND_GRADIENT0 RECEIVE_ACTIVATION1 F1 BW1 SEND_GRADIENT1 RECEIVE_ACTIVATION2 F2 "
        "BW2 SEND_GRADIENT2"
    )


def deepspeed_instructions(num_stages, micro_batches, stage):
    steps = TrainSchedule(micro_batches=micro_batches, stages=num_stages, stage_id=stage).steps()
    return [(i.name, getattr(i, "buffer_id", None)) for step in steps for i in step]


def our_instructions(num_stages, micro_batches, stage):
    buffers = max(2, min(num_stages - stage, micro_batches))
    result = []
    for operation, micro_batch in one_f_one_b(num_stages, micro_batches).blocking[stage]:
        if operation == Operation.F and stage in (0, num_stages - 1):
            result.append(("LoadMicroBatch", micro_batch % buffers))
        result.append((DEEPSPEED_NAMES[operation], micro_batch % buffers))
    return [*result, ("ReduceTiedGrads", None), ("ReduceGrads", None), ("OptimizerStep", None)]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5, 7, 8, 16])
def test_every_instruction_is_deepspeeds(num_stages):
    for micro_batches in (1, 2, 3, 4, 5, 7, 8, 9, 16, 33):
        for stage in range(num_stages):
            ours = our_instructions(num_stages, micro_batches, stage)
            assert ours == deepspeed_instructions(num_stages, micro_batches, stage), (micro_batches, stage)


@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 3, 4, 12])
def test_in_flight_counts_of_one_f_one_b(num_stages, micro_batches):
    schedule = one_f_one_b(num_stages, micro_batches)
    assert schedule.in_flight == tuple(min(num_stages - s, micro_batches) for s in range(num_stages))
    assert schedule.pending_weights == (0,) * num_stages


def test_counts_of_a_split_backward_are_read_off_the_table():
    schedule = schedule_of(ZERO_BUBBLE)
    assert str(schedule) == ZERO_BUBBLE.strip()
    assert schedule.in_flight == (3, 2, 1)
    assert schedule.pending_weights == (0, 2, 3)
    np.testing.assert_array_equal(schedule.occupancy(1)[:5], [[1, 0], [2, 0], [1, 1], [2, 1], [1, 2]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0 BW0 F1", "must run F BW or F B W for each of micro-batches 0 to 1, got F for micro-batch 1"),
        ("BW0 F0", "must run F BW or F B W .*, got BW F for micro-batch 0"),
        ("F0 B0", "got F B"),
        ("F0 W0 B0", "got F W B"),
        ("F0 F0 BW0", "got F F BW"),
        ("F0 BW0\nF1 BW1", "stage 0 must run F BW or F B W .*, got nothing for micro-batch 1"),
        ("F0 BW0\nF0\nF0 BW0", "stage 1 must run F BW or F B W .*, got F for micro-batch 0"),
        ("F0 F0\nF0 BW0", "stage 0 must run F for .*, got F F for micro-batch 0"),
        ("", "must have a stage and a micro-batch"),
    ],
)
def test_tables_that_do_not_run_every_micro_batch_once_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        schedule_of(text)


def test_micro_batches_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="each of micro-batches 0 to 0, got nothing for micro-batch 0"):
        Schedule((((Operation.F, 1), (Operation.BW, 1)),), micro_batches=1)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_a_pipeline_needs_a_stage_and_a_micro_batch(sizes):
    for schedule in SCHEDULES.values():
        with pytest.raises(ConfigError, match="must have a stage and a micro-batch"):
            schedule(*sizes)


def test_zero_bubble_of_four_stages_reads_like_a_picture():
    assert str(zero_bubble(num_stages=4, micro_batches=6)) == "\n".join([
        "F0 F1 F2 F3 BW0 F4 BW1 F5 BW2 BW3 BW4 BW5",
        "F0 F1 F2 B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 B4 W3 B5 W4 W5",
        "F0 F1 B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 B5 W3 W4 W5",
        "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 W3 W4 W5",
    ])  # fmt: skip


def test_zero_bubble_of_three_stages_literally():
    assert str(zero_bubble(3, 3)) == ZERO_BUBBLE.strip()


def test_a_lag_of_nothing_runs_weight_gradients_at_once():
    assert zero_bubble_lean(2, 3) == zero_bubble(2, 3, (0, 0))
    assert str(zero_bubble(2, 3, (0, 0))) == "F0 F1 BW0 F2 BW1 BW2\nF0 B0 W0 F1 B1 W1 F2 B2 W2"
    assert str(zero_bubble(1, 2, (5,))) == "F0 B0 F1 B1 W0 W1"


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8, 33])
def test_zero_bubble_holds_what_the_first_stage_of_one_f_one_b_holds(num_stages, micro_batches):
    schedule = zero_bubble(num_stages, micro_batches)
    assert schedule.in_flight == one_f_one_b(num_stages, micro_batches).in_flight
    assert schedule.pending_weights == (0, *(min(s + 1, micro_batches) for s in range(1, num_stages)))
    for stage in range(num_stages):
        assert schedule.occupancy(stage).sum(axis=1).max() <= num_stages


@pytest.mark.parametrize("max_lag", [(0,), (0, 1, 2), (0, -1)])
def test_a_lag_is_one_number_per_stage(max_lag):
    with pytest.raises(ConfigError, match="max_lag must be a number of at least 0 for each of 2 stages, got"):
        zero_bubble(2, 4, max_lag)
