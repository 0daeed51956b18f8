import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from omnibal.cluster import Links
from omnibal.cost import CostModel, Load
from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError, InfeasibleError
from omnibal.pipeline.schedule import SCHEDULES
from omnibal.plan import Plan
from omnibal.planner import PlanRequest, make_plan
from omnibal.profile.records import LayerCost, ModelProfile
from tests.clusters import cluster
from tests.planner.problems import two_phase_seconds
from tools.synthetic import tiled_lengths

LENGTHS = tiled_lengths(6000, seed=5)
MIB = 2**20


def vision_language_model(vision_blocks=8, decoder_blocks=8, block_parameters=50 * MIB):
    """Blocks that keep 10 MiB per tile or 20 KiB per token, and compute for milliseconds."""

    def layer(name, size, *, seconds, saved, parameters=block_parameters):
        forward = CostModel(fixed=1e-4, **{size: seconds})
        kept = {"none": saved, "selective": saved / 2, "full": saved / 16}
        return LayerCost(
            name,
            name.split(".")[0],
            module="vision" if size == "vision_units" else "language",
            forward_seconds=forward,
            backward_seconds=forward,
            weight_seconds=forward,
            pending_bytes=CostModel(**{size: 0.7 * saved}),
            output_bytes=CostModel(**{size: saved / 16}),
            saved_bytes={level: CostModel(**{size: value}) for level, value in kept.items()},
            recompute_seconds={"selective": 0.2 * forward},
            parameter_bytes=parameters,
            gradient_bytes=parameters,
            optimizer_bytes=6 * parameters,
        )

    layers = [
        *(layer(f"vision_block.{i}", "vision_units", seconds=2e-3, saved=10 * MIB) for i in range(vision_blocks)),
        *(layer(f"decoder_block.{i}", "llm_tokens", seconds=4e-6, saved=20 * 1024) for i in range(decoder_blocks)),
        layer("head", "llm_tokens", seconds=2e-6, saved=16 * 1024, parameters=100 * MIB),
    ]
    return ModelProfile(tuple(layers), device="test", dtype="bfloat16")


PROFILE = vision_language_model()


def request(budget, *, num_devices=8, **changes):
    given = {
        "cluster": cluster(num_devices, budget, Links(1e11)),
        "num_stages": 4,
        "global_batch": 128,
        "head_room": 0.0,
        "method": "isf",
        "steps": 2,
        "accumulate_float32": False,
    }
    return PlanRequest(**given | changes)


def planned(budget, **changes):
    return make_plan(PROFILE, LENGTHS, request(budget, **changes))


@pytest.mark.parametrize("budget", [2800 * MIB, 3500 * MIB, 5000 * MIB])
def test_a_plan_fits_and_is_the_fastest_that_was_tried(budget):
    result = planned(budget)
    assert max(stage.memory.total for stage in result.plan.predicted.stages) <= budget
    assert result.choice is result.tried[0]
    assert all(result.choice.sample_seconds <= other.sample_seconds for other in result.tried)


@pytest.mark.parametrize("budget", [2300 * MIB, 2800 * MIB, 5000 * MIB])
def test_the_schedule_is_the_fastest_of_those_that_fit(budget):
    limits = PackLimits(9, 4096)
    seconds = {name: planned(budget, limits=limits, schedule=name).choice.step_seconds for name in SCHEDULES}
    found = planned(budget, limits=limits, schedule="auto")
    assert found.choice.step_seconds == min(seconds.values()) == seconds[found.plan.schedule]
    assert {choice.model.schedule_name for choice in found.tried} == set(SCHEDULES)


def test_a_zero_bubble_plan_says_what_weight_gradients_may_keep():
    result = planned(5000 * MIB, limits=PackLimits(9, 4096), schedule="auto")
    plan, stages = result.plan, result.plan.predicted.stages
    assert plan.schedule == "zero-bubble"
    for number, stage in enumerate(stages):
        of_one = sum(PROFILE.layers[i].pending_bytes(Load(9, 4096, 4096**2)) for i in plan.partition.layers(number))
        assert stage.pending_bytes == pytest.approx((number + 1 if number else 0) * of_one)
        assert stage.memory.pending == pytest.approx(number * of_one)
        assert stage.memory.total <= 5000 * MIB


def test_it_fits_where_the_best_partition_for_unbounded_memory_does_not():
    assert two_phase_seconds(planned(1900 * MIB).choice.model) == np.inf


def test_planning_together_is_faster_where_memory_is_tight():
    profile = vision_language_model(22, 20, 10 * MIB)
    results = [
        make_plan(profile, LENGTHS, request(budget * MIB, limits=PackLimits(9, 4096))) for budget in (1500, 1700, 1900)
    ]
    seconds = [(result.choice.step_seconds, two_phase_seconds(result.choice.model)) for result in results]
    assert max(1 - together / apart for together, apart in seconds) > 0.01


def test_more_memory_never_makes_a_step_slower():
    seconds = [
        planned(budget * MIB, limits=PackLimits(9, 4096)).choice.sample_seconds for budget in range(1900, 6000, 900)
    ]
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(seconds))


def test_what_nothing_fits_says_how_many_bytes_are_missing():
    with pytest.raises(
        InfeasibleError, match=r"memory must hold every stage, got 200.00 MiB .*: .* 4 stages"
    ) as caught:
        planned(200 * MIB)
    units, tokens, missing = map(
        int, re.search(r"(\d+) vision units and (\d+) tokens, (\d+) bytes", str(caught.value)).groups()
    )
    limits = PackLimits(units, tokens)
    enough = planned(200 * MIB + missing, limits=limits)
    assert max(stage.memory.total for stage in enough.plan.predicted.stages) == 200 * MIB + missing
    with pytest.raises(InfeasibleError, match=r" 1 bytes \(0.00 MiB\) are missing"):
        planned(200 * MIB + missing - 1, limits=limits)


def test_the_number_of_stages_is_chosen_among_divisors():
    result = planned(6000 * MIB, num_stages=None)
    counts = {choice.model.num_stages for choice in result.tried}
    assert counts <= {1, 2, 4, 8} and len(counts) >= 3
    fixed = [planned(6000 * MIB, num_stages=count).choice.sample_seconds for count in sorted(counts)]
    assert result.choice.sample_seconds <= min(fixed) * 1.01


def test_the_prediction_is_the_simulators(tmp_path):
    result = planned(2800 * MIB)
    plan = result.plan
    steps = [plan.simulate(PROFILE, loads) for loads in result.choice.model.packing.steps]
    predicted = plan.predicted
    assert predicted.step_seconds == pytest.approx(np.mean([step.step_seconds for step in steps]), rel=1e-5)
    assert predicted.step_seconds == pytest.approx(result.choice.step_seconds, rel=1e-5)
    assert predicted.bubble_ratio == pytest.approx(np.mean([step.bubble_ratio for step in steps]), rel=1e-5)
    assert np.mean([stage.idle_ratio for stage in predicted.stages]) == pytest.approx(predicted.bubble_ratio, abs=0.01)
    busy = np.mean([replica.busy_seconds for step in steps for replica in step.replicas], axis=0)
    passes = [stage.forward_seconds + stage.backward_seconds for stage in predicted.stages]
    assert np.array(passes) * plan.micro_batches == pytest.approx(busy, rel=1e-4)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").predicted == predicted


def test_equal_requests_make_equal_plans():
    assert planned(2800 * MIB).plan == planned(2800 * MIB).plan


def test_a_budget_for_each_stage():
    roomy = planned(6000 * MIB, limits=PackLimits(9, 4096)).plan.predicted
    budgets = (*(2500 * MIB,) * 2, *(6000 * MIB,) * 6)
    assert roomy.stages[0].memory.total > budgets[0]
    stages = planned(budgets, limits=PackLimits(9, 4096)).plan.predicted.stages
    assert stages[0].memory.total <= budgets[0]


def test_one_stage_and_one_micro_batch_are_possible():
    plan = planned(30_000 * MIB, num_devices=2, num_stages=1, global_batch=8, batch_tolerance=0.3).plan
    assert plan.num_stages == 1


def test_frozen_layers_at_the_start_recompute_nothing():
    frozen = tuple(
        replace(layer, trainable=False, gradient_bytes=0, optimizer_bytes=0, weight_seconds=CostModel())
        if layer.kind == "vision_block"
        else layer
        for layer in PROFILE.layers
    )
    profile = ModelProfile(frozen, device="test", dtype="bfloat16")
    plan = make_plan(profile, LENGTHS, request(1900 * MIB)).plan
    first = plan.partition.layers(0)
    assert {plan.recompute[layer] for layer in first if profile.layers[layer].kind == "vision_block"} == {"none"}


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="num_stages must be at most the model's 17 layers, got 32"):
        planned(6000 * MIB, num_devices=32, num_stages=32)


@pytest.mark.parametrize("global_batch", [10, 12, 20, 128])
def test_a_plan_keeps_the_samples_of_a_step_if_any_does(global_batch):
    # Eight replicas' packs of the paper's limits hold 37 samples at least, and are the fastest for each of them.
    found = planned(30_000 * MIB, num_stages=None, global_batch=global_batch)
    assert found.plan.predicted.samples_per_step == pytest.approx(global_batch, rel=0.05)


def test_without_a_plan_that_keeps_them_the_nearest_counts():
    found = planned(30_000 * MIB, num_stages=1, global_batch=12)
    steps = [choice.model.packing.samples_per_step for choice in found.tried]
    assert found.plan.predicted.samples_per_step == pytest.approx(min(steps, key=lambda samples: abs(samples - 12)))
