"""Packs that every rank makes of its own buffer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal.cost import Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio, source_mix, step_randomness
from omnibal.data.packing_spec import DEFAULT_COST
from omnibal.feeds.buffer_plan import Aim, BufferLoad, agree, buffer_load, grown, growth, plan_buffer
from tests.data.strategies import pack_limits, sample_lengths
from tools.sampling.buffers import simulate_buffers
from tools.synthetic import tiled_lengths

LIMITS = PackLimits(16, 7296)


@given(sample_lengths(), pack_limits(), st.integers(1, 12), st.integers(0, 12), st.integers(0, 20), st.integers(0, 9))
def test_packs_keep_the_limits_and_no_sample_is_passed_over_twice(lengths, limits, num_packs, vision, waited, seed):
    mean_cost = float(DEFAULT_COST.llm_tokens * 20)
    waited = min(waited, len(lengths))
    packs = plan_buffer(lengths, Aim(num_packs, vision, mean_cost), limits, waited=waited, seed=[seed])
    taken = set(packs.samples.tolist())
    assert len(packs) == num_packs
    assert len(taken) == len(packs.samples) > 0 or not len(lengths)
    for pack in packs:
        alone = len(pack) == 1
        assert alone or lengths.vision_units[pack].sum() <= limits.vision_units
        assert alone or lengths.llm_tokens[pack].sum() <= limits.llm_tokens
    left = [sample for sample in range(waited) if sample not in taken]
    if left:  # no sample overtakes one that has waited already
        assert max(taken) < min(left)


def test_ranks_are_even_steps_are_random_and_no_sample_starves():
    lengths = tiled_lengths(20_000, seed=3)
    packs, age = simulate_buffers(lengths, LIMITS, num_ranks=8, buffer=256, least_windows=6, least_steps=0)
    steps, load = np.arange(len(packs)).reshape(-1, 8), packs.load(lengths)
    # Random packs that are filled one after the other leave about 0.3 of both.
    assert dist_ratio(load.vision_units[steps]) < 0.01
    assert dist_ratio(DEFAULT_COST(load)[steps]) < 0.02
    assert step_randomness(source_mix(lengths.source, packs, steps)) < 1.15
    assert age < 2 * 256


def test_ranks_are_even_in_sounds_beside_images_and_keep_their_limit():
    rng, count = np.random.default_rng(0), 4_000
    kind = rng.random(count)
    vision = np.where(kind < 0.45, rng.integers(200, 2000, count), 0)
    sounds = np.where((kind > 0.4) & (kind < 0.7), rng.integers(20, 1500, count), 0)
    tokens = rng.integers(20, 400, count) + vision // 4 + sounds // 2
    lengths, limits = SampleLengths(vision, tokens, sound_units=sounds), PackLimits(8000, 6000, sound_units=3000)
    packs, _ = simulate_buffers(lengths, limits, num_ranks=4, buffer=128, least_windows=3, least_steps=0)
    steps, load = np.arange(len(packs)).reshape(-1, 4), packs.load(lengths)
    assert load.sound_units.max() <= 3000
    # About 0.1 where ranks do not agree on sounds.
    ratios = [dist_ratio(units[steps]) for units in (load.vision_units, load.sound_units, DEFAULT_COST(load))]
    assert max(ratios) < 0.04, ratios


def test_a_window_holds_what_ranks_agreed_on_and_takes_what_is_left_from_the_emptiest_buffer():
    full, half = BufferLoad(40.0, 400.0, 4000.0, False), BufferLoad(20.0, 200.0, 2000.0, False)
    aim = agree([full, half], 2)
    assert (aim.num_packs, round(aim.vision_units, 2), round(aim.cost, 1)) == (14, 9.95, 99.5)
    # One that has come to an end is not waited for; when all have, all is taken.
    assert agree([full, half._replace(ended=True)], 2).num_packs == 30
    assert agree([full._replace(ended=True), half._replace(ended=True)], 2).num_packs == 42


def test_a_buffer_grows_until_it_fills_a_step_or_its_bytes_are_used_up():
    short, long = BufferLoad(2.0, 20.0, 200.0, False), BufferLoad(40.0, 400.0, 4000.0, False)
    # Packs hold about 100: with a reserve, one rank has two of eight. It doubles, and ranks look again.
    assert growth([short, long], 8) == [2.0, 1.0]
    assert growth([short._replace(ended=True), long], 8) == [1.0, 1.0]
    assert growth([long, long], 8) == [1.0, 1.0]
    # Where one cannot grow, the other need not have more than that one has.
    assert growth([short._replace(bounded=True), long], 8) == [1.0, 1.0]
    assert growth([short._replace(bounded=True), BufferLoad(1.0, 10.0, 100.0, False)], 8) == [1.0, 2.0]
    aim = agree([short._replace(bounded=True), long], 8)
    assert (aim.num_packs, round(aim.cost)) == (8, 200 // 8)
    assert [grown(10, 1.0), grown(10, 1.5), grown(1, 1.01)] == [10, 15, 2]


def test_a_simulated_buffer_of_short_samples_grows_as_well():
    lengths = SampleLengths([0] * 8, [5] * 8)
    packs, _ = simulate_buffers(lengths, PackLimits(1, 1000), num_ranks=2, buffer=8, least_windows=1, least_steps=0)
    assert packs.llm_tokens(lengths).min() > 900


def test_ranks_of_texts_alone_run_beside_others():
    lengths = [SampleLengths([0] * 512, [300] * 512), SampleLengths([4] * 128, [1200] * 128)]
    aim = agree([buffer_load(part, LIMITS, ended=False) for part in lengths], 1)
    packs = [plan_buffer(part, aim, LIMITS, waited=0, seed=[0]) for part in lengths]
    tokens = [found.llm_tokens(part) for found, part in zip(packs, lengths, strict=True)]
    # Four images fill a pack; texts make up for what they lack as far as they are allowed to.
    assert tokens[1].max() == 16 // 4 * 1200 < tokens[0].min()
    assert tokens[0].max() / tokens[0].min() < 1.1


def test_a_buffer_that_begins_with_large_samples_gives_as_many_as_others():
    """Else the first windows of all ranks would have large samples, and the next ones small ones."""
    lengths = SampleLengths([6] * 8 + [2] * 32, [400] * 40)
    cost = float(DEFAULT_COST(Load(0, 400, 400**2)))
    aim = Aim(4, 15.9, 5.5 * cost)
    packs = plan_buffer(lengths, aim, LIMITS, waited=0, seed=[0])
    assert len(packs.samples) == 22
    assert packs.vision_units(lengths).sum() == pytest.approx(4 * 15.9, abs=4)
