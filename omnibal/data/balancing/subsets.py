"""Subsets of the samples of two packs, and the search for two that are worth an exchange."""

from typing import Any, Final

import numpy as np

from omnibal.compiled import compiled
from omnibal.data.balancing.tables import (
    COUNT,
    DIMENSIONS,
    FIRST,
    LOADS,
    MASKS,
    MEMBERS,
    MOST_MEMBERS,
    MOST_SUBSETS,
    NEXT,
    NOWHERE,
    SUMS,
    Int32Array,
    Int64Array,
    Integer,
)

MOST_WHOLE: Final = 4
"""Packs of up to as many samples are tried in all their subsets; of larger ones at most two samples."""
FAR: Final = np.int32(1 << 30)
"""Farther than any two subsets are."""
LANES: Final = 8
"""Subsets that processors compare at a time: where their number is not a multiple of it, the rest takes longest."""


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

    All of at most ``most_whole`` (6) members; of more the single ones and pairs, as many as there is room for. Behind
    them, up to a multiple of ``LANES``, stand entries that are too far from everything.
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
    for distance in range(1, num_members if num_members > most_whole else 1):
        apart = (distance + turn) % (num_members - 1) + 1  # every distance once, another one first in every turn
        for first in range(1, num_members - apart + 1):
            if number == MOST_SUBSETS:
                break
            scratch[side, MASKS, number] = scratch[side, MASKS, first] | scratch[side, MASKS, first + apart]
            for dimension in range(SUMS, SUMS + DIMENSIONS):
                scratch[side, dimension, number] = (
                    scratch[side, dimension, first] + scratch[side, dimension, first + apart]
                )
            number += 1
    for place in range(number, _padded(number)):
        scratch[side, SUMS, place] = FAR
    return number


@compiled
def _padded(number: int) -> int:
    return (number + LANES - 1) // LANES * LANES


@compiled
def nearest(
    scratch: Int32Array,
    num_mine: int,
    num_theirs: int,
    wanted: tuple[Integer, Integer, Integer],
    free: tuple[Integer, Integer],
    other_free: tuple[Integer, Integer],
    bound: Integer,
) -> tuple[int, int]:
    """Find a subset of each pack whose difference in loads (mine − theirs) is nearest to the wanted one.

    Args:
        scratch: Both packs' subsets.
        num_mine: Subsets in the first table.
        num_theirs: Subsets in the second table.
        wanted: Difference in each dimension.
        free: The most that the first pack may gain in the first and in the last dimension, below 2**29.
        other_free: The same of the second pack.
        bound: How near they must be, as a sum of absolute differences.

    Returns:
        Their numbers, or −1 twice where none is nearer. The first ones of those that are equally near.
    """
    best = np.int32(min(bound, FAR))
    given = -1
    widths = np.uint32(free[0] + other_free[0]), np.uint32(free[1] + other_free[1])
    for subset in range(num_mine):
        least = FAR
        for candidate in range(_padded(num_theirs)):  # written such that compilers turn it into vector instructions
            least = min(least, _distance(scratch, subset, candidate, wanted, free, widths))
        if least < best:
            best = least
            given = subset
    if given < 0:
        return -1, -1
    taken = 0
    while _distance(scratch, given, taken, wanted, free, widths) != best:
        taken += 1
    return given, taken


@compiled
def _distance(
    scratch: Int32Array,
    subset: int,
    candidate: int,
    wanted: tuple[Integer, Integer, Integer],
    free: tuple[Integer, Integer],
    widths: tuple[Integer, Integer],
) -> Any:
    """How far the difference of two subsets is from the wanted one; ``FAR`` where it is more than there is room for."""
    vision = np.int32(scratch[0, SUMS, subset] - scratch[1, SUMS, candidate])
    cost = np.int32(scratch[0, SUMS + 1, subset] - scratch[1, SUMS + 1, candidate])
    tokens = np.int32(scratch[0, SUMS + 2, subset] - scratch[1, SUMS + 2, candidate])
    distance = np.int32(
        abs(np.int32(vision - np.int32(wanted[0])))
        + abs(np.int32(cost - np.int32(wanted[1])))
        + abs(np.int32(tokens - np.int32(wanted[2])))
    )
    fits = (np.uint32(np.int32(vision + np.int32(free[0]))) <= widths[0]) & (
        np.uint32(np.int32(tokens + np.int32(free[1]))) <= widths[1]
    )
    return distance if fits else FAR


@compiled
def within_bits(excess: Integer) -> Integer:
    """Cut off what sums of several loads in 32 bits have no room for."""
    return min(max(excess, -(1 << 28)), 1 << 28)
