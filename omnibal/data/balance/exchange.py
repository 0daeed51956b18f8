"""The exchange of a few samples between two packs: the one move that all balancing is made of.

    1. What should move?              _aim:         half of what one pack has more than the other, within both limits
    2. What could each pack give?     _add_subsets: all subsets of a small pack; single samples and pairs of a large one
    3. Which two subsets fit best?    nearest, or least_over where only the limits matter
    4. May these steps change so?     stays_random (tables.py), between packs of different steps
    5. Swap.

An exchange levels two packs or repairs one that is over a limit:

               the swap that is taken              either pack may take         mixes of steps
    levels     makes both most alike               what the other is over       are watched
    repairs    leaves both least over the limits   only what it has room for    may become any

Step 3 takes most of the planner's time: a few hundred comparisons for every two packs that meet.
"""

from typing import Any, Final, NamedTuple

import numpy as np

from omnibal.compiled import compiled_part
from omnibal.data.balance.rules import Rules
from omnibal.data.balance.tables import (
    AIM,
    COST,
    COST_OVER_MEAN,
    COST_SUM,
    COUNT,
    DISTANCE,
    FIRST,
    GAIN_ROOM,
    GAIN_WIDTH,
    MASK,
    MEMBER,
    MOST_SUBSETS,
    NEXT,
    NOWHERE,
    OTHER_OVER,
    OVER,
    SLACK,
    TOKEN_ROOM,
    TOKEN_SUM,
    VISION_OVER_MEAN,
    VISION_ROOM,
    VISION_SUM,
    Int32Array,
    Int64Array,
    Integer,
    Tables,
    prepend,
    stays_random,
)

MOST_MEMBERS: Final = 31  # samples of a pack that an exchange looks at: the bits of a mask
SMALL: Final = 4  # samples of a pack of which all subsets are listed: 16
LANES: Final = 8  # subsets that a processor compares at once; lists of them end at a multiple
FAR: Final = np.int32((1 << 31) - 1)  # farther than any two subsets are
WITHIN: Final = 1 << 26  # differences beyond this count as this much, so that sums of several fit into 32 bits
UNEVENNESS_BITS: Final = 12  # bits by which unevenness counts less than what is over a limit, in repairs


class Goal(NamedTuple):
    """What a swap should move from the first pack to the second, and what it may: as ``goals``, in 32 bits."""

    vision: Any
    vision_room: Any
    vision_width: Any  # unsigned, so that one comparison checks what both packs may gain
    vision_slack: Any
    cost: Any
    token_room: Any
    token_width: Any  # unsigned, too
    tokens_over: Any
    other_tokens_over: Any


@compiled_part
def exchange(
    tables: Tables,
    rules: Rules,
    pack: Integer,
    other: Integer,
    vision_bias: Integer,
    gain: int,
    round_index: int,
    repairs: bool,
) -> bool:
    """Swap the subsets of two packs that fit best; tell whether there are any. Both packs keep a sample.

    Args:
        tables: Changed in place.
        pack: One pack.
        other: Another pack.
        vision_bias: Vision load that the first pack pretends to have besides its own, so that an even one takes it.
        gain: How much nearer a swap must bring the packs.
        round_index: Packs with too many samples to look at show other samples in every round.
        repairs: Whether the first pack is over a limit and must lose of it; otherwise both are levelled.
    """
    samples, packs, subsets, goals = tables.samples, tables.packs, tables.subsets, tables.goals
    step, other_step = pack // rules.step_packs, other // rules.step_packs
    goal, distance = _aim(tables, rules, pack, other, vision_bias, repairs)
    # To swap what is not kept makes the same two packs, so of small packs either will do: the first pack's last sample
    # stays where it is, which halves the work. With a bias it stays, too: then less of a pack changes steps, which are
    # more random (χ² 0.87 in place of 2.28 at the tightest limits of PLANNER.md and 512 ranks) and as even.
    kept = not repairs and (step == other_step or vision_bias != 0)
    kept = kept and max(packs[pack, COUNT], packs[other, COUNT]) <= SMALL
    mine, num_mine = _list_subsets(samples, packs, pack, round_index, kept, subsets[0])
    theirs, num_theirs = _list_subsets(samples, packs, other, round_index + 1, False, subsets[1])
    if repairs:
        given, taken = least_over(subsets, num_mine, num_theirs, goal, goals)
    else:
        given, taken = nearest(subsets, num_mine, num_theirs, goal, np.int32(distance - gain), goals)
    if given < 0:
        return False
    give, take = subsets[0, MASK, given], subsets[1, MASK, taken]
    change = _bits(take) - _bits(give)
    if packs[pack, COUNT] + change < 1 or packs[other, COUNT] - change < 1:
        return False
    crosses = step != other_step
    if crosses and not stays_random(tables, step, other_step, mine, theirs, give, take, repairs):
        return False
    # Swap: the packs' sums, then both lists of samples, which are linked anew from their ends.
    for row, sign in ((pack, 1), (other, -1)):
        packs[row, COUNT] += sign * change
        packs[row, COST_OVER_MEAN] += sign * (subsets[1, COST_SUM, taken] - subsets[0, COST_SUM, given])
        packs[row, TOKEN_ROOM] -= sign * (subsets[1, TOKEN_SUM, taken] - subsets[0, TOKEN_SUM, given])
        for encoder in range(len(goals)):
            moved = sign * (subsets[1, VISION_SUM + encoder, taken] - subsets[0, VISION_SUM + encoder, given])
            packs[row, VISION_OVER_MEAN + 2 * encoder] += moved
            packs[row, VISION_ROOM + 2 * encoder] -= moved
    first, other_first = packs[pack, FIRST], packs[other, FIRST]
    packs[pack, FIRST] = packs[other, FIRST] = NOWHERE
    _relink(samples, packs, first, pack, other, subsets[0], mine, give)
    _relink(samples, packs, other_first, other, pack, subsets[1], theirs, take)
    return True


@compiled_part
def _aim(
    tables: Tables, rules: Rules, pack: Integer, other: Integer, vision_bias: Integer, repairs: bool
) -> tuple[Goal, Integer]:
    """Write ``goals``: what a swap should move; return the goal, and how far from that it is to move nothing."""
    packs, free, goals = tables.packs, tables.free, tables.goals
    shared = 0 if repairs else 1  # where packs are levelled, either may take what the other one is over
    plain = not repairs and vision_bias == 0
    # The best swap moves half the difference from one to the other.
    cost = _within((packs[pack, COST_OVER_MEAN] - packs[other, COST_OVER_MEAN]) >> 1)
    distance = abs(cost)
    for encoder in range(len(goals)):
        mine, theirs = packs[pack, VISION_OVER_MEAN + 2 * encoder], packs[other, VISION_OVER_MEAN + 2 * encoder]
        load = _within((mine + (0 if encoder else vision_bias) - theirs) >> 1)
        # A swap that misses half the difference by x leaves one of both packs x above their mean.
        least_free = min(free[pack // rules.step_packs, encoder], free[other // rules.step_packs, encoder])
        slack = _within(max((least_free if plain else 0) - (mine + theirs + 1 >> 1), 0))
        if encoder and not plain:
            slack = 0
        room_column = VISION_ROOM + 2 * encoder
        over, other_over = _within(-packs[pack, room_column]), _within(-packs[other, room_column])
        room = max(-over, 0) + shared * max(other_over, 0)
        goals[encoder, AIM], goals[encoder, SLACK] = load, slack
        goals[encoder, OVER], goals[encoder, OTHER_OVER] = over, other_over
        goals[encoder, GAIN_ROOM] = room
        goals[encoder, GAIN_WIDTH] = room + max(-other_over, 0) + shared * max(over, 0)
        distance += max(abs(load) - slack, 0)
    over, other_over = _within(-packs[pack, TOKEN_ROOM]), _within(-packs[other, TOKEN_ROOM])
    room = max(-over, 0) + shared * max(other_over, 0)
    goal = Goal(
        np.int32(goals[0, AIM]), np.int32(goals[0, GAIN_ROOM]), np.uint32(goals[0, GAIN_WIDTH]),
        np.int32(goals[0, SLACK]), np.int32(cost), np.int32(room),
        np.uint32(room + max(-other_over, 0) + shared * max(over, 0)), over, other_over,
    )  # fmt: skip
    return goal, distance


@compiled_part
def _within(load: Integer) -> Integer:
    return min(max(load, -WITHIN), WITHIN)


@compiled_part
def _list_subsets(
    samples: Int32Array, packs: Int64Array, pack: Integer, round_index: int, kept: bool, table: Int32Array
) -> tuple[int, int]:
    """List members and subsets of a pack in ``table``, without its last sample if ``kept``; return how many of each."""
    number, members, sample = packs[pack, COUNT], 0, packs[pack, FIRST]
    if number <= MOST_MEMBERS:
        while members < number - kept:
            table[MEMBER, members] = sample
            members += 1
            sample = samples[sample, NEXT]
    else:  # every stride-th one, beginning elsewhere in every round
        stride = (number + MOST_MEMBERS - 1) // MOST_MEMBERS
        for place in range(round_index, round_index + number):
            if place % stride == 0 and members < MOST_MEMBERS:
                table[MEMBER, members] = sample
                members += 1
            sample = samples[sample, NEXT]
    return members, _add_subsets(samples, table, members)


@compiled_part
def _add_subsets(samples: Int32Array, table: Int32Array, members: int) -> int:
    """List subsets of the listed members, the empty one first, and return how many.

    All subsets of up to ``SMALL`` members; of more members single ones and pairs,
    neighbours in the list first. Behind them stand others, up to a multiple of ``LANES``, that move nothing or what one
    of them does.
    """
    if members <= SMALL:
        # Most packs are small: subset s holds the members whose bits are set in s. All sixteen are listed at once,
        # which becomes vector instructions and no branch. What the list of members still holds from another pack,
        # beyond this pack's members, is masked to weigh nothing.
        known = (1 << members) - 1
        for row in range(COST_SUM, len(table)):
            column = row - COST_SUM + COST
            one = samples[table[MEMBER, 0], column] & -(known & 1)
            two = samples[table[MEMBER, 1], column] & -(known >> 1 & 1)
            four = samples[table[MEMBER, 2], column] & -(known >> 2 & 1)
            eight = samples[table[MEMBER, 3], column] & -(known >> 3 & 1)
            for subset in range(1 << SMALL):
                table[row, subset] = (
                    (-(subset & 1) & one)
                    + (-(subset >> 1 & 1) & two)
                    + (-(subset >> 2 & 1) & four)
                    + (-(subset >> 3 & 1) & eight)
                )
        for subset in range(1 << SMALL):
            table[MASK, subset] = subset & known
        return 1 << members
    number = 1 + members
    for member in range(members):
        table[MASK, 1 + member] = 1 << member
        for load in range(len(table) - COST_SUM):
            table[COST_SUM + load, 1 + member] = samples[table[MEMBER, member], COST + load]
    # Single member m is subset 1 + m: a pair is the sum of two of these.
    for apart in range(1, members):
        for first in range(1, min(members - apart, MOST_SUBSETS - number) + 1):
            for row in range(MASK, len(table)):  # the masks share no bit: their sum is their union
                table[row, number] = table[row, first] + table[row, first + apart]
            number += 1
    for row in range(MASK, len(table)):
        table[row, 0] = 0
        for subset in range(number, _whole(number)):
            table[row, subset] = 0
    return number


@compiled_part
def _whole(number: int) -> int:
    return -(-number // LANES) * LANES


@compiled_part
def nearest(
    subsets: Int32Array, num_mine: int, num_theirs: int, goal: Goal, bound: Any, goals: Int64Array
) -> tuple[int, int]:
    """Find the subset of each pack whose swap moves what is nearest to the goal; −1 twice if none is within bound."""
    best, given, taken = bound, -1, -1
    for subset in range(num_mine):
        least = FAR
        if len(goals) > 1:
            _list_distances(subsets, subset, num_theirs, goal, goals)
            for candidate in range(num_theirs):
                least = min(least, subsets[0, DISTANCE, candidate])
        else:
            # Only the least distance, not where it is, and nothing that branches: so compilers make vector instructions
            # of this loop, eight candidates at a time. Which candidate it was is looked up once, at the end.
            for candidate in range(_whole(num_theirs)):
                least = min(least, _distance(subsets, subset, candidate, goal))
        if least < best:
            best, given = least, subset
    if given >= 0:
        _list_distances(subsets, given, num_theirs, goal, goals)
        taken = 0
        while subsets[0, DISTANCE, taken] != best:
            taken += 1
    return given, taken


@compiled_part
def _distance(subsets: Int32Array, subset: int, candidate: int, goal: Goal) -> Any:
    """How far what a swap moves is from the goal, by cost and vision load; ``FAR`` if a pack has no room for it."""
    vision = np.int32(subsets[0, VISION_SUM, subset] - subsets[1, VISION_SUM, candidate])
    cost = np.int32(subsets[0, COST_SUM, subset] - subsets[1, COST_SUM, candidate])
    tokens = np.int32(subsets[0, TOKEN_SUM, subset] - subsets[1, TOKEN_SUM, candidate])
    # −room ≤ moved ≤ width − room in one comparison: what is below 0 is huge as an unsigned number.
    fits = (np.uint32(np.int32(vision + goal.vision_room)) <= goal.vision_width) & (
        np.uint32(np.int32(tokens + goal.token_room)) <= goal.token_width
    )
    distance = np.int32(
        max(np.int32(abs(np.int32(vision - goal.vision)) - goal.vision_slack), np.int32(0))
        + abs(np.int32(cost - goal.cost))
    )
    return distance if fits else FAR


@compiled_part
def _list_distances(subsets: Int32Array, subset: int, number: int, goal: Goal, goals: Int64Array) -> None:
    """List the distances of one subset to all candidates, the loads of all encoders included."""
    for candidate in range(number):
        subsets[0, DISTANCE, candidate] = _distance(subsets, subset, candidate, goal)
    for encoder in range(1, len(goals)):
        row, mine = VISION_SUM + encoder, subsets[0, VISION_SUM + encoder, subset]
        aim, slack = np.int32(goals[encoder, AIM]), np.int32(goals[encoder, SLACK])
        room, width = np.int32(goals[encoder, GAIN_ROOM]), np.uint32(goals[encoder, GAIN_WIDTH])
        for candidate in range(number):
            moved, far = np.int32(mine - subsets[1, row, candidate]), subsets[0, DISTANCE, candidate]
            away = max(np.int32(abs(np.int32(moved - aim)) - slack), np.int32(0))
            fits = (np.uint32(np.int32(moved + room)) <= width) & (far != FAR)
            subsets[0, DISTANCE, candidate] = np.int32(far + away) if fits else FAR


@compiled_part
def least_over(subsets: Int32Array, num_mine: int, num_theirs: int, goal: Goal, goals: Int64Array) -> tuple[int, int]:
    """Find the swap after which packs are least over their limits, and of those the most even one; as ``nearest``."""
    best, given, taken = FAR, -1, -1
    for subset in range(num_mine):
        _list_distances(subsets, subset, num_theirs, goal, goals)
        for candidate in range(num_theirs):
            far = subsets[0, DISTANCE, candidate]
            if far < FAR:
                # What both packs would be over all limits; evenness decides among swaps that leave the same.
                tokens = subsets[0, TOKEN_SUM, subset] - subsets[1, TOKEN_SUM, candidate]
                left = max(goal.tokens_over - tokens, 0) + max(goal.other_tokens_over + tokens, 0)
                for encoder in range(len(goals)):
                    moved = subsets[0, VISION_SUM + encoder, subset] - subsets[1, VISION_SUM + encoder, candidate]
                    left += max(goals[encoder, OVER] - moved, 0) + max(goals[encoder, OTHER_OVER] + moved, 0)
                far = np.int32((far >> UNEVENNESS_BITS) + left)
                if far < best:
                    best, given, taken = far, subset, candidate
    return (given, taken) if given > 0 or taken > 0 else (-1, -1)  # the first subsets are empty: no swap


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
    """Link a list of samples to ``pack`` anew, but the listed members in the mask ``gone`` to ``other``."""
    member = 0
    while sample != NOWHERE:
        following, target = samples[sample, NEXT], pack
        if member < members and table[MEMBER, member] == sample:  # members stand in the order of the list
            if gone >> member & 1:
                target = other
            member += 1
        prepend(samples, packs, target, sample)
        sample = following


@compiled_part
def _bits(mask: Any) -> int:
    number = 0
    while mask:
        mask &= mask - 1  # without its lowest one
        number += 1
    return number
