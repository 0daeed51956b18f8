from dataclasses import replace

import numpy as np
import pytest

from omnibal.advise.batches import Batches
from omnibal.advise.changes import advise
from omnibal.advise.estimate import CAUSES, STARTING, Recipe, Scenario, Speedup
from omnibal.advise.memory import LOGIT_BYTES, RankMemory
from omnibal.advise.models import Model, adapted_profile
from omnibal.advise.wait import bandwidth, exposed_seconds, host_seconds, phase_seconds
from omnibal.cluster import Cluster, Layout
from omnibal.cost import Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.step_size import KEPT
from omnibal.errors import InfeasibleError
from omnibal.memory.footprint import Footprint
from omnibal.pipeline.schedule import one_f_one_b
from omnibal.profile.counted import analytic_profile
from tools.synthetic import tiled_lengths

EIGHT = Cluster.parse("8xA100-80GB")
RECORDS = Model.known("InternVL3-8B").records
WHOLE = analytic_profile(RECORDS, EIGHT.device)
MIX = tiled_lengths(1000, seed=1)
ALIKE = SampleLengths([3] * 50, [1000] * 50)


def scenario(lengths=MIX, profile=WHOLE, cluster=EIGHT, per_rank=32):
    return Scenario(lengths, profile, cluster, cluster.num_devices * per_rank)


def test_shares_are_of_all_time_and_even_samples_wait_for_nobody():
    found = scenario(ALIKE).estimate(Recipe("zero3", "random", 4, 8, "none")).shares
    assert tuple(found) == CAUSES
    assert sum(found.values()) == pytest.approx(1)
    assert found["useful"] == pytest.approx(1, abs=0.01)
    mixed = scenario().estimate(Recipe("zero3", "random", 4, 8, "full"))
    assert all(share >= 0 for share in mixed.shares.values())
    assert mixed.shares["padding"] > 0.1 < mixed.shares["waiting for others' LLM"]
    # a forward pass of three, of what is not waited for
    run = 1 - sum(mixed.shares[cause] for cause in CAUSES if cause.startswith("waiting"))
    assert mixed.shares["recomputation"] / run == pytest.approx(1 / 4, abs=0.03)


def test_small_micro_batches_wait_for_their_host():
    """By operations alone a hundred words take a few milliseconds, and starting those of 48 blocks many more."""
    profile = analytic_profile(Model.known("InternVL3-1B").records, EIGHT.device)
    words = SampleLengths([0] * 50, [100] * 50)
    few, many = (
        scenario(words, profile, per_rank=128).estimate(Recipe("ddp", batch=batch, micro_batches=128 // batch))
        for batch in (1, 128)
    )
    host = host_seconds(profile, recompute="full")
    assert float(few.sample_seconds.mean()) == pytest.approx(host, rel=0.02)  # the update is beside it
    assert few.shares[STARTING] > 0.9 and many.shares[STARTING] == 0
    assert sum(few.shares.values()) == pytest.approx(1)
    assert few.shares["useful"] * few.sample_seconds.mean() == pytest.approx(
        many.shares["useful"] * many.sample_seconds.mean(), rel=0.01
    )
    assert few.samples_per_second < many.samples_per_second / 10


@pytest.mark.parametrize("versions", [{}, {"torch": "2.13"}], ids=["computed costs", "measured costs"])
def test_packs_without_samples_take_no_phase_any_time(versions):
    """Eight samples in sixteen packs."""
    few = scenario(SampleLengths([1] * 50, [300] * 50), replace(WHOLE, versions=versions), per_rank=1)
    found = few.estimate(Recipe("ddp"))
    filled = np.tile([1.0, 0.0], (1, 8, 1))
    with_empty = Load(filled, 300 * filled, 9e4 * filled)
    found = replace(found, batches=(Batches(with_empty, with_empty, 8.0),))
    assert np.isfinite(found.spent).all() and sum(found.shares.values()) == pytest.approx(1)


def test_flash_attention_takes_no_time_for_padding():
    padded, varlen = (
        replace(scenario(), masks=masks).estimate(Recipe("zero3", "random", 4, 8)) for masks in (True, False)
    )
    real = replace(varlen, batches=tuple(replace(each, loads=each.real) for each in varlen.batches))
    seconds = [float(found.sample_seconds.mean()) for found in (real, varlen, padded)]
    assert seconds == sorted(seconds) and seconds[1] < 0.95 * seconds[2]


def test_ranks_wait_most_where_they_meet_most():
    shares = [scenario().estimate(Recipe(sharding, "random", 4, 8)).shares for sharding in ("ddp", "zero2", "zero3")]
    waits = [share["waiting for others' ViT"] + share["waiting for others' LLM"] for share in shares]
    assert waits == sorted(waits)
    assert waits[0] < 0.6 * waits[2]


def changes_of(advice, *, is_setting=False):
    return {change.name: change for change in advice.changes if change.is_setting == is_setting}


def test_padding_and_waits_go_where_packs_are_even():
    advice = advise(scenario(), Recipe("zero3", "random", 4, 8))
    assert changes_of(advice)["no padding"].brings
    assert changes_of(advice)["balanced packs"].brings
    assert changes_of(advice, is_setting=True)["recompute"].factor == pytest.approx(4 / 3, abs=0.05)  # but for the head
    assert advice.after.shares["padding"] == 0
    assert advice.after.shares["useful"] > 0.95
    # the same samples in fewer seconds, of which each cause had its part
    assert advice.whole.factor == pytest.approx(
        float(advice.today.sample_seconds.mean() / advice.after.sample_seconds.mean()), rel=0.02
    )


def test_what_the_trainer_has_by_a_setting_is_no_gain_of_packs():
    plain = advise(scenario(), Recipe("zero3", "random", 4, 8))
    offered = advise(
        replace(scenario(), offered=("group_by_length", "batch_rebalance")), Recipe("zero3", "random", 4, 8)
    )
    grouped = changes_of(offered, is_setting=True)["group_by_length"]
    assert grouped.brings
    assert offered.settings.factor > 1.5 * plain.settings.factor
    assert offered.beyond.factor < plain.beyond.factor / 1.5
    today, settled = (offered.today.sample_seconds, offered.settled.sample_seconds)
    assert offered.settings.factor == pytest.approx(float((today / settled).mean()))
    # whoever trains so already is told of no gain from it
    again = advise(replace(scenario(), offered=("group_by_length",)), offered.settled.recipe)
    assert "group_by_length" not in changes_of(again, is_setting=True)
    assert again.settings.factor == 1
    assert again.whole.factor == pytest.approx(again.beyond.factor)
    assert again.beyond.factor == pytest.approx(offered.beyond.factor, rel=0.03)


def test_packs_free_as_many_layers_as_fit_where_no_setting_frees_all():
    asked = scenario(cluster=Cluster.parse("8xA100-40GB"), per_rank=16)
    today = Recipe("zero3", "random", 4, 4)
    filled, whole = (advise(replace(asked, fills=fills), today) for fills in (True, False))
    assert changes_of(whole)["recompute"].after is None  # switched off for all layers it does not fit
    found = changes_of(filled)["recompute"].after
    assert changes_of(filled)["recompute"].detail.startswith(f"{found.recipe.recompute.count('full')} of 52 layers")
    assert 0 < found.recipe.recompute.count("full") < 52
    assert found.fits and found.peaks[0] > whole.after.peaks[0]
    assert 0 < found.shares["recomputation"] < 0.7 * whole.after.shares["recomputation"]
    assert found.sample_seconds.mean() < 0.95 * whole.after.sample_seconds.mean()
    assert found.filled().recipe == found.recipe  # none recomputes that need not


def test_settings_end_alike_wherever_a_trainer_begins():
    """Batches by length bring nothing while batches are small, and much once another setting has made them larger."""
    lengths = tiled_lengths(1_000, seed=3)
    offered = ("group_by_length", "batch_rebalance")
    found = [
        advise(replace(scenario(lengths, per_rank=16), offered=offered), Recipe("zero3", "random", batch, 16 // batch))
        for batch in (1, 4, 16)
    ]
    seconds = [float(advice.settled.sample_seconds.mean()) for advice in found]
    assert max(seconds) < 1.05 * min(seconds)
    for advice in found:
        names = [change.name for change in advice.changes if change.is_setting]
        assert len(names) == len(set(names))  # one line for each
        batchings = [change for change in advice.adopted if change.name in offered]
        assert [change.name for change in batchings] in ([], [advice.settled.recipe.batching])


def test_packs_that_lose_by_themselves_are_part_of_the_gain_with_balance():
    """One micro-batch of unlike ranks: random packs wait longer than batches by length, even packs do not."""
    advice = advise(scenario(), Recipe("zero3", "group_by_length", 4, 8, "none"))
    packing, balance = (changes_of(advice)[name].factor for name in ("no padding", "balanced packs"))
    assert packing < 0.9
    assert balance > 1.2
    assert advice.beyond.factor <= packing * balance * 1.03


@pytest.mark.parametrize("batching", ["random", "group_by_length", "batch_rebalance", "flattened"])
def test_every_way_is_compared_at_todays_samples_a_step(batching):
    found = replace(scenario(per_rank=8), offered=("group_by_length", "batch_rebalance", "flattened"))
    advice = advise(found, Recipe("zero3", batching, 2, 4))
    compared = [
        advice.today,
        advice.settled,
        advice.after,
        *(change.after for change in advice.changes if change.after),
    ]
    packs = [estimate for estimate in compared if estimate.recipe.batching == "even"]
    assert {estimate.samples_per_step for estimate in compared if estimate not in packs} == {64}
    assert [estimate.samples_per_step for estimate in packs] == pytest.approx([64] * len(packs), rel=KEPT)


def test_larger_batches_and_no_checkpointing_come_before_packs():
    few = SampleLengths([1] * 1000, [300 + 40 * (n % 3) for n in range(1000)])
    advice = advise(scenario(few, per_rank=32), Recipe("zero3", "random", 1, 32))
    assert changes_of(advice, is_setting=True)["recompute"].brings
    slow = replace(EIGHT, device=replace(EIGHT.device, link_bytes_per_second=1e10))
    advice = advise(scenario(few, cluster=slow), Recipe("zero3", "random", 1, 32))
    batch = changes_of(advice, is_setting=True)["batch"]
    assert batch.brings
    assert batch.after.recipe.batch > 4
    assert advice.settled.recipe.batching == "random"


def test_few_samples_tell_little():
    recipe = Recipe("zero3", "random", 4, 8)
    three = advise(scenario(MIX.take([0, 1, 2])), recipe)
    thousand = advise(scenario(), recipe)
    assert three.adopted == ()
    assert min(change.gain.error for change in three.changes if change.gain) > 0.7
    assert min(change.gain.error for change in thousand.changes if change.gain) < 0.04


def test_what_is_likely_spans_what_was_measured_and_published():
    # tools/gpu/RESULTS.md, InternVL3-8B; tools/paper/RESULTS.md, table 2, 6+34B.
    assert Speedup(1.57).likely[1] == pytest.approx(1.9, abs=0.01)
    assert Speedup(2.09).likely[0] == pytest.approx(1.53, abs=0.01)
    assert Speedup(1.0, error=0.03).likely == pytest.approx((0.97, 1.03), abs=0.001)


def test_fewer_packs_pay_where_ranks_mostly_gather_parameters():
    cluster, model = Cluster.parse("8xRTX4090"), Model.known("Qwen2.5-VL-7B")
    profile = adapted_profile(model.records, cluster.device, rank=8)
    lengths = SampleLengths([1200] * 200, np.random.default_rng(0).integers(350, 750, 200))
    advice = advise(scenario(lengths, profile, cluster, per_rank=8), Recipe("zero3", "random", 1, 8))
    by_name = changes_of(advice)
    assert advice.today.shares["communication"] > 0.4
    batch = changes_of(advice, is_setting=True)["batch"]
    assert (batch.brings, batch.detail) == (True, "batch 4, accumulation 2")
    assert by_name["no padding"].brings
    assert advice.beyond.factor < advice.settings.factor
    assert (advice.after.recipe.batching, advice.after.recipe.micro_batches) == ("even", 1)


def test_a_head_on_target_rows_takes_the_time_of_those_and_never_all_logits():
    few = SampleLengths([3] * 1000, [1000] * 1000, target_tokens=[100] * 1000)
    spared = replace(scenario(few), spares_rows=True)
    advice = advise(replace(spared, offered=("head",)), Recipe("zero3", "random", 4, 8, "none"))
    head = changes_of(advice, is_setting=True)["head"]
    seconds = [sum(phase_seconds(WHOLE, load).values()) for load in (Load(3, 1000, 1e6), Load(3, 1000, 1e6, 0, 100))]
    assert (head.name, head.brings) == ("head", True)
    assert head.factor == pytest.approx(seconds[0] / seconds[1], rel=0.01)
    assert not advice.takes_packs  # which would bring no more
    assert changes_of(advice)["no padding"].factor == pytest.approx(1, abs=0.01)
    with_packs = advise(spared, advice.today.recipe)  # where nothing but the drop-in brings it
    assert changes_of(with_packs)["head"].factor == pytest.approx(head.factor)
    assert (with_packs.after.recipe.batching, with_packs.after.recipe.target_rows) == ("even", True)
    assert advice.today.shares["useful"] == pytest.approx(1, abs=0.01)
    logits = LOGIT_BYTES * 4000 * RECORDS[-1].sizes["vocab"]
    assert advice.today.peaks[0] - head.after.peaks[0] > 0.9 * logits
    assert advise(scenario(few), advice.today.recipe).adopted == ()


def test_leave_it_as_it_is_is_an_answer():
    advice = advise(scenario(ALIKE), Recipe("zero3", "random", 4, 8, "none"))
    assert advice.adopted == ()
    assert advice.after is advice.today
    assert advice.whole.factor == 1


def test_a_present_way_that_could_not_run_is_refused():
    message = r"the present batch must fit a device's 79.25 GiB, got 1\d\d.\d\d GiB on the mean rank .* which is wrong"
    with pytest.raises(InfeasibleError, match=message):
        advise(scenario(), Recipe("ddp", "random", 4, 8))


def test_memory_of_one_device_is_about_that_of_a_pipeline_of_one_stage():
    cluster = Cluster.parse("A100-80GB")
    profile = adapted_profile(RECORDS, cluster.device, rank=16)  # with little to update, which ours leaves out
    load = Load(9, 4096, 4e6)
    for level in ("none", "full"):
        ours = RankMemory(profile, "zero1", cluster, level)
        footprint = Footprint(profile, load, one_f_one_b(1, 1), Layout(accumulate_float32=False))
        theirs = footprint.stage(0, range(len(profile.layers)), (level,) * len(profile.layers))
        state = theirs.parameters + theirs.gradients + theirs.optimizer + theirs.overhead
        assert ours.state_bytes == pytest.approx(state, rel=0.01)
        held = ours.peak_bytes(load) - ours.state_bytes
        logits = LOGIT_BYTES * 4096 * RECORDS[-1].sizes["vocab"]  # which the pipeline never has
        assert held == pytest.approx(theirs.activations + max(theirs.transient, logits), rel=0.15)


def test_ranks_share_state_by_the_stage():
    states = [RankMemory(WHOLE, sharding, EIGHT, "full").state_bytes for sharding in ("ddp", "zero1", "zero2", "zero3")]
    assert states == sorted(states, reverse=True)
    adapted = adapted_profile(RECORDS, EIGHT.device, rank=16)
    frozen = sum(layer.parameter_bytes for layer in adapted.layers)
    assert RankMemory(adapted, "ddp", EIGHT, "full").state_bytes < 1.1 * frozen + EIGHT.overhead_bytes


def test_communication_shows_only_beyond_what_it_runs_beside():
    costs = {phase: np.full((2, 8, 3), 1.0) for phase in (
        "vision forward", "language forward", "language backward", "vision backward")}  # fmt: skip
    for sharding in ("ddp", "zero1", "zero2", "zero3"):
        assert exposed_seconds(WHOLE, sharding, EIGHT, costs).max() < 0.06 / 0.75
    slow = replace(EIGHT, device=replace(EIGHT.device, link_bytes_per_second=1e9 / 0.75))
    gathered = 7 / 8 * sum(layer.parameter_bytes for layer in WHOLE.layers) / 1e9
    trained = 7 / 8 * sum(layer.gradient_bytes for layer in WHOLE.layers) / 1e9
    phases = exposed_seconds(WHOLE, "zero3", slow, costs)
    # of three micro-batches: language in both passes; the small ViT is gathered beside its own pass
    assert phases[0] == pytest.approx(3 * (2 * gathered + trained), rel=0.15)
    assert exposed_seconds(WHOLE, "ddp", slow, costs)[0] == pytest.approx(2 * trained - 2)
    assert exposed_seconds(WHOLE, "zero2", slow, costs)[0] == pytest.approx(3 * (trained - 2) + trained)
    assert bandwidth(Cluster.parse("2x8xA100-80GB")) == 0.75 * 8 * 25e9
