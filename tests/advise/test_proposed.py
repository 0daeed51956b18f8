import numpy as np
import pytest

from omnibal.advise.estimate import Recipe, Scenario
from omnibal.advise.models import Model
from omnibal.advise.paste import propose
from omnibal.cluster import Cluster
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.step_size import samples_made
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
    return scenario.estimate(Recipe("zero3", "even", batch, micro_batches))


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("make", [tiled_lengths, patch_lengths, long_tail])
def test_the_planner_makes_the_steps_that_are_said(make, ranks):
    whole = make(20_000)
    part = whole.take(np.random.default_rng(0).permutation(len(whole))[:4000])
    estimate = even(part, ranks, 4, 2)
    proposal = propose(estimate, part)
    epoch = arrange_epoch(whole, proposal.limits, num_replicas=ranks, micro_batches=2)
    assert proposal.samples_per_step == pytest.approx(estimate.samples_per_step, rel=0.01)
    # steps are whole, and a part of the samples differs from all by chance
    assert len(whole) / epoch.num_steps == pytest.approx(estimate.samples_per_step, rel=0.035)


@pytest.mark.parametrize("limits", [PackLimits(16_000, 4416), PackLimits(6000, 2000)])
def test_samples_of_a_step_are_counted_as_the_planner_sizes_epochs(limits):
    lengths = long_tail(20_000)
    made = samples_made(lengths, limits, 64, num_samples=len(lengths))
    epoch = arrange_epoch(lengths, limits, num_replicas=64)
    assert made == pytest.approx(len(lengths) / epoch.num_steps, rel=0.03)


def test_limits_are_no_trap_and_hold_at_least_half_of_the_samples():
    lengths = SampleLengths([5] * 300 + [3] * 300, [1300] * 300 + [800] * 300)
    found = propose(even(lengths, 8, 2, 4), lengths)
    assert (found.oversized, found.limits.vision_units >= 5) == (0, True)
    assert found.limits.vision_units != 9  # holds a 5 and a 3, and wastes what is left
    assert propose(even(lengths, 8, 1, 4), lengths, holds_all=True).oversized == 0
    single = propose(even(lengths, 8, 1, 4), lengths)
    assert single.oversized <= 0.5
