"""Levelling: which packs of a window meet to exchange samples."""

from typing import Any, Final

import numpy as np

from omnibal.compiled import compiled, compiled_part
from omnibal.data.balance.exchange import BY_ALL_MEANS, CAREFULLY, FREELY, LEVELLING, exchange
from omnibal.data.balance.rules import TOLERANCE, Rules
from omnibal.data.balance.shuffle import scrambled
from omnibal.data.balance.tables import (
    COST_EXCESS,
    COUNT,
    FIRST,
    NEXT,
    NOWHERE,
    TOKEN_ROOM,
    VISION,
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
PLACE_BITS: Final = 20
"""Bits of a pack's place in its window."""


def level_window(window: Window, rules: Rules, seed: np.uint64) -> int:
    """Make the packs of every step alike, and bring all under their limits; return how many are not.

    Args:
        window: Its packs as they were dealt; changed in place.
        rules: What all windows have in common.
        seed: What chance decides by.
    """
    step_packs, number = rules.step_packs, len(window.packs)
    group_packs = rules.group_steps * step_packs
    center(window, rules, True, False)
    if rules.repair_first:
        repair(window, rules, seed)
    level_parts(window, rules, step_packs, rules.effort.step_rounds, False)
    for turn in range(rules.effort.passes):
        even_vision(window, rules, group_packs, seed + np.uint64(turn * number << 8))
        if turn == 0:
            left = repair(window, rules, seed)
            if left > max(number // HOPELESS, FEW):
                return left
        level_parts(window, rules, group_packs, rules.effort.group_rounds, False)
        center(window, rules, False, turn == rules.effort.passes - 1)
        level_parts(window, rules, step_packs, rules.effort.step_rounds, False)
    level_parts(window, rules, step_packs, rules.effort.heaviest_rounds, True)
    return repair(window, rules, seed)


@compiled
def center(window: Window, rules: Rules, first: bool, last: bool) -> None:
    """Measure the cost of every step's packs against their mean, and how much vision load a pack may have at no loss.

    A pack that one sample fills takes no part: nobody can make it lighter, and the others should be alike.

    Args:
        window: Changed in place.
        rules: What all windows have in common.
        first: Measure vision load against the mean, too. It keeps its aims after that, which are whole units.
        last: Set how much vision load is free. Until then it is levelled with other steps: that keeps packs within the
            limits, and takes steps that repairs have sorted back to the usual mix.
    """
    packs, order = window.packs, window.order
    for step in range(len(window.free_vision)):
        begin = step * rules.step_packs
        number = open_packs(packs, begin, rules.step_packs, order)
        vision = cost = np.int64(0)
        for place in range(number):
            vision += packs[order[place], VISION_EXCESS]
            cost += packs[order[place], COST_EXCESS]
        costliest = np.int64(0)
        for pack in range(begin, begin + rules.step_packs):
            packs[pack, VISION_EXCESS] -= vision // number if first else 0
            packs[pack, COST_EXCESS] -= cost // number
        for place in range(number):
            costliest = max(costliest, packs[order[place], COST_EXCESS])
        # What some pack must have anyway is free for all; and where cost is more uneven than the limit lets vision
        # loads be, all of them are. Ranks that run several packs wait for the largest in one only: nothing is free.
        if last and rules.num_replicas == rules.step_packs:
            limit = packs[begin, VISION_EXCESS] + packs[begin, VISION_ROOM]
            window.free_vision[step] = limit if costliest > limit else _least_most_vision(window, rules, begin)


@compiled_part
def _least_most_vision(window: Window, rules: Rules, begin: Integer) -> Any:
    """How far above the mean a step's largest vision load is at least: whole units, and the largest sample."""
    packs, samples = window.packs, window.samples
    aim = rules.most_vision * rules.vision_weight - packs[begin, VISION_ROOM] - packs[begin, VISION_EXCESS]
    most = -(-aim // rules.vision_weight) * rules.vision_weight
    for pack in range(begin, begin + rules.step_packs):
        sample = packs[pack, FIRST]
        while sample != NOWHERE:
            most = max(most, np.int64(samples[sample, VISION]))
            sample = samples[sample, NEXT]
    return most - aim


@compiled
def level_parts(window: Window, rules: Rules, part_packs: int, rounds: int, heaviest_alone: bool) -> None:
    """In each part, let the heaviest pack meet the lightest, the second heaviest the second lightest, and so on.

    Args:
        window: Changed in place.
        rules: What all windows have in common.
        part_packs: Packs in a part: those of a step, or of neighbouring ones.
        rounds: Rounds of meetings.
        heaviest_alone: In place of that, let the pack that costs most in each round meet all others: all ranks wait
            for it.
    """
    packs, order = window.packs, window.order
    for begin in range(0, len(packs), part_packs):
        number = open_packs(packs, begin, min(part_packs, len(packs) - begin), order)
        for turn in range(rounds):
            wrong = 0
            for place in range(number):
                wrong += _vision_wrong(window, rules, order[place]) != 0
            # Vision units decide in every other round while they are uneven: they come in few sizes, and are soon
            # even or never.
            by_vision = wrong > 0 and turn % 2 == 0 and not heaviest_alone
            sort_packs(packs, order, window.weights, number, by_vision, wrong == 0 or not by_vision)
            tries = done = 0
            for place in range(number - 1 if heaviest_alone else number // 2):
                if heaviest_alone:
                    heavy, light = order[number - 1], order[place]
                    uneven = _is_uneven(window, rules, heavy)
                else:  # each round shifts the light half by one, so that others meet
                    heavy, light = order[number - 1 - place], order[(place + turn) % (number // 2)]
                    uneven = _is_uneven(window, rules, heavy) or _is_uneven(window, rules, light)
                if uneven:
                    tries += 1
                    done += exchange(window, rules, heavy, light, 0, GAIN, turn, LEVELLING)
            # The heaviest pack meets all others for the few that make it lighter; then another one is the heaviest.
            if done == 0 or (UNPRODUCTIVE * done < tries and not heaviest_alone):
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
            # Packs with too many vision units are listed from the front of the order, those with too few from its end.
            heavy = light = 0
            for pack in range(begin, begin + number):
                wrong = 0 if _is_filled(packs, pack) else _vision_wrong(window, rules, pack)
                if wrong > 0:
                    order[heavy] = pack
                    heavy += 1
                elif wrong < 0:
                    light += 1
                    order[number - light] = pack
            stuck = STUCK * (heavy + light) > number and 10 * (heavy + light) > 9 * before
            if heavy + light == 0 or stuck:
                break
            before = heavy + light
            # Each heavy one meets a few light ones, in every round others, until it is even.
            for place in range(heavy):
                for meeting in range(min(MEETINGS, light)):
                    pack, other = order[place], order[number - 1 - (place + turn * MEETINGS + meeting) % light]
                    if packs[pack, VISION_EXCESS] > tolerance and packs[other, VISION_EXCESS] < -tolerance:
                        exchange(window, rules, pack, other, 0, 0, turn, LEVELLING)
            # What is left hands its excess on to an even pack: the wish, of as much as it is over the tolerance twice,
            # lets the even one take it. In the next round that one may find what it needs.
            draws = seed + np.uint64((turn * len(packs) + begin) << 1)
            for place in range(heavy + light):
                pack = order[place if place < heavy else number - 1 - (place - heavy)]
                other = begin + np.int64(scrambled(draws + np.uint64(place)) % np.uint64(number))
                if abs(packs[pack, VISION_EXCESS]) > tolerance >= abs(packs[other, VISION_EXCESS]):
                    wish = 2 * tolerance if packs[pack, VISION_EXCESS] > 0 else -2 * tolerance
                    exchange(window, rules, pack, other, wish, 0, turn, LEVELLING)


def repair(window: Window, rules: Rules, seed: np.uint64) -> int:
    """Let packs over a limit meet others of the window until none is left; return how many are."""
    number, tries = len(window.packs), REPAIRS * len(window.packs)
    rooms = window.packs[:, [VISION_ROOM, TOKEN_ROOM]].T  # a copy
    for turn in range(rules.effort.repair_rounds):
        if rooms.min(initial=0) >= 0 or tries == 0:
            break
        # The first ones in these orders have most room. With its place behind it, no room equals another one: so all
        # machines sort alike.
        roomy = np.argsort(np.ascontiguousarray(-rooms << PLACE_BITS) + np.arange(number))
        tries = repair_packs(window, rules, roomy, seed + np.uint64(turn * number << 20), turn, tries)
        rooms = window.packs[:, [VISION_ROOM, TOKEN_ROOM]].T
    return int((rooms < 0).any(axis=0).sum())


@compiled
def repair_packs(window: Window, rules: Rules, roomy: Int64Array, seed: Any, turn: int, tries: int) -> int:
    """Let every pack over a limit meet roomy ones and random ones in turns; return how many more meetings there may be.

    Args:
        window: Changed in place.
        rules: What all windows have in common.
        roomy: Packs by their room for vision units, and by their room for tokens, those with most room first.
        seed: What chance decides by.
        turn: Which round.
        tries: Meetings that there may be.
    """
    packs, number = window.packs, len(window.packs)
    # At first, neither vision units nor a step's mix may suffer for a limit; then one of them; then only limits count.
    mode = min(CAREFULLY + turn, BY_ALL_MEANS)
    served = 0
    for pack in range(number):
        if not _is_over(packs, pack):
            continue
        scarce = 0 if packs[pack, VISION_ROOM] < 0 else 1
        draws = seed + np.uint64(pack << 20)
        for look in range(min(LOOKS << max(turn - 1, 0), 2 * number)):
            if not _is_over(packs, pack) or tries == 0:
                break
            # Every second one is random. The roomy ones begin with another one for every pack: else all would turn to
            # the same, whose room is gone after the first.
            drawn = np.int64(scrambled(draws + np.uint64(look)) % np.uint64(number))
            other = drawn if look % 2 else roomy[scarce, (served + look // 2) % number]
            if other != pack and _has_room(packs, pack, other, mode):
                tries -= 1
                exchange(window, rules, pack, other, 0, 0, turn, mode)
        served += 1
    return tries


@compiled_part
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


@compiled_part
def _is_over(packs: Int64Array, pack: Integer) -> bool:
    """Tell whether a pack exceeds a limit."""
    return bool(packs[pack, VISION_ROOM] < 0 or packs[pack, TOKEN_ROOM] < 0)


@compiled_part
def _vision_wrong(window: Window, rules: Rules, pack: Integer) -> int:
    """1 where a pack has too many vision units, −1 where it has too few for its step to be even."""
    excess, free = window.packs[pack, VISION_EXCESS], window.free_vision[pack // rules.step_packs]
    if excess > max(free, rules.vision_tolerance):
        return 1
    return -1 if excess < -rules.vision_tolerance and free <= rules.vision_tolerance else 0


@compiled_part
def _is_uneven(window: Window, rules: Rules, pack: Integer) -> bool:
    """Tell whether a pack is worth a meeting: away from its step's mean, or over a limit."""
    return bool(
        _vision_wrong(window, rules, pack) != 0
        or abs(window.packs[pack, COST_EXCESS]) > TOLERANCE
        or _is_over(window.packs, pack)
    )


@compiled_part
def open_packs(packs: Int64Array, begin: Integer, number: Integer, order: Int64Array) -> int:
    """List the packs that no single sample fills, and return how many they are; all of them where there is none."""
    found = 0
    for pack in range(begin, begin + number):
        order[found] = pack
        found += not _is_filled(packs, pack)
    if found == 0:
        for place in range(number):
            order[place] = begin + place
        found = number
    return found


@compiled_part
def _is_filled(packs: Int64Array, pack: Integer) -> bool:
    """Tell whether a single sample fills a pack: one over the limits, or with as many tokens."""
    return bool(packs[pack, COUNT] == 1 and packs[pack, TOKEN_ROOM] <= 0)


@compiled_part
def sort_packs(
    packs: Int64Array, order: Int64Array, weights: Int64Array, number: int, by_vision: bool, by_cost: bool
) -> None:
    """Sort packs from light to heavy by one load or by their sum: Shell's sort, quick on what is nearly sorted."""
    vision, cost = np.int64(by_vision), np.int64(by_cost)
    for place in range(number):
        pack = order[place]
        weights[place] = vision * packs[pack, VISION_EXCESS] + cost * packs[pack, COST_EXCESS]
    # Insertion sort of every gap-th pack, then of nearer ones: gaps of 1, 4, 13, 40, …
    gap = 1
    while gap < number // 3:
        gap = 3 * gap + 1
    while gap:
        for place in range(gap, number):
            pack, weight, hole = order[place], weights[place], place
            while hole >= gap and weights[hole - gap] > weight:
                order[hole], weights[hole] = order[hole - gap], weights[hole - gap]
                hole -= gap
            order[hole], weights[hole] = pack, weight
        gap //= 3
