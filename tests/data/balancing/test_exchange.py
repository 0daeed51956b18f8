from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from omnibal.data.balancing.exchange import exchange
from omnibal.data.balancing.subsets import MOST_WHOLE, list_subsets
from omnibal.data.balancing.tables import EXCESS, MOST_MEMBERS, make_scratch
from tests.data.balancing.tables import check_tables, members_of, pack_table, sample_table

LIMITS = (30, 50)
WEIGHTS = (1, 1)


def subsets_tried(members):
    """Which subsets a pack may give away: all of a small pack, else none, one or two of its samples."""
    most = len(members) if len(members) <= MOST_WHOLE else 2
    return [chosen for size in range(most + 1) for chosen in combinations(members, size)]


def distance_after(samples, packs, mine, theirs, given, taken, wish):
    """Half the sum of differences of two packs' excesses after a swap."""
    moved = samples[list(taken), 3:].sum(axis=0, dtype=np.int64) - samples[list(given), 3:].sum(axis=0, dtype=np.int64)
    difference = packs[0, EXCESS:] - packs[1, EXCESS:] + np.array([wish, 0, 0])
    return np.abs(moved + (difference >> 1)).sum()


@st.composite
def two_packs(draw, most=7):
    mine, theirs = draw(st.integers(0, most)), draw(st.integers(0, most))
    load = st.tuples(st.integers(0, 9), st.integers(0, 40), st.integers(0, 20))
    loads = draw(st.lists(load, min_size=mine + theirs, max_size=mine + theirs))
    samples = sample_table(loads, [(load[0], load[2]) for load in loads])
    members = [list(range(mine)), list(range(mine, mine + theirs))]
    targets = draw(st.lists(st.tuples(*[st.integers(-30, 60)] * 3), min_size=2, max_size=2))
    return samples, members, targets


def keeps_limits(samples, packs, given, taken):
    """Whether no pack exceeds a limit by more than before."""
    more = samples[list(taken), 1:3].sum(axis=0, dtype=np.int64) - samples[list(given), 1:3].sum(axis=0, dtype=np.int64)
    rooms = packs[:, 2:4]
    return (rooms + np.array([-more, more]) >= np.minimum(rooms, 0)).all()


@given(two_packs(), st.integers(-10, 10), st.integers(0, 3), st.sampled_from([LIMITS, (1 << 20, 1 << 20)]))
@settings(max_examples=400)
def test_the_swap_is_the_best_of_all_that_keep_the_limits(packs_and_targets, wish, turn, limits):
    samples, members, targets = packs_and_targets
    packs = pack_table(samples, members, targets, limits)
    swaps = [
        (distance_after(samples, packs, *members, give, take, wish), give, take)
        for give in subsets_tried(members[0])
        for take in subsets_tried(members[1])
        if keeps_limits(samples, packs, give, take)
    ]
    best = min(swap[0] for swap in swaps)
    now = distance_after(samples, packs, *members, (), (), wish)
    empties = any(
        {len(members[0]) - len(give) + len(take), len(members[1]) - len(take) + len(give)} & {0}
        for found, give, take in swaps
        if found == best
    )
    before = packs.copy()
    swapped = exchange(samples, packs, 0, 1, wish, 0, turn, WEIGHTS, make_scratch())
    check_tables(samples, packs, limits, targets)
    if not swapped:
        assert best == now or empties
        assert (packs == before).all()
        assert members_of(samples, packs) == members
    else:
        given, taken = (
            set(members[0]) - set(members_of(samples, packs)[0]),
            set(members[1]) - set(members_of(samples, packs)[1]),
        )
        assert distance_after(samples, before, *members, given, taken, wish) == best < now
        assert all(members_of(samples, packs))
        assert (packs[:, 2:4] >= np.minimum(before[:, 2:4], 0)).all()


def test_a_swap_must_gain():
    samples = sample_table([(4, 0, 0), (2, 0, 0)])
    packs = pack_table(samples, [[0, 1], []], [(0, 0, 0), (0, 0, 0)])
    assert not exchange(samples, packs, 0, 1, 0, 3, 0, WEIGHTS, make_scratch())  # 4 and 2: 1 from even
    assert exchange(samples, packs, 0, 1, 0, 1, 0, WEIGHTS, make_scratch())
    assert sorted(packs[:, EXCESS].tolist()) == [2, 4]


def test_a_wish_hands_an_excess_on():
    samples = sample_table([(5, 0, 0), (3, 0, 0), (5, 0, 0), (2, 0, 0)])
    packs = pack_table(samples, [[0, 1], [2, 3]], [(7, 0, 0), (7, 0, 0)])
    scratch = make_scratch()
    assert not exchange(samples, packs, 0, 1, 0, 0, 0, WEIGHTS, scratch)  # 1 and 0 are as even as can be
    assert exchange(samples, packs, 0, 1, 2, 0, 0, WEIGHTS, scratch)
    assert packs[:, EXCESS].tolist() == [0, 1]


@pytest.mark.parametrize("number", [0, 1, 5, 6, 12, 31, 32, 100])
def test_large_packs_show_other_samples_in_every_turn(number):
    samples = sample_table(np.ones((number, 3)))
    packs = pack_table(samples, [list(range(number))])
    seen = set()
    for turn in range(8):
        scratch = make_scratch()
        listed, subsets = list_subsets(samples, packs, 0, turn, scratch, 0)
        assert listed <= MOST_MEMBERS and subsets <= 64
        seen |= set(scratch[0, 0, :listed].tolist())
    assert seen == set(range(number))


@given(st.integers(30, 70), st.integers(30, 70), st.integers(0, 5), st.integers(0, 99))
def test_large_packs_stay_whole(mine, theirs, turn, seed):
    assume(mine != theirs)
    generator = np.random.default_rng(seed)
    samples = sample_table(generator.integers(0, 50, (mine + theirs, 3)))
    packs = pack_table(samples, [list(range(mine)), list(range(mine, mine + theirs))])
    for again in range(6):
        exchange(samples, packs, 0, 1, 0, 0, turn + again, WEIGHTS, make_scratch())
        check_tables(samples, packs)
