import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from omnibal.data.epoch import arrange_epoch
from omnibal.data.isf import iterative_sampling_and_filtering
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio, min_packs
from omnibal.data.packing_spec import DEFAULT_COST
from omnibal.errors import ConfigError, DataError
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from tests.data.strategies import pack_limits, sample_lengths
from tests.feeds.samplers import LENGTHS, LIMITS, methods, packs_of, samplers, seen, shapes
from tools.synthetic import tiled_lengths

# --- epochs ---


@given(sample_lengths(), pack_limits(), shapes, methods, st.integers(0, 3))
@settings(max_examples=150)
def test_every_sample_once_and_equal_lengths_on_all_ranks(lengths, limits, shape, method, epoch):
    ranks = samplers(shape, lengths, limits, method=method)
    for sampler in ranks:
        sampler.set_epoch(epoch)
    packs = packs_of(ranks)
    assert {len(own) for own in packs} == {len(sampler) for sampler in ranks} == {ranks[0].num_steps * shape[1]}
    assert sorted(sample for own in packs for pack in own for sample in pack) == list(range(len(lengths)))


@pytest.mark.parametrize("method", ["balanced", "isf", "random"])
def test_the_length_follows_the_epoch(method):
    sampler = samplers((1, 1), method=method)[0]
    steps = [sampler.steps_of(epoch) for epoch in range(6)]
    assert (len(set(steps)) == 1) == (method == "balanced")
    for epoch in (5, 0, 3, 2, 1, 4):
        sampler.set_epoch(epoch)
        assert len(sampler) == steps[epoch] == len(list(sampler))
        assert sampler.num_steps == sampler.epoch_steps == steps[epoch]
    assert [sampler.steps_of(epoch) for epoch in range(6)] == steps


@given(sample_lengths(), pack_limits(), shapes, methods)
@settings(max_examples=50)
def test_the_steps_hold_the_packs_of_all_ranks(lengths, limits, shape, method):
    ranks = samplers(shape, lengths, limits, method=method)
    packs = packs_of(ranks)
    for step in ranks[0].steps():
        for rank in range(shape[0]):
            for micro_batch in range(shape[1]):
                assert step.pack(rank, micro_batch).tolist() == packs[rank][step.index * shape[1] + micro_batch]


@pytest.mark.parametrize("method", ["balanced", "isf", "random"])
def test_epochs_differ_and_seeds_decide(method):
    sampler = samplers((2, 1), method=method)[0]
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(samplers((2, 1), method=method)[0]) == first
    assert list(samplers((2, 1), method=method, seed=1)[0]) != first


def test_steps_that_exchange_samples_are_more_alike():
    lengths, limits = tiled_lengths(2000), PackLimits(16, 8192)
    apart, together = (samplers((8, 1), lengths, limits, exchange_steps=number)[0] for number in (1, 64))

    def waiting(sampler):
        return dist_ratio([DEFAULT_COST(step.load)[:, 0] for step in sampler.steps()])

    assert waiting(together) < waiting(apart)


def test_an_empty_dataset_has_no_steps():
    sampler = samplers((2, 2), SampleLengths([], []))[0]
    assert len(sampler) == 0
    assert list(sampler) == []


# --- what a step holds ---


def test_counts_for_exact_loss_weighting():
    sampler = samplers((2, 3))[0]
    for step in sampler.steps():
        members = [s for rank in range(2) for micro_batch in range(3) for s in step.pack(rank, micro_batch)]
        assert step.num_samples == len(members)
        assert step.target_tokens == sum(int(LENGTHS.target_tokens[s]) for s in members)
        load = step.load
        assert load.shape == (2, 3)
        assert load.llm_tokens[1, 2] == sum(int(LENGTHS.llm_tokens[s]) for s in step.pack(1, 2))
        assert load.vision_units[0, 1] == sum(int(LENGTHS.vision_units[s]) for s in step.pack(0, 1))
    assert samplers((2, 2), SampleLengths([0], [1]))[0].step(0).target_tokens is None


def test_packs_without_an_image_beside_others_that_have_one():
    lengths = SampleLengths([1, 0, 0, 0], [90, 90, 90, 90])
    sampler = samplers((2, 2), lengths, PackLimits(1, 100), method="random")[0]
    needs = sampler.step(0).needs_dummy_tile()
    with_image = np.array([[0 in sampler.step(0).pack(rank, batch) for batch in range(2)] for rank in range(2)])
    assert needs.tolist() == (~with_image & with_image.any(axis=0)).tolist()
    assert needs.sum() == 1


# --- samples over a limit ---


def test_oversized_samples():
    lengths = SampleLengths([1, 20, 1, 1], [10, 10, 5000, 10])
    (alone,) = samplers((1, 1), lengths, LIMITS)
    assert [1] in list(alone)
    assert [2] in list(alone)
    expected = (
        "2 of 4 samples exceed the limits of 9 vision units and 4096 LLM tokens and have packs of their own: 1, 2"
    )
    assert alone.oversized_report == expected
    (drop,) = samplers((1, 1), lengths, LIMITS, oversized="drop")
    assert seen([drop]) == [0, 3]
    assert drop.oversized_report.endswith("and are left out: 1, 2")
    with pytest.raises(DataError, match=r"got 20 and 10 for sample 1 \(2 samples in all\)"):
        samplers((1, 1), lengths, LIMITS, oversized="error")
    with pytest.raises(DataError, match=r"got 0 vision units and 5 LLM tokens, which all 4 samples exceed"):
        samplers((1, 1), lengths, PackLimits(0, 5), oversized="drop")
    (fine,) = samplers((1, 1), lengths, PackLimits(20, 5000), oversized="error")
    assert fine.oversized_report == "no sample exceeds the limits"


@given(sample_lengths(), pack_limits(), shapes)
@settings(max_examples=40)
def test_dropped_samples_are_those_of_the_report(lengths, limits, shape):
    kept = sorted(set(range(len(lengths))) - set(limits.oversized(lengths).tolist()))
    assume(kept or not len(lengths))
    assert seen(samplers(shape, lengths, limits, oversized="drop")) == kept


def test_a_long_report_is_cut():
    lengths = SampleLengths([1] * 30, [9999] * 30)
    (sampler,) = samplers((1, 1), lengths, LIMITS)
    assert sampler.oversized_report.endswith("0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …")


# --- arguments ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2}, "rank must be between 0 and 1, got 2"),
        ({"rank": -1}, "rank must be between 0 and 1, got -1"),
        ({"rank": "0"}, "rank must be an integer, got '0'"),
        ({"num_replicas": 2.0}, "num_replicas must be an integer, got 2.0"),
        ({"num_replicas": 0}, "num_replicas must be at least 1, got 0"),
        ({"micro_batches": 0}, "micro_batches must be at least 1, got 0"),
        ({"method": "sorted"}, "method must be one of"),
        ({"oversized": "cut"}, "oversized must be one of"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        BalancedBatchSampler(LENGTHS, LIMITS, **{"num_replicas": 2, "rank": 0, **options})


def test_epochs_count_from_zero():
    with pytest.raises(ConfigError, match="epoch must be at least 0, got -1"):
        samplers((1, 1))[0].set_epoch(-1)


@pytest.mark.parametrize("limits", [(9, 4096), None])
def test_limits_and_lengths_are_of_their_kinds(limits):
    lengths = SampleLengths([1, 3, 5], [300, 800, 1400])
    for take in (
        lambda: BalancedBatchSampler(lengths, limits, num_replicas=1, rank=0),
        lambda: arrange_epoch(lengths, limits, num_replicas=1),
        lambda: iterative_sampling_and_filtering(lengths, limits),
        lambda: min_packs(lengths, limits),
        lambda: Plan(limits, 1, Partition((0, 1)), ("none",)),
    ):
        with pytest.raises(ConfigError, match="limits must be PackLimits, got"):
            take()
    with pytest.raises(ConfigError, match="lengths must be SampleLengths, got"):
        BalancedBatchSampler([1, 2], PackLimits(9, 4096), num_replicas=1, rank=0)
