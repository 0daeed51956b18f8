"""Mixtures through the sampler: shares, draws that come once, balance and limits, resume, other ranks, refusals."""

import json

import numpy as np
import pytest

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio, step_randomness
from omnibal.data.packing_spec import Knot, Mixture
from omnibal.data.source_draws import typical_lengths
from omnibal.errors import ConfigError, DataError, InfeasibleError
from omnibal.feeds.sampler import BalancedBatchSampler
from tools.synthetic import tiled_lengths

NAMES = ("ocr", "chat", "text")
LIMITS = PackLimits(16, 5120)
SHARES = {"ocr": 0.3, "chat": 0.5, "text": 0.2}
TURN = Mixture({"text": 1}, schedule=(Knot(300, {"text": 1, "chat": 1}), Knot(700, SHARES), Knot(701, {"ocr": 1})))


def three_sources(number=4000, seed=0):
    """Images of many tiles, of few, and none; of unlike numbers."""
    tiled = tiled_lengths(number, seed=seed, text_share=0.0)
    source = np.repeat([0, 1, 2], [number // 8, number // 2, number - number // 8 - number // 2])
    tiles = np.where(source == 0, tiled.vision_units, np.where(source == 1, 1 + np.arange(number) % 4, 0))
    tokens = np.where(source == 2, tiled.llm_tokens // 4, tiles * 256 + tiled.target_tokens)
    return SampleLengths(tiles, tokens, target_tokens=tokens // 3 + 1, source=source, source_names=NAMES)


LENGTHS = three_sources()


def sampler_of(mixture=SHARES, *, ranks=(8, 1), rank=0, lengths=LENGTHS, limits=LIMITS, **options):
    return BalancedBatchSampler(
        lengths, limits, num_replicas=ranks[0], micro_batches=ranks[1], rank=rank, mixture=mixture, **options
    )


def steps_of(sampler, number):
    """Packs of so many steps, from where the sampler stands, through one epoch after another."""
    steps = []
    while len(steps) < number:
        steps += [step.packs for step in sampler.steps()][: number - len(steps)]
        sampler.set_epoch(sampler.epoch + 1)
    return steps


def realised(steps, by="samples", lengths=LENGTHS):
    """What each source gave in each step, shape (steps, sources)."""
    column = np.ones(len(lengths), dtype=np.int64) if by == "samples" else getattr(lengths, by)
    counts = [np.bincount(lengths.source[p.samples], weights=column[p.samples], minlength=3) for p in steps]
    return np.array(counts)


def drawn_evenly(samples, lengths=LENGTHS):
    """Whether every sample of a source was drawn as often as the others, or once more."""
    times = np.bincount(samples, minlength=len(lengths))
    return all(np.ptp(times[lengths.source == source]) <= 1 for source in range(3))


@pytest.mark.parametrize("by", ["samples", "llm_tokens", "target_tokens"])
@pytest.mark.parametrize("mixture", [Mixture(SHARES), TURN], ids=["constant", "schedule"])
def test_shares_over_any_thousand_steps(mixture, by):
    mixture = Mixture(mixture.shares, by, mixture.schedule)
    given = realised(steps_of(sampler_of(mixture), 2500), by)
    asked = mixture.shares_at(np.arange(2500) + 0.5)[:, [mixture.sources.index(name) for name in NAMES]]
    for first in range(0, 1501, 50):
        part = slice(first, first + 1000)
        # Weighted by what each step holds: steps of a lighter mix hold more.
        expected = (asked[part] * given[part].sum(axis=1, keepdims=True)).sum(axis=0)
        assert np.abs(given[part].sum(axis=0) - expected).max() <= 0.01 * expected.sum()


def test_every_draw_comes_once():
    sampler = sampler_of(SHARES)
    samples = []
    for epoch in range(7):
        sampler.set_epoch(epoch)
        packs = [step.packs for step in sampler.steps()]
        samples += [pack.samples for pack in packs]
        assert len(packs) == len(sampler) == sampler.num_steps
        assert all(pack.sizes.all() for pack in packs)
        assert drawn_evenly(np.concatenate(samples))
    times = np.bincount(np.concatenate(samples), minlength=len(LENGTHS))
    assert times[LENGTHS.source == 0].min() > 7 > times[LENGTHS.source == 2].max()


@pytest.mark.parametrize("limits", [LIMITS, PackLimits(9, 4096), PackLimits(33, 10240)], ids=str)
@pytest.mark.parametrize("mixture", [SHARES, TURN], ids=["constant", "schedule"])
def test_packs_keep_limits_and_are_full(limits, mixture):
    steps = steps_of(sampler_of(mixture, limits=limits), 800)
    assert all((packs.vision_units(LENGTHS) <= limits.vision_units).all() for packs in steps)
    assert all((packs.llm_tokens(LENGTHS) <= limits.llm_tokens).all() for packs in steps)
    vision = np.array([packs.vision_units(LENGTHS) for packs in steps]) / limits.vision_units
    tokens = np.array([packs.llm_tokens(LENGTHS) for packs in steps]) / limits.llm_tokens
    fullest = np.maximum(vision, tokens).mean(axis=1)
    assert np.median(fullest) > 0.8
    assert dist_ratio(np.maximum(vision, tokens)) < 0.15


@pytest.mark.parametrize("ranks", [(8, 1), (64, 2), (512, 1)])
@pytest.mark.parametrize("limits", [LIMITS, PackLimits(9, 4096)], ids=["sane", "tight"])
def test_steps_are_as_random_as_the_asked_mix_by_chance(ranks, limits):
    found, lengths = [], three_sources(ranks[0] * ranks[1] * 200)
    for seed in range(2):
        given = realised(
            steps_of(sampler_of(ranks=ranks, lengths=lengths, limits=limits, seed=seed), 60), lengths=lengths
        )
        expected = given.sum(axis=1, keepdims=True) * np.array(list(SHARES.values()))
        found.append(((given - expected) ** 2 / expected).sum() / (60 * 2))
        assert step_randomness(given) < 1.5
    assert 0.4 < np.mean(found) <= 1.15


@pytest.mark.parametrize("ranks", [(1, 1), (4, 2), (8, 1)])
def test_steps_of_few_samples_find_a_plan_while_shares_change(ranks):
    """Tight limits, few packs a step, and knots a few steps apart."""
    knots = tuple(
        Knot(step, {name: 1, "chat": 1}) for step, name in ((3, "text"), (17, "ocr"), (36, "text"), (41, "ocr"))
    )
    for seed in range(2):
        sampler = sampler_of(Mixture({"ocr": 1}, schedule=knots), ranks=ranks, limits=PackLimits(6, 4100), seed=seed)
        assert all(packs.sizes.all() for packs in steps_of(sampler, 50))


def test_by_tokens_packs_have_room_for_what_chance_makes_of_the_number_of_samples():
    """Two samples fill a pack, whatever their tokens: more of them than twice the packs do not fit."""
    source, tokens = np.repeat([0, 1], 300), np.random.default_rng(0).choice([300, 900, 1900], 600)
    lengths = SampleLengths(5 - source, tokens, source=source, source_names=["five", "four"])
    mixture = Mixture({"five": 1, "four": 3}, "llm_tokens")
    for seed in range(3):
        sampler = sampler_of(mixture, ranks=(16, 1), lengths=lengths, limits=PackLimits(9, 4096), seed=seed)
        assert all((packs.vision_units(lengths) <= 9).all() for packs in steps_of(sampler, 100))


def test_a_fraction_is_another_one_each_epoch():
    """As a meta file's repeat_time of 0.5, 1 and 2 would have it."""
    counts = np.bincount(LENGTHS.source)
    repeats = dict(zip(NAMES, (counts * [0.5, 1, 2]).astype(int).tolist(), strict=True))
    sampler = sampler_of(Mixture(repeats, epoch_samples=sum(repeats.values())))
    halves = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        samples = np.concatenate([step.packs.samples for step in sampler.steps()])
        times = np.bincount(LENGTHS.source[samples])
        np.testing.assert_allclose(times, list(repeats.values()), rtol=0.05)
        halves.append(samples[LENGTHS.source[samples] == 0])
    assert len(np.intersect1d(*halves)) < 0.1 * len(halves[0])


def test_a_step_tells_its_shares():
    sampler = sampler_of(TURN)
    sampler.set_epoch(30)
    shares = [sampler.step(index).shares for index in range(sampler.num_steps)]
    asked = TURN.shares_at(30 * sampler.num_steps + 0.5)[TURN.sources.index("ocr")]
    assert 0 < shares[0]["ocr"][0] == asked
    given = realised([step.packs for step in sampler.steps()])
    for row, step in zip(given, shares, strict=True):
        assert [held for _, held in step.values()] == (row / row.sum()).tolist()
    assert sampler_of(None).step(0).shares == {}


def test_typical_lengths_are_of_the_mix_and_hold_the_largest():
    typical = typical_lengths(LENGTHS, Mixture(SHARES))
    np.testing.assert_allclose(np.bincount(typical.source) / len(typical), list(SHARES.values()), atol=0.01)
    assert typical.summary.max_llm_tokens == LENGTHS.summary.max_llm_tokens
    alone = typical_lengths(LENGTHS, Mixture({"ocr": 0, "chat": 0, "text": 1}))
    assert alone.summary.max_vision_units == 0
    assert typical_lengths(LENGTHS, None) is LENGTHS


def test_ranks_share_each_step():
    ranks = [list(sampler_of(ranks=(3, 2), rank=rank)) for rank in range(3)]
    whole = sampler_of(ranks=(3, 2))
    for step in whole.steps():
        assert [pack for own in ranks for pack in own[2 * step.index : 2 * step.index + 2]] == [
            pack.tolist() for pack in step.packs
        ]
    records = [{**sampler_of(ranks=(3, 2), rank=rank)._spec.fingerprint(), "rank": rank} for rank in range(3)]
    whole.verify(lambda own: [own | {"rank": rank} | record for rank, record in enumerate(records)])


def test_another_mixture_is_another_plan():
    sampler, other = sampler_of(), sampler_of({"ocr": 1, "chat": 1, "text": 1})
    with pytest.raises(ConfigError, match="mixture must be as in the saved state"):
        other.load_state_dict(sampler.state_dict())
    with pytest.raises(ConfigError, match="mixture must be as in the saved state"):
        sampler_of(None).load_state_dict(sampler.state_dict())


@pytest.mark.parametrize("mixture", [SHARES, TURN, Mixture(SHARES, "llm_tokens")], ids=["plain", "schedule", "tokens"])
def test_any_epoch_is_known_without_those_before(mixture):
    through = sampler_of(mixture)
    for epoch in range(4):
        through.set_epoch(epoch)
        packs = [step.packs.samples.tolist() for step in through.steps()]
    state = json.loads(json.dumps(through.state_dict(5)))
    direct, resumed = sampler_of(mixture), sampler_of(mixture)
    direct.set_epoch(3)
    assert [step.packs.samples.tolist() for step in direct.steps()] == packs
    resumed.load_state_dict(state)
    assert [step.packs.samples.tolist() for step in resumed.steps()] == packs[5:]


def train(sampler, stop=None):
    """Samples of the current epoch's steps from where the sampler stands, up to a step."""
    last = sampler.epoch_steps if stop is None else stop
    return np.concatenate([sampler.step(index).packs.samples for index in range(sampler.steps_done, last)])


def go_on(sampler, steps_done, mixture, ranks):
    fresh = sampler_of(mixture, ranks=ranks)
    fresh.load_state_dict(json.loads(json.dumps(sampler.state_dict(steps_done))))
    return fresh


@pytest.mark.parametrize("mixture", [SHARES, Mixture(SHARES, "llm_tokens"), TURN], ids=["plain", "tokens", "schedule"])
def test_other_ranks_go_on_with_the_draws_that_follow(mixture):
    first = sampler_of(mixture, ranks=(8, 1))
    samples = [train(first)]
    first.set_epoch(1)
    samples.append(train(first, 9))
    second = go_on(first, 9, mixture, (3, 2))
    samples.append(train(second))
    assert drawn_evenly(np.concatenate(samples))
    trained = first.num_steps + second.epoch_steps
    second.set_epoch(2)
    samples.append(train(second, 10))
    third = go_on(second, 10, mixture, (5, 1))
    samples.append(train(third))
    trained += third.epoch_steps
    third.set_epoch(3)
    assert third._origin == (go_on(third, 7, mixture, (5, 1))._origin) and third._origin.step == trained
    assert [step.packs.samples.tolist() for step in go_on(third, 7, mixture, (5, 1)).steps()] == [
        step.packs.samples.tolist() for step in third.steps()
    ][7:]
    samples.append(train(third))
    assert drawn_evenly(np.concatenate(samples))
    given = realised([step.packs for step in third.steps()], getattr(mixture, "by", "samples"))
    asked = Mixture.of(mixture).shares_at(trained + np.arange(len(given)) + 0.5)
    asked = asked[:, [Mixture.of(mixture).sources.index(name) for name in NAMES]]
    expected = (asked * given.sum(axis=1, keepdims=True)).sum(axis=0)
    assert np.abs(given.sum(axis=0) - expected).max() <= 0.01 * expected.sum()
    with pytest.raises(ConfigError, match="epoch must be at least 3, as other ranks began it, got 1"):
        third.set_epoch(1)
        len(list(third))


def test_samples_over_a_limit():
    limits = PackLimits(16, 1500)
    over = np.flatnonzero((LENGTHS.vision_units > 16) | (LENGTHS.llm_tokens > 1500))
    assert len(over) > 10
    dropped = sampler_of(limits=limits, oversized="drop")
    assert not np.isin(train(dropped), over).any()
    alone = sampler_of(limits=limits)
    assert all(len(pack) == 1 for step in alone.steps() for pack in step.packs if np.isin(pack, over).any())


def test_samples_that_fill_packs_alike():
    lengths = SampleLengths([1] * 600, [100] * 600, source=np.arange(600) % 3, source_names=NAMES)
    with pytest.raises(InfeasibleError, match="more than one sample"):
        sampler_of(lengths=lengths, limits=PackLimits(1, 150))
    assert all(step.packs.sizes.all() for step in sampler_of(lengths=lengths, limits=PackLimits(2, 250)).steps())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixture": {"ocr": 1, "chat": 1, "txt": 1}}, "got 'txt'; did you mean 'text'?"),
        ({"mixture": {"ocr": 1, "chat": 1}}, "no share of 'text'; give it 0"),
        ({"mixture": {"ocr": -1}}, "at least 0, got ocr: -1"),
        (
            {"lengths": SampleLengths([1], [5])},
            "lengths must have a source for every sample under a mixture, got none",
        ),
        (
            {"lengths": SampleLengths([1] * 9, [5] * 9, source=[0] * 9, source_names=NAMES)},
            "sources of a mixture must have samples, got none in 'chat'; give it the share 0",
        ),
        (
            {
                "lengths": SampleLengths([1] * 9, [5] * 9, source=[0, 1, 2] * 3, source_names=NAMES),
                "mixture": Mixture(SHARES, "target_tokens"),
            },
            "lengths must have target_tokens for a mixture by target_tokens, got none",
        ),
        (
            {
                "lengths": SampleLengths(
                    [1] * 3, [5] * 3, target_tokens=[1, 0, 1], source=[0, 1, 2], source_names=NAMES
                ),
                "mixture": Mixture(SHARES, "target_tokens"),
            },
            "sources of a mixture must have target_tokens, got none in 'chat'",
        ),
        ({"method": "isf"}, "method must be 'balanced' under a mixture, got 'isf'"),
    ],
)
def test_refused_in_one_line(options, message):
    with pytest.raises((ConfigError, DataError)) as error:
        sampler_of(**{"mixture": SHARES} | options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_names_of_sources_are_kept(tmp_path):
    LENGTHS.save(tmp_path)
    again = SampleLengths.load(tmp_path)
    assert again.source_names == again.take([0, 5]).source_names == NAMES
    assert SampleLengths([1], [1], source=[2]).source_names == ("0", "1", "2")
    with pytest.raises(DataError, match="source_names must be 3 different names"):
        SampleLengths([1], [1], source=[2], source_names=["a", "b"])
