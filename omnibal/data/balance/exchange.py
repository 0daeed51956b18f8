"""The exchange of a few samples between two packs: the one move that all balancing is made of."""

from typing import Any, Final

import numpy as np

from omnibal.compiled import compiled_part
from omnibal.data.balance.mixes import stays_random
from omnibal.data.balance.rules import Rules
from omnibal.data.balance.subsets import FAR, WITHIN, Excess, Goal, add_subsets, least_over, nearest
from omnibal.data.balance.tables import (
    COST_EXCESS,
    COST_SUM,
    COUNT,
    FIRST,
    MASK,
    MEMBER,
    NEXT,
    NOWHERE,
    TOKEN_ROOM,
    TOKEN_SUM,
    VISION_EXCESS,
    VISION_ROOM,
    VISION_SUM,
    Int32Array,
    Int64Array,
    Integer,
    Window,
    prepend,
)

MOST_MEMBERS: Final = 31
"""Samples of a pack that an exchange looks at: the bits of a mask."""
LEVELLING, CAREFULLY, FREELY, PARTLY, BY_ALL_MEANS = range(5)
"""What an exchange is for: see ``exchange``."""


@compiled_part
def exchange(
    window: Window, rules: Rules, pack: Integer, other: Integer, wish: Integer, gain: int, turn: int, mode: int
) -> bool:
    """Swap the subsets of two packs after which they are most alike; tell whether.

    Both packs keep a sample. What they are over their limits, one may take over from the other; it never becomes more.
    A swap between steps must keep both as random as they are (``stays_random``).

    Args:
        window: Changed in place.
        rules: The limits, and which steps count as random.
        pack: One pack.
        other: Another one.
        wish: Vision load that the first pack pretends to have besides its own, so that an even one takes it over.
        gain: How much nearer a swap must bring them.
        turn: Packs with too many samples to look at show others in every turn.
        mode: ``LEVELLING``, or how the first pack, which is over a limit, is repaired. ``CAREFULLY``: it must be within
            its limits afterwards, the other one no farther over than before, and both no less even. ``FREELY``: the
            same, whatever becomes of evenness and of steps' mixes. ``PARTLY``: as little over as can be.
            ``BY_ALL_MEANS``: the same, and the other one may be farther over where the first one gains more by it.
    """
    samples, packs, scratch = window.samples, window.packs, window.scratch
    step, other_step, small = pack // rules.step_packs, other // rules.step_packs, rules.effort.small_pack
    free_vision = (
        min(window.free_vision[step], window.free_vision[other_step]) if mode == LEVELLING and wish == 0 else 0
    )
    goal, bound = _aim(packs, pack, other, wish, mode, free_vision)
    if bound <= gain:
        return False
    # 1. What either pack could give away. Where both list all their subsets, to swap the rest of both instead makes
    # the same two packs with changed places. Within a step either will do: the first pack's last sample stays where it
    # is, which halves the work. With a wish it stays, too: then less of a pack changes steps, which are more random (χ²
    # 0.93 in place of 1.45 at the tightest limits of ALGORITHM.md and 512 ranks) and as even.
    kept = mode == LEVELLING and (step == other_step or wish != 0)
    kept = kept and max(packs[pack, COUNT], packs[other, COUNT]) <= small
    mine, num_mine = _list_subsets(samples, packs, pack, turn, small, kept, scratch[0])
    theirs, num_theirs = _list_subsets(samples, packs, other, turn + 1, small, False, scratch[1])
    # 2. The best pair of subsets, if any is good enough.
    if mode >= PARTLY:
        given, taken = least_over(scratch, num_mine, num_theirs, goal, _excess(packs, pack, other))
    else:
        given, taken = nearest(scratch, num_mine, num_theirs, goal, np.int32(bound - gain))
    if given < 0:
        return False
    # 3. Neither pack may end without a sample, nor steps stranger than random ones.
    give, take = scratch[0, MASK, given], scratch[1, MASK, taken]
    change = _bits(take) - _bits(give)
    if packs[pack, COUNT] + change < 1 or packs[other, COUNT] - change < 1:
        return False
    free = mode >= FREELY
    if step != other_step and not stays_random(window, rules, step, other_step, mine, theirs, give, take, free):
        return False
    # 4. Swap: the packs' sums, then both chains of samples, which are linked anew from their ends.
    _book(packs, pack, other, change, scratch, given, taken)
    chain, other_chain = packs[pack, FIRST], packs[other, FIRST]
    packs[pack, FIRST] = packs[other, FIRST] = NOWHERE
    _relink(samples, packs, chain, pack, other, scratch[0], mine, give)
    _relink(samples, packs, other_chain, other, pack, scratch[1], theirs, take)
    return True


@compiled_part
def _aim(
    packs: Int64Array, pack: Integer, other: Integer, wish: Integer, mode: int, free_vision: Integer
) -> tuple[Goal, Integer]:
    """What a swap should move, and how near it must come to that.

    How much either pack may gain depends on ``mode``; see ``exchange``.
    """
    # The best swap moves half the difference from one to the other.
    vision = _within((packs[pack, VISION_EXCESS] + wish - packs[other, VISION_EXCESS]) >> 1)
    cost = _within((packs[pack, COST_EXCESS] - packs[other, COST_EXCESS]) >> 1)
    # A swap that misses half the difference by x leaves one of both packs x above their mean.
    slack = _within(max(free_vision - (packs[pack, VISION_EXCESS] + packs[other, VISION_EXCESS] + 1 >> 1), 0))
    bound = max(abs(vision) - slack, 0) + abs(cost)
    over, other_over = _excess_of(packs, pack), _excess_of(packs, other)
    # Repairs: the first pack loses what it has too much (its room is below 0), the other one stays within its limits,
    # or as far over them as it is.
    room, other_room = (-over[0], -over[1]), (max(-other_over[0], 0), max(-other_over[1], 0))
    if mode == LEVELLING:  # either may take over what the other one has too much
        room = max(room[0], 0) + max(other_over[0], 0), max(room[1], 0) + max(other_over[1], 0)
        other_room = other_room[0] + max(over[0], 0), other_room[1] + max(over[1], 0)
    elif mode == CAREFULLY:  # what is repaired makes up for unevenness of as much
        bound += max(over[0], 0) + max(over[1], 0)
    elif mode == FREELY:
        bound = np.int64(FAR)
    elif mode == PARTLY:  # it need not lose all of it
        room = max(room[0], 0), max(room[1], 0)
    else:
        room = other_room = np.int64(WITHIN), np.int64(WITHIN)
    width = room[0] + other_room[0], room[1] + other_room[1]
    if min(width[0], width[1]) < 0:
        bound = np.int64(0)  # together they hold too much
    goal = Goal(
        np.int32(vision), np.int32(cost), np.int32(room[0]), np.int32(room[1]),
        np.uint32(width[0]), np.uint32(width[1]), np.int32(slack),
    )  # fmt: skip
    return goal, bound


@compiled_part
def _excess_of(packs: Int64Array, pack: Integer) -> tuple[Integer, Integer]:
    """How far a pack is over its limits of vision units and of tokens; below 0 where it has room."""
    return _within(-packs[pack, VISION_ROOM]), _within(-packs[pack, TOKEN_ROOM])


@compiled_part
def _excess(packs: Int64Array, pack: Integer, other: Integer) -> Excess:
    vision, tokens = _excess_of(packs, pack)
    other_vision, other_tokens = _excess_of(packs, other)
    return Excess(np.int32(vision), np.int32(tokens), np.int32(other_vision), np.int32(other_tokens))


@compiled_part
def _within(load: Integer) -> Integer:
    return min(max(load, -WITHIN), WITHIN)


@compiled_part
def _list_subsets(
    samples: Int32Array, packs: Int64Array, pack: Integer, turn: int, small: int, kept: bool, table: Int32Array
) -> tuple[int, int]:
    """List members and subsets of a pack; return how many of each.

    Args:
        samples: A window's samples.
        packs: Its packs.
        pack: Which one.
        turn: Of too many members, which ones.
        small: Up to so many members all subsets are listed.
        kept: Leave the last sample out.
        table: Filled.
    """
    number, members, sample = packs[pack, COUNT], 0, packs[pack, FIRST]
    if number <= MOST_MEMBERS:
        while members < number - kept:
            table[MEMBER, members] = sample
            members += 1
            sample = samples[sample, NEXT]
    else:  # every stride-th one, beginning elsewhere in every turn
        stride = (number + MOST_MEMBERS - 1) // MOST_MEMBERS
        for place in range(turn, turn + number):
            if place % stride == 0 and members < MOST_MEMBERS:
                table[MEMBER, members] = sample
                members += 1
            sample = samples[sample, NEXT]
    return members, add_subsets(samples, table, members, small)


@compiled_part
def _book(
    packs: Int64Array, pack: Integer, other: Integer, change: Integer, scratch: Int32Array, given: int, taken: int
) -> None:
    """Enter what a swap moves into both packs' rows."""
    vision = scratch[1, VISION_SUM, taken] - scratch[0, VISION_SUM, given]
    cost = scratch[1, COST_SUM, taken] - scratch[0, COST_SUM, given]
    tokens = scratch[1, TOKEN_SUM, taken] - scratch[0, TOKEN_SUM, given]
    for row, sign in ((pack, 1), (other, -1)):
        packs[row, COUNT] += sign * change
        packs[row, VISION_EXCESS] += sign * vision
        packs[row, COST_EXCESS] += sign * cost
        packs[row, VISION_ROOM] -= sign * vision
        packs[row, TOKEN_ROOM] -= sign * tokens


@compiled_part
def _relink(
    samples: Int32Array,
    packs: Int64Array,
    sample: int,
    pack: int,
    other: int,
    table: Int32Array,
    members: int,
    gone: int,
) -> None:
    """Link a chain to ``pack`` anew, but its listed members in the mask ``gone`` to ``other``."""
    member = 0
    while sample != NOWHERE:
        behind, target = samples[sample, NEXT], pack
        if member < members and table[MEMBER, member] == sample:  # members are listed in the chain's order
            if gone >> member & 1:
                target = other
            member += 1
        prepend(samples, packs, target, sample)
        sample = behind


@compiled_part
def _bits(mask: Any) -> int:
    """Number of ones."""
    number = 0
    while mask:
        mask &= mask - 1  # without its lowest one
        number += 1
    return number
