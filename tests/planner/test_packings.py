import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal.cluster import OVERHEAD_BYTES, Cluster, Encoder, Layout
from omnibal.cost import CostModel, Load
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, largest_load, paper_limits
from omnibal.data.packs import Packs
from omnibal.device import DEVICES
from omnibal.errors import ConfigError
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.planner import PlanRequest
from omnibal.planner.packings import Packing, packings
from tests.clusters import cluster
from tests.memory.models import random_model
from tests.pipeline.profiles import fixed_profile, layer, profile
from tests.planner.problems import with_vision
from tools.synthetic import patch_lengths, tiled_lengths


def request(*, num_devices=8, memory_bytes=1000, **changes):
    return PlanRequest(**{"cluster": cluster(num_devices, memory_bytes), "global_batch": 64} | changes)


def stages(task, num_layers, **profile):
    return [layout.num_stages for layout in task.layouts(fixed_profile([1] * num_layers, **profile))]


def test_a_device_holds_something_beside_the_model_unless_told_otherwise():
    task = PlanRequest(cluster=Cluster.parse("A100-80GB"), global_batch=1)
    assert task.cluster.overhead_bytes == OVERHEAD_BYTES > 0
    assert task.cluster.allocatable_bytes(Layout()) == (int(79.25 * 2**30) - OVERHEAD_BYTES,)


def test_stages_are_divisors_of_the_devices_and_no_more_than_layers():
    assert stages(request(num_devices=12), 10) == [1, 2, 3, 4, 6]
    assert stages(request(num_stages=4), 10) == [4]
    with pytest.raises(ConfigError, match="num_stages must be at most the model's 3 layers, got 4"):
        stages(request(num_stages=4), 3)
    with pytest.raises(ConfigError, match="num_stages must divide the 8 devices, got 3"):
        stages(request(num_stages=3), 10)


def test_devices_that_share_layers_count_as_one():
    shared = replace(fixed_profile([1, 1, 1, 1]), tensor_parallel=2)
    found = request(num_devices=12, zero_stage=0).layouts(shared)
    assert found[1] == Layout(2, 3, num_tensor=2, zero_stage=0, precision="float32")
    assert [layout.num_devices for layout in found] == [12, 12, 12]
    with pytest.raises(ConfigError, match="devices must be a multiple of the 2 that share each layer, got 7"):
        request(num_devices=7).layouts(shared)
    nodes = Cluster(2, 6, DEVICES["A100-80GB"])
    with pytest.raises(
        ConfigError, match="tensor_parallel must divide the 6 devices of a node of 2x6xA100-80GB, got 4"
    ):
        request(cluster=nodes).layouts(replace(shared, tensor_parallel=4))
    with pytest.raises(ConfigError, match="tensor_parallel must be one number for vision and language here"):
        request().layouts(replace(shared, tensor_parallel={"vision": 1, "language": 2}))


def test_an_encoder_leaves_the_others_devices_to_pipelines_of_the_llm():
    profile = with_vision(random_model(np.random.default_rng(0), max_blocks=4))
    apart = request(num_devices=14, encoder=Encoder(1, 2))
    assert [(layout.num_stages, layout.num_replicas) for layout in apart.layouts(profile)] == [(2, 12), (3, 6), (4, 4)]
    # Of 3 encoders and 8 LLMs, 4 or 2 LLMs neither number divides the other.
    refused = request(num_devices=11, encoder=Encoder(1, 3))
    with pytest.raises(ConfigError, match="must divide each other, got 3 and"):
        refused.layouts(profile)
    for changes, message in (
        ({"cluster": cluster(15, 1000), "num_stages": 3}, "must divide the 13 devices .* leaves of 15, got 2"),
        ({"encoder": Encoder(9, 1), "num_stages": 10}, "num_stages must be at most the model's"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(apart, **changes).layouts(profile)


def test_several_encoders_share_the_micro_batches_of_an_llm_alike():
    for encoder, replicas, sharing in ((Encoder(1, 4), 1, 4), (Encoder(1, 4), 2, 2), (Encoder(1, 1), 2, 1)):
        found = packings(LENGTHS, request(encoder=encoder, global_batch=64), replicas)
        assert all(packing.micro_batches % sharing == 0 for packing in found)


def test_budgets_leave_the_head_room():
    assert request(head_room=0.25).budgets(Layout(3)) == (750, 750, 750)
    assert request(head_room=0.0, num_devices=4, memory_bytes=(10, 20, 30, 15)).budgets(Layout(2, 2)) == (10, 15)
    cards = [DEVICES[name] for name in ("H200-141GB", "L4-24GB")]
    budgets = [PlanRequest(cluster=Cluster(1, 2, card), global_batch=1).budgets(Layout(2)) for card in cards]
    assert budgets == [(int(0.94 * 139.8 * 2**30),) * 2, (20 * 2**30,) * 2]


def test_a_request_is_json():
    record = json.loads(json.dumps(request(limits=PackLimits(9, 4096)).to_record()))
    assert record["limits"]["llm_tokens"] == 4096 and record["global_batch"] == 64
    assert "cluster" not in record


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch": 0}, "global_batch must be positive, got 0"),
        ({"steps": 0}, "steps must be positive, got 0"),
        ({"head_room": 1.0}, r"head_room must lie in \[0, 1\), got 1.0"),
        ({"num_stages": 0}, "num_stages must be positive, got 0"),
        ({"zero_stage": 2}, "zero_stage must be 0 or 1 under a pipeline, got 2"),
        (
            {"cluster": cluster(8, 1000, overhead_bytes=960)},
            "overhead_bytes must be less than a device's memory without its head room, 875, got 960",
        ),
        ({"batch_tolerance": -0.1}, "batch_tolerance must lie in"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ConfigError, match=message):
        request(**changes)


LENGTHS = tiled_lengths(9000, seed=3)


def test_the_papers_limits_come_first_and_every_other_packing_keeps_the_global_batch():
    task = request(global_batch=256, batch_tolerance=0.04, method="isf")
    found = packings(LENGTHS, task, num_replicas=4)
    assert found[0].limits == paper_limits(LENGTHS)
    assert len(found) >= 4
    for packing in found[1:]:
        assert abs(packing.samples_per_step / 256 - 1) <= 0.04
    counts = [packing.micro_batches for packing in found]
    assert len(set(counts)) == len(counts)


def test_steps_are_whole_and_spread_over_the_epoch():
    packing = packings(LENGTHS, request(global_batch=256, method="isf", steps=3), num_replicas=4)[0]
    assert len(packing.steps) == 3
    for step in packing.steps:
        assert len(step) == 4
        for load in step:
            assert len(load) == packing.micro_batches
            assert (load.llm_tokens > 0).all()
    assert packing.all_loads.shape == (3, 4, packing.micro_batches)
    mean = packing.samples_per_step / (4 * packing.micro_batches) * LENGTHS.llm_tokens.mean()
    assert packing.all_loads.llm_tokens.mean() == pytest.approx(mean, rel=0.1)


@pytest.mark.parametrize(("num_replicas", "global_batch", "steps"), [(1, 8, 512), (2, 64, 64), (8, 512, 8)])
def test_packings_are_judged_by_as_many_micro_batches_however_short_steps_are(num_replicas, global_batch, steps):
    limits = PackLimits(9, 4096)
    (found,) = packings(LENGTHS, request(global_batch=global_batch, limits=limits), num_replicas=num_replicas)
    assert len(found.steps) == pytest.approx(steps, rel=0.15)
    assert found.all_loads.llm_tokens.size == pytest.approx(1024, rel=0.1)


def test_long_steps_are_four_at_least():
    (found,) = packings(LENGTHS, request(global_batch=1800, limits=PackLimits(4, 2048)), num_replicas=1)
    assert found.micro_batches > 256
    assert len(found.steps) == 4


def test_packs_of_a_large_batch_are_as_full_as_those_of_the_whole_epoch():
    lengths, limits = tiled_lengths(40_000, seed=3), PackLimits(9, 4096)
    (found,) = packings(lengths, request(global_batch=1161, limits=limits, method="balanced"), num_replicas=4)
    whole = arrange_epoch(lengths, limits, num_replicas=4)
    samples = found.samples_per_step / (4 * found.micro_batches)
    assert samples == pytest.approx(len(lengths) / len(whole.packs), rel=0.04)


def test_a_packing_holds_the_steps_that_were_named():
    limits = PackLimits(9, 4096)
    epoch = arrange_epoch(LENGTHS, limits, num_replicas=2, micro_batches=3)
    packing = Packing.of(epoch, LENGTHS, limits, np.array([4, 1]))
    assert packing.numbers == (4, 1)
    sampler = BalancedBatchSampler(LENGTHS, limits, num_replicas=2, rank=0, micro_batches=3)
    assert packing.steps == tuple(tuple(sampler.step(number).load) for number in (4, 1))
    assert packing.samples_per_step == pytest.approx(len(LENGTHS) / len(epoch.packs) * 6)


def test_the_median_step_is_by_its_slowest_replica():
    tokens = [[[5, 5], [1, 9]], [[2, 2], [30, 1]], [[8, 8], [1, 1]]]  # slowest replicas: 10, 31 and 16 tokens
    steps = tuple(tuple(Load(0, replica) for replica in step) for step in tokens)
    packing = Packing(PackLimits(0, 40), 2, 4.0, steps, Load(0, 40), (7, 8, 9))
    costs = profile([replace(layer("block.0"), forward_seconds=CostModel(llm_tokens=1), recompute_seconds={})])
    found = packing.median_step(costs)
    assert (found.steps, found.numbers) == ((steps[2],), (9,))


def test_packs_that_are_alike_are_as_large_as_the_limits_allow():
    packing = Packing.alike(PackLimits(9, 4096), num_replicas=2, micro_batches=3)
    assert packing.all_loads.shape == (1, 2, 3)
    assert packing.all_loads.max() == packing.all_loads.mean() == packing.largest == Load(9, 4096, 4096**2, 9**2)
    assert (packing.samples_per_step, packing.micro_batches) == (6, 3)


def test_given_limits_are_kept():
    limits = PackLimits(7, 5000)
    (found,) = packings(LENGTHS, request(global_batch=100, limits=limits, method="isf"), num_replicas=2)
    assert found.limits == limits
    assert found.micro_batches == round(100 / (2 * found.samples_per_step / (2 * found.micro_batches)))


def test_a_global_batch_beyond_the_data_is_refused():
    with pytest.raises(ConfigError, match="lengths must hold a step of 100 samples, got 50"):
        packings(LENGTHS.take(np.arange(50)), request(global_batch=100), num_replicas=1)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6))
def test_no_pack_within_the_limits_exceeds_the_largest_load(seed):
    rng = np.random.default_rng(seed)
    lengths = tiled_lengths(200, seed=seed) if seed % 2 else patch_lengths(200, seed=seed)
    limits = PackLimits(int(rng.integers(1, 30_000)), int(rng.integers(1, 9000)))
    starts = np.unique(np.concatenate([[0, 200], rng.integers(0, 201, 120)]))
    packs = Packs(rng.permutation(200), starts)
    load, largest = packs.load(lengths), largest_load(lengths, limits)
    within = (load.vision_units <= limits.vision_units) & (load.llm_tokens <= limits.llm_tokens)
    for name in ("vision_units", "llm_tokens", "llm_tokens_squared", "vision_squared", "target_tokens"):
        assert (getattr(load, name)[within] <= getattr(largest, name) * (1 + 1e-12)).all()


def test_all_tokens_may_carry_loss_where_nothing_is_known():
    assert largest_load(SampleLengths([1], [10]), PackLimits(2, 30)).target_tokens == 30


def test_tokens_bound_sounds_that_have_no_limit():
    lengths = SampleLengths([0, 0], [10, 10], sound_units=[20, 4])
    assert largest_load(lengths, PackLimits(2, 30)).sound_units == 60
    assert largest_load(lengths, PackLimits(2, 30, sound_units=25)).sound_units == 25
