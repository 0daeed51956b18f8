"""Sizing: what is known of the samples, and how many packs they need."""

import numpy as np
import pytest

from omnibal.data.balancing.sizing import COUNTED, packs_needed, survey
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.policies import DEFAULT_COST

LIMITS = PackLimits(9, 4096)


def lengths_of(num_samples):
    """A third have five tiles, which do not combine; a few exceed a limit."""
    chance = np.random.default_rng(num_samples)
    tiles = chance.choice([0, 1, 3, 5, 11], num_samples, p=[0.1, 0.4, 0.15, 0.34, 0.01])
    return SampleLengths(tiles, 200 * tiles + chance.integers(1, 500, num_samples))


@pytest.mark.parametrize("part", [None, np.arange(0, 20_000, 3)])
def test_a_drawn_part_says_no_less_of_sizes_than_all_samples(part):
    lengths = lengths_of(20_000)
    everyone = survey(lengths, LIMITS, DEFAULT_COST, part, None)
    drawn = survey(lengths, LIMITS, DEFAULT_COST, part, np.arange(0, 20_000, 6))
    assert not everyone.driver.is_volume
    assert drawn.driver.error == 0
    assert drawn.driver.mean == pytest.approx(everyone.driver.mean, rel=1e-12)
    assert (drawn.mean_vision, drawn.mean_tokens) == (everyone.mean_vision, everyone.mean_tokens)


@pytest.mark.parametrize("part", [None, np.arange(0, 20_000, 3)])
def test_of_too_many_samples_only_totals_are_exact(monkeypatch, part):
    monkeypatch.setattr("omnibal.data.balancing.sizing.COUNTED", 1_000)
    lengths = lengths_of(20_000)
    everyone = survey(lengths, LIMITS, DEFAULT_COST, part, None)
    drawn = survey(lengths, LIMITS, DEFAULT_COST, part, np.arange(0, 20_000, 6))
    assert 0 < abs(drawn.driver.mean / everyone.driver.mean - 1) < 6 * drawn.driver.error < 0.2
    assert (drawn.mean_vision, drawn.mean_tokens) == (everyone.mean_vision, everyone.mean_tokens)


def test_totals_of_lengths_on_disk_are_not_summed_again(monkeypatch):
    """Those of 100 million samples would take a second, and half a gigabyte where one of them exceeds a limit."""
    lengths = lengths_of(5_000)
    monkeypatch.setattr("omnibal.data.balancing.sizing.COUNTED", 1_000)
    expected = survey(lengths, LIMITS, DEFAULT_COST, None, None).mean_tokens
    taken, take = [], SampleLengths.take

    def count(lengths, samples):
        taken.append(len(samples))
        return take(lengths, samples)

    monkeypatch.setattr(SampleLengths, "take", count)
    assert survey(lengths, LIMITS, DEFAULT_COST, None, np.arange(100)).mean_tokens == expected
    assert max(taken) < 200


def test_the_reserve_is_for_what_chance_makes_of_parts():
    """One block leaves nothing to chance; each of two holds more than its half by sqrt(1 / N) standard deviations."""
    known = survey(lengths_of(40_000), LIMITS, DEFAULT_COST, None, None)
    bound = known.num_samples * known.driver.mean
    assert packs_needed(known, blocks=1, window=1 << 20) == pytest.approx(1.0025 * bound)
    deviation = known.driver.spread() / np.sqrt(40_000)
    assert packs_needed(known, blocks=2, window=1 << 20) == pytest.approx(bound * (1.001 + 6 * deviation))
    halves = np.random.default_rng(0).permuted(np.tile(known.driver.shares, (400, 1)), axis=1)[:, :20_000].mean(axis=1)
    assert halves.std() == pytest.approx(known.driver.mean * deviation, rel=0.1)


def test_counting_is_for_as_many_samples_as_it_takes_no_time_for():
    assert COUNTED >= 1 << 20
