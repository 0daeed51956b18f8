"""Slow, obvious solvers that the fast ones must agree with."""

from collections.abc import Sequence

import numpy as np

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits


def transcribed_isf(
    lengths: SampleLengths, limits: PackLimits, iterations: int, seed: int, samples: Sequence[int] | None = None
) -> list[list[int]]:
    """OmniBal's Algorithm 1, line by line, what it leaves open settled in comments."""
    generator = np.random.default_rng(seed)
    dataset = list(range(len(lengths))) if samples is None else list(samples)
    packs: list[list[int]] = []
    for iteration in range(iterations):
        # Sampling stage
        dataset = generator.permutation(dataset).tolist()
        candidates: list[list[int]] = []
        group: list[int] = []
        for sample in dataset:
            group = [*group, sample]
            if _total(lengths.vision_units, group) > limits.vision_units or (
                _total(lengths.llm_tokens, group) > limits.llm_tokens
            ):
                candidates.append(group[:-1])
                group = [sample]
        candidates = [candidate for candidate in candidates if candidate]  # an empty group is never emitted
        if iteration == iterations - 1 and group:
            return [*packs, *candidates, group]  # the last round's groups are emitted as they stand
        # Filtering stage
        for candidate in candidates:
            if _total(lengths.vision_units, candidate) >= limits.full_vision_units or (
                _total(lengths.llm_tokens, candidate) >= limits.full_llm_tokens
            ):
                packs.append(candidate)
                dataset = [sample for sample in dataset if sample not in candidate]
        # The group that is still open stays in the dataset.
    return packs


def fewest_packs(loads: Sequence[tuple[int, int]], limits: PackLimits) -> int:
    """The least number of packs for samples of (vision units, LLM tokens); tries every placement.

    A sample over a limit takes a pack of its own.
    """
    best = len(loads)

    def place(sample: int, packs: list[tuple[int, int]]) -> None:
        nonlocal best
        if len(packs) >= best:
            return
        if sample == len(loads):
            best = len(packs)
            return
        vision, tokens = loads[sample]
        for index, (held_vision, held_tokens) in enumerate(packs):
            total = (held_vision + vision, held_tokens + tokens)
            if total[0] <= limits.vision_units and total[1] <= limits.llm_tokens:
                place(sample + 1, [*packs[:index], total, *packs[index + 1 :]])
        place(sample + 1, [*packs, (vision, tokens)])

    place(0, [])
    return best


def _total(column: np.ndarray, group: Sequence[int]) -> int:
    return sum(int(column[sample]) for sample in group)
