"""The search for pack limits that waste little under a ceiling.

Limits decide more than the packer does: what wastes room is how samples' sizes divide the limit. Some vision limits are
traps, which waste room whatever the packer does: with samples of 1, 3, 4 and 5 tiles a limit of 12 wastes a tenth of
every pack, 10 and 16 almost nothing.

Every choice of limits asks ``search_limits``: a plan takes the best for each number of micro-batches, ``fit_step`` the
ones under which a step of a trainer holds the samples that were asked for.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits, largest_limits
from omnibal.data.metrics import dist_ratio, histogram_bound, histogram_volume, load_histograms, volume_bound
from omnibal.data.packing_spec import DEFAULT_COST, Method
from omnibal.errors import ConfigError, InfeasibleError

MOST_VISION_LIMITS: Final = 48
MOST_TEXT_LIMITS: Final = 24  # where no sample has an image
TOKEN_SLACKS: Final = (0.95, 1.05, 1.15, 1.3, 1.6)  # token limits tried, in multiples of what a full vision load brings
TOKEN_MULTIPLE: Final = 64
SOUND_SLACKS: Final = (1.1, 1.4)  # limits of an encoder beside the ViT, in multiples of what a full pack brings
SCORED_STEPS: Final = 8  # that the drawn samples fill at least: figures of fewer are chance
LEAST_DRAWN, MOST_DRAWN = 16_384, 65_536
TRAP_WASTE: Final = 0.03  # a limit that wastes more than this by arithmetic alone deserves a warning
NEARBY: Final = range(-4, 5)  # limits that a warning considers as a remedy, relative to the trap


@dataclass(frozen=True)
class ScoredLimits:
    """Limits, and what came of packing the same random samples under them."""

    limits: PackLimits
    packs_over_volume: float  # (packs − volume bound) / volume bound
    step_share: float  # packs of a step / volume bound: so many may be empty, to fill the last step
    dist_ratio_vision: float
    dist_ratio_cost: float  # of the cost of a micro-batch in the LLM
    samples_per_pack: float
    dist_ratio_sound: float = 0.0

    @property
    def waste(self) -> float:
        """Sum of the shares of room and time that are lost: what the search makes small."""
        # Packs that only fill the last step of these few samples do not count: a whole epoch has more steps.
        room = max(self.packs_over_volume - self.step_share, 0.0)
        return room + self.dist_ratio_vision + self.dist_ratio_sound + self.dist_ratio_cost


def search_limits(
    lengths: SampleLengths,
    ceiling: PackLimits,
    *,
    least: PackLimits | None = None,
    num_replicas: int = 8,
    method: Method = "balanced",
    num_samples: int | None = None,
    seed: int = 0,
    choose: Callable[[Sequence[PackLimits]], Iterable[PackLimits]] = iter,
) -> list[ScoredLimits]:
    """Try limits under a ceiling and rank them by what they waste.

    Args:
        ceiling: The largest limits. With ``sound_units`` a limit is searched for these, too; methods other than
            ``"balanced"`` take none.
        least: The smallest limits; by default those that hold the largest sample. A sample over the limits gets a pack
            of its own.
        num_samples: Samples drawn and packed under each pair; by default what fills 8 steps under the ceiling, within
            16,384 and 65,536.
        choose: Which of all candidates are packed; ``tqdm`` serves, too.

    Returns:
        Scored limits, least waste first; where waste is equal, more samples per pack, then fewer tokens first.
    """
    # Vision limits run from the largest sample to the ceiling (every integer, or 48 in equal ratios where there are
    # more), each with token limits of 0.95 to 1.6 times what a full vision load brings on average. They end before the
    # ceiling where packs would be so large that the drawn samples fill fewer than 8 steps, too few to measure balance
    # on.
    if not len(lengths):
        raise ConfigError("lengths must hold at least one sample, got none")
    hears = ceiling.sound_units is not None and lengths.sound_units is not None
    least = least or largest_limits(lengths, hears=hears)
    if not least.within(ceiling):
        sounds = f", {least.sound_units} sound units" if least.sound_units else ""
        given = f", {ceiling.sound_units}" if least.sound_units else ""
        raise InfeasibleError(
            f"ceiling must hold the largest sample ({least.vision_units} vision units, {least.llm_tokens} LLM tokens"
            f"{sounds}), got {ceiling.vision_units} and {ceiling.llm_tokens}{given}"
        )
    part = _draw(lengths, ceiling, num_replicas, num_samples, seed)
    most = _worth_scoring(part, least, ceiling, num_replicas)
    chosen = choose(list(dict.fromkeys(_candidates(lengths, least, most))))
    scored = [_score(part, limits, num_replicas, method, seed) for limits in chosen]
    return sorted(scored, key=lambda found: (round(found.waste, 4), -found.samples_per_pack, found.limits.llm_tokens))


def _draw(
    lengths: SampleLengths, most: PackLimits, num_replicas: int, num_samples: int | None, seed: int
) -> SampleLengths:
    if num_samples is None:
        vision, tokens = lengths.summary.total_vision_units, lengths.summary.total_llm_tokens
        share = min(most.vision_units / vision if vision else 1, most.llm_tokens / max(tokens, 1))  # of the epoch
        if lengths.summary.total_sound_units:
            share = min(share, most.most("sound_units") / lengths.summary.total_sound_units)
        per_pack = share * len(lengths)
        num_samples = min(max(math.ceil(per_pack * num_replicas * SCORED_STEPS), LEAST_DRAWN), MOST_DRAWN)
    chosen = np.random.default_rng(seed).permutation(len(lengths))[:num_samples]
    return lengths.take(np.sort(chosen))


def _worth_scoring(part: SampleLengths, least: PackLimits, most: PackLimits, num_replicas: int) -> PackLimits:
    """The largest limits, or those under which the samples still fill steps; both hold every sample."""
    packs = SCORED_STEPS * num_replicas
    vision, tokens = part.summary.total_vision_units / packs, part.summary.total_llm_tokens / packs
    return PackLimits(
        max(min(most.vision_units, math.ceil(vision)), least.vision_units),
        max(min(most.llm_tokens, math.ceil(tokens * TOKEN_SLACKS[-1])), least.llm_tokens),
        sound_units=most.sound_units,
    )


def _candidates(lengths: SampleLengths, least: PackLimits, most: PackLimits) -> Iterator[PackLimits]:
    summary = lengths.summary
    for pair in _pairs(lengths, least, most):
        if most.sound_units is None or not summary.total_sound_units:
            yield pair
            continue
        # A full pack holds this share of the epoch.
        share = pair.llm_tokens / max(summary.total_llm_tokens, 1)
        if summary.total_vision_units:
            share = min(share, pair.vision_units / summary.total_vision_units)
        for slack in SOUND_SLACKS:
            sounds = math.ceil(slack * share * summary.total_sound_units)
            yield replace(pair, sound_units=min(max(sounds, least.sound_units or 0), most.sound_units))


def _pairs(lengths: SampleLengths, least: PackLimits, most: PackLimits) -> Iterator[PackLimits]:
    units, tokens = lengths.summary.total_vision_units, lengths.summary.total_llm_tokens
    if units == 0:
        for token_limit in _spread(least.llm_tokens, most.llm_tokens, MOST_TEXT_LIMITS):
            yield PackLimits(0, token_limit)
        return
    for vision_limit in _spread(least.vision_units, most.vision_units, MOST_VISION_LIMITS):
        for slack in TOKEN_SLACKS:
            balanced = -(-int(vision_limit * tokens / units * slack) // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
            yield PackLimits(vision_limit, min(max(balanced, least.llm_tokens), most.llm_tokens))


def _spread(least: int, most: int, count: int) -> list[int]:
    """All integers from ``least`` to ``most``, or ``count`` of them in about equal ratios."""
    if most - least < count:
        return list(range(least, most + 1))
    return sorted({round(value) for value in np.geomspace(max(least, 1), most, count)})


def _score(part: SampleLengths, limits: PackLimits, num_replicas: int, method: Method, seed: int) -> ScoredLimits:
    epoch = arrange_epoch(part, limits, num_replicas=num_replicas, method=method, seed=seed)
    packs, steps = epoch.packs, epoch.steps
    num_packs = int((packs.sizes > 0).sum())
    full = (packs.sizes[steps] > 0).all(axis=(1, 2))
    steps = steps[full] if full.any() else steps  # the end of a part of the samples says nothing of an epoch's steps
    load, bound = packs.load(part), max(volume_bound(part, limits), 1)
    return ScoredLimits(
        limits=limits,
        packs_over_volume=num_packs / bound - 1,
        step_share=num_replicas / bound,
        dist_ratio_vision=dist_ratio(load.vision_units[steps]),
        dist_ratio_cost=dist_ratio(DEFAULT_COST(load)[steps]),
        samples_per_pack=len(part) / num_packs,
        dist_ratio_sound=dist_ratio(load.sound_units[steps]),
    )


def find_trap(lengths: SampleLengths, limits: PackLimits) -> str | None:
    """Say why a vision limit wastes more than 3 % whatever the packer does, and which nearby limit does not; or None.

    >>> print(find_trap(SampleLengths([5, 3] * 50, [100] * 100), PackLimits(9, 9000)))
    vision limit 9 is a trap: the samples need at least 50 packs where their volume asks for 45 (+11 %); no more \
than 1 of 5 vision units (50 % of the samples) fits, which leaves 4 of 9 to the 50 % that are so small; 8 wastes 0.0 %
    """
    _, (vision, *_) = load_histograms(lengths, limits)
    limit = limits.vision_units
    if forced_waste(vision) <= TRAP_WASTE:
        return None
    # The size that leaves most room when packs are filled with it alone, weighed by its volume.
    sizes, largest = np.arange(1, limit + 1), int(np.flatnonzero(vision)[-1])
    size = int(sizes[np.argmax(vision[1:] * sizes * (limit % sizes))])
    fitting, free = divmod(limit, size)
    shares = 100 * vision / vision[1:].sum()

    def waste_under(other: int) -> float:  # no sample exceeds it
        kept = vision[: other + 1]
        return forced_waste(np.pad(kept, (0, other + 1 - len(kept))))

    nearby = [limit + step for step in NEARBY if step and limit + step >= largest]
    waste, remedy = min((waste_under(other), other) for other in nearby)
    return (
        f"vision limit {limit} is a trap: the samples need at least {histogram_bound(vision)} packs where their volume "
        f"asks for {histogram_volume(vision)} (+{100 * forced_waste(vision):.0f} %); no more than {fitting} of {size} "
        f"vision units ({shares[size]:.0f} % of the samples) fit{'s' if fitting == 1 else ''}, which leaves {free} of "
        f"{limit} to the {shares[1 : free + 1].sum():.0f} % that are so small"
        + (f"; {remedy} wastes {100 * waste:.1f} %" if waste <= TRAP_WASTE else "")
    )


def forced_waste(counts: IntArray) -> float:
    """Share of packs beyond the volume that no packer can avoid, for ``counts[i]`` samples of size ``i``.

    The limit is ``len(counts) − 1``.
    """
    volume = histogram_volume(counts)
    return histogram_bound(counts) / volume - 1 if volume else 0.0
