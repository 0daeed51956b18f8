"""The largest differencing method of Karmarkar and Karp, for any number of ranks."""

import heapq

import numpy as np

from omnibal.cost import FloatArray, IntArray

Division = tuple[float, int, FloatArray, IntArray]


def differencing(costs: FloatArray, num_ranks: int) -> IntArray:
    """Karmarkar and Karp's method: evener than Algorithm 1 where a rank gets few samples, and slower.

    Every sample begins as a division of its own: one set with it, the others empty. The two divisions whose sets differ
    most are joined, the fullest set of one with the emptiest of the other, until one is left. At most
    4/3 - 1/(3 (num_ranks - 1)) times the best for three ranks and more, 7/6 for two (Fischetti and Martello 1987;
    Michiels et al. 2007). O(n num_ranks log num_ranks) in numpy.

    Args:
        costs: Of each sample, (samples,), not negative.
        num_ranks: At least 1.

    Returns:
        The rank of each sample, (samples,).
    """
    num_samples = len(costs)
    # Sets are nodes of a forest: leaves are samples, and joining two sets makes a node above both.
    above = np.full(max(2 * num_samples, 1), -1)
    num_nodes = num_samples
    # (difference, number, sums ascending, their nodes), of the sets that are not empty: no more than samples in all
    waiting = [
        (-float(cost) if num_ranks > 1 else 0.0, sample, np.array([cost]), np.array([sample]))
        for sample, cost in enumerate(costs)
    ]
    heapq.heapify(waiting)
    while len(waiting) > 1:
        _, _, sums, nodes = _with_empty_sets(heapq.heappop(waiting), num_ranks)
        _, number, others, other_nodes = _with_empty_sets(waiting[0], num_ranks)
        sums, other_nodes = sums + others[::-1], other_nodes[::-1]
        both = (nodes >= 0) & (other_nodes >= 0)
        joined = np.arange(num_nodes, num_nodes + both.sum())
        above[nodes[both]] = above[other_nodes[both]] = joined
        nodes = np.maximum(nodes, other_nodes)
        nodes[both] = joined
        num_nodes += len(joined)
        order = np.lexsort((nodes, sums))[np.count_nonzero(nodes < 0) :]
        least = 0.0 if len(order) < num_ranks else sums[order[0]]
        heapq.heapreplace(waiting, (float(least - sums[order[-1]]), number, sums[order], nodes[order]))
    ranks = np.zeros(len(above), dtype=np.int64)
    if waiting:
        nodes = waiting[0][3]
        ranks[nodes] = np.arange(len(nodes))
    for node in range(num_nodes - 1, -1, -1):  # a node stands behind those that it joins
        if above[node] >= 0:
            ranks[node] = ranks[above[node]]
    return ranks[:num_samples]


def _with_empty_sets(division: Division, num_ranks: int) -> Division:
    """The same with its empty sets, which come first."""
    difference, number, sums, nodes = division
    empty = num_ranks - len(nodes)
    return difference, number, np.pad(sums, (empty, 0)), np.pad(nodes, (empty, 0), constant_values=-1)
