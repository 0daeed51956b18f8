"""What packing and balance are expected to bring a trainer, apart, from counted costs; and what each step is like."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from omnibal.advise.costs import adapted_profile, phase_costs
from omnibal.advise.wait import MEETINGS, Trainer, wait
from omnibal.cost import CostModel, FloatArray, Load
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio
from omnibal.device import Device
from omnibal.errors import ConfigError
from omnibal.families import layer_records
from omnibal.integrations.loading import PackSampler
from omnibal.integrations.padded import PaddedSampler
from omnibal.profile.counted import analytic_profile

COMPARED_STEPS: Final = 64
"""Steps of each way to batch that are compared."""
COUNTED_DEVICE: Final = "A100-80GB"
"""What costs are counted for where the device at hand is not known."""
GROUPED: Final = 50
"""Micro-batches of a rank that transformers' ``group_by_length`` sorts at a time."""
LEAST_GAIN: Final = 1.02
"""Below it a gain is none: counted costs are no better."""
VISION, PROJECTOR = ("vision_tower", "visual", "vision_model"), ("multi_modal_projector", "connector", "merger")
Costs = Mapping[str, CostModel]


def counted_costs(model: Any, device_name: str | None, *, recompute: bool) -> Costs | None:
    """Seconds of each phase of a micro-batch, counted; None for a family that nobody has counted.

    Args:
        model: A transformers model, or a peft one; what it does not train has no backward pass to weights.
        device_name: As torch calls it; None on a CPU.
        recompute: Whether activations are computed again.
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
        rank = max(getattr(adapter, "r", 1) for adapter in adapters.values())
        profile = adapted_profile(records, device, rank=rank)
    else:
        trained = {_module_of(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
        frozen = sorted({record.module for record in records} - trained)
        profile = analytic_profile(records, device, frozen=frozen)
    return phase_costs(profile, recompute="full" if recompute else "none")


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
    def of(cls, loads: Load, costs: Costs | None, layout: Trainer) -> "Waiting":
        """Of steps of shape (steps, ranks, micro-batches)."""
        columns = loads.vision_units, loads.llm_tokens
        if MEETINGS[layout] == "step":
            columns = tuple(column.sum(axis=2) for column in columns)
        share = None
        if costs is not None:
            busy, waited = _busy_and_waited(loads, costs, layout)
            share = float(waited.sum() / (busy + waited).sum())
        return cls(dist_ratio(columns[0]), dist_ratio(columns[1]), share)

    def __str__(self) -> str:
        return f"Dist Ratio {self.vision:.1%} in vision units, {self.tokens:.1%} in tokens"


def _busy_and_waited(loads: Load, costs: Costs, layout: Trainer) -> tuple[FloatArray, FloatArray]:
    """Seconds of each rank of each step."""
    seconds = {phase: cost(loads) for phase, cost in costs.items()}
    busy = np.sum(list(seconds.values()), axis=0).sum(axis=2)
    return busy, np.sum(list(wait(seconds, layout).values()), axis=0)


def step_seconds(loads: Load, costs: Costs, layout: Trainer) -> float:
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


def compare(sampler: PackSampler, limits: PackLimits, costs: Costs, layout: Trainer, *, batch_size: int) -> Gains:
    """Compare the sampler's steps with what the host would do, and with packs that are not balanced.

    Args:
        sampler: At the beginning of an epoch.
        limits: What the user allows a micro-batch.
        costs: As of ``counted_costs``.
        layout: How ranks share their work.
        batch_size: Samples of a micro-batch, before.
    """
    lengths, per_step = sampler.lengths, len(sampler.lengths) / sampler.num_steps
    shape = sampler.num_replicas, sampler.micro_batches
    set_before = batch_size * shape[0] * shape[1]

    def per_sample(loads: Load, samples_per_step: float) -> float:
        return step_seconds(loads, costs, layout) / samples_per_step

    ours = per_sample(first_steps(sampler), per_step)
    grouped = per_sample(grouped_steps(lengths, batch_size, *shape), set_before) / ours
    present = per_sample(random_steps(lengths, batch_size, *shape), set_before)
    if isinstance(sampler, PaddedSampler):
        return Gains(None, present / ours, grouped)
    part = lengths.take(_drawn(lengths, int(COMPARED_STEPS * max(per_step, 1))))
    epoch = arrange_epoch(part, limits, num_replicas=shape[0], micro_batches=shape[1], method="random")
    packed = per_sample(epoch.packs.load(part)[epoch.steps], len(part) / epoch.num_steps)
    return Gains(present / packed, packed / ours, grouped)


def random_steps(lengths: SampleLengths, batch_size: int, num_replicas: int, micro_batches: int) -> Load:
    """Padded batches of random samples; of a small dataset some come again."""
    return padded_load(
        lengths,
        _drawn(lengths, COMPARED_STEPS * num_replicas * micro_batches * batch_size).reshape(
            COMPARED_STEPS, num_replicas, micro_batches, batch_size
        ),
    )


def grouped_steps(lengths: SampleLengths, batch_size: int, num_replicas: int, micro_batches: int) -> Load:
    """Padded batches as ``group_by_length`` makes them: some steps' samples sorted, dealt to the ranks by turns."""
    drawn = _drawn(lengths, COMPARED_STEPS * num_replicas * micro_batches * batch_size)
    group = np.arange(len(drawn)) // (GROUPED * batch_size * micro_batches)
    drawn = drawn[np.lexsort((-lengths.llm_tokens[drawn], group))]
    dealt = drawn.reshape(COMPARED_STEPS, micro_batches, num_replicas, batch_size).swapaxes(1, 2)
    return padded_load(lengths, dealt)


def padded_load(lengths: SampleLengths, samples: IntArray) -> Load:
    """What padded batches bring; samples along the last axis, every one as long as the longest."""
    batch, longest = samples.shape[-1], lengths.llm_tokens[samples].max(axis=-1).astype(np.float64)
    squared = 0 if lengths.vision_squared is None else lengths.vision_squared[samples].sum(axis=-1)
    return Load(lengths.vision_units[samples].sum(axis=-1), batch * longest, batch * longest**2, squared)


def _drawn(lengths: SampleLengths, count: int) -> IntArray:
    """So many samples in random order, none twice before all have come."""
    generator = np.random.default_rng(0)
    rounds = [generator.permutation(len(lengths)) for _ in range(-(-count // len(lengths)))]
    drawn: IntArray = np.concatenate(rounds)[:count]
    return drawn


def first_steps(sampler: PackSampler) -> Load:
    """What the first steps of the current epoch hold, shape (steps, ranks, micro-batches)."""
    return Load.stack(sampler.load(step) for step in range(min(sampler.num_steps, COMPARED_STEPS)))


@dataclass(frozen=True)
class Schedule:
    """What a host's settings say of its steps.

    Attributes:
        batch_size: Samples of a micro-batch, before.
        epochs: How many there are, unless ``max_steps`` says when to end.
        max_steps: Optimizer steps in all; below 1 epochs count.
    """

    batch_size: int
    epochs: float
    max_steps: int = -1

    def changed(self, sampler: PackSampler) -> str:
        """What an optimizer step holds, and what becomes of the schedule where that has changed."""
        before, now = self.batch_size * sampler.num_replicas * sampler.micro_batches, samples_per_step(sampler)
        told = f"{sampler.num_steps} steps an epoch with {now:.1f} samples a step"
        if abs(now / before - 1) <= KEPT:
            return f"{told} as before"
        told = f"{told} where {before} were set"
        if self.max_steps > 0:
            return f"{told}: max_steps={self.max_steps} train {now / before:.2f}x the samples"
        steps_before = -(-len(sampler.lengths) // before)
        return (
            f"{told}: {round(sampler.num_steps * self.epochs)} optimizer steps in all instead of "
            f"{round(steps_before * self.epochs)}, over which the learning-rate schedule runs"
        )


def samples_per_step(sampler: PackSampler) -> float:
    """On average over an epoch."""
    return len(sampler.lengths) / sampler.num_steps


def describe(sampler: PackSampler, limits: PackLimits, costs: Costs | None, layout: Trainer, schedule: Schedule) -> str:
    """One line before training: what an epoch becomes, what changes, and what is expected of it."""
    lengths, batch_size = sampler.lengths, schedule.batch_size
    padded, per_step = isinstance(sampler, PaddedSampler), sampler.num_replicas * sampler.micro_batches
    random = random_steps(lengths, batch_size, sampler.num_replicas, sampler.micro_batches)
    padding = 1 - float(lengths.llm_tokens.mean() * batch_size * per_step * len(random) / random.llm_tokens.sum())
    parts = [
        f"omnibal: {len(lengths)} samples in {'padded batches' if padded else 'packs'} of at most "
        f"{limits.vision_units} vision units and {limits.llm_tokens} tokens, "
        f"{samples_per_step(sampler) / per_step:.1f} samples each",
        schedule.changed(sampler),
        str(Waiting.of(first_steps(sampler), costs, layout)),
        *([f"{padding_share(sampler):.0%} of tokens are padding"] if padded else []),
        f"random batches of {batch_size}: {Waiting.of(random, costs, layout)}, "
        f"{max(padding, 0):.0%} of tokens are padding",
    ]
    if costs is not None:
        parts.append(f"{compare(sampler, limits, costs, layout, batch_size=batch_size)} (counted, not measured)")
    return "; ".join(parts)


KEPT: Final = 0.05
"""How far the samples of a step may be from those that were set."""


def padding_share(sampler: PackSampler) -> float:
    """Share of tokens that are padding in the first steps."""
    steps = range(min(sampler.num_steps, COMPARED_STEPS))
    real = sum(int(sampler.packs_of_step(step).llm_tokens(sampler.lengths).sum()) for step in steps)
    return 1 - real / float(first_steps(sampler).llm_tokens.sum())
