"""Algorithms 1 and 4 of OrchMLLM: the longest sample first, to the rank with least. Compiled, as fast as sorting.

Ranks wait in a tournament: a tree whose leaves are ranks and where every inner node keeps the loser of the match played
there. The winner, the rank with least, stands at the top. When it gets a sample only the matches on its way up are
played again, one comparison a level, and where they stand in memory depends on the rank alone: several times faster
than a heap. A rank and its load are one integer, the load in the upper bits, so that a match is a minimum and equal
loads go to the lower rank.
"""

from math import frexp
from typing import Final

import numpy as np

from omnibal.compiled import compiled
from omnibal.cost import FloatArray, IntArray

BITS: Final = 62
"""Of an integer that holds a rank or a sample beside its load, without its sign and one bit to spare."""
LARGEST_POWER: Final = 1023
"""Of two that a float can be."""


def longest_first(costs: FloatArray, num_ranks: int) -> IntArray:
    """Algorithm 1: samples by falling cost, each to the rank with the least so far.

    Its largest rank is at most 4/3 - 1/(3 num_ranks) times the best (Graham 1969). O(n log n).

    Args:
        costs: Of each sample, (samples,), not negative. Kept to 2⁻⁴⁰ of their sum or better.
        num_ranks: At least 1.

    Returns:
        The rank of each sample, (samples,).
    """
    keys, sample_bits, *_ = sorted_keys(costs, num_ranks)
    return deal(keys, sample_bits, len(costs), num_ranks)


def least_squares_within(costs: FloatArray, num_ranks: int, *, tolerance: float = 0.01) -> IntArray:
    """Algorithm 4: as Algorithm 1, but among ranks with about as little, the one whose samples' squares sum to least.

    For costs whose square matters beside them. The paper compares two ranks by squares if they are closer than a
    tolerance, which is no order: a may come before b, b before c and c before a. Here loads are counted in whole
    tolerances, and squares break ties. Where the square's weight is known, Algorithm 1 on the sum of both is better.

    Args:
        costs: Of each sample (its length), (samples,), not negative.
        num_ranks: At least 1.
        tolerance: Relative to the mean of all ranks' sums.

    Returns:
        The rank of each sample, (samples,).
    """
    keys, sample_bits, largest, total = sorted_keys(costs, num_ranks)
    # A power of two, so that counting loads in tolerances is a shift.
    coarse = max(int(tolerance * total / num_ranks), 1).bit_length() - 1
    # A rank that gets a sample has at most a tolerance more than the mean; squares sum to at most load times largest.
    most = int((1 + tolerance) * total / num_ranks + largest) + 1
    square_bits = BITS - (num_ranks - 1).bit_length() - (most >> coarse).bit_length() - 1
    excess = frexp(most * largest)[1] - square_bits
    return _deal_by_squares(keys, sample_bits, len(costs), num_ranks, coarse, square_bits, max((excess + 1) // 2, 0))


def sorted_keys(costs: FloatArray, num_ranks: int) -> tuple[IntArray, int, float, float]:
    """Costs as integers with their sample in the lower bits, ascending; those bits; and the integers' largest and sum.

    Equal costs come in falling order of their samples: they are read from the end.
    """
    sample_bits = max(len(costs) - 1, 1).bit_length()
    largest, total = float(costs.max(initial=0.0)), float(costs.sum())
    # The largest must fit above its sample, and the sum above its rank. A power of two keeps whole numbers whole.
    room = min(BITS - sample_bits - frexp(largest)[1], BITS - (num_ranks - 1).bit_length() - frexp(total)[1] - 1)
    scale = 2.0 ** min(room, LARGEST_POWER)
    keys = _keys(costs, scale, sample_bits)
    keys.sort()
    return keys, sample_bits, scale * largest, scale * total


@compiled
def _keys(costs: FloatArray, scale: float, sample_bits: int) -> IntArray:
    """In one pass over the costs, where numpy would need five."""
    keys = np.empty(len(costs), dtype=np.int64)
    for sample in range(len(costs)):
        keys[sample] = (np.int64(np.rint(costs[sample] * scale)) << sample_bits) | (len(costs) - 1 - sample)
    return keys


@compiled
def deal(keys: IntArray, sample_bits: int, num_samples: int, num_ranks: int) -> IntArray:
    """Deal samples out of ``keys``, the last first, to whoever has least."""
    rank_bits = bits_of(num_ranks)
    losers = first_round(np.arange(num_ranks))
    destination = np.empty(num_samples, dtype=np.int64)
    best = losers[0]
    for position in range(num_samples - 1, -1, -1):
        key = keys[position]
        rank = best & ((1 << rank_bits) - 1)
        destination[num_samples - 1 - (key & ((1 << sample_bits) - 1))] = rank
        best += (key >> sample_bits) << rank_bits
        best = replay(losers, (num_ranks + rank) >> 1, best)
    return destination


@compiled
def _deal_by_squares(
    keys: IntArray,
    sample_bits: int,
    num_samples: int,
    num_ranks: int,
    coarse: int,
    square_bits: int,
    square_shift: int,
) -> IntArray:
    """Deal samples out of ``keys``: loads in whole tolerances above squares above ranks in one integer."""
    rank_bits = bits_of(num_ranks)
    losers = first_round(np.arange(num_ranks))
    loads = np.zeros(num_ranks, dtype=np.int64)
    squares = (1 << square_bits) - 1
    destination = np.empty(num_samples, dtype=np.int64)
    best = losers[0]
    for position in range(num_samples - 1, -1, -1):
        key = keys[position]
        rank = best & ((1 << rank_bits) - 1)
        destination[num_samples - 1 - (key & ((1 << sample_bits) - 1))] = rank
        cost = key >> sample_bits
        load = loads[rank] + cost
        loads[rank] = load
        square = ((best >> rank_bits) & squares) + (cost >> square_shift) ** 2
        place = ((load >> coarse) << square_bits) | square
        best = replay(losers, (num_ranks + rank) >> 1, (place << rank_bits) | rank)
    return destination


@compiled
def bits_of(num_ranks: int) -> int:
    """Of a number that tells ranks apart."""
    bits = 0
    while 1 << bits < num_ranks:
        bits += 1
    return bits


@compiled
def first_round(ranks: IntArray) -> IntArray:
    """The first tournament of ranks, each below its load in one integer: the loser of each node, the winner at 0.

    Node n plays the winners of nodes 2n and 2n + 1; rank r is leaf ``num_ranks + r``. So every leaf lies below node 1,
    also where ranks are no power of two.
    """
    num_ranks = len(ranks)
    winners = np.empty(2 * num_ranks, dtype=np.int64)
    winners[num_ranks:] = ranks
    losers = np.empty(num_ranks, dtype=np.int64)
    for node in range(num_ranks - 1, 0, -1):
        left, right = winners[2 * node], winners[2 * node + 1]
        winners[node], losers[node] = min(left, right), max(left, right)
    losers[0] = winners[1]
    return losers


@compiled
def replay(losers: IntArray, node: int, best: int) -> int:
    """Play the matches from ``node`` up to the top, and return who wins there."""
    while node > 0:
        other = losers[node]
        losers[node] = max(other, best)
        best = min(other, best)  # without a branch: who wins cannot be guessed
        node >>= 1
    return best
