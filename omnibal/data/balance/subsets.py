"""Subsets of two packs' samples, all compared with each other: which swap of two comes nearest to what is wished for.

This is where the planner spends most of its time: a few hundred comparisons for every meeting of two packs.
"""

from typing import Any, Final, NamedTuple

import numpy as np

from omnibal.compiled import compiled_part
from omnibal.data.balance.tables import (
    COST_SUM,
    MASK,
    MEMBER,
    MOST_SUBSETS,
    TOKEN_SUM,
    VISION,
    VISION_SUM,
    Int32Array,
)

LOADS: Final = 3
"""Vision, cost and tokens: columns of samples, and rows of a pack's table, in this order."""
FEW: Final = 4
"""Members whose subsets are listed at once."""
LANES: Final = 8
"""Subsets that a processor compares at once; lists of them end at a multiple."""
FAR: Final = np.int32((1 << 31) - 1)
"""Farther than any two subsets are."""
WITHIN: Final = 1 << 26
"""Differences beyond this count as this much, so that sums of several fit into 32 bits."""
UNEVENNESS_BITS: Final = 12
"""Bits by which unevenness counts less than an excess where only the limits matter."""


class Goal(NamedTuple):
    """What a swap between two packs should move from the first one to the second, and what it may."""

    vision: Any
    """The vision load whose move makes both alike."""
    cost: Any
    """The same of cost."""
    vision_room: Any
    """Vision load that the first one may gain; below 0 what it must lose."""
    token_room: Any
    """The same of tokens."""
    vision_width: Any
    """The same plus what the second one may gain: unsigned, so that one comparison checks both."""
    token_width: Any
    """The same of tokens."""
    vision_slack: Any
    """How far from ``vision`` a swap may come at no loss."""


class Excess(NamedTuple):
    """How far two packs are over their limits; below 0 where there is room."""

    vision: Any
    tokens: Any
    other_vision: Any
    other_tokens: Any


@compiled_part
def add_subsets(samples: Int32Array, table: Int32Array, members: int, small: int) -> int:
    """List subsets of the listed members, the empty one first, and return how many.

    All subsets of up to ``small`` members; of more members single ones and pairs, neighbours in the chain first. Behind
    them stand others, up to a multiple of ``LANES``, that move nothing or what one of them does.
    """
    if members <= small:
        return _add_all(samples, table, members)
    number = 1 + members
    for member in range(members):
        table[MASK, 1 + member] = 1 << member
        for load in range(LOADS):
            table[VISION_SUM + load, 1 + member] = samples[table[MEMBER, member], VISION + load]
    if small > 1:
        # Single member m is subset 1 + m: a pair is the sum of two of these.
        for apart in range(1, members):
            for first in range(1, min(members - apart, MOST_SUBSETS - number) + 1):
                for row in range(MASK, TOKEN_SUM + 1):  # the masks share no bit: their sum is their union
                    table[row, number] = table[row, first] + table[row, first + apart]
                number += 1
    for row in range(MASK, TOKEN_SUM + 1):
        table[row, 0] = 0
        for subset in range(number, _whole(number)):
            table[row, subset] = 0
    return number


@compiled_part
def _whole(number: int) -> int:
    """The next multiple of ``LANES``."""
    return -(-number // LANES) * LANES


@compiled_part
def _add_all(samples: Int32Array, table: Int32Array, members: int) -> int:
    """List all subsets of a few members: number s holds those whose bits are set in s."""
    known = (1 << members) - 1
    for row in range(VISION_SUM, TOKEN_SUM + 1):
        column = row - VISION_SUM + VISION
        # Most packs have up to four members: their subsets are listed at once, which becomes vector instructions and no
        # branch. Where there are fewer, what is left in the list of members from another pack weighs nothing.
        one = samples[table[MEMBER, 0], column] & -(known & 1)
        two = samples[table[MEMBER, 1], column] & -(known >> 1 & 1)
        four = samples[table[MEMBER, 2], column] & -(known >> 2 & 1)
        eight = samples[table[MEMBER, 3], column] & -(known >> 3 & 1)
        for subset in range(1 << FEW):
            table[row, subset] = (
                (-(subset & 1) & one)
                + (-(subset >> 1 & 1) & two)
                + (-(subset >> 2 & 1) & four)
                + (-(subset >> 3 & 1) & eight)
            )
    for subset in range(1 << FEW):
        table[MASK, subset] = subset & known
    # Every further member: all subsets so far once more, with it.
    for member in range(FEW, members):
        number = 1 << member
        for subset in range(number):
            table[MASK, number + subset] = table[MASK, subset] | number
        for load in range(LOADS):
            more = samples[table[MEMBER, member], VISION + load]
            for subset in range(number):
                table[VISION_SUM + load, number + subset] = table[VISION_SUM + load, subset] + more
    return 1 << members


@compiled_part
def nearest(scratch: Int32Array, num_mine: int, num_theirs: int, goal: Goal, bound: Any) -> tuple[int, int]:
    """Find a subset of each pack whose swap moves what is nearest to the goal.

    Args:
        scratch: Both packs' subsets.
        num_mine: Subsets of the first.
        num_theirs: Subsets of the second.
        goal: What should move, and what may.
        bound: How near it must be.

    Returns:
        Their numbers, or −1 twice where none is nearer than ``bound``.
    """
    best, given = bound, -1
    for subset in range(num_mine):
        least = FAR
        # Only the least distance, not where it is, and nothing that branches: so compilers make vector instructions
        # of this loop, eight candidates at a time. Which candidate it was is looked up once, at the end.
        for candidate in range(_whole(num_theirs)):
            least = min(least, _distance(scratch, subset, candidate, goal))
        if least < best:
            best, given = least, subset
    taken = -1
    if given >= 0:
        taken = 0
        while _distance(scratch, given, taken, goal) != best:
            taken += 1
    return given, taken


@compiled_part
def _distance(scratch: Int32Array, subset: int, candidate: int, goal: Goal) -> Any:
    """How far what a swap moves is from the goal; ``FAR`` where a pack has no room for it."""
    vision = np.int32(scratch[0, VISION_SUM, subset] - scratch[1, VISION_SUM, candidate])
    cost = np.int32(scratch[0, COST_SUM, subset] - scratch[1, COST_SUM, candidate])
    tokens = np.int32(scratch[0, TOKEN_SUM, subset] - scratch[1, TOKEN_SUM, candidate])
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
def least_over(scratch: Int32Array, num_mine: int, num_theirs: int, goal: Goal, excess: Excess) -> tuple[int, int]:
    """Find the swap after which packs are least over their limits, and of those the most even one; as ``nearest``."""
    best, given, taken = FAR, -1, -1
    for subset in range(num_mine):
        for candidate in range(num_theirs):
            far = _distance(scratch, subset, candidate, goal)
            if far < FAR:
                vision = scratch[0, VISION_SUM, subset] - scratch[1, VISION_SUM, candidate]
                tokens = scratch[0, TOKEN_SUM, subset] - scratch[1, TOKEN_SUM, candidate]
                # What both packs would be over both limits; evenness decides among swaps that leave the same.
                over = max(excess.vision - vision, 0) + max(excess.tokens - tokens, 0)
                over += max(excess.other_vision + vision, 0) + max(excess.other_tokens + tokens, 0)
                far = np.int32((far >> UNEVENNESS_BITS) + over)
                if far < best:
                    best, given, taken = far, subset, candidate
    return (given, taken) if given > 0 or taken > 0 else (-1, -1)  # the first subsets are empty: no swap
