import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal.cost import CostModel
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio
from omnibal.data.policies import DEFAULT_COST
from omnibal.data.sampler import BalancedBatchSampler
from omnibal.data.synthetic import tiled_lengths
from omnibal.errors import ConfigError, DataError
from tests.data.strategies import pack_limits, sample_lengths

LENGTHS = tiled_lengths(400, seed=5, text_share=0.2)
LIMITS = PackLimits(9, 4096)
methods = st.sampled_from(["balanced", "isf", "random"])
policies = st.sampled_from(["mix", "together"])
shapes = st.tuples(st.integers(1, 5), st.integers(1, 3))


def samplers(shape, lengths=LENGTHS, limits=LIMITS, **options):
    num_replicas, micro_batches = shape
    return [
        BalancedBatchSampler(
            lengths, limits, num_replicas=num_replicas, rank=rank, micro_batches=micro_batches, **options
        )
        for rank in range(num_replicas)
    ]


def resumed(shape, state, **options):
    ranks = samplers(shape, **options)
    for sampler in ranks:
        sampler.load_state_dict(json.loads(json.dumps(state)))
    return ranks


def seen(ranks):
    return sorted(sample for sampler in ranks for pack in sampler for sample in pack)


def packs_of(ranks):
    return [list(sampler) for sampler in ranks]


# --- epochs ---


@given(sample_lengths(), pack_limits(), shapes, methods, policies, st.integers(0, 3))
@settings(max_examples=150)
def test_every_sample_once_and_equal_lengths_on_all_ranks(lengths, limits, shape, method, text_only, epoch):
    ranks = samplers(shape, lengths, limits, method=method, text_only=text_only)
    for sampler in ranks:
        sampler.set_epoch(epoch)
    packs = packs_of(ranks)
    assert {len(own) for own in packs} == {len(sampler) for sampler in ranks} == {ranks[0].num_steps * shape[1]}
    assert sorted(sample for own in packs for pack in own for sample in pack) == list(range(len(lengths)))


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
        return dist_ratio([DEFAULT_COST(step.load(lengths))[:, 0] for step in sampler.steps()])

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
        assert step.target_tokens(LENGTHS) == sum(int(LENGTHS.target_tokens[s]) for s in members)
        load = step.load(LENGTHS)
        assert load.shape == (2, 3)
        assert load.llm_tokens[1, 2] == sum(int(LENGTHS.llm_tokens[s]) for s in step.pack(1, 2))
        assert load.vision_units[0, 1] == sum(int(LENGTHS.vision_units[s]) for s in step.pack(0, 1))
    with pytest.raises(ConfigError, match="lengths must have target_tokens"):
        sampler.step(0).target_tokens(SampleLengths([0], [1]))


def test_packs_without_an_image_beside_others_that_have_one():
    lengths = SampleLengths([1, 0, 0, 0], [90, 90, 90, 90])
    sampler = samplers((2, 2), lengths, PackLimits(1, 100), method="random")[0]
    needs = sampler.step(0).needs_dummy_tile(lengths)
    with_image = np.array([[0 in sampler.step(0).pack(rank, batch) for batch in range(2)] for rank in range(2)])
    assert needs.tolist() == (~with_image & with_image.any(axis=0)).tolist()
    assert needs.sum() == 1


@given(st.integers(0, 60), st.integers(0, 60), shapes, st.integers(0, 2))
@settings(max_examples=40)
def test_together_keeps_text_only_samples_in_steps_of_their_own(with_image, without, shape, epoch):
    lengths = SampleLengths([3] * with_image + [0] * without, [900] * with_image + [500] * without)
    sampler = samplers(shape, lengths, text_only="together", method="isf")[0]
    sampler.set_epoch(epoch)
    kinds = []
    for step in sampler.steps():
        assert len({int(lengths.vision_units[sample]) for sample in step.packs.samples}) == 1
        kinds.append(int(lengths.vision_units[step.packs.samples[0]]))
        if step.packs.sizes.all():
            assert not step.needs_dummy_tile(lengths).any()
    assert set(kinds) == {units for units, count in ((3, with_image), (0, without)) if count}


def test_kinds_of_steps_alternate_at_random():
    lengths = SampleLengths([5] * 100 + [0] * 100, [1400] * 200)
    sampler = samplers((2, 1), lengths, PackLimits(5, 1400), text_only="together", method="isf")[0]

    def kinds():
        return [int(lengths.vision_units[step.packs.samples[0]]) for step in sampler.steps()]

    first = kinds()
    assert Counter(first) == {5: 50, 0: 50}
    assert 20 < sum(a != b for a, b in pairwise(first)) < 80
    sampler.set_epoch(1)
    assert kinds() != first


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
    (fine,) = samplers((1, 1), lengths, PackLimits(20, 5000), oversized="error")
    assert fine.oversized_report == "no sample exceeds the limits"


@given(sample_lengths(), pack_limits(), shapes, policies)
@settings(max_examples=40)
def test_dropped_samples_are_those_of_the_report(lengths, limits, shape, text_only):
    ranks = samplers(shape, lengths, limits, oversized="drop", text_only=text_only)
    assert seen(ranks) == sorted(set(range(len(lengths))) - set(limits.oversized(lengths).tolist()))


def test_a_long_report_is_cut():
    lengths = SampleLengths([1] * 30, [9999] * 30)
    (sampler,) = samplers((1, 1), lengths, LIMITS)
    assert sampler.oversized_report.endswith("0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …")


# --- resume ---


@pytest.mark.parametrize("method", ["balanced", "isf", "random"])
@pytest.mark.parametrize("text_only", ["mix", "together"])
def test_the_same_ranks_go_on_exactly_where_they_were(method, text_only):
    options = {"method": method, "text_only": text_only}
    ranks = samplers((3, 2), **options)
    for sampler in ranks:
        sampler.set_epoch(2)
    packs = packs_of(ranks)
    for steps_done in range(ranks[0].num_steps + 1):
        again = resumed((3, 2), ranks[0].state_dict(steps_done), **options)
        assert (again[0].epoch, again[0].steps_done) == (2, steps_done)
        assert again[0].epoch_steps == ranks[0].num_steps
        for sampler in again:
            sampler.set_epoch(2)
        assert packs_of(again) == [own[steps_done * 2 :] for own in packs]


@given(sample_lengths(), pack_limits(), st.lists(shapes, min_size=2, max_size=4), methods, policies, st.data())
@settings(max_examples=150)
def test_any_chain_of_ranks_sees_every_sample_once(lengths, limits, chain, method, text_only, data):
    options = {"lengths": lengths, "limits": limits, "method": method, "text_only": text_only}
    ranks = samplers(chain[0], **options)
    trained = []
    for shape in chain[1:]:
        steps_done = data.draw(st.integers(ranks[0].steps_done, ranks[0].epoch_steps))
        for index in range(ranks[0].steps_done, steps_done):
            trained += ranks[0].step(index).packs.samples.tolist()
        ranks = resumed(shape, ranks[-1].state_dict(steps_done), **options)
    assert sorted(trained + seen(ranks)) == list(range(len(lengths)))


@pytest.mark.parametrize("method", ["balanced", "isf", "random"])
def test_elastic_resume_at_every_step(method):
    before = samplers((4, 2), method=method)[0]
    for steps_done in range(before.num_steps + 1):
        trained = [sample for index in range(steps_done) for sample in before.step(index).packs.samples.tolist()]
        for shape in ((1, 1), (2, 2), (3, 1), (8, 2)):
            after = resumed(shape, before.state_dict(steps_done), method=method)
            packs = packs_of(after)
            assert len({len(own) for own in packs}) == 1
            assert sorted(trained + [s for own in packs for pack in own for s in pack]) == list(range(len(LENGTHS)))
            for step in after[0].steps():
                assert step.packs.sizes.all() or step.index == after[0].epoch_steps - 1


@given(shapes, shapes, st.data())
@settings(max_examples=30)
def test_a_dealt_epoch_can_itself_be_resumed_exactly(first, second, data):
    before = samplers(first)[0]
    after = resumed(second, before.state_dict(data.draw(st.integers(0, before.num_steps))))
    packs = packs_of(after)
    steps_done = data.draw(st.integers(after[0].steps_done, after[0].epoch_steps))
    again = resumed(second, after[0].state_dict(steps_done))
    skipped = (steps_done - after[0].steps_done) * second[1]
    assert packs_of(again) == [own[skipped:] for own in packs]


def test_packs_that_are_dealt_anew_keep_the_limits():
    before = samplers((4, 1))[0]
    after = resumed((3, 2), before.state_dict(5))[0]
    for step in after.steps():
        assert (step.packs.vision_units(LENGTHS) <= 9).all()
        assert (step.packs.llm_tokens(LENGTHS) <= 4096).all()


def test_the_next_epoch_is_arranged_for_the_new_ranks():
    after = resumed((3, 1), samplers((4, 1))[0].state_dict(5))
    plain = samplers((3, 1))
    for sampler in (*after, *plain):
        sampler.set_epoch(1)
    assert after[0].epoch_steps == after[0].num_steps == plain[0].num_steps
    assert packs_of(after) == packs_of(plain)


def test_without_set_epoch_a_resumed_epoch_is_repeated_whole():
    sampler = samplers((2, 1))[0]
    whole = list(sampler)
    (again, _) = resumed((2, 1), sampler.state_dict(3))
    assert list(again) == whole[3:]
    assert list(again) == whole


def test_a_state_counts_yielded_steps_unless_told_otherwise():
    sampler = samplers((2, 2))[0]
    packs = iter(sampler)
    assert sampler.state_dict()["steps_done"] == 0
    steps_done = []
    for _ in range(5):  # two steps and half of the third
        next(packs)
        steps_done.append(sampler.state_dict()["steps_done"])
    assert steps_done == [0, 1, 1, 2, 2]
    assert sampler.state_dict(1)["steps_done"] == 1


def test_a_state_is_small_whatever_the_epoch():
    small = len(json.dumps(samplers((2, 1))[0].state_dict(3)))
    large = len(json.dumps(samplers((2, 1), tiled_lengths(20_000))[0].state_dict(1000)))
    assert large < small + 100 < 1200


@pytest.mark.parametrize("steps_done", [-1, 10**6])
def test_a_state_must_lie_in_the_epoch(steps_done):
    with pytest.raises(ConfigError, match=r"steps_done must lie between 0 and \d+"):
        samplers((2, 1))[0].state_dict(steps_done)


def test_steps_done_by_other_ranks_are_out_of_reach():
    after = resumed((3, 1), samplers((4, 1))[0].state_dict(5))[0]
    assert after.step(5).index == 5
    with pytest.raises(ConfigError, match="step must lie between 5 and"):
        after.step(4)
    with pytest.raises(ConfigError, match="steps_done must lie between 5 and"):
        after.state_dict(4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, "seed must be as in the saved state, 0, got 1"),
        ({"method": "isf"}, "method must be as in the saved state, 'random', got 'isf'"),
        ({"limits": PackLimits(10, 4096)}, r"limits must be as in the saved state, \[9, 4096, 9, 3968\], got \[10"),
        ({"oversized": "drop"}, "oversized must be as in the saved state, 'alone', got 'drop'"),
        ({"text_only": "together"}, "text_only must be as in the saved state, 'mix', got 'together'"),
        ({"cost": CostModel(llm_tokens=1)}, "cost must be as in the saved state, None, got"),
        ({"exchange_steps": 1}, "exchange_steps must be as in the saved state, 64, got 1"),
        ({"lengths": tiled_lengths(399)}, "num_samples must be as in the saved state, 400, got 399"),
        ({"lengths": tiled_lengths(400, seed=6)}, "content_hash must be as in the saved state"),
    ],
)
def test_a_state_of_another_recipe_is_refused(changed, message):
    state = samplers((2, 1), method="random")[0].state_dict(3)
    options = {"method": "random", **changed}
    with pytest.raises(ConfigError, match=message):
        resumed((2, 1), state, **options)


def test_a_state_whose_packs_are_not_found_again_is_refused():
    state = samplers((2, 1))[0].state_dict(3)
    state["next_packs"][0][0] += 1
    with pytest.raises(ConfigError, match="the next packs must be those of the saved state"):
        resumed((2, 1), state)
    with pytest.raises(ConfigError, match="state must be of version 1, got 7"):
        resumed((2, 1), {**state, "version": 7})


# --- agreement of the ranks ---


def gathered(ranks):
    records = []
    for sampler in ranks:
        sampler.verify(lambda record: records.append(record) or [record | {"rank": r} for r in range(len(ranks))])
    return records


def test_ranks_that_agree():
    ranks = samplers((3, 2))
    records = gathered(ranks)
    for sampler in ranks:
        sampler.verify(lambda _: records)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"seed": 1}, "rank 1: seed must be the same on all ranks, got 1 where rank 0 has 0"),
        ({"limits": PackLimits(9, 4000)}, "rank 1: limits must be"),
        ({"lengths": tiled_lengths(401)}, "rank 1: num_samples must be .* got 401 where rank 0 has 400"),
        ({"lengths": tiled_lengths(400)}, "rank 1: content_hash must be"),
        ({"method": "isf"}, "rank 1: method must be"),
    ],
)
def test_the_rank_that_differs_is_named_on_all_ranks(odd, message):
    ranks = [samplers((3, 1))[0], samplers((3, 1), **odd)[1], samplers((3, 1))[2]]
    records = gathered(ranks)
    for sampler in ranks:
        with pytest.raises(ConfigError, match=message):
            sampler.verify(lambda _: records)


def test_positions_and_shapes_must_agree():
    ahead = samplers((2, 1))[1]
    ahead.load_state_dict(ahead.state_dict(2))
    with pytest.raises(ConfigError, match="rank 1: steps_done must be the same on all ranks, got 2"):
        ahead.verify(lambda _: gathered([samplers((2, 1))[0], ahead]))
    with pytest.raises(ConfigError, match="rank 1: num_replicas must be the same on all ranks"):
        ahead.verify(lambda _: gathered([samplers((1, 1))[0], ahead]))


# --- arguments ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2}, "rank must lie between 0 and 1, got 2"),
        ({"rank": -1}, "rank must lie between 0 and 1, got -1"),
        ({"num_replicas": 0}, "num_replicas must be at least 1, got 0"),
        ({"micro_batches": 0}, "micro_batches must be at least 1, got 0"),
        ({"method": "sorted"}, "method must be one of"),
        ({"oversized": "cut"}, "oversized must be one of"),
        ({"text_only": "alone"}, "text_only must be one of"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        BalancedBatchSampler(LENGTHS, LIMITS, **{"num_replicas": 2, "rank": 0, **options})


def test_epochs_count_from_zero():
    with pytest.raises(ConfigError, match="epoch must be at least 0, got -1"):
        samplers((1, 1))[0].set_epoch(-1)
