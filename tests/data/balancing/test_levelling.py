import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal.data.balancing.levelling import Tolerance, level_steps
from omnibal.data.balancing.tables import EXCESS, make_scratch
from tests.data.balancing.tables import members_of, pack_table, sample_table

UNIT = 1000
TOLERANCE = Tolerance(750, 5, 10, (UNIT, 1))


def levelled(loads, members, step_packs, exchange_steps, seed=1):
    samples = sample_table(loads)
    packs = pack_table(samples, members)
    level_steps(samples, packs, step_packs, exchange_steps, TOLERANCE, np.uint64(seed), make_scratch())
    return samples, packs


def step_of(members, step_packs):
    return {sample: pack // step_packs for pack, chosen in enumerate(members) for sample in chosen}


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 300)), min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([1, 2, 64]),
)
@settings(max_examples=200)
def test_nothing_is_lost_and_no_pack_emptied(loads, step_packs, num_steps, exchange_steps):
    number = step_packs * num_steps
    members = [list(range(pack, len(loads), number)) for pack in range(number)]
    samples, packs = levelled([(UNIT * vision, cost, 0) for vision, cost in loads], members, step_packs, exchange_steps)
    found = members_of(samples, packs)
    assert sorted(sample for chosen in found for sample in chosen) == list(range(len(loads)))
    assert sum(1 for chosen in found if chosen) == sum(1 for chosen in members if chosen)
    if exchange_steps == 1:
        assert step_of(found, step_packs) == step_of(members, step_packs)


def random_steps(generator, num_steps, step_packs, samples_per_pack):
    number = num_steps * step_packs * samples_per_pack
    vision = generator.choice([1, 3, 5], size=number)
    text = generator.integers(0, 90, number)
    loads = [(UNIT * tiles, 100 * tiles + tokens, 0) for tiles, tokens in zip(vision, text, strict=True)]
    per_step = step_packs * samples_per_pack
    members = [
        list(range(step * per_step + pack, (step + 1) * per_step, step_packs))
        for step in range(num_steps)
        for pack in range(step_packs)
    ]
    return loads, members


def spread(samples, packs, step_packs, dimension):
    """Mean over steps of how far the heaviest pack is above the mean."""
    sums = np.array([samples[chosen, 3 + dimension].sum() for chosen in members_of(samples, packs)])
    steps = sums.reshape(-1, step_packs)
    return float((steps.max(axis=1) / steps.mean(axis=1) - 1).mean())


def test_packs_of_a_step_become_alike():
    loads, members = random_steps(np.random.default_rng(1), 20, 8, 9)
    plain = sample_table(loads)
    assert spread(plain, pack_table(plain, members), 8, 0) > 0.2
    samples, packs = levelled(loads, members, 8, 1)
    assert spread(samples, packs, 8, 0) < 0.06
    assert spread(samples, packs, 8, 1) < 0.06


def test_the_heaviest_pack_tries_all_others():
    """Exchanges of heavy packs with light ones end at 850 here; the mean is 753."""
    costs = [200, 140, 590, 110, 190, 380, 470, 380, 520, 30]
    members = [list(range(pack, len(costs), 4)) for pack in range(4)]
    samples, packs = levelled([(UNIT, cost, 0) for cost in costs], members, 4, 1)
    assert max(sum(costs[sample] for sample in chosen) for chosen in members_of(samples, packs)) == 770


def test_exchanges_between_steps_do_what_those_within_cannot():
    loads, members = random_steps(np.random.default_rng(2), 32, 4, 3)
    alone, together = (levelled(loads, members, 4, steps) for steps in (1, 64))
    assert spread(*together, 4, 1) < 0.7 * spread(*alone, 4, 1)


def test_a_pack_without_counterpart_hands_its_excess_on():
    """18 = 5 + 5 + 5 + 3 and 14 = 5 + 5 + 3 + 1 can become 16 only with the help of another step."""
    generator = np.random.default_rng(3)
    patterns = [[5, 5, 5, 1], [5, 5, 3, 3], [5, 3, 3, 3, 1, 1], [3] * 5 + [1]]
    packs = [[5, 5, 5, 3], [5, 5, 3, 1]] + [patterns[choice] for choice in generator.integers(0, 4, 30)]
    tiles = [tile for pack in packs for tile in pack]
    starts = np.cumsum([0, *map(len, packs)])
    members = [list(range(begin, end)) for begin, end in itertools.pairwise(starts)]
    samples, table = levelled([(UNIT * tile, 100 * tile, 0) for tile in tiles], members, 2, 64)
    assert (np.abs(table[:, EXCESS]) < UNIT).all()
    assert [sum(tiles[sample] for sample in chosen) for chosen in members_of(samples, table)] == [16] * 32
