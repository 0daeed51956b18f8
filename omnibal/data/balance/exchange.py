"""The exchange of a few samples between two packs: the one move that all balancing is made of."""

from typing import Any, Final, NamedTuple

import numpy as np

from omnibal.compiled import compiled
from omnibal.data.balance.rules import Rules
from omnibal.data.balance.tables import (
    COST,
    COST_EXCESS,
    COST_SUM,
    COUNT,
    FIRST,
    MASK,
    MEMBER,
    MIX,
    MOST_SUBSETS,
    NEXT,
    NOWHERE,
    TOKEN_ROOM,
    TOKEN_SUM,
    TOKENS,
    VISION,
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
LANES: Final = 8
"""Subsets that a processor compares at once; lists of them end at a multiple."""
FAR: Final = np.int32((1 << 31) - 1)
"""Farther than any two subsets are."""
LEVELLING, CAREFULLY, FREELY, PARTLY, BY_ALL_MEANS = range(5)
"""What an exchange is for: see ``exchange``."""
LIMITS_ALONE: Final = 12
"""Bits by which unevenness counts less than an excess where only the limits matter."""
WITHIN: Final = 1 << 26
"""Differences beyond this count as this much, so that sums of several fit into 32 bits."""


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


class Excess(NamedTuple):
    """How far two packs are over their limits; below 0 where there is room."""

    vision: Any
    tokens: Any
    other_vision: Any
    other_tokens: Any


@compiled
def exchange(
    window: Window, rules: Rules, pack: Integer, other: Integer, wish: Integer, gain: int, turn: int, mode: int
) -> bool:
    """Swap the subsets of two packs after which they are most alike; tell whether.

    Both packs keep a sample. What they are over their limits, one may take over from the other; it never becomes more.
    A swap between steps must keep both as random as they are (``_stays_random``).

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
    goal, bound = _aim(packs, pack, other, wish, mode)
    if bound <= gain:
        return False
    mine, num_mine = _list_subsets(samples, packs, pack, turn, rules.effort.whole, scratch[0])
    theirs, num_theirs = _list_subsets(samples, packs, other, turn + 1, rules.effort.whole, scratch[1])
    if mode >= PARTLY:
        given, taken = least_over(scratch, num_mine, num_theirs, goal, _excess(packs, pack, other))
    else:
        given, taken = nearest(scratch, num_mine, num_theirs, goal, np.int32(bound - gain))
    if given < 0:
        return False
    give, take = scratch[0, MASK, given], scratch[1, MASK, taken]
    change = _bits(take) - _bits(give)
    if packs[pack, COUNT] + change < 1 or packs[other, COUNT] - change < 1:
        return False
    step, other_step, free = pack // rules.step_packs, other // rules.step_packs, mode >= FREELY
    if step != other_step and not _stays_random(window, rules, step, other_step, mine, theirs, give, take, free):
        return False
    _book(packs, pack, other, change, scratch, given, taken)
    chain, other_chain = packs[pack, FIRST], packs[other, FIRST]
    packs[pack, FIRST] = packs[other, FIRST] = NOWHERE
    _relink(samples, packs, chain, pack, other, scratch[0], mine, give)
    _relink(samples, packs, other_chain, other, pack, scratch[1], theirs, take)
    return True


@compiled
def _aim(packs: Int64Array, pack: Integer, other: Integer, wish: Integer, mode: int) -> tuple[Goal, Integer]:
    """What a swap should move, and how near it must come to that."""
    # The best swap moves half the difference from one to the other.
    vision = _within((packs[pack, VISION_EXCESS] + wish - packs[other, VISION_EXCESS]) >> 1)
    cost = _within((packs[pack, COST_EXCESS] - packs[other, COST_EXCESS]) >> 1)
    bound = abs(vision) + abs(cost)
    over, other_over = _excess_of(packs, pack), _excess_of(packs, other)
    room, other_room = (-over[0], -over[1]), (max(-other_over[0], 0), max(-other_over[1], 0))
    if mode == LEVELLING:
        room = max(room[0], 0) + max(other_over[0], 0), max(room[1], 0) + max(other_over[1], 0)
        other_room = other_room[0] + max(over[0], 0), other_room[1] + max(over[1], 0)
    elif mode == CAREFULLY:
        bound += max(over[0], 0) + max(over[1], 0)
    elif mode == FREELY:
        bound = np.int64(FAR)
    elif mode == PARTLY:
        room = max(room[0], 0), max(room[1], 0)
    else:
        room = other_room = np.int64(WITHIN), np.int64(WITHIN)
    width = room[0] + other_room[0], room[1] + other_room[1]
    if min(width[0], width[1]) < 0:
        bound = np.int64(0)  # together they hold too much
    goal = Goal(
        np.int32(vision), np.int32(cost), np.int32(room[0]), np.int32(room[1]), np.uint32(width[0]), np.uint32(width[1])
    )
    return goal, bound


@compiled
def _excess_of(packs: Int64Array, pack: Integer) -> tuple[Integer, Integer]:
    """How far a pack is over its limits of vision units and of tokens; below 0 where it has room."""
    return _within(-packs[pack, VISION_ROOM]), _within(-packs[pack, TOKEN_ROOM])


@compiled
def _excess(packs: Int64Array, pack: Integer, other: Integer) -> Excess:
    vision, tokens = _excess_of(packs, pack)
    other_vision, other_tokens = _excess_of(packs, other)
    return Excess(np.int32(vision), np.int32(tokens), np.int32(other_vision), np.int32(other_tokens))


@compiled
def _within(load: Integer) -> Integer:
    return min(max(load, -WITHIN), WITHIN)


@compiled
def _list_subsets(
    samples: Int32Array, packs: Int64Array, pack: Integer, turn: int, whole: int, table: Int32Array
) -> tuple[int, int]:
    """List members and subsets of a pack; return how many of each. Of too many members, some in every turn."""
    stride = (packs[pack, COUNT] + MOST_MEMBERS - 1) // MOST_MEMBERS
    place, members = turn, 0
    sample = packs[pack, FIRST]
    while sample != NOWHERE:
        if place % stride == 0 and members < MOST_MEMBERS:
            table[MEMBER, members] = sample
            members += 1
        place += 1
        sample = samples[sample, NEXT]
    return members, add_subsets(samples, table, members, whole)


@compiled
def add_subsets(samples: Int32Array, table: Int32Array, members: int, whole: int) -> int:
    """List subsets of the listed members, the empty one first, up to a multiple of ``LANES``; return how many.

    All subsets of up to ``whole`` members; of more members single ones and pairs, neighbours in the chain first.
    """
    table[MASK:, 0] = 0
    number = 1
    for member in range(members):
        sample = table[MEMBER, member]
        for subset in range(number if members <= whole else 1):
            table[MASK, number] = table[MASK, subset] | (1 << member)
            table[VISION_SUM, number] = table[VISION_SUM, subset] + samples[sample, VISION]
            table[COST_SUM, number] = table[COST_SUM, subset] + samples[sample, COST]
            table[TOKEN_SUM, number] = table[TOKEN_SUM, subset] + samples[sample, TOKENS]
            number += 1
    if members > whole > 1:
        for apart in range(1, members):
            for first in range(1, members - apart + 1):
                if number == MOST_SUBSETS:
                    return number
                for row in range(MASK, TOKEN_SUM + 1):  # the masks share no bit: their sum is their union
                    table[row, number] = table[row, first] + table[row, first + apart]
                number += 1
    while number % LANES:
        table[MASK:, number] = 0  # the empty subset once more
        number += 1
    return number


@compiled
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
        for candidate in range(num_theirs):  # a loop that compilers turn into vector instructions
            least = min(least, _distance(scratch, subset, candidate, goal))
        if least < best:
            best, given = least, subset
    taken = -1
    if given >= 0:
        taken = 0
        while _distance(scratch, given, taken, goal) != best:
            taken += 1
    return given, taken


@compiled
def _distance(scratch: Int32Array, subset: int, candidate: int, goal: Goal) -> Any:
    """How far what a swap moves is from the goal; ``FAR`` where a pack has no room for it."""
    vision = np.int32(scratch[0, VISION_SUM, subset] - scratch[1, VISION_SUM, candidate])
    cost = np.int32(scratch[0, COST_SUM, subset] - scratch[1, COST_SUM, candidate])
    tokens = np.int32(scratch[0, TOKEN_SUM, subset] - scratch[1, TOKEN_SUM, candidate])
    fits = (np.uint32(np.int32(vision + goal.vision_room)) <= goal.vision_width) & (
        np.uint32(np.int32(tokens + goal.token_room)) <= goal.token_width
    )
    distance = np.int32(abs(np.int32(vision - goal.vision)) + abs(np.int32(cost - goal.cost)))
    return distance if fits else FAR


@compiled
def least_over(scratch: Int32Array, num_mine: int, num_theirs: int, goal: Goal, excess: Excess) -> tuple[int, int]:
    """Find the swap after which packs are least over their limits, and of those the most even one; as ``nearest``."""
    best, given, taken = FAR, -1, -1
    for subset in range(num_mine):
        for candidate in range(num_theirs):
            far = _distance(scratch, subset, candidate, goal)
            if far < FAR:
                vision = scratch[0, VISION_SUM, subset] - scratch[1, VISION_SUM, candidate]
                tokens = scratch[0, TOKEN_SUM, subset] - scratch[1, TOKEN_SUM, candidate]
                over = max(excess.vision - vision, 0) + max(excess.tokens - tokens, 0)
                over += max(excess.other_vision + vision, 0) + max(excess.other_tokens + tokens, 0)
                far = np.int32((far >> LIMITS_ALONE) + over)
                if far < best:
                    best, given, taken = far, subset, candidate
    return (given, taken) if given > 0 or taken > 0 else (-1, -1)  # the first subsets are empty: no swap


@compiled
def _stays_random(
    window: Window, rules: Rules, step: int, other_step: int, mine: int, theirs: int, give: int, take: int, free: bool
) -> bool:
    """Count a swap between two steps in their mixes, unless it makes one of them stranger than random steps are.

    Without this, exchanges would sort: steps would collect what evens out well with what they have.
    """
    mix, change, scratch = window.mix, window.change, window.scratch
    change[:] = 0
    for side, members, mask in ((0, mine, give), (1, theirs, take)):
        for member in range(members):
            if mask >> member & 1:
                bits = window.samples[scratch[side, MEMBER, member], MIX]
                for column in range(len(change)):
                    change[column] += (2 * side - 1) * (bits >> column & 1)
    if not free and (_gets_stranger(window, rules, step, 1) or _gets_stranger(window, rules, other_step, -1)):
        return False
    for column in range(len(change)):
        mix[step, column] += change[column]
        mix[other_step, column] -= change[column]
    return True


@compiled
def _gets_stranger(window: Window, rules: Rules, step: int, sign: int) -> bool:
    """Tell whether a change takes a step's mix farther from all samples' than it is, and farther than it may be.

    For every threshold of size, the samples below it are counted and compared with what is to be expected, in standard
    deviations; the measure is the mean of the squares, which is 1 on average for steps that are drawn at random.
    """
    thresholds = len(window.usual)
    total = window.mix[step, thresholds]
    new_total = total + sign * window.change[thresholds]
    before = after = 0.0
    for column in range(thresholds):
        usual = window.usual[column]
        variance = max(usual * (1 - usual), 1e-9)  # of a single sample
        away = window.mix[step, column] - total * usual
        new_away = window.mix[step, column] + sign * window.change[column] - new_total * usual
        before += away * away / variance
        after += new_away * new_away / variance
    most = rules.effort.strangeness * new_total + rules.effort.strange_samples
    return bool(after > max(before, thresholds * most))


@compiled
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


@compiled
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
        if member < members and table[MEMBER, member] == sample:
            if gone >> member & 1:
                target = other
            member += 1
        prepend(samples, packs, target, sample)
        sample = behind


@compiled
def _bits(mask: Any) -> int:
    """Number of ones."""
    number = 0
    while mask:
        mask &= mask - 1
        number += 1
    return number
