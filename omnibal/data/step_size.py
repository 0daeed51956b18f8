"""Limits of packs under which a step holds the samples that were asked for, and how many packs of a rank that takes.

``fit_step`` finds them for a trainer, among those that waste least; ``limits_of_step`` for so many packs, in
milliseconds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Final, Protocol

import numpy as np

from omnibal.cost import FloatArray, Load
from omnibal.data.balance.planner import WINDOW, blocks_of
from omnibal.data.balance.rules import survey
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limit_search import (
    NEARBY,
    SOUND_SLACKS,
    TOKEN_MULTIPLE,
    TOKEN_SLACKS,
    TRAP_WASTE,
    forced_waste,
    search_limits,
)
from omnibal.data.limits import MOST, PackLimits, fullest_load, largest_limits
from omnibal.data.metrics import min_packs
from omnibal.data.packing_spec import PackingSpec
from omnibal.errors import InfeasibleError

# Of ``fit_step``. Each stage looks closer at fewer pairs: a bound on packs, a part packed, the epoch planned.
KEPT: Final = 0.05  # how far the samples of a step may be from those that were asked for
SEVERAL: Final = 1.2  # samples of a pack on average above which something is packed
COUNTED: Final = 2 * KEPT  # how far the samples of a step may be off by the bound, which planning may mend
MOST_SCORED: Final = 24  # pairs whose waste is measured, in a few seconds
SCORED_SAMPLES: Final = 4096  # packed under each of them: they tell waste to about a percent, in tenths of a second
MOST_PLANNED: Final = 6  # pairs under which the whole epoch is planned, at some tenths of a second each
ROOM: Final = 1.3  # how far limits may exceed what the samples of a micro-batch bring on average

# Of ``limits_of_step``.
SURVEYED: Final = 1 << 14  # samples that tell how many packs all samples need
EPOCH: Final = 1 << 20  # samples of an epoch of unknown size
WIDEST: Final = 4  # limits are at most so many times those in whose proportion they are
BISECTIONS: Final = 24
PLANNED_SHARE: Final = 0.75
"""Share of the limits of padded batches that packs are planned with: the rest is for padding, and for what sorting
leaves uneven.

On made-up tile lengths at 8 ranks and limits of 16 tiles and 4096 tokens, 1 % of the steps then have a larger batch, by
2 % at the most; with 0.8 it is 29 % of the steps, by 15 %.
"""


class DeviceMemory(Protocol):
    @property
    def budget_bytes(self) -> int: ...

    def peak_bytes(self, loads: Load) -> FloatArray: ...


@dataclass(frozen=True)
class StepSize:
    """What decides how many samples a step has: the limits of a pack, and the packs of each rank."""

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
    longest_row: int | None = None,
    memory: DeviceMemory | None = None,
) -> StepSize:
    """Limits and micro-batches under which steps hold as many samples as were asked for, within ``KEPT`` if possible.

    Args:
        samples_per_step: Samples of a step that are asked for, of all ranks together.
        batch_size: Samples of a micro-batch that the device is known to hold; packs hold as many, or fewer.
        most: Limits that are given; others are smaller.
        padded: Whether limits are for padded batches, which are planned with a part of them.
        longest_row: The most tokens of a pack in which the model computes samples as it does alone.
        memory: What ranks hold, and how much they have; for limits that are searched.
    """
    # 0. Memory is asked where what is found without it does not fit.
    # 1. Limits that are given stay where some number of micro-batches fits them, or nothing fits better.
    # 2. Limits that hold every sample are searched; of those that fit, the ones that waste least are taken.
    # 3. Where packs are then too large for a step: also smaller limits, under which larger samples are alone in packs.
    # 4. Where packs still hold too many samples, as of texts, whose limits are few: fewer tokens, found by halving.
    # 5. Packs of one sample each, which keep the samples of a step and pack nothing, where all else is far off.
    # 6. Where all these are more packs than there were batches: as many, if they hold a step's samples as well.
    if memory is not None:
        options = {"batch_size": batch_size, "num_replicas": num_replicas, "most": most, "longest_row": longest_row}
        size = fit_step(lengths, samples_per_step, padded=padded, **options)  # type: ignore[arg-type]
        if lacking_bytes(lengths, size.limits, memory) <= 0:
            return size
    search = _StepSearch(lengths, samples_per_step, batch_size, num_replicas, padded, memory)
    if most is not None:
        given = search.sized(planned_with(most) if padded else most)
        if search.off(given) <= KEPT:
            return StepSize(most, given.micro_batches)
    # Limits that are given without one of sounds stay without it.
    hears = bool(lengths.summary.total_sound_units) and not padded and (most is None or most.sound_units is not None)
    largest = largest_limits(lengths, hears=hears)
    smallest = PackLimits(int(lengths.vision_units.min()), max(int(lengths.llm_tokens.min()), 1))
    ceiling = search.ceiling(largest) if most is None else given.limits
    if longest_row is not None and ceiling.llm_tokens > longest_row:
        ceiling = PackLimits(ceiling.vision_units, longest_row, sound_units=ceiling.sound_units)
    found: list[StepSize] = []
    for least in (largest, smallest) if largest.within(ceiling) else (smallest,):
        found.append(search.best(least, ceiling, fills_batches=most is None and least == largest))
        if search.lack(found[-1]) <= KEPT:
            break
    else:
        fewer = [search.with_fewer_tokens(size) for size in (min(found, key=search.lack), search.sized(ceiling))]
        found += [size for size in fewer if search.fits(size.limits)]
        if all(search.off(size) > KEPT for size in found):
            found.append(StepSize(smallest, max(round(samples_per_step / num_replicas), 1)))
    best = min(found, key=search.lack)
    if best.micro_batches > search.batches and not hears:
        # More packs than batches: where ranks meet in each, each waits for a large sample.
        as_many = StepSize(limits_of_step(lengths, samples_per_step, num_replicas * search.batches), search.batches)
        if as_many.limits.within(ceiling) and search.fits(as_many.limits):
            best = min(as_many, best, key=lambda size: max(search.lack(size), KEPT))
    if most is not None and search.lack(given) <= search.lack(best):
        return StepSize(most, given.micro_batches)
    return StepSize(_of_planned(best.limits), best.micro_batches) if padded else best


def holds_one(samples_of_pack: float) -> bool:
    """Whether packs hold one sample each, or hardly more: nothing is packed."""
    return samples_of_pack <= SEVERAL


class _StepSearch:
    """How near steps come to the samples asked for, under limits that packs are planned with."""

    def __init__(
        self,
        lengths: SampleLengths,
        asked: int,
        batch_size: int,
        num_replicas: int,
        padded: bool,
        memory: DeviceMemory | None,
    ) -> None:
        self.lengths, self.asked, self.num_replicas = lengths, asked, num_replicas
        self.padded, self.memory = padded, memory
        self.batches = max(round(asked / (num_replicas * batch_size)), 1)
        # What the samples of a batch bring on average.
        share, summary = asked / (num_replicas * self.batches) / len(lengths), lengths.summary
        self.batch_vision, self.batch_tokens = share * summary.total_vision_units, share * summary.total_llm_tokens
        self.batch_sound = share * (summary.total_sound_units or 0)
        # Samples that a pack cannot hold more of on average; then samples of a pack as planned, over that bound.
        self.bound, self.fullness = cache(lambda limits: len(lengths) / min_packs(lengths, limits)), 1.0
        self.steps = cache(self._steps)

    def _steps(self, size: StepSize) -> int:
        ranks, count = self.num_replicas, size.micro_batches
        return arrange_epoch(self.lengths, size.limits, num_replicas=ranks, micro_batches=count).num_steps

    def samples(self, size: StepSize) -> float:
        return len(self.lengths) / self.steps(size)

    def off(self, size: StepSize) -> float:
        """|samples of a step / those asked for - 1|; 0 where an epoch has as many steps."""
        is_kept = self.steps(size) == math.ceil(len(self.lengths) / self.asked)
        return 0.0 if is_kept else abs(self.samples(size) / self.asked - 1)

    def lack(self, size: StepSize) -> float:
        """How far off the samples of a step are, and ``COUNTED`` more if packs could hold more than one sample each."""
        one = self.asked > self.num_replicas and holds_one(self.samples(size) / self.num_replicas / size.micro_batches)
        return self.off(size) + COUNTED * one

    def counted(self, limits: PackLimits) -> tuple[int, float]:
        """The micro-batches that come nearest, and how far off they are, by the bound alone."""
        samples = self.fullness * self.num_replicas * self.bound(limits)
        micro_batches = max(round(self.asked / samples), 1)
        return micro_batches, abs(micro_batches * samples / self.asked - 1)

    def sized(self, limits: PackLimits) -> StepSize:
        """The micro-batches that come nearest; one, where this is already too much."""
        size = StepSize(limits, self.counted(limits)[0])
        # Planned, packs may be more than the bound, and a step may hold one pack more.
        again = StepSize(limits, max(round(size.micro_batches * self.asked / self.samples(size)), 1))
        return min(size, again, key=self.off)

    def ceiling(self, largest: PackLimits) -> PackLimits:
        """Limits beyond which packs hold more samples than a batch did; every sample fits."""
        tokens = round(TOKEN_SLACKS[-1] * ROOM * self.batch_tokens)
        sounds = None
        if largest.sound_units is not None:
            sounds = max(round(SOUND_SLACKS[-1] * ROOM * self.batch_sound), largest.sound_units)
        vision = max(round(ROOM * self.batch_vision), largest.vision_units)
        return PackLimits(vision, max(tokens, largest.llm_tokens), sound_units=sounds)

    def best(self, least: PackLimits, ceiling: PackLimits, *, fills_batches: bool) -> StepSize:
        """The limits that waste least of those under which steps fit, or those under which they fit best."""
        scored = search_limits(
            self.lengths, ceiling, least=least, num_replicas=self.num_replicas, num_samples=SCORED_SAMPLES,
            choose=partial(self._promising, fills_batches=fills_batches),
        )  # fmt: skip
        scored.sort(key=lambda found: self.counted(found.limits)[1] > KEPT / 2)  # stable: by waste among these
        tried = []
        for found in scored[:MOST_PLANNED]:
            tried.append(self.sized(found.limits))
            if self.off(tried[-1]) <= KEPT:
                return tried[-1]
        return min(tried, key=self.off)

    def _promising(self, candidates: Sequence[PackLimits], *, fills_batches: bool) -> Sequence[PackLimits]:
        fitting = [limits for limits in candidates if self.fits(limits)]
        if not fitting:
            smallest = min(candidates, key=lambda limits: (limits.vision_units, limits.llm_tokens))
            raise InfeasibleError(
                f"memory must hold the largest sample ({smallest.vision_units} vision units, "
                f"{smallest.llm_tokens} LLM tokens) beside the model, got "
                f"{self._lacking_bytes(smallest) / 2**30:.1f} GiB too little; use gradient checkpointing, or a higher "
                "ZeRO stage"
            )
        if not fills_batches:
            fitting = [limits for limits in fitting if not holds_one(self.bound(limits))] or fitting
        # 1. How far packs stay below the bound is measured where steps are nearest by the bound alone.
        size = self.sized(min(fitting, key=lambda limits: self.counted(limits)[1]))
        packs = self.steps(size) * size.micro_batches * self.num_replicas
        self.fullness = len(self.lengths) / packs / self.bound(size.limits)
        # 2. Keep limits whose steps come near by the bound.
        counted = {limits: self.counted(limits) for limits in fitting}
        near = sorted((limits for limits in fitting if counted[limits][1] <= COUNTED), key=lambda x: counted[x][1])
        if not near:
            return [min(fitting, key=lambda limits: counted[limits][1])]
        # 3. Of these, packs that hold what the user's batches held, as many as the batches were (larger packs may not
        # fit into memory); else as few packs as can be.
        enough = [limits for limits in near if fills_batches and self._fills_batch(limits)]
        fewest = self.batches if enough else min(counted[limits][0] for limits in near)
        as_many = [limits for limits in enough or near if counted[limits][0] == fewest]
        return (as_many or enough or near)[:MOST_SCORED]

    def with_fewer_tokens(self, size: StepSize) -> StepSize:
        """Halve the interval of token limits under which packs that hold too much come nearer; others stay."""
        micro_batches, tokens = size.micro_batches + (self.samples(size) < self.asked), size.limits.llm_tokens
        least, most, tried = tokens // 2, tokens, []
        while most - least > TOKEN_MULTIPLE:
            middle = (least + most) // 2
            limits = PackLimits(size.limits.vision_units, middle, sound_units=size.limits.sound_units)
            tried.append(StepSize(limits, micro_batches))
            if self.off(tried[-1]) <= KEPT:
                break
            least, most = (least, middle) if self.samples(tried[-1]) > self.asked else (middle, most)
        return min(tried, key=self.off, default=size)

    def _fills_batch(self, limits: PackLimits) -> bool:
        """Whether limits hold what a batch brings on average, or nearly; packs are never fuller than their limits."""
        holds_vision = limits.vision_units >= (1 - KEPT) * self.batch_vision
        holds_sound = limits.most("sound_units") >= (1 - KEPT) * self.batch_sound
        return holds_vision and holds_sound and limits.llm_tokens >= (1 - KEPT) * self.batch_tokens

    def fits(self, limits: PackLimits) -> bool:
        return self._lacking_bytes(limits) <= 0

    def _lacking_bytes(self, limits: PackLimits) -> float:
        if self.memory is None:
            return 0.0
        return lacking_bytes(self.lengths, _of_planned(limits) if self.padded else limits, self.memory)


def lacking_bytes(lengths: SampleLengths, limits: PackLimits, memory: DeviceMemory) -> float:
    """Bytes that a rank lacks for the fullest micro-batch, by counted activations; below 0 where there is room."""
    return float(memory.peak_bytes(fullest_load(lengths, limits))) - memory.budget_bytes


def planned_with(limits: PackLimits) -> PackLimits:
    return PackLimits(*(max(int(PLANNED_SHARE * most), 1) for most in (limits.vision_units, limits.llm_tokens)))


def _of_planned(planned: PackLimits) -> PackLimits:
    return PackLimits(*(math.ceil(most / PLANNED_SHARE) for most in (planned.vision_units, planned.llm_tokens)))


def limits_of_step(lengths: SampleLengths, samples_per_step: float, packs: int) -> PackLimits:
    """Limits in about the proportion of the data under which so many packs hold the samples of a step.

    At least half of the samples fit; a larger one has a pack of its own. Where the vision limit is a trap, the nearest
    above that is none is taken, and tokens limit the step.
    """
    part, summary, share = _surveyed(lengths), lengths.summary, samples_per_step / packs / len(lengths)
    vision, tokens = share * summary.total_vision_units, share * summary.total_llm_tokens
    least = (int(np.median(part.vision_units)), max(int(np.median(part.llm_tokens)), 1))

    def scaled(factor: float) -> PackLimits:
        return PackLimits(_within(least[0], factor * vision), _within(least[1], factor * tokens))

    # First both limits grow together; then, with a vision limit that wastes nothing, that of tokens alone.
    factor = _smallest(
        lambda factor: samples_made(part, scaled(factor), packs) >= samples_per_step, 1 / WIDEST**2, WIDEST
    )
    units = scaled(factor).vision_units

    def wastes(tried: int) -> bool:
        counts = np.bincount(np.minimum(part.vision_units, tried), minlength=tried + 1)
        return forced_waste(counts) > TRAP_WASTE

    if units:
        units = next((units + step for step in range(max(NEARBY) + 1) if not wastes(units + step)), units)
    return PackLimits(units, math.ceil(_smallest(
        lambda limit: samples_made(part, PackLimits(units, math.ceil(limit)), packs) >= samples_per_step,
        least[1], _within(least[1], WIDEST * factor * tokens),
    )))  # fmt: skip


def samples_made(lengths: SampleLengths, limits: PackLimits, packs: int) -> float:
    """Samples of a step of so many packs, as ``BalancedPacks`` sizes a long epoch; nothing is planned."""
    demand = survey(PackingSpec(_surveyed(lengths), limits))._replace(num_samples=EPOCH)
    return EPOCH * packs / demand.packs_needed(blocks_of(EPOCH), WINDOW)


def _surveyed(lengths: SampleLengths) -> SampleLengths:
    if len(lengths) <= SURVEYED:
        return lengths
    return lengths.take(np.random.default_rng(0).permutation(len(lengths))[:SURVEYED])


def _within(least: int, limit: float) -> int:
    return min(max(math.ceil(limit), least), MOST)


def _smallest(suffices: Callable[[float], bool], low: float, high: float) -> float:
    """About the smallest number from ``low`` to ``high`` that suffices, by bisection of ratios; ``high`` if none."""
    if suffices(low):
        return low
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high
