"""Limits of packs for someone who knows only how many samples a micro-batch had."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from omnibal.advise.memory import RankMemory
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limit_search import TOKEN_SLACKS, search_limits
from omnibal.data.limits import PackLimits, largest_load
from omnibal.errors import InfeasibleError
from omnibal.integrations.expected import KEPT
from omnibal.integrations.padded import PLANNED_SHARE

SCORED_SAMPLES: Final = 4096
"""Packed under each pair of limits: as many tell waste to about a percent, in tenths of a second."""
ROOM: Final = 1.3
"""How far limits may exceed what the samples of a micro-batch bring on average: more is not needed to find them."""


def limits_for(
    lengths: SampleLengths,
    batch_size: int,
    *,
    num_replicas: int,
    micro_batches: int,
    padded: bool = False,
    memory: RankMemory | None = None,
) -> PackLimits:
    """The limits that waste least among those under which packs hold as many samples as batches did.

    Where one sample is larger than so many are on average, packs hold more: a limit must hold every sample. Where
    memory does not suffice for so many, they hold fewer.

    Args:
        lengths: Of the dataset.
        batch_size: Samples of a micro-batch.
        num_replicas: Data-parallel ranks.
        micro_batches: Of each rank and step.
        padded: Whether they are for padded batches, which are planned with a part of their limits.
        memory: What ranks hold, and how much they have.

    Raises:
        InfeasibleError: The memory does not suffice for the largest sample.
    """
    summary, count = lengths.summary, len(lengths)
    vision, tokens = batch_size * summary.total_vision_units / count, batch_size * summary.total_llm_tokens / count
    most = PackLimits(
        max(round(ROOM * vision), summary.max_vision_units),
        max(round(TOKEN_SLACKS[-1] * ROOM * tokens), summary.max_llm_tokens, 1),
    )

    def promising(candidates: Sequence[PackLimits]) -> Iterable[PackLimits]:
        """Those that so many samples fill on average, or nearly; packs are never fuller than their limits."""

        def holds(limits: PackLimits) -> float:
            return batch_size * min(
                limits.vision_units / vision if vision else float("inf"), limits.llm_tokens / max(tokens, 1)
            )

        fitting = [limits for limits in candidates if _needed(memory, lengths, limits, padded) <= 0]
        if not fitting:
            least = min(candidates, key=lambda limits: (limits.vision_units, limits.llm_tokens))
            raise InfeasibleError(
                f"memory must hold the largest sample ({least.vision_units} vision units, {least.llm_tokens} LLM "
                f"tokens) beside the model, got {_needed(memory, lengths, least, padded) / 2**30:.1f} GiB too little; "
                "let activations be computed again, or share more of the model"
            )
        enough = [limits for limits in fitting if holds(limits) >= (1 - KEPT) * batch_size]
        return enough or fitting

    scored = search_limits(lengths, most, num_replicas=num_replicas, num_samples=SCORED_SAMPLES, progress=promising)
    wanted = batch_size * num_replicas * micro_batches

    def off(limits: PackLimits) -> float:
        """How far a step of the whole epoch is from the samples that it held."""
        epoch = arrange_epoch(lengths, limits, num_replicas=num_replicas, micro_batches=micro_batches)
        return abs(count / epoch.num_steps / wanted - 1)

    offs = [off(found.limits) for found in scored]  # the steps of balanced epochs are known before they are planned
    kept = [found for found, away in zip(scored, offs, strict=True) if away <= KEPT]
    chosen = (kept[0] if kept else scored[int(np.argmin(offs))]).limits
    return planned_for(chosen) if padded else chosen


def _needed(memory: RankMemory | None, lengths: SampleLengths, limits: PackLimits, padded: bool) -> float:
    """Bytes that a rank lacks for the largest micro-batch, by counted activations; below 0 where there is room."""
    if memory is None:
        return 0.0
    most = planned_for(limits) if padded else limits
    return float(memory.peak_bytes(largest_load(lengths, most))) - memory.budget_bytes


def planned_for(planned: PackLimits) -> PackLimits:
    """The limits of padded batches that are planned with these."""
    return PackLimits(round(planned.vision_units / PLANNED_SHARE), round(planned.llm_tokens / PLANNED_SHARE))
