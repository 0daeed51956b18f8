from dataclasses import replace

import numpy as np
import pytest

from omnibal.cluster import Links
from omnibal.data.limits import PackLimits
from omnibal.data.packs import random_padded_steps
from omnibal.data.sampler import BalancedBatchSampler
from omnibal.data.synthetic import tiled_lengths
from omnibal.pipeline.boundaries import Partition
from omnibal.pipeline.schedule import zero_bubble
from omnibal.pipeline.simulate import simulate_step
from omnibal.plan import Plan
from omnibal.planner.ladder import plan_ladder
from tests.pipeline.profiles import layer, profile

LINKS = Links(1e6)
LENGTHS = tiled_lengths(3000, seed=3)
PLAN = Plan(PackLimits(9, 4096), 3, Partition((0, 3, 4)), ("none", "none", "full", "none"))


@pytest.fixture(scope="module")
def costs():
    """Four layers; the last one has most of the parameters and costs as much as the others."""
    sizes = (1, 1, 1, 30)
    return profile(
        layer(f"block.{number}", forward=0.01 * (number + 1), gradient_bytes=size) for number, size in enumerate(sizes)
    )


@pytest.fixture(scope="module")
def rungs(costs):
    return plan_ladder(costs, PLAN, LENGTHS, num_replicas=2, batch_size=4, steps=5, links=LINKS, zero_stage=0)


def test_another_schedule_is_a_rung_of_its_own(costs, rungs):
    plan = replace(PLAN, schedule="zero-bubble")
    *others, last = plan_ladder(costs, plan, LENGTHS, num_replicas=2, batch_size=4, steps=5, links=LINKS, zero_stage=0)
    assert [rung.step_seconds for rung in others] == [rung.step_seconds for rung in rungs]
    assert (last.name, last.steps, last.recompute) == ("+ schedule", rungs[-1].steps, rungs[-1].recompute)
    split = simulate_step(
        costs, PLAN.partition, last.steps[0], LINKS, recompute=PLAN.recompute, schedule=zero_bubble(2, 3),
        mode="overlap",
    )  # fmt: skip
    assert last.simulated[0].step_seconds == split.step_seconds < rungs[-1].simulated[0].step_seconds


def test_one_thing_changes_at_a_time(costs, rungs):
    before, data, model, memory = rungs
    assert [rung.name for rung in rungs] == ["as today", "+ data", "+ model", "+ memory"]
    assert before.partition == data.partition == Partition((0, 3, 4))
    assert before.recompute == data.recompute == model.recompute == ("full",) * 4
    assert data.steps == model.steps == memory.steps
    assert (memory.partition, memory.recompute) == (PLAN.partition, PLAN.recompute)


def test_loads_are_those_of_the_sampler_and_of_padded_batches(rungs):
    sampler = BalancedBatchSampler(LENGTHS, PLAN.limits, num_replicas=2, rank=0, micro_batches=3)
    assert rungs[1].steps[0] == tuple(sampler.step(0).load(LENGTHS))
    assert len(rungs[1].steps) == 5
    micro_batches = round(rungs[1].samples_per_step / 8)
    padded = random_padded_steps(LENGTHS, batch_size=4, num_replicas=2, micro_batches=micro_batches, steps=5)
    assert rungs[0].load == padded
    assert rungs[0].samples_per_step == 8 * micro_batches


def test_figures_are_those_of_the_simulator(costs, rungs):
    for rung in rungs:
        steps = [simulate_step(costs, rung.partition, step, LINKS, recompute=rung.recompute) for step in rung.steps]
        seconds = np.mean([step.step_seconds for step in steps])
        assert rung.step_seconds == pytest.approx(seconds)
        assert rung.samples_per_second == pytest.approx(rung.samples_per_step / seconds)
        assert rung.bubble_ratio == pytest.approx(np.mean([step.bubble_ratio for step in steps]))
