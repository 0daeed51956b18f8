from dataclasses import replace

import pytest

from omnibal.advise.changes import advise
from omnibal.advise.estimate import Recipe, Scenario, what_fits
from omnibal.advise.layouts import weigh_layouts
from omnibal.advise.models import Model, adapted_profile
from omnibal.cluster import Cluster
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import fullest_load
from omnibal.errors import ConfigError, InfeasibleError
from omnibal.profile.counted import analytic_profile
from tools.synthetic import tiled_lengths

EIGHT = Cluster.parse("8xA100-80GB")
RECORDS = Model.known("InternVL3-8B").records
WHOLE, ADAPTED = analytic_profile(RECORDS, EIGHT.device), adapted_profile(RECORDS, EIGHT.device, rank=16)
MIX = tiled_lengths(1000, seed=1)


def scenario(per_rank=32, *, lengths=MIX, adapted=ADAPTED, cluster=EIGHT):
    return Scenario(lengths, WHOLE, cluster, cluster.num_devices * per_rank, adapted=adapted)


def test_nothing_is_needed_where_it_fits():
    assert what_fits(scenario().estimate(Recipe("zero3", "random", 4, 8))) == ()


def test_the_least_change_of_each_kind_is_named():
    whole = scenario().estimate(Recipe("ddp", "random", 4, 8))
    assert what_fits(whole) == ("zero1 in place of ddp", "LoRA of rank 16")
    assert what_fits(scenario(adapted=None).estimate(Recipe("ddp", "random", 4, 8))) == ("zero1 in place of ddp",)
    plain = scenario(64).estimate(Recipe("zero3", "random", 8, 8, "none"))
    assert what_fits(plain) == ("gradient checkpointing", "batch 2, accumulation 32")
    recipes = [Recipe("zero3", "random", batch, 64 // batch, "none") for batch in (2, 4)]
    assert [scenario(64).estimate(recipe).fits for recipe in recipes] == [True, False]


def test_several_together_where_none_suffices_and_nothing_where_not_even_all():
    tight = Recipe("zero2", "random", 16, 1, "none")

    def helps(gib):
        return what_fits(scenario(16, cluster=replace(EIGHT, memory_bytes=gib * 2**30)).estimate(tight))

    smallest = "gradient checkpointing together with batch 1, accumulation 16 together with zero3 in place of zero2"
    assert helps(40) == ("gradient checkpointing together with batch 1, accumulation 16",)
    assert helps(28) == (smallest,)
    assert helps(24) == (f"{smallest} together with LoRA of rank 16",)
    assert helps(4) == ()


def test_the_refusal_says_what_would_fit():
    with pytest.raises(InfeasibleError, match=r"which is wrong: .*; what would fit: zero1 in place of ddp, or LoRA"):
        advise(scenario(), Recipe("ddp", "random", 4, 8))


def test_packs_are_no_larger_than_memory_allows():
    # of the longest sample a pack of 8 has room for two; no more of them fit
    lengths = SampleLengths([12] * 30 + [1] * 970, [12_000] * 30 + [900] * 970)
    small = replace(EIGHT, memory_bytes=52 * 2**30)
    advice = advise(scenario(16, lengths=lengths, cluster=small), Recipe("zero3", "random", 2, 8))
    balance = next(change for change in advice.changes if change.name == "balanced packs")
    assert balance.factor is not None
    assert advice.after.fits


def test_even_packs_fit_where_the_fullest_that_their_limits_allow_does():
    one = replace(Cluster.parse("A100-80GB"), memory_bytes=400 * 2**30)
    asked = scenario(16, cluster=one)
    found = asked.estimate(asked.packed(Recipe("ddp", "random", 4, 4, "none")))
    most = float(found.memory.peak_bytes(fullest_load(MIX, found.recipe.limits)))
    assert found.peaks[0] == most
    assert max(float(found.memory.peak_bytes(batches.loads).max()) for batches in found.batches) < most
    fits = [
        scenario(16, cluster=replace(one, memory_bytes=int(share * most))).estimate(found.recipe).fits
        for share in (1.07, 1.05)
    ]
    assert fits == [True, False]  # 6 % stay free


def test_packs_shrink_until_they_fit():
    """``balance`` searches limits in the memory that devices have."""
    one = replace(Cluster.parse("A100-80GB"), memory_bytes=400 * 2**30)
    whole = scenario(16, cluster=one).packed(Recipe("ddp", "random", 16, 1, "none"))
    assert whole.micro_batches == 1
    tight = scenario(16, cluster=replace(one, memory_bytes=230 * 2**30))
    found = tight.estimate(tight.packed(Recipe("ddp", "random", 16, 1, "none")))
    assert found.fits and found.recipe.micro_batches > 1


def test_one_pack_of_a_rank_holds_no_more_samples_for_one_that_is_large():
    lengths = SampleLengths([8] * 100 + [1] * 900, [2400] * 100 + [300] * 900)
    advice = advise(scenario(2, lengths=lengths), Recipe("zero3", "random", 2, 1))
    assert advice.after.samples_per_step == pytest.approx(advice.today.samples_per_step, rel=0.1)


def test_one_device_and_a_step_of_few_samples_are_refused():
    with pytest.raises(ConfigError, match="cluster must have at least 2 devices for layouts to differ, got A100-80GB"):
        weigh_layouts(scenario(cluster=Cluster.parse("A100-80GB")), None)
    with pytest.raises(ConfigError, match="the 8 devices of 8xA100-80GB for layouts to be weighed, got 7; take more"):
        weigh_layouts(replace(scenario(), samples_per_step=7), None)
