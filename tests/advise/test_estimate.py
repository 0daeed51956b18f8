from dataclasses import replace

import numpy as np
import pytest

from omnibal.advise.changes import advise, proposed_limits
from omnibal.advise.communication import bandwidth, exposed_seconds
from omnibal.advise.costs import adapted_profile, phase_seconds
from omnibal.advise.estimate import CAUSES, Setting, Way
from omnibal.advise.memory import LOGIT_BYTES, RankMemory
from omnibal.advise.models import Model
from omnibal.cluster import Cluster, Layout
from omnibal.cost import Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.synthetic import tiled_lengths
from omnibal.errors import InfeasibleError
from omnibal.memory.footprint import Footprint
from omnibal.pipeline.schedule import one_f_one_b
from omnibal.profile.counted import analytic_profile

EIGHT = Cluster.parse("8xA100-80GB")
RECORDS = Model.known("InternVL3-8B").records
WHOLE = analytic_profile(RECORDS, EIGHT.device)
MIX = tiled_lengths(1000, seed=1)
ALIKE = SampleLengths([3] * 50, [1000] * 50)


def setting(lengths=MIX, profile=WHOLE, cluster=EIGHT, per_rank=32):
    return Setting(lengths, profile, cluster, cluster.num_devices * per_rank)


def test_shares_are_of_all_time_and_even_samples_wait_for_nobody():
    found = setting(ALIKE).estimate(Way("zero3", "random", 4, 8, "none")).shares
    assert tuple(found) == CAUSES
    assert sum(found.values()) == pytest.approx(1)
    assert found["useful"] == pytest.approx(1, abs=0.01)
    mixed = setting().estimate(Way("zero3", "random", 4, 8, "full"))
    assert all(share >= 0 for share in mixed.shares.values())
    assert mixed.shares["padding"] > 0.1 < mixed.shares["waiting for others' LLM"]
    # a forward pass of three, of what is not waited for
    run = 1 - sum(mixed.shares[cause] for cause in CAUSES if cause.startswith("waiting"))
    assert mixed.shares["recomputation"] / run == pytest.approx(1 / 4, abs=0.03)


def test_ranks_wait_most_where_they_meet_most():
    shares = [setting().estimate(Way(trainer, "random", 4, 8)).shares for trainer in ("ddp", "zero2", "zero3")]
    waits = [share["waiting for others' ViT"] + share["waiting for others' LLM"] for share in shares]
    assert waits == sorted(waits)
    assert waits[0] < 0.6 * waits[2]


def test_padding_and_waits_go_where_packs_are_even():
    advice = advise(setting(), Way("zero3", "random", 4, 8))
    by_name = {change.name: change for change in advice.changes}
    assert by_name["packing"].brings
    assert by_name["balance"].brings
    assert by_name["recompute"].factor == pytest.approx(4 / 3, abs=0.04)  # but for the head
    assert advice.after.shares["padding"] == 0
    assert advice.after.shares["useful"] > 0.95
    # the same samples in fewer seconds, of which each cause had its part
    assert advice.factor == pytest.approx(
        float(advice.today.sample_seconds.mean() / advice.after.sample_seconds.mean()), rel=0.02
    )


def test_fewer_packs_pay_where_ranks_mostly_gather_parameters():
    cluster, model = Cluster.parse("8xRTX4090"), Model.known("Qwen2.5-VL-7B")
    profile = adapted_profile(model.records, cluster.device, rank=8)
    lengths = SampleLengths([1200] * 200, np.random.default_rng(0).integers(350, 750, 200))
    advice = advise(setting(lengths, profile, cluster, per_rank=8), Way("zero3", "random", 1, 8))
    by_name = {change.name: change for change in advice.changes}
    assert advice.today.shares["communication"] > 0.4
    assert not by_name["packing"].brings
    assert not by_name["balance"].brings
    assert by_name["limits"].factor > 2
    assert by_name["limits"].detail == "2 even packs of a rank in a step"
    assert (advice.after.way.batching, advice.after.way.micro_batches) == ("even", 2)


def test_a_head_on_target_rows_takes_the_time_of_those_and_never_all_logits():
    few = SampleLengths([3] * 50, [1000] * 50, target_tokens=[100] * 50)
    advice = advise(replace(setting(few), spares_rows=True), Way("zero3", "random", 4, 8, "none"))
    head, packing = advice.changes[:2]
    seconds = [sum(phase_seconds(WHOLE, load).values()) for load in (Load(3, 1000, 1e6), Load(3, 1000, 1e6, 0, 100))]
    assert (head.name, head.brings) == ("head", True)
    assert head.factor == pytest.approx(seconds[0] / seconds[1], rel=0.01)
    assert packing.factor == pytest.approx(1, abs=0.01)
    assert advice.after.way.batching == "even"  # the drop-in brings both
    assert advice.today.shares["useful"] == pytest.approx(1, abs=0.01)
    logits = LOGIT_BYTES * 4000 * RECORDS[-1].sizes["vocab"]
    assert advice.today.peaks[0] - head.after.peaks[0] > 0.9 * logits
    assert advise(setting(few), advice.today.way).adopted == ()


def test_leave_it_as_it_is_is_an_answer():
    advice = advise(setting(ALIKE), Way("zero3", "random", 4, 8, "none"))
    assert advice.adopted == ()
    assert advice.after is advice.today
    assert advice.factor == 1


def test_a_present_way_that_could_not_run_is_refused():
    message = r"the present batch must fit a device's 79.25 GiB, got 1\d\d.\d\d GiB on the mean rank .* which is wrong"
    with pytest.raises(InfeasibleError, match=message):
        advise(setting(), Way("ddp", "random", 4, 8))


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
    states = [RankMemory(WHOLE, trainer, EIGHT, "full").state_bytes for trainer in ("ddp", "zero1", "zero2", "zero3")]
    assert states == sorted(states, reverse=True)
    adapted = adapted_profile(RECORDS, EIGHT.device, rank=16)
    frozen = sum(layer.parameter_bytes for layer in adapted.layers)
    assert RankMemory(adapted, "ddp", EIGHT, "full").state_bytes < 1.1 * frozen + EIGHT.overhead_bytes


def test_communication_shows_only_beyond_what_it_runs_beside():
    costs = {phase: np.full((2, 8, 3), 1.0) for phase in (
        "vision forward", "language forward", "language backward", "vision backward")}  # fmt: skip
    for trainer in ("ddp", "zero1", "zero2", "zero3"):
        assert exposed_seconds(WHOLE, trainer, EIGHT, costs).max() < 0.06
    slow = replace(EIGHT, device=replace(EIGHT.device, link_bytes_per_second=1e9))
    gathered = 7 / 8 * sum(layer.parameter_bytes for layer in WHOLE.layers) / 1e9
    trained = 7 / 8 * sum(layer.gradient_bytes for layer in WHOLE.layers) / 1e9
    phases = exposed_seconds(WHOLE, "zero3", slow, costs)
    # of three micro-batches: language in both passes; the small ViT is gathered beside its own pass
    assert phases[0] == pytest.approx(3 * (2 * gathered + trained), rel=0.15)
    assert exposed_seconds(WHOLE, "ddp", slow, costs)[0] == pytest.approx(2 * trained - 2)
    assert exposed_seconds(WHOLE, "zero2", slow, costs)[0] == pytest.approx(3 * (trained - 2) + trained)
    assert bandwidth(Cluster.parse("2x8xA100-80GB")) == 8 * 25e9


def test_limits_hold_every_sample_and_are_no_trap():
    lengths = SampleLengths([5] * 300 + [3] * 300, [1300] * 300 + [800] * 300)
    found = setting(lengths, per_rank=8)
    even = found.estimate(Way("zero3", "even", 2, 4, "none"))
    limits = proposed_limits(even, lengths)
    assert limits.vision_units >= 5
    assert limits.llm_tokens % 64 == 0
    assert limits.vision_units != 9  # holds a 5 and a 3, and wastes what is left
