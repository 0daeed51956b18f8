"""Iterative Sampling and Filtering: the packing of the OmniBal paper."""

from typing import Any

import numpy as np
import numpy.typing as npt

from omnibal.compiled import compiled
from omnibal.data.checks import kind
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packs import Packs
from omnibal.data.policies import ITERATIONS
from omnibal.errors import ConfigError


def iterative_sampling_and_filtering(
    lengths: SampleLengths,
    limits: PackLimits,
    *,
    iterations: int = ITERATIONS,
    seed: int | np.random.Generator = 0,
    samples: npt.ArrayLike | None = None,
) -> Packs:
    """Pack samples by drawing groups at random and keeping the full ones, again and again.

    A round shuffles the samples that are left and walks through them; a group closes when the next sample would take
    it over a limit. Full groups (``full_vision_units`` or ``full_llm_tokens`` reached) become packs, the samples of
    the others and of the group still open at the end go into the next round. What the last round groups is emitted
    as it stands. Earlier packs are fuller than later ones: shuffle packs before dealing them to ranks.

    A sample that exceeds a limit on its own gets a pack of its own; ``limits.oversized`` tells which.

    Args:
        lengths: Loads of every sample.
        limits: The most a pack may hold, and from where on it is full.
        iterations: Most rounds, at least 1 (T in the paper, 10 in practice).
        seed: Seed or generator of the rounds' shuffles.
        samples: Which samples to pack; all of them by default.

    Returns:
        Packs that hold every sample once; none is empty.

    Raises:
        ConfigError: ``iterations`` is below 1.

    Complexity: O(iterations · samples). Source: Yao et al., OmniBal, ICML 2025, Algorithm 1.

    >>> lengths = SampleLengths([5, 4, 3, 1], [1300, 1100, 900, 300])
    >>> packs = iterative_sampling_and_filtering(lengths, PackLimits(9, 4096), seed=1)
    >>> sorted(packs.vision_units(lengths).tolist())
    [4, 9]
    """
    kind("limits", limits, PackLimits)
    if iterations < 1:
        raise ConfigError(f"iterations must be at least 1, got {iterations}")
    generator = np.random.default_rng(seed)
    left = np.arange(len(lengths)) if samples is None else np.array(samples, dtype=np.int64)
    packed = np.empty(len(left), dtype=np.int64)
    starts = np.zeros(len(left) + 1, dtype=np.int64)
    marks = (limits.vision_units, limits.llm_tokens, limits.full_vision_units, limits.full_llm_tokens)
    num_packs = 0
    for iteration in range(iterations):
        if len(left) == 0:
            break
        generator.shuffle(left)
        num_left, num_packs = _sample_and_filter(
            left,
            lengths.vision_units,
            lengths.llm_tokens,
            marks,
            iteration == iterations - 1,
            packed,
            starts,
            num_packs,
        )
        left = left[:num_left]
    return Packs(packed, starts[: num_packs + 1].copy())


@compiled
def _sample_and_filter(
    order: IntArray,
    vision_units: IntArray,
    llm_tokens: IntArray,
    marks: tuple[int, int, int, int],
    keep_all: bool,
    packed: IntArray,
    starts: IntArray,
    num_packs: int,
) -> Any:
    """Run one round over ``order``: write packs behind ``num_packs``, move what is left to the front of ``order``.

    Returns:
        How many samples are left, how many packs there are.
    """
    most_vision, most_tokens, full_vision, full_tokens = marks
    num_left = 0
    opened = 0  # where the open group begins
    vision = tokens = np.int64(0)
    for position in range(len(order) + 1):
        at_end = position == len(order)
        if not at_end:
            sample = order[position]
            more_vision, more_tokens = vision_units[sample], llm_tokens[sample]
            if position == opened or (vision + more_vision <= most_vision and tokens + more_tokens <= most_tokens):
                vision += more_vision
                tokens += more_tokens
                continue
        if keep_all or (not at_end and (vision >= full_vision or tokens >= full_tokens)):
            end = starts[num_packs]
            for member in range(opened, position):
                packed[end + member - opened] = order[member]
            num_packs += 1
            starts[num_packs] = end + position - opened
        else:
            for member in range(opened, position):
                order[num_left] = order[member]
                num_left += 1
        if not at_end:
            opened, vision, tokens = position, more_vision, more_tokens
    return num_left, num_packs
