"""Algorithms 2 and 5 of OrchMLLM: where a rank's samples are padded to its longest."""

import numpy as np

from omnibal.compiled import compiled
from omnibal.cost import FloatArray, IntArray
from omnibal.dispatch.greedy import bits_of, deal, first_round, replay, sorted_keys
from omnibal.errors import ConfigError


def padded(lengths: FloatArray, num_ranks: int) -> IntArray:
    """Algorithm 2: the largest of (samples on a rank × the longest of them) is as small as it can be.

    Ranks hold neighbours in the order of lengths, and the search for the least bound is exact (the paper's pseudo-code
    starts it at the shortest sample and may return a packing that does not fit). O(n log n), and O(n) for each of at
    most 62 tried bounds.

    Args:
        lengths: Of each sample, (samples,), whole numbers, not negative.
        num_ranks: At least 1.

    Returns:
        The rank of each sample, (samples,).

    Raises:
        ConfigError: A length is no whole number.
    """
    order = np.argsort(lengths, kind="stable")
    ascending = lengths[order].astype(np.int64)
    if (wrong := lengths[lengths % 1 > 0]).size:
        raise ConfigError(f"lengths must be whole numbers, got {wrong[0]:g}")
    # The longest has to lie somewhere. With samples spread equally, no rank gets more than the upper bound.
    least = ascending.max(initial=0)
    enough = least * -(-len(lengths) // num_ranks)
    while least < enough:
        tried = (least + enough) // 2
        if _fill(ascending, tried)[-1] < num_ranks:
            enough = tried
        else:
            least = tried + 1
    destination = np.empty(len(lengths), dtype=np.int64)
    destination[order] = _fill(ascending, enough)
    return destination


def padded_attention(lengths: FloatArray, num_ranks: int) -> IntArray:
    """Algorithm 5: attention alone is padded, so that a rank costs Σ lengths + λ × samples × longest².

    The longest samples open ranks whose padded size is at most the largest sum that Algorithm 1 gives; once all ranks
    are open, what is left goes to the rank with the least sum. (The pseudo-code multiplies by a rank's shortest sample;
    padding goes by its longest.) No ratio is proved.

    Args:
        lengths: Of each sample, (samples,), not negative.
        num_ranks: At least 1.

    Returns:
        The rank of each sample, (samples,).
    """
    keys, sample_bits, *_ = sorted_keys(lengths, num_ranks)
    evenly = deal(keys, sample_bits, len(lengths), num_ranks)
    return _open_then_level(keys, sample_bits, evenly, num_ranks)


@compiled
def _fill(ascending: IntArray, bound: int) -> IntArray:
    """The rank of each sample, ranks filled one after another as long as their padded size stays within the bound."""
    rank, first = 0, 0
    ranks = np.zeros(max(len(ascending), 1), dtype=np.int64)
    for position, length in enumerate(ascending):
        if (position - first + 1) * length > bound:
            rank, first = rank + 1, position
        ranks[position] = rank
    return ranks


@compiled
def _open_then_level(keys: IntArray, sample_bits: int, evenly: IntArray, num_ranks: int) -> IntArray:
    """Deal samples out of ``keys``, the last first; ``evenly`` is what Algorithm 1 makes of them."""
    num_samples, rank_bits, lowest = len(keys), bits_of(num_ranks), (1 << sample_bits) - 1
    destination = np.empty(num_samples, dtype=np.int64)
    sums = np.zeros(num_ranks, dtype=np.int64)
    for key in keys:
        sums[evenly[num_samples - 1 - (key & lowest)]] += key >> sample_bits
    bound = sums.max()
    sums[:] = 0
    position, rank, size, longest = num_samples - 1, -1, 0, 0
    while position >= 0:
        length = keys[position] >> sample_bits
        if rank < 0 or (size + 1) * longest > bound:
            if rank + 1 == num_ranks:
                break
            rank, size, longest = rank + 1, 0, length
        destination[num_samples - 1 - (keys[position] & lowest)] = rank
        sums[rank] += length
        size += 1
        position -= 1
    losers = first_round((sums << rank_bits) | np.arange(num_ranks))
    best = losers[0]
    for rest in range(position, -1, -1):
        least = best & ((1 << rank_bits) - 1)
        destination[num_samples - 1 - (keys[rest] & lowest)] = least
        best = replay(losers, (num_ranks + least) >> 1, best + ((keys[rest] >> sample_bits) << rank_bits))
    return destination
