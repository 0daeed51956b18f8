"""What a trainer's steps become: limits and packs of a step by its samples, and what is expected of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from typing import Any, Final

import numpy as np

from omnibal.advise.batches import Batching, Samples, padded_batches, random_packs
from omnibal.advise.gains import Way, gain_in_words
from omnibal.advise.memory import RankMemory
from omnibal.advise.models import adapted_profile
from omnibal.advise.wait import MEETINGS, CostByPhase, Sharding, wait
from omnibal.cost import FloatArray, Load
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limit_search import SOUND_SLACKS, TOKEN_MULTIPLE, TOKEN_SLACKS, search_limits
from omnibal.data.limits import PackLimits, largest_limits, largest_load
from omnibal.data.metrics import dist_ratio, min_packs
from omnibal.data.source_draws import typical_lengths
from omnibal.errors import ConfigError, InfeasibleError
from omnibal.families import layer_records
from omnibal.formats.ties import as_tied, is_tied
from omnibal.packs.loading import PackSampler
from omnibal.packs.padded import PLANNED_SHARE, PaddedSampler
from omnibal.profile.counted import analytic_profile, device_to_count
from omnibal.profile.records import ModelProfile

KEPT: Final = 0.05  # how far the samples of a step may be from those that were asked for
SEVERAL: Final = 1.2  # samples of a pack on average above which something is packed

# Of the search for limits. Each stage looks closer at fewer pairs: a bound on packs, a part packed, the epoch planned.
COUNTED: Final = 2 * KEPT  # how far the samples of a step may be off by the bound, which planning may mend
MOST_SCORED: Final = 24  # pairs whose waste is measured, in a few seconds
SCORED_SAMPLES: Final = 4096  # packed under each of them: they tell waste to about a percent, in tenths of a second
MOST_PLANNED: Final = 6  # pairs under which the whole epoch is planned, at some tenths of a second each
ROOM: Final = 1.3  # how far limits may exceed what the samples of a micro-batch bring on average

# Of what is expected.
COMPARED_STEPS: Final = 64  # of each way to batch
LEAST_GAIN: Final = 1.02  # below it a gain is none: counted costs are no better
SHOWN_WHOLE: Final = 100  # samples of a step from which on no tenths are shown
VISION, PROJECTOR = ("vision_tower", "visual", "vision_model"), ("multi_modal_projector", "connector", "merger")
SOUND: Final = "audio_tower"


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
    memory: RankMemory | None = None,
) -> StepSize:
    """Limits and micro-batches under which steps hold as many samples as were asked for, within ``KEPT`` if possible.

    Args:
        samples_per_step: Samples of a step that are asked for, of all ranks together.
        batch_size: Samples of a micro-batch that the device is known to hold; packs hold as many, or fewer.
        padded: Whether limits are for padded batches, which are planned with a part of them.
        longest_row: The most tokens of a pack in which the model computes samples as it does alone.
        memory: What ranks hold, and how much they have; for limits that are searched.
    """
    # 1. Limits that are given stay where some number of micro-batches fits them, or nothing fits better.
    # 2. Limits that hold every sample are searched; of those that fit, the ones that waste least are taken.
    # 3. Where packs are then too large for a step: also smaller limits, under which larger samples are alone in packs.
    # 4. Where packs still hold too many samples, as of texts, whose limits are few: fewer tokens, found by halving.
    # 5. Packs of one sample each, which keep the samples of a step and pack nothing, where all else is far off.
    search = _LimitsSearch(lengths, samples_per_step, batch_size, num_replicas, padded, memory)
    if most is not None:
        given = search.sized(_scaled(most, PLANNED_SHARE) if padded else most)
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
        found += [search.with_fewer_tokens(size) for size in (min(found, key=search.lack), search.sized(ceiling))]
        if all(search.off(size) > KEPT for size in found):
            found.append(StepSize(smallest, max(round(samples_per_step / num_replicas), 1)))
    best = min(found, key=search.lack)
    if most is not None and search.lack(given) <= search.lack(best):
        return StepSize(most, given.micro_batches)
    if padded:
        return StepSize(_unscaled(best.limits), best.micro_batches)
    return best


def holds_one(samples_of_pack: float) -> bool:
    """Whether packs hold one sample each, or hardly more: nothing is packed."""
    return samples_of_pack <= SEVERAL


def _scaled(limits: PackLimits, share: float) -> PackLimits:
    return PackLimits(*(max(int(share * most), 1) for most in (limits.vision_units, limits.llm_tokens)))


def _unscaled(planned: PackLimits) -> PackLimits:
    """The limits of padded batches that are planned with these."""
    return PackLimits(*(ceil(most / PLANNED_SHARE) for most in (planned.vision_units, planned.llm_tokens)))


@dataclass
class _LimitsSearch:
    """How near steps come to the samples asked for, under limits that packs are planned with."""

    lengths: SampleLengths
    asked: int
    batch_size: int
    num_replicas: int
    padded: bool
    memory: RankMemory | None
    steps: dict[StepSize, int] = field(default_factory=dict)
    """Steps of the whole epoch, as planned."""
    fullness = 1.0
    """Samples of a pack as planned, over the bound."""

    def __post_init__(self) -> None:
        self.batches = max(round(self.asked / (self.num_replicas * self.batch_size)), 1)
        share = self.asked / (self.num_replicas * self.batches) / len(self.lengths)
        summary = self.lengths.summary
        # What the samples of a batch bring on average.
        self.batch_vision, self.batch_tokens = share * summary.total_vision_units, share * summary.total_llm_tokens
        self.batch_sound = share * (summary.total_sound_units or 0)
        # Samples that a pack cannot hold more of on average.
        self.bound = cache(lambda limits: len(self.lengths) / min_packs(self.lengths, limits))

    def ceiling(self, largest: PackLimits) -> PackLimits:
        """Limits beyond which packs hold more samples than a batch did; every sample fits."""
        tokens = round(TOKEN_SLACKS[-1] * ROOM * self.batch_tokens)
        sounds = None
        if largest.sound_units is not None:
            sounds = max(round(SOUND_SLACKS[-1] * ROOM * self.batch_sound), largest.sound_units)
        vision = max(round(ROOM * self.batch_vision), largest.vision_units)
        return PackLimits(vision, max(tokens, largest.llm_tokens), sound_units=sounds)

    def samples(self, size: StepSize) -> float:
        """Samples of a step on average, as the whole epoch is planned."""
        if size not in self.steps:
            epoch = arrange_epoch(
                self.lengths, size.limits, num_replicas=self.num_replicas, micro_batches=size.micro_batches
            )
            self.steps[size] = epoch.num_steps
        return len(self.lengths) / self.steps[size]

    def off(self, size: StepSize) -> float:
        """|samples of a step / those asked for - 1|; 0 where an epoch has as many steps."""
        samples = self.samples(size)
        return 0.0 if self.steps[size] == ceil(len(self.lengths) / self.asked) else abs(samples / self.asked - 1)

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

    def best(self, least: PackLimits, ceiling: PackLimits, *, fills_batches: bool) -> StepSize:
        """The limits that waste least of those under which steps fit, or those under which they fit best."""

        def promising(candidates: Sequence[PackLimits]) -> Iterable[PackLimits]:
            fitting = [limits for limits in candidates if self.lacking_bytes(limits) <= 0]
            if not fitting:
                smallest = min(candidates, key=lambda limits: (limits.vision_units, limits.llm_tokens))
                raise InfeasibleError(
                    f"memory must hold the largest sample ({smallest.vision_units} vision units, "
                    f"{smallest.llm_tokens} LLM tokens) beside the model, got "
                    f"{self.lacking_bytes(smallest) / 2**30:.1f} GiB too little; let activations be computed again, or "
                    "share more of the model"
                )
            if not fills_batches:
                fitting = [limits for limits in fitting if not holds_one(self.bound(limits))] or fitting
            # 1. How far packs stay below the bound is measured where steps are nearest by the bound alone.
            size = self.sized(min(fitting, key=lambda limits: self.counted(limits)[1]))
            packs = self.steps[size] * size.micro_batches * self.num_replicas
            self.fullness = len(self.lengths) / packs / self.bound(size.limits)
            # 2. Keep limits whose steps come near by the bound.
            counted = {limits: self.counted(limits) for limits in fitting}
            near = sorted((limits for limits in fitting if counted[limits][1] <= COUNTED), key=lambda x: counted[x][1])
            if not near:
                return [min(fitting, key=lambda limits: counted[limits][1])]
            # 3. Of these, packs that hold what the user's batches held, as many as the batches were (larger packs may
            # not fit into memory); else as few packs as can be.
            enough = [limits for limits in near if fills_batches and self.fills_batch(limits)]
            fewest = self.batches if enough else min(counted[limits][0] for limits in near)
            as_many = [limits for limits in enough or near if counted[limits][0] == fewest]
            return (as_many or enough or near)[:MOST_SCORED]

        options: dict[str, Any] = {"least": least, "num_replicas": self.num_replicas, "num_samples": SCORED_SAMPLES}
        scored = search_limits(self.lengths, ceiling, progress=promising, **options)
        scored.sort(key=lambda found: self.counted(found.limits)[1] > KEPT / 2)  # stable: by waste among these
        tried = []
        for found in scored[:MOST_PLANNED]:
            tried.append(self.sized(found.limits))
            if self.off(tried[-1]) <= KEPT:
                return tried[-1]
        return min(tried, key=self.off)

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
            if self.samples(tried[-1]) > self.asked:
                most = middle
            else:
                least = middle
        return min(tried, key=self.off, default=size)

    def fills_batch(self, limits: PackLimits) -> bool:
        """Whether limits hold what a batch brings on average, or nearly; packs are never fuller than their limits."""
        holds_vision = limits.vision_units >= (1 - KEPT) * self.batch_vision
        holds_sound = limits.most("sound_units") >= (1 - KEPT) * self.batch_sound
        return holds_vision and holds_sound and limits.llm_tokens >= (1 - KEPT) * self.batch_tokens

    def lacking_bytes(self, limits: PackLimits) -> float:
        """Bytes that a rank lacks for the largest micro-batch, by counted activations; below 0 where there is room."""
        if self.memory is None:
            return 0.0
        most = largest_load(self.lengths, _unscaled(limits) if self.padded else limits)
        return float(self.memory.peak_bytes(most)) - self.memory.budget_bytes


def counted_profile(model: Any, device_name: str | None) -> ModelProfile | None:
    """What the layers of a model of transformers or peft cost, counted; None for a family that nobody has counted.

    ``device_name`` is torch's, None on a CPU. What is not trained has no backward pass to weights.
    """
    try:
        records = layer_records(as_tied(model.config.to_dict(), tied=is_tied(model)))
    except ConfigError:
        return None
    device = device_to_count(device_name)
    adapters = getattr(model, "peft_config", None)
    if adapters:
        return adapted_profile(records, device, rank=max(getattr(adapter, "r", 1) for adapter in adapters.values()))
    trained = {module_of(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    return analytic_profile(records, device, frozen=sorted({record.module for record in records} - trained))


def module_of(name: str) -> str:
    """The part of a model that has a parameter."""
    if any(part in name for part in PROJECTOR):
        return "projector"
    if SOUND in name:
        return "sound"
    return "vision" if any(part in name for part in VISION) else "language"


@dataclass(frozen=True)
class Waiting:
    """How unlike the ranks of some steps are."""

    vision: float
    """Dist Ratio in vision units, of what ranks do between two meetings."""
    tokens: float
    """Dist Ratio in LLM tokens, padding included."""
    share: float | None
    """Share of the steps' seconds that ranks wait, by counted costs; None without costs."""
    sound: float = 0.0
    """Dist Ratio in units of an encoder of sound beside the ViT."""

    @classmethod
    def of(cls, loads: Load, costs: CostByPhase | None, layout: Sharding) -> "Waiting":
        """Waiting in steps whose loads have shape (steps, ranks, micro-batches)."""
        columns = loads.vision_units, loads.llm_tokens, loads.sound_units
        if MEETINGS[layout] == "step":
            columns = tuple(column.sum(axis=2) for column in columns)
        share = None
        if costs is not None:
            busy, waited = _busy_and_waited(loads, costs, layout)
            share = float(waited.sum() / (busy + waited).sum())
        return cls(dist_ratio(columns[0]), dist_ratio(columns[1]), share, dist_ratio(columns[2]))

    def told(self, num_ranks: int, vision_unit: str) -> list[str]:
        """Dist Ratios in words; none of one rank, which waits for nobody."""
        if num_ranks == 1:
            return []
        sound = f", {self.sound:.1%} in sound units" if self.sound else ""
        return [f"Dist Ratio {self.vision:.1%} in {vision_unit}, {self.tokens:.1%} in tokens{sound}"]


def _busy_and_waited(loads: Load, costs: CostByPhase, layout: Sharding) -> tuple[FloatArray, FloatArray]:
    """Seconds of each rank of each step."""
    seconds = {phase: cost(loads) for phase, cost in costs.items()}
    busy = np.sum(list(seconds.values()), axis=0).sum(axis=2)
    return busy, np.sum(list(wait(seconds, layout).values()), axis=0)


def step_seconds(loads: Load, costs: CostByPhase, layout: Sharding) -> float:
    """Mean seconds of a step: computing and waiting, the same on all ranks."""
    busy, waited = _busy_and_waited(loads, costs, layout)
    return float((busy + waited).mean())


@dataclass(frozen=True)
class Gains:
    """How many times the samples a second, by counted costs."""

    packing: float | None
    """Random packs over random padded batches; None where batches stay padded."""
    balance: float
    """The sampler's micro-batches over random packs, or over random padded batches."""
    grouped: float
    """The sampler's micro-batches over padded batches that are grouped by length."""

    @property
    def whole(self) -> float:
        """Packing and balance together."""
        return self.balance * (self.packing or 1.0)

    def __str__(self) -> str:
        if self.whole < LEAST_GAIN:
            return f"no gain here: {gain_in_words([(self.whole, Way('random batches'))])} is expected"
        parts = "" if self.packing is None else f" (packing {self.packing:.2f}x, balance {self.balance:.2f}x)"
        ways = [(self.whole, Way(f"random batches{parts}")), (self.grouped, Way("group_by_length"))]
        return f"expected {gain_in_words(ways)}"


@dataclass(frozen=True)
class AskedSteps:
    """What the trainer's settings ask of a run."""

    samples_per_step: int
    batch_size: int
    """Samples of a micro-batch, before."""
    micro_batches: int
    """Micro-batches of each rank and step, before."""
    epochs: float
    """How many there are, unless ``max_steps`` says when to end."""
    max_steps: int = -1
    limits: PackLimits | None = None
    """Those that were given."""

    def told(self, sampler: PackSampler) -> str:
        """What an optimizer step holds of what was asked, and what becomes of the schedule where it holds another."""
        asked, now = self.samples_per_step, samples_per_step(sampler)
        told = (
            f"{sampler.num_steps} steps an epoch, {asked} samples a step asked, "
            f"{now:.{0 if now >= SHOWN_WHOLE else 1}f} on average"
        )
        if sampler.micro_batches != self.micro_batches:
            told += f" (gradient_accumulation_steps is {sampler.micro_batches}, was {self.micro_batches})"
        steps_asked = ceil(len(sampler.lengths) / asked)
        if abs(now / asked - 1) <= KEPT or sampler.num_steps == steps_asked:
            return told
        told += ", as near as packs come: "
        if self.max_steps > 0:
            return f"{told}max_steps={self.max_steps} train {now / asked:.2f}x the samples"
        return (
            f"{told}{ceil(sampler.num_steps * self.epochs)} optimizer steps in all instead of "
            f"{ceil(steps_asked * self.epochs)}, over which the learning-rate schedule runs"
        )


def expected_gains(
    sampler: PackSampler, limits: PackLimits, costs: CostByPhase, layout: Sharding, asked_steps: AskedSteps
) -> Gains:
    """Compare the sampler's steps with the host's own batches, and with packs that are not balanced."""
    samples, ranks = _drawn(sampler, asked_steps)

    def per_sample(loads: Load, samples_a_step: float) -> float:
        return step_seconds(loads, costs, layout) / samples_a_step

    def host(batching: Batching) -> float:
        batches = padded_batches(samples, batch=asked_steps.batch_size, batching=batching, **ranks)
        return per_sample(batches.loads, batches.samples_per_step)

    ours = per_sample(first_steps(sampler), samples_per_step(sampler))
    present, grouped = host("random"), host("group_by_length") / ours
    if isinstance(sampler, PaddedSampler):
        return Gains(None, present / ours, grouped)
    packs = random_packs(samples, limits, **ranks | {"micro_batches": sampler.micro_batches})
    packed = per_sample(packs.loads, packs.samples_per_step)
    packing, share = present / packed, 1.0
    if holds_one(samples_per_pack(sampler)) and packing > 1:
        # Counted costs do not know what more and smaller micro-batches cost: they see that padding is gone.
        packing, share = 1.0, 1 / packing
    return Gains(packing, packed / ours, grouped * share)


def _drawn(sampler: PackSampler, asked_steps: AskedSteps) -> tuple[Samples, Any]:
    """Samples of some steps, and the ranks and micro-batches that trained them before."""
    per_step = asked_steps.batch_size * sampler.num_replicas * asked_steps.micro_batches
    count = int(COMPARED_STEPS * max(per_step, samples_per_step(sampler)))
    samples = Samples.draw(typical_lengths(sampler.lengths, sampler.mixture), count, np.random.default_rng(0))
    return samples.all_rows, {"num_ranks": sampler.num_replicas, "micro_batches": asked_steps.micro_batches}


def first_steps(sampler: PackSampler) -> Load:
    """What the first steps of the current epoch hold, shape (steps, ranks, micro-batches)."""
    return Load.stack(sampler.load(step) for step in range(min(sampler.num_steps, COMPARED_STEPS)))


def samples_per_step(sampler: PackSampler) -> float:
    """On average over an epoch; of a mixture over its first steps."""
    if sampler.mixture is None:
        return len(sampler.lengths) / sampler.num_steps
    return float(np.mean([sampler.step(step).num_samples for step in range(min(sampler.num_steps, COMPARED_STEPS))]))


def samples_per_pack(sampler: PackSampler) -> float:
    """On average, as ``samples_per_step``."""
    return samples_per_step(sampler) / sampler.num_replicas / sampler.micro_batches


def _told_limits(sampler: PackSampler, limits: PackLimits, asked_steps: AskedSteps) -> list[str]:
    """Why packs are not those of the given limits, and that they hold one sample each."""
    told, given = [], asked_steps.limits
    if given not in (None, limits):
        options: Any = {"num_replicas": sampler.num_replicas, "rank": sampler.rank, "mixture": sampler.mixture}
        held = samples_per_step(type(sampler)(sampler.lengths, given, **options))
        held *= max(round(asked_steps.samples_per_step / held), 1)
        keeps = f" (samples_per_step={round(held)} keeps them)" if abs(held / round(held) - 1) <= KEPT else ""
        told.append(
            f"smaller than the given {given.in_words}, under which a step holds {held:.1f} samples and not "
            f"{asked_steps.samples_per_step}{keeps}"
        )
    if holds_one(samples_per_pack(sampler)):
        told.append("hardly any sample shares a pack: more samples a step (samples_per_step=) or larger limits pack")
    return told


def describe(
    sampler: PackSampler,
    limits: PackLimits,
    costs: CostByPhase | None,
    layout: Sharding,
    asked_steps: AskedSteps,
    *,
    device: str | None = None,
    is_measured: bool = False,
) -> str:
    """One line before training: what an epoch becomes, what changes, and what is expected of it."""
    lengths, padded = sampler.lengths, isinstance(sampler, PaddedSampler)
    samples, ranks = _drawn(sampler, asked_steps)
    random, first = padded_batches(samples, batch=asked_steps.batch_size, **ranks), first_steps(sampler)
    padding = 1 - float(random.real.llm_tokens.sum() / random.loads.llm_tokens.sum())
    alone = len(limits.oversized(lengths))
    sounds = "" if limits.sound_units is None else f" and {limits.sound_units} sound units"

    def waiting_of(loads: Load) -> list[str]:
        return Waiting.of(loads, costs, layout).told(sampler.num_replicas, lengths.vision_unit)

    parts = [
        f"omnibal: {len(lengths)} samples in {'padded batches' if padded else 'packs'} of at most "
        f"{limits.vision_units} {lengths.vision_unit} and {limits.llm_tokens} tokens{sounds}, "
        f"{samples_per_pack(sampler):.1f} samples each",
        *([f"{alone} samples exceed these limits, each is alone in one"] if alone else []),
        *_told_limits(sampler, limits, asked_steps),
        asked_steps.told(sampler),
        *waiting_of(first),
        *([f"{padding_share(sampler):.0%} of tokens are padding"] if padded else []),
        f"random batches of {asked_steps.batch_size}: "
        + ", ".join([*waiting_of(random.loads), f"{padding:.0%} of tokens are padding"]),
    ]
    if costs is not None:
        source = "counted" if device is None else f"counted for {device}"
        source = "by costs that an earlier run measured" if is_measured else f"{source}, not measured"
        parts.append(f"{expected_gains(sampler, limits, costs, layout, asked_steps)} ({source})")
    return "; ".join(parts)


def padding_share(sampler: PackSampler) -> float:
    """Share of tokens that are padding in the first steps."""
    steps = range(min(sampler.num_steps, COMPARED_STEPS))
    real = sum(int(sampler.packs_of_step(step).llm_tokens(sampler.lengths).sum()) for step in steps)
    return 1 - real / float(first_steps(sampler).llm_tokens.sum())
