"""Which rank takes which of the divided lists, so that little has to leave its node. Algorithm 3 of OrchMLLM."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array

from omnibal.compiled import compiled
from omnibal.cost import FloatArray, IntArray
from omnibal.errors import ConfigError

TRIALS: Final = 10_000
TRIALS_PER_RANK: Final = 20
"""Exchanges of two lists that the search tries, `TRIALS + TRIALS_PER_RANK · ranks`: 2 ms at 32 ranks, 13 ms at 2560."""
TENURE: Final = 3
"""Rounds for which two exchanged lists stay where they are, so that the search leaves a local optimum."""
CANDIDATES: Final = 2
"""Lists that a round tries to bring to a rank's node, as a multiple of the node's ranks: those it holds most of."""


@dataclass(frozen=True)
class NodePlan:
    """Where each list of samples goes, and what that leaves between nodes."""

    rank_of: IntArray
    """The rank that takes each list, (num_ranks,): ``rank_of[destination]`` replaces a division's destinations."""
    before: float
    """The most that a rank sends to other nodes if list r goes to rank r, in the unit of the volumes."""
    after: float
    """The most that a rank sends to other nodes as planned; at most ``before``."""


def keep_in_nodes(volumes: Any, ranks_per_node: int) -> NodePlan:
    """Permute the lists that a division made, so that the rank that sends most to other nodes sends little.

    Which rank works on which list does not matter to balance. Each list first goes to a node that holds most of it;
    then a tabu search exchanges lists to relieve the rank that sends most. In a node a list goes to the rank that
    already holds most of it. The search ends after a fixed number of trials, never by the clock: every rank that is
    given the same volumes makes the same plan.

    Args:
        volumes: What each rank holds of each list, (num_ranks, num_ranks), an array or a sparse array of scipy:
            :meth:`Rearrangement.sparse_volumes`.
        ranks_per_node: Divides the number of ranks; ranks of a node follow each other.

    Returns:
        A permutation of the ranks; the identity where none is better.

    Raises:
        ConfigError: The volumes are not square, or ranks do not divide into nodes.

    Source: Zheng et al., OrchMLLM, Algorithm 3, an integer programme there.

    >>> plan = keep_in_nodes([[0, 5], [5, 0]], 1)  # each holds what the other would get
    >>> plan.rank_of.tolist(), plan.before, plan.after
    ([1, 0], 5.0, 0.0)
    """
    held = csr_array(np.asarray(volumes) if isinstance(volumes, list | tuple) else volumes, dtype=np.float64)
    num_ranks = held.shape[0]
    if held.shape != (num_ranks, num_ranks):
        raise ConfigError(f"volumes must be of shape (ranks, ranks), got {held.shape}")
    if ranks_per_node < 1 or num_ranks % ranks_per_node:
        raise ConfigError(f"ranks_per_node must divide the {num_ranks} ranks, got {ranks_per_node}")
    held.sum_duplicates()
    held.eliminate_zeros()
    node = np.arange(num_ranks) // ranks_per_node
    node_of, before = node, _most_sent(held, node, ranks_per_node)
    after = before
    if num_ranks > ranks_per_node:
        found = _searched(held, ranks_per_node)
        if (sent := _most_sent(held, found, ranks_per_node)) < before:
            node_of, after = found, sent
    return NodePlan(_ranks_within(held, node_of, ranks_per_node), before, after)


def _most_sent(held: csr_array, node_of: IntArray, ranks_per_node: int) -> float:
    """The most that a rank sends to other nodes if list r goes to node ``node_of[r]``."""
    return float(_sent(held, node_of, ranks_per_node).max(initial=0.0))


def _sent(held: csr_array, node_of: IntArray, ranks_per_node: int) -> FloatArray:
    entries = held.tocoo()
    leaves = np.where(node_of[entries.col] == entries.row // ranks_per_node, 0.0, entries.data)
    return np.bincount(entries.row, leaves, held.shape[0]).astype(np.float64)


def _searched(held: csr_array, ranks_per_node: int) -> IntArray:
    """The node of each list, by a greedy start and a search from there."""
    num_ranks, entries, lists = held.shape[0], held.tocoo(), held.tocsc()
    by_node = csr_array((entries.data, (entries.col, entries.row // ranks_per_node)), shape=held.shape)
    by_node.sum_duplicates()
    largest = by_node.max(axis=1).toarray().ravel()
    order = np.argsort(-largest, kind="stable")
    node_of = _placed(order, *_indices(by_node), by_node.data, num_ranks // ranks_per_node)
    by_size = np.lexsort((-entries.data, entries.row))
    wanted, sizes = entries.col[by_size], entries.data[by_size]
    # However lists are placed, a rank sends all but the `ranks_per_node` lists that it holds most of.
    number = np.arange(len(wanted)) - held.indptr[entries.row]
    unavoidable = np.bincount(entries.row, np.where(number >= ranks_per_node, sizes, 0.0), num_ranks).max(initial=0.0)
    sent = _sent(held, node_of, ranks_per_node)
    _relieve(
        node_of, sent, _indices(held)[0], wanted.astype(np.int64), *_indices(lists), lists.data,
        float(unavoidable), ranks_per_node, TRIALS + TRIALS_PER_RANK * num_ranks,
    )  # fmt: skip
    return node_of


def _indices(matrix: Any) -> tuple[IntArray, IntArray]:
    """``indptr`` and ``indices`` in 64 bits, so that loops compile once: scipy chooses 32 or 64 bits by size."""
    return matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64)


@compiled
def _placed(order: IntArray, starts: IntArray, nodes: IntArray, volumes: FloatArray, num_nodes: int) -> IntArray:
    """Lists in ``order``, each to the node with room that holds most of it; what nobody holds fills what is left."""
    room = np.full(num_nodes, len(order) // num_nodes)
    node_of = np.full(len(order), -1)
    for number in order:
        best, most = -1, 0.0
        for entry in range(starts[number], starts[number + 1]):
            if room[nodes[entry]] > 0 and volumes[entry] > most:
                best, most = nodes[entry], volumes[entry]
        if best >= 0:
            node_of[number] = best
            room[best] -= 1
    free = 0
    for number in order:
        if node_of[number] < 0:
            while room[free] == 0:
                free += 1
            node_of[number] = free
            room[free] -= 1
    return node_of


@compiled
def _relieve(
    node_of: IntArray,
    sent: FloatArray,
    rank_starts: IntArray,
    wanted: IntArray,
    list_starts: IntArray,
    holders: IntArray,
    volumes: FloatArray,
    unavoidable: float,
    ranks_per_node: int,
    trials: int,
) -> None:
    """Tabu search: in each round the rank that sends most gets one of its lists into its node, for one from there.

    A round makes the exchange after which Σ sent¹⁶ over all ranks is least, even if none lets it fall; the two lists
    then stay for some rounds, unless the largest rank would send less than ever. ``node_of`` ends as the best placement
    that was met.

    Args:
        node_of: The node of each list; changed.
        sent: What each rank sends; changed.
        rank_starts: Where each rank's lists begin in ``wanted``, those first of which the rank holds most.
        wanted: Lists.
        list_starts: Where each list's ranks begin in ``holders``, as in scipy's ``csc_array``.
        holders: Ranks.
        volumes: What each holder has of the list.
        unavoidable: The search ends where no rank sends more.
        ranks_per_node: Lists of a node, too.
        trials: Exchanges that are tried.
    """
    num_ranks = len(node_of)
    at, place = np.argsort(node_of, kind="mergesort"), np.empty(num_ranks, dtype=np.int64)
    place[at] = np.arange(num_ranks)  # node n has the lists at[n · ranks_per_node :][: ranks_per_node]
    change, touched = np.zeros(num_ranks), np.empty(num_ranks, dtype=np.int64)
    is_touched = np.zeros(num_ranks, dtype=np.bool_)
    free_from = np.zeros(num_ranks, dtype=np.int64)
    scale, least, best = sent.max(), sent.max(), node_of.copy()
    number = 0
    while trials > 0 and least > unavoidable:
        number += 1
        worst = np.argmax(sent)
        here = worst // ranks_per_node
        come, go, lowest, tried = -1, -1, np.inf, 0
        for entry in range(rank_starts[worst], rank_starts[worst + 1]):
            if node_of[wanted[entry]] == here:
                continue
            if tried == CANDIDATES * ranks_per_node:
                break
            tried += 1
            for other in at[here * ranks_per_node : (here + 1) * ranks_per_node]:
                count = _changes(
                    wanted[entry],
                    other,
                    node_of,
                    list_starts,
                    holders,
                    volumes,
                    ranks_per_node,
                    change,
                    touched,
                    is_touched,
                )
                growth, largest = 0.0, 0.0
                for rank in touched[:count]:
                    growth += _power((sent[rank] + change[rank]) / scale) - _power(sent[rank] / scale)
                    largest = max(largest, sent[rank] + change[rank])
                    change[rank] = 0.0
                stays = free_from[wanted[entry]] > number or free_from[other] > number
                if growth < lowest and not (stays and largest >= least):
                    come, go, lowest = wanted[entry], other, growth
        trials -= max(tried * ranks_per_node, 1)
        if come < 0:  # all of them stay for now, or the rank has nothing elsewhere
            continue
        count = _changes(come, go, node_of, list_starts, holders, volumes, ranks_per_node, change, touched, is_touched)
        for rank in touched[:count]:
            sent[rank] += change[rank]
            change[rank] = 0.0
        node_of[come], node_of[go] = node_of[go], node_of[come]
        place[come], place[go] = place[go], place[come]
        at[place[come]], at[place[go]] = come, go
        free_from[come] = free_from[go] = number + TENURE
        if sent.max() < least:
            least = sent.max()
            best[:] = node_of
    node_of[:] = best


@compiled
def _power(share: float) -> float:
    """share¹⁶: large enough that the largest rank decides, small enough that the next ones count."""
    square = share * share
    fourth = square * square
    eighth = fourth * fourth
    return eighth * eighth


@compiled
def _changes(
    come: int,
    go: int,
    node_of: IntArray,
    list_starts: IntArray,
    holders: IntArray,
    volumes: FloatArray,
    ranks_per_node: int,
    change: FloatArray,
    touched: IntArray,
    is_touched: npt.NDArray[np.bool_],
) -> int:
    """Write how much more each rank sends if two lists exchange their nodes; return the number of ``touched`` ranks."""
    count = 0
    for moved, other in ((come, go), (go, come)):
        for entry in range(list_starts[moved], list_starts[moved + 1]):
            holder = holders[entry]
            node = holder // ranks_per_node
            if node == node_of[moved]:  # the list leaves its node
                amount = volumes[entry]
            elif node == node_of[other]:
                amount = -volumes[entry]
            else:
                continue
            if not is_touched[holder]:
                is_touched[holder] = True
                touched[count] = holder
                count += 1
            change[holder] += amount
    for holder in touched[:count]:
        is_touched[holder] = False
    return count


def _ranks_within(held: csr_array, node_of: IntArray, ranks_per_node: int) -> IntArray:
    """The rank of each list: in its node, so that most of it need not move at all."""
    entries, lists = held.tocoo(), np.argsort(node_of, kind="stable").reshape(-1, ranks_per_node)
    column = np.empty(len(node_of), dtype=np.int64)
    column[lists] = np.arange(ranks_per_node)
    node = entries.row // ranks_per_node
    stays = node_of[entries.col] == node
    kept = np.zeros((len(lists), ranks_per_node, ranks_per_node))
    kept[node[stays], entries.row[stays] % ranks_per_node, column[entries.col[stays]]] = entries.data[stays]
    rank_of = np.empty_like(node_of)
    for number, block in enumerate(kept):
        takers, taken = linear_sum_assignment(block, maximize=True)
        rank_of[lists[number, taken]] = number * ranks_per_node + takers
    return rank_of
