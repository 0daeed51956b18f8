import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal.cluster import Layout
from omnibal.cost import CostModel, Load
from omnibal.errors import ConfigError
from omnibal.memory.footprint import Footprint, StageMemory, TrainingState
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import one_f_one_b, zero_bubble
from tests.memory.models import block, generator, model, random_model, random_schedule
from tests.memory.oracles import run_table

LOAD = Load(9, 4096)


def footprint(layers, schedule, *, load=LOAD, overhead_bytes=0, **layout):
    layout = Layout(schedule.num_stages, **layout)
    return Footprint(model(layers, dtype=layout.precision), load, schedule, layout, overhead_bytes)


def four_blocks(**options):
    return [block(f"block.{i}", **options) for i in range(4)]


def test_each_term_by_hand():
    weights = {"parameter_bytes": 20, "gradient_bytes": 40, "optimizer_bytes": 120}
    layers = four_blocks(none=100, full=16, output=8, **weights)
    found = footprint(layers, one_f_one_b(2, 8), num_replicas=2, overhead_bytes=7).stages(
        Partition((0, 2, 4)), ["full", "none", "none", "none"]
    )
    gradients = 2 * (40 + 2 * 40)  # of two layers, in 16 bits and summed in 32
    # Stage 0 holds two micro-batches: each keeps its pixels (16, as layer 0 keeps when it recomputes) and its output;
    # one gradient of the output comes back. The first layer brings back 84 bytes when the second has freed 100;
    # the gradients within the second are a third of that.
    first = StageMemory(40, gradients, 120, 2 * (16 + 100), 0, 2 * (16 + 8) + 8, 33, 0, 7)
    # Stage 1 holds one: its input twice (kept, and as a gradient).
    last = StageMemory(40, gradients, 120, 2 * 100, 0, 2 * 8, 33, 0, 7)
    assert found == (first, last)
    assert first.total == 40 + 240 + 120 + 232 + 56 + 33 + 7


@pytest.mark.parametrize(("targets", "rows", "again"), [(600, 600, 0), (1024, 1024, 0), (4096, 1024, 70)])
def test_the_loss_has_the_logits_of_some_rows_and_beyond_them_their_part_of_the_gradient(targets, rows, again):
    head = block("head", none=90, full=10, output=0, sizes={"vocab": 50}, gradient_bytes=70)
    memory = footprint([block("block.0"), head], one_f_one_b(1, 1), load=Load(9, 4096, target_tokens=targets))
    assert memory.loss_bytes == 10 * rows * 50 + again
    found = memory.stage(0, range(2), ["none", "none"])
    assert found.transient < memory.loss_bytes == found.transient + found.logits


def test_postponed_weight_gradients_hold_on_to_what_they_need():
    memory = footprint(four_blocks(none=100, full=10, output=8, pending=70), zero_bubble(2, 8))
    first, last = memory.stages(Partition((0, 2, 4)), ["none", "none", "full", "none"])
    # stage 0 runs unsplit; in its buffers the next gradient of its output comes beside the one in use
    assert (first.activations, first.pending, first.transient, first.buffers) == (400, 0, 33, 2 * (10 + 8) + 2 * 8)
    # stage 1 lags by one micro-batch; recomputing its first layer brings back 90 and needs gradients of 0.6 times 100,
    # when the other one has freed 100 and left 70; its gradients to stage 0 may wait for two micro-batches there
    assert (last.activations, last.pending, last.transient, last.buffers) == (110, 140, 90 + 60 - 30, 3 * 8)
    assert memory.pending_bytes(1)[2, 4] == 2 * 140


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_a_stage_holds_what_running_its_table_holds(seed):
    rng = generator(seed)
    profile, num_stages = random_model(rng), int(rng.integers(1, 5))
    schedule = random_schedule(rng, num_stages)
    memory = Footprint(profile, LOAD, schedule, Layout(num_stages))
    stage, levels = int(rng.integers(num_stages)), rng.choice(["none", "full"], len(profile.layers)).tolist()
    layers = range(int(rng.integers(len(profile.layers) - 1)) if stage else 0, len(profile.layers))
    found = memory.stage(stage, layers, levels[layers.start :])
    update = memory.update_bytes(stage)[layers.start, layers.stop] + found.pending
    expected = max(run_table(memory, stage, layers, levels), update)
    assert found.activations + found.pending + found.transient + found.logits >= expected
    if schedule.micro_batches >= num_stages:
        assert found.activations + found.pending + found.transient + found.logits == expected


def test_bytes_grow_with_the_load():
    layer = block("block.0", saved={"none": 0, "full": 0})
    object.__setattr__(layer, "saved_bytes", {"none": CostModel(llm_tokens=3.5), "full": CostModel(vision_units=2)})
    memory = footprint([layer, block("head")], one_f_one_b(1, 1))
    assert memory.stage(0, range(1), ["none"]).activations == 4096 * 3.5
    assert memory.stage(0, range(1), ["full"]).activations == 18


def test_tied_layers_share_their_weights_where_they_meet():
    tied = {"parameter_bytes": 30, "gradient_bytes": 30, "optimizer_bytes": 30, "tied_key": "embedding"}
    layers = [block("embedding", **tied), block("block.0", parameter_bytes=5), block("head", **tied)]
    whole = footprint(layers, one_f_one_b(1, 1)).stage(0, range(3), ["none"] * 3)
    assert (whole.parameters, whole.gradients, whole.optimizer) == (35, 3 * 30, 30)
    cut = footprint(layers, one_f_one_b(2, 1)).stages(Partition((0, 1, 3)), ["none"] * 3)
    assert [stage.parameters for stage in cut] == [30, 35]


def test_frozen_layers_at_the_start_of_the_pipeline_keep_nothing():
    layers = [
        block("block.0", trainable=False),
        block("block.1", trainable=False),
        block("block.2"),
        block("block.3", trainable=False),
    ]
    memory = footprint(layers, one_f_one_b(3, 8))
    assert memory.stage(0, range(3), ["none"] * 3).activations == 3 * 100
    assert memory.stage(1, range(1, 3), ["none"] * 2).activations == 2 * 100
    assert memory.stage(1, range(1, 2), ["none"]).activations == 0
    assert memory.stage(2, range(1, 4), ["none"] * 3).activations == 200


def test_a_frozen_front_holds_no_gradient_of_what_is_sent():
    layers = [block("block.0", trainable=False, output=8), block("block.1", trainable=False, output=8)]
    layers += [block("block.2", output=8), block("block.3", output=8)]
    for schedule, before, behind in ((one_f_one_b(4, 8), 1, 2), (zero_bubble(4, 8), 3, 3)):
        memory = footprint(layers, schedule)
        # an input and the next one; outputs, which may wait for the next stage where transfers run beside passes
        assert memory.stage(1, range(1, 2), ["none"]).buffers == (2 + before) * 8
        # two inputs in flight and one that comes; outputs and their gradients
        assert memory.stage(2, range(2, 3), ["none"]).buffers == (2 + 1) * 8 + (behind + schedule.in_flight[2] - 1) * 8


def test_the_optimizers_step_may_need_more_than_any_backward_pass():
    layers = [block("block.0", none=4, full=2, output=3, parameter_bytes=20, gradient_bytes=20, optimizer_bytes=120)]
    memory = footprint(layers, one_f_one_b(1, 1), accumulate_float32=False)
    assert memory.state(0).update[0, 1] == 3 * 40 - 20
    stage = memory.stage(0, range(1), ["none"])
    # pixels (2) stand for the input; at the end of the step activations and input are gone
    assert (stage.activations, stage.buffers) == (4, 2)
    assert stage.activations + stage.buffers + stage.transient == 100
    assert memory.update_bytes(0)[0, 1] == 100 - 2


def test_matrices_over_stages_agree_with_each_stage():
    layers = [block(f"block.{i}", output=3 + i, parameter_bytes=i, optimizer_bytes=7 * i) for i in range(5)]
    memory = footprint(layers, one_f_one_b(3, 4), num_replicas=2, overhead_bytes=11)
    for stage, (a, b) in enumerate([(0, 2), (1, 4), (2, 5)]):
        found = memory.stage(stage, range(a, b), ["full"] * (b - a))
        assert memory.fixed_bytes(stage)[a, b] == found.total - found.activations - found.transient - found.logits
        assert memory.kept_bytes[a:b, 2].sum() * memory.schedule.in_flight[stage] == found.activations


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda: Footprint(model(four_blocks()), LOAD, one_f_one_b(1, 1), Layout(precision="float32")),
            "precision of the layout must be the profile's bfloat16, got float32",
        ),
        (
            lambda: Footprint(model(four_blocks()), Load([1, 2], [3, 4]), one_f_one_b(1, 1), Layout()),
            "load must be of a single micro-batch",
        ),
        (
            lambda: footprint(four_blocks(), one_f_one_b(1, 1)).stage(0, range(4), ["none", "selective"] * 2),
            "level that the profile has for block.1, got 'selective'",
        ),
    ],
)
def test_refusals(wrong, message):
    with pytest.raises(ConfigError, match=message):
        wrong()


def test_total_is_the_sum_of_the_terms():
    assert StageMemory(*np.arange(1, 10).tolist()).total == 45


def state_of(*, dtype, numbers=120, frozen=0, **layout):
    """Of a layer with so many trained parameters and a frozen one."""
    size = {"bfloat16": 2, "float32": 4}[dtype]
    optimizer = numbers * (8 if size == 4 else 12)  # two moments, and master weights
    layers = [
        block("block.0", parameter_bytes=size * numbers, gradient_bytes=size * numbers, optimizer_bytes=optimizer),
        block("block.1", parameter_bytes=size * frozen, trainable=False),
    ]
    return TrainingState(model(layers, dtype=dtype), Layout(precision=dtype, **layout))


@pytest.mark.parametrize(
    ("dtype", "setup", "parameters", "gradients", "optimizer", "update"),
    [
        ("float32", {"zero_stage": 0}, 4, 4, 8, 4),  # gradients on their way
        ("float32", {"zero_stage": 1}, 4, 4, 12, 12 - 4),  # master weights too; a flat gradient, two temporaries
        ("bfloat16", {"zero_stage": 0}, 2, 2 + 2, 12, 12),
        ("bfloat16", {"zero_stage": 1, "accumulate_float32": False}, 2, 2, 12, 12 - 2),
        ("bfloat16", {"zero_stage": 1}, 2, 2 + 4, 12, 8),
        ("bfloat16", {"zero_stage": 1, "accumulate_float32": True}, 2, 2 + 4, 12, 8),
        ("float32", {"zero_stage": 0, "num_replicas": 3}, 4, 4, 8, 4),
        ("float32", {"zero_stage": 1, "num_replicas": 3}, 4, 4, 12 / 3, 4),
        ("bfloat16", {"zero_stage": 0, "num_replicas": 3}, 2, 2 + 2, 12 / 3, 12 / 3),
        ("bfloat16", {"zero_stage": 1, "num_replicas": 3, "accumulate_float32": False}, 2, 2, 12 / 3, 2),
        ("bfloat16", {"zero_stage": 1, "num_replicas": 12, "accumulate_float32": True}, 2, 2 + 4, 1, 2),
    ],
)
def test_bytes_of_a_trained_parameter(dtype, setup, parameters, gradients, optimizer, update):
    state = state_of(dtype=dtype, frozen=7, **setup)
    found = [matrix[0, 1] / 120 for matrix in (state.parameters, state.gradients, state.optimizer, state.update)]
    assert found == [parameters, gradients, optimizer, update]
    assert state.whole[0, 2] == state.whole[0, 1] + state.parameters[1, 2]
    assert state.parameters[1, 2] == 7 * parameters
    assert state.gradients[1, 2] == state.optimizer[1, 2] == state.update[1, 2] == 0


def test_deepspeed_reduces_so_many_gradients_at_once():
    state = state_of(dtype="bfloat16", numbers=2 * 10**9, num_replicas=64)
    assert state.update[0, 1] == 10**9
