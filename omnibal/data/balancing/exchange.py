"""Exchange of samples between two packs: the one move that all balancing is made of.

Compiled code works on three plain integer arrays:

- ``samples``, int32, a row per sample: the next sample of its pack (``NEXT``), its vision units and tokens (from
  ``SIZES`` on), and its loads in ``DIMENSIONS`` dimensions, each at most 2**24 either way (from ``LOADS`` on);
- ``packs``, int64, a row per pack: its first sample (``FIRST``), its number of samples (``COUNT``), its room for more
  vision units and tokens (from ``ROOM`` on), and how far its loads are from what it should hold (from ``EXCESS`` on);
- ``scratch``, int32, one table for each of two packs: room for their members and subsets.

Integers, because every rank of every machine must come to the same packs, and sums of floating-point numbers depend
on the processor. Arrays, because handing records of arrays to a function takes longer than an exchange.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from omnibal.compiled import compiled

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Integer = Any
"""An integer of Python or NumPy: compiled code makes no difference."""

DIMENSIONS: Final = 3
"""Vision units, cost and tokens, each in units of its own: see ``omnibal.data.balancing.scales``."""
NEXT: Final = 0
SIZES: Final = 1
LOADS: Final = 3
FIRST: Final = 0
COUNT: Final = 1
ROOM: Final = 2
EXCESS: Final = 4
NOWHERE: Final = -1
"""End of a chain of samples."""

MEMBERS: Final = 0
MASKS: Final = 1
SUMS: Final = 2
MOST_MEMBERS: Final = 31
"""Samples of a pack that an exchange looks at; a subset of them is a mask of 32 bits."""
MOST_SUBSETS: Final = 64
"""Subsets of a pack that an exchange tries to give away."""
MOST_WHOLE: Final = 4
"""Packs of up to as many samples are tried in all their subsets; of larger ones at most two samples."""


def make_scratch() -> Int32Array:
    """Room for the members and subsets of two packs."""
    return np.zeros((2, SUMS + DIMENSIONS, MOST_SUBSETS), dtype=np.int32)


@compiled
def exchange(
    samples: Int32Array,
    packs: Int64Array,
    pack: Integer,
    other: Integer,
    wish: Integer,
    gain: int,
    turn: int,
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
        scratch: From ``make_scratch``.

    Complexity: O(``MOST_SUBSETS``²) at most; a few hundred nanoseconds.
    """
    num_members, num_mine = list_subsets(samples, packs, pack, turn, scratch, 0)
    num_others, num_theirs = list_subsets(samples, packs, other, turn + 1, scratch, 1)
    # The nearest swap moves half the difference from one to the other.
    vision = _within_bits((packs[pack, EXCESS] + wish - packs[other, EXCESS]) >> 1)
    cost = _within_bits((packs[pack, EXCESS + 1] - packs[other, EXCESS + 1]) >> 1)
    tokens = _within_bits((packs[pack, EXCESS + 2] - packs[other, EXCESS + 2]) >> 1)
    bound = abs(vision) + abs(cost) + abs(tokens) - gain
    given, taken = nearest(scratch, num_mine, num_theirs, vision, cost, tokens, bound)
    if given < 0 or not keeps_samples(packs, pack, other, scratch[0, MASKS, given], scratch[1, MASKS, taken]):
        return False
    if not _keeps_limits(samples, packs, pack, other, scratch, given, taken):
        return False
    swap(samples, packs, pack, other, scratch, num_members, num_others, given, taken)
    return True


@compiled
def _within_bits(excess: Integer) -> Integer:
    """Cut off what sums of several loads in 32 bits have no room for."""
    return min(max(excess, -(1 << 28)), 1 << 28)


@compiled
def list_subsets(
    samples: Int32Array, packs: Int64Array, pack: int, turn: int, scratch: Int32Array, side: int
) -> tuple[int, int]:
    """List members and subsets of a pack in one of the two tables; return how many of each.

    Of a pack with more members than there is room for, every second, third, … is listed, others in every turn.
    """
    stride = (packs[pack, COUNT] + MOST_MEMBERS - 1) // MOST_MEMBERS
    skipped = stride - 1 - turn % max(stride, 1)
    num_members = 0
    sample = packs[pack, FIRST]
    while sample != NOWHERE:
        skipped += 1
        if skipped >= stride:
            skipped = 0
            scratch[side, MEMBERS, num_members] = sample
            num_members += 1
        sample = samples[sample, NEXT]
    return num_members, add_subsets(samples, scratch, side, num_members, MOST_WHOLE, turn)


@compiled
def add_subsets(
    samples: Int32Array, scratch: Int32Array, side: int, num_members: int, most_whole: int, turn: int
) -> int:
    """List subsets of the listed members, the empty one first; return how many.

    All of at most ``most_whole`` (6) members; of more the single ones and pairs, as many as there is room for.
    """
    scratch[side, MASKS, 0] = 0
    for dimension in range(DIMENSIONS):
        scratch[side, SUMS + dimension, 0] = 0
    number = 1
    for member in range(num_members):
        sample = scratch[side, MEMBERS, member]
        known = number if num_members <= most_whole else 1
        for subset in range(known):
            scratch[side, MASKS, number] = scratch[side, MASKS, subset] | (1 << member)
            for dimension in range(DIMENSIONS):
                scratch[side, SUMS + dimension, number] = (
                    scratch[side, SUMS + dimension, subset] + samples[sample, LOADS + dimension]
                )
            number += 1
    if num_members <= most_whole:
        return number
    for distance in range(1, num_members):
        apart = (distance + turn) % (num_members - 1) + 1  # every distance once, another one first in every turn
        for first in range(1, num_members - apart + 1):
            if number == MOST_SUBSETS:
                return number
            scratch[side, MASKS, number] = scratch[side, MASKS, first] | scratch[side, MASKS, first + apart]
            for dimension in range(SUMS, SUMS + DIMENSIONS):
                scratch[side, dimension, number] = (
                    scratch[side, dimension, first] + scratch[side, dimension, first + apart]
                )
            number += 1
    return number


@compiled
def nearest(
    scratch: Int32Array, num_mine: int, num_theirs: int, vision: int, cost: int, tokens: int, bound: int
) -> tuple[int, int]:
    """Find a subset of each pack whose difference in loads (mine − theirs) is nearest to the given one.

    Returns:
        Their numbers, or −1 twice where none is nearer than ``bound`` as a sum of absolute differences. The first
        ones of those that are equally near.
    """
    best = np.int32(min(bound, 1 << 30))
    given = -1
    for subset in range(num_mine):
        at_vision = np.int32(scratch[0, SUMS, subset] - vision)
        at_cost = np.int32(scratch[0, SUMS + 1, subset] - cost)
        at_tokens = np.int32(scratch[0, SUMS + 2, subset] - tokens)
        least = np.int32(1 << 30)
        for candidate in range(num_theirs):  # written such that compilers turn it into vector instructions
            distance = np.int32(
                abs(np.int32(scratch[1, SUMS, candidate] - at_vision))
                + abs(np.int32(scratch[1, SUMS + 1, candidate] - at_cost))
                + abs(np.int32(scratch[1, SUMS + 2, candidate] - at_tokens))
            )
            least = min(least, distance)
        if least < best:
            best = least
            given = subset
    if given < 0:
        return -1, -1
    taken = 0
    while _distance(scratch, given, taken, vision, cost, tokens) != best:
        taken += 1
    return given, taken


@compiled
def _distance(scratch: Int32Array, given: int, taken: int, vision: int, cost: int, tokens: int) -> Integer:
    return (
        abs(scratch[0, SUMS, given] - scratch[1, SUMS, taken] - vision)
        + abs(scratch[0, SUMS + 1, given] - scratch[1, SUMS + 1, taken] - cost)
        + abs(scratch[0, SUMS + 2, given] - scratch[1, SUMS + 2, taken] - tokens)
    )


@compiled
def keeps_samples(packs: Int64Array, pack: int, other: int, give: int, take: int) -> bool:
    """Tell whether both packs have samples left after they swap the members in two masks."""
    change = _bits(take) - _bits(give)
    return bool(packs[pack, COUNT] + change > 0 and packs[other, COUNT] - change > 0)


@compiled
def _keeps_limits(
    samples: Int32Array, packs: Int64Array, pack: int, other: int, scratch: Int32Array, given: int, taken: int
) -> bool:
    """Tell whether no pack would exceed a limit by more than it does."""
    for size in range(2):
        more = _size(samples, scratch[1], taken, size) - _size(samples, scratch[0], given, size)
        room, other_room = packs[pack, ROOM + size], packs[other, ROOM + size]
        if room - more < min(room, 0) or other_room + more < min(other_room, 0):
            return False
    return True


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
def prepend(samples: Int32Array, packs: Int64Array, pack: int, sample: int) -> None:
    """Link a sample in front of a pack's chain."""
    samples[sample, NEXT] = packs[pack, FIRST]
    packs[pack, FIRST] = sample


@compiled
def _bits(mask: Any) -> int:
    """Number of ones among the last 31 bits."""
    mask = mask - ((mask >> 1) & 0x55555555)
    mask = (mask & 0x33333333) + ((mask >> 2) & 0x33333333)
    mask = (mask + (mask >> 4)) & 0x0F0F0F0F
    return int(((mask * 0x01010101) & 0xFFFFFFFF) >> 24)
