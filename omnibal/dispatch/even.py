"""Several costs at once, and no rank over what it can hold: our own way of dividing samples."""

from typing import Final

import numpy as np

from omnibal.compiled import compiled
from omnibal.cost import FloatArray, IntArray

PARTNERS: Final = 4
"""Ranks with least of a cost that the rank with most of it may exchange with, before it is left as it is."""
EXCHANGES: Final = 8
"""Most exchanges per rank."""
ROUNDING: Final = 1e-9
"""By how much of a limit sums may be over it: 0.1 + 0.1 + 0.1 is more than 0.3."""


def even(costs: FloatArray, num_ranks: int, sizes: FloatArray, most: FloatArray) -> IntArray | None:
    """Divide samples so that every rank has about as much of every cost, and no rank holds more than it can.

    Large samples first, each to the rank where the sum of all squared loads grows least, loads measured in the mean
    rank's: that is the rank with least of what this sample has most of, and for one cost Algorithm 1. Then the rank
    with most of a cost exchanges a sample (for one or for none) with a rank that has little of it, as long as squares
    fall. O(n num_ranks), compiled: 0.2 s of one core for 2560 ranks with 60 samples each and one cost.

    Args:
        costs: (samples, costs), not negative.
        num_ranks: At least 1.
        sizes: What a sample takes of each limit, (samples, limits), not negative; limits may be none.
        most: The most that a rank may hold, (limits,).

    Returns:
        The rank of each sample, (samples,); ``None`` if no division within the limits was found.
    """
    mean = costs.sum(axis=0) / num_ranks
    parts = np.ascontiguousarray(costs / np.where(mean > 0, mean, 1.0))
    shares = np.ascontiguousarray(sizes / np.where(most > 0, most, 1.0))
    room = np.where(most > 0, 1 + ROUNDING, 0.0)
    # Where samples in the order of their costs do not fit, the order of what they take of the limits may do.
    for key in (parts, shares):
        destination = _place(np.argsort(-key.max(axis=1, initial=0.0), kind="stable"), parts, shares, room, num_ranks)
        if len(destination) == len(costs):
            _exchange(destination, parts, shares, room, num_ranks)
            return destination
    return None


@compiled
def _place(order: IntArray, parts: FloatArray, shares: FloatArray, room: FloatArray, num_ranks: int) -> IntArray:
    """Each sample in ``order`` to the rank with room where squares grow least; an empty array if one has none."""
    loads = np.zeros((num_ranks, parts.shape[1]))
    held = np.zeros((num_ranks, shares.shape[1]))
    destination = np.empty(len(order), dtype=np.int64)
    for sample in order:
        best, least = -1, np.inf
        for rank in range(num_ranks):
            # (load + part)² - load² is part² + 2 load part; the first is the same on all ranks.
            growth = 0.0
            for cost in range(parts.shape[1]):
                growth += loads[rank, cost] * parts[sample, cost]
            if growth < least and _fits(held, rank, shares, sample, room):
                best, least = rank, growth
        if best < 0:
            return destination[:0]
        destination[sample] = best
        loads[best] += parts[sample]
        held[best] += shares[sample]
    return destination


@compiled
def _fits(held: FloatArray, rank: int, shares: FloatArray, sample: int, room: FloatArray) -> bool:
    fits = True
    for limit in range(len(room)):
        fits = fits and held[rank, limit] + shares[sample, limit] <= room[limit]
    return fits


@compiled
def _exchange(destination: IntArray, parts: FloatArray, shares: FloatArray, room: FloatArray, num_ranks: int) -> None:
    """Even out the ranks with most of a cost, cost by cost in turn, until none of them can be mended."""
    num_costs = parts.shape[1]
    loads, held = np.zeros((num_ranks, num_costs)), np.zeros((num_ranks, shares.shape[1]))
    for sample, rank in enumerate(destination):
        loads[rank] += parts[sample]
        held[rank] += shares[sample]
    stuck, tries = 0, EXCHANGES * num_ranks
    while stuck < num_costs and tries > 0:
        cost = tries % num_costs
        tries -= 1
        full = int(np.argmax(loads[:, cost]))
        mended = False
        for partner in np.argsort(loads[:, cost])[:PARTNERS]:
            if partner != full and _exchange_best(destination, parts, shares, room, loads, held, full, partner):
                mended = True
                break
        stuck = 0 if mended else stuck + 1


@compiled
def _exchange_best(
    destination: IntArray,
    parts: FloatArray,
    shares: FloatArray,
    room: FloatArray,
    loads: FloatArray,
    held: FloatArray,
    full: int,
    partner: int,
) -> bool:
    """Make the one exchange between two ranks that lets squares fall most, if any does."""
    num_costs, num_limits = parts.shape[1], shares.shape[1]
    theirs = np.append(np.flatnonzero(destination == partner), -1)  # -1: nothing comes back
    best_given, best_taken, best = -1, -1, -1e-12
    for given in np.flatnonzero(destination == full):
        for taken in theirs:
            # Moving d from one load to the other changes the sum of squares by 2 d (d - difference).
            change = 0.0
            for cost in range(num_costs):
                moved = parts[given, cost] - (parts[taken, cost] if taken >= 0 else 0.0)
                change += moved * (moved - (loads[full, cost] - loads[partner, cost]))
            if change >= best:
                continue
            fits = True
            for limit in range(num_limits):
                moved = shares[given, limit] - (shares[taken, limit] if taken >= 0 else 0.0)
                fits = fits and held[partner, limit] + moved <= room[limit] and held[full, limit] - moved <= room[limit]
            if fits:
                best_given, best_taken, best = int(given), int(taken), change
    if best_given < 0:
        return False
    for sample, source, target in ((best_given, full, partner), (best_taken, partner, full)):
        if sample >= 0:
            destination[sample] = target
            loads[source] -= parts[sample]
            loads[target] += parts[sample]
            held[source] -= shares[sample]
            held[target] += shares[sample]
    return True
