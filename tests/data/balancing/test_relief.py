import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal.data.balancing.relief import relieve
from omnibal.data.balancing.tables import make_scratch
from tests.data.balancing.tables import check_tables, members_of, pack_table, sample_table

LIMITS = (9, 40)


def relieved(sizes, members, tries=1000, seed=1):
    samples = sample_table([(0, 0, 0)] * len(sizes), sizes)
    packs = pack_table(samples, members, limits=LIMITS)
    left = relieve(samples, packs, (1000 // 9, 1000 // 40), tries, np.uint64(seed), make_scratch())
    return samples, packs, left


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=24),
    st.integers(1, 6),
    st.integers(0, 200),
    st.integers(0, 5),
)
@settings(max_examples=300)
def test_relief_loses_nothing_and_says_what_is_left(sizes, num_packs, tries, seed):
    members = [list(range(pack, len(sizes), num_packs)) for pack in range(num_packs)]
    samples, packs, left = relieved(sizes, members, tries, seed)
    held = np.array([np.array(LIMITS) - packs[pack, 2:4] for pack in range(num_packs)])
    assert left == (held > np.array(LIMITS)).any(axis=1).sum()
    assert sorted(sample for pack in members_of(samples, packs) for sample in pack) == list(range(len(sizes)))
    assert (packs[:, 1] > 0).sum() == min(num_packs, len(sizes))  # no pack became empty


def test_packs_within_the_limits_are_left_alone():
    sizes = [(5, 10), (4, 20), (9, 40)]
    samples, packs, left = relieved(sizes, [[0, 1], [2]])
    assert (left, members_of(samples, packs)) == (0, [[0, 1], [2]])
    check_tables(samples, packs, LIMITS)


def test_packs_with_room_are_found_among_many():
    full, over, roomy = [(5, 1), (3, 1)], [(5, 1), (3, 1), (3, 1)], [(5, 1)]
    contents = [*[full] * 300, *[over] * 20, *[roomy] * 20]
    ends = np.cumsum([len(pack) for pack in contents])
    members = [list(range(end - len(pack), end)) for pack, end in zip(contents, ends, strict=True)]
    assert relieved([size for pack in contents for size in pack], members, tries=40)[2] == 0


def test_tokens_leave_without_vision_units_where_they_can():
    sizes = [(4, 30), (4, 20), (4, 10), (4, 10)]
    _, packs, left = relieved(sizes, [[0, 1], [2, 3]])
    assert left == 0
    assert packs[:, 2].tolist() == [1, 1]


def test_an_excess_is_handed_on_where_no_pack_has_room_for_it_alone():
    sizes = [(3, 1)] * 3 + [(1, 1)] + [(3, 1), (3, 1), (2, 1)] + [(4, 1), (4, 1)]
    _, packs, left = relieved(sizes, [[0, 1, 2, 3], [4, 5, 6], [7, 8]])
    assert left == 0
    assert sorted((9 - packs[:, 2]).tolist()) == [8, 9, 9]
