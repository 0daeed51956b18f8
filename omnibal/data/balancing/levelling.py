"""Levelling: exchanges between heavy and light packs until the packs of every step weigh alike."""

from typing import Any, Final, NamedTuple

import numpy as np

from omnibal.compiled import compiled
from omnibal.data.balancing.exchange import exchange
from omnibal.data.balancing.shuffle import scrambled
from omnibal.data.balancing.tables import DIMENSIONS, EXCESS, Int32Array, Int64Array, Integer

STEP_ROUNDS: Final = 4
"""Rounds of exchanges within a step."""
HEAVIEST_ROUNDS: Final = 4
"""Rounds in which the heaviest pack of a step tries all others."""
VISION_ROUNDS: Final = 20
"""Rounds of exchanges between steps for the sake of vision units."""
OTHER_ROUNDS: Final = 4
"""Rounds of exchanges between steps for the sake of the other loads."""
GROUP_PASSES: Final = 2
"""How often steps are levelled after exchanges between them."""
UNPRODUCTIVE: Final = 3
"""Rounds end when fewer than one in so many exchanges brings packs nearer to each other."""
MEETINGS: Final = 4
"""Counterparts in other steps that a pack of wrong vision units tries in a round."""


class Tolerance(NamedTuple):
    """Excesses that are not worth an exchange, in units of the loads."""

    vision: int
    """In vision units."""
    others: int
    """In cost and in tokens, within a step."""
    group: int
    """In cost and in tokens, between steps."""
    weights: tuple[int, int]
    """Loads of a vision unit and of a token."""


@compiled
def level_steps(
    samples: Int32Array,
    packs: Int64Array,
    step_packs: int,
    exchange_steps: int,
    tolerance: Tolerance,
    seed: Any,
    scratch: Int32Array,
) -> None:
    """Make the packs of every step alike.

    Args:
        samples: Changed in place.
        packs: Those of all steps, excesses measured from 0; changed in place.
        step_packs: Packs per step.
        exchange_steps: Steps that may exchange samples; with 1 every step keeps those that it drew.
        tolerance: Excesses to accept.
        seed: Which packs meet where chance decides.
        scratch: From ``make_scratch``.

    Complexity: O(packs) exchanges.
    """
    order = np.empty(len(packs), dtype=np.int64)
    for begin in range(0, len(packs), step_packs):
        _center(packs, begin, begin + step_packs, 0)
        _level_step(samples, packs, begin, begin + step_packs, tolerance, order, scratch)
    if exchange_steps > 1:
        _level_groups(samples, packs, step_packs, exchange_steps * step_packs, tolerance, order, seed, scratch)
    for begin in range(0, len(packs), step_packs):
        _center(packs, begin, begin + step_packs, 1)  # the other loads only: vision units keep their targets
        _level_heaviest(samples, packs, begin, begin + step_packs, tolerance, order, scratch)


@compiled
def _level_groups(
    samples: Int32Array,
    packs: Int64Array,
    step_packs: int,
    group_packs: int,
    tolerance: Tolerance,
    order: Int64Array,
    seed: Any,
    scratch: Int32Array,
) -> None:
    """Let packs of neighbouring steps exchange samples, and level each step anew."""
    for group_pass in range(GROUP_PASSES):
        for begin in range(0, len(packs), group_packs):
            end = min(begin + group_packs, len(packs))
            draws = seed + np.uint64((group_pass * len(packs) + begin) * VISION_ROUNDS)
            _level_vision(samples, packs, begin, end, tolerance, order, draws, scratch)
            _level_others(samples, packs, begin, end, tolerance, order, scratch)
        for begin in range(0, len(packs), step_packs):
            end = begin + step_packs
            _center(packs, begin, end, 1)
            if _list_uneven(packs, begin, end, tolerance.vision, tolerance.group, order):
                _level_step(samples, packs, begin, end, tolerance, order, scratch)


@compiled
def _center(packs: Int64Array, begin: int, end: int, from_dimension: int) -> None:
    """Measure packs ``begin`` … ``end`` − 1 against their mean, in all dimensions from the given one on."""
    for column in range(EXCESS + from_dimension, EXCESS + DIMENSIONS):
        total = np.int64(0)
        for pack in range(begin, end):
            total += packs[pack, column]
        mean = total // (end - begin)
        for pack in range(begin, end):
            packs[pack, column] -= mean


@compiled
def _level_step(
    samples: Int32Array,
    packs: Int64Array,
    begin: int,
    end: int,
    tolerance: Tolerance,
    order: Int64Array,
    scratch: Int32Array,
) -> None:
    """Exchange samples between the heavy and the light ones of packs ``begin`` … ``end`` − 1."""
    number = end - begin
    for place in range(number):
        order[place] = begin + place
    swaps = tries = 0
    for turn in range(STEP_ROUNDS):
        wrong_vision = uneven = 0
        for pack in range(begin, end):
            wrong_vision += abs(packs[pack, EXCESS]) > tolerance.vision
            uneven += _is_uneven(packs, pack, tolerance.vision, tolerance.others)
        if uneven == 0 or UNPRODUCTIVE * swaps < tries:
            return
        # Vision decides in every other round while it is uneven: it comes in few sizes, and is soon even or never.
        _sort_packs(packs, order, number, wrong_vision > 0 and turn % 2 == 0)
        for place in range(number // 2):
            heavy, light = order[number - 1 - place], order[place]
            if _is_uneven(packs, heavy, tolerance.vision, tolerance.others) or (
                _is_uneven(packs, light, tolerance.vision, tolerance.others)
            ):
                tries += 1
                swaps += exchange(
                    samples, packs, heavy, light, 0, tolerance.others >> 2, turn, tolerance.weights, scratch
                )


@compiled
def _level_heaviest(
    samples: Int32Array,
    packs: Int64Array,
    begin: int,
    end: int,
    tolerance: Tolerance,
    order: Int64Array,
    scratch: Int32Array,
) -> None:
    """Let the heaviest of packs ``begin`` … ``end`` − 1 try all others: all ranks wait for it."""
    number = end - begin
    for place in range(number):
        order[place] = begin + place
    for turn in range(HEAVIEST_ROUNDS):
        _sort_packs(packs, order, number, False)
        heaviest = order[number - 1]
        swaps = tries = 0
        for place in range(number - 1):
            if not _is_uneven(packs, heaviest, tolerance.vision, tolerance.others):
                return
            tries += 1
            swaps += exchange(
                samples, packs, heaviest, order[place], 0, tolerance.others >> 2, turn, tolerance.weights, scratch
            )
        if UNPRODUCTIVE * swaps < tries:
            return


@compiled
def _is_uneven(packs: Int64Array, pack: int, vision: Integer, others: Integer) -> bool:
    return bool(
        abs(packs[pack, EXCESS]) > vision
        or abs(packs[pack, EXCESS + 1]) > others
        or abs(packs[pack, EXCESS + 2]) > others
    )


@compiled
def _sort_packs(packs: Int64Array, order: Int64Array, number: int, by_vision: bool) -> None:
    """Sort packs from light to heavy: Shell's sort, quick on what was sorted a round before."""
    gap = 1
    while gap < number // 3:
        gap = 3 * gap + 1
    while gap:
        for place in range(gap, number):
            pack = order[place]
            weight = _weight(packs, pack, by_vision)
            hole = place
            while hole >= gap and _weight(packs, order[hole - gap], by_vision) > weight:
                order[hole] = order[hole - gap]
                hole -= gap
            order[hole] = pack
        gap //= 3


@compiled
def _weight(packs: Int64Array, pack: int, by_vision: bool) -> int:
    return int(packs[pack, EXCESS] if by_vision else packs[pack, EXCESS + 1] + packs[pack, EXCESS + 2])


@compiled
def _level_vision(
    samples: Int32Array,
    packs: Int64Array,
    begin: int,
    end: int,
    tolerance: Tolerance,
    order: Int64Array,
    seed: Any,
    scratch: Int32Array,
) -> None:
    """Let packs with too many vision units and packs with too few, of different steps, exchange samples.

    Not all can: 18 = 5 + 5 + 5 + 3 and 15 = 5 + 5 + 5 make no 16 and 17. A pack without a counterpart hands its excess
    on to a random even pack, which has other samples: there it may find one.
    """
    before = end - begin + 1
    for turn in range(VISION_ROUNDS):
        number = _list_uneven(packs, begin, end, tolerance.vision, np.int64(1) << 62, order)
        stuck = 16 * number > end - begin and 10 * number > 9 * before
        if number == 0 or stuck:
            return
        before = number
        _sort_packs(packs, order, number, True)
        lacking = 0
        while lacking < number and packs[order[lacking], EXCESS] < 0:
            lacking += 1
        for place in range(lacking, number):
            for meeting in range(min(MEETINGS, lacking)):
                pack, other = order[place], order[(place + turn * MEETINGS + meeting) % lacking]
                if packs[pack, EXCESS] > tolerance.vision and packs[other, EXCESS] < -tolerance.vision:
                    exchange(samples, packs, pack, other, 0, 0, turn, tolerance.weights, scratch)
        for place in range(number):
            pack = order[place]
            draw = scrambled(seed + np.uint64(turn * (end - begin) + place)) % np.uint64(end - begin)
            other = begin + np.int64(draw)
            if abs(packs[other, EXCESS]) <= tolerance.vision < abs(packs[pack, EXCESS]):
                wish = 2 * tolerance.vision if packs[pack, EXCESS] > 0 else -2 * tolerance.vision
                exchange(samples, packs, pack, other, wish, 0, turn, tolerance.weights, scratch)


@compiled
def _level_others(
    samples: Int32Array,
    packs: Int64Array,
    begin: int,
    end: int,
    tolerance: Tolerance,
    order: Int64Array,
    scratch: Int32Array,
) -> None:
    """Let heavy and light packs of different steps exchange samples of as many vision units."""
    for turn in range(OTHER_ROUNDS):
        number = _list_uneven(packs, begin, end, tolerance.vision, tolerance.group, order)
        _sort_packs(packs, order, number, False)
        swaps = 0
        for place in range(number // 2):
            pack, other = order[number - 1 - place], order[place]
            wish = packs[other, EXCESS] - packs[pack, EXCESS]  # no vision units should move
            swaps += exchange(
                samples, packs, pack, other, wish, tolerance.others >> 2, turn, tolerance.weights, scratch
            )
        if UNPRODUCTIVE * swaps < number // 2:
            return


@compiled
def _list_uneven(packs: Int64Array, begin: int, end: int, vision: Integer, others: Integer, order: Int64Array) -> int:
    number = 0
    for pack in range(begin, end):
        if _is_uneven(packs, pack, vision, others):
            order[number] = pack
            number += 1
    return number
