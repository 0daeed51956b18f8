from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limit_search import TRAP_WASTE, ScoredLimits, find_trap, forced_waste, search_limits
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio, volume_bound
from omnibal.data.packing_spec import DEFAULT_COST
from omnibal.errors import ConfigError, InfeasibleError
from tests.data.real_lengths import needs_real_lengths, real_lengths
from tests.data.strategies import pack_limits, sample_lengths
from tests.oracles import fewest_packs
from tools.synthetic import tiled_lengths

LENGTHS = tiled_lengths(4000)


def test_scores_are_those_of_an_epoch_under_the_limits():
    found = search_limits(LENGTHS, PackLimits(11, 6000), num_replicas=4, method="isf", seed=3)
    assert {scored.limits.vision_units for scored in found} == set(range(5, 12))
    short = 0
    for scored in found[:8]:
        epoch = arrange_epoch(LENGTHS, scored.limits, num_replicas=4, method="isf", seed=3)
        num_packs = np.count_nonzero(epoch.packs.sizes)
        steps = epoch.steps[: num_packs // 4]  # where the drawn samples end is chance
        short += len(steps) < epoch.num_steps
        assert scored.packs_over_volume == num_packs / volume_bound(LENGTHS, scored.limits) - 1
        assert scored.step_share == 4 / volume_bound(LENGTHS, scored.limits)
        assert scored.dist_ratio_vision == dist_ratio(epoch.packs.vision_units(LENGTHS)[steps])
        assert scored.dist_ratio_cost == dist_ratio(DEFAULT_COST(epoch.packs.load(LENGTHS))[steps])
        assert scored.samples_per_pack == 4000 / num_packs
    assert short
    assert [one.waste for one in found] == sorted((one.waste for one in found), key=lambda waste: round(waste, 4))


def test_what_fills_the_last_step_is_no_waste():
    """In 16 steps of 64 ranks a step is 6 % of the packs: limits must not win by where it happens to end."""
    scored = ScoredLimits(PackLimits(9, 4096), 0.06, 0.05, 0.002, 0.03, 4.5)
    assert scored.waste == pytest.approx(0.042)
    assert replace(scored, packs_over_volume=0.04).waste == replace(scored, packs_over_volume=0.0).waste


def test_no_limits_above_the_ceiling_nor_below_the_largest_sample():
    for scored in search_limits(LENGTHS, PackLimits(20, 5000), method="isf", num_samples=500):
        assert 5 <= scored.limits.vision_units <= 20
        assert LENGTHS.summary.max_llm_tokens <= scored.limits.llm_tokens <= 5000


def test_a_ceiling_below_the_largest_sample_is_infeasible():
    with pytest.raises(InfeasibleError, match=r"largest sample \(5 vision units, 2952 LLM tokens\), got 4 and 9000"):
        search_limits(LENGTHS, PackLimits(4, 9000))


def test_samples_without_images_need_token_limits_only():
    lengths = SampleLengths([0] * 500, np.arange(1, 501))
    found = search_limits(lengths, PackLimits(10, 4000), num_replicas=1, method="isf")
    assert {scored.limits.vision_units for scored in found} == {0}
    assert {scored.limits.llm_tokens for scored in found} >= {500, 4000}


def test_a_limit_of_sounds_is_searched_where_the_ceiling_has_one():
    rng = np.random.default_rng(0)
    sounds = np.where(rng.random(300) < 0.4, rng.integers(10, 90, 300), 0)
    lengths = SampleLengths(rng.integers(0, 4, 300), rng.integers(20, 60, 300) + sounds // 2, sound_units=sounds)
    search = partial(search_limits, lengths, num_replicas=2)
    for scored in (found := search(PackLimits(8, 300, sound_units=250))):
        assert sounds.max() <= scored.limits.sound_units <= 250
        epoch = arrange_epoch(lengths, scored.limits, num_replicas=2)
        assert epoch.packs.sums(sounds).max() <= scored.limits.sound_units
    waste = {scored.limits: scored.waste - scored.dist_ratio_sound for scored in found}
    assert len({limits.sound_units for limits in waste}) > 5
    assert max(found[0].dist_ratio_sound, 0.01) < found[-1].dist_ratio_sound
    assert {scored.limits.sound_units for scored in search(PackLimits(4, 200))} == {None}
    with pytest.raises(InfeasibleError, match=r"LLM tokens, 89 sound units\), got 12 and 400, 50"):
        search(PackLimits(12, 400, sound_units=50))


def test_limits_that_leave_the_samples_hardly_a_step_are_not_tried():
    found = search_limits(LENGTHS, PackLimits(2**20, 2**22), num_replicas=4, method="isf")
    assert len(found) < 300
    assert max(scored.limits.vision_units for scored in found) == -(-LENGTHS.summary.total_vision_units // (8 * 4))


def test_more_samples_are_drawn_where_packs_are_larger():
    lengths = SampleLengths([0] * 40_000, [10] * 40_000)
    found = search_limits(lengths, PackLimits(0, 12000), num_replicas=4, method="isf")
    assert max(scored.limits.llm_tokens for scored in found) == 12000  # 8 steps of 4 such packs: 38,400 samples


def test_every_pair_of_limits_may_be_chosen():
    seen = []
    found = search_limits(LENGTHS, PackLimits(6, 4000), method="isf", choose=lambda all_: seen.extend(all_) or all_)
    assert sorted(seen, key=repr) == sorted((scored.limits for scored in found), key=repr)


def test_at_least_one_sample():
    with pytest.raises(ConfigError, match="at least one sample"):
        search_limits(SampleLengths([], []), PackLimits(9, 4096))


@needs_real_lengths
def test_the_search_avoids_the_traps_of_real_lengths():
    found = search_limits(real_lengths(), PackLimits(18, 6000), method="isf", num_samples=8000)
    traps = {scored.limits.vision_units for scored in found if find_trap(real_lengths(), scored.limits)}
    assert traps >= {9, 12, 17} and found[0].limits.vision_units not in traps
    at_12 = min(scored.packs_over_volume for scored in found if scored.limits.vision_units == 12)
    at_16 = min(scored.packs_over_volume for scored in found if scored.limits.vision_units == 16)
    assert at_12 > 0.1
    assert at_16 < 0.05


def lengths_of(vision_units):
    return SampleLengths(vision_units, [100] * len(vision_units))


@needs_real_lengths
def test_traps_among_limits_for_real_tiles():
    lengths = real_lengths()  # 1, 3, 4 and 5 tiles
    traps = [limit for limit in range(8, 34) if find_trap(lengths, PackLimits(limit, 10**6))]
    assert traps == [8, 9, 12, 14, 17]
    warning = find_trap(lengths, PackLimits(12, 10**6))
    assert warning.startswith(
        "vision limit 12 is a trap: the samples need at least 21387 packs where their volume asks"
    )
    assert "no more than 2 of 5 vision units (52 % of the samples) fit, which leaves 2 of 12 to the 11 %" in warning
    assert warning.endswith("; 13 wastes 0.0 %")


def test_no_limit_is_a_trap_without_images_or_for_small_samples():
    assert find_trap(lengths_of([0] * 50), PackLimits(0, 4096)) is None
    assert find_trap(lengths_of([1] * 50), PackLimits(9, 4096)) is None
    assert find_trap(lengths_of([]), PackLimits(9, 4096)) is None


def test_a_trap_without_a_better_limit_nearby_names_none():
    warning = find_trap(lengths_of([60] * 50), PackLimits(100, 10**6))
    assert "no more than 1 of 60 vision units (100 % of the samples) fits, which leaves 40 of 100 to the 0 %" in warning
    assert "wastes" not in warning


@given(st.lists(st.integers(1, 8), min_size=1, max_size=8), st.integers(8, 14))
def test_waste_that_is_called_forced_is_forced(sizes, limit):
    counts = np.bincount(sizes, minlength=limit + 1)
    volume = -(-sum(sizes) // limit)
    assert 0 <= forced_waste(counts) <= fewest_packs([(size, 0) for size in sizes], PackLimits(limit, 1)) / volume - 1


@given(sample_lengths(), pack_limits())
def test_a_warning_for_any_samples_and_limits(lengths, limits):
    warning = find_trap(lengths, limits)
    assert warning is None or f"vision limit {limits.vision_units} is a trap" in warning


@pytest.mark.parametrize("count", [10, 1000])
def test_the_remedy_is_none(count):
    lengths = lengths_of([5, 3] * count)
    remedy = int(find_trap(lengths, PackLimits(12, 10**6)).rpartition("; ")[2].split()[0])
    counts = np.bincount(lengths.vision_units, minlength=remedy + 1)
    assert forced_waste(counts) <= TRAP_WASTE
