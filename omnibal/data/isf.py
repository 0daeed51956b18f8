"""Iterative Sampling and Filtering, the packing of the OmniBal paper, and epochs of packs that are made so."""

from typing import Any

import numpy as np
import numpy.typing as npt

from omnibal.compiled import compiled
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packing_spec import ITERATIONS, PackingSpec, Ranks
from omnibal.data.packs import Packs, deal
from omnibal.errors import ConfigError, kind


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
        sizes, is_last = (lengths.vision_units, lengths.llm_tokens), iteration == iterations - 1
        num_left, num_packs = _sample_and_filter(left, *sizes, marks, is_last, packed, starts, num_packs)
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

    The results are how many samples are left, and how many packs there are.
    """
    most_vision, most_tokens, full_vision, full_tokens = marks
    num_left = 0
    opened = 0  # where the open group begins
    vision = tokens = np.int64(0)
    for position in range(len(order) + 1):
        # The open group grows while the next sample fits; an empty one takes any sample, also one over a limit.
        at_end = position == len(order)
        if not at_end:
            sample = order[position]
            more_vision, more_tokens = vision_units[sample], llm_tokens[sample]
            if position == opened or (vision + more_vision <= most_vision and tokens + more_tokens <= most_tokens):
                vision += more_vision
                tokens += more_tokens
                continue
        # It closes: it is a pack where it is full; else its samples are left, as are those of the group still open at
        # the end, which the next round may fill.
        if keep_all or (not at_end and (vision >= full_vision or tokens >= full_tokens)):
            end = starts[num_packs]
            for member in range(opened, position):
                packed[end + member - opened] = order[member]
            num_packs += 1
            starts[num_packs] = end + position - opened
        else:
            for member in range(opened, position):  # num_left ≤ opened: nothing unread is overwritten
                order[num_left] = order[member]
                num_left += 1
        if not at_end:
            opened, vision, tokens = position, more_vision, more_tokens
    return num_left, num_packs


class ShuffledPacks:
    """Arranges epochs of ISF's packs, or under ``"random"`` of one round of ISF: shuffled, and dealt to the ranks.

    Source: Yao et al., OmniBal, ICML 2025, section 4.1. Deviation from its published code, which gives each rank one
    stretch of the packs in the order in which they were made, so that some ranks have all the full ones, and drops what
    does not fill a step: packs are shuffled, and none is dropped.
    """

    # Epochs differ in their number of steps by a few. It is known once the packs are made: tenths of a second for a
    # million samples. Empty packs fill the last step.

    def __init__(self, spec: PackingSpec, ranks: Ranks) -> None:
        self._spec, self._ranks = spec, ranks
        self._iterations = spec.iterations if spec.method == "isf" else 1
        self._num_steps: dict[int, int] = {}
        self._latest: tuple[int, Packs] | None = None

    def window_starts(self, epoch: int) -> IntArray:
        if epoch not in self._num_steps:
            self._num_steps[epoch] = len(self.window(epoch, 0)) // self._ranks.step_packs
        return np.array([0, self._num_steps[epoch]])

    def window(self, epoch: int, index: int) -> Packs:  # there is but one
        if self._latest is None or self._latest[0] != epoch:
            self._latest = epoch, self._arrange(epoch)
        return self._latest[1]

    def _arrange(self, epoch: int) -> Packs:
        spec, ranks = self._spec, self._ranks
        generator = np.random.default_rng([spec.seed, epoch])
        packs = iterative_sampling_and_filtering(
            spec.lengths, spec.limits, iterations=self._iterations, seed=generator, samples=spec.samples
        )
        num_packs = -(-len(packs) // ranks.step_packs) * ranks.step_packs
        order = np.arange(num_packs).reshape(-1, ranks.micro_batches, ranks.num_replicas)
        last = order[-1:]  # gives every rank a pack before any gets a second one
        last[:] = last.swapaxes(1, 2).reshape(last.shape)
        return deal(packs, num_packs, generator, split=False).take(order.ravel())
