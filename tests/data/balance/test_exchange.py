from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from omnibal.data.balance.exchange import UNEVENNESS_BITS, exchange
from omnibal.data.balance.tables import COST_OVER_MEAN, TOKEN_ROOM, VISION_OVER_MEAN, VISION_ROOM
from tests.data.balance.tables import check_window, make_rules, make_window, members_of

LIMITS = (60, 50)


@njit
def swap_first(window, rules, vision_bias, gain, round_index, repairs):
    return exchange(window, rules, 0, 1, vision_bias, gain, round_index, repairs)


def swap(window, rules, *, vision_bias=0, gain=0, round_index=0, repairs=False):
    return swap_first(window, rules, vision_bias, gain, round_index, repairs)


def over_of(packs):
    """By pack and limit."""
    return np.maximum(-packs[:, [VISION_ROOM, TOKEN_ROOM]], 0)


@st.composite
def two_packs(draw, most=4):
    sizes = draw(st.integers(1, most)), draw(st.integers(1, most))
    even = st.integers(0, 9).map(lambda half: 2 * half)  # half a difference is then whole: no rounding decides
    load = st.tuples(even, st.integers(0, 3).map(lambda half: 2 * half), st.integers(0, 20))
    loads = draw(st.lists(load, min_size=sum(sizes), max_size=sum(sizes)))
    return loads, [list(range(sizes[0])), list(range(sizes[0], sum(sizes)))]


def measured(packs, moved, repairs):
    """What a swap leaves that moves so much of vision, cost and tokens to the second pack; infinite if not allowed."""
    wanted = (packs[0, [VISION_OVER_MEAN, COST_OVER_MEAN]] - packs[1, [VISION_OVER_MEAN, COST_OVER_MEAN]]) >> 1
    uneven = int(np.abs(moved[:2] - wanted).sum())
    rooms = packs[:, [VISION_ROOM, TOKEN_ROOM]] + np.array([1, -1])[:, None] * moved[[0, 2]]
    before, over = over_of(packs), np.maximum(-rooms, 0)
    allowed = over <= before if repairs else over.sum(axis=0) <= before.sum(axis=0)
    if not allowed.all():
        return np.inf
    return over.sum() + (uneven >> UNEVENNESS_BITS) if repairs else uneven


@given(two_packs(), st.sampled_from([LIMITS, (40, 25), (1 << 20, 1 << 20)]), st.booleans())
@settings(max_examples=400)
def test_the_swap_is_the_best_of_all(packs, limits, repairs):
    """Against trying everything, whatever exchanges are for."""
    loads, (mine, theirs) = packs
    rules = make_rules(2, limits=limits)
    window = make_window(loads, [mine, theirs], rules)
    table, before = np.array(loads, dtype=np.int64), window.packs.copy()
    if repairs and over_of(before)[0].sum() == 0:
        return  # nothing to repair

    def left(given, taken):
        moved = table[list(given)].sum(axis=0) - table[list(taken)].sum(axis=0) + np.zeros(3, dtype=np.int64)
        return measured(before, moved, repairs)

    subsets = [[c for size in range(len(part) + 1) for c in combinations(part, size)] for part in (mine, theirs)]
    best = min(left(give, take) for give in subsets[0] for take in subsets[1])
    swapped = swap(window, rules, repairs=repairs)
    check_window(window, rules)
    assert over_of(window.packs).sum() <= over_of(before).sum()
    given = set(mine) - set(members_of(window)[0])
    taken = set(theirs) - set(members_of(window)[1])
    assert all(members_of(window))
    if swapped:
        assert left(given, taken) == best
        assert repairs or best < left((), ())
    else:
        assert (given, taken) == (set(), set())


def test_a_swap_must_gain():
    rules = make_rules(2)
    loads, members = [(4, 0, 0), (2, 0, 0), (0, 0, 0)], [[0, 1], [2]]
    assert not swap(make_window(loads, members, rules), rules, gain=3)
    window = make_window(loads, members, rules)
    assert swap(window, rules, gain=1)
    assert sorted(window.packs[:, VISION_OVER_MEAN].tolist()) == [2, 4]


def test_an_excess_is_handed_on():
    rules = make_rules(2, tolerance=1)
    loads, members = [(5, 0, 0), (3, 0, 0), (5, 0, 0), (2, 0, 0)], [[1, 0], [2, 3]]
    window = make_window(loads, members, rules, targets=[(7, 0), (7, 0)])
    assert not swap(window, rules)  # 1 and 0 are as even as can be
    assert swap(window, rules, vision_bias=2)
    assert window.packs[:, VISION_OVER_MEAN].tolist() == [0, 1]


def test_steps_do_not_become_farther_off():
    """Each of two steps has a large and a small sample, as all have: one of two large ones would be strange."""
    rules = make_rules(1)
    loads, targets = [(5, 0, 0), (1, 0, 0), (5, 0, 0), (1, 0, 0)], [(2, 0), (10, 0)]
    window = make_window(loads, [[0, 1], [2, 3]], rules, targets=targets, mixes=[2, 3, 2, 3])
    assert not swap(window, rules)


def test_a_pack_over_a_limit_is_repaired_whatever_becomes_of_mixes():
    rules = make_rules(1, limits=(1 << 20, 9))
    loads = [(5, 0, 9), (1, 0, 1), (5, 0, 1), (1, 0, 1)]
    window = make_window(loads, [[0, 1], [2, 3]], rules, mixes=[2, 3, 2, 3])
    assert not swap(window, rules)
    assert swap(window, rules, repairs=True)
    assert window.packs[:, TOKEN_ROOM].min() >= 0
    check_window(window, rules)


def test_steps_may_come_nearer_to_the_usual_mix():
    rules = make_rules(1)
    loads, targets = [(5, 0, 0), (5, 0, 0), (1, 0, 0), (1, 0, 0)], [(6, 0), (6, 0)]
    window = make_window(loads, [[0, 1], [2, 3]], rules, targets=targets, mixes=[2, 2, 3, 3])
    assert swap(window, rules)
    assert window.mixes[:, :-1].tolist() == [[1, 2], [1, 2]]
    check_window(window, rules, targets)


@pytest.mark.parametrize("number", [1, 5, 31, 32, 70])
def test_packs_of_any_size_stay_whole(number):
    generator = np.random.default_rng(number)
    rules = make_rules(2)
    window = make_window(
        generator.integers(0, 50, (number + 40, 3)), [list(range(number)), list(range(number, number + 40))], rules
    )
    for round_index in range(8):
        swap(window, rules, round_index=round_index)
        check_window(window, rules)
