"""DeepSpeed's own way to cut a pipeline by weights, the baseline of every other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omnibal.pipeline.boundaries import Partition
from omnibal.profile.records import ModelProfile


def parameter_cut(profile: ModelProfile, num_stages: int) -> Partition:
    """DeepSpeed's ``partition_method="parameters"``: parameters that are trained count, as their gradients do."""
    return Partition(balanced_boundaries([layer.gradient_bytes for layer in profile.layers], num_stages))


def balanced_boundaries(weights: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """DeepSpeed's ``partition_balanced``, which ``partition_method="parameters"`` feeds with trainable parameters.

    For each prefix of the layers and number of stages it keeps one cut, that with the least difference between the
    heaviest and the lightest stage, of equal ones the last. Keeping one is greedy: another cut may have a smaller
    difference, or a lighter heaviest stage.

    Args:
        weights: One per layer, at least ``num_stages``.
        num_stages: At least 1.

    Returns:
        ``num_stages + 1`` layer indices. O(stages × layers²).

    Example:
        >>> balanced_boundaries([1, 1, 1, 3], 2)
        (0, 3, 4)
    """
    num_layers = len(weights)
    if num_layers == num_stages:
        return tuple(range(num_stages + 1))
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    # The heaviest and the lightest stage of the cut that is kept for the first i layers.
    heaviest, lightest = np.full(num_layers + 1, np.inf), np.full(num_layers + 1, np.inf)
    heaviest[0] = 0
    last_cut = np.zeros((num_stages + 1, num_layers + 1), dtype=int)
    for stage in range(1, num_stages + 1):
        before = heaviest, lightest
        heaviest, lightest = np.full(num_layers + 1, np.inf), np.full(num_layers + 1, np.inf)
        for i in range(stage, num_layers + 1):
            most = np.maximum(before[0][:i], sums[i] - sums[:i])
            least = np.minimum(before[1][:i], sums[i] - sums[:i])
            kept = i - 1 - int(np.argmin((most - least)[::-1]))
            last_cut[stage, i], heaviest[i], lightest[i] = kept, most[kept], least[kept]
    boundaries = [num_layers]
    for stage in range(num_stages, 0, -1):
        boundaries.append(int(last_cut[stage, boundaries[-1]]))
    return tuple(reversed(boundaries))
