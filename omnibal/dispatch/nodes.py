"""Which rank takes which of the divided lists, so that little has to leave its node. Algorithm 3 of OrchMLLM."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, linear_sum_assignment, milp
from scipy.sparse import coo_array

from omnibal.cost import FloatArray, IntArray
from omnibal.errors import ConfigError

EXACT_RANKS: Final = 32
"""Most ranks for which the integer programme is tried: HiGHS ends in about a second there, and grows quickly."""
ROUNDS: Final = 200
"""Most exchanges after the assignment, one for each time that the rank with most to send can be relieved."""


@dataclass(frozen=True)
class NodePlan:
    """Where each list of samples goes, and what that leaves between nodes."""

    rank_of: IntArray
    """The rank that takes each list, (num_ranks,): ``rank_of[destination]`` replaces a division's destinations."""
    before: float
    """The most that a rank sends to other nodes if list r goes to rank r, in the unit of the volumes."""
    after: float
    """The same as planned; never more."""


def keep_in_nodes(volumes: npt.ArrayLike, ranks_per_node: int, *, time_limit_seconds: float = 1.0) -> NodePlan:
    """Permute the lists that a division made, so that the rank that sends most to other nodes sends little.

    Which rank works on which list does not matter to balance. Nodes get lists by an integer programme up to
    ``EXACT_RANKS`` ranks, the best that HiGHS finds in time; beyond, by the assignment that keeps most in nodes,
    relieved by exchanges of two lists. In a node a list goes to the rank that already holds most of it.

    Args:
        volumes: What each rank holds of each list, (num_ranks, num_ranks): :meth:`Rearrangement.volumes`.
        ranks_per_node: Divides the number of ranks; ranks of a node follow each other.
        time_limit_seconds: For the integer programme.

    Returns:
        A permutation of the ranks; the identity where none is better.

    Raises:
        ConfigError: The volumes are not square, or ranks do not divide into nodes.

    Source: Zheng et al., OrchMLLM, Algorithm 3.

    >>> plan = keep_in_nodes([[0, 5], [5, 0]], 1)  # each holds what the other would get
    >>> plan.rank_of.tolist(), plan.before, plan.after
    ([1, 0], 5.0, 0.0)
    """
    held = np.asarray(volumes, dtype=np.float64)
    num_ranks = len(held)
    if held.shape != (num_ranks, num_ranks):
        raise ConfigError(f"volumes must be of shape (ranks, ranks), got {held.shape}")
    if ranks_per_node < 1 or num_ranks % ranks_per_node:
        raise ConfigError(f"ranks_per_node must divide the {num_ranks} ranks, got {ranks_per_node}")
    node = np.arange(num_ranks) // ranks_per_node
    before = _most_sent(held, node, node)
    candidates = [(before, node)]
    if num_ranks > ranks_per_node:
        kept = _relieved(held, node, _keeping_most(held, node))
        candidates.append((_most_sent(held, node, kept), kept))
        if num_ranks <= EXACT_RANKS:
            least = _least_sent(held, node, time_limit_seconds)
            if least is not None:
                candidates.append((_most_sent(held, node, least), least))
    after, node_of = min(candidates, key=lambda candidate: candidate[0])
    return NodePlan(_ranks_within(held, node, node_of), before, after)


def _most_sent(held: FloatArray, node: IntArray, node_of: IntArray) -> float:
    """The most that a rank sends to other nodes if list r goes to node ``node_of[r]``."""
    return float(_sent(held, node, node_of).max(initial=0.0))


def _sent(held: FloatArray, node: IntArray, node_of: IntArray) -> FloatArray:
    sent: FloatArray = np.where(node[:, None] != node_of, held, 0.0).sum(axis=1)
    return sent


def _keeping_most(held: FloatArray, node: IntArray) -> IntArray:
    """The node of each list such that the sum over all ranks of what stays in nodes is largest."""
    ranks_per_node = np.count_nonzero(node == 0)
    by_node = np.add.reduceat(held, np.arange(0, len(held), ranks_per_node), axis=0)  # (nodes, lists)
    _, lists = linear_sum_assignment(np.repeat(by_node, ranks_per_node, axis=0), maximize=True)
    node_of = np.empty_like(node)
    node_of[lists] = node
    return node_of


def _relieved(held: FloatArray, node: IntArray, node_of: IntArray) -> IntArray:
    """Exchange two lists as long as the rank that sends most then sends less, and none more than it did."""
    node_of = node_of.copy()
    sent = _sent(held, node, node_of)
    for _ in range(ROUNDS):
        worst = int(sent.argmax())
        away = np.flatnonzero(node_of != node[worst])
        here = np.flatnonzero(node_of == node[worst])
        # What the worst rank holds most of, for what it holds least of in its node.
        wanted = away[np.argsort(-held[worst, away])[: len(here)]]
        best, pair = sent[worst], None
        for come in wanted:
            for go in here[held[worst, here] < held[worst, come]]:
                # Ranks of the list's new node keep it, ranks of the old one send it.
                change = np.where(node == node_of[go], held[:, go] - held[:, come], 0.0)
                change += np.where(node == node_of[come], held[:, come] - held[:, go], 0.0)
                most = (sent + change).max()
                if most < best:
                    best, pair = most, (come, go, change)
        if pair is None:
            break
        come, go, change = pair
        node_of[come], node_of[go] = node_of[go], node_of[come]
        sent = sent + change
    return node_of


def _least_sent(held: FloatArray, node: IntArray, time_limit_seconds: float) -> IntArray | None:
    """The paper's integer programme: x[list, node], and the most that a rank sends, to be least."""
    num_ranks, num_nodes = len(held), int(node[-1]) + 1
    lists, nodes = np.divmod(np.arange(num_ranks * num_nodes), num_nodes)
    variables = len(lists) + 1  # the last one is the most that a rank sends
    whole = np.arange(variables - 1)
    # A list goes to one node; a node takes as many lists as it has ranks.
    one_node = coo_array((np.ones(len(lists)), (lists, whole)), shape=(num_ranks, variables))
    as_many = coo_array((np.ones(len(lists)), (nodes, whole)), shape=(num_nodes, variables))
    # What a rank holds, less what stays in its node, is at most the last variable.
    ranks, columns = np.nonzero(nodes[None, :] == node[:, None])
    rows = np.concatenate([ranks, np.arange(num_ranks)])
    columns = np.concatenate([columns, np.full(num_ranks, variables - 1)])
    stays = np.concatenate([held[ranks, lists[columns[: len(ranks)]]], np.ones(num_ranks)])
    sends = coo_array((stays, (rows, columns)), shape=(num_ranks, variables))
    result = milp(
        np.append(np.zeros(variables - 1), 1.0),
        integrality=np.append(np.ones(variables - 1), 0),
        bounds=Bounds(0, np.append(np.ones(variables - 1), np.inf)),
        constraints=[
            LinearConstraint(one_node, 1, 1),
            LinearConstraint(as_many, num_ranks // num_nodes, num_ranks // num_nodes),
            LinearConstraint(sends, held.sum(axis=1), np.inf),
        ],
        options={"time_limit": time_limit_seconds},
    )
    if result.x is None:
        return None
    node_of: IntArray = result.x[:-1].reshape(num_ranks, num_nodes).argmax(axis=1)
    return node_of


def _ranks_within(held: FloatArray, node: IntArray, node_of: IntArray) -> IntArray:
    """The rank of each list: in its node, so that most of it need not move at all."""
    rank_of = np.empty_like(node)
    for number in range(int(node[-1]) + 1):
        ranks, lists = np.flatnonzero(node == number), np.flatnonzero(node_of == number)
        taker, taken = linear_sum_assignment(held[np.ix_(ranks, lists)], maximize=True)
        rank_of[lists[taken]] = ranks[taker]
    return rank_of
