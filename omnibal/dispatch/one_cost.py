"""Methods that divide samples over ranks by one cost: four of OrchMLLM's algorithms, and Karmarkar and Karp's.

Algorithms 1, 4 and 5 give one sample after another, the longest first, to the rank with least so far. The ranks stand
in a tournament tree: its leaves are ranks, and every inner node keeps the loser of the match played there, so the rank
with least stands at the top. When that rank gets a sample, only the matches on the way up from its leaf are played
again: one comparison a level, at places in memory that depend on the rank alone. This is several times faster than a
heap. A rank and its load are one integer with the load in the upper bits, so a match is a minimum, and of equal loads
the lower rank wins.
"""

import heapq
from bisect import bisect_left
from math import frexp
from typing import Final, NamedTuple

import numpy as np

from omnibal.compiled import compiled
from omnibal.cost import FloatArray, IntArray
from omnibal.errors import ConfigError

BITS: Final = 62  # of an integer that holds a load above a rank or a sample: no sign, and one bit to spare
LARGEST_POWER: Final = 1023  # of two, in a float
TOLERANCE: Final = 0.01  # of the mean load, within which squares decide


def longest_first(costs: FloatArray, num_ranks: int) -> IntArray:
    """Algorithm 1: samples by falling cost, each to the rank with the least so far; O(n log n).

    The largest rank is at most 4/3 - 1/(3 num_ranks) times the best (Graham 1969). Costs are kept to 2⁻⁴⁰ of their sum
    or better.
    """
    return _deal(_sorted(costs, num_ranks), num_ranks)


def least_squares_within(costs: FloatArray, num_ranks: int) -> IntArray:
    """Algorithm 4: as Algorithm 1, but among ranks with about as little, the one whose samples' squares sum to least.

    For costs whose square matters beside them. The paper compares two ranks by squares if they are closer than a
    tolerance, which is no order: a may come before b, b before c and c before a. Here loads are counted in whole
    tolerances, and squares break ties. Where the square's weight is known, Algorithm 1 on the sum of both is better.
    """
    samples = _sorted(costs, num_ranks)
    mean = samples.total / num_ranks
    # The tolerance is rounded to a power of two, so that counting loads in tolerances is a shift.
    coarse = max(int(TOLERANCE * mean), 1).bit_length() - 1
    # A rank that gets a sample has at most a tolerance more than the mean; squares sum to at most load times largest.
    most = int((1 + TOLERANCE) * mean + samples.largest) + 1
    square_bits = BITS - (num_ranks - 1).bit_length() - (most >> coarse).bit_length() - 1
    too_many = frexp(most * samples.largest)[1] - square_bits
    return _deal(samples, num_ranks, coarse, square_bits, max((too_many + 1) // 2, 0))


def padded(lengths: FloatArray, num_ranks: int) -> IntArray:
    """Algorithm 2: the largest of (samples on a rank × the longest of them) is as small as it can be.

    The search for the least bound is exact (the paper's pseudo-code starts it at the shortest sample and may return a
    packing that does not fit). O(n log n), and O(n) for each of at most 62 tried bounds.
    """
    if (wrong := lengths[lengths % 1 > 0]).size:
        raise ConfigError(f"lengths must be whole numbers, got {wrong[0]:g}")
    # Where the bound is least, ranks hold neighbours in the order of lengths: exchanging two samples pads no less.
    order = np.argsort(lengths, kind="stable")
    ascending = lengths[order].astype(np.int64)
    # The longest has to lie somewhere. With samples spread equally, no rank gets more than the upper bound.
    least = int(ascending.max(initial=0))
    enough = least * -(-len(lengths) // num_ranks)
    enough = bisect_left(range(enough), True, least, key=lambda tried: _fill(ascending, tried)[-1] < num_ranks)
    destination = np.empty(len(lengths), dtype=np.int64)
    destination[order] = _fill(ascending, enough)[: len(lengths)]
    return destination


def padded_attention(lengths: FloatArray, num_ranks: int) -> IntArray:
    """Algorithm 5: attention alone is padded, so that a rank costs Σ lengths + λ × samples × longest².

    The longest samples open ranks whose padded size is at most the largest sum that Algorithm 1 gives; once all ranks
    are open, what is left goes to the rank with the least sum. (The pseudo-code multiplies by a rank's shortest sample;
    padding goes by its longest.) No ratio is proved.
    """
    # 1. The bound: the largest sum of Algorithm 1. 2. Open rank after rank. 3. Deal what is left, the longest first.
    samples = _sorted(lengths, num_ranks)
    sums, destination = np.zeros((2, num_ranks), dtype=np.int64), np.empty(len(lengths), dtype=np.int64)
    _deal(samples, num_ranks, loads=sums[0])
    left = _open(samples.keys, samples.bits, sums[0].max(), sums[1], destination)
    return _deal(samples._replace(keys=samples.keys[:left]), num_ranks, loads=sums[1], destination=destination)


def differencing(costs: FloatArray, num_ranks: int) -> IntArray:
    """Karmarkar and Karp's method: evener than Algorithm 1 where a rank gets few samples, and slower.

    Every sample begins as a division of its own: one set with it, the others empty. The two divisions whose sets differ
    most are joined, the fullest set of one with the emptiest of the other, until one is left. At most
    4/3 - 1/(3 (num_ranks - 1)) times the best for three ranks and more, 7/6 for two (Fischetti and Martello 1987;
    Michiels et al. 2007). O(n num_ranks log num_ranks) in numpy.
    """
    num_samples = len(costs)

    def with_empty_sets(sums: FloatArray, nodes: IntArray) -> tuple[FloatArray, IntArray]:
        empty = num_ranks - len(nodes)
        return np.pad(sums, (empty, 0)), np.pad(nodes, (empty, 0), constant_values=-1)

    # Sets are nodes of a forest: leaves are samples, and joining two sets makes a node above both.
    above = np.full(max(2 * num_samples, 1), -1)
    num_nodes = num_samples
    # A heap of (-difference, number, sums ascending, nodes of the sums): without empty sets it holds n sums in all.
    waiting = [
        (-float(cost) if num_ranks > 1 else 0.0, sample, np.array([cost]), np.array([sample]))
        for sample, cost in enumerate(costs)
    ]
    heapq.heapify(waiting)
    while len(waiting) > 1:
        # Join the two divisions that differ most: sums ascend, so one is turned round against the other. Empty sets,
        # which come first, were left out to save memory, and are written as node -1.
        _, _, sums, nodes = heapq.heappop(waiting)
        _, number, others, other_nodes = waiting[0]
        sums, nodes = with_empty_sets(sums, nodes)
        others, other_nodes = with_empty_sets(others, other_nodes)
        sums, other_nodes = sums + others[::-1], other_nodes[::-1]
        both = (nodes >= 0) & (other_nodes >= 0)  # pairs of two sets that hold samples get a node above them
        joined = np.arange(num_nodes, num_nodes + both.sum())
        above[nodes[both]] = above[other_nodes[both]] = joined
        nodes = np.maximum(nodes, other_nodes)
        nodes[both] = joined
        num_nodes += len(joined)
        order = np.lexsort((nodes, sums))[np.count_nonzero(nodes < 0) :]
        least = 0.0 if len(order) < num_ranks else sums[order[0]]
        heapq.heapreplace(waiting, (float(least - sums[order[-1]]), number, sums[order], nodes[order]))
    # The sets of the last division are the ranks; each sample lies where the topmost node above it does.
    ranks = np.zeros(len(above), dtype=np.int64)
    if waiting:
        nodes = waiting[0][3]
        ranks[nodes] = np.arange(len(nodes))
    for node in range(num_nodes - 1, -1, -1):  # a node has a higher number than those below it
        if above[node] >= 0:
            ranks[node] = ranks[above[node]]
    return ranks[:num_samples]


class _SortedCosts(NamedTuple):
    keys: IntArray  # (integer cost << bits) + num_samples - 1 - sample, ascending: from the end, equal costs by sample
    bits: int
    largest: float  # largest integer cost
    total: float  # sum of the integer costs


def _sorted(costs: FloatArray, num_ranks: int) -> _SortedCosts:
    bits = max(len(costs) - 1, 1).bit_length()
    largest, total = float(costs.max(initial=0.0)), float(costs.sum())
    # The largest must fit above its sample, and the sum above its rank. A power of two keeps whole numbers whole.
    room = min(BITS - bits - frexp(largest)[1], BITS - (num_ranks - 1).bit_length() - frexp(total)[1] - 1)
    scale = 2.0 ** min(room, LARGEST_POWER)
    keys = (np.rint(costs * scale).astype(np.int64) << bits) | np.arange(len(costs) - 1, -1, -1)
    keys.sort()
    return _SortedCosts(keys, bits, scale * largest, scale * total)


def _deal(
    samples: _SortedCosts,
    num_ranks: int,
    coarse: int = 0,
    square_bits: int = 0,
    square_shift: int = BITS,
    *,
    loads: IntArray | None = None,
    destination: IntArray | None = None,
) -> IntArray:
    """Deal samples, the longest first, each to the rank with least load: by Algorithm 1, or with squares by 4."""
    loads = np.zeros(num_ranks, dtype=np.int64) if loads is None else loads
    destination = np.empty(len(samples.keys), dtype=np.int64) if destination is None else destination
    rank_bits = (num_ranks - 1).bit_length()
    _deal_keys(samples.keys, samples.bits, loads, rank_bits, coarse, square_bits, square_shift, destination)
    return destination


@compiled
def _deal_keys(
    keys: IntArray,
    sample_bits: int,
    loads: IntArray,
    rank_bits: int,
    coarse: int,
    square_bits: int,
    square_shift: int,
    destination: IntArray,
) -> None:
    """Deal the samples of ``keys`` from the end, onto ``loads``; write their ranks to ``destination``.

    Ranks are compared by one integer: (load >> coarse, sum of (cost >> square_shift)², rank), from the upper bits down.
    """
    num_ranks, num_samples = len(loads), len(destination)
    squares, ranks, lowest = (1 << square_bits) - 1, (1 << rank_bits) - 1, (1 << sample_bits) - 1
    # The winner's load grows by each sample that it gets; the tournament then names the next winner.
    losers = _first_round(((loads >> coarse) << (square_bits + rank_bits)) | np.arange(num_ranks))
    best = losers[0]
    for position in range(len(keys) - 1, -1, -1):
        key = keys[position]
        rank = best & ranks
        destination[num_samples - 1 - (key & lowest)] = rank
        cost = key >> sample_bits
        load = loads[rank] + cost
        loads[rank] = load
        square = ((best >> rank_bits) & squares) + (cost >> square_shift) ** 2
        best = ((((load >> coarse) << square_bits) | square) << rank_bits) | rank
        node = (num_ranks + rank) >> 1
        while node > 0:  # play the matches from the rank's leaf up to the top
            other = losers[node]
            losers[node] = max(other, best)
            best = min(other, best)  # without a branch: who wins cannot be predicted
            node >>= 1


@compiled
def _first_round(leaves: IntArray) -> IntArray:
    """Play the first tournament of ranks, and return the loser of each node, with the winner of all at 0.

    Node n plays the winners of nodes 2n and 2n + 1; rank r is leaf ``num_ranks + r``. So every leaf lies below node 1,
    also where the number of ranks is no power of two.
    """
    num_ranks = len(leaves)
    winners, losers = np.empty(2 * num_ranks, dtype=np.int64), np.empty(num_ranks, dtype=np.int64)
    winners[num_ranks:] = leaves
    for node in range(num_ranks - 1, 0, -1):
        left, right = winners[2 * node], winners[2 * node + 1]
        winners[node], losers[node] = min(left, right), max(left, right)
    losers[0] = winners[1]
    return losers


@compiled
def _fill(ascending: IntArray, bound: int) -> IntArray:
    """The rank of each sample, ranks filled one after another as long as their padded size stays within the bound."""
    # Lengths ascend: a rank that gets another sample is padded to that one.
    rank, first = 0, 0
    ranks = np.zeros(max(len(ascending), 1), dtype=np.int64)
    for position, length in enumerate(ascending):
        if (position - first + 1) * length > bound:
            rank, first = rank + 1, position
        ranks[position] = rank
    return ranks


@compiled
def _open(keys: IntArray, sample_bits: int, bound: int, sums: IntArray, destination: IntArray) -> int:
    """Fill rank after rank with the longest samples up to a padded size; return how many samples are left then."""
    rank, size, longest = -1, 0, 0
    for position in range(len(keys) - 1, -1, -1):
        length = keys[position] >> sample_bits
        if rank < 0 or (size + 1) * longest > bound:
            if rank + 1 == len(sums):
                return position + 1
            rank, size, longest = rank + 1, 0, length
        destination[len(keys) - 1 - (keys[position] & ((1 << sample_bits) - 1))] = rank
        sums[rank] += length
        size += 1
    return 0
