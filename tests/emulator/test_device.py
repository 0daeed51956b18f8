from dataclasses import replace

import pytest

from omnibal.cluster import Links
from omnibal.cost import CostModel, Load
from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError, InfeasibleError
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import Operation
from omnibal.plan import Plan
from tests.clusters import on_cluster
from tests.pipeline.profiles import layer, profile
from tools.emulator import device as emulated_device
from tools.emulator.device import DOWN, Clocks, EmulatedDevice, stage_work
from tools.emulator.run import LEAST_SLEEP_SECONDS, EmulationTask

LIMITS = PackLimits(4, 10)


def token_layer(number, *, trainable=True, **costs):
    """Forward takes a second a token; backward to the inputs and, if trainable, to the weights one each."""
    second = CostModel(llm_tokens=1)
    return replace(
        layer(f"block.{number}", output=100, gradient_bytes=8, optimizer_seconds=3, trainable=trainable, **costs),
        forward_seconds=second,
        backward_seconds=second,
        weight_seconds=second if trainable else CostModel(),
        recompute_seconds={},
    )


def task(*tokens, budget=10**6, recompute="none", plan=None, **options):
    """Two stages of two layers; a replica per list of tokens."""
    plan = plan or Plan(LIMITS, len(tokens[0]), Partition((0, 2, 4)), (recompute,) * 4)
    layers = [token_layer(number, pending_bytes=CostModel(fixed=60)) for number in range(4)]
    return EmulationTask(
        profile(layers), on_cluster(plan, len(tokens), budget, Links(50.0), zero_stage=0),
        (tuple(Load(0, entry) for entry in tokens),), **options,
    )  # fmt: skip


def test_a_device_works_on_its_own_micro_batches():
    work = stage_work(task([1, 2], [3, 4]), 0, stage=1, replica=1)
    assert work.forward.tolist() == [[3, 3], [4, 4]]
    assert work.backward.tolist() == work.weight.tolist() == [[3, 3], [4, 4]]
    assert work.sent_bytes.tolist() == [[100, 100], [100, 100]]
    assert work.upstream.tolist() == [2, 2]
    assert work.downstream.tolist() == [0, 0]
    # a ring of two sends each of two layers' 8 bytes once
    assert work.reduce == pytest.approx([8 / 50, 8 / 50])
    assert work.gather.tolist() == [0, 0]  # under ZeRO 0 each updates all weights
    assert work.optimizer == 6


def test_a_backward_pass_takes_longer_where_it_is_split():
    whole = task([1, 2])
    layers = [replace(entry, split_seconds=CostModel(llm_tokens=0.5)) for entry in whole.profile.layers]
    split = replace(whole, profile=profile(layers))
    device = EmulatedDevice(split, 0, 0, "rank 0, stage 0", Clocks.of(split))
    device.begin_step(0)
    device.begin(Operation.B)
    assert device.backward_seconds(1, 0) == 3
    device.begin(Operation.BW)
    assert device.backward_seconds(1, 0) == 2


def test_recomputation_adds_to_the_backward_pass():
    assert stage_work(task([1, 2], recompute="full"), 0, 0, 0).backward.tolist() == [[2, 2], [4, 4]]


def test_a_micro_batch_above_the_limits_recomputes_everything():
    work = stage_work(task([10, 11]), 0, 0, 0)
    assert work.backward.tolist() == [[10, 10], [22, 22]]
    assert work.kept_bytes == (200, 20)


@pytest.fixture
def device(monkeypatch):
    """A device whose sleeps are written down; stage 0 keeps 200 bytes of a micro-batch."""
    slept = []
    monkeypatch.setattr(emulated_device, "sleep", slept.append)
    monkeypatch.setattr(emulated_device, "perf_counter", lambda: 1000.0 + sum(slept))
    whole = task([1, 2, 3], time_scale=0.5)
    clocks = Clocks.of(whole)
    made = EmulatedDevice(whole, 0, 0, "rank 0, stage 0", clocks)
    made.begin_step(0)
    return made, slept, clocks


def run(device, operation):
    device.end(operation, device.begin(operation))


def test_computations_and_links_are_slept_in_scaled_time(device):
    made, slept, _ = device
    start = made.begin(Operation.F)
    made.compute(1.0)
    made.compute(3.0)
    made.end(Operation.F, start)
    run(made, Operation.SEND_ACTIVATION)
    assert slept == [0.5, 1.5, 1.0]
    assert [entry.operation for entry in made.log.entries] == [Operation.F, Operation.SEND_ACTIVATION]
    assert [entry.end - entry.start for entry in made.log.entries] == [2.0, 1.0]


def test_memory_is_held_from_forward_to_backward(device):
    made, _, _ = device
    fixed, transient = made.work.fixed_bytes, made.work.transient_bytes[0]
    for operation in (Operation.F, Operation.F, Operation.BW):
        run(made, operation)
    assert made.peak_bytes == fixed + 2 * 200 + transient
    run(made, Operation.F)
    assert made.peak_bytes == fixed + 2 * 200 + transient


def test_a_split_backward_holds_on_to_what_its_weights_need():
    plan = Plan(LIMITS, 3, Partition((0, 2, 4)), ("none",) * 4, schedule="zero-bubble")
    whole = task([1, 2, 3], plan=plan)
    made = EmulatedDevice(whole, 1, 0, "rank 1, stage 1", Clocks.of(whole))
    made.begin_step(0)
    assert made.work.pending_bytes == (2 * 60,) * 3
    fixed, transient = made.work.fixed_bytes, made.work.transient_bytes[0]
    held = []
    for operation in (Operation.F, Operation.B, Operation.F, Operation.B, Operation.W, Operation.F):
        run(made, operation)
        held.append(made._held_bytes - fixed)
    assert held == [200, 120, 320, 240, 120, 320]
    assert made.peak_bytes == fixed + 320 + transient


def test_what_is_sent_beside_the_computations_arrives_one_at_a_time(device):
    made, slept, clocks = device
    receiver = EmulatedDevice(made.task, 1, 0, "rank 1, stage 1", clocks)
    made.send(DOWN, 0)
    made.send(DOWN, 1)  # waits for the link, which takes 2 seconds, or half of that in scaled time
    assert slept == []
    receiver.receive(DOWN, 1)
    receiver.receive(DOWN, 0)
    assert slept == [2.0]


def test_too_much_memory_is_refused():
    fixed = stage_work(task([1, 2, 3]), 0, 0, 0).fixed_bytes
    whole = task([1, 2, 3], budget=fixed + 599)
    made = EmulatedDevice(whole, 0, 0, "rank 3, stage 0", Clocks.of(whole))
    made.begin_step(0)
    run(made, Operation.F)
    run(made, Operation.F)
    with pytest.raises(InfeasibleError, match="rank 3, stage 0: out of emulated memory in step 0, micro-batch 2"):
        run(made, Operation.F)


def test_a_task_must_fit_its_plan():
    with pytest.raises(ConfigError, match="time_scale must be positive and finite, got 0"):
        task([1, 2], time_scale=0)
    plan = Plan(LIMITS, 3, Partition((0, 2, 4)), ("none",) * 4)
    with pytest.raises(ConfigError, match=r"steps must be at least one, of \(1, 3\) replicas and micro-batches, got"):
        EmulationTask(task([1, 2]).profile, on_cluster(plan), task([1, 2]).steps)
    with pytest.raises(ConfigError, match="cluster of the plan must be known, got none; give one, such as"):
        EmulationTask(task([1, 2]).profile, replace(task([1, 2]).plan, cluster=None), task([1, 2]).steps)


def test_time_is_scaled_to_sleeps_that_outweigh_the_engines_own_work():
    # forward passes of a stage take 2 × 2 tokens on average
    assert task([1, 2, 3]).scale == pytest.approx(LEAST_SLEEP_SECONDS / 4)
    slow = task([1, 2, 3], time_scale=0.25)
    assert slow.scale == 0.25
    assert slow.wall_seconds == pytest.approx(2 * 0.25 * slow.predicted[0].step_seconds)
    assert task([1, 2, 3], time_scale=0.25).least_scale == pytest.approx(LEAST_SLEEP_SECONDS / 4)


def test_replicas_add_up_layer_by_layer_and_send_weights_that_way(monkeypatch):
    slept = []
    monkeypatch.setattr(emulated_device, "sleep", slept.append)
    monkeypatch.setattr(emulated_device, "perf_counter", lambda: 1000.0 + sum(slept))
    shared = task([1, 2], [2, 1])
    shared = replace(shared, plan=on_cluster(shared.plan, 2, 10**6, Links(4.0)), time_scale=0.5)  # ZeRO 1
    clocks = Clocks.of(shared)
    one, other = (EmulatedDevice(shared, 0, replica, f"rank {replica}, stage 0", clocks) for replica in range(2))
    one.begin_step(0)
    one.complete(1)
    slept.append(3.0)
    other.complete(1)  # the slower one
    slept.append(0.5)
    one.complete(0)
    other.complete(0)
    one.add_up()  # 8 bytes each take 2 seconds, a second in scaled time; of layer 1 half of that has passed
    assert slept[2:] == [1.5]
    one.spread_weights()
    one.begin(Operation.F)
    one.await_weights(0)
    one.compute(1.0)
    one.await_weights(1)
    assert slept[3:] == [1.0, 0.5, 0.5]
