import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omnibal.data.balancing.dense import MOST_PACKS, fill_packs_densely
from tests.data.balancing.tables import check_tables, empty_packs, members_of, sample_table

LIMITS = (9, 40)
WEIGHTS = (1000 // 9, 1000 // 40)


def filled(sizes, starts, step_packs, seed=3):
    samples = sample_table([(vision, tokens, 0) for vision, tokens in sizes], sizes)
    packs = empty_packs((len(starts) - 1) * step_packs, LIMITS)
    fill_packs_densely(
        samples, packs, np.array(starts), np.arange(len(sizes)), step_packs, MOST_PACKS, WEIGHTS, np.uint64(seed)
    )
    return samples, packs


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=50), st.integers(1, 4), st.integers(1, 4))
def test_no_pack_is_empty_nor_overfull_without_need(sizes, num_steps, step_packs):
    starts = np.linspace(0, len(sizes), num_steps + 1).astype(int)
    samples, packs = filled(sizes, starts, step_packs)
    check_tables(samples, packs, LIMITS)
    assert (packs[:, 1] == 0).sum() == max(len(packs) - len(sizes), 0)
    if (packs[:, 2:4] < 0).any():  # then every pack is used, and no single sample of the worst would fit elsewhere
        assert len(sizes) >= len(packs)


def test_largest_first_into_the_fullest():
    sizes = [(1, 5), (5, 10), (4, 10), (3, 10), (5, 10), (4, 20)]
    samples, packs = filled(sizes, [0, len(sizes)], 3)
    assert sorted(sorted(sizes[sample][0] for sample in members) for members in members_of(samples, packs)) == [
        [1, 3],
        [4, 5],
        [4, 5],
    ]


def test_steps_get_packs_of_like_vision_units():
    sizes = [(9, 10), (2, 40), (9, 10), (2, 40), (9, 10), (2, 40), (9, 10), (2, 40)]
    _, packs = filled(sizes, [0, 4, 8], 4)
    vision = (9 - packs[:, 2]).reshape(2, 4)
    assert sorted(vision.tolist()) == [[2] * 4, [9] * 4]
    assert any((filled(sizes, [0, 4, 8], 4, seed)[1] != packs).any() for seed in range(5))
