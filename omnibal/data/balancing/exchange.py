"""Exchange of samples between two packs: the one move that all balancing is made of."""

from typing import Any

import numpy as np

from omnibal.compiled import compiled
from omnibal.data.balancing.subsets import list_subsets, nearest, within_bits
from omnibal.data.balancing.tables import (
    COUNT,
    DIMENSIONS,
    EXCESS,
    FIRST,
    MASKS,
    MEMBERS,
    NEXT,
    NOWHERE,
    ROOM,
    SIZES,
    SUMS,
    Int32Array,
    Int64Array,
    Integer,
    prepend,
)


@compiled
def exchange(
    samples: Int32Array,
    packs: Int64Array,
    pack: Integer,
    other: Integer,
    wish: Integer,
    gain: int,
    turn: int,
    weights: tuple[int, int],
    scratch: Int32Array,
) -> bool:
    """Swap the subsets of two packs after which their excesses are most alike; tell whether there was a swap.

    Alike means a small sum of differences over all dimensions. There is none where a pack would become empty, or
    exceed a limit by more than it does.

    Args:
        samples: Changed in place.
        packs: Changed in place.
        pack: One pack.
        other: Another pack.
        wish: Excess in the first dimension that ``pack`` pretends to have on top of its own.
        gain: How much nearer, in half the sum of differences, a swap must bring them.
        turn: Packs too large to try all pairs of samples try others in every turn.
        weights: Load of a vision unit in the first dimension, and of a token in the last.
        scratch: From ``make_scratch``.

    Complexity: O(``MOST_SUBSETS``²) at most; a few hundred nanoseconds.
    """
    # The nearest swap moves half the difference from one to the other.
    vision = within_bits((packs[pack, EXCESS] + wish - packs[other, EXCESS]) >> 1)
    cost = within_bits((packs[pack, EXCESS + 1] - packs[other, EXCESS + 1]) >> 1)
    tokens = within_bits((packs[pack, EXCESS + 2] - packs[other, EXCESS + 2]) >> 1)
    bound = abs(vision) + abs(cost) + abs(tokens) - gain
    if bound <= 0:
        return False
    num_members, num_mine = list_subsets(samples, packs, pack, turn, scratch, 0)
    num_others, num_theirs = list_subsets(samples, packs, other, turn + 1, scratch, 1)
    free, other_free = _free(packs, pack, weights), _free(packs, other, weights)
    given, taken = nearest(scratch, num_mine, num_theirs, (vision, cost, tokens), free, other_free, bound)
    if given < 0 or not keeps_samples(packs, pack, other, scratch[0, MASKS, given], scratch[1, MASKS, taken]):
        return False
    swap(samples, packs, pack, other, scratch, num_members, num_others, given, taken)
    return True


@compiled
def _free(packs: Int64Array, pack: int, weights: tuple[int, int]) -> tuple[Integer, Integer]:
    """Load in the first and in the last dimension that a pack has room for."""
    return (
        within_bits(max(packs[pack, ROOM], 0) * weights[0]),
        within_bits(max(packs[pack, ROOM + 1], 0) * weights[1]),
    )


@compiled
def keeps_samples(packs: Int64Array, pack: int, other: int, give: int, take: int) -> bool:
    """Tell whether both packs have samples left after they swap the members in two masks."""
    change = _bits(take) - _bits(give)
    return bool(packs[pack, COUNT] + change > 0 and packs[other, COUNT] - change > 0)


@compiled
def swap(
    samples: Int32Array,
    packs: Int64Array,
    pack: int,
    other: int,
    scratch: Int32Array,
    num_members: int,
    num_others: int,
    given: int,
    taken: int,
) -> None:
    """Move subset ``given`` of the first table from ``pack`` to ``other``, and ``taken`` of the second back."""
    give, take = scratch[0, MASKS, given], scratch[1, MASKS, taken]
    change = _bits(take) - _bits(give)
    packs[pack, COUNT] += change
    packs[other, COUNT] -= change
    for dimension in range(DIMENSIONS):
        more = scratch[1, SUMS + dimension, taken] - scratch[0, SUMS + dimension, given]
        packs[pack, EXCESS + dimension] += more
        packs[other, EXCESS + dimension] -= more
    for size in range(2):
        more = _size(samples, scratch[1], taken, size) - _size(samples, scratch[0], given, size)
        packs[pack, ROOM + size] -= more
        packs[other, ROOM + size] += more
    sample, other_sample = packs[pack, FIRST], packs[other, FIRST]
    packs[pack, FIRST] = packs[other, FIRST] = NOWHERE
    _relink(samples, packs, sample, pack, other, scratch[0], num_members, give)
    _relink(samples, packs, other_sample, other, pack, scratch[1], num_others, take)


@compiled
def _size(samples: Int32Array, table: Int32Array, subset: int, size: int) -> Integer:
    """Vision units (0) or tokens (1) of a subset."""
    total = np.int64(0)
    mask, member = table[MASKS, subset], 0
    while mask:
        if mask & 1:
            total += samples[table[MEMBERS, member], SIZES + size]
        mask >>= 1
        member += 1
    return total


@compiled
def _relink(
    samples: Int32Array, packs: Int64Array, sample: int, pack: int, other: int, table: Int32Array, count: int, gone: int
) -> None:
    """Link the chain that begins with ``sample`` to ``pack`` anew, but the listed members in ``gone`` to ``other``."""
    member = 0
    while sample != NOWHERE:
        behind = samples[sample, NEXT]
        target = pack
        if member < count and table[MEMBERS, member] == sample:
            if gone >> member & 1:
                target = other
            member += 1
        prepend(samples, packs, target, sample)
        sample = behind


@compiled
def _bits(mask: Any) -> int:
    """Number of ones among the last 31 bits."""
    mask = mask - ((mask >> 1) & 0x55555555)
    mask = (mask & 0x33333333) + ((mask >> 2) & 0x33333333)
    mask = (mask + (mask >> 4)) & 0x0F0F0F0F
    return int(((mask * 0x01010101) & 0xFFFFFFFF) >> 24)
