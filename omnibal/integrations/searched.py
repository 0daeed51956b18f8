"""Limits of packs, and how many packs a rank runs in a step, for someone who knows how many samples a step has."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from omnibal.advise.memory import RankMemory
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limit_search import TOKEN_MULTIPLE, TOKEN_SLACKS, search_limits
from omnibal.data.limits import PackLimits, largest_load
from omnibal.data.metrics import min_packs
from omnibal.errors import InfeasibleError
from omnibal.integrations.expected import KEPT
from omnibal.integrations.padded import PLANNED_SHARE

SCORED_SAMPLES: Final = 4096
"""Packed under each pair of limits: as many tell waste to about a percent, in tenths of a second."""
ROOM: Final = 1.3
"""How far limits may exceed what the samples of a micro-batch bring on average: more is not needed to find them."""
COUNTED: Final = 2 * KEPT
"""How far the samples of a step may be from those asked for where packs are only counted, before they are planned."""

MOST_SCORED: Final = 24
"""Pairs of limits: enough to find one that wastes little, in a few seconds."""
MOST_PLANNED: Final = 6
"""Pairs of limits for which the whole epoch's steps are found, at some tenths of a second each."""


@dataclass(frozen=True)
class StepSize:
    """What decides how many samples a step has.

    Attributes:
        limits: The most a pack may hold.
        micro_batches: Packs of each rank and step.
    """

    limits: PackLimits
    micro_batches: int


def fit_step(
    lengths: SampleLengths,
    samples_per_step: int,
    *,
    batch_size: int,
    num_replicas: int,
    most: PackLimits | None = None,
    padded: bool = False,
    memory: RankMemory | None = None,
) -> StepSize:
    """Limits and micro-batches under which steps hold as many samples as were asked for, within ``KEPT`` if possible.

    Limits that are given stay where some number of micro-batches fits them. Otherwise limits are searched: those that
    hold every sample, and only where packs would then be too large for a step also smaller ones, under which larger
    samples are alone in their packs. Of all that fit, those are taken that waste least.

    Args:
        lengths: Of the dataset.
        samples_per_step: Asked for, of all ranks together.
        batch_size: Samples of a micro-batch that the device is known to hold; packs hold as many, or fewer.
        num_replicas: Data-parallel ranks.
        most: Limits that packs must keep, in place of ``batch_size``.
        padded: Whether they are for padded batches, which are planned with a part of their limits.
        memory: What ranks hold, and how much they have; of limits that are searched.

    Raises:
        InfeasibleError: The memory does not suffice for the largest sample.
    """
    search = _Search(lengths, samples_per_step, batch_size, num_replicas, padded, memory)
    if most is not None:
        given = search.sized(search.planned(most))
        if search.off(given) <= KEPT:
            return StepSize(most, given.micro_batches)
    largest = PackLimits(lengths.summary.max_vision_units, max(lengths.summary.max_llm_tokens, 1))
    smallest = PackLimits(int(lengths.vision_units.min()), max(int(lengths.llm_tokens.min()), 1))
    ceiling = search.ceiling(largest) if most is None else search.planned(most)
    holds_all = largest.vision_units <= ceiling.vision_units and largest.llm_tokens <= ceiling.llm_tokens
    found: list[StepSize] = []
    for least in (largest, smallest) if holds_all else (smallest,):
        found.append(search.best(least, ceiling, fills_batches=most is None and least == largest))
        if search.off(found[-1]) <= KEPT:
            break
    best = min(found, key=search.off)
    if search.off(best) > KEPT:
        best = min(best, search.with_fewer_tokens(best), key=search.off)
    return StepSize(planned_for(best.limits), best.micro_batches) if padded else best


class _Search:
    def __init__(
        self,
        lengths: SampleLengths,
        samples_per_step: int,
        batch_size: int,
        num_replicas: int,
        padded: bool,
        memory: RankMemory | None,
    ) -> None:
        self._lengths, self._asked, self._num_replicas = lengths, samples_per_step, num_replicas
        self._padded, self._memory = padded, memory
        self._batches = max(round(samples_per_step / (num_replicas * batch_size)), 1)
        self._batch = samples_per_step / (num_replicas * self._batches)
        self._steps: dict[StepSize, int] = {}
        self._bounds: dict[PackLimits, float] = {}
        self._fullness = 1.0  # of packs, in parts of the bound

    def planned(self, limits: PackLimits) -> PackLimits:
        """What packs are planned with."""
        if not self._padded:
            return limits
        return PackLimits(*(max(int(PLANNED_SHARE * m), 1) for m in (limits.vision_units, limits.llm_tokens)))

    def ceiling(self, largest: PackLimits) -> PackLimits:
        """Limits beyond which packs hold more samples than a batch did; every sample fits."""
        vision, tokens = self._per_batch()
        return PackLimits(
            max(round(ROOM * vision), largest.vision_units),
            max(round(TOKEN_SLACKS[-1] * ROOM * tokens), largest.llm_tokens),
        )

    def _per_batch(self) -> tuple[float, float]:
        """Vision units and tokens of a batch's samples on average."""
        summary, share = self._lengths.summary, self._batch / len(self._lengths)
        return share * summary.total_vision_units, share * summary.total_llm_tokens

    def off(self, size: StepSize) -> float:
        """Distance of a step of the whole epoch from the samples asked for; 0 where it has as many steps."""
        steps = self._num_steps(size)
        return 0.0 if steps == ceil(len(self._lengths) / self._asked) else abs(self._samples(steps) / self._asked - 1)

    def sized(self, limits: PackLimits) -> StepSize:
        """The micro-batches that come nearest; one, where this is already too much."""
        size = StepSize(limits, self._counted(limits)[0])
        # Packs that were counted are a bound: planned, they may be more, and a step may hold one pack more.
        found = self._samples(self._num_steps(size))
        again = StepSize(limits, max(round(size.micro_batches * self._asked / found), 1))
        return min(size, again, key=self.off)

    def best(self, least: PackLimits, ceiling: PackLimits, *, fills_batches: bool) -> StepSize:
        """The limits that waste least of those under which steps fit, or those under which they fit best.

        Raises:
            InfeasibleError: The memory does not suffice for any limits.
        """

        def promising(candidates: Sequence[PackLimits]) -> Iterable[PackLimits]:
            fitting = [limits for limits in candidates if self._needed(limits) <= 0]
            if not fitting:
                smallest = min(candidates, key=lambda limits: (limits.vision_units, limits.llm_tokens))
                raise InfeasibleError(
                    f"memory must hold the largest sample ({smallest.vision_units} vision units, "
                    f"{smallest.llm_tokens} LLM tokens) beside the model, got "
                    f"{self._needed(smallest) / 2**30:.1f} GiB too little; let activations be computed again, or "
                    "share more of the model"
                )
            self._calibrate(fitting)
            counted = {limits: self._counted(limits) for limits in fitting}
            near = sorted((limits for limits in fitting if counted[limits][1] <= COUNTED), key=lambda x: counted[x][1])
            if not near:
                return [min(fitting, key=lambda limits: counted[limits][1])]
            enough = [limits for limits in near if self._fills_batch(limits)] if fills_batches else []
            fewest = self._batches if enough else min(counted[limits][0] for limits in near)
            as_many = [limits for limits in enough or near if counted[limits][0] == fewest]
            return (as_many or enough or near)[:MOST_SCORED]

        lengths, ranks = self._lengths, self._num_replicas
        scored = search_limits(
            lengths, ceiling, least=least, num_replicas=ranks, num_samples=SCORED_SAMPLES, progress=promising
        )
        scored.sort(key=lambda found: self._counted(found.limits)[1] > KEPT / 2)
        tried = []
        for found in scored[:MOST_PLANNED]:
            tried.append(self.sized(found.limits))
            if self.off(tried[-1]) <= KEPT:
                return tried[-1]
        return min(tried, key=self.off)

    def with_fewer_tokens(self, size: StepSize) -> StepSize:
        """Halve the interval of token limits under which packs that hold too much come nearer; vision limits stay."""
        fewer = self._samples(self._num_steps(size)) < self._asked
        micro_batches, tokens = size.micro_batches + fewer, size.limits.llm_tokens
        least, most, tried = tokens // 2, tokens, []
        while most - least > TOKEN_MULTIPLE:
            middle = (least + most) // 2
            tried.append(StepSize(PackLimits(size.limits.vision_units, middle), micro_batches))
            if self.off(tried[-1]) <= KEPT:
                break
            if self._samples(self._num_steps(tried[-1])) > self._asked:
                most = middle
            else:
                least = middle
        return min(tried, key=self.off, default=size)

    def _num_steps(self, size: StepSize) -> int:
        if size not in self._steps:
            epoch = arrange_epoch(
                self._lengths, size.limits, num_replicas=self._num_replicas, micro_batches=size.micro_batches
            )
            self._steps[size] = epoch.num_steps
        return self._steps[size]

    def _samples(self, steps: int) -> float:
        return len(self._lengths) / steps

    def _counted(self, limits: PackLimits) -> tuple[int, float]:
        """The micro-batches that come nearest and how far off they are, by a bound of the number of packs."""
        samples = self._fullness * self._num_replicas * self._bound(limits)
        micro_batches = max(round(self._asked / samples), 1)
        return micro_batches, abs(micro_batches * samples / self._asked - 1)

    def _bound(self, limits: PackLimits) -> float:
        """Samples that a pack cannot hold more of on average."""
        if limits not in self._bounds:
            self._bounds[limits] = len(self._lengths) / min_packs(self._lengths, limits)
        return self._bounds[limits]

    def _calibrate(self, candidates: Sequence[PackLimits]) -> None:
        """Measure how far packs stay below the bound, with the limits whose steps are nearest by the bound alone."""
        size = self.sized(min(candidates, key=lambda limits: self._counted(limits)[1]))
        packs = self._num_steps(size) * size.micro_batches * self._num_replicas
        self._fullness = len(self._lengths) / packs / self._bound(size.limits)

    def _fills_batch(self, limits: PackLimits) -> bool:
        """Whether limits hold what a batch brings on average, or nearly; packs are never fuller than their limits."""
        vision, tokens = self._per_batch()
        return limits.vision_units >= (1 - KEPT) * vision and limits.llm_tokens >= (1 - KEPT) * tokens

    def _needed(self, limits: PackLimits) -> float:
        """Bytes that a rank lacks for the largest micro-batch, by counted activations; below 0 where there is room."""
        if self._memory is None:
            return 0.0
        most = planned_for(limits) if self._padded else limits
        return float(self._memory.peak_bytes(largest_load(self._lengths, most))) - self._memory.budget_bytes


def planned_for(planned: PackLimits) -> PackLimits:
    """The limits of padded batches that are planned with these."""
    return PackLimits(*(ceil(most / PLANNED_SHARE) for most in (planned.vision_units, planned.llm_tokens)))
