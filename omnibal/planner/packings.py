"""What a plan is asked for: the layouts that can be, and packings, a few steps that represent an epoch each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from omnibal.cluster import Cluster, Encoder, Layout, check_zero_stage
from omnibal.cost import CostModel, IntArray, Load
from omnibal.data.epoch import Epoch, arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limit_search import search_limits
from omnibal.data.limits import PackLimits, largest_load, paper_limits
from omnibal.data.packing_spec import Method
from omnibal.device import usable_bytes
from omnibal.errors import ConfigError
from omnibal.families.base import encoder_layers
from omnibal.pipeline.schedule import SCHEDULES, ScheduleName, check_units
from omnibal.profile.records import ModelProfile


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Hardware, batch and freedom of a plan.

    Raises:
        ConfigError: A number is out of range.
    """

    cluster: Cluster
    """All of its devices take part."""
    global_batch: int
    """Samples per optimizer step, which the plan keeps if any does that fits."""
    num_stages: int | None = None
    """None: any number that divides the devices."""
    encoder: Encoder | None = None
    """Devices of the encoder's own (units), whose stages ``num_stages`` counts, too; or the encoder on all devices."""
    limits: PackLimits | None = None
    """None: the limits that make the fastest step."""
    head_room: float | None = None
    """Share of the memory that stays free; None: the margin of :func:`omnibal.device.usable_bytes`."""
    batch_tolerance: float = 0.05
    """Share by which the mean number of samples in a step may differ from ``global_batch``, if any plan keeps it."""
    zero_stage: int = 1
    """0 or 1, see :class:`omnibal.cluster.Layout`."""
    accumulate_float32: bool | None = None
    """Whether gradients are summed in float32, see :class:`omnibal.cluster.Layout`."""
    schedule: ScheduleName | Literal["auto"] = "1f1b"
    """``auto``: the fastest schedule of those that fit."""
    method: Method = "balanced"
    steps: int | None = None
    """Steps that a plan is simulated on; None: at least 4, with 1024 micro-batches in all as far as samples go."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("global_batch", "num_stages", "steps"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ConfigError(f"{name} must be positive, got {number}")
        for name in ("head_room", "batch_tolerance"):
            share = getattr(self, name)
            if share is not None and not 0 <= share < 1:
                raise ConfigError(f"{name} must lie in [0, 1), got {share}")
        check_zero_stage(self.zero_stage)
        least = min(self.budgets(Layout(self.cluster.num_devices)))
        if self.cluster.overhead_bytes >= least:
            raise ConfigError(
                f"overhead_bytes must be less than a device's memory without its head room, {least}, "
                f"got {self.cluster.overhead_bytes}; it is what a device holds beside the model"
            )

    def layouts(self, profile: ModelProfile) -> list[Layout]:
        """Layouts that the search considers, with rising numbers of stages and the profile's tensor ranks."""
        # An encoder of its own keeps its devices, and pipelines of the LLM divide the others; one that is spread runs
        # on all devices of the LLM.
        encoder, num_devices, num_layers = self.encoder, self.cluster.num_devices, len(profile.layers)
        own, left, most, alone = 0, num_devices, num_layers, encoder
        if encoder is not None:
            profile.check_matches(tensor_parallel=1)
            most -= encoder_layers(profile.layers)
            if encoder.placement == "own":
                own, left = encoder.num_stages, num_devices - encoder.num_devices
            else:
                alone = None
        degree, per_node = profile.num_tensor, self.cluster.devices_per_node
        stages = self.num_stages or own + 1
        num_replicas_on(num_devices, stages, num_layers=num_layers, num_tensor=degree, encoder=alone)
        if per_node % degree:
            raise ConfigError(
                f"tensor_parallel must divide the {per_node} devices of a node of {self.cluster}, got {degree}"
            )
        for name, count, limit in (("encoder", own, num_layers - most), ("language model", stages - own, most)):
            if count > limit:
                raise ConfigError(f"stages of the {name} must be at most its {limit} layers, got {count}")
        ranks = left // degree
        counts = range(1, min(ranks, most) + 1) if self.num_stages is None else [stages - own]
        layouts = [
            Layout(
                own + count,
                ranks // count,
                num_tensor=degree,
                encoder=encoder,
                zero_stage=self.zero_stage,
                accumulate_float32=self.accumulate_float32,
                precision=profile.dtype,  # type: ignore[arg-type]  # a layout checks it
            )
            for count in counts
            if ranks % count == 0
        ]
        if alone is None:
            return layouts
        found = [layout for layout in layouts if layout.has_even_units]
        if not found:
            check_units(layouts[-1])  # says what does not divide
        return found

    @property
    def schedules(self) -> tuple[ScheduleName, ...]:
        return tuple(SCHEDULES) if self.schedule == "auto" else (self.schedule,)

    def budgets(self, layout: Layout) -> tuple[int, ...]:
        """The most that a device of each stage may hold: its memory without what stays free."""
        share, memories = self.head_room, self.cluster.stage_memory_bytes(layout)
        return tuple(int(usable_bytes(memory) if share is None else memory * (1 - share)) for memory in memories)

    def keeps_batch(self, samples_per_step: float) -> bool:
        """Whether steps of so many samples on average count as the global batch."""
        return abs(samples_per_step / self.global_batch - 1) <= self.batch_tolerance

    def to_record(self) -> dict[str, Any]:
        record = asdict(self)
        del record["cluster"]
        return record


def num_replicas_on(
    num_devices: int,
    num_stages: int,
    *,
    num_layers: int,
    num_tensor: int = 1,
    devices: str = "devices",
    encoder: Encoder | None = None,
) -> int:
    """How many replicas of a pipeline some devices hold, ``num_tensor`` of which share each layer.

    ``encoder`` may have devices of its own among them, whose stages are counted in ``num_stages``.
    """
    # What an encoder of its own leaves to the language model: devices, and stages.
    left, behind, beside = num_devices, num_stages, ""
    if encoder is not None and encoder.placement == "own":
        left, behind = num_devices - encoder.num_devices, num_stages - encoder.num_stages
        beside = f" that omnibal.pipeline.encoder ({encoder}) leaves of {num_devices}"
        if left < 1:
            raise ConfigError(
                f"omnibal.pipeline.encoder must leave {devices} to the language model, got {encoder} of {num_devices}"
            )
        if behind < 1:
            raise ConfigError(
                f"num_stages must count the encoder's {encoder.num_stages} and at least one behind, got {num_stages}"
            )
    num_ranks, rest = divmod(left, num_tensor)
    if rest:
        raise ConfigError(f"{devices} must be a multiple of the {num_tensor} that share each layer, got {left}")
    if num_ranks % behind:
        whose = "" if encoder is None or not beside else f" without the encoder's {encoder.num_stages}"
        groups = "" if num_tensor == 1 else f"groups of {num_tensor} "
        raise ConfigError(f"num_stages{whose} must divide the {num_ranks} {groups}{devices}{beside}, got {behind}")
    if num_stages > num_layers:
        raise ConfigError(
            f"num_stages must be at most the model's {num_layers} layers, got {num_stages}; "
            "omnibal.pipeline.num_stages says it"
        )
    return num_ranks // behind


StepLoads = tuple[tuple[Load, ...], ...]  # for each step a Load per replica with an entry per micro-batch
LEAST_SAMPLES = 8192  # samples that are packed at least to learn what packs are like
LEAST_STEPS = 32  # steps at least: an incomplete last step makes the packs of all steps smaller
SIMULATED = 1024  # micro-batches, of all replicas, that a packing is judged by: fewer make the choice of limits luck
FEWEST_SIMULATED = 4  # steps that a packing is judged by at least
MOST_PACKINGS = 40  # numbers of micro-batches that are tried, in about equal ratios


@dataclass(frozen=True)
class Packing:
    """What micro-batches are like under some limits."""

    limits: PackLimits
    micro_batches: int
    samples_per_step: float
    steps: StepLoads
    largest: Load  # a micro-batch that none within the limits exceeds
    numbers: tuple[int, ...] = ()  # numbers of these steps in the epoch; empty if they are made up

    @classmethod
    def of(cls, epoch: Epoch, lengths: SampleLengths, limits: PackLimits, numbers: IntArray) -> Packing:
        """The steps with these numbers, such as :func:`spread_steps` chooses, of an epoch of ``lengths``."""
        load = epoch.packs.load(lengths)
        return cls(
            limits=limits,
            micro_batches=epoch.micro_batches,
            samples_per_step=samples_per_pack(epoch) * epoch.num_replicas * epoch.micro_batches,
            steps=tuple(tuple(load[packs] for packs in epoch.steps[number]) for number in numbers),
            largest=largest_load(lengths, limits),
            numbers=tuple(map(int, numbers)),
        )

    @classmethod
    def alike(cls, limits: PackLimits, *, num_replicas: int, micro_batches: int) -> Packing:
        """One step of packs that are all as large as the limits allow, each of one sample with one image."""
        pack = Load(limits.vision_units, limits.llm_tokens, limits.llm_tokens**2, limits.vision_units**2)
        step = (Load.stack([pack] * micro_batches),) * num_replicas
        return cls(limits, micro_batches, float(num_replicas * micro_batches), (step,), pack)

    @property
    def all_loads(self) -> Load:
        return Load.stack(Load.stack(step) for step in self.steps)

    @property
    def fullest_mean(self) -> Load:
        """As much of every size as a mean micro-batch of any of the steps holds."""
        return Load.stack(step.mean() for step in self.all_loads).max()

    def median_step(self, profile: ModelProfile) -> Packing:
        """A packing with one step only: that of the median time, as if each replica were one device."""
        parts = (layer.forward_seconds + layer.backward_seconds + layer.weight_seconds for layer in profile.layers)
        seconds = sum(parts, start=CostModel())(self.all_loads).sum(axis=2).max(axis=1)
        middle = int(np.argsort(seconds, kind="stable")[len(seconds) // 2])
        return replace(self, steps=(self.steps[middle],), numbers=self.numbers[middle : middle + 1])


def spread_steps(num_steps: int, count: int) -> IntArray:
    """Numbers of at most ``count`` steps, spread evenly over an epoch.

    >>> spread_steps(101, 3).tolist(), spread_steps(3, 8).tolist(), spread_steps(1, 4).tolist()
    ([0, 50, 99], [0, 1], [0])
    """
    # The last step is left out unless it is the only one: it may be short of samples.
    return np.unique(np.linspace(0, max(num_steps - 1, 1) - 1, count).round().astype(np.int64))


def samples_per_pack(epoch: Epoch) -> float:
    sizes = epoch.packs.sizes
    return float(sizes.sum() / (sizes > 0).sum())


def packings(lengths: SampleLengths, request: PlanRequest, num_replicas: int) -> list[Packing]:
    """Packings to choose from: that of the request's limits, or the paper's first and then others that waste little."""
    if len(lengths) < request.global_batch:
        raise ConfigError(f"lengths must hold a step of {request.global_batch} samples, got {len(lengths)}")
    needed = max(LEAST_SAMPLES, max(LEAST_STEPS, (request.steps or 0) + 1) * request.global_batch)
    chosen = np.random.default_rng(request.seed).permutation(len(lengths))[:needed]
    packer = _Packer(lengths, lengths.take(np.sort(chosen)), request, num_replicas)
    if request.limits is not None:
        request.limits.refuse_none(lengths)
        return [packer.pack(request.limits)]
    # Smaller packs make more micro-batches and smaller bubbles; larger packs are better balanced and waste less. For
    # each number of micro-batches there is one pair of limits, the one that wastes least. The paper's limits are always
    # considered. Of limits with equally many micro-batches the first serve.
    found = [packer.pack(paper_limits(lengths))]
    for packing in map(packer.pack, packer.spread_limits()):
        known = {other.micro_batches for other in found}
        if packing.micro_batches not in known and request.keeps_batch(packing.samples_per_step):
            found.append(packing)
    return found


@dataclass(frozen=True)
class _Packer:
    lengths: SampleLengths
    part: SampleLengths  # a random part of the lengths, which is packed
    request: PlanRequest
    num_replicas: int

    def pack(self, limits: PackLimits) -> Packing:
        """Pack with the number of micro-batches that comes nearest to the global batch."""
        micro_batches = self._micro_batches(samples_per_pack(self._arrange(limits, micro_batches=1)))
        epoch = self._arrange(limits, micro_batches)
        steps = self.request.steps or max(FEWEST_SIMULATED, SIMULATED // (self.num_replicas * micro_batches))
        packing = Packing.of(epoch, self.part, limits, spread_steps(epoch.num_steps, steps))
        return replace(packing, largest=largest_load(self.lengths, limits))

    def spread_limits(self) -> Iterator[PackLimits]:
        """For some numbers of micro-batches the limits that waste least among those that keep the global batch."""
        best: dict[int, PackLimits] = {}
        # search_limits yields the limits that waste least first, so the first limits of each count stay.
        for scored in search_limits(self.part, self._ceiling(), num_replicas=self.num_replicas, method="isf"):
            count = self._micro_batches(scored.samples_per_pack)
            if self.request.keeps_batch(scored.samples_per_pack * self.num_replicas * count):
                best.setdefault(count, scored.limits)
        # Counts in about equal ratios: one more micro-batch matters only where there are few.
        counts = sorted(best)
        places = np.unique(np.geomspace(1, max(len(counts), 1), MOST_PACKINGS).round().astype(int) - 1)
        return (best[counts[place]] for place in places if counts)

    def _arrange(self, limits: PackLimits, micro_batches: int) -> Epoch:
        method, seed, ranks = self.request.method, self.request.seed, self.num_replicas
        return arrange_epoch(
            self.part, limits, num_replicas=ranks, micro_batches=micro_batches, method=method, seed=seed
        )

    def _micro_batches(self, samples_per_pack: float) -> int:
        # Several encoders share the micro-batches of one of the LLM's replicas alike.
        encoder = self.request.encoder
        has_devices = encoder is not None and encoder.placement == "own"
        sharing = max(encoder.num_replicas // self.num_replicas, 1) if encoder is not None and has_devices else 1
        found = round(self.request.global_batch / (samples_per_pack * self.num_replicas * sharing))
        return sharing * max(1, found)

    def _ceiling(self) -> PackLimits:
        """Mean content of a pack if a step has one micro-batch, or the largest sample if that holds more."""
        summary, samples = self.lengths.summary, self.request.global_batch / self.num_replicas
        return PackLimits(
            max(summary.max_vision_units, round(samples * summary.total_vision_units / len(self.lengths))),
            max(summary.max_llm_tokens, round(samples * summary.total_llm_tokens / len(self.lengths)), 1),
        )
