import itertools

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from omnibal.data.balancing.filling import SIZE_LEVELS, fill_packs, sort_within_steps
from tests.data.balancing.tables import check_tables, empty_packs, members_of, sample_table

LIMITS = (12, 40)


@st.composite
def steps_of_samples(draw):
    """Samples with their sizes as loads, cut into steps."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), max_size=40))
    samples = sample_table([(3 * vision, tokens, 0) for vision, tokens in sizes], sizes)
    cuts = sorted(draw(st.lists(st.integers(0, len(sizes)), max_size=4)))
    starts = np.array([0, *cuts, len(sizes)])
    order = np.array(draw(st.permutations(range(len(sizes)))), dtype=np.int64)
    return samples, starts, order


@given(steps_of_samples())
def test_each_step_is_sorted_from_large_to_small(steps):
    samples, starts, order = steps
    sizes = samples[:, 3:].sum(axis=1, dtype=np.int64)
    levels = SIZE_LEVELS - 1 - sizes * (SIZE_LEVELS - 1) // max(sizes.max(initial=1), 1)
    expected = [
        sample
        for begin, end in itertools.pairwise(starts)
        for sample in sorted(order[begin:end].tolist(), key=lambda sample: levels[sample])
    ]
    assert sort_within_steps(samples, starts, order).tolist() == expected


@given(steps_of_samples(), st.integers(1, 5))
def test_each_sample_goes_into_the_lightest_pack_that_has_room(steps, step_packs):
    samples, starts, order = steps
    packs = empty_packs((len(starts) - 1) * step_packs, LIMITS)
    fill_packs(samples, packs, starts, order, step_packs)
    check_tables(samples, packs, LIMITS)
    pack_of = {sample: pack for pack, members in enumerate(members_of(samples, packs)) for sample in members}
    for step, (begin, end) in enumerate(itertools.pairwise(starts)):
        mine = range(step * step_packs, (step + 1) * step_packs)
        weights, room = dict.fromkeys(mine, 0), {pack: np.array(LIMITS) for pack in mine}
        for sample in order[begin:end].tolist():
            pack, size = pack_of[sample], samples[sample, 1:3]
            fitting = [other for other in mine if (size <= room[other]).all()]
            if (size <= room[pack]).all():  # the heap is sorted only at its top: no lighter pack near the top had room
                assert weights[pack] == min(weights.values()) or fitting
            else:
                assert weights[pack] == min(weights.values())
            weights[pack] += int(samples[sample, 3:].sum()) + 1
            room[pack] = room[pack] - size
        assert all(packs[pack, 1] for pack in mine) or end - begin < step_packs


@given(st.lists(st.integers(0, 100), min_size=1, max_size=60), st.integers(1, 8))
@example([0, 0, 0], 3)
def test_largest_first_into_the_lightest(loads, step_packs):
    loads = sorted(loads, reverse=True)
    samples = sample_table([(0, load, 0) for load in loads])
    packs = empty_packs(step_packs)
    fill_packs(samples, packs, np.array([0, len(loads)]), np.arange(len(loads)), step_packs)
    weights = [0] * step_packs
    for load in loads:
        weights[weights.index(min(weights))] += load + 1
    filled = [sum(loads[sample] + 1 for sample in members) for members in members_of(samples, packs)]
    assert sorted(filled) == sorted(weights)
