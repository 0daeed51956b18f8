"""What is expected of a trainer's steps: what they hold, how long ranks wait, and what that gains."""

from dataclasses import dataclass
from math import ceil
from typing import Any, Final

import numpy as np

from omnibal.advise.batches import Batches, Batching, Samples, padded_batches, random_packs
from omnibal.advise.estimate import Way, gain_in_words
from omnibal.advise.models import adapted_profile
from omnibal.advise.wait import MEETINGS, CostByPhase, Sharding, step_seconds
from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio
from omnibal.data.source_draws import typical_lengths
from omnibal.data.step_size import KEPT, holds_one
from omnibal.errors import ConfigError
from omnibal.families import layer_records
from omnibal.formats.model_format import as_tied, is_tied
from omnibal.packs.loading import PackSampler, PaddedSampler
from omnibal.profile.counted import analytic_profile, device_to_count
from omnibal.profile.records import ModelProfile

COMPARED_STEPS: Final = 64  # of each way to batch
LEAST_GAIN: Final = 1.02  # below it a gain is none: counted costs are no better
SHOWN_WHOLE: Final = 100  # samples of a step from which on no tenths are shown
VISION, PROJECTOR = ("vision_tower", "visual", "vision_model"), ("multi_modal_projector", "connector", "merger")
SOUND: Final = "audio_tower"


def counted_profile(model: Any, device_name: str | None, *, dtype: str = "bfloat16") -> ModelProfile | None:
    """What the layers of a model of transformers or peft cost, counted; None for a family that nobody has counted."""
    # ``device_name`` is torch's; of a CPU, or of a device that nobody knows, costs are those of ``COUNTED_DEVICE``.
    # What is not trained has no backward pass to weights.
    try:
        records = layer_records(as_tied(model.config.to_dict(), tied=is_tied(model)))
    except ConfigError:
        return None
    device = device_to_count(device_name)
    adapters = getattr(model, "peft_config", None)
    if adapters:
        rank = max(getattr(adapter, "r", 1) for adapter in adapters.values())
        return adapted_profile(records, device, rank=rank, dtype=dtype)
    trained = {module_of(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    return analytic_profile(
        records, device, dtype=dtype, frozen=sorted({record.module for record in records} - trained)
    )


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

    vision: float  # Dist Ratio in vision units, of what ranks do between two meetings
    tokens: float  # Dist Ratio in LLM tokens, padding included
    share: float | None
    """Share of the steps' seconds that ranks wait, by counted costs; None without costs."""
    sound: float = 0.0  # Dist Ratio in units of an encoder of sound beside the ViT

    @classmethod
    def of(cls, loads: Load, costs: CostByPhase | None, layout: Sharding) -> "Waiting":
        """Waiting in steps whose loads have shape (steps, ranks, micro-batches)."""
        columns = loads.vision_units, loads.llm_tokens, loads.sound_units
        if MEETINGS[layout] == "step":
            columns = tuple(column.sum(axis=2) for column in columns)
        share = None
        if costs is not None:
            busy, waited = step_seconds(loads, costs, layout)
            share = float(waited.sum() / (busy + waited).sum())
        return cls(dist_ratio(columns[0]), dist_ratio(columns[1]), share, dist_ratio(columns[2]))

    def told(self, num_ranks: int, vision_unit: str) -> list[str]:
        """Dist Ratios in words; none of one rank, which waits for nobody."""
        if num_ranks == 1:
            return []
        sound = f", {self.sound:.1%} in sound units" if self.sound else ""
        return [f"Dist Ratio {self.vision:.1%} in {vision_unit}, {self.tokens:.1%} in tokens{sound}"]


@dataclass(frozen=True)
class Gains:
    """How many times the samples a second, by counted costs."""

    packing: float | None  # random packs over random padded batches; None where batches stay padded
    balance: float  # the sampler's micro-batches over random packs, or over random padded batches
    grouped: float  # the sampler's micro-batches over padded batches that are grouped by length, the head with it
    head: float = 1.0  # the head on target rows alone over the head on all rows

    @property
    def whole(self) -> float:
        """Packing, balance and the head together."""
        return self.balance * (self.packing or 1.0) * self.head

    def __str__(self) -> str:
        if self.whole < LEAST_GAIN:
            return f"no gain here: {gain_in_words([(self.whole, Way('random batches'))])} is expected"
        parts = {"packing": self.packing, "balance": self.balance, "head on target rows": self.head}
        told = [f"{name} {gain:.2f}x" for name, gain in parts.items() if gain is not None]
        told = told if told[-1] != "head on target rows 1.00x" else told[:-1]
        several = f" ({', '.join(told)})" if len(told) > 1 else ""
        ways = [(self.whole, Way(f"random batches{several}")), (self.grouped, Way("group_by_length"))]
        return f"expected {gain_in_words(ways)}"


@dataclass(frozen=True)
class AskedSteps:
    """What the trainer's settings ask of a run."""

    samples_per_step: int
    batch_size: int  # samples of a micro-batch, before
    micro_batches: int  # Micro-batches of each rank and step, before
    epochs: float  # how many there are, unless max_steps says when to end
    max_steps: int = -1
    limits: PackLimits | None = None  # those that were given
    masks: bool = True  # whether attention of padded rows is under a dense mask, as transformers' "sdpa" has it
    on_targets: bool = False  # whether the head is made to work on target rows alone

    def told(self, sampler: PackSampler) -> str:
        """What an optimizer step holds of what was asked, and what becomes of the schedule where it holds another."""
        asked, now = self.samples_per_step, samples_per_step(sampler)
        told = (
            f"{sampler.num_steps} steps an epoch, {asked} samples a step requested, "
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


def expected_gains(sampler: PackSampler, costs: CostByPhase, layout: Sharding, asked_steps: AskedSteps) -> Gains:
    """Compare the sampler's steps with the host's own batches, and with packs that are not balanced."""
    samples, ranks = _drawn(sampler, asked_steps)

    def per_sample(batches: Batches, *, on_targets: bool = False) -> float:
        loads = batches.timed(masks=asked_steps.masks, on_targets=on_targets)
        return float(np.add(*step_seconds(loads, costs, layout)).mean()) / batches.samples_per_step

    def host(batching: Batching) -> float:
        return per_sample(padded_batches(samples, batch=asked_steps.batch_size, batching=batching, **ranks))

    first = first_batches(sampler)
    ours = per_sample(first)
    head = ours / per_sample(first, on_targets=asked_steps.on_targets)
    present, grouped = host("random"), host("group_by_length") / ours * head
    if isinstance(sampler, PaddedSampler):
        return Gains(None, present / ours, grouped, head)
    packs = random_packs(samples, sampler.limits, **ranks | {"micro_batches": sampler.micro_batches})
    packed = per_sample(packs)
    packing, share = present / packed, 1.0
    if holds_one(samples_per_pack(sampler)) and packing > 1:
        # Counted costs do not know what more and smaller micro-batches cost: they see that padding is gone.
        packing, share = 1.0, 1 / packing
    return Gains(packing, packed / ours, grouped * share, head)


def _drawn(sampler: PackSampler, asked_steps: AskedSteps) -> tuple[Samples, Any]:
    """Samples of some steps, and the ranks and micro-batches that trained them before."""
    per_step = asked_steps.batch_size * sampler.num_replicas * asked_steps.micro_batches
    count = int(COMPARED_STEPS * max(per_step, samples_per_step(sampler)))
    samples = Samples.draw(typical_lengths(sampler.lengths, sampler.mixture), count, np.random.default_rng(0))
    return samples.all_rows, {"num_ranks": sampler.num_replicas, "micro_batches": asked_steps.micro_batches}


def first_batches(sampler: PackSampler) -> Batches:
    """Micro-batches of the first steps of the current epoch."""
    steps = range(min(sampler.num_steps, COMPARED_STEPS))
    loads = Load.stack(sampler.load(step) for step in steps)
    real = Load.stack(sampler.packs_of_step(step).load(sampler.lengths) for step in steps).reshape(loads.shape)
    return Batches(loads, real, samples_per_step(sampler))


def samples_per_step(sampler: PackSampler) -> float:
    """On average over an epoch; of a mixture over its first steps."""
    if sampler.mixture is None:
        return len(sampler.lengths) / sampler.num_steps
    return float(np.mean([sampler.step(step).num_samples for step in range(min(sampler.num_steps, COMPARED_STEPS))]))


def samples_per_pack(sampler: PackSampler) -> float:
    """On average, as ``samples_per_step``."""
    return samples_per_step(sampler) / sampler.num_replicas / sampler.micro_batches


def describe(
    sampler: PackSampler,
    costs: CostByPhase | None,
    layout: Sharding,
    asked_steps: AskedSteps,
    *,
    device: str | None = None,
    is_measured: bool = False,
) -> str:
    """What is printed before training, a fact a line: packs, steps, waits with and without, and what is expected."""
    lengths, limits, padded = sampler.lengths, sampler.limits, isinstance(sampler, PaddedSampler)
    samples, ranks = _drawn(sampler, asked_steps)
    random, first = padded_batches(samples, batch=asked_steps.batch_size, **ranks), first_batches(sampler)
    padding = 1 - float(random.real.llm_tokens.sum() / random.loads.llm_tokens.sum())
    alone = len(limits.oversized(lengths))
    sounds = "" if limits.sound_units is None else f" and {limits.sound_units} sound units"

    def waiting_of(batches: Batches) -> list[str]:
        waiting = Waiting.of(batches.timed(masks=asked_steps.masks), costs, layout)
        return waiting.told(sampler.num_replicas, lengths.vision_unit)

    given, notes = asked_steps.limits, list[str]()
    if given not in (None, limits):
        notes.append(f"smaller than the given {given.in_words}: a larger samples_per_step= keeps those")
    if holds_one(samples_per_pack(sampler)):
        notes.append("hardly any sample shares a pack: more samples a step (samples_per_step=) or larger limits pack")
    waits = waiting_of(first) + ([f"{padding_share(sampler):.0%} of tokens are padding"] if padded else [])
    lines = [
        f"omnibal: {len(lengths)} samples in {'padded batches' if padded else 'packs'} of at most "
        f"{limits.vision_units} {lengths.vision_unit} and {limits.llm_tokens} tokens{sounds}, "
        f"{samples_per_pack(sampler):.1f} samples each",
        *([f"{alone} samples exceed these limits, each gets a pack of its own"] if alone else []),
        *notes,
        asked_steps.told(sampler),
        *([", ".join(waits)] if waits else []),
        f"random batches of {asked_steps.batch_size}: "
        + ", ".join([*waiting_of(random), f"{padding:.0%} of tokens are padding"]),
    ]
    if costs is not None:
        source = "computed" if device is None else f"computed for {device}"
        source = "by costs that an earlier run measured" if is_measured else f"{source}, not measured"
        lines.append(f"{expected_gains(sampler, costs, layout, asked_steps)} ({source})")
    return "\n         ".join(lines)


def padding_share(sampler: PackSampler) -> float:
    """Share of tokens that are padding in the first steps."""
    first = first_batches(sampler)
    return 1 - float(first.real.llm_tokens.sum() / first.loads.llm_tokens.sum())
