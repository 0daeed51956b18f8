"""The paper's four steps on the real engine, and on a made-up machine that measures exactly, more, or crashes."""

import pytest

from omnibal.data.limits import PackLimits
from omnibal.errors import InfeasibleError, OmnibalError
from omnibal.memory.paper import BlockBytes
from omnibal.pipeline.boundaries import Partition
from omnibal.plan import Plan
from omnibal.trials.four_steps import take_four_steps
from omnibal.trials.out_of_memory import read_missing
from omnibal.trials.run import Trial
from omnibal.vlm import load_model
from tests.engine.demo import demo_config
from tests.engine.launch import launch

KINDS = ["patch_embedding", *["vision_block"] * 4, "projector", *["decoder_block"] * 5, "head"]
PARTITION = Partition((0, 4, 12))
HELD = (2, 1)
BASE = (100, 150)
KEPT = {"vision_block": 7, "decoder_block": 11}
PLAN = Plan(PackLimits(4, 64), 4, PARTITION, ("none",) * 12)


def machine(budgets, *, surplus=0, crashes_above=None, tried=None):
    """Runs a plan: what stages hold, by what their blocks keep; ``surplus`` comes where more keep than in step 2."""

    def run(plan):
        peaks = []
        for stage, (base, held) in enumerate(zip(BASE, HELD, strict=True)):
            kept = [KINDS[i] for i in PARTITION.layers(stage) if plan.recompute[i] == "none" and KINDS[i] in KEPT]
            peaks.append(base + held * sum(KEPT[kind] for kind in kept) + surplus * (len(kept) > 2 + stage))
        if tried is not None:
            tried.append(plan.recompute)
        missing = tuple(max(peak - budget, 0) for peak, budget in zip(peaks, budgets, strict=True))
        if not any(missing):
            return Trial(plan, (1.0,), tuple(peaks))
        crashed = crashes_above is not None and any(p > crashes_above for p in peaks)
        return Trial(plan, (), () if crashed else tuple(peaks), "out of memory", missing)

    return run


def kept(levels):
    return [
        sum(levels[i] == "none" and KINDS[i] in KEPT for i in PARTITION.layers(stage)) for stage in range(len(HELD))
    ]


@pytest.mark.distributed
def test_on_the_real_engine(tmp_path):
    config = demo_config(tmp_path) | {"gradient_accumulation_steps": 4}
    kinds = [record.kind for record in load_model(config["omnibal"]["model"]["path"]).records]
    plan = Plan(PackLimits(12, 256), 4, Partition((0, 7, 13)), ("none",) * 13)
    arguments = config, plan, kinds, 0.8, str(tmp_path)
    (found, ends, budgets), other = launch(2, "tests.trials.memory_trials:memory_trials", *arguments)
    assert other[0].plan == found.plan
    # Where everything recomputes the optimizer's step is the peak, so blocks seem to keep less than they do.
    recomputed, some, short, fits = found.trials
    assert [recomputed.peak_bytes, short.peak_bytes] == list(ends)
    assert recomputed.error is some.error is fits.error is None
    assert short.missing_bytes == tuple(peak - budget for peak, budget in zip(ends[1], budgets, strict=True))
    assert min(short.missing_bytes) > 0
    assert fits.retreat_bytes == short.missing_bytes
    for stage in range(2):
        assert recomputed.peak_bytes[stage] < fits.peak_bytes[stage] <= budgets[stage] < short.peak_bytes[stage]
    assert found.plan == fits.plan
    # What the allocators of both devices said at last.
    assert read_missing(tmp_path, 2) == (2**29, 3 * 2**29)


@pytest.mark.parametrize(("budgets", "blocks"), [((1000, 1000), [3, 6]), ((131, 185), [2, 3]), ((100, 150), [0, 0])])
def test_as_many_blocks_keep_as_fit(budgets, blocks):
    result = take_four_steps(PLAN, KINDS, HELD, budgets, machine(budgets))
    assert (result.block_bytes.vision, result.block_bytes.llm) == pytest.approx((7, 11))
    assert kept(result.plan.recompute) == blocks
    assert len(result.trials) == 3
    assert result.trials[-1].error is None


def test_a_failed_trial_retreats_until_it_fits():
    budgets = (142, 205)
    result = take_four_steps(PLAN, KINDS, HELD, budgets, machine(budgets, surplus=9))
    assert [trial.error for trial in result.trials[2:]] == ["out of memory", None]
    assert result.trials[2].missing_bytes == result.trials[3].retreat_bytes == (9, 5)
    assert kept(result.trials[2].plan.recompute) == [3, 5]
    assert kept(result.plan.recompute) == [2, 4]


def test_a_crash_in_the_second_step_keeps_fewer():
    tried = []
    budgets = (115, 170)
    result = take_four_steps(PLAN, KINDS, HELD, budgets, machine(budgets, crashes_above=120, tried=tried))
    assert [kept(levels) for levels in tried] == [[0, 0], [2, 3], [1, 2], [1, 2]]
    assert result.block_bytes == BlockBytes(pytest.approx(7), pytest.approx(11))
    budgets = (101, 151)
    result = take_four_steps(PLAN, KINDS, HELD, budgets, machine(budgets, crashes_above=0))
    assert kept(result.plan.recompute) == [0, 0]


def test_what_cannot_fit_or_fails_otherwise_is_an_error():
    with pytest.raises(InfeasibleError, match="every stage must fit with all blocks recomputed, got out of memory"):
        take_four_steps(PLAN, KINDS, HELD, (99, 150), machine((99, 150)))
    with pytest.raises(OmnibalError, match="a trial must run, got ValueError: no"):
        take_four_steps(PLAN, KINDS, HELD, (1, 1), lambda plan: Trial(plan, error="ValueError: no"))
