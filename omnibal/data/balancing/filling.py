"""Filling: the first packs of every step, largest sample first into the lightest pack."""

from typing import Any, Final

import numpy as np

from omnibal.compiled import compiled
from omnibal.data.balancing.tables import COUNT, DIMENSIONS, EXCESS, LOADS, ROOM, SIZES, Int32Array, Int64Array, prepend

SIZE_LEVELS: Final = 1024
MOST_LOOKS: Final = 32
"""Packs, from about the lightest on, that are looked at for room."""


@compiled
def fill_packs(
    samples: Int32Array, packs: Int64Array, step_starts: Int64Array, order: Int64Array, step_packs: int
) -> None:
    """Put the samples of each step into its packs, each into the lightest one by the sum of all loads.

    One without room is passed over where one of the next lightest has room. No pack stays empty where its step has a
    sample for it.

    Args:
        samples: Linked in place.
        packs: Without samples, with zero excesses and all room; changed in place.
        step_starts: Samples step_starts[s] … step_starts[s + 1] − 1 of ``order`` are those of step s.
        order: Samples, within each step from large to small.
        step_packs: Packs per step.

    Complexity: O(samples · log packs per step). Source: Graham, Bounds on multiprocessing timing anomalies, 1969.
    """
    heap = np.empty(step_packs, dtype=np.int64)
    weights = np.empty(step_packs, dtype=np.int64)
    for step in range(len(step_starts) - 1):
        for place in range(step_packs):
            weights[place], heap[place] = 0, step * step_packs + place
        for position in range(step_starts[step], step_starts[step + 1]):
            sample = order[position]
            place = _find_room(samples, packs, heap, sample)
            pack = heap[place]
            prepend(samples, packs, pack, sample)
            packs[pack, COUNT] += 1
            for size in range(2):
                packs[pack, ROOM + size] -= samples[sample, SIZES + size]
            weight = weights[place] + 1
            for dimension in range(DIMENSIONS):
                packs[pack, EXCESS + dimension] += samples[sample, LOADS + dimension]
                weight += samples[sample, LOADS + dimension]
            _sink(weights, heap, place, weight, pack)


@compiled
def _find_room(samples: Int32Array, packs: Int64Array, heap: Int64Array, sample: int) -> int:
    """Place in the heap of the first pack that has room for a sample; 0 where none of the first few has."""
    vision, tokens = samples[sample, SIZES], samples[sample, SIZES + 1]
    for place in range(min(len(heap), MOST_LOOKS)):
        if vision <= packs[heap[place], ROOM] and tokens <= packs[heap[place], ROOM + 1]:
            return place
    return 0


@compiled
def _sink(weights: Int64Array, heap: Int64Array, place: int, weight: int, pack: int) -> None:
    """Replace an entry of a heap by a heavier one."""
    while 2 * place + 1 < len(heap):
        child = 2 * place + 1
        if child + 1 < len(heap) and weights[child + 1] < weights[child]:
            child += 1
        if weights[child] >= weight:
            break
        weights[place], heap[place] = weights[child], heap[child]
        place = child
    weights[place], heap[place] = weight, pack


@compiled
def sort_within_steps(samples: Int32Array, starts: Int64Array, order: Int64Array) -> Any:
    """Sort each step's samples from large to small by the sum of all loads.

    Args:
        samples: Loads of the samples.
        starts: Where each step begins in ``order``, and where the last one ends.
        order: Samples, step after step.

    Returns:
        The samples in their new order. Sizes count as equal up to a 1024th of the largest, and equal ones keep their
        order. Complexity: O(samples).
    """
    number = len(order)
    sizes = np.zeros(number, dtype=np.int64)
    largest = np.int64(1)
    for position in range(number):
        for dimension in range(LOADS, LOADS + DIMENSIONS):
            sizes[position] += samples[order[position], dimension]
        largest = max(largest, sizes[position])
    steps = np.empty(number, dtype=np.int32)
    levels = np.empty(number, dtype=np.int32)
    places = np.zeros(SIZE_LEVELS + 1, dtype=np.int64)
    for step in range(len(starts) - 1):
        for position in range(starts[step], starts[step + 1]):
            steps[position] = step
            levels[position] = SIZE_LEVELS - 1 - sizes[position] * (SIZE_LEVELS - 1) // largest
            places[levels[position] + 1] += 1
    for level in range(SIZE_LEVELS):
        places[level + 1] += places[level]
    by_size = np.empty(number, dtype=np.int64)
    for position in range(number):
        by_size[places[levels[position]]] = position
        places[levels[position]] += 1
    ends = starts.copy()
    out = np.empty(number, dtype=np.int64)
    for place in by_size:
        out[ends[steps[place]]] = order[place]
        ends[steps[place]] += 1
    return out
