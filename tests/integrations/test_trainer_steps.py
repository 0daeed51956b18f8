import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from omnibal.advise.memory import RankMemory
from omnibal.advise.wait import phase_costs, step_seconds
from omnibal.cluster import Cluster
from omnibal.cost import CostModel, Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, fullest_load
from omnibal.data.step_size import KEPT, fit_step
from omnibal.errors import InfeasibleError
from omnibal.integrations.trainer.settings import _masks_padding
from omnibal.integrations.trainer.steps import (
    AskedSteps,
    Waiting,
    counted_profile,
    describe,
    expected_gains,
    padding_share,
    samples_per_pack,
)
from omnibal.packs.loading import PackSampler, PaddedSampler
from tests.integrations.items import config_of
from tests.vlm.families import plain_family_model
from tools.synthetic import tiled_lengths

LENGTHS = tiled_lengths(4000, seed=0)
COSTS = {"vision": CostModel(vision_units=400), "language": CostModel(llm_tokens=1)}
RANKS = {"num_replicas": 4, "micro_batches": 2}
BATCHES = AskedSteps(32, batch_size=4, micro_batches=2, epochs=1.0)
ONE_NODE = {"num_nodes": 1, "devices_per_node": 4, "device": "A100-80GB"}


def test_a_step_lasts_as_long_as_its_slowest_rank_between_meetings():
    loads = Load([[[1, 0], [0, 1]]], [[[0, 400], [400, 400]]])
    taken = {"ddp": 1200, "zero2": 400 + 800, "zero3": 400 + 400 + 400 + 400}
    for layout, seconds in taken.items():
        assert np.add(*step_seconds(loads, COSTS, layout)).mean() == seconds
    ddp, zero3 = (Waiting.of(loads, COSTS, layout) for layout in ("ddp", "zero3"))
    assert (ddp.vision, ddp.tokens, ddp.share) == (0, 0.25, 400 / 2400)
    assert (zero3.vision, zero3.tokens, zero3.share) == (0.5, 0.25, (800 + 400) / 3200)


def test_gains_of_packing_and_of_balance_multiply():
    limits = PackLimits(9, 4096)
    packed = expected_gains(PackSampler(LENGTHS, limits, rank=0, **RANKS), COSTS, "ddp", BATCHES)
    assert packed.packing > 1.2
    assert packed.balance > 1.05
    assert packed.grouped > 1.02
    padded = expected_gains(PaddedSampler(LENGTHS, limits, rank=0, **RANKS), COSTS, "ddp", BATCHES)
    assert padded.packing is None
    assert 1.2 < padded.balance < packed.packing * packed.balance
    even = SampleLengths([1] * 400, [100] * 400)
    nothing = expected_gains(PackSampler(even, PackLimits(4, 400), rank=0, **RANKS), COSTS, "ddp", BATCHES)
    assert str(nothing) == "no gain here: 1.00x the samples a second of random batches is expected"


def sized(lengths, asked, **options):
    """What ``fit_step`` finds on four ranks, and the samples of a step under it on average."""
    size = fit_step(lengths, asked, **{"num_replicas": 4, "batch_size": 4} | options)
    sampler = PaddedSampler if options.get("padded") else PackSampler
    steps = sampler(lengths, size.limits, rank=0, num_replicas=4, micro_batches=size.micro_batches).num_steps
    return size, len(lengths) / steps


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("asked", "batch_size", "most", "micro_batches"),
    [
        (64, 8, None, {2}),
        (32, 4, None, {2, 3}),
        (8, 1, None, {1}),  # two samples a pack: limits below the largest sample
        (16, 1, None, {1, 2}),  # the device held the largest sample, so it holds packs of as much
        (512, 4, PackLimits(9, 4096), {27, 39, 40}),
        (24, 4, PackLimits(33, 10240), {1}),
        (48, 4, PackLimits(9, 3000), {3, 4}),
        (48, 4, PackLimits(4, 1500), {6, 7, 8, 9}),
    ],
)
def test_a_step_holds_the_samples_that_were_asked_for(asked, batch_size, most, micro_batches, padded):
    size, samples = sized(LENGTHS, asked, batch_size=batch_size, most=most, padded=padded)
    assert samples == pytest.approx(asked, rel=KEPT)
    assert size.micro_batches in micro_batches
    if most is not None:
        assert size.limits.vision_units <= most.vision_units
        assert size.limits.llm_tokens <= most.llm_tokens
        assert size.limits == most or asked < 100


def test_the_line_says_what_was_asked_and_what_a_step_holds():
    size, samples = sized(LENGTHS, 512, most=PackLimits(9, 4096))
    sampler = PackSampler(LENGTHS, size.limits, rank=0, num_replicas=4, micro_batches=size.micro_batches)
    line = describe(sampler, None, "ddp", AskedSteps(512, 4, 32, 1.0))
    assert f"{sampler.num_steps} steps an epoch, 512 samples a step requested, {samples:.0f} on average" in line
    assert f" (gradient_accumulation_steps is {size.micro_batches}, was 32)\n" in line
    assert "expected" not in line
    small = PackLimits(3, 1200)
    sampler = PackSampler(LENGTHS, small, rank=0, num_replicas=4, micro_batches=2)
    line = describe(sampler, None, "ddp", AskedSteps(64, 4, 4, 2.0))
    assert f" {len(small.oversized(LENGTHS))} samples exceed these limits, each gets a pack of its own\n" in line
    assert f"as near as packs come: {2 * sampler.num_steps} optimizer steps in all instead of 126" in line


def small_samples(seed):
    rng = np.random.default_rng(seed)
    images = rng.choice([0, 1, 1, 2], 120)
    patches = np.where(images > 0, images * rng.choice([16, 24, 36, 48, 64], 120), 0)
    return SampleLengths(patches, rng.integers(10, 90, 120) + patches // 4)


def described(lengths, asked, limits, *, batch_size=2):
    """What two ranks train under given limits, their samples of a pack, and the line."""
    size = fit_step(lengths, asked, batch_size=batch_size, num_replicas=2, most=limits)
    sampler = PackSampler(lengths, size.limits, rank=0, num_replicas=2, micro_batches=size.micro_batches)
    asked_steps = AskedSteps(asked, batch_size, max(asked // 2 // batch_size, 1), 1.0, limits=limits)
    return size, samples_per_pack(sampler), describe(sampler, COSTS, "ddp", asked_steps)


@pytest.mark.parametrize("seed", range(4))
def test_given_limits_are_made_smaller_with_a_reason(seed):
    lengths = small_samples(seed)
    size, of_pack, line = described(lengths, 4, PackLimits(300, 400))
    assert size.micro_batches == 1
    assert of_pack == pytest.approx(2, rel=2 * KEPT)  # not one sample in each of two packs
    assert "smaller than the given 300 vision units and 400 LLM tokens: a larger samples_per_step= keeps" in line
    kept, of_pack, line = described(lengths, 24, PackLimits(300, 400))
    assert (kept.limits, of_pack > 4) == (PackLimits(300, 400), True)
    assert "smaller than" not in line


def test_packs_gain_more_where_padded_rows_are_masked():
    limits, costs = PackLimits(9, 4096), {"language": CostModel(llm_tokens_squared=1)}
    sampler = PackSampler(LENGTHS, limits, rank=0, num_replicas=1, micro_batches=2)
    masked, flash = (expected_gains(sampler, costs, "ddp", replace(BATCHES, masks=masks)) for masks in (True, False))
    # Under flash attention padding is not attended to, so packs save nothing of it; a mask takes 3.5 times, too.
    assert flash.whole == pytest.approx(1, rel=0.1)
    assert masked.whole > 3.5


def test_a_head_on_target_rows_is_part_of_the_gain():
    lengths = SampleLengths([1] * 400, [100] * 400, target_tokens=[20] * 400)
    costs = {"language": CostModel(llm_tokens=8, target_tokens=2)}
    sampler = PackSampler(lengths, PackLimits(9, 1000), rank=0, num_replicas=1, micro_batches=2)
    gains = expected_gains(sampler, costs, "ddp", replace(BATCHES, on_targets=True))
    # 10 seconds a token where all rows count, 8 + 2 / 5 where a fifth does.
    assert gains.head == pytest.approx(10 / 8.4)
    assert gains.whole == pytest.approx(gains.grouped) == pytest.approx(10 / 8.4)
    assert "balance 1.00x, head on target rows 1.19x)" in str(gains)
    plain = expected_gains(sampler, costs, "ddp", BATCHES)
    assert (plain.head, plain.whole) == (1, pytest.approx(1))


@pytest.mark.parametrize(("attention", "masks"), [("sdpa", True), ("eager", True), ("flash_attention_2", False)])
def test_padded_rows_are_masked_but_for_flash_attention(attention, masks):
    model = plain_family_model(config_of("internvl"))
    model.config.get_text_config()._attn_implementation = attention
    assert _masks_padding(model) is masks
    assert _masks_padding(object())


def test_packs_of_one_sample_promise_no_packing():
    lengths = small_samples(0)
    promises = set()
    for limits, asked in ((PackLimits(50, 60), 16), (PackLimits(300, 400), 2), (PackLimits(300, 400), 12)):
        _, of_pack, line = described(lengths, asked, limits)
        assert ("hardly any sample shares a pack" in line) == (of_pack <= 1.2) == (asked != 12)
        promises.add(re.search(r"(\d\.\d\dx) the samples", line)[1])
        assert of_pack > 1.2 or "packing 1.00x" in line or "no gain here" in line
    assert len(promises) == 3  # each is that of its own packs


def test_a_part_of_an_epoch_is_whole_steps():
    sampler = PackSampler(SampleLengths([0] * 7, [10] * 7), PackLimits(1, 10), num_replicas=1, rank=0)
    told = "7 steps an epoch, 2 samples a step requested, 1.0 on average, as near as packs come: 11 optimizer steps in "
    assert AskedSteps(2, 2, 1, 1.5).told(sampler).startswith(f"{told}all instead of 6, over")


def test_texts_alone_get_limits():
    texts = SampleLengths(np.zeros(400, dtype=int), np.arange(400) + 20)
    size, samples = sized(texts, 32)
    assert (size.limits.vision_units, size.micro_batches) == (0, 2)
    assert samples == pytest.approx(32, rel=KEPT)


def test_sounds_beside_a_vit_get_a_limit():
    rng = np.random.default_rng(0)
    sounds = np.where(rng.random(1200) < 0.4, rng.integers(50, 400, 1200), 0)
    images = np.where(rng.random(1200) < 0.5, rng.integers(1, 6, 1200), 0)
    tokens = rng.integers(20, 200, 1200) + 100 * images + sounds // 2
    lengths = SampleLengths(images, tokens, sound_units=sounds)
    size, samples = sized(lengths, 64, batch_size=8)
    limits = size.limits
    assert samples == pytest.approx(64, rel=KEPT)
    sampler = PackSampler(lengths, limits, rank=0, num_replicas=4, micro_batches=size.micro_batches)
    loads = Load.stack(sampler.load(step) for step in range(sampler.num_steps))
    assert (
        loads.sound_units.max()
        <= limits.sound_units
        < fullest_load(lengths, replace(limits, sound_units=None)).sound_units / 2
    )
    line = describe(sampler, None, "ddp", BATCHES)
    assert f"{limits.llm_tokens} tokens and {limits.sound_units} sound units, " in line
    # Limits that are given, or those of padded batches, get none.
    given = fit_step(lengths, 64, batch_size=8, num_replicas=4, most=PackLimits(30, 1500))
    padded = fit_step(lengths, 64, batch_size=8, num_replicas=4, padded=True)
    assert (given.limits.sound_units, padded.limits.sound_units) == (None, None)
    most = PackLimits(30, 1500, sound_units=900)
    assert 0 < fit_step(lengths, 64, batch_size=8, num_replicas=4, most=most).limits.sound_units <= 900


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
    fit = partial(fit_step, LENGTHS, 64, batch_size=8, num_replicas=4)
    limits = fit().limits

    def memory(gib):
        return RankMemory(profile, "zero2", Cluster.of({**ONE_NODE, "memory_bytes": gib * 2**30}), "none")

    needed = memory(80.0).peak_bytes(fullest_load(LENGTHS, limits)) / 2**30
    assert fit(memory=memory(needed)).limits == limits
    state = memory(80.0).state_bytes / 2**30
    size, samples = sized(LENGTHS, 64, batch_size=8, memory=memory((needed + state) / 2))
    less = size.limits
    assert samples == pytest.approx(64, rel=KEPT)
    assert size.micro_batches > 2
    assert memory(80.0).peak_bytes(fullest_load(LENGTHS, less)) / 2**30 <= (needed + state) / 2
    assert less.llm_tokens < limits.llm_tokens
    with pytest.raises(InfeasibleError, match=r"memory must hold the largest sample \(5 vision units, .* too little"):
        fit(memory=memory(state))
