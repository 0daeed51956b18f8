import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal.cost import CostModel
from omnibal.data.epoch import arrange_epoch
from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError
from omnibal.feeds.sampler import BalancedBatchSampler
from tests.data.strategies import pack_limits, sample_lengths
from tests.feeds.samplers import LENGTHS, LIMITS, methods, packs_of, resumed, samplers, seen, shapes
from tools.synthetic import tiled_lengths


@pytest.mark.parametrize("method", ["balanced", "isf", "random"])
def test_the_same_ranks_go_on_exactly_where_they_were(method):
    options = {"method": method}
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


@given(sample_lengths(), pack_limits(), st.lists(shapes, min_size=2, max_size=4), methods, st.data())
@settings(max_examples=150)
def test_any_chain_of_ranks_sees_every_sample_once(lengths, limits, chain, method, data):
    options = {"lengths": lengths, "limits": limits, "method": method}
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


@pytest.mark.parametrize("method", ["balanced", "isf", "random"])
def test_other_ranks_get_isfs_packs_whole(method):
    before = samplers((4, 2), method=method)[0]
    after = resumed((13, 2), before.state_dict(3), method=method)[0]
    made, left = (
        {tuple(sorted(pack.tolist())) for step in sampler.steps() for pack in step.packs if len(pack)}
        for sampler in (before, after)
    )
    assert (left <= made) == (method != "balanced")


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


def test_a_state_is_json_also_where_arguments_are_numpys():
    numbers = {"num_replicas": np.int64(2), "rank": np.int32(1), "micro_batches": np.int64(1), "seed": np.int64(1)}
    own = BalancedBatchSampler(LENGTHS, LIMITS, **numbers)
    own.set_epoch(np.int64(2))
    assert json.loads(json.dumps(own.state_dict(np.int64(3))))["steps_done"] == 3


@pytest.mark.parametrize("steps_done", [-1, 10**6])
def test_a_state_must_lie_in_the_epoch(steps_done):
    with pytest.raises(ConfigError, match=r"steps_done must be between 0 and \d+"):
        samplers((2, 1))[0].state_dict(steps_done)


def test_steps_done_by_other_ranks_are_out_of_reach():
    after = resumed((3, 1), samplers((4, 1))[0].state_dict(5))[0]
    assert after.step(5).index == 5
    with pytest.raises(ConfigError, match="step must lie between 5 and"):
        after.step(4)
    with pytest.raises(ConfigError, match="steps_done must be between 5 and"):
        after.state_dict(4)


@pytest.mark.parametrize(
    ("shape", "position", "next_pack"),
    [  # as saved when a rank ran the packs of ISF in the order in which they were dealt
        ((4, 2), {"ranks": [4, 2], "packs_done": [0], "first_step": 0}, [0, 261, 380, 140, 278, 117, 304, 90]),
        ((3, 2), {"ranks": [3, 2], "packs_done": [24], "first_step": 3}, [62, 196, 167, 245, 6, 128, 152]),
    ],
)
def test_states_from_before_packs_of_isf_had_an_order_go_on(shape, position, next_pack):
    before = samplers((4, 2), method="isf")[0]
    steps_done = 3 if shape == (4, 2) else 5
    state = before.state_dict(3) | {
        "steps_done": steps_done, "epoch_steps": {"arranged_for": [4, 2], **position}, "next_packs": [next_pack]
    }  # fmt: skip
    packs = arrange_epoch(LENGTHS, LIMITS, num_replicas=4, micro_batches=2, method="isf").packs
    trained = packs.between(0, 24 + 6 * (steps_done - 3)).samples.tolist()
    assert sorted(trained + seen(resumed(shape, state, method="isf"))) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("method", ["balanced", "isf", "random"])
def test_ranks_run_the_steps_that_are_simulated(method):
    epoch = arrange_epoch(LENGTHS, LIMITS, num_replicas=2, micro_batches=4, method=method)
    planned = [[epoch.packs[pack].tolist() for pack in epoch.steps[:, rank].ravel()] for rank in range(2)]
    assert packs_of(samplers((2, 4), method=method)) == planned


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, "seed must be as in the saved state, 0, got 1"),
        ({"method": "isf"}, "method must be as in the saved state, 'random', got 'isf'"),
        (
            {"limits": PackLimits(10, 4096)},
            r"limits of a pack must be .*, PackLimits\(vision_units=9, .*, got PackLimits\(vision_units=10",
        ),
        ({"oversized": "drop"}, "oversized must be as in the saved state, 'alone', got 'drop'"),
        ({"cost": CostModel(llm_tokens=1)}, "cost must be as in the saved state, None, got"),
        ({"exchange_steps": 1}, "exchange_steps must be as in the saved state, 64, got 1"),
        (
            {"lengths": tiled_lengths(399)},
            "num_samples of the dataset must be as in the saved state, 400, got 399; other samples",
        ),
        ({"lengths": tiled_lengths(400, seed=6)}, "content_hash of the samples' lengths must be as in the saved state"),
    ],
)
def test_a_state_of_another_recipe_is_refused(changed, message):
    state = samplers((2, 1), method="random")[0].state_dict(3)
    options = {"method": "random", **changed}
    with pytest.raises(ConfigError, match=message):
        resumed((2, 1), state, **options)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "version 1, as state_dict.* gave it, got 'NoneType'"),
        ({}, "version 1, as state_dict.* gave it, got None"),
        ({"version": 2}, "version 1, as state_dict.* gave it, got 2"),
        ({"version": 1, "epoch": 0}, "state must have the key 'steps_done', got none"),
    ],
)
def test_what_is_no_state_is_refused(state, message):
    with pytest.raises(ConfigError, match=message):
        samplers((2, 1))[0].load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"epoch": -1}, "state.epoch"),
        ({"steps_done": "1"}, "state.steps_done"),
        ({"epoch_steps": None}, "state.epoch_steps"),
        ({"epoch_steps": {}}, "state.epoch_steps must have the key 'arranged_for'"),
        ({"made_from": None}, "state.made_from"),
        ({"more": 1}, "state.more"),
    ],
)
def test_a_damaged_state_is_refused_with_the_key(change, key):
    state = samplers((2, 1))[0].state_dict(3)
    with pytest.raises(ConfigError, match=f"^{key}.*; pass it as state_dict"):
        samplers((2, 1))[0].load_state_dict(state | change)


def test_a_state_whose_packs_are_not_found_again_is_refused():
    state = samplers((2, 1))[0].state_dict(3)
    state["next_packs"][0][0] += 1
    with pytest.raises(ConfigError, match="the next packs must be those of the saved state"):
        resumed((2, 1), state)
    with pytest.raises(ConfigError, match=r"state must be of version 1, .*got 7"):
        resumed((2, 1), {**state, "version": 7})
