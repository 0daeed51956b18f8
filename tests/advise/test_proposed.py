from dataclasses import replace

import numpy as np
import pytest

from omnibal.advise.estimate import Recipe, Scenario
from omnibal.advise.models import Model
from omnibal.advise.paste import propose
from omnibal.cluster import Cluster
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.step_size import KEPT, fit_step, limits_of_step, samples_made
from omnibal.profile.counted import analytic_profile
from tools.synthetic import patch_lengths, tiled_lengths

PROFILE = analytic_profile(Model.known("InternVL3-8B").records, Cluster.parse("8xA100-80GB").device)


def long_tail(count):
    """Most samples have a few hundred patches, some tens of thousands."""
    generator = np.random.default_rng(5)
    patches = np.minimum(generator.pareto(1.6, count) * 200 + 200, 16_000).astype(int) // 4 * 4
    return SampleLengths(patches, patches // 4 + generator.integers(50, 400, count))


def even(lengths, ranks, batch, micro_batches):
    cluster = Cluster.parse(f"{ranks // 8}x8xA100-80GB")
    scenario = Scenario(lengths, PROFILE, cluster, ranks * batch * micro_batches)
    return scenario.estimate(scenario.packed(Recipe("zero3", "random", batch, micro_batches)))


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("make", [tiled_lengths, patch_lengths, long_tail])
def test_the_planner_makes_the_steps_that_are_said(make, ranks):
    whole = make(20_000)
    part = whole.take(np.random.default_rng(0).permutation(len(whole))[:4000])
    estimate = even(part, ranks, 4, 2)
    proposal, recipe = propose(estimate), estimate.recipe
    epoch = arrange_epoch(whole, recipe.limits, num_replicas=ranks, micro_batches=recipe.micro_batches)
    assert proposal.samples_per_step == pytest.approx(ranks * 8, rel=KEPT)
    assert estimate.samples_per_step == pytest.approx(proposal.samples_per_step, rel=0.04)
    # steps are whole, and a part of the samples differs from all by chance
    assert len(whole) / epoch.num_steps == pytest.approx(proposal.samples_per_step, rel=0.07)


def test_of_all_samples_the_packs_are_those_that_balance_finds():
    lengths = tiled_lengths(5000)
    scenario = replace(even(lengths, 8, 4, 2).scenario, is_whole=True)
    found = scenario.packed(Recipe("zero3", "random", 4, 2))
    memory = scenario.memory(found).with_margin
    size = fit_step(lengths, 64, batch_size=4, num_replicas=8, memory=memory)
    assert (found.limits, found.micro_batches) == (size.limits, size.micro_batches)


@pytest.mark.parametrize("limits", [PackLimits(16_000, 4416), PackLimits(6000, 2000)])
def test_samples_of_a_step_are_counted_as_the_planner_sizes_epochs(limits):
    lengths = long_tail(20_000)
    epoch = arrange_epoch(lengths, limits, num_replicas=64)
    assert samples_made(lengths, limits, 64) == pytest.approx(len(lengths) / epoch.num_steps, rel=0.035)


@pytest.mark.parametrize("make", [tiled_lengths, patch_lengths, long_tail])
@pytest.mark.parametrize("packs", [8, 64])
def test_limits_of_a_step_hold_its_samples_in_so_many_packs(make, packs):
    lengths = make(20_000)
    limits = limits_of_step(lengths, 256, packs)
    assert samples_made(lengths, limits, packs) == pytest.approx(256, rel=0.01)


def test_limits_of_a_step_are_no_trap_and_hold_at_least_half_of_the_samples():
    lengths = SampleLengths([5] * 300 + [3] * 300, [1300] * 300 + [800] * 300)
    several, single = limits_of_step(lengths, 64, 32), limits_of_step(lengths, 32, 32)
    assert len(several.oversized(lengths)) == 0
    assert several.vision_units != 9  # holds a 5 and a 3, and wastes what is left
    assert len(single.oversized(lengths)) <= 300


@pytest.mark.parametrize("ranks", [128, 512])
def test_no_more_packs_than_batches_where_a_few_samples_are_very_large(ranks):
    """Where ranks meet in each pack, three with a large sample each take 1.7 times as long as one."""
    tiles = np.maximum(np.random.default_rng(0).lognormal(1.44, 0.83, 60_000).round(), 1).astype(int)
    lengths = SampleLengths(tiles, tiles * 256 + 150)
    size = fit_step(lengths, 4 * ranks, batch_size=4, num_replicas=ranks)
    epoch = arrange_epoch(lengths, size.limits, num_replicas=ranks, micro_batches=size.micro_batches)
    assert size.micro_batches == 1
    assert len(lengths) / epoch.num_steps == pytest.approx(4 * ranks, rel=KEPT)
