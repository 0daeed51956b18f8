"""Levelling: which packs of a window meet to exchange samples."""

from typing import Any, Final

import numpy as np

from omnibal.compiled import compiled
from omnibal.data.balance.exchange import BY_ALL_MEANS, CAREFULLY, FREELY, LEVELLING, exchange
from omnibal.data.balance.rules import TOLERANCE, Rules
from omnibal.data.balance.shuffle import scrambled
from omnibal.data.balance.tables import (
    COST_EXCESS,
    TOKEN_ROOM,
    VISION_EXCESS,
    VISION_ROOM,
    Int64Array,
    Integer,
    Window,
)

GAIN: Final = TOLERANCE >> 2
"""What an exchange must bring."""
UNPRODUCTIVE: Final = 3
"""Rounds end when fewer than one meeting in so many ends with an exchange."""
MEETINGS: Final = 4
"""Packs of other steps that one of wrong vision units meets in a round."""
STUCK: Final = 4
"""Where more than one pack in so many has wrong vision units, rounds end when one mends fewer than a tenth of them."""
LOOKS: Final = 128
"""Packs that one over a limit looks at in the first two rounds of repairs, twice as many in each that follows."""
HOPELESS: Final = 256
"""Where more than one pack in so many is over a limit after repairs, and more than a few are, none will fit in time."""
FEW: Final = 4
"""Packs over a limit that never make a window hopeless."""
REPAIRS: Final = 16
"""Exchanges that a repair may try, per pack of the window."""


@compiled
def level_window(window: Window, rules: Rules, seed: Any) -> int:
    """Make the packs of every step alike, and bring all under their limits; return how many are not.

    Args:
        window: Its packs as they were dealt; changed in place.
        rules: What all windows have in common.
        seed: What chance decides by.
    """
    step_packs, number = rules.step_packs, len(window.packs)
    group_packs = rules.group_steps * step_packs
    _center(window.packs, step_packs, VISION_EXCESS)
    _center(window.packs, step_packs, COST_EXCESS)
    if rules.repair_first:
        repair(window, rules, seed)
    level_parts(window, rules, step_packs, rules.effort.step_rounds)
    for turn in range(rules.effort.passes):
        even_vision(window, rules, group_packs, seed + np.uint64(turn * number << 8))
        if turn == 0:
            left = repair(window, rules, seed)
            if left > max(number // HOPELESS, FEW):
                return int(left)
        level_parts(window, rules, group_packs, rules.effort.group_rounds)
        _center(window.packs, step_packs, COST_EXCESS)  # vision units keep their aims, which are whole
        level_parts(window, rules, step_packs, rules.effort.step_rounds)
    level_heaviest(window, rules)
    return int(repair(window, rules, seed))


@compiled
def _center(packs: Int64Array, step_packs: int, column: int) -> None:
    """Measure the packs of every step against their mean."""
    for begin in range(0, len(packs), step_packs):
        mean = packs[begin : begin + step_packs, column].sum() // step_packs
        packs[begin : begin + step_packs, column] -= mean


@compiled
def level_parts(window: Window, rules: Rules, part_packs: int, rounds: int) -> None:
    """In each part, let the heaviest pack meet the lightest, the second heaviest the second lightest, and so on.

    Args:
        window: Changed in place.
        rules: What all windows have in common.
        part_packs: Packs in a part: those of a step, or of neighbouring ones.
        rounds: Rounds of meetings.
    """
    packs, order = window.packs, window.order
    for begin in range(0, len(packs), part_packs):
        number = min(part_packs, len(packs) - begin)
        half = number // 2
        order[:number] = np.arange(begin, begin + number)
        for turn in range(rounds):
            wrong = 0
            for pack in range(begin, begin + number):
                wrong += abs(packs[pack, VISION_EXCESS]) > rules.vision_tolerance
            # Vision units decide in every other round while they are uneven: they come in few sizes, and are soon
            # even or never.
            sort_packs(packs, order, number, wrong > 0 and turn % 2 == 0, wrong == 0 or turn % 2 == 1)
            tries = done = 0
            for place in range(half):
                heavy, light = order[number - 1 - place], order[(place + turn) % half]
                if _is_uneven(packs, heavy, rules) or _is_uneven(packs, light, rules):
                    tries += 1
                    done += exchange(window, rules, heavy, light, 0, GAIN, turn, LEVELLING)
            if UNPRODUCTIVE * done < tries or tries == 0:
                break


@compiled
def level_heaviest(window: Window, rules: Rules) -> None:
    """Let the pack that costs most in every step meet all others: all ranks wait for it."""
    packs, order, number = window.packs, window.order, rules.step_packs
    for begin in range(0, len(packs), number):
        order[:number] = np.arange(begin, begin + number)
        for turn in range(rules.effort.heaviest_rounds):
            sort_packs(packs, order, number, False, True)
            heaviest = order[number - 1]
            tries = done = 0
            for place in range(number - 1):
                if _is_uneven(packs, heaviest, rules):
                    tries += 1
                    done += exchange(window, rules, heaviest, order[place], 0, GAIN, turn, LEVELLING)
            if UNPRODUCTIVE * done < tries or tries == 0:
                break


@compiled
def even_vision(window: Window, rules: Rules, group_packs: int, seed: Any) -> None:
    """Let packs with too many vision units meet packs with too few, of any steps of a group.

    Not all can be levelled with each other: 18 = 5 + 5 + 5 + 3 and 15 = 5 + 5 + 5 make no 16 and 17. One that finds no
    counterpart hands its excess on to a random pack, which has other samples.
    """
    packs, order, tolerance = window.packs, window.order, rules.vision_tolerance
    for begin in range(0, len(packs), group_packs):
        number = min(group_packs, len(packs) - begin)
        before = number + 1
        for turn in range(rules.effort.vision_rounds):
            heavy = light = 0  # lists that grow from both ends of the order
            for pack in range(begin, begin + number):
                if packs[pack, VISION_EXCESS] > tolerance:
                    order[heavy] = pack
                    heavy += 1
                elif packs[pack, VISION_EXCESS] < -tolerance:
                    light += 1
                    order[number - light] = pack
            stuck = STUCK * (heavy + light) > number and 10 * (heavy + light) > 9 * before
            if heavy + light == 0 or stuck:
                break
            before = heavy + light
            for place in range(heavy):
                for meeting in range(min(MEETINGS, light)):
                    pack, other = order[place], order[number - 1 - (place + turn * MEETINGS + meeting) % light]
                    if packs[pack, VISION_EXCESS] > tolerance and packs[other, VISION_EXCESS] < -tolerance:
                        exchange(window, rules, pack, other, 0, 0, turn, LEVELLING)
            draws = seed + np.uint64((turn * len(packs) + begin) << 1)
            for place in range(heavy + light):
                pack = order[place if place < heavy else number - 1 - (place - heavy)]
                other = begin + np.int64(scrambled(draws + np.uint64(place)) % np.uint64(number))
                if abs(packs[pack, VISION_EXCESS]) > tolerance >= abs(packs[other, VISION_EXCESS]):
                    wish = 2 * tolerance if packs[pack, VISION_EXCESS] > 0 else -2 * tolerance
                    exchange(window, rules, pack, other, wish, 0, turn, LEVELLING)


@compiled
def repair(window: Window, rules: Rules, seed: Any) -> int:
    """Let packs over a limit meet others of the window until none is left; return how many are."""
    packs, number = window.packs, len(window.packs)
    left, tries = _count_over(packs), REPAIRS * number
    for turn in range(rules.effort.repair_rounds):
        if left == 0 or tries == 0:
            break
        # The first ones in these orders have most room: every pack in need begins with another of them.
        by_vision, by_tokens = np.argsort(-packs[:, VISION_ROOM]), np.argsort(-packs[:, TOKEN_ROOM])
        served = 0
        for pack in range(number):
            if _is_over(packs, pack):
                draws = seed + np.uint64((turn * number + pack) << 20)
                roomy = by_vision if packs[pack, VISION_ROOM] < 0 else by_tokens
                tries = _repair_pack(window, rules, pack, roomy, served, draws, turn, tries)
                served += 1
        left = _count_over(packs)
    return left


@compiled
def _repair_pack(
    window: Window, rules: Rules, pack: int, roomy: Int64Array, first: int, draws: Any, turn: int, tries: int
) -> int:
    """Let a pack meet roomy ones and random ones in turns; return how many more meetings there may be."""
    packs, number = window.packs, len(roomy)
    # At first, neither vision units nor a step's mix may suffer for a limit; then one of them; then only limits count.
    mode = min(CAREFULLY + turn, BY_ALL_MEANS)
    for look in range(min(LOOKS << max(turn - 1, 0), 2 * number)):
        if not _is_over(packs, pack) or tries == 0:
            return tries
        drawn = np.int64(scrambled(draws + np.uint64(look)) % np.uint64(number))
        other = drawn if look % 2 else roomy[(first + look // 2) % number]
        if other != pack and _has_room(packs, pack, other, mode):
            tries -= 1
            exchange(window, rules, pack, other, 0, 0, turn, mode)
    return tries


@compiled
def _has_room(packs: Int64Array, pack: Integer, other: Integer, mode: int) -> bool:
    """Tell whether another pack has room for what a pack holds too much: for all of it, or for some."""
    if mode <= FREELY:
        return bool(
            packs[pack, VISION_ROOM] + max(packs[other, VISION_ROOM], 0) >= 0
            and packs[pack, TOKEN_ROOM] + max(packs[other, TOKEN_ROOM], 0) >= 0
        )
    return bool(
        (packs[pack, VISION_ROOM] >= 0 or packs[other, VISION_ROOM] > 0)
        and (packs[pack, TOKEN_ROOM] >= 0 or packs[other, TOKEN_ROOM] > 0)
    )


@compiled
def _is_over(packs: Int64Array, pack: Integer) -> bool:
    """Tell whether a pack exceeds a limit."""
    return bool(packs[pack, VISION_ROOM] < 0 or packs[pack, TOKEN_ROOM] < 0)


@compiled
def _count_over(packs: Int64Array) -> int:
    number = 0
    for pack in range(len(packs)):
        number += _is_over(packs, pack)
    return number


@compiled
def _is_uneven(packs: Int64Array, pack: Integer, rules: Rules) -> bool:
    return bool(
        abs(packs[pack, VISION_EXCESS]) > rules.vision_tolerance
        or abs(packs[pack, COST_EXCESS]) > TOLERANCE
        or _is_over(packs, pack)
    )


@compiled
def sort_packs(packs: Int64Array, order: Int64Array, number: int, by_vision: bool, by_cost: bool) -> None:
    """Sort packs from light to heavy by one load or by their sum: Shell's sort, quick on what is nearly sorted."""
    vision, cost = np.int64(by_vision), np.int64(by_cost)
    gap = 1
    while gap < number // 3:
        gap = 3 * gap + 1
    while gap:
        for place in range(gap, number):
            pack, hole = order[place], place
            weight = vision * packs[pack, VISION_EXCESS] + cost * packs[pack, COST_EXCESS]
            while hole >= gap:
                before = order[hole - gap]
                if vision * packs[before, VISION_EXCESS] + cost * packs[before, COST_EXCESS] <= weight:
                    break
                order[hole] = before
                hole -= gap
            order[hole] = pack
        gap //= 3
