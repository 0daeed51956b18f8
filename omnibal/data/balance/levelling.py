"""Levelling: which packs of a window meet to exchange samples."""

from typing import Any, Final

import numpy as np

from omnibal.compiled import compiled, compiled_part
from omnibal.data.balance.exchange import exchange
from omnibal.data.balance.rules import TOLERANCE, Rules
from omnibal.data.balance.tables import (
    COST_OVER_MEAN,
    COUNT,
    FIRST,
    NEXT,
    NOWHERE,
    TOKEN_ROOM,
    TOLERATED,
    VISION,
    VISION_OVER_MEAN,
    VISION_ROOM,
    Int32Array,
    Int64Array,
    Integer,
    Tables,
    scrambled,
)

PASSES: Final = 2  # how often packs meet those of other steps and are levelled again within their own
STEP_ROUNDS, VISION_ROUNDS, GROUP_ROUNDS, HEAVIEST_ROUNDS = 4, 8, 4, 8
"""Rounds in which the packs of a step meet (what is not even by then stays uneven); in which packs of wrong vision
units meet those of other steps; in which all packs of neighbouring steps meet; the heaviest of a step all others."""
GAIN: Final = TOLERANCE >> 2  # how much nearer an exchange must bring two packs
UNPRODUCTIVE: Final = 3  # rounds end when fewer than one meeting in so many ends with an exchange
MEETINGS: Final = 4  # packs of other steps that one of wrong vision units meets in a round
LOOKS: Final = 128
"""Packs that one over a limit looks at in the first two rounds of repairs, twice as many in each that follows."""
HOPELESS: Final = 256
"""Where more than one pack in so many is over a limit after repairs, and more than a few are, none will fit in time."""
FEW: Final = 4  # packs over a limit that never make a window hopeless
REPAIRS: Final = 16  # exchanges that a repair may try, per pack of the window
PLACE_BITS: Final = 20  # bits of a pack's place in its window
LEVEL, HEAVIEST, EVEN_VISION, REPAIR = range(4)  # ways in which packs meet
NO_SEED: Final = np.uint64(0)
NOBODY: Final = np.zeros((0, 0), dtype=np.int64)
ALL_LOADS: Final = -1  # stands for the sum of a pack's loads where a column is asked for


def level_window(tables: Tables, rules: Rules, seed: np.uint64) -> int:
    """Make the packs of every step alike, and bring all under their limits; return how many are not."""
    number = len(tables.packs)
    group_packs = rules.group_steps * rules.step_packs
    # Phases 3 to 5 of ALGORITHM.md, in this order.
    center(tables, rules, True, False)
    if rules.repair_first:
        repair(tables, rules, seed)
    # Packs are levelled before they are repaired: else repairs, which do not watch mixes, have so much to do that steps
    # are less random (χ² 1.15 in place of 0.61 under a mixture, 16/5120 and 512 ranks).
    meet(tables, rules, LEVEL, rules.step_packs, STEP_ROUNDS)
    for index in range(PASSES):
        last = index == PASSES - 1
        # A pass draws at most 16 · number times (8 rounds, 2 each per pack): no two passes draw the same.
        meet(tables, rules, EVEN_VISION, group_packs, seed=seed + np.uint64(index * number << 8))
        # Repaired in the first pass, so that all that follows levels packs which fit, and mends the mixes again.
        if index == 0:
            left = repair(tables, rules, seed)
            if left > max(number // HOPELESS, FEW):
                return left
        meet(tables, rules, LEVEL, group_packs, GROUP_ROUNDS)
        # Exchanges with other steps have moved the steps' means of cost.
        center(tables, rules, False, last)
        meet(tables, rules, LEVEL, rules.step_packs, STEP_ROUNDS)
    meet(tables, rules, HEAVIEST, rules.step_packs, HEAVIEST_ROUNDS)
    # Levelling hands on what packs are over their limits, and never makes it more: what is left of it ends here.
    return repair(tables, rules, seed)


def center(tables: Tables, rules: Rules, first: bool, last: bool) -> None:
    """Measure every step's packs against their mean, and how much load of an encoder a pack may have at no loss.

    A pack that one sample fills takes no part: nobody can make it lighter, and the others should be alike.

    With ``first`` vision load is measured against the mean, too; it keeps its aims after that, which are whole units.
    With ``last`` free load is set. Until then it is levelled with other steps: that keeps packs within the limits, and
    takes steps that repairs have sorted back to the usual mix.
    """
    num_encoders = tables.free.shape[1]
    packs = tables.packs.reshape(len(tables.free), rules.step_packs, tables.packs.shape[1])
    takes_part = (packs[..., COUNT] != 1) | (packs[..., TOKEN_ROOM] > 0)
    takes_part |= ~takes_part.any(axis=1, keepdims=True)
    for column in (COST_OVER_MEAN, *(VISION_OVER_MEAN + 2 * encoder for encoder in range(not first, num_encoders))):
        total = (packs[..., column] * takes_part).sum(axis=1)
        packs[..., column] -= (total // takes_part.sum(axis=1))[:, None]
    # Ranks that run several packs wait for the largest in one of them only: nothing is free.
    if not last or rules.num_replicas != rules.step_packs:
        return
    largest, first_packs = np.empty(len(packs), dtype=np.int64), packs[:, 0]
    for encoder, (weight, most, _) in enumerate(rules.encoders):
        # A step's mean, from its first pack: limit − room = load = mean + over mean.
        over, room = first_packs[:, VISION_OVER_MEAN + 2 * encoder], first_packs[:, VISION_ROOM + 2 * encoder]
        mean = most * weight - room - over
        # What some pack must have anyway is free for all: the largest sample, and whole vision units.
        _find_largest(tables.samples, tables.packs, VISION + encoder, largest)
        if encoder == 0:
            largest = np.maximum(largest, -(-mean // weight) * weight)
        tables.free[:, encoder] = largest - mean
        if encoder == 0:  # where cost is more uneven than the limit lets vision loads be, all of them are
            costliest = (packs[..., COST_OVER_MEAN] * takes_part).max(axis=1)
            tables.free[:, 0] = np.where(costliest > over + room, over + room, tables.free[:, 0])


@compiled
def _find_largest(samples: Int32Array, packs: Int64Array, column: int, largest: Int64Array) -> None:
    step_packs = len(packs) // len(largest)
    for step in range(len(largest)):
        most = np.int64(0)
        for pack in range(step * step_packs, (step + 1) * step_packs):
            sample = packs[pack, FIRST]
            while sample != NOWHERE:
                most = max(most, np.int64(samples[sample, column]))
                sample = samples[sample, NEXT]
        largest[step] = most


def meet(
    tables: Tables,
    rules: Rules,
    how: int,
    part_packs: int = 0,
    rounds: int = 0,
    seed: np.uint64 = NO_SEED,
    roomy: Int64Array = NOBODY,
    tries: int = 0,
) -> int:
    """Let packs meet in one of the ways below; of repairs, return how many more meetings there may be."""
    return _meet(tables, rules, how, part_packs, rounds, seed, roomy, tries)


# Of all ways this is the only entrance: for every entrance numba optimizes and translates again all that it calls, and
# `exchange` takes most of the time.
@compiled
def _meet(
    tables: Tables, rules: Rules, how: int, part_packs: int, rounds: int, seed: Any, roomy: Int64Array, tries: int
) -> int:
    if how == REPAIR:
        return _repair_packs(tables, rules, roomy, seed, rounds, tries)
    if how == EVEN_VISION:
        _even_vision(tables, rules, part_packs, seed)
    else:
        _level_parts(tables, rules, part_packs, rounds, how == HEAVIEST)
    return 0


@compiled_part
def _level_parts(tables: Tables, rules: Rules, part_packs: int, rounds: int, heaviest_alone: bool) -> None:
    """In each part, let the heaviest pack meet the lightest, the second heaviest the second lightest, and so on.

    A part is the packs of a step, or of neighbouring steps. With ``heaviest_alone`` the costliest pack of each round
    meets all others instead: all ranks wait for it.
    """
    packs, order = tables.packs, tables.order
    for begin in range(0, len(packs), part_packs):
        number = open_packs(packs, begin, min(part_packs, len(packs) - begin), order)
        loads = 1 + tables.free.shape[1]
        for round_index in range(rounds * loads // 2):
            # The encoders take turns with the cost while they are uneven: vision units come in few sizes, and are soon
            # even or never.
            turn, wrong = round_index % loads, 0
            for place in range(number if turn < loads - 1 else 0):
                wrong += _wrong(tables, rules, order[place], turn) != 0
            column = COST_OVER_MEAN
            if wrong > 0 and not heaviest_alone:
                column = VISION_OVER_MEAN + 2 * turn
            # By one load alone in each round.
            sort_packs(packs, order, tables.weights, number, column)
            tries = done = 0
            for place in range(number - 1 if heaviest_alone else number // 2):
                if heaviest_alone:
                    heavy, light = order[number - 1], order[place]
                    uneven = _is_uneven(tables, rules, heavy)
                else:  # each round shifts the light half by one, so that others meet
                    heavy, light = order[number - 1 - place], order[(place + round_index) % (number // 2)]
                    uneven = _is_uneven(tables, rules, heavy) or _is_uneven(tables, rules, light)
                if uneven:
                    tries += 1
                    done += exchange(tables, rules, heavy, light, 0, GAIN, round_index, False)
            # The heaviest pack meets all others for the few that make it lighter; then another one is the heaviest.
            if done == 0 or (UNPRODUCTIVE * done < tries and not heaviest_alone):
                break


@compiled_part
def _even_vision(tables: Tables, rules: Rules, group_packs: int, seed: Any) -> None:
    """Let packs with too many vision units meet packs with too few, of any steps of a group.

    Not all can be levelled with each other: 18 = 5 + 5 + 5 + 3 and 15 = 5 + 5 + 5 make no 16 and 17. One that finds no
    counterpart hands on what it has too many to a random pack, which has other samples.
    """
    packs, order, tolerance = tables.packs, tables.order, rules.encoders[0, TOLERATED]
    for begin in range(0, len(packs), group_packs):
        number = min(group_packs, len(packs) - begin)
        for round_index in range(VISION_ROUNDS):
            # Packs with too many vision units are listed from the front of the order, those with too few from its end.
            heavy = light = 0
            for pack in range(begin, begin + number):
                wrong = 0 if _is_filled(packs, pack) else _wrong(tables, rules, pack, 0)
                if wrong > 0:
                    order[heavy] = pack
                    heavy += 1
                elif wrong < 0:
                    light += 1
                    order[number - light] = pack
            if heavy + light == 0:
                break
            # Each heavy one meets a few light ones, in every round others, until it is even.
            for place in range(heavy):
                for meeting in range(min(MEETINGS, light)):
                    pack, other = order[place], order[number - 1 - (place + round_index * MEETINGS + meeting) % light]
                    if packs[pack, VISION_OVER_MEAN] > tolerance and packs[other, VISION_OVER_MEAN] < -tolerance:
                        exchange(tables, rules, pack, other, 0, 0, round_index, False)
            # What is left is handed on to an even pack: a bias of twice the tolerance lets the even one take it. In
            # the next round that one may find what it needs.
            draws = seed + np.uint64((round_index * len(packs) + begin) << 1)
            for place in range(heavy + light):
                pack = order[place if place < heavy else number - 1 - (place - heavy)]
                other = begin + np.int64(scrambled(draws + np.uint64(place)) % np.uint64(number))
                if abs(packs[pack, VISION_OVER_MEAN]) > tolerance >= abs(packs[other, VISION_OVER_MEAN]):
                    bias = 2 * tolerance if packs[pack, VISION_OVER_MEAN] > 0 else -2 * tolerance
                    exchange(tables, rules, pack, other, bias, 0, round_index, False)


def repair(tables: Tables, rules: Rules, seed: np.uint64) -> int:
    """Let packs over a limit meet others of the window until none is left; return how many are."""
    number, tries = len(tables.packs), REPAIRS * len(tables.packs)
    room_columns = [TOKEN_ROOM, *range(VISION_ROOM, tables.packs.shape[1], 2)]
    rooms = tables.packs[:, room_columns].T  # a copy
    for round_index in range(rules.repair_rounds):
        if rooms.min(initial=0) >= 0 or tries == 0:
            break
        # The first ones in these orders have most room. With its place behind it, no room equals another one: so all
        # machines sort alike.
        roomy = np.argsort(np.ascontiguousarray(-rooms << PLACE_BITS) + np.arange(number))
        draws = seed + np.uint64(round_index * number << 20)
        tries = meet(tables, rules, REPAIR, 0, round_index, draws, roomy, tries)
        rooms = tables.packs[:, room_columns].T
    return int((rooms < 0).any(axis=0).sum())


@compiled_part
def _repair_packs(tables: Tables, rules: Rules, roomy: Int64Array, seed: Any, round_index: int, tries: int) -> int:
    """Let every pack over a limit meet roomy ones and random ones in turns; return how many more meetings there may be.

    ``roomy`` are packs by their room for tokens, and for each encoder, most room first.
    """
    packs, number = tables.packs, len(tables.packs)
    served = 0
    for pack in range(number):
        if not _is_over(packs, pack):
            continue
        # Rows of ``roomy``: tokens, vision units, further encoders.
        scarce = 1 if packs[pack, VISION_ROOM] < 0 else 0
        if not scarce and packs[pack, TOKEN_ROOM] >= 0:
            for encoder in range(1, tables.free.shape[1]):
                if packs[pack, VISION_ROOM + 2 * encoder] < 0:
                    scarce = 1 + encoder
        draws = seed + np.uint64(pack << 20)
        for look in range(min(LOOKS << max(round_index - 1, 0), 2 * number)):
            if not _is_over(packs, pack) or tries == 0:
                break
            # Every second one is random. The roomy ones begin with another one for every pack: else all would turn to
            # the same, whose room is gone after the first.
            drawn = np.int64(scrambled(draws + np.uint64(look)) % np.uint64(number))
            other = drawn if look % 2 else roomy[scarce, (served + look // 2) % number]
            if other != pack and _has_room(packs, pack, other):
                tries -= 1
                exchange(tables, rules, pack, other, 0, 0, round_index, True)
        served += 1
    return tries


@compiled_part
def _has_room(packs: Int64Array, pack: Integer, other: Integer) -> bool:
    for column in range(VISION_ROOM, packs.shape[1], 2):
        if packs[pack, column] < 0 and packs[other, column] <= 0:
            return False
    return bool(packs[pack, TOKEN_ROOM] >= 0 or packs[other, TOKEN_ROOM] > 0)


@compiled_part
def _is_over(packs: Int64Array, pack: Integer) -> bool:
    for column in range(VISION_ROOM, packs.shape[1], 2):
        if packs[pack, column] < 0:
            return True
    return bool(packs[pack, TOKEN_ROOM] < 0)


@compiled_part
def _wrong(tables: Tables, rules: Rules, pack: Integer, encoder: int) -> int:
    """1 where a pack has too much load of an encoder, −1 where it has too little for its step to be even."""
    # Where load is free, a pack may hold less at no loss, too: only what exceeds the free load is wrong.
    over, tolerance = tables.packs[pack, VISION_OVER_MEAN + 2 * encoder], rules.encoders[encoder, TOLERATED]
    free = tables.free[pack // rules.step_packs, encoder]
    if over > max(free, tolerance):
        return 1
    return -1 if over < -tolerance and free <= tolerance else 0


@compiled_part
def _is_uneven(tables: Tables, rules: Rules, pack: Integer) -> bool:
    """Tell whether a pack is worth a meeting: away from its step's mean, or over a limit."""
    for encoder in range(tables.free.shape[1]):
        if _wrong(tables, rules, pack, encoder) != 0:
            return True
    return bool(abs(tables.packs[pack, COST_OVER_MEAN]) > TOLERANCE or _is_over(tables.packs, pack))


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
def sort_packs(packs: Int64Array, order: Int64Array, weights: Int64Array, number: int, column: Integer) -> None:
    """Sort packs from light to heavy by a column, or by the sum of all loads: quick on what is nearly sorted."""
    # Shell's sort.
    for place in range(number):
        pack = order[place]
        if column == ALL_LOADS:
            weights[place] = packs[pack, COST_OVER_MEAN]
            for load in range(VISION_OVER_MEAN, packs.shape[1], 2):
                weights[place] += packs[pack, load]
        else:
            weights[place] = packs[pack, column]
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
