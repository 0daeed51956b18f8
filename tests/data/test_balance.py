import numpy as np

from omnibal.data import balance
from omnibal.data.balance import BalancedPacks
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits


def test_where_no_even_packs_fit_the_densest_are_the_plan(monkeypatch):
    """Even packs were not found where samples of four tiles and those of one had to meet, under a limit of five."""
    chance = np.random.default_rng(0)
    tiles = chance.permutation(np.repeat([0, 1, 3, 4, 5], [2_000, 47_000, 4_700, 1_100, 11_000]))
    lengths = SampleLengths(tiles, 256 * tiles + chance.integers(1, 2000, len(tiles)))
    limits = PackLimits(5, 4096)
    packs = BalancedPacks(lengths, limits, num_replicas=32, micro_batches=4)
    plan = balance.plan_steps

    def refuse_even_packs(samples, columns, instructions, *others):
        return plan(samples, columns, instructions, *others) if instructions.exchange_steps == 0 else None

    monkeypatch.setattr(balance, "plan_steps", refuse_even_packs)
    assert len(packs.window_starts) == 3
    windows = [packs.window(0, 0), packs.window(0, 1)]
    assert sorted(sample for window in windows for sample in window.samples) == list(range(len(tiles)))
    for window in windows:
        load = window.load(lengths)
        assert len(window) % 128 == 0
        assert window.sizes.min() > 0
        assert load.vision_units.max() <= 5
        assert load.llm_tokens.max() <= 4096
