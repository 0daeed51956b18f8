import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.traps import TRAP_WASTE, find_trap, forced_waste
from tests.data.real_lengths import needs_real_lengths, real_lengths
from tests.data.strategies import pack_limits, sample_lengths
from tests.oracles import fewest_packs


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
