"""Where a pipeline is cut: the record of a cut, and the cuts that DeepSpeed makes by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index

import numpy as np

from omnibal.cluster import Layout
from omnibal.cost import IntArray
from omnibal.errors import ConfigError
from omnibal.families.base import Layer, encoder_layers
from omnibal.profile.records import ModelProfile


@dataclass(frozen=True)
class Partition:
    """The cut of a model's layers into pipeline stages.

    Args:
        boundaries: ``num_stages + 1`` layer indices: stage ``s`` holds layers ``boundaries[s] : boundaries[s + 1]``.

    Raises:
        ConfigError: The boundaries do not start at 0 or do not increase (a stage without a layer).

    Example:
        >>> cut = Partition((0, 3, 4))
        >>> cut.num_stages, cut.num_layers, list(cut.layers(1))
        (2, 4, [3])
    """

    boundaries: tuple[int, ...]

    def __init__(self, boundaries: Sequence[int]) -> None:
        try:
            cut = tuple(index(boundary) for boundary in boundaries)
        except TypeError:
            raise ConfigError(f"boundaries must be integers, got {boundaries!r:.80}") from None
        if len(cut) < 2 or cut[0] != 0 or any(left >= right for left, right in pairwise(cut)):
            raise ConfigError(f"boundaries must start at 0 and increase from stage to stage, got {cut}")
        object.__setattr__(self, "boundaries", cut)

    @classmethod
    def uniform(cls, num_layers: int, num_stages: int) -> Partition:
        """Stages of equally many layers; the first ones hold one more if the number of layers is no multiple.

        This is DeepSpeed's ``partition_method="uniform"``.

        Raises:
            ConfigError: ``num_stages`` is below 1 or above ``num_layers``.

        Example:
            >>> Partition.uniform(num_layers=10, num_stages=4).boundaries
            (0, 3, 6, 8, 10)
        """
        check_num_stages(num_layers, num_stages)
        size, larger = divmod(num_layers, num_stages)  # the first ``larger`` stages hold one layer more
        return cls([stage * size + min(stage, larger) for stage in range(num_stages + 1)])

    @property
    def num_stages(self) -> int:
        return len(self.boundaries) - 1

    @property
    def num_layers(self) -> int:
        return self.boundaries[-1]

    def layers(self, stage: int) -> range:
        if not 0 <= stage < self.num_stages:
            raise ConfigError(f"stage must lie in [0, {self.num_stages}), got {stage}")
        return range(self.boundaries[stage], self.boundaries[stage + 1])


def frozen_stages(profile: ModelProfile, boundaries: IntArray) -> IntArray:
    """How many of the first stages train nothing; boundaries (…, stages + 1) -> (…,). The last stage never counts."""
    # The last stage computes the loss and so runs a backward pass of its own.
    count: IntArray = np.sum(boundaries[..., 1:-1] <= profile.frozen_front, axis=-1)
    return count


def check_num_stages(num_layers: int, num_stages: int) -> None:
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(f"num_stages must lie in [1, {num_layers}] (each stage holds a layer), got {num_stages}")


def parameter_cut(profile: ModelProfile, num_stages: int) -> Partition:
    """DeepSpeed's ``partition_method="parameters"``, which counts parameters that are trained."""
    return Partition(balanced_boundaries([layer.gradient_bytes for layer in profile.layers], num_stages))


def cut_parts(
    layers: Sequence[Layer],
    weights: Sequence[float],
    layout: Layout,
    cut: Callable[[Sequence[float], int], Sequence[int]] | None = None,
) -> Partition:
    """Boundaries by a weight of each layer; encoder and language model each by itself where the encoder has a place.

    ``cut`` makes boundaries of weights and a number of stages; by default `balanced_boundaries`. The layers of a spread
    encoder, which has no stage, are counted with the first one.
    """
    cut = cut or balanced_boundaries
    if layout.encoder is None:
        return Partition(cut(weights, layout.num_stages))
    border, own = encoder_layers(layers), layout.encoder.num_stages
    parts = (("encoder", weights[:border], own), ("language model", weights[border:], layout.num_stages - own))
    for name, part, num_stages in parts:
        if num_stages > len(part):
            raise ConfigError(f"stages of the {name} must be at most its {len(part)} layers, got {num_stages}")
    first, behind = (cut(part, num_stages) if num_stages else (0,) for _, part, num_stages in parts)
    return Partition((*first, *(border + boundary for boundary in behind[1:])))


def balanced_boundaries(weights: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """DeepSpeed's ``partition_balanced``: boundaries of ``num_stages`` stages with about equal sums of weights.

    >>> balanced_boundaries([1, 1, 1, 3], 2)
    (0, 3, 4)
    """
    num_layers = len(weights)
    if num_layers == num_stages:
        return tuple(range(num_stages + 1))
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    # For each prefix of the layers and number of stages DeepSpeed keeps one cut, that with the least difference between
    # the heaviest and the lightest stage, of equal ones the last. Keeping one is greedy: another cut may have a smaller
    # difference in the end. Dynamic programming, O(stages × layers²): entry i of both arrays is the weight of the
    # heaviest and of the lightest stage of the one cut that is kept for the first i layers.
    heaviest, lightest = np.full(num_layers + 1, np.inf), np.full(num_layers + 1, np.inf)
    heaviest[0] = 0
    last_cut = np.zeros((num_stages + 1, num_layers + 1), dtype=int)
    for stage in range(1, num_stages + 1):
        before = heaviest, lightest
        heaviest, lightest = np.full(num_layers + 1, np.inf), np.full(num_layers + 1, np.inf)
        for i in range(stage, num_layers + 1):
            most = np.maximum(before[0][:i], sums[i] - sums[:i])
            least = np.minimum(before[1][:i], sums[i] - sums[:i])
            # Entry c belongs to a last stage of layers c to i - 1; reversed, argmin finds the last of equal ones.
            kept = i - 1 - int(np.argmin((most - least)[::-1]))
            last_cut[stage, i], heaviest[i], lightest[i] = kept, most[kept], least[kept]
    boundaries = [num_layers]  # walk back from the end of the model along the cuts that were kept
    for stage in range(num_stages, 0, -1):
        boundaries.append(int(last_cut[stage, boundaries[-1]]))
    return tuple(reversed(boundaries))
