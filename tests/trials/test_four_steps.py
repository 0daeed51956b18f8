"""The paper's four steps on the real engine, and on a made-up machine that measures exactly, more, or crashes."""

from itertools import pairwise

import pytest

from omnibal.data.limits import PackLimits
from omnibal.errors import InfeasibleError, OmnibalError
from omnibal.memory.paper import BlockBytes, block_modules
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from omnibal.trials.four_steps import take_four_steps
from omnibal.trials.run import Trial
from omnibal.vlm import load_model
from tests.engine.demo import demo_config
from tests.engine.launch import launch

MODULES = [None, *["vision"] * 4, None, *["language"] * 5, None]
PARTITION = Partition((0, 4, 12))
HELD = (2, 1)
BASE = (100, 150)
KEPT = {"vision": 7, "language": 11}
PLAN = Plan(PackLimits(4, 64), 4, PARTITION, ("none",) * 12)


def machine(budgets, *, surplus=0, crashes_above=None, tried=None, optimizer=(0, 0)):
    """Runs a plan: what stages hold, by what their blocks keep; ``surplus`` comes where more keep than in step 2.

    The optimizer's step holds so many bytes by itself, whatever the blocks keep.
    """

    def run(plan):
        passes = []
        for stage, (base, held) in enumerate(zip(BASE, HELD, strict=True)):
            kept = [MODULES[i] for i in PARTITION.layers(stage) if plan.recompute[i] == "none" and MODULES[i] in KEPT]
            passes.append(base + held * sum(KEPT[module] for module in kept) + surplus * (len(kept) > 2 + stage))
        if tried is not None:
            tried.append(plan.recompute)
        peaks = tuple(max(sizes) for sizes in zip(passes, optimizer, strict=True))
        missing = tuple(max(peak - budget, 0) for peak, budget in zip(peaks, budgets, strict=True))
        if not any(missing):
            return Trial(plan, (1.0,), peaks, tuple(passes))
        crashed = crashes_above is not None and any(p > crashes_above for p in peaks)
        held = () if crashed else (peaks, tuple(passes))
        return Trial(plan, (), *held, error="out of memory", missing_bytes=missing)

    return run


def kept(levels):
    return [
        sum(levels[i] == "none" and MODULES[i] in KEPT for i in PARTITION.layers(stage)) for stage in range(len(HELD))
    ]


@pytest.mark.slow
@pytest.mark.distributed
def test_on_the_real_engine(tmp_path):
    config = demo_config(tmp_path) | {"gradient_accumulation_steps": 4}
    modules = block_modules(load_model(config["omnibal"]["model"]["path"]).records)
    plan = Plan(PackLimits(12, 256), 4, Partition((0, 7, 13)), ("none",) * 13)
    arguments = config, plan, modules, 0.8, str(tmp_path)
    (found, ends, budgets), other = launch(2, "tests.trials.memory_trials:memory_trials", *arguments)
    assert other[0].plan == found.plan
    recomputed, some, *others, fits = found.trials
    assert recomputed.peak_bytes == ends[0]
    assert recomputed.error is some.error is fits.error is None
    # Where everything recomputes the optimizer's step is the peak; passes show what blocks keep all the same.
    assert all(passes < peak for passes, peak in zip(recomputed.pass_bytes, recomputed.peak_bytes, strict=True))
    assert min(found.block_bytes.vision, found.block_bytes.llm) > 0
    for short, after in pairwise([*others, fits]):
        excess = (max(peak - budget, 0) for peak, budget in zip(short.peak_bytes, budgets, strict=True))
        assert short.missing_bytes == after.retreat_bytes == tuple(excess)
        assert max(short.missing_bytes) > 0
    for stage in range(2):
        assert recomputed.peak_bytes[stage] < fits.peak_bytes[stage] <= budgets[stage]
    assert found.plan == fits.plan


@pytest.mark.parametrize(("budgets", "blocks"), [((1000, 1000), [3, 6]), ((131, 185), [2, 3]), ((100, 150), [0, 0])])
def test_as_many_blocks_keep_as_fit(budgets, blocks):
    result = take_four_steps(PLAN, MODULES, HELD, budgets, machine(budgets))
    assert (result.block_bytes.vision, result.block_bytes.llm) == pytest.approx((7, 11))
    assert kept(result.plan.recompute) == blocks
    assert len(result.trials) == 3
    assert result.trials[-1].error is None


def test_a_failed_trial_retreats_until_it_fits():
    budgets = (142, 205)
    result = take_four_steps(PLAN, MODULES, HELD, budgets, machine(budgets, surplus=9))
    assert [trial.error for trial in result.trials[2:]] == ["out of memory", None]
    assert result.trials[2].missing_bytes == result.trials[3].retreat_bytes == (9, 5)
    assert kept(result.trials[2].plan.recompute) == [3, 5]
    assert kept(result.plan.recompute) == [2, 4]


def test_an_optimizers_step_that_takes_the_most_hides_nothing():
    budgets = (131, 185)
    result = take_four_steps(PLAN, MODULES, HELD, budgets, machine(budgets, optimizer=(130, 184)))
    recomputed, some, fits = result.trials
    assert recomputed.peak_bytes == some.peak_bytes == (130, 184)
    assert (result.block_bytes.vision, result.block_bytes.llm) == pytest.approx((7, 11))
    assert kept(fits.plan.recompute) == kept(result.plan.recompute) == [2, 3]


def test_a_stage_that_no_longer_fits_with_all_recomputed_is_an_error():
    calm, budgets = machine((100, 150)), (100, 150)

    def run(plan):
        calls.append(plan)
        assert len(calls) < 9, "a plan that failed is tried again and again"
        return calm(plan) if len(calls) < 3 else Trial(plan, error="out of memory", missing_bytes=(1, 0))

    calls = []
    with pytest.raises(InfeasibleError, match="every stage must fit with all blocks recomputed, got out of memory"):
        take_four_steps(PLAN, MODULES, HELD, budgets, run)


def test_a_crash_in_the_second_step_keeps_fewer():
    tried = []
    budgets = (115, 170)
    result = take_four_steps(PLAN, MODULES, HELD, budgets, machine(budgets, crashes_above=120, tried=tried))
    assert [kept(levels) for levels in tried] == [[0, 0], [2, 3], [1, 2], [1, 2]]
    assert result.block_bytes == BlockBytes(pytest.approx(7), pytest.approx(11))
    budgets = (101, 151)
    result = take_four_steps(PLAN, MODULES, HELD, budgets, machine(budgets, crashes_above=0))
    assert kept(result.plan.recompute) == [0, 0]


def test_what_cannot_fit_or_fails_otherwise_is_an_error():
    with pytest.raises(InfeasibleError, match="every stage must fit with all blocks recomputed, got out of memory"):
        take_four_steps(PLAN, MODULES, HELD, (99, 150), machine((99, 150)))
    with pytest.raises(OmnibalError, match="a trial must run, got ValueError: no"):
        take_four_steps(PLAN, MODULES, HELD, (1, 1), lambda plan: Trial(plan, error="ValueError: no"))
