"""A random order of any number of samples that is computed where it is needed, not stored.

The planner asks for the order in one place, ``BalancedPacks._draw(begin, end, epoch)``: which samples stand at these
places of an epoch. Any stretch of some thousand places must be as mixed as all of them: steps are cut from the order as
it is, and only what all samples hold together (``demand.survey``) says how many steps there are. Shares of several
sources, which may change with the steps, are arranged by ``omnibal.data.mixed_packs``.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from omnibal.compiled import compiled, compiled_part

ROUNDS: Final = 4
LEAST_BITS: Final = 10  # on a smaller domain the network does not reach all permutations equally often

UInt64Array = npt.NDArray[np.uint64]


def shuffled(size: int, first: int, last: int, keys: UInt64Array) -> npt.NDArray[np.int64]:
    """Return places ``first`` … ``last`` − 1 of a random permutation of 0 … ``size`` − 1.

    A Feistel network over the smallest power of two that holds ``size``; a value outside is encrypted again until it
    falls inside (cycle walking: less than two turns on average). No memory but the result, and any part of the order
    without the rest. Sources: Luby and Rackoff, How to construct pseudorandom permutations from pseudorandom
    functions, 1988; Black and Rogaway, Ciphers with arbitrary finite domains, 2002.

    >>> keys = shuffle_keys(0, 7)
    >>> sorted(shuffled(10, 0, 10, keys).tolist()), (shuffled(10, 4, 6, keys) == shuffled(10, 0, 10, keys)[4:6]).all()
    ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], np.True_)
    """
    bits = max(int(size - 1).bit_length(), LEAST_BITS)
    order = np.empty(last - first, dtype=np.int64)
    _write_order(np.uint64(size), first, bits, keys, order)
    return order


def shuffle_keys(*seed: int) -> UInt64Array:
    """Keys of a permutation from integers of at least 0."""
    return np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64).astype(np.uint64)


@compiled_part
def scrambled(value: Any) -> Any:
    """Turn 64 bits into 32 that look random (multiplications as in Steele, Lea and Flood's SplitMix, 2014)."""
    value = value * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
    return value >> np.uint64(32)


@compiled
def _write_order(size: Any, first: int, bits: int, keys: UInt64Array, order: npt.NDArray[np.int64]) -> None:
    low_bits = np.uint64(bits // 2)
    high_bits = np.uint64(bits - bits // 2)
    one = np.uint64(1)
    low_mask = (one << low_bits) - one
    high_mask = (one << high_bits) - one
    for index in range(len(order)):
        # The place in two halves; each round mixes one of them with a scrambled key and the other one. Every round can
        # be undone, so different places become different values.
        value = np.uint64(first + index)
        while True:
            low, high = value & low_mask, value >> low_bits
            for turn in range(0, ROUNDS, 2):
                high ^= scrambled(low + keys[turn]) & high_mask
                low ^= scrambled(high + keys[turn + 1]) & low_mask
            value = (high << low_bits) | low
            if value < size:
                break  # else it is encrypted once more
        order[index] = value
