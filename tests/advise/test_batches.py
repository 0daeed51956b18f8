import numpy as np
import pytest
from transformers.trainer_pt_utils import BatchRebalanceSampler

from omnibal.advise.batches import Samples, even_packs, padded_batches, random_packs
from omnibal.advise.wait import phase_seconds, wait
from omnibal.cost import Load
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.device import DEVICES
from omnibal.profile.counted import analytic_profile
from tests.profile.test_counted import RECORDS
from tools.synthetic import patch_lengths, tiled_lengths

SHAPE = {"num_ranks": 2, "micro_batches": 3}


def sums(load):
    return [getattr(load, name).sum() for name in ("vision_units", "llm_tokens", "llm_tokens_squared")]


def test_padded_batches_are_as_long_as_their_longest_sample():
    samples = Samples(SampleLengths([1, 0, 2, 3], [10, 4, 7, 8]))
    found = padded_batches(samples, batch=2, num_ranks=1, micro_batches=2)
    assert found.loads == Load([[[1, 5]]], [[[20, 16]]], [[[200, 128]]])
    assert found.real == Load([[[1, 5]]], [[[14, 15]]], [[[116, 113]]])
    assert found.samples_per_step == 4
    assert padded_batches(samples, batch=2, num_ranks=1, micro_batches=2, batching="flattened").loads == found.real


def test_padded_rows_take_the_time_of_a_dense_mask():
    samples = Samples(SampleLengths([1, 0, 2, 3], [10, 4, 8, 8]))
    found = padded_batches(samples, batch=2, num_ranks=1, micro_batches=2)
    # Rows of one length need no mask. What costs see but squares stays.
    np.testing.assert_allclose(found.timed().llm_tokens_squared, [[[3.5 * 200, 128]]])
    assert found.timed().llm_tokens.tolist() == found.loads.llm_tokens.tolist() == [[[20, 16]]]
    assert found.timed(masks=False).llm_tokens_squared.tolist() == [[[116, 128]]]
    packs = random_packs(samples, PackLimits(6, 20), num_ranks=1, micro_batches=1)
    assert packs.timed() == packs.loads


def test_padding_is_no_target_and_a_head_on_all_rows_knows_none():
    lengths = SampleLengths([1, 0, 2, 3], [10, 4, 7, 8], target_tokens=[3, 2, 5, 1])
    samples = Samples.draw(lengths, 40, np.random.default_rng(0))
    assert samples.load.target_tokens.sum() < samples.load.llm_tokens.sum()
    shape = {"num_ranks": 2, "micro_batches": 2}
    packed = (
        padded_batches(samples, batch=2, **shape),
        padded_batches(samples, batch=2, batching="group_by_length", **shape),
    )
    for batches in packed:
        assert batches.loads.target_tokens.sum() == samples.load.target_tokens.sum()
    for make in (random_packs, even_packs):
        few = make(samples, PackLimits(6, 20), **shape)
        assert 0 < few.loads.target_tokens.sum() < few.loads.llm_tokens.sum()
    all_rows = padded_batches(samples.all_rows, batch=2, **shape)
    np.testing.assert_array_equal(all_rows.loads.target_tokens, all_rows.loads.llm_tokens)


def test_batches_by_length_go_to_the_ranks_in_turn():
    lengths = SampleLengths([0] * 8, [1, 8, 2, 7, 3, 6, 4, 5])
    found = padded_batches(Samples(lengths), batch=2, num_ranks=2, micro_batches=2, batching="group_by_length")
    assert found.loads.llm_tokens.tolist() == [[[16, 8], [12, 4]]]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(8, 4), (64, 1)])
def test_rebalanced_batches_are_about_those_of_transformers(ranks, micro_batches):
    lengths, per_step = tiled_lengths(1024, seed=1), ranks * micro_batches * 4
    shape = {"num_ranks": ranks, "micro_batches": micro_batches}
    ours = padded_batches(Samples(lengths), batch=4, batching="batch_rebalance", **shape).loads
    tokens = lengths.llm_tokens.tolist()
    theirs = [
        [len(group) * max(tokens[sample] for sample in group) for group in own]
        for own in (
            BatchRebalanceSampler(tokens, per_step, ranks, micro_batches, shuffle=False, rank=rank)
            for rank in range(ranks)
        )
    ]
    theirs = np.array(theirs).reshape(ranks, -1, micro_batches).transpose(1, 0, 2)
    assert ours.llm_tokens.shape == theirs.shape
    assert ours.llm_tokens.sum() == pytest.approx(theirs.sum(), rel=0.02)
    assert ours.llm_tokens.max(axis=1).sum() == pytest.approx(theirs.max(axis=1).sum(), rel=0.1)


def test_even_packs_are_those_of_the_planner():
    lengths, limits = tiled_lengths(4096, seed=2), PackLimits(12, 4096)
    even = even_packs(Samples(lengths), limits, num_ranks=8, micro_batches=2)
    steps = even.loads.shape[0]
    kept = round(even.num_samples)
    epoch = arrange_epoch(lengths.take(np.arange(kept)), limits, num_replicas=8, micro_batches=2)
    assert epoch.num_steps == steps
    np.testing.assert_array_equal(even.loads.llm_tokens, epoch.packs.load(lengths).llm_tokens[epoch.steps])
    # Of a short draw as many samples are left out as do not fill a step: packs are as full as those of an epoch.
    epoch = arrange_epoch(tiled_lengths(100_000, seed=3), limits, num_replicas=8, micro_batches=2)
    assert even.samples_per_step == pytest.approx(100_000 / epoch.num_steps, rel=0.03)
    assert 0.9 * len(lengths) < kept <= len(lengths)


@pytest.mark.parametrize("lengths", [tiled_lengths(600, seed=3), patch_lengths(600, seed=3)])
def test_random_packs_keep_their_limits(lengths):
    limits = PackLimits(30_000, 9_000)
    packed = random_packs(Samples(lengths), limits, **SHAPE)
    assert packed.loads.max().llm_tokens <= limits.llm_tokens
    assert packed.loads.max().vision_units <= limits.vision_units
    assert packed.loads.shape[1:] == (2, 3)
    mean = packed.loads.llm_tokens.sum() / packed.num_samples
    assert mean == pytest.approx(lengths.llm_tokens.mean(), rel=0.05)


def test_ranks_hardly_wait_for_even_packs():
    """A few percent at most, where random batches wait for more."""
    profile = analytic_profile(RECORDS, DEVICES["A100-80GB"])
    samples = Samples(tiled_lengths(8 * 8 * 8 * 4, seed=2))
    random = padded_batches(samples, batch=8, num_ranks=8, micro_batches=8).real
    even = even_packs(samples, PackLimits(28, 9000), num_ranks=8, micro_batches=8).loads
    waited = []
    for load in (even, random):
        seconds = phase_seconds(profile, load)
        waited.append(sum(wait(seconds, "zero3").values()).sum() / sum(seconds.values()).sum())
    assert waited[0] < 0.03
    assert waited[1] > 0.1
