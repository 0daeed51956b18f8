from dataclasses import replace

import numpy as np
import pytest

from omnibal.cluster import Links
from omnibal.data.limits import PackLimits
from omnibal.data.packs import random_padded_steps
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import zero_bubble
from omnibal.pipeline.simulate import simulate_step
from omnibal.plan import Plan
from omnibal.planner.search import variants_up_to
from tests.clusters import on_cluster
from tests.pipeline.profiles import layer, profile
from tools.synthetic import tiled_lengths

LINKS = Links(1e6)
LENGTHS = tiled_lengths(3000, seed=3)
PLAN = on_cluster(
    Plan(PackLimits(9, 4096), 3, Partition((0, 3, 4)), ("none", "none", "full", "none")), 2, links=LINKS, zero_stage=0
)


@pytest.fixture(scope="module")
def costs():
    """Four layers; the last one has most of the parameters and costs as much as the others."""
    sizes = (1, 1, 1, 30)
    return profile(
        layer(f"block.{number}", forward=0.01 * (number + 1), gradient_bytes=size) for number, size in enumerate(sizes)
    )


@pytest.fixture(scope="module")
def variants(costs):
    return variants_up_to(PLAN, costs, LENGTHS, batch_size=4, steps=5)


def test_another_schedule_is_a_variant_of_its_own(costs, variants):
    plan = replace(PLAN, schedule="zero-bubble")
    *others, last = variants_up_to(plan, costs, LENGTHS, batch_size=4, steps=5)
    assert [variant.step_seconds for variant in others] == [variant.step_seconds for variant in variants]
    assert (last.name, last.steps, last.plan) == ("+ schedule", variants[-1].steps, plan)
    split = simulate_step(
        costs, PLAN.partition, last.steps[0], LINKS, recompute=PLAN.recompute, schedule=zero_bubble(2, 3),
        mode="overlap", zero_stage=0,
    )  # fmt: skip
    assert last.simulated[0].step_seconds == split.step_seconds < variants[-1].simulated[0].step_seconds


def test_one_thing_changes_at_a_time(costs, variants):
    before, data, model, memory = variants
    assert [variant.name for variant in variants] == ["random batches", "+ data", "+ model", "+ memory"]
    assert before.plan.partition == data.plan.partition == Partition((0, 3, 4))
    assert before.plan.recompute == data.plan.recompute == model.plan.recompute == ("full",) * 4
    assert data.steps == model.steps == memory.steps
    assert memory.plan == PLAN


def test_loads_are_those_of_the_sampler_and_of_padded_batches(variants):
    sampler = BalancedBatchSampler(LENGTHS, PLAN.limits, num_replicas=2, rank=0, micro_batches=3)
    assert variants[1].steps[0] == tuple(sampler.step(0).load)
    assert len(variants[1].steps) == 5
    micro_batches = round(variants[1].samples_per_step / 8)
    padded = random_padded_steps(LENGTHS, batch_size=4, num_replicas=2, micro_batches=micro_batches, steps=5)
    assert variants[0].load == padded
    assert variants[0].samples_per_step == 8 * micro_batches


def test_figures_are_those_of_the_simulator(costs, variants):
    for variant in variants:
        steps = [
            simulate_step(costs, variant.plan.partition, step, LINKS, zero_stage=0, recompute=variant.plan.recompute)
            for step in variant.steps
        ]
        seconds = np.mean([step.step_seconds for step in steps])
        assert variant.step_seconds == pytest.approx(seconds)
        assert variant.samples_per_second == pytest.approx(variant.samples_per_step / seconds)
        assert variant.bubble_ratio == pytest.approx(np.mean([step.bubble_ratio for step in steps]))
