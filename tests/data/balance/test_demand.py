"""How many packs samples ask for."""

import numpy as np
import pytest

from omnibal.data.balance.rules import survey
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packing_spec import PackingSpec

LIMITS = PackLimits(9, 4096)


@pytest.fixture
def lengths():
    """A third have five tiles, which do not combine; a few exceed a limit."""
    chance = np.random.default_rng(5)
    tiles = chance.choice([0, 1, 3, 5, 11], 40_000, p=[0.1, 0.4, 0.15, 0.34, 0.01])
    return SampleLengths(tiles, 200 * tiles + chance.integers(1, 500, len(tiles)))


def test_packs_are_counted_exactly_whatever_was_drawn(lengths):
    """Else the reserve would have to cover what chance makes of the drawn ones: 2 % of the packs."""
    everyone = survey(PackingSpec(lengths, LIMITS))
    drawn = survey(PackingSpec(lengths, LIMITS), drawn=np.arange(0, 40_000, 6))
    assert not everyone.by_volume
    assert drawn.driver == everyone.driver
    assert drawn.other == everyone.other
    assert drawn.spread == pytest.approx(everyone.spread, rel=0.05)
    assert drawn.mean_cost == pytest.approx(everyone.mean_cost, rel=0.05)


def test_totals_that_the_lengths_know_are_what_counting_gives(lengths):
    """Where packs are asked for by volume and no sample exceeds a limit, nobody looks at all samples."""
    fitting = lengths.take(np.flatnonzero(lengths.vision_units <= 5))
    generous = PackLimits(64, 20_000)
    known = survey(PackingSpec(fitting, generous))
    counted = survey(PackingSpec(fitting, generous), np.arange(len(fitting)))
    assert known.by_volume
    assert known.driver == pytest.approx(counted.driver, rel=1e-3)  # shares of sizes are rounded down
    assert known.other == pytest.approx(counted.other, rel=1e-3)


def test_the_reserve_is_for_what_chance_makes_of_parts(lengths):
    """One block leaves nothing to chance; each of two holds more than its half by sqrt(1 / N) standard deviations."""
    demand = survey(PackingSpec(lengths, LIMITS))
    bound = demand.num_samples * demand.driver
    assert demand.packs_needed(1, 1 << 20) == pytest.approx(1.0025 * bound)
    assert demand.packs_needed(2, 1 << 20) == pytest.approx(bound * (1.001 + 6 * demand.spread / np.sqrt(40_000)))
