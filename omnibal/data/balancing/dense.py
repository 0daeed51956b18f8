"""Dense filling: the first packs where those of random steps would not fit, as few samples fill both limits."""

from typing import Any, Final

import numpy as np

from omnibal.compiled import compiled
from omnibal.data.balancing.shuffle import scrambled
from omnibal.data.balancing.tables import (
    COUNT,
    DIMENSIONS,
    EXCESS,
    LOADS,
    ROOM,
    SIZES,
    Int32Array,
    Int64Array,
    Integer,
    prepend,
)

MOST_PACKS: Final = 1024
"""Packs that are usually filled together: each sample looks at all of them."""


@compiled
def fill_packs_densely(
    samples: Int32Array,
    packs: Int64Array,
    step_starts: Int64Array,
    order: Int64Array,
    step_packs: int,
    most_packs: int,
    weights: tuple[int, int],
    seed: Any,
) -> None:
    """Put the samples of several steps into packs by best fit, and deal packs of like vision units to each step.

    Every sample, largest first, goes into the pack that has least room left with it; where none has room, into an
    empty pack, or at last into the one that it overfills least. No pack stays empty where there is a sample for it.

    Args:
        samples: Linked in place.
        packs: Without samples, with zero excesses and all room; changed in place.
        step_starts: Samples step_starts[s] … step_starts[s + 1] − 1 of ``order`` are those of step s.
        order: Samples as they were drawn.
        step_packs: Packs per step.
        most_packs: As many packs are filled together, those of whole steps.
        weights: What a vision unit and a token of room count.
        seed: Which packs of like vision units share a step.

    Complexity: O(samples · packs filled together). Source: Johnson, Near-optimal bin packing algorithms, 1973; here
    in two dimensions.
    """
    num_steps = len(step_starts) - 1
    together = max(most_packs // step_packs, 1)
    for step in range(0, num_steps, together):
        end = min(step + together, num_steps)
        chosen = order[step_starts[step] : step_starts[end]]
        group = packs[step * step_packs : end * step_packs]
        _fill_group(samples, group, chosen, weights)
        _deal_group(group, step_packs, seed + np.uint64(step * step_packs))


@compiled
def _fill_group(samples: Int32Array, group: Int64Array, chosen: Int64Array, weights: tuple[int, int]) -> None:
    shares = np.empty(len(chosen), dtype=np.int64)
    for place in range(len(chosen)):
        sample = chosen[place]
        shares[place] = max(samples[sample, SIZES] * weights[0], samples[sample, SIZES + 1] * weights[1])
    opened = 0
    number = len(chosen)
    for place in np.argsort(-shares, kind="mergesort"):
        sample = chosen[place]
        must_open = number <= len(group) - opened  # one sample for each pack that is still empty
        pack = opened
        if not must_open:
            pack = _best_pack(samples, group, opened, sample, weights)
        opened += pack == opened
        number -= 1
        prepend(samples, group, pack, sample)
        group[pack, COUNT] += 1
        for size in range(2):
            group[pack, ROOM + size] -= samples[sample, SIZES + size]
        for dimension in range(DIMENSIONS):
            group[pack, EXCESS + dimension] += samples[sample, LOADS + dimension]


@compiled
def _best_pack(samples: Int32Array, group: Int64Array, opened: int, sample: Integer, weights: tuple[int, int]) -> int:
    """Pack with least room after it takes a sample; the first empty one where none has room, if there is one."""
    best, least = opened, np.int64(1) << 62
    overfilled, least_overfill = 0, np.int64(1) << 62
    for pack in range(opened):
        vision = (group[pack, ROOM] - samples[sample, SIZES]) * weights[0]
        tokens = (group[pack, ROOM + 1] - samples[sample, SIZES + 1]) * weights[1]
        if vision >= 0 and tokens >= 0:
            if vision + tokens < least:
                best, least = pack, vision + tokens
        elif -min(vision, 0) - min(tokens, 0) < least_overfill:
            overfilled, least_overfill = pack, -min(vision, 0) - min(tokens, 0)
    if best == opened == len(group):
        return overfilled
    return best


@compiled
def _deal_group(group: Int64Array, step_packs: int, seed: Any) -> None:
    """Order packs such that those of a step have like vision units, in random order otherwise."""
    keys = np.empty(len(group), dtype=np.int64)
    for pack in range(len(group)):
        keys[pack] = (group[pack, ROOM] << 32) + np.int64(scrambled(seed + np.uint64(pack)))
    by_vision = np.argsort(keys, kind="mergesort")
    steps = np.empty(len(group) // step_packs, dtype=np.int64)
    for step in range(len(steps)):
        steps[step] = scrambled(seed + np.uint64(len(group) + step))
    ordered = np.empty_like(group)
    place = 0
    for step in np.argsort(steps, kind="mergesort"):
        for pack in by_vision[step * step_packs : (step + 1) * step_packs]:
            ordered[place] = group[pack]
            place += 1
    group[:] = ordered
