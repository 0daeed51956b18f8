"""The paper's partitioner: a greedy anchor, its neighbours, and a ranking of them.

Source: Yao et al., OmniBal, ICML 2025, section 4.2 (balanced model partitioning). Deviations: the paper adds a
variance in seconds² to a volume in bytes; here the variance is divided by the mean stage time and the volume by the
bandwidth, so that both are seconds. The best K neighbours are found exactly, without listing all of them, which are
(2r + 1)^(stages - 1).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Boundaries = tuple[int, ...]
FloatArray = NDArray[np.float64]


def greedy_anchor(forward_seconds: FloatArray, num_stages: int) -> Boundaries:
    """Fill one stage after the other until the next layer would take it farther from the mean of what is left.

    Args:
        forward_seconds: One per layer, at least ``num_stages``.
        num_stages: At least 1.

    Example:
        >>> greedy_anchor(np.array([1.0, 1.0, 1.0, 1.0, 4.0]), 2)
        (0, 4, 5)
    """
    num_layers = len(forward_seconds)
    sums = np.concatenate([[0.0], np.cumsum(forward_seconds)])
    boundaries = [0]
    for stages_left in range(num_stages, 1, -1):
        start = boundaries[-1]
        target = sums[start] + (sums[-1] - sums[start]) / stages_left
        ends = np.arange(start + 1, num_layers - stages_left + 2)
        boundaries.append(int(ends[np.argmin(np.abs(sums[ends] - target))]))
    return (*boundaries, num_layers)


def rank(boundaries: Boundaries, forward_seconds: FloatArray, crossing_seconds: FloatArray) -> float:
    """VAR(forward time of the stages) / mean + SUM(communication), in seconds; less is better.

    Args:
        boundaries: The partition.
        forward_seconds: One per layer.
        crossing_seconds: One per boundary, ``layers + 1`` in all: what a transfer there takes.
    """
    stages = np.add.reduceat(forward_seconds, boundaries[:-1])
    variance = ((stages - stages.mean()) ** 2).sum()
    return float((variance / stages.mean() if variance else 0.0) + crossing_seconds[list(boundaries[1:-1])].sum())


def best_neighbours(
    anchor: Boundaries, forward_seconds: FloatArray, crossing_seconds: FloatArray, *, radius: int, top: int
) -> list[Boundaries]:
    """The ``top`` partitions of least :func:`rank` whose every boundary is within ``radius`` of the anchor's.

    Returns:
        Best first, of equal ones the smaller boundaries first; fewer than ``top`` where there are fewer.
        O(stages × (2 radius + 1)² × top), by keeping the best ``top`` beginnings for each place of a boundary: the
        stages' mean is the same for all partitions, so the rank is a sum over stages.
    """
    sums = np.concatenate([[0.0], np.cumsum(forward_seconds)])
    num_layers, num_stages = anchor[-1], len(anchor) - 1
    mean = sums[-1] / num_stages

    def stage_rank(start: int, end: int) -> float:
        deviation = (sums[end] - sums[start] - mean) ** 2
        return float((deviation / mean if deviation else 0.0) + (crossing_seconds[end] if end < num_layers else 0.0))

    beginnings: dict[int, list[tuple[float, Boundaries]]] = {0: [(0.0, (0,))]}
    for middle in (*anchor[1:-1], num_layers):
        places = range(middle - radius, middle + radius + 1) if middle < num_layers else [num_layers]
        beginnings = {
            place: sorted(
                (score + stage_rank(start, place), (*boundaries, place))
                for start, kept in beginnings.items()
                if start < place <= num_layers
                for score, boundaries in kept
            )[:top]
            for place in places
        }
    return [boundaries for _, boundaries in beginnings[num_layers]]
