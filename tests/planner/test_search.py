"""Joint search against every partition of small models, each with every choice of levels."""

from dataclasses import replace

import numpy as np
import pytest

from omnibal.errors import InfeasibleError
from omnibal.planner.search import Choice, improve, propose, retreat
from tests.memory.oracles import fastest_levels, least_total, total_seconds
from tests.planner.problems import partitions, random_step_model, two_phase_seconds

SEEDS = range(24)


def recompute_of(model, stage, boundaries):
    """What a stage recomputes at its levels, in mean seconds."""
    layers = range(boundaries[stage], boundaries[stage + 1])
    levels = model.levels(boundaries)
    return total_seconds(model.costs.recompute_seconds, layers, [levels[layer] for layer in layers])


def everything(model):
    """Mean step seconds of every partition under the fastest levels that fit, by the public simulator."""
    seconds = {}
    for partition in partitions(model.profile, model.layout):
        try:
            levels = model.levels(partition.boundaries)
        except InfeasibleError:
            continue
        steps = [
            replace(Choice(model, partition.boundaries, 0.0).plan, recompute=levels).simulate(model.profile, loads)
            for loads in model.packing.steps
        ]
        seconds[partition.boundaries] = np.mean([step.step_seconds for step in steps])
    return seconds


@pytest.mark.parametrize("apart", [False, True], ids=["pipeline", "units"])
@pytest.mark.parametrize("seed", SEEDS)
def test_joint_search_is_within_two_per_cent_of_the_best_of_all(seed, apart):
    model = random_step_model(seed, apart=apart)
    best = min(everything(model).values())
    found = improve(model)
    assert best * (1 - 1e-12) <= found.step_seconds <= 1.02 * best
    assert found.step_seconds >= model.lower_bound_seconds * (1 - 1e-9)


@pytest.mark.parametrize("apart", [False, True], ids=["pipeline", "units"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_model_of_a_step_agrees_with_the_public_simulator(seed, apart):
    model = random_step_model(seed, apart=apart)
    expected = everything(model)
    found = model.evaluate(np.array(list(expected)))
    assert found == pytest.approx(list(expected.values()))
    bounds = model.bound(np.array(list(expected)))
    assert (bounds <= found * (1 + 1e-9)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_every_plan_fits_and_recomputes_no_more_than_it_must(seed):
    model = random_step_model(seed, max_blocks=3)
    for choice in (propose(model), improve(model)):
        levels = model.levels(choice.boundaries)
        for stage, memory in enumerate(model.footprint.stages(choice.partition, levels)):
            assert memory.total <= model.budgets[stage]
            layers = choice.partition.layers(stage)
            seconds = model.costs.recompute_seconds
            best = fastest_levels(model.footprint, stage, layers, seconds, model.budgets[stage])
            assert recompute_of(model, stage, choice.boundaries) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_where_the_best_partition_for_unbounded_memory_does_not_fit_another_one_does(seed):
    model = random_step_model(seed, tightness=0.15)
    assert np.isfinite(improve(model).step_seconds)
    assert improve(model).step_seconds <= two_phase_seconds(model)


def test_some_of_these_do_not_fit():
    fits = [np.isfinite(two_phase_seconds(random_step_model(seed, tightness=0.15))) for seed in SEEDS]
    assert 3 <= fits.count(False) < len(SEEDS)


@pytest.mark.parametrize("apart", [False, True], ids=["pipeline", "units"])
@pytest.mark.parametrize("seed", SEEDS)
def test_missing_bytes_are_exact(seed, apart):
    model = random_step_model(seed, max_blocks=3, tightness=-0.2, apart=apart)
    needs = [
        max(
            least_total(model.footprint, stage, partition.layers(stage)) - model.budgets[stage]
            for stage in range(model.num_stages)
        )
        for partition in partitions(model.profile, model.layout)
    ]
    assert model.missing[0] == min(needs) > 0 and not model.fits
    roomy = random_step_model(seed, max_blocks=3, tightness=0.0, apart=apart)
    assert roomy.missing[0] == 0 and roomy.fits


def test_unbounded_memory_leaves_nothing_to_recompute():
    model = random_step_model(3, tightness=1.0)
    assert set(model.levels(improve(model).boundaries)) == {"none"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_retreat_frees_what_was_missing_at_the_least_cost(seed):
    """Exactly: as fast as the fastest levels of all that free as much, other stages untouched, or an error."""
    model = random_step_model(seed, max_blocks=3)
    choice = improve(model)
    before = model.footprint.stages(choice.partition, model.levels(choice.boundaries))
    place = seed % model.num_stages
    missing = tuple(7 + seed if stage == place else 0 for stage in range(model.num_stages))
    layers, seconds = choice.partition.layers(place), model.costs.recompute_seconds
    best = fastest_levels(model.footprint, place, layers, seconds, before[place].total - missing[place])
    if np.isinf(best):
        with pytest.raises(InfeasibleError, match="bytes are missing"):
            retreat(choice, missing)
        return
    found = retreat(choice, missing)
    assert found.boundaries == choice.boundaries
    after = model.footprint.stages(found.partition, found.model.levels(found.boundaries))
    assert after[place].total <= before[place].total - missing[place]
    assert [a for s, a in enumerate(after) if s != place] == [b for s, b in enumerate(before) if s != place]
    assert recompute_of(found.model, place, found.boundaries) == pytest.approx(best, abs=1e-9)
    assert found.step_seconds >= choice.step_seconds * (1 - 1e-12)
