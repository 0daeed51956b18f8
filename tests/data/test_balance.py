import numpy as np
import pytest

from omnibal.cost import CostModel
from omnibal.data.balance import planner
from omnibal.data.balance.planner import BalancedPacks
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio, min_packs, source_mix, step_randomness
from omnibal.data.packing_spec import DEFAULT_COST, PackingSpec, Ranks
from omnibal.data.packs import Packs
from tools.synthetic import INTERNVL_MIX, patch_lengths, tiled_lengths

LIMITS = PackLimits(5, 4096)
DOCUMENTS = tuple(source for source in INTERNVL_MIX if source.name in {"synthdog", "chartqa", "ai2d", "docvqa"})


@pytest.fixture(scope="module")
def lengths():
    """Two windows of samples; those of four tiles and of three must meet enough of one."""
    chance = np.random.default_rng(0)
    tiles = chance.permutation(np.repeat([0, 1, 3, 4, 5], [2_000, 47_000, 4_700, 1_100, 11_000]))
    return SampleLengths(tiles, 256 * tiles + chance.integers(1, 2000, len(tiles)))


def check(windows, lengths, limits, step_packs):
    assert sorted(sample for window in windows for sample in window.samples) == list(range(len(lengths)))
    for window in windows:
        load = window.load(lengths)
        assert len(window) % step_packs == 0
        assert window.sizes.min() > 0
        assert load.vision_units.max() <= limits.vision_units
        assert load.llm_tokens.max() <= limits.llm_tokens


def planned(lengths, limits, epoch=0, **options):
    ranks = Ranks(options.pop("num_replicas"), options.pop("micro_batches", 1))
    packs = BalancedPacks(PackingSpec(lengths, limits, **options), ranks)
    windows = [packs.window(epoch, index) for index in range(len(packs.window_starts(epoch)) - 1)]
    check(windows, lengths, limits, ranks.step_packs)
    return Packs.concatenate(windows)


def test_a_window_whose_first_orders_do_not_fit_is_planned_yet(monkeypatch, lengths):
    packs = BalancedPacks(PackingSpec(lengths, LIMITS), Ranks(32, 4))
    plan, tried = planner.plan_window, []

    def refuse_most(*arguments):
        tried.append(arguments)
        return plan(*arguments) if len(tried) > 20 else None

    monkeypatch.setattr(planner, "plan_window", refuse_most)
    assert len(packs.window_starts(0)) == 3
    check([packs.window(0, 0), packs.window(0, 1)], lengths, LIMITS, 128)


def test_limits_come_first_at_once_where_samples_do_not_combine(monkeypatch):
    """Each sample of five tiles asks for a pack of nine: a trial without limits first would be in vain."""
    plan, limits_first = planner.plan_window, []

    def note(*arguments):
        limits_first.append(arguments[2].repair_first)
        return plan(*arguments)

    monkeypatch.setattr(planner, "plan_window", note)
    tiles = np.repeat([5, 1], [4_000, 2_000])
    assert len(planned(SampleLengths(tiles, 256 * tiles), PackLimits(9, 4096), num_replicas=8)) == 4_016
    assert all(limits_first)


def test_few_packs_beyond_the_bound_in_every_window():
    """The paper's mix fills packs of 9 tiles within half a percent of the bound, in all windows of several epochs."""
    mix, limits = tiled_lengths(100_000, seed=7), PackLimits(9, 4096)
    for epoch in range(3):
        assert len(planned(mix, limits, epoch, num_replicas=8)) <= 1.005 * min_packs(mix, limits)


@pytest.mark.parametrize(("limits", "ranks", "seeds"), [((16, 5120), 8, 3), ((16, 5120), 64, 1), ((15, 4736), 256, 8)])
def test_steps_stay_random_where_limits_are_tight(limits, ranks, seeds):
    """Exchanges would sort the steps of large groups: without a watch on their mixes the figure is above 3."""
    lengths = tiled_lengths(140_000, seed=3, sources=DOCUMENTS)
    found = []
    for seed in range(seeds):
        packs = planned(lengths, PackLimits(*limits), num_replicas=ranks, seed=seed)
        steps = np.arange(len(packs)).reshape(-1, ranks)
        assert len(steps) >= 50
        found.append(
            [step_randomness(source_mix(kind, packs, steps)) for kind in (lengths.source, lengths.vision_units)]
        )
    assert max(np.mean(found, axis=0)) < 1.2


@pytest.mark.parametrize("most", [5, 7, 9])
def test_steps_of_a_few_samples_stay_random(most):
    """Packs of hardly more than one sample: swaps between steps sort them by length, and so do sums that divide."""
    source = next(source for source in INTERNVL_MIX if source.name == "docvqa")
    lengths = tiled_lengths(40_000, seed=2, sources=(source,))
    packs = planned(lengths, PackLimits(most, 4096), num_replicas=8)
    quintile = np.argsort(np.argsort(lengths.llm_tokens, kind="stable")) * 5 // len(lengths)
    steps = np.arange(len(packs)).reshape(-1, 8)
    found = [step_randomness(source_mix(kind, packs, steps)) for kind in (quintile, lengths.vision_units)]
    assert max(found) < 1.25


def test_steps_stay_random_with_many_oversized_samples():
    """A sample that fills its pack is dealt no company: to take it away again sorted the steps (χ² 3 and more)."""
    chance = np.random.default_rng(4)
    source, text = (chance.random(60_000) < 0.12).astype(int), chance.lognormal(5, 0.8, 60_000).astype(int)
    units = np.where(source, chance.integers(9000, 16000, 60_000), chance.lognormal(7.2, 0.5, 60_000).astype(int))
    lengths = SampleLengths(units, units // 4 + text, source=source)
    packs = BalancedPacks(PackingSpec(lengths, PackLimits(8192, 4096)), Ranks(256)).window(0, 0)
    mixes = source_mix(lengths.source, packs, np.arange(len(packs)).reshape(-1, 256))
    assert step_randomness(mixes) < 1.3


def test_cost_is_even_beside_samples_that_take_the_most_vision_units():
    """Nobody waits for the vision units of the others, which then make room for long texts (0.10 in place of 0.03)."""
    lengths, ranks = patch_lengths(60_000, seed=7), 256
    packs = BalancedPacks(PackingSpec(lengths, PackLimits(16384, 8192)), Ranks(ranks)).window(0, 0)
    steps = np.arange(len(packs)).reshape(-1, ranks)
    assert dist_ratio(packs.vision_units(lengths)[steps]) < 0.08
    assert dist_ratio(DEFAULT_COST(packs.load(lengths))[steps]) < 0.05


def test_vision_units_of_steps_are_whole_unless_the_vit_costs_little():
    lengths, limits = tiled_lengths(40_000, seed=1), PackLimits(16, 7296)
    tokens = DEFAULT_COST.llm_tokens

    def whole(per_unit):
        cost = CostModel(vision_units=per_unit, llm_tokens=tokens, llm_tokens_squared=1)
        packs = planned(lengths, limits, num_replicas=8, cost=cost)
        return float((packs.vision_units(lengths).reshape(-1, 8).sum(axis=1) % 8 == 0).mean())

    assert whole(0) > 0.9
    assert whole(1000 * tokens) > 0.9  # a tile costs what a thousand tokens do: more than half
    assert whole(10 * tokens) < 0.9


@pytest.mark.parametrize("ranks", [8, 16])
def test_ranks_are_as_even_as_the_targets_ask(ranks):
    lengths, limits = tiled_lengths(60_000, seed=2), PackLimits(28, 14400)
    packs = planned(lengths, limits, num_replicas=ranks)
    load, steps = packs.load(lengths), np.arange(len(packs)).reshape(-1, ranks)
    assert dist_ratio(load.vision_units[steps]) <= 0.001
    assert dist_ratio(DEFAULT_COST(load)[steps]) <= 0.007
