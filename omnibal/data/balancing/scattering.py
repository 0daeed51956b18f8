"""Scattering: the way out where no exchange of two packs helps one that holds too much."""

from typing import Any

import numpy as np

from omnibal.compiled import compiled
from omnibal.data.balancing.shuffle import scrambled
from omnibal.data.balancing.tables import (
    COUNT,
    FIRST,
    NEXT,
    NOWHERE,
    ROOM,
    SIZES,
    Int32Array,
    Int64Array,
    Integer,
    prepend,
)


@compiled
def scatter(samples: Int32Array, packs: Int64Array, weights: tuple[int, int], seed: Any) -> None:
    """Leave every pack that holds too much its largest sample alone, and give its others to packs drawn at random.

    Those then hold too much, but smaller samples than the one that was in the way: relief has another chance.

    Args:
        samples: Linked anew.
        packs: At least two; their chains, counts and room are changed, their excesses are not.
        weights: What a vision unit and a token count.
        seed: Which packs are drawn.
    """
    overfull = np.minimum(packs[:, ROOM], packs[:, ROOM + 1]) < 0
    for pack in np.flatnonzero(overfull):
        largest = _largest(samples, packs[pack, FIRST], weights)
        sample = packs[pack, FIRST]
        packs[pack, FIRST] = NOWHERE
        while sample != NOWHERE:
            behind = samples[sample, NEXT]
            other = np.int64(scrambled(seed + np.uint64(sample)) % np.uint64(len(packs) - 1))
            target = pack if sample == largest else other + (other >= pack)
            _move(samples, packs, sample, pack, target)
            sample = behind


@compiled
def _largest(samples: Int32Array, sample: Integer, weights: tuple[int, int]) -> Integer:
    """The largest sample of a chain."""
    largest, most = sample, np.int64(-1)
    while sample != NOWHERE:
        size = max(samples[sample, SIZES] * weights[0], samples[sample, SIZES + 1] * weights[1])
        if size > most:
            largest, most = sample, size
        sample = samples[sample, NEXT]
    return largest


@compiled
def _move(samples: Int32Array, packs: Int64Array, sample: Integer, pack: Integer, target: Integer) -> None:
    """Link a sample that has been taken out of a pack's chain to the target's."""
    prepend(samples, packs, target, sample)
    packs[pack, COUNT] -= 1
    packs[target, COUNT] += 1
    for size in range(2):
        packs[pack, ROOM + size] += samples[sample, SIZES + size]
        packs[target, ROOM + size] -= samples[sample, SIZES + size]
