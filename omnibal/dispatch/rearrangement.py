"""Which sample goes from which rank to which, and which rank takes which list, so that little has to leave its node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array

from omnibal.compiled import compiled, compiled_part
from omnibal.cost import FloatArray, IntArray
from omnibal.errors import ConfigError

TRIALS: Final = 10_000
TRIALS_PER_RANK: Final = 20
"""The search tries ``TRIALS + TRIALS_PER_RANK · ranks`` exchanges of two lists: 2 ms at 32 ranks, 13 ms at 2560."""
TENURE: Final = 3  # rounds for which two exchanged lists stay where they are, so that the search leaves a local optimum
CANDIDATES: Final = 2  # lists of a rank that a round tries, those it holds most of: a multiple of a node's ranks


@dataclass(frozen=True, eq=False)
class Rearrangement:
    """Samples of one step on their way from the ranks that hold them to the ranks that work on them.

    Samples are numbered over all ranks, from 0. On every rank they lie in ascending order of their numbers, before and
    after; so where a sample lies follows from where it goes, and rearrangements chain without further bookkeeping.

    Args:
        source: The rank that holds each sample before, (samples,).
        destination: The rank that holds each sample after, (samples,).
        num_ranks: Ranks of the group that exchanges samples.

    >>> move = Rearrangement([0, 0, 1, 1], [1, 0, 0, 1], num_ranks=2)
    >>> move.held_by(0).tolist(), move.brought_to(0).tolist()
    ([0, 1], [1, 2])
    >>> move.volumes([5, 1, 7, 2]).toarray().tolist()  # from rank 0: 1 stays, 5 go to rank 1
    [[1.0, 5.0], [7.0, 2.0]]
    """

    source: IntArray
    destination: IntArray
    num_ranks: int

    def __post_init__(self) -> None:
        for name in ("source", "destination"):
            ranks = np.array(getattr(self, name), dtype=np.int64)  # a copy: the caller's arrays stay writable
            wrong = ranks[(ranks < 0) | (ranks >= self.num_ranks)]
            if ranks.ndim != 1 or wrong.size:
                got = f"shape {ranks.shape}" if ranks.ndim != 1 else f"{wrong[0]}"
                raise ConfigError(f"{name} must hold a rank from 0 to {self.num_ranks - 1} for each sample, got {got}")
            ranks.flags.writeable = False  # StepPlan keeps what it computes from them
            object.__setattr__(self, name, ranks)
        if len(self.source) != len(self.destination):
            lengths = f"{len(self.source)} and {len(self.destination)}"
            raise ConfigError(f"source and destination must be equally long, got {lengths}")

    def __len__(self) -> int:
        return len(self.source)

    @property
    def is_still(self) -> bool:
        return np.array_equal(self.source, self.destination)

    def held_by(self, rank: int) -> IntArray:
        """Samples that a rank holds before, ascending."""
        return np.flatnonzero(self.source == rank)

    def brought_to(self, rank: int) -> IntArray:
        """Samples that a rank holds after, ascending."""
        return np.flatnonzero(self.destination == rank)

    def inverse(self) -> Rearrangement:
        """The way back: samples go from ``destination`` to ``source``."""
        return Rearrangement(self.destination, self.source, self.num_ranks)

    def after(self, other: Rearrangement) -> Rearrangement:
        """Two rearrangements in one: ``other`` first, then this one, which must begin where ``other`` ends.

        Features that an encoder made where it was even go straight to where the LLM is even by
        ``to_llm.after(to_encoder.inverse())`` (Π_M ∘ Π_E⁻¹ in the paper), in one exchange where undoing the first and
        then doing the second takes two.
        """
        if self.num_ranks != other.num_ranks or not np.array_equal(self.source, other.destination):
            raise ConfigError("source must be the other's destination, got other ranks; a rearrangement was left out")
        return Rearrangement(other.source, self.destination, self.num_ranks)

    def volumes(self, sizes: npt.ArrayLike) -> csr_array:
        """What goes from which rank to which, (num_ranks before, num_ranks after); what stays is on the diagonal.

        The array is sparse: nearly all of 2560 × 2560 entries are zeros.

        Args:
            sizes: What each sample weighs, in any unit, (samples,).
        """
        values = np.asarray(sizes, dtype=np.float64)
        if values.shape != self.source.shape:
            raise ConfigError(f"sizes must hold one for each of {len(self)} samples, got shape {values.shape}")
        return csr_array((values, (self.source, self.destination)), shape=(self.num_ranks, self.num_ranks))


@dataclass(frozen=True)
class NodePlan:
    """Where each list of samples goes, and what that leaves between nodes."""

    # The rank that takes each list, (num_ranks,): ``rank_of[destination]`` replaces a division's destinations.
    rank_of: IntArray
    # The most that a rank sends to other nodes if list r goes to rank r, in the unit of the volumes.
    before: float
    after: float  # the most that a rank sends to other nodes as planned; at most ``before``


def keep_in_nodes(volumes: Any, ranks_per_node: int) -> NodePlan:
    """Permute the lists that a division made, so that the rank that sends most to other nodes sends little.

    Which rank works on which list does not matter to balance. Each list first goes to a node that holds most of it;
    then a tabu search exchanges lists to relieve the rank that sends most. In a node a list goes to the rank that
    already holds most of it. The search ends after a fixed number of trials, never by the clock: every rank that is
    given the same volumes makes the same plan.

    Args:
        volumes: What each rank holds of each list, (num_ranks, num_ranks), an array or a sparse array of scipy:
            :meth:`Rearrangement.volumes`.
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
    node_of = np.arange(num_ranks) // ranks_per_node
    before = after = float(_sent(held, node_of, ranks_per_node).max(initial=0.0))
    if num_ranks > ranks_per_node:
        # Balance does not depend on the placement: a search that finds nothing better leaves the identity.
        found = _search(held, ranks_per_node)
        sent = float(_sent(held, found, ranks_per_node).max(initial=0.0))
        if sent < before:
            node_of, after = found, sent
    return NodePlan(_ranks_within(held, node_of, ranks_per_node), before, after)


def _sent(held: csr_array, node_of: IntArray, ranks_per_node: int) -> FloatArray:
    """What each rank sends to other nodes if list r goes to node ``node_of[r]``."""
    entries = held.tocoo()
    leaves = np.where(node_of[entries.col] == entries.row // ranks_per_node, 0.0, entries.data)
    return np.bincount(entries.row, leaves, held.shape[0]).astype(np.float64)


def _search(held: csr_array, ranks_per_node: int) -> IntArray:
    num_ranks, entries, lists = held.shape[0], held.tocoo(), held.tocsc()
    by_node = csr_array((entries.data, (entries.col, entries.row // ranks_per_node)), shape=held.shape)
    by_node.sum_duplicates()  # what each node holds of each list, (lists, nodes)
    # Lists of which some node holds most choose first.
    order = np.argsort(-by_node.max(axis=1).toarray().ravel(), kind="stable")
    room = np.full(num_ranks // ranks_per_node, ranks_per_node)
    node_of = _placed(order, *_indices(by_node), by_node.data, room)
    nowhere = order[node_of[order] < 0]  # lists that only full nodes hold
    node_of[nowhere] = np.repeat(np.arange(len(room)), room)
    # Of each rank the lists that it holds something of, those first of which it holds most.
    wanted = entries.col[np.lexsort((-entries.data, entries.row))].astype(np.int64)
    sent, trials = _sent(held, node_of, ranks_per_node), TRIALS + TRIALS_PER_RANK * num_ranks
    _relieve(node_of, sent, _indices(held)[0], wanted, *_indices(lists), lists.data, ranks_per_node, trials)
    return node_of


def _indices(matrix: Any) -> tuple[IntArray, IntArray]:
    """``indptr`` and ``indices`` in 64 bits, so that loops compile once: scipy chooses 32 or 64 bits by size."""
    return matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64)


@compiled
def _placed(order: IntArray, starts: IntArray, nodes: IntArray, volumes: FloatArray, room: IntArray) -> IntArray:
    """Lists in ``order``, each to the node with room that holds most of it, or to none (-1); ``room`` is what is left.

    ``nodes[starts[l]:starts[l + 1]]`` hold something of list l, ``volumes`` says how much.
    """
    node_of = np.full(len(order), -1)
    for number in order:
        best, most = -1, 0.0
        for entry in range(starts[number], starts[number + 1]):
            if room[nodes[entry]] > 0 and volumes[entry] > most:
                best, most = nodes[entry], volumes[entry]
        if best >= 0:
            node_of[number] = best
            room[best] -= 1
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
    ranks_per_node: int,
    trials: int,
) -> None:
    """Tabu search: in each round the rank that sends most gets one of its lists into its node, for one from there.

    Args:
        node_of: The node of each list; ends as the best placement that was met.
        rank_starts: Rank r holds something of ``wanted[rank_starts[r]:rank_starts[r + 1]]``, most of the first list.
        list_starts: List l is held by ``holders[list_starts[l]:list_starts[l + 1]]``, as in scipy's ``csc_array``.
        ranks_per_node: Ranks of a node, and so lists of a node.
    """
    # A round makes the exchange after which Σ sent¹⁶ over all ranks is least, even if the sum grows: without this the
    # search would end in the first local optimum, with 1 to 3 % more to send on 16 to 32 ranks. The two lists then stay
    # for TENURE rounds, or the next round would take them back, unless the exchange sends less than was ever sent.
    free_from = np.zeros(len(node_of), dtype=np.int64)  # the round from which on a list may move again
    change = np.zeros((2, ranks_per_node))
    scale, least, best = sent.max(), sent.max(), node_of.copy()
    number = 0
    while trials > 0 and least > 0:
        number += 1
        worst = np.argmax(sent)
        here = worst // ranks_per_node
        # Try each of the lists that the rank holds most of and that lie elsewhere, for each list of its node.
        lists_here = np.flatnonzero(node_of == here)
        come, go, lowest, tried = np.int64(-1), np.int64(-1), np.inf, 0
        for entry in range(rank_starts[worst], rank_starts[worst + 1]):
            there = node_of[wanted[entry]]
            if there == here:
                continue
            if tried == CANDIDATES * ranks_per_node:
                break
            tried += 1
            for other in lists_here:
                # Only ranks of the two nodes send more or less after the exchange.
                _write_change(change, wanted[entry], other, node_of, list_starts, holders, volumes)
                growth, largest = _growth(change, sent, here, there, scale)
                stays = free_from[wanted[entry]] > number or free_from[other] > number
                if growth < lowest and not (stays and largest >= least):
                    come, go, lowest = wanted[entry], other, growth
        trials -= max(tried * ranks_per_node, 1)  # at least 1, so that the loop ends where nothing can be tried
        if come < 0:  # all of them stay for now, or the rank has nothing elsewhere
            continue
        _write_change(change, come, go, node_of, list_starts, holders, volumes)
        for side, node in ((0, here), (1, node_of[come])):
            sent[node * ranks_per_node : (node + 1) * ranks_per_node] += change[side]
        node_of[come], node_of[go] = node_of[go], node_of[come]
        free_from[come] = free_from[go] = number + TENURE
        if sent.max() < least:
            least = sent.max()
            best[:] = node_of
    node_of[:] = best


@compiled_part
def _growth(change: FloatArray, sent: FloatArray, here: np.int64, there: np.int64, scale: float) -> tuple[float, float]:
    """How much Σ (sent / scale)¹⁶ grows by a change on two nodes, and the most that one of their ranks sends then."""
    growth, largest, ranks_per_node = 0.0, 0.0, change.shape[1]
    for side, node in ((0, here), (1, there)):
        for place in range(ranks_per_node):
            now = sent[node * ranks_per_node + place]
            then = now + change[side, place]
            # The power is large enough that the largest rank decides, and small enough that the next ones count.
            growth += (then / scale) ** 16 - (now / scale) ** 16
            largest = max(largest, then)
    return growth, largest


@compiled_part
def _write_change(
    change: FloatArray,
    come: np.int64,
    go: np.int64,
    node_of: IntArray,
    list_starts: IntArray,
    holders: IntArray,
    volumes: FloatArray,
) -> None:
    """How much more ranks send if two lists exchange nodes: row 0 of the ranks where ``go`` is, row 1 of ``come``."""
    # A list that leaves a node adds what the node's ranks hold of it to what they send; one that comes takes it away.
    change[:] = 0.0
    ranks_per_node = change.shape[1]
    for moved, sign in ((come, 1.0), (go, -1.0)):
        for entry in range(list_starts[moved], list_starts[moved + 1]):
            node = holders[entry] // ranks_per_node
            place = holders[entry] - node * ranks_per_node
            if node == node_of[go]:
                change[0, place] -= sign * volumes[entry]
            elif node == node_of[come]:
                change[1, place] += sign * volumes[entry]


def _ranks_within(held: csr_array, node_of: IntArray, ranks_per_node: int) -> IntArray:
    """The rank of each list within its node: an assignment under which most of the lists need not move at all."""
    # kept[n, r, l]: what rank r of node n holds of list l of node n, which stays there if the list goes to the rank.
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
