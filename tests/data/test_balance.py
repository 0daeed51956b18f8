import numpy as np
import pytest

from omnibal.data import balance
from omnibal.data.balance import BalancedPacks
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import min_packs
from omnibal.data.synthetic import tiled_lengths

LIMITS = PackLimits(5, 4096)


@pytest.fixture(scope="module")
def lengths():
    """Two windows of samples; those of four tiles and of three must meet enough of one."""
    chance = np.random.default_rng(0)
    tiles = chance.permutation(np.repeat([0, 1, 3, 4, 5], [2_000, 47_000, 4_700, 1_100, 11_000]))
    return SampleLengths(tiles, 256 * tiles + chance.integers(1, 2000, len(tiles)))


def check(windows, lengths):
    assert sorted(sample for window in windows for sample in window.samples) == list(range(len(lengths)))
    for window in windows:
        load = window.load(lengths)
        assert len(window) % 128 == 0
        assert window.sizes.min() > 0
        assert load.vision_units.max() <= LIMITS.vision_units
        assert load.llm_tokens.max() <= LIMITS.llm_tokens


@pytest.mark.parametrize("fits", [lambda tried, how: how.exchange_steps == 0, lambda tried, how: tried > 20])
def test_a_window_whose_first_orders_do_not_fit_is_planned_yet(monkeypatch, lengths, fits):
    """By best fit without regard to evenness, or in one of many more orders."""
    packs = BalancedPacks(lengths, LIMITS, num_replicas=32, micro_batches=4)
    plan, tried = balance.plan_steps, []

    def refuse_most(samples, columns, instructions, *others):
        tried.append(instructions)
        return plan(samples, columns, instructions, *others) if fits(len(tried), instructions) else None

    monkeypatch.setattr(balance, "plan_steps", refuse_most)
    assert len(packs.window_starts(0)) == 3
    check([packs.window(0, 0), packs.window(0, 1)], lengths)


def test_whole_windows_decide_where_small_parts_do_not_fit():
    """The paper's mix fills packs of 9 tiles within half a percent of the bound, in parts that are large enough."""
    mix = tiled_lengths(100_000, seed=2)
    packs = BalancedPacks(mix, PackLimits(9, 4096), num_replicas=8)
    num_packs = int(packs.window_starts(0)[-1]) * 8
    assert num_packs <= 1.005 * min_packs(mix, PackLimits(9, 4096))
    assert sum(len(packs.window(0, window)) for window in range(len(packs.window_starts(0)) - 1)) == num_packs
