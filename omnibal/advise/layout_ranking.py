"""Which layouts of a kind are worth a simulation: a formula ranks all of them in microseconds each.

A step of a pipeline takes about ``(micro_batches + FILL · (stages - 1)) · slowest stage``, and the sums of gradients.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product, zip_longest
from operator import add
from typing import Final, Literal, NamedTuple

import numpy as np

from omnibal.advise.estimate import Scenario, doubling
from omnibal.cluster import Cluster, Encoder, Layout
from omnibal.cost import CostModel, FloatArray, Load
from omnibal.errors import ConfigError, InfeasibleError
from omnibal.families.base import encoder_layers
from omnibal.memory.footprint import TrainingState
from omnibal.pipeline.partition import least_maximum
from omnibal.pipeline.search import differences
from omnibal.pipeline.times import split_profile
from omnibal.planner.allocation import ModuleCost, allocate
from omnibal.planner.packings import PlanRequest
from omnibal.profile.records import Level, ModelProfile

PipelineKind = Literal["pipeline", "tensor", "spread", "units"]
DEGREES: Final = (1, 2, 4, 8)  # tensor degrees that are tried, as far as their ranks lie in one node
MOST_STAGES: Final = 32
"""Most stages that are tried: deeper pipelines are hardly ever run, and take longest to simulate."""
LARGEST_PACK: Final = 8  # samples of the largest packs for which devices are allocated to units
MOST_ALIKE: Final = 3
"""Ranked layouts that may have the LLM and the number of micro-batches alike, with other encoders."""
FACTORS: Final = 2**9 * 3**3 * 5**2 * 7
"""Replicas of units are divisors of this number: few others have many encoders or LLMs that divide them."""
MOST_ALLOCATED: Final = 128  # allocations of devices to units of each size of packs
LEVELS_TRIED: Final[tuple[Level, ...]] = ("none", "full")
FILL: Final = 1 / 3
"""Bubble of a zero-bubble schedule in that of 1F1B, ``(stages - 1) · slowest``, where F, B and W take equally long
(Qi et al., ICLR 2024): the formula ranks what the best schedule may do."""


class RankedLayout(NamedTuple):
    seconds: float  # of a step
    layout: Layout
    micro_batches: int
    level: Level = "none"  # of a spread encoder


@dataclass(frozen=True, eq=False)
class LayoutRanking:
    """All layouts of a cluster for one model and data, ranked by a formula."""

    scenario: Scenario
    profiles: Callable[[int, int], ModelProfile]  # where so many devices share layers of the encoder, and of the LLM
    num_stages: int | None = None
    """Stages that every pipeline has; None: any number. Those of units count the encoder's."""
    refused: dict[tuple[int, int], str] = field(default_factory=dict)
    """Why the tensor degrees (encoder, LLM) that were tried in vain cannot be."""
    _counts: dict[tuple[int, int], tuple[PartCounts, PartCounts]] = field(default_factory=dict)
    _profiles: dict[tuple[int, int], ModelProfile] = field(default_factory=dict)

    def rank(self, kind: PipelineKind, missing: list[int]) -> list[RankedLayout]:
        """Layouts of a kind, the fastest of each degree in turns; ``missing`` gets what devices lack for others."""
        ranked = list[RankedLayout]()
        made = self._units(missing) if kind == "units" else self.layouts_of(kind)
        for layout, micro_batches, level in dict.fromkeys(made):
            try:
                seconds = self.formula_seconds(layout, micro_batches, level)
            except InfeasibleError as lacking:
                missing.append(lacking.missing_bytes)
            else:
                ranked.append(RankedLayout(seconds, layout, micro_batches, level))
        alike, by_degree = Counter[tuple[int, ...]](), defaultdict[int, list[RankedLayout]](list)
        for found in sorted(ranked, key=lambda found: found.seconds):
            layout = found.layout
            own = 0 if layout.encoder is None else layout.encoder.num_stages
            same = (layout.num_stages - own, layout.num_replicas, layout.num_tensor, found.micro_batches)
            alike[same] += 1
            if alike[same] <= MOST_ALIKE:
                by_degree[layout.num_tensor].append(found)
        # What the formula leaves out of memory depends on the tensor ranks most: each degree has its turn.
        return [found for turn in zip_longest(*by_degree.values()) for found in turn if found is not None]

    def layouts_of(self, kind: PipelineKind) -> Iterator[tuple[Layout, int, Level]]:
        """Every layout of a kind other than units, with micro-batches and what a spread encoder recomputes."""
        degrees, devices = degrees_within(self.scenario.cluster), self.scenario.cluster.num_devices
        found, num_layers = list[tuple[Layout, Level]](), len(self.scenario.profile.layers)
        if kind == "spread":
            for language, encoder in product(degrees, degrees):
                if encoder <= language and devices % encoder == 0 and self.counts(encoder, language):
                    spread = Encoder(0, devices // encoder, encoder, "spread")
                    layouts = self._pipelines(language, num_layers - self.border)
                    found += product((replace(layout, encoder=spread) for layout in layouts), LEVELS_TRIED)
        else:
            for degree in [1] if kind == "pipeline" else degrees[1:]:
                if self.counts(degree, degree):
                    found += [(layout, "none") for layout in self._pipelines(degree, num_layers)]
        for layout, level in found:
            yield from ((layout, micro_batches, level) for micro_batches in self.micro_batches(layout))

    def _pipelines(self, degree: int, most_stages: int) -> Iterator[Layout]:
        """Pipelines on all devices, of every number of stages that divides them."""
        ranks, left = divmod(self.scenario.cluster.num_devices, degree)
        # One stage on one device is no pipeline but data parallelism, which is weighed as ZeRO.
        for stages in range(2 if degree == 1 else 1, min(ranks, most_stages, MOST_STAGES) + 1):
            if left == 0 and ranks % stages == 0 and self.num_stages in (None, stages):
                yield self.layout(stages, ranks // stages, degree)

    def _units(self, missing: list[int]) -> Iterator[tuple[Layout, int, Level]]:
        """DistTrain's allocations for packs of several sizes, each part with and without recomputation."""
        degrees, devices = degrees_within(self.scenario.cluster), self.scenario.cluster.num_devices
        counted = {degree: counts for degree in degrees if (counts := self.counts(degree, degree))}
        if counted[1][0].seconds == 0:  # text alone leaves an encoder's devices idle
            return
        replicas = [count for count in range(1, devices) if FACTORS % count == 0]
        for samples, *levels in product(doubling(LARGEST_PACK), LEVELS_TRIED, LEVELS_TRIED):
            modules = [
                _module_cost(name, {degree: counts[part] for degree, counts in counted.items()}, samples, level)
                for part, (name, level) in enumerate(zip(("vision", "language"), levels, strict=True))
            ]
            try:
                found = allocate(
                    modules,
                    devices,
                    global_batch=max(self.scenario.samples_per_step // samples, 1),
                    device_memory_bytes=self._formula.room,
                    degrees=counted,
                    replicas=replicas,
                    most=MOST_ALLOCATED,
                )
            except InfeasibleError as lacking:
                missing.append(lacking.missing_bytes)
                continue
            for allocation in found:
                encoder, language = allocation.units["vision"], allocation.units["language"]
                own = Encoder(encoder.num_stages, encoder.num_replicas, encoder.num_tensor)
                stages = own.num_stages + language.num_stages
                layout = self.layout(stages, language.num_replicas, language.num_tensor, own)
                if self.num_stages in (None, stages) and units_can_be(layout, self.scenario.cluster):
                    for count in self.micro_batches(layout):
                        if count * layout.num_replicas % own.num_replicas == 0:
                            yield layout, count, "none"

    def formula_seconds(self, layout: Layout, micro_batches: int, level: Level) -> float:
        counts = self.counts(*degrees_of(layout))
        assert counts is not None, "layouts are made of degrees that were counted"
        return self._formula.seconds(*counts, layout, micro_batches, level)

    @cached_property
    def request(self) -> PlanRequest:
        return PlanRequest(cluster=self.scenario.cluster, global_batch=self.scenario.samples_per_step, schedule="auto")

    @cached_property
    def _formula(self) -> StepFormula:
        per_step, seconds = self.scenario.samples_per_step, self.scenario.alone[0].sum(axis=1)
        longest = float(seconds.reshape(-1, per_step).max(axis=1).mean() / seconds.mean())
        # The memory of a device without its margin and what it holds beside the model.
        room = (
            min(self.request.budgets(Layout(self.scenario.cluster.num_devices))) - self.scenario.cluster.overhead_bytes
        )
        return StepFormula(self.scenario.cluster, per_step, longest, room)

    @cached_property
    def border(self) -> int:
        return encoder_layers(self.scenario.profile.layers)

    @cached_property
    def mean_sample(self) -> Load:
        return self.scenario.samples(0).load.mean()

    def profile(self, encoder: int, language: int) -> ModelProfile:
        if (encoder, language) not in self._profiles:
            alone = (encoder, language) == (1, 1)
            self._profiles[encoder, language] = self.scenario.profile if alone else self.profiles(encoder, language)
        return self._profiles[encoder, language]

    def counts(self, encoder: int, language: int) -> tuple[PartCounts, PartCounts] | None:
        """Counts of encoder and LLM; None where so many devices cannot share their layers."""
        if (encoder, language) in self.refused:
            return None
        if (encoder, language) not in self._counts:
            try:
                parts = split_profile(self.profile(encoder, language))
            except ConfigError as refusal:
                self.refused[encoder, language] = str(refusal)
                return None
            counts = [PartCounts.of(part, self.mean_sample, lambda count: self.layout(1, count, 1)) for part in parts]
            self._counts[encoder, language] = (counts[0], counts[1])
        return self._counts[encoder, language]

    def layout(self, stages: int, replicas: int, degree: int, encoder: Encoder | None = None) -> Layout:
        precision = self.scenario.profile.dtype
        return Layout(stages, replicas, num_tensor=degree, encoder=encoder, precision=precision)  # type: ignore[arg-type]

    def micro_batches(self, layout: Layout) -> list[int]:
        """Numbers of micro-batches of a replica in about equal ratios, up to one for each sample."""
        return doubling(self.scenario.samples_per_step // layout.num_replicas)


def degrees_within(cluster: Cluster) -> list[int]:
    """Tensor degrees whose ranks lie in one node each, as ranks count through the nodes."""
    size = cluster.devices_per_node
    return [degree for degree in DEGREES if degree <= size and (size % degree == 0 or cluster.num_nodes == 1)]


def units_can_be(layout: Layout, cluster: Cluster) -> bool:
    """Whether replicas of encoder and LLM divide each other, and no tensor ranks of the LLM lie in two nodes."""
    # The LLM's ranks come behind the encoder's.
    starts_even = layout.parts[0].num_devices % layout.num_tensor == 0
    return layout.has_even_units and (starts_even or cluster.num_nodes == 1)


def degrees_of(layout: Layout) -> tuple[int, int]:
    return layout.num_tensor if layout.encoder is None else layout.encoder.num_tensor, layout.num_tensor


def _module_cost(name: str, counts: Mapping[int, PartCounts], samples: int, level: Level) -> ModuleCost:
    """A part of the model with packs of so many samples in place of samples; ``counts`` are by tensor degree."""
    whole, again = counts[1], level == "full"
    ratio = 2.0 if whole.kept > 0 else 0.0  # of a trained part; only the sum of forward and backward pass counts here
    return ModuleCost(
        name,
        {degree: samples * (part.seconds + again * part.recompute) / (1 + ratio) for degree, part in counts.items()},
        backward_ratio=ratio,
        parameter_bytes=whole.state,
        optimizer_bytes=whole.shared,
        activation_bytes=samples * (whole.kept_recomputed if again else whole.kept),
        num_layers=min(whole.num_layers, MOST_STAGES),
    )


@dataclass(frozen=True)
class PartCounts:
    """What a part of the model costs per sample, on each of the devices that share its layers."""

    passes: tuple[float, ...]  # seconds of every layer, forward and backward
    recomputed: tuple[float, ...]  # seconds that full recomputation adds to every layer
    kept: float  # bytes that autograd keeps without recomputation
    kept_recomputed: float
    state: float  # bytes of weights and gradients, whatever the replicas
    shared: float  # bytes of optimizer state, divided by the replicas
    gradients: float  # bytes that replicas add up after a step
    sent: float  # bytes that pass a cut behind the first layers
    update: float  # seconds of the optimizer, divided by the replicas
    num_layers: int

    @classmethod
    def of(cls, profile: ModelProfile, sample: Load, layout_of: Callable[[int], Layout]) -> PartCounts:
        """Counts for one sample; ``layout_of`` makes the layout of so many replicas."""
        layers, evaluated = profile.layers[profile.frozen_front :], dict[CostModel, float]()

        def value(cost: CostModel) -> float:
            if cost not in evaluated:
                evaluated[cost] = float(cost(sample))
            return evaluated[cost]

        passes = [
            value(layer.forward_seconds) + (value(layer.backward_seconds) + value(layer.weight_seconds)) * trained
            for trained, part in ((False, profile.layers[: profile.frozen_front]), (True, layers))
            for layer in part
        ]
        # TrainingState adds up what replicas share and what they do not: two numbers of replicas tell them apart.
        one, two = (float(TrainingState(profile, layout_of(count)).whole[0, -1]) for count in (1, 2))
        again = [value(layer.recompute_seconds["full"]) for layer in layers]
        return cls(
            passes=tuple(passes),
            recomputed=(0.0,) * profile.frozen_front + tuple(again),
            kept=sum(value(layer.saved_bytes["none"]) for layer in layers),
            kept_recomputed=sum(value(layer.saved_bytes["full"]) for layer in layers),
            state=2 * two - one,
            shared=2 * (one - two),
            gradients=sum(layer.gradient_bytes for layer in profile.layers),
            sent=value(profile.layers[0].output_bytes),
            update=sum(layer.optimizer_seconds for layer in profile.layers),
            num_layers=len(profile.layers),
        )

    @property
    def seconds(self) -> float:
        return sum(self.passes)

    @property
    def recompute(self) -> float:
        return sum(self.recomputed)

    def stage_state(self, layout: Layout) -> float:
        """Bytes of weights, gradients and optimizer state on a device of a mean stage."""
        return (self.state + self.shared / layout.num_replicas) / layout.num_stages

    def __add__(self, other: PartCounts) -> PartCounts:
        return PartCounts(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def stage_seconds(self, in_flight: FloatArray, samples: float, room: float) -> float:
        """Seconds of the slowest stage for so many samples, of which each stage keeps ``in_flight`` micro-batches."""
        num_stages = len(in_flight)
        everything, least = (in_flight * samples * kept / num_stages for kept in (self.kept, self.kept_recomputed))
        # A partition gives fewer layers to the first stages, which keep most: the mean stage must fit.
        if (missing := float(least.mean()) - room) > 0:
            raise InfeasibleError("all layers recomputed must fit", missing_bytes=round(missing))
        share = float(np.clip((everything - room) / np.maximum(everything - least, 1), 0, 1).mean())
        kept = _slowest_stage(self.passes, num_stages)
        again = _slowest_stage(tuple(map(add, self.passes, self.recomputed)), num_stages) if share else kept
        return samples * (kept + share * (again - kept))


@lru_cache(maxsize=1024)
def _slowest_stage(passes: tuple[float, ...], num_stages: int) -> float:
    sums = np.cumsum((0.0, *passes))
    return least_maximum(np.stack([differences(sums)] * num_stages))[0]


@dataclass(frozen=True, eq=False)
class StepFormula:
    """About what a step of a layout takes. A stage is a mean one in memory and the slowest one in seconds."""

    cluster: Cluster
    samples_per_step: int
    largest_sample: float  # seconds of the longest sample of a step over those of a mean one
    room: float  # bytes of a device for the model and what it keeps

    def seconds(
        self, vision: PartCounts, language: PartCounts, layout: Layout, micro_batches: int, level: Level
    ) -> float:
        """Seconds of a step; ``level`` is what a spread encoder recomputes."""
        samples = self.samples_per_step / (layout.num_replicas * micro_batches)
        if layout.encoder is None:
            return self._pipeline(vision + language, layout, micro_batches, samples)
        if layout.encoder.placement == "own":
            return self._units(vision, language, layout, micro_batches, samples)
        encoder, behind = layout.parts
        share = self.samples_per_step / encoder.num_replicas
        kept, again = (vision.kept, 0.0) if level == "none" else (vision.kept_recomputed, vision.recompute)
        encoding, beside = share * (vision.seconds + again), vision.stage_state(encoder) + share * kept
        rest = self._pipeline(language, behind, micro_batches, samples, beside)
        return encoding + self._sums(vision, encoder, encoding) + rest

    def _pipeline(
        self, part: PartCounts, layout: Layout, micro_batches: int, samples: float, beside: float = 0.0
    ) -> float:
        """Seconds of one pipeline whose devices hold ``beside`` bytes more."""
        room = self.room - beside - part.stage_state(layout)
        slowest = part.stage_seconds(_in_flight(layout.num_stages, micro_batches), samples, room)
        pace = max(slowest, self._transfer(part, layout, samples))
        return pace * micro_batches + self._fill(part, layout, slowest, samples) + self._sums(part, layout, slowest)

    def _units(
        self, vision: PartCounts, language: PartCounts, layout: Layout, micro_batches: int, samples: float
    ) -> float:
        encoder, behind = layout.parts
        # LLM replicas that an encoder works for; it has as many micro-batches in flight for each stage behind it.
        served = behind.num_replicas / encoder.num_replicas
        in_flight = behind.num_stages * served + np.arange(encoder.num_stages, 0.0, -1)
        encoding = vision.stage_seconds(in_flight, samples, self.room - vision.stage_state(encoder))
        in_flight = _in_flight(behind.num_stages, micro_batches)
        seconds = language.stage_seconds(in_flight, samples, self.room - language.stage_state(behind))
        fill = self._fill(language, behind, seconds, samples) + 2 * self._transfer(vision, behind, samples)
        # Encoders run 1F1B, whose bubbles nothing fills. One that serves several replicas makes the last of them wait.
        turns = (1 + 2 * max(served, 1)) / 3
        waits = encoding * self._uneven(samples) * (encoder.num_stages - 1 + turns)
        paces = encoding * served * micro_batches + FILL * seconds, seconds * micro_batches + waits
        return max(paces) + fill + max(self._sums(vision, encoder, encoding), self._sums(language, behind, seconds))

    def _fill(self, part: PartCounts, layout: Layout, seconds: float, samples: float) -> float:
        """Seconds in which stages wait for the largest micro-batch to pass all others, there and back."""
        passing = FILL * seconds * self._uneven(samples) + 2 * self._transfer(part, layout, samples)
        return (layout.num_stages - 1) * passing

    def _uneven(self, samples: float) -> float:
        """The largest of even micro-batches of so many samples over a mean one."""
        return max(self.largest_sample / samples, 1.0)

    def _transfer(self, part: PartCounts, layout: Layout, samples: float) -> float:
        if layout.num_stages == 1:
            return 0.0
        return samples * part.sent / self.cluster.links_of(layout).bandwidth_bytes_per_second

    def _sums(self, part: PartCounts, layout: Layout, seconds: float) -> float:
        """Seconds of the optimizer, of sums of gradients, and of updated weights coming back, that nothing hides."""
        update = part.update / (layout.num_stages * layout.num_replicas)
        if layout.num_replicas == 1:
            return update
        once = part.gradients / (layout.num_stages * self.cluster.links_of(layout).between_replicas)
        # Weights come beside the first forward pass, a third of a micro-batch; gradients go beside the last backward.
        return update + max(once - seconds / 3, 0) + max(once - seconds * 2 / 3, 0)


def _in_flight(num_stages: int, micro_batches: int) -> FloatArray:
    in_flight: FloatArray = np.minimum(np.arange(num_stages, 0.0, -1), micro_batches)
    return in_flight
