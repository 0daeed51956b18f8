import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal.data.balance.levelling import EVEN_VISION, HEAVIEST, LEVEL, center, level_window, meet, repair
from omnibal.data.balance.tables import COST_OVER_MEAN, TOKEN_ROOM, VISION_OVER_MEAN, VISION_ROOM
from tests.data.balance.tables import check_window, make_rules, make_window, members_of

PACK = 1 << 20


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
)
@settings(max_examples=200)
def test_nothing_is_lost_and_what_is_over_is_counted(sizes, step_packs, num_steps, repair_first):
    number = step_packs * num_steps
    rules = make_rules(step_packs, limits=(12, 60), group_steps=2, repair_first=repair_first)
    members = [list(range(pack, len(sizes), number)) for pack in range(number)]
    window = make_window([(vision, 1000 * tokens, tokens) for vision, tokens in sizes], members, rules)
    left = level_window(window, rules, np.uint64(3))
    found = members_of(window)
    assert sorted(sample for pack in found for sample in pack) == list(range(len(sizes)))
    assert sum(map(bool, found)) == min(number, len(sizes))  # no pack became empty
    assert left == (window.packs[:, [VISION_ROOM, TOKEN_ROOM]] < 0).any(axis=1).sum()


def test_the_heaviest_pack_meets_all_others():
    """Meetings of heavy packs with light ones end at 850 here; the mean is 753."""
    costs = [cost * PACK // 750 for cost in (200, 140, 590, 110, 190, 380, 470, 380, 520, 30)]
    rules = make_rules(4)
    members = [list(range(pack, len(costs), 4)) for pack in range(4)]
    window = make_window([(0, cost, 0) for cost in costs], members, rules)
    window.packs[:, COST_OVER_MEAN] -= sum(costs) // 4
    meet(window, rules, LEVEL, 4, 4)
    before = window.packs[:, COST_OVER_MEAN].max()
    meet(window, rules, HEAVIEST, 4, 4)
    check_window(window, rules, [(0, sum(costs) // 4)] * 4)
    assert window.packs[:, COST_OVER_MEAN].max() <= before


def test_the_next_heaviest_pack_meets_all_others_too():
    """Three packs of 800 can become 750 with one of 700 each; the ten lightest, of one sample, help none of them."""
    contents = [*[[400, 400]] * 3, *[[600]] * 10, *[[350, 350]] * 3, *[[375, 375]] * 16]
    ends = np.cumsum([len(pack) for pack in contents])
    members = [list(range(end - len(pack), end)) for pack, end in zip(contents, ends, strict=True)]
    costs = [cost * PACK // 750 for pack in contents for cost in pack]
    rules = make_rules(32)
    targets = [(0, sum(costs) // 32)] * 32
    window = make_window([(0, cost, 0) for cost in costs], members, rules, targets=targets)
    meet(window, rules, HEAVIEST, 32, 4)
    check_window(window, rules, targets)
    assert max(sum(costs[sample] for sample in pack) for pack in members_of(window)) <= PACK


def test_an_excess_finds_its_counterpart_in_another_step():
    """18 = 5 + 5 + 5 + 3 and 14 = 5 + 5 + 3 + 1 can become 16 only with the help of another step."""
    patterns = [[5, 5, 5, 1], [5, 5, 3, 3], [5, 3, 3, 3, 1, 1], [3] * 5 + [1]]
    packs = [[5, 5, 5, 3], [5, 5, 3, 1]] + [patterns[c] for c in np.random.default_rng(3).integers(0, 4, 30)]
    tiles = [tile for pack in packs for tile in pack]
    ends = np.cumsum([len(pack) for pack in packs])
    members = [list(range(end - len(pack), end)) for pack, end in zip(packs, ends, strict=True)]
    rules = make_rules(2, group_steps=64, tolerance=750)
    targets = [(16_000, 0)] * 32
    window = make_window([(1000 * tile, 0, 0) for tile in tiles], members, rules, targets=targets)
    meet(window, rules, EVEN_VISION, 64, seed=np.uint64(1))
    check_window(window, rules, targets)
    assert [sum(tiles[sample] for sample in pack) for pack in members_of(window)] == [16] * 32


def test_packs_with_room_are_found_among_many():
    full, over, roomy = [5, 3], [5, 3, 3], [5]
    contents = [*[full] * 300, *[over] * 20, *[roomy] * 20]
    ends = np.cumsum([len(pack) for pack in contents])
    members = [list(range(end - len(pack), end)) for pack, end in zip(contents, ends, strict=True)]
    rules = make_rules(1, limits=(9, 40))
    window = make_window([(tile, tile, 1) for pack in contents for tile in pack], members, rules)
    assert repair(window, rules, np.uint64(1)) == 0
    check_window(window, rules)


def test_a_few_tokens_too_many_outweigh_uneven_vision_units():
    """A long sample of few vision units is stuck beside another one unless a pack takes an uneven number."""
    unit = 350_000
    contents = [[(3, 3305), (3, 807)], *[[(3, 900), (3, 900), (0, 300), (1, 400)]] * 6, [(3, 900), (3, 900)]]
    sizes = [size for pack in contents for size in pack]
    ends = np.cumsum([len(pack) for pack in contents])
    members = [list(range(end - len(pack), end)) for pack, end in zip(contents, ends, strict=True)]
    rules = make_rules(8, limits=(9 * unit, 4096 * 1024))
    targets = [(7 * unit, 0)] * 8
    window = make_window([(unit * v, 0, 1024 * t) for v, t in sizes], members, rules, targets=targets)
    assert repair(window, rules, np.uint64(1)) == 0


def test_others_are_levelled_beside_a_sample_that_fills_its_pack():
    """The others are measured against their own mean, and may have as many vision units as the large sample has."""
    contents = [[(50, 2000, 100)], [(30, 900, 10), (10, 300, 10)], [(5, 100, 10), (15, 300, 10)]]
    sizes = [size for pack in contents for size in pack]
    rules = make_rules(3, limits=(50, 100))
    window = make_window([(v, c << 10, t) for v, c, t in sizes], [[0], [1, 2], [3, 4]], rules, targets=[(0, 0)] * 3)
    center(window, rules, True, True)
    assert window.packs[:, VISION_OVER_MEAN].tolist() == [20, 10, -10]
    assert window.packs[:, COST_OVER_MEAN].tolist() == [1200 << 10, 400 << 10, -400 << 10]
    assert window.free.tolist() == [[20]]
    meet(window, rules, LEVEL, 3, 4)
    assert sorted(map(sorted, members_of(window))) == [[0], [1], [2, 3, 4]]  # costs of 900 and 700, units of 30 and 30
