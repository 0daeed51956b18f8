import numpy as np
import pytest

from omnibal.advise.costs import phase_costs
from omnibal.advise.memory import RankMemory
from omnibal.cluster import Cluster
from omnibal.cost import CostModel, Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, largest_load
from omnibal.data.synthetic import tiled_lengths
from omnibal.errors import InfeasibleError
from omnibal.integrations.expected import (
    Schedule,
    Waiting,
    compare,
    counted_profile,
    describe,
    padding_share,
    step_seconds,
)
from omnibal.integrations.loading import PackSampler
from omnibal.integrations.padded import PaddedSampler
from omnibal.integrations.searched import limits_for
from tests.integrations.items import config_of
from tests.vlm.families import plain_family_model

LENGTHS = tiled_lengths(4000, seed=0)
COSTS = {"vision": CostModel(vision_units=400), "language": CostModel(llm_tokens=1)}
RANKS = {"num_replicas": 4, "micro_batches": 2}
ONE_NODE = {"num_nodes": 1, "devices_per_node": 4, "device": "A100-80GB"}


def test_a_step_lasts_as_long_as_its_slowest_rank_between_meetings():
    loads = Load([[[1, 0], [0, 1]]], [[[0, 400], [400, 400]]])
    assert step_seconds(loads, COSTS, "ddp") == 1200
    assert step_seconds(loads, COSTS, "zero2") == 400 + 800
    assert step_seconds(loads, COSTS, "zero3") == 400 + 400 + 400 + 400
    ddp, zero3 = (Waiting.of(loads, COSTS, layout) for layout in ("ddp", "zero3"))
    assert (ddp.vision, ddp.tokens, ddp.share) == (0, 0.25, 400 / 2400)
    assert (zero3.vision, zero3.tokens, zero3.share) == (0.5, 0.25, (800 + 400) / 3200)


def test_gains_of_packing_and_of_balance_multiply():
    limits = PackLimits(9, 4096)
    packed = compare(PackSampler(LENGTHS, limits, rank=0, **RANKS), limits, COSTS, "ddp", batch_size=4)
    assert packed.packing > 1.2
    assert packed.balance > 1.05
    assert packed.grouped > 1.02
    padded = compare(PaddedSampler(LENGTHS, limits, rank=0, **RANKS), limits, COSTS, "ddp", batch_size=4)
    assert padded.packing is None
    assert 1.2 < padded.balance < packed.packing * packed.balance
    even = SampleLengths([1] * 400, [100] * 400)
    nothing = compare(
        PackSampler(even, PackLimits(4, 400), rank=0, **RANKS), PackLimits(4, 400), COSTS, "ddp", batch_size=4
    )
    assert str(nothing) == "no gain here: 1.00x the samples a second of random batches is expected"


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("batch_size", [4, 8])
def test_searched_limits_keep_what_a_step_holds(batch_size, padded):
    limits = limits_for(LENGTHS, batch_size, padded=padded, **RANKS)
    sampler = (PaddedSampler if padded else PackSampler)(LENGTHS, limits, rank=0, **RANKS)
    assert len(LENGTHS) / sampler.num_steps == pytest.approx(8 * batch_size, rel=0.1)
    line = describe(sampler, limits, None, "ddp", Schedule(batch_size, 1.0))
    assert ("samples a step as before" in line) == (abs(500 / batch_size / sampler.num_steps - 1) <= 0.05)
    assert ("padded batches" in line) == padded
    assert "expected" not in line


def test_a_part_of_an_epoch_is_whole_steps():
    sampler = PackSampler(SampleLengths([0] * 7, [10] * 7), PackLimits(1, 10), num_replicas=1, rank=0)
    told = "7 steps an epoch with 1.0 samples a step where 2 were set: 11 optimizer steps in all instead of 6, over"
    assert Schedule(2, 1.5).changed(sampler).startswith(told)


def test_searched_limits_hold_every_sample_and_texts_alone():
    assert limits_for(LENGTHS, 1, **RANKS).vision_units >= LENGTHS.vision_units.max()
    texts = SampleLengths(np.zeros(400, dtype=int), np.arange(400) + 20)
    assert limits_for(texts, 4, **RANKS).vision_units == 0


def test_padding_is_counted():
    sampler = PaddedSampler(SampleLengths([0, 0], [100, 50]), PackLimits(1, 400), num_replicas=1, rank=0)
    assert padding_share(sampler) == 0.25


def test_costs_are_counted_where_a_family_is_known_and_as_far_as_it_is_trained():
    model = plain_family_model(config_of("internvl"))

    def vision_backward(device, recompute="none"):
        return phase_costs(counted_profile(model, device), recompute=recompute)["vision backward"].vision_units

    whole = vision_backward(None)
    assert vision_backward("A100-80GB", "full") > whole > 0
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("vision_tower" not in name)
    assert 0 < vision_backward("some other device") < whole / 2
    assert counted_profile(plain_family_model(config_of("idefics3")), None) is None


def test_limits_keep_the_memory():
    profile = counted_profile(plain_family_model(config_of("internvl")), None)
    limits = limits_for(LENGTHS, 8, **RANKS)

    def memory(gib):
        return RankMemory(profile, "zero2", Cluster.of({**ONE_NODE, "memory_bytes": gib * 2**30}), "none")

    needed = memory(80.0).peak_bytes(largest_load(LENGTHS, limits)) / 2**30
    assert limits_for(LENGTHS, 8, memory=memory(needed), **RANKS) == limits
    state = memory(80.0).state_bytes / 2**30
    less = limits_for(LENGTHS, 8, memory=memory((needed + state) / 2), **RANKS)
    assert memory(80.0).peak_bytes(largest_load(LENGTHS, less)) / 2**30 <= (needed + state) / 2
    assert less.llm_tokens < limits.llm_tokens
    with pytest.raises(InfeasibleError, match=r"memory must hold the largest sample \(5 vision units, .* too little"):
        limits_for(LENGTHS, 8, memory=memory(state), **RANKS)
