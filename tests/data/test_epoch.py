import itertools

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from omnibal.data.epoch import arrange_epoch
from omnibal.data.isf import ShuffledPacks, iterative_sampling_and_filtering
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import min_packs, source_mix, step_randomness
from omnibal.data.packing_spec import PackingSpec, Ranks
from omnibal.errors import ConfigError, DataError
from tests.data.strategies import pack_limits, sample_lengths
from tools.synthetic import tiled_lengths

METHODS = ("balanced", "isf", "random")


def check_epoch(epoch, lengths, limits, samples, *, fills_last_step):
    """What every epoch of every method promises; ``"balanced"`` also that no rank is without work."""
    num_packs = epoch.num_steps * epoch.num_replicas * epoch.micro_batches
    packs = epoch.packs
    assert len(packs) == num_packs
    assert sorted(packs.samples.tolist()) == sorted(samples)
    over = (packs.vision_units(lengths) > limits.vision_units) | (packs.llm_tokens(lengths) > limits.llm_tokens)
    assert (packs.sizes[over] == 1).all()
    if fills_last_step:
        assert (packs.sizes == 0).sum() == max(num_packs - len(samples), 0)
    last_step = num_packs - epoch.num_replicas * epoch.micro_batches
    assert (packs.sizes[: max(last_step, 0)] > 0).all()
    assert (packs.sizes[max(last_step, 0) :] > 0).any() or not len(samples)


@pytest.mark.parametrize("method", METHODS)
@given(
    lengths=sample_lengths(),
    limits=pack_limits(),
    num_replicas=st.integers(1, 5),
    micro_batches=st.integers(1, 3),
    seed=st.integers(0, 9),
    number=st.integers(0, 3),
    oversized=st.sampled_from(["alone", "drop"]),
)
@settings(max_examples=150)
@example(SampleLengths([], []), PackLimits(9, 4096), 2, 1, 0, 1, "alone")
@example(SampleLengths([9] * 17, [10] * 17), PackLimits(9, 10), 16, 1, 0, 0, "alone")  # each sample fills a pack
def test_every_sample_once_within_limits_and_empty_packs_in_the_last_step_only(
    method, lengths, limits, num_replicas, micro_batches, seed, number, oversized
):
    left_out = limits.oversized(lengths).tolist() if oversized == "drop" else []
    assume(not left_out or len(left_out) < len(lengths))
    epoch = arrange_epoch(
        lengths,
        limits,
        num_replicas=num_replicas,
        micro_batches=micro_batches,
        method=method,
        seed=seed,
        epoch=number,
        oversized=oversized,
    )
    admitted = sorted(set(range(len(lengths))) - set(left_out))
    check_epoch(epoch, lengths, limits, admitted, fills_last_step=method == "balanced")


@pytest.fixture
def mixed_lengths():
    generator = np.random.default_rng(5)
    vision = generator.choice([0, 1, 3, 5], size=600)
    return SampleLengths(vision, 256 * vision + generator.integers(20, 200, size=600))


@pytest.mark.parametrize("method", METHODS)
def test_epochs_differ_in_their_packs_and_balanced_ones_agree_in_their_number_of_steps(method, mixed_lengths):
    first = arrange_epoch(mixed_lengths, PackLimits(9, 4096), num_replicas=4, method=method, seed=3)
    others = [first.at(number) for number in range(1, 6)]
    assert ({epoch.num_steps for epoch in (first, *others)} == {first.num_steps}) == (method == "balanced")
    together = [{frozenset(pack.tolist()) for pack in epoch.packs} for epoch in (first, *others)]
    assert all(len(a & b) < len(a) / 4 for i, a in enumerate(together) for b in together[:i])


@pytest.mark.parametrize(("method", "options"), [("isf", {}), ("isf", {"iterations": 3}), ("random", {})])
def test_isf_deals_the_papers_packs_and_nothing_else(method, options, mixed_lengths):
    limits = PackLimits(9, 4096, full_vision_units=8, full_llm_tokens=3000)
    epoch = arrange_epoch(mixed_lengths, limits, num_replicas=4, micro_batches=3, method=method, seed=3, **options)
    iterations = options.get("iterations", 10) if method == "isf" else 1
    for number in range(3):
        generator = np.random.default_rng([3, number])
        packs = iterative_sampling_and_filtering(mixed_lengths, limits, iterations=iterations, seed=generator)
        dealt = epoch.at(number)
        assert dealt.num_steps == -(-len(packs) // 12)
        expected = sorted(pack.tolist() for pack in packs)
        assert sorted(pack.tolist() for pack in dealt.packs if len(pack)) == expected
        assert sorted(map(tuple, expected)) != [tuple(pack.tolist()) for pack in dealt.packs][: len(packs)]
        filled = (dealt.packs.sizes[dealt.steps[-1]] > 0).sum(axis=1)
        assert filled.max() - filled.min() <= 1  # the last step's packs are spread over the ranks


@pytest.mark.parametrize("method", METHODS)
def test_the_seed_decides_everything(method, mixed_lengths):
    def arranged(seed, number):
        packs = arrange_epoch(
            mixed_lengths, PackLimits(9, 4096), num_replicas=4, method=method, seed=seed, epoch=number
        ).packs
        return packs.samples.tolist(), packs.starts.tolist()

    assert arranged(3, 2) == arranged(3, 2)
    assert arranged(3, 2) != arranged(4, 2)
    epoch = arrange_epoch(mixed_lengths, PackLimits(9, 4096), num_replicas=4, method=method, seed=3)
    assert arranged(3, 2)[0] == epoch.at(2).packs.samples.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_an_epoch_is_its_steps_and_its_parts(method, mixed_lengths):
    epoch = arrange_epoch(mixed_lengths, PackLimits(9, 4096), num_replicas=2, micro_batches=3, method=method)
    assert epoch.steps.shape == (epoch.num_steps, 2, 3)
    whole = [pack.tolist() for pack in epoch.packs]
    assert [pack.tolist() for part in epoch for pack in part] == whole
    for index in (epoch.num_steps - 1, *range(epoch.num_steps)):
        step = epoch.step(index)
        assert epoch.step(index) is step
        for rank, mine in enumerate(epoch.steps[index]):
            assert [step.pack(rank, micro_batch).tolist() for micro_batch in range(3)] == [whole[pack] for pack in mine]
        assert step.num_samples == sum(map(len, step.packs))


def test_few_packs_beyond_the_bound_where_large_samples_do_not_pair():
    tiles = np.random.default_rng(0).choice([1, 3, 5], 20_000, p=(0.11, 0.37, 0.52))
    lengths, limits = SampleLengths(tiles, 270 * tiles), PackLimits(9, 4096)
    epoch = arrange_epoch(lengths, limits, num_replicas=8)
    assert len(epoch.packs) <= 1.012 * min_packs(lengths, limits)


def test_steps_stay_random_where_tokens_fill_the_packs():
    lengths, limits = tiled_lengths(30_000), PackLimits(16, 5120)
    epoch = arrange_epoch(lengths, limits, num_replicas=8)
    assert len(epoch.packs) <= 1.012 * min_packs(lengths, limits)
    assert step_randomness(source_mix(lengths.source, epoch.packs, epoch.steps)) < 1.1


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_a_step_begins_with_its_smallest_packs_and_goes_on_from_the_largest(micro_batches, mixed_lengths):
    epoch = arrange_epoch(mixed_lengths, PackLimits(9, 4096), num_replicas=4, micro_batches=micro_batches)
    vision, tokens = epoch.packs.vision_units(mixed_lengths), epoch.packs.llm_tokens(mixed_lengths)
    for step in epoch.steps:
        first, *others = [sorted(zip(vision[packs], tokens[packs], strict=True)) for packs in step.T]
        for before, after in itertools.pairwise([*others, first]):
            assert after[-1] <= before[0]


@pytest.mark.parametrize("method", ["isf", "random"])
def test_each_rank_runs_the_packs_of_isf_smallest_first_then_from_the_largest_on(method, mixed_lengths):
    epoch = arrange_epoch(mixed_lengths, PackLimits(9, 4096), num_replicas=4, micro_batches=5, method=method)
    spec = PackingSpec(mixed_lengths, PackLimits(9, 4096), method=method)
    dealt = ShuffledPacks(spec, Ranks(4, 5)).window(0, 0)
    of_ranks = [[tuple(packs[place]) for place in range(len(packs))] for packs in (dealt, epoch.packs)]
    assert (of_ranks[0] == of_ranks[1]) == (method == "random")
    for begin in range(0, len(dealt), 5):  # every rank keeps its packs of every step
        assert sorted(of_ranks[0][begin : begin + 5]) == sorted(of_ranks[1][begin : begin + 5])
    if method == "isf":
        vision, tokens = epoch.packs.vision_units(mixed_lengths), epoch.packs.llm_tokens(mixed_lengths)
        for packs in epoch.steps.reshape(-1, 5):
            shares = [vision[pack] / vision[packs].sum() + tokens[pack] / tokens[packs].sum() for pack in packs]
            assert shares[1:] == sorted(shares[1:], reverse=True)
            assert shares[0] == min(shares)


def test_packs_of_isf_that_bring_no_image_run_by_their_tokens():
    lengths = SampleLengths([0] * 4, [60, 90, 70, 80])
    epoch = arrange_epoch(lengths, PackLimits(9, 100), num_replicas=1, micro_batches=4, method="isf")
    assert [epoch.step(0).pack(0, place).tolist() for place in range(4)] == [[0], [1], [3], [2]]


def test_oversized_samples_can_be_refused():
    lengths = SampleLengths([1, 10, 2, 11], [5, 6, 7, 8])
    with pytest.raises(DataError, match=r"got 10 and 6 for sample 1 \(2 samples in all\)"):
        arrange_epoch(lengths, PackLimits(9, 100), num_replicas=2, method="isf", oversized="error")
    fitting = arrange_epoch(lengths, PackLimits(11, 100), num_replicas=2, method="isf", oversized="error")
    assert sorted(fitting.packs.samples) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_replicas": 0}, "num_replicas must be at least 1, got 0"),
        ({"num_replicas": 2, "micro_batches": 1.5}, "micro_batches must be an integer, got 1.5"),
        ({"num_replicas": 2, "seed": -1}, "seed must be at least 0, got -1"),
        ({"num_replicas": 2, "iterations": 0}, "iterations must be between 1 and 10000, got 0"),
        ({"num_replicas": 2, "epoch": True}, "epoch must be an integer, got True"),
        ({"num_replicas": 2, "method": "best"}, "method must be one of .*, got 'best'"),
        ({"num_replicas": 2, "oversized": "keep"}, "oversized must be one of .*, got 'keep'"),
    ],
)
def test_wrong_arguments(wrong, message):
    with pytest.raises(ConfigError, match=message):
        arrange_epoch(SampleLengths([1], [1]), PackLimits(1, 1), **{"method": "isf", **wrong})


def test_steps_outside_the_epoch():
    epoch = arrange_epoch(SampleLengths([1], [1]), PackLimits(1, 1), num_replicas=1, method="isf")
    with pytest.raises(ConfigError, match="step must lie between 0 and 0, got 1"):
        epoch.step(1)
