"""Levels against every choice of small stages."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal.advise.models import Model
from omnibal.cluster import Layout
from omnibal.cost import CostModel, Load
from omnibal.device import Device
from omnibal.errors import InfeasibleError
from omnibal.memory.footprint import Footprint
from omnibal.memory.recompute import (
    KEPT,
    LEVEL,
    NOT_OFFERED,
    ORIGIN,
    PEAK,
    TIME,
    StageTable,
    choose_levels,
    extend,
    least_bytes,
    least_recompute,
    recompute_seconds,
    start,
    sweep,
)
from omnibal.pipeline.schedule import one_f_one_b
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import LEVELS
from tests.memory.models import block, generator, model, random_model, random_schedule
from tests.memory.oracles import fastest_columns, fastest_levels, least_total, peak_bytes, total_seconds

LOADS = Load([3, 5], [100, 200])


def problem(seed):
    rng = generator(seed)
    profile = random_model(rng, max_blocks=3)
    num_stages = int(rng.integers(1, 4))
    schedule = random_schedule(rng, num_stages)
    layout = Layout(num_stages, int(rng.integers(1, 4)))
    footprint = Footprint(profile, LOADS[1], schedule, layout, overhead_bytes=0)
    stage = int(rng.integers(num_stages))
    a = 0 if stage == 0 else int(rng.integers(stage, len(profile.layers) - 1))
    b = len(profile.layers) if stage == num_stages - 1 else int(rng.integers(a + 1, len(profile.layers) + 1))
    return rng, footprint, stage, range(a, b), recompute_seconds(profile, LOADS)


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_no_choice_that_fits_is_faster(seed):
    rng, footprint, stage, layers, seconds = problem(seed)
    least = least_total(footprint, stage, layers)
    most = footprint.stage(stage, layers, ["none"] * len(layers)).total
    budget = int(rng.integers(least, most + 2))
    levels = choose_levels(footprint, stage, layers, seconds, budget)
    assert footprint.stage(stage, layers, levels).total <= budget
    best = fastest_levels(footprint, stage, layers, seconds, budget)
    assert total_seconds(seconds, layers, levels) == pytest.approx(best, abs=1e-9)


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_one_byte_less_than_the_least_is_refused(seed):
    _, footprint, stage, layers, seconds = problem(seed)
    least = least_total(footprint, stage, layers)
    levels = choose_levels(footprint, stage, layers, seconds, least)
    assert footprint.stage(stage, layers, levels).total == least
    with pytest.raises(InfeasibleError, match=rf"stage {stage} must fit .*\(5 bytes are missing\)"):
        choose_levels(footprint, stage, layers, seconds, least - 5)


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_columns_against_brute_force(seed):
    rng = generator(seed)
    shape = (int(rng.integers(1, 6)), int(rng.integers(1, 4)))
    kept, transient = rng.integers(0, 40, shape), rng.integers(0, 60, shape)
    seconds = rng.integers(0, 9, shape).astype(float)
    absent = rng.random(shape) < 0.2
    absent[:, 0] = False
    kept[absent] = transient[absent] = NOT_OFFERED
    given_ = {"held": int(rng.integers(1, 4)), "least_transient": int(rng.integers(0, 50))}
    room = int(rng.integers(0, 300))
    best = fastest_columns(kept, transient, seconds, room_bytes=room, **given_)
    chosen = least_recompute(kept, transient, seconds, room_bytes=room, **given_)
    assert (chosen is None) == (best == np.inf) == (least_bytes(kept, transient, **given_) > room)
    if chosen is not None:
        rows = np.arange(len(kept))
        assert seconds[rows, chosen].sum() == best
        assert peak_bytes(kept, transient, chosen, **given_) <= room


def test_nothing_recomputes_where_everything_fits():
    footprint = Footprint(
        model([block(f"block.{i}") for i in range(4)]), LOADS[0], one_f_one_b(1, 1), Layout(), overhead_bytes=0
    )
    seconds = recompute_seconds(footprint.profile, LOADS)
    assert choose_levels(footprint, 0, range(4), seconds, 10**6) == ("none",) * 4


def four_blocks_and_a_head(**options):
    layers = [block(f"block.{i}", none=99, full=9, output=0, **options) for i in range(4)]
    layers.append(block("head", none=0, full=0, output=0))
    return Footprint(model(layers), LOADS[0], one_f_one_b(1, 1), Layout(), overhead_bytes=0)


@pytest.mark.parametrize("count", range(4))  # the last one alone would bring back what it saves
def test_of_equal_layers_the_first_recompute(count):
    footprint = four_blocks_and_a_head()
    expected = ("full",) * count + ("none",) * (5 - count)
    budget = footprint.stage(0, range(5), expected).total
    seconds = recompute_seconds(footprint.profile, LOADS)
    assert choose_levels(footprint, 0, range(5), seconds, budget) == expected


def test_what_the_first_layers_bring_back_finds_room_that_the_last_ones_have_freed():
    footprint = four_blocks_and_a_head()

    def total(*levels):
        return footprint.stage(0, range(5), (*levels, "none")).total

    # Gradients are a third of 99 bytes; recomputing the first layer brings back 90 when 297 have been freed.
    assert total("full", "none", "none", "none") == total("none", "none", "none", "none") - 90
    # Recomputing the last one brings back all it had saved.
    assert total("none", "none", "none", "full") == total("none", "none", "none", "none")


def test_a_transient_that_does_not_fit_forbids_its_level():
    # Recomputing the wide layer, the last one, would need 800 bytes at once; the narrow ones give way instead.
    layers = [*(block(f"narrow.{i}", output=0) for i in range(3)), block("wide", none=1000, full=200, output=0)]
    footprint = Footprint(model(layers), LOADS[0], one_f_one_b(1, 1), Layout(), overhead_bytes=0)
    seconds = np.array([[0.0, 0.0, 1.1]] * 3 + [[0.0, 0.0, 2.0]])
    budget = footprint.stage(0, range(4), ["full", "full", "none", "none"]).total
    assert footprint.stage(0, range(4), ["none", "none", "none", "full"]).total > budget
    assert choose_levels(footprint, 0, range(4), seconds, budget) == ("full", "full", "none", "none")


def test_seconds_are_the_mean_over_micro_batches():
    layer = block("block.0", selective=50, forward=3.0)
    object.__setattr__(layer, "recompute_seconds", layer.recompute_seconds | {"full": CostModel(llm_tokens=0.01)})
    assert recompute_seconds(model([layer]), LOADS).tolist() == [[0.0, 1.0, 1.5]]


def test_frozen_layers_at_the_start_cost_nothing_to_recompute():
    profile = model([block("block.0", trainable=False), block("block.1")])
    assert recompute_seconds(profile, LOADS)[:, 2].tolist() == [0.0, 1.0]


def test_levels_are_ordered_from_most_to_least_kept():
    assert LEVELS == ("none", "selective", "full")


LOADS = Load([3, 5], [100, 200])


def stage_places(num_layers, num_stages):
    """Every (stage, layers) that leaves the other stages a layer."""
    for stage in range(num_stages):
        for a in range(stage, num_layers) if stage else [0]:
            last = num_layers - num_stages + stage + 1
            for b in range(a + 1, last + 1) if stage < num_stages - 1 else [num_layers]:
                if b > a:
                    yield stage, range(a, b)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6))
def test_every_entry_is_that_of_its_stage_alone(seed):
    rng = generator(seed)
    profile = random_model(rng, max_blocks=3)
    num_stages = int(rng.integers(1, 4))
    schedule = random_schedule(rng, num_stages)
    footprint = Footprint(profile, LOADS[1], schedule, Layout(num_stages))
    budgets = rng.integers(200, 1500, num_stages).tolist()
    seconds = recompute_seconds(profile, LOADS)
    table = StageTable(footprint, budgets)
    least, missing = table.least_seconds(seconds), table.missing_bytes()
    seen = np.zeros(least.shape, dtype=bool)
    for stage, layers in stage_places(len(profile.layers), num_stages):
        entry = (stage, layers.start, layers.stop)
        seen[entry] = True
        best = fastest_levels(footprint, stage, layers, seconds, budgets[stage])
        assert least[entry] == pytest.approx(best, abs=1e-9)
        assert missing[entry] == least_total(footprint, stage, layers) - budgets[stage]
    assert np.isinf(least[~seen]).all() and (missing[~seen] > 10**15).all()


OPTION = st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 60))
"""Bytes kept, time, transient bytes."""
LAYERS = st.lists(st.lists(OPTION, min_size=3, max_size=3), min_size=1, max_size=5)
HELD, FLOOR = st.integers(1, 4), st.integers(0, 40)


def arrays(layers):
    table = np.array(layers)
    return [np.ascontiguousarray(table[..., column]) for column in range(3)]


def choices(layers, held, floor):
    """Bytes kept, time and peak of every choice."""
    kept, time, transient = arrays(layers)
    for columns in product(range(3), repeat=len(layers)):
        rows = range(len(layers)), columns
        peak = peak_bytes(kept, transient, columns, held=held, least_transient=floor)
        yield int(kept[rows].sum()), int(time[rows].sum()), peak


def frontier_of(layers, held, floor, most):
    kept, time, transient = arrays(layers)
    frontier = start(floor)
    for layer in reversed(range(len(layers))):
        frontier = extend(frontier, kept[layer], time[layer], transient[layer], held, most)
    return frontier


@settings(deadline=None, max_examples=50)  # the first call compiles
@given(LAYERS, HELD, FLOOR, st.integers(0, 700))
def test_the_frontier_holds_the_best_of_all_choices_for_every_room(layers, held, floor, most):
    frontier = frontier_of(layers, held, floor, most)
    assert (np.diff(frontier[TIME]) >= 0).all()
    every = list(choices(layers, held, floor))
    assert set(zip(frontier[KEPT].tolist(), frontier[TIME].tolist(), frontier[PEAK].tolist(), strict=True)) <= set(
        every
    )
    for room in range(0, most + 1, 23):
        expected = min((time for _, time, peak in every if peak <= room), default=None)
        fitting = frontier[TIME][frontier[PEAK] <= room]
        assert (int(fitting[0]) if len(fitting) else None) == expected


def test_each_point_says_where_it_comes_from():
    behind = extend(start(0), np.array([5, 1]), np.array([0, 4]), np.zeros(2, dtype=int), 1, 100)
    frontier = extend(behind, np.array([10, 2]), np.array([0, 3]), np.zeros(2, dtype=int), 1, 100)
    assert frontier[KEPT].tolist() == [15, 7, 3] and frontier[TIME].tolist() == [0, 3, 7]
    assert frontier[ORIGIN].tolist() == [0, 0, 1] and frontier[LEVEL].tolist() == [0, 1, 1]


def test_a_level_that_is_not_offered_is_never_taken():
    frontier = extend(start(0), np.array([NOT_OFFERED, 3]), np.array([0, 1]), np.array([NOT_OFFERED, 0]), 2, 2**62)
    assert frontier[KEPT].tolist() == [3] and frontier[LEVEL].tolist() == [1]


def test_layers_that_are_alike_make_few_points():
    frontier = start(0)
    for _ in range(200):
        options = np.array([1003, 59]), np.array([0, 213]), np.array([300, 1244])
        frontier = extend(frontier, *options, 3, 10**9)
    assert frontier.shape[1] < 2 * 201


@pytest.mark.parametrize("name", ["InternVL3-1B", "LLaVA-1.5-7B", "Qwen2.5-VL-3B"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_with_memory_to_spare_no_layer_is_said_to_recompute(name, num_stages):
    # A head keeps and takes as much at every level.
    profile = analytic_profile(Model.known(name).records, Device.named("A100-80GB"))
    count = len(profile.layers)
    footprint = Footprint(profile, LOADS[1], one_f_one_b(num_stages, 2), Layout(num_stages, 1), overhead_bytes=0)
    assert profile.layers[-1].kind == "head"
    layers = range(0 if num_stages == 1 else count - 3, count)
    seconds = recompute_seconds(profile, LOADS)
    assert choose_levels(footprint, num_stages - 1, layers, seconds, 10**12) == ("none",) * len(layers)


@settings(deadline=None)
@given(LAYERS, HELD, FLOOR, st.lists(st.integers(-1, 400), min_size=5, max_size=5))
def test_a_sweep_is_right_for_every_start(layers, held, floor, rooms):
    room = np.array(rooms[: len(layers)])
    best, least = sweep(*arrays(layers), held, floor, room)
    for first in range(len(layers)):
        every = list(choices(layers[first:], held, floor))
        assert best[first] == min((time for _, time, peak in every if peak <= room[first]), default=-1)
        within = min(peak for _, _, peak in every)
        assert least[first] == (within if within <= room[: first + 1].max() else NOT_OFFERED)
