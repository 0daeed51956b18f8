"""What packing and balance are expected to bring a trainer, apart, from counted costs; and what each step is like."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

import numpy as np

from omnibal.advise.batches import Batching, Samples, padded_batches, random_packs
from omnibal.advise.models import adapted_profile
from omnibal.advise.wait import MEETINGS, Sharding, wait
from omnibal.cost import CostModel, FloatArray, Load
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio
from omnibal.data.source_draws import typical_lengths
from omnibal.device import Device
from omnibal.errors import ConfigError
from omnibal.families import layer_records
from omnibal.integrations.loading import PackSampler
from omnibal.integrations.padded import PaddedSampler
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import ModelProfile

COMPARED_STEPS: Final = 64
"""Steps of each way to batch that are compared."""
COUNTED_DEVICE: Final = "A100-80GB"
"""What costs are counted for where the device at hand is not known."""
LEAST_GAIN: Final = 1.02
"""Below it a gain is none: counted costs are no better."""
KEPT: Final = 0.05
"""How far the samples of a step may be from those that were asked for."""
SHOWN_WHOLE: Final = 100
"""Samples of a step from which on no tenths are shown."""
VISION, PROJECTOR = ("vision_tower", "visual", "vision_model"), ("multi_modal_projector", "connector", "merger")
Costs = Mapping[str, CostModel]


def counted_profile(model: Any, device_name: str | None) -> ModelProfile | None:
    """What layers cost, counted; None for a family that nobody has counted.

    Args:
        model: A transformers model, or a peft one; what it does not train has no backward pass to weights.
        device_name: As torch calls it; None on a CPU.
    """
    try:
        records = layer_records(model.config.to_dict())
    except ConfigError:
        return None
    try:
        device = Device.named(device_name or COUNTED_DEVICE)
    except ConfigError:
        device = Device.named(COUNTED_DEVICE)
    adapters = getattr(model, "peft_config", None)
    if adapters:
        return adapted_profile(records, device, rank=max(getattr(adapter, "r", 1) for adapter in adapters.values()))
    trained = {_module_of(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    return analytic_profile(records, device, frozen=sorted({record.module for record in records} - trained))


def _module_of(name: str) -> str:
    if any(part in name for part in PROJECTOR):
        return "projector"
    return "vision" if any(part in name for part in VISION) else "language"


@dataclass(frozen=True)
class Waiting:
    """How unlike the ranks of some steps are.

    Attributes:
        vision: Dist Ratio in vision units, of what ranks do between two meetings.
        tokens: The same in LLM tokens, padding included.
        share: Share of the steps' seconds that ranks wait, by counted costs; None without them.
    """

    vision: float
    tokens: float
    share: float | None

    @classmethod
    def of(cls, loads: Load, costs: Costs | None, layout: Sharding) -> "Waiting":
        """Of steps of shape (steps, ranks, micro-batches)."""
        columns = loads.vision_units, loads.llm_tokens
        if MEETINGS[layout] == "step":
            columns = tuple(column.sum(axis=2) for column in columns)
        share = None
        if costs is not None:
            busy, waited = _busy_and_waited(loads, costs, layout)
            share = float(waited.sum() / (busy + waited).sum())
        return cls(dist_ratio(columns[0]), dist_ratio(columns[1]), share)

    def told(self, num_ranks: int, vision_unit: str) -> list[str]:
        """Dist Ratios in words; none of one rank, which waits for nobody."""
        if num_ranks == 1:
            return []
        return [f"Dist Ratio {self.vision:.1%} in {vision_unit}, {self.tokens:.1%} in tokens"]


def _busy_and_waited(loads: Load, costs: Costs, layout: Sharding) -> tuple[FloatArray, FloatArray]:
    """Seconds of each rank of each step."""
    seconds = {phase: cost(loads) for phase, cost in costs.items()}
    busy = np.sum(list(seconds.values()), axis=0).sum(axis=2)
    return busy, np.sum(list(wait(seconds, layout).values()), axis=0)


def step_seconds(loads: Load, costs: Costs, layout: Sharding) -> float:
    """Mean seconds of a step: computing and waiting, the same on all ranks."""
    busy, waited = _busy_and_waited(loads, costs, layout)
    return float((busy + waited).mean())


@dataclass(frozen=True)
class Gains:
    """How many times the samples a second, by counted costs.

    Attributes:
        packing: Of random packs over random padded batches; None where batches stay padded.
        balance: Of the sampler's micro-batches over these packs, or over random padded batches.
        grouped: Of the sampler's over padded batches that are grouped by length.
    """

    packing: float | None
    balance: float
    grouped: float

    def __str__(self) -> str:
        whole = self.balance * (self.packing or 1.0)
        if whole < LEAST_GAIN:
            return f"no gain here: {whole:.2f}x the samples a second of random batches is expected"
        parts = "" if self.packing is None else f" (packing {self.packing:.2f}x, balance {self.balance:.2f}x)"
        return (
            f"expected {whole:.2f}x the samples a second of random batches{parts}, "
            f"{self.grouped:.2f}x those of group_by_length"
        )


def compare(
    sampler: PackSampler, limits: PackLimits, costs: Costs, layout: Sharding, *, batch_size: int, micro_batches: int
) -> Gains:
    """Compare the sampler's steps with what the host would do, and with packs that are not balanced.

    Args:
        sampler: At the beginning of an epoch.
        limits: What the user allows a micro-batch.
        costs: As of ``phase_costs``.
        layout: How ranks share their work.
        batch_size: Samples of a micro-batch, before.
        micro_batches: Of each rank and step, before.
    """
    samples, ranks = _drawn(sampler, batch_size, micro_batches)

    def per_sample(loads: Load, samples_a_step: float) -> float:
        return step_seconds(loads, costs, layout) / samples_a_step

    def host(batching: Batching) -> float:
        batches = padded_batches(samples, batch=batch_size, batching=batching, **ranks)
        return per_sample(batches.loads, batches.samples_per_step)

    ours = per_sample(first_steps(sampler), samples_per_step(sampler))
    present, grouped = host("random"), host("group_by_length") / ours
    if isinstance(sampler, PaddedSampler):
        return Gains(None, present / ours, grouped)
    packs = random_packs(samples, limits, **ranks | {"micro_batches": sampler.micro_batches})
    packed = per_sample(packs.loads, packs.samples_per_step)
    return Gains(present / packed, packed / ours, grouped)


def _drawn(sampler: PackSampler, batch_size: int, micro_batches: int) -> tuple[Samples, Any]:
    """Samples of some steps, and who trained them before."""
    per_step = max(batch_size * sampler.num_replicas * micro_batches, samples_per_step(sampler))
    lengths = typical_lengths(sampler.lengths, sampler.mixture)
    samples = Samples.draw(lengths, int(COMPARED_STEPS * per_step), np.random.default_rng(0))
    return samples.all_rows, {"num_ranks": sampler.num_replicas, "micro_batches": micro_batches}


def first_steps(sampler: PackSampler) -> Load:
    """What the first steps of the current epoch hold, shape (steps, ranks, micro-batches)."""
    return Load.stack(sampler.load(step) for step in range(min(sampler.num_steps, COMPARED_STEPS)))


@dataclass(frozen=True)
class Schedule:
    """What the trainer's settings ask of a run.

    Attributes:
        samples_per_step: Asked for.
        batch_size: Samples of a micro-batch, before.
        micro_batches: Of each rank and step, before.
        epochs: How many there are, unless ``max_steps`` says when to end.
        max_steps: Optimizer steps in all; below 1 epochs count.
    """

    samples_per_step: int
    batch_size: int
    micro_batches: int
    epochs: float
    max_steps: int = -1

    def told(self, sampler: PackSampler) -> str:
        """What an optimizer step holds of what was asked, and what becomes of the schedule where it holds another."""
        asked, now = self.samples_per_step, samples_per_step(sampler)
        told = (
            f"{sampler.num_steps} steps an epoch, {asked} samples a step asked, "
            f"{now:.{0 if now >= SHOWN_WHOLE else 1}f} on average"
        )
        if sampler.micro_batches != self.micro_batches:
            told += f" (gradient_accumulation_steps is {sampler.micro_batches}, was {self.micro_batches})"
        steps_asked = -(-len(sampler.lengths) // asked)
        if abs(now / asked - 1) <= KEPT or sampler.num_steps == steps_asked:
            return told
        told += ", as near as packs come: "
        if self.max_steps > 0:
            return f"{told}max_steps={self.max_steps} train {now / asked:.2f}x the samples"
        return (
            f"{told}{ceil(sampler.num_steps * self.epochs)} optimizer steps in all instead of "
            f"{ceil(steps_asked * self.epochs)}, over which the learning-rate schedule runs"
        )


def samples_per_step(sampler: PackSampler) -> float:
    """On average over an epoch; of a mixture over its first steps."""
    if sampler.mixture is None:
        return len(sampler.lengths) / sampler.num_steps
    return float(np.mean([sampler.step(step).num_samples for step in range(min(sampler.num_steps, COMPARED_STEPS))]))


def describe(
    sampler: PackSampler,
    limits: PackLimits,
    costs: Costs | None,
    layout: Sharding,
    schedule: Schedule,
    *,
    device: str | None = None,
) -> str:
    """One line before training: what an epoch becomes, what changes, and what is expected of it.

    Args:
        sampler: At the beginning of an epoch.
        limits: Of a micro-batch.
        costs: As of ``phase_costs``.
        layout: How ranks share their work.
        schedule: What the host's settings say of its steps.
        device: What the costs are counted for.
    """
    lengths, before = sampler.lengths, {"batch_size": schedule.batch_size, "micro_batches": schedule.micro_batches}
    padded, per_step = isinstance(sampler, PaddedSampler), sampler.num_replicas * sampler.micro_batches
    samples, ranks = _drawn(sampler, **before)
    random = padded_batches(samples, batch=schedule.batch_size, **ranks)
    padding = 1 - float(random.real.llm_tokens.sum() / random.loads.llm_tokens.sum())
    alone = len(limits.oversized(lengths))

    def waiting_of(loads: Load) -> list[str]:
        return Waiting.of(loads, costs, layout).told(sampler.num_replicas, lengths.vision_unit)

    parts = [
        f"omnibal: {len(lengths)} samples in {'padded batches' if padded else 'packs'} of at most "
        f"{limits.vision_units} {lengths.vision_unit} and {limits.llm_tokens} tokens, "
        f"{samples_per_step(sampler) / per_step:.1f} samples each",
        *([f"{alone} samples exceed these limits, each is alone in one"] if alone else []),
        schedule.told(sampler),
        *waiting_of(first_steps(sampler)),
        *([f"{padding_share(sampler):.0%} of tokens are padding"] if padded else []),
        f"random batches of {schedule.batch_size}: "
        + ", ".join([*waiting_of(random.loads), f"{padding:.0%} of tokens are padding"]),
    ]
    if costs is not None:
        counted = "counted" if device is None else f"counted for {device}"
        parts.append(f"{compare(sampler, limits, costs, layout, **before)} ({counted}, not measured)")
    return "; ".join(parts)


def padding_share(sampler: PackSampler) -> float:
    """Share of tokens that are padding in the first steps."""
    steps = range(min(sampler.num_steps, COMPARED_STEPS))
    real = sum(int(sampler.packs_of_step(step).llm_tokens(sampler.lengths).sum()) for step in steps)
    return 1 - real / float(first_steps(sampler).llm_tokens.sum())
