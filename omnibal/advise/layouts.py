"""Which layout wins: ZeRO as it is, with samples rearranged, one pipeline, a spread encoder, or units.

Every kind is estimated on the same samples, global batch, memory and costs. A formula ranks all layouts of a kind in
microseconds each; the best ones are then placed and simulated with partition, recompute levels and schedule searched
alike (`omnibal.planner.placements`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from omnibal.advise.batches import even_packs
from omnibal.advise.estimate import Estimate, Recipe, Scenario
from omnibal.advise.wait import Sharding, bandwidth, exposed_seconds, phase_costs, phase_seconds
from omnibal.cluster import Cluster, Encoder, Layout
from omnibal.cost import CostModel, FloatArray, Load
from omnibal.errors import ConfigError, InfeasibleError, bytes_in_words
from omnibal.memory.footprint import TrainingState
from omnibal.pipeline.schedule import SCHEDULES
from omnibal.planner.allocation import ModuleCost, allocate
from omnibal.planner.packings import Packing, PlanRequest
from omnibal.planner.placements import (
    PlacedStep,
    encoder_layers,
    place_pipeline,
    place_spread,
    place_units,
    split_profile,
)
from omnibal.profile.records import Level, ModelProfile

Kind = Literal["zero", "rearranged", "pipeline", "tensor", "spread", "units"]
KINDS: Final[Mapping[Kind, str]] = {
    "zero": "ZeRO with even packs",
    "rearranged": "ZeRO with samples rearranged between ViT and LLM (OrchMLLM)",
    "pipeline": "one pipeline through ViT and LLM (OmniBal)",
    "tensor": "one pipeline with tensor ranks in its stages",
    "spread": "the ViT on all devices, the LLM in a pipeline",
    "units": "ViT and LLM on devices of their own (DistTrain)",
}
"""From the simplest to adopt to the most complicated one."""
RUNS_TODAY: Final[tuple[Kind, ...]] = ("zero", "rearranged", "pipeline")
EQUAL: Final = 0.03
"""Share by which layouts may differ and still count as equally fast: take the simplest of these."""
DEGREES: Final = (1, 2, 4, 8)
"""Tensor ranks that are tried, as far as a node has so many devices."""
MOST_PLACED: Final = 12
"""Layouts and numbers of micro-batches of each kind that are placed, those that turn out not to fit among them."""
MOST_ALIKE: Final = 3
"""Of those, how many may have the LLM alike: with other encoders, or other numbers of micro-batches."""
MOST_STAGES: Final = 32
"""Stages that are tried: deeper pipelines are hardly ever run, and take longest to simulate."""
LARGEST_PACK: Final = 8
"""Samples of the largest packs for which devices are allocated to units."""
SHARDINGS: Final[tuple[Sharding, ...]] = ("zero1", "zero2", "zero3")
LEVELS_TRIED: Final[tuple[Level, ...]] = ("none", "full")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout and what it would do."""

    kind: Kind
    layout: str
    """In words."""
    samples_per_second: float
    peak_bytes: int
    """What the fullest device holds."""
    micro_batches: int
    """Of a replica in a step."""
    shares: Mapping[str, float]
    """Shares of all devices' time by cause; they add up to 1."""
    unhidden_samples_per_second: float | None = None
    """Samples a second if ranks computed nothing beside what they send, where hiding is an assumption."""
    step: PlacedStep | None = None
    """Of a pipeline or what contains one."""
    recipe: Recipe | None = None
    """Of data parallelism."""

    @property
    def runs_today(self) -> bool:
        """Whether omnibal can train so; otherwise it can only be weighed."""
        return self.kind in RUNS_TODAY


@dataclass(frozen=True)
class LayoutAnswer:
    """The fastest layout of every kind that fits, and what the others lack."""

    candidates: tuple[Candidate, ...]
    """Fastest first, one of each kind."""
    missing_bytes: Mapping[Kind, int]
    """What a device lacks at least, of kinds that do not fit; 0 where it is not memory that lacks."""

    @property
    def winner(self) -> Candidate:
        """The simplest of those that are as fast as the fastest one."""
        return self._simplest(self.candidates)

    @property
    def winner_today(self) -> Candidate | None:
        """The simplest of the fastest that omnibal can run; None where only others fit."""
        running = tuple(found for found in self.candidates if found.runs_today)
        return self._simplest(running) if running else None

    def equals(self, first: Candidate, second: Candidate) -> bool:
        """Whether two are equally fast as far as an estimate can tell."""
        slower, faster = sorted((first.samples_per_second, second.samples_per_second))
        return faster <= slower * (1 + EQUAL)

    def _simplest(self, found: tuple[Candidate, ...]) -> Candidate:
        order = list(KINDS)
        return min((each for each in found if self.equals(found[0], each)), key=lambda each: order.index(each.kind))


def weigh_layouts(
    scenario: Scenario,
    profiles: Callable[[int, int], ModelProfile],
    *,
    kinds: tuple[Kind, ...] = tuple(KINDS),
    report: Callable[[str], object] = lambda doing: None,
) -> LayoutAnswer:
    """Find the fastest layout of every kind.

    Args:
        scenario: Data, costs on one device, machines and the samples of a step.
        profiles: Costs where so many devices share each layer of the encoder, and of the LLM.
        kinds: What is weighed.
        report: Called with what is being done.

    Raises:
        ConfigError: The samples of a step are fewer than the devices of the cluster can share.
        InfeasibleError: No layout of any kind fits.
    """
    weighing = _Weighing(scenario, profiles, report)
    found: list[Candidate] = []
    missing: dict[Kind, int] = {}
    for kind in kinds:
        report(f"weighing {KINDS[kind]}")
        best = weighing.best(kind)
        if isinstance(best, Candidate):
            found.append(best)
        else:
            missing[kind] = best
    if not found:
        least = min(missing.values(), default=0)
        raise InfeasibleError(
            f"a layout must fit {scenario.cluster}, got none; the nearest lacks {bytes_in_words(least)} a device",
            missing_bytes=least,
        )
    return LayoutAnswer(tuple(sorted(found, key=lambda each: -each.samples_per_second)), missing)


class _Rough(NamedTuple):
    """A layout as the formula ranks it."""

    seconds: float  # of a step
    layout: Layout
    micro_batches: int
    level: Level = "none"  # of a spread encoder


@dataclass(frozen=True)
class _Counts:
    """What a part of the model costs per sample, on each of the devices that share its layers."""

    seconds: float  # forward and backward
    largest_layer: float  # the slowest layer's
    recompute: float  # all that full recomputation adds
    kept: float  # bytes that autograd keeps without recomputation
    kept_recomputed: float
    state: float  # bytes of weights and gradients, whatever the replicas
    shared: float  # bytes of optimizer state, divided by the replicas
    num_layers: int

    @classmethod
    def of(cls, profile: ModelProfile, sample: Load, precision_of: Callable[[int], Layout]) -> _Counts:
        layers = profile.layers[profile.frozen_front :]
        evaluated: dict[CostModel, float] = {}

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
        one, two = (float(TrainingState(profile, precision_of(count)).whole[0, -1]) for count in (1, 2))
        return cls(
            seconds=sum(passes),
            largest_layer=max(passes),
            recompute=sum(value(layer.recompute_seconds["full"]) for layer in layers),
            kept=sum(value(layer.saved_bytes["none"]) for layer in layers),
            kept_recomputed=sum(value(layer.saved_bytes["full"]) for layer in layers),
            state=2 * two - one,
            shared=2 * (one - two),
            num_layers=len(profile.layers),
        )

    def stage_state(self, num_stages: int, num_replicas: int) -> float:
        """Bytes of weights, gradients and optimizer state on a device of one of so many stages."""
        return (self.state + self.shared / num_replicas) / num_stages

    def __add__(self, other: _Counts) -> _Counts:
        sums = {name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__}
        return _Counts(**sums | {"largest_layer": max(self.largest_layer, other.largest_layer)})

    def stage_seconds(self, num_stages: int, in_flight: float, samples: float, room: float) -> float:
        """Seconds of a mean stage for a micro-batch of so many samples, recomputing as little as the room allows."""
        everything, least = (in_flight * samples * kept / num_stages for kept in (self.kept, self.kept_recomputed))
        if least > room:
            raise InfeasibleError("all layers recomputed must fit", missing_bytes=round(least - room))
        recomputed = 0.0 if everything <= room else (everything - room) / (everything - least)
        # Stages are whole layers: the slowest one has about half a layer more than the mean, if there are several.
        uneven = self.largest_layer / 2 if num_stages > 1 else 0.0
        return samples * max((self.seconds + recomputed * self.recompute) / num_stages + uneven, self.largest_layer)


@dataclass(frozen=True, eq=False)
class _Weighing:
    scenario: Scenario
    profiles: Callable[[int, int], ModelProfile]
    report: Callable[[str], object]
    _packings: dict[tuple[int, int], Packing] = field(default_factory=dict)
    _counts: dict[tuple[int, int], tuple[_Counts, _Counts]] = field(default_factory=dict)
    _profiles: dict[tuple[int, int], ModelProfile] = field(default_factory=dict)
    _estimates: dict[Recipe, Estimate] = field(default_factory=dict)

    def best(self, kind: Kind) -> Candidate | int:
        """The fastest layout of a kind, or the bytes that a device lacks."""
        if kind in ("zero", "rearranged"):
            return self._data_parallel(rearranged=kind == "rearranged")
        ranked, missing = list[_Rough](), list[int]()
        if kind == "units":
            ranked += self._rough_units(missing)
        for layout, level in self._layouts_of(kind):
            for micro_batches in self._micro_batches(layout):
                try:
                    seconds = self._formula(layout, micro_batches, level)
                except InfeasibleError as lacking:
                    missing.append(lacking.missing_bytes)
                else:
                    ranked.append(_Rough(seconds, layout, micro_batches, level))
        ranked.sort(key=lambda rough: rough.seconds)
        found, alike = list[PlacedStep](), Counter[tuple[int, int, int]]()
        for rough in ranked:
            # The formula knows of no bubble within a stage's work and of no talk: what it says is hardly ever reached.
            done = alike.total() == MOST_PLACED
            if done or (found and rough.seconds > min(step.step_seconds for step in found)):
                break
            language = (rough.layout.num_stages, rough.layout.num_replicas, rough.layout.num_tensor)
            if alike[language] < MOST_ALIKE:
                alike[language] += 1
                found += self._placed(rough, missing)
        if found:
            return self._candidate(kind, min(found, key=lambda step: step.step_seconds))
        return min(missing, default=0)

    # Pipelines, and what contains one

    def _layouts_of(self, kind: Kind) -> Iterator[tuple[Layout, Level]]:
        """Layouts on all devices of a kind but units, and what a spread encoder recomputes."""
        degrees = [degree for degree in DEGREES if degree <= self._cluster.devices_per_node]
        if kind in ("pipeline", "tensor"):
            for degree in [1] if kind == "pipeline" else degrees[1:]:
                if self._counted(degree, degree):
                    yield from ((layout, "none") for layout in self._pipelines(degree, self._num_layers))
            return
        for language, encoder in product(degrees, degrees) if kind == "spread" else ():
            if encoder <= language and self._counted(encoder, language) and self._cluster.num_devices % encoder == 0:
                copies = self._cluster.num_devices // encoder
                for layout in self._pipelines(language, self._num_layers - self._border):
                    spread = replace(layout, encoder=Encoder(0, copies, encoder, "spread"))
                    yield from ((spread, level) for level in LEVELS_TRIED)

    def _pipelines(self, degree: int, most_stages: int) -> Iterator[Layout]:
        """All numbers of stages that divide the devices."""
        ranks, left = divmod(self._cluster.num_devices, degree)
        for stages in range(1, min(ranks, most_stages, MOST_STAGES) + 1):
            if left == 0 and ranks % stages == 0:
                yield self._layout(stages, ranks // stages, degree)

    def _formula(self, layout: Layout, micro_batches: int, level: Level) -> float:
        """About how long a step takes: ``(micro_batches + stages - 1) · slowest``, and what a spread encoder adds.

        Raises:
            InfeasibleError: A mean stage with all layers recomputed does not fit.
        """
        own, stages, replicas = layout.encoder, layout.num_stages, layout.num_replicas
        counts = self._counted(layout.num_tensor if own is None else own.num_tensor, layout.num_tensor)
        assert counts is not None, "layouts are made of degrees that were counted"
        vision, language = counts
        samples = self.scenario.samples_per_step / (replicas * micro_batches)

        def pace(part: _Counts, depth: int, copies: int, in_flight: float, beside: float = 0.0) -> float:
            room = self._room - beside - part.stage_state(depth, copies)
            return part.stage_seconds(depth, in_flight, samples, room)

        if own is None:
            seconds = pace(vision + language, stages, replicas, _in_flight(stages, micro_batches))
            return seconds * (micro_batches + stages - 1)
        share = self.scenario.samples_per_step / own.num_replicas
        kept, again = (vision.kept, 0.0) if level == "none" else (vision.kept_recomputed, vision.recompute)
        beside = vision.stage_state(1, own.num_replicas) + share * kept
        seconds = pace(language, stages, replicas, _in_flight(stages, micro_batches), beside)
        return share * (vision.seconds + again) + seconds * (micro_batches + stages - 1)

    def _rough_units(self, missing: list[int]) -> Iterator[_Rough]:
        """DistTrain's allocations for packs of several sizes, each part with and without recomputation."""
        degrees = [degree for degree in DEGREES if degree <= self._cluster.devices_per_node]
        counted = {degree: counts for degree in degrees if (counts := self._counted(degree, degree))}
        room = self._room + self._cluster.overhead_bytes
        for samples, *levels in product(_doubling(LARGEST_PACK), LEVELS_TRIED, LEVELS_TRIED):
            num_packs = self.scenario.samples_per_step // samples
            modules = [
                _module_cost(name, {degree: counts[part] for degree, counts in counted.items()}, samples, level)
                for part, (name, level) in enumerate(zip(("vision", "language"), levels, strict=True))
            ]
            try:
                found = allocate(
                    modules, self._cluster.num_devices, global_batch=max(num_packs, 1), device_memory_bytes=room,
                    degrees=counted, most=MOST_PLACED,
                )  # fmt: skip
            except InfeasibleError as lacking:
                missing.append(lacking.missing_bytes)
                continue
            for allocation in found:
                encoder, language = allocation.units["vision"], allocation.units["language"]
                fewer, more = sorted((encoder.num_replicas, language.num_replicas))
                if more % fewer == 0:
                    own = Encoder(encoder.num_stages, encoder.num_replicas, encoder.num_tensor)
                    stages = own.num_stages + language.num_stages
                    layout = self._layout(stages, language.num_replicas, language.num_tensor, own)
                    yield _Rough(allocation.iteration_seconds, layout, allocation.micro_batches)

    def _placed(self, rough: _Rough, missing: list[int]) -> Iterator[PlacedStep]:
        """The layout under every schedule, as far as it fits; what a device lacks otherwise goes to ``missing``."""
        layout = rough.layout
        degree = layout.num_tensor
        profile = self._profile(degree if layout.encoder is None else layout.encoder.num_tensor, degree)
        packing = self._packing(layout.num_replicas, rough.micro_batches)
        self.report(f"simulating {layout}, {rough.micro_batches} micro-batches")
        own = 0 if layout.encoder is None else layout.encoder.num_stages
        # A single stage has no bubble that another schedule could fill.
        for schedule in SCHEDULES if layout.num_stages - own > 1 else tuple(SCHEDULES)[:1]:
            try:
                if layout.encoder is None:
                    yield place_pipeline(profile, packing, layout, self._request, schedule)
                elif layout.encoder.placement == "spread":
                    yield place_spread(profile, packing, layout, self._request, schedule, rough.level)
                else:
                    yield place_units(profile, packing, layout, self._request, schedule)
            except InfeasibleError as lacking:
                missing.append(lacking.missing_bytes)

    def _candidate(self, kind: Kind, step: PlacedStep) -> Candidate:
        layout, devices = step.layout, self._cluster.num_devices
        packing = self._packing(layout.num_replicas, step.micro_batches)
        loads, total = packing.all_loads, step.step_seconds * devices
        # Work as one device would do it, and what sharing layers adds: all-reduces, and what every rank does in whole.
        degrees = (layout.num_tensor if layout.encoder is None else layout.encoder.num_tensor, layout.num_tensor)
        useful = sum(_device_seconds(self._profile(1, 1), (1, 1), loads))
        shared = sum(_device_seconds(self._profile(*degrees), degrees, loads))
        spent = {"useful": useful, "tensor ranks": shared - useful, "recomputation": step.recompute_seconds}
        shares = {cause: seconds / total for cause, seconds in spent.items()}
        shares["bubbles, transfers, sums of gradients"] = 1 - sum(shares.values())
        return Candidate(
            kind=kind,
            layout=f"{layout}, {step.schedule}",
            samples_per_second=packing.samples_per_step / step.step_seconds,
            peak_bytes=step.peak_bytes,
            micro_batches=step.micro_batches,
            shares=shares,
            step=step,
        )

    # Data parallelism

    def _data_parallel(self, *, rearranged: bool) -> Candidate | int:
        """The fastest way to share the model's state alone."""
        found, missing = list[Candidate](), list[int]()
        for sharding, micro_batches in product(
            SHARDINGS[1:] if rearranged else SHARDINGS, self._micro_batches(Layout(1, self._cluster.num_devices))
        ):
            recipe = Recipe(sharding, "even", micro_batches=micro_batches, target_rows=self.scenario.spares_rows)
            kept, again = (self._estimate(replace(recipe, recompute=level)) for level in LEVELS_TRIED)
            if again.missing_bytes > 0:
                missing.append(again.missing_bytes)
                continue
            # Between no layer and all of them, as many recompute as must: peaks and seconds grow with their number.
            share = max(kept.missing_bytes, 0) / max(kept.missing_bytes - again.missing_bytes, 1)
            found.append(self._shared(kept, again, share, rearranged=rearranged))
        if found:
            return max(found, key=lambda each: each.samples_per_second)
        return min(missing, default=0)

    def _estimate(self, recipe: Recipe) -> Estimate:
        if recipe not in self._estimates:
            self._estimates[recipe] = self.scenario.estimate(recipe)
        return self._estimates[recipe]

    def _shared(self, kept: Estimate, again: Estimate, share: float, *, rearranged: bool) -> Candidate:
        """Data parallelism where a share of the layers recomputes."""
        recipe, devices = kept.recipe if share == 0 else again.recipe, self._cluster.num_devices
        spent = _between(kept.spent.mean(axis=0), again.spent.mean(axis=0), share)
        useful, padding, by_vision, by_language, recomputed, sent = spent.tolist()
        waits = by_vision + by_language
        if rearranged:
            # Each phase gets an even division of its own. Images are few and large, so that some of a phase's waits
            # stay; then features go to their samples' ranks, and their gradients back.
            waits = self._rearranged_waits
            sent += self._exchange_seconds
        whole = useful + padding + waits + recomputed + sent
        # What is sent does not depend on what recomputes.
        costs = [phase_seconds(self.scenario.profile, batches.loads) for batches in kept.batches]
        unhidden = np.mean(
            [
                exposed_seconds(kept.memory.held, recipe.sharding, self._cluster, phases, hides=False).sum()
                * devices / batches.num_samples
                for phases, batches in zip(costs, kept.batches, strict=True)
            ]
        )  # fmt: skip
        openly = whole - float(spent[-1]) + float(unhidden)
        shares = {"useful": useful + padding, "waits": waits, "recomputation": recomputed, "communication": sent}
        return Candidate(
            kind="rearranged" if rearranged else "zero",
            layout=f"{recipe.sharding} on {devices} ranks, {share:.0%} of the layers recompute",
            samples_per_second=devices / whole,
            peak_bytes=int(_between(kept.peaks[0], again.peaks[0], share)),
            micro_batches=recipe.micro_batches,
            shares={cause: seconds / whole for cause, seconds in shares.items()},
            unhidden_samples_per_second=devices / openly,
            recipe=recipe,
        )

    @cached_property
    def _rearranged_waits(self) -> float:
        """Device seconds per sample that ranks wait where every phase's samples are dealt longest first."""
        devices, per_step = self._cluster.num_devices, self.scenario.samples_per_step
        waits = []
        for alone in self.scenario.alone:
            for begin in range(0, len(alone) - per_step + 1, per_step):
                for phase in alone[begin : begin + per_step].T:
                    loads = np.zeros(devices)
                    for seconds in np.sort(phase)[::-1]:
                        loads[loads.argmin()] += seconds
                    waits.append((loads.max() - loads).sum() / per_step)
        return 2 * float(np.mean(waits))  # two phases a step

    @cached_property
    def _exchange_seconds(self) -> float:
        """Device seconds per sample of features on their way to other ranks, and of their gradients back."""
        profile, devices = self.scenario.profile, self._cluster.num_devices
        sample = self._mean_sample
        moved = float(profile.layers[self._border - 1].output_bytes(sample)) * (devices - 1) / devices
        return 2 * moved / bandwidth(self._cluster)

    # What all kinds share

    @property
    def _cluster(self) -> Cluster:
        return self.scenario.cluster

    @cached_property
    def _request(self) -> PlanRequest:
        return PlanRequest(cluster=self._cluster, global_batch=self.scenario.samples_per_step, schedule="auto")

    @cached_property
    def _room(self) -> float:
        """Bytes of a device without its head room and what it holds beside the model."""
        return min(self._request.budgets(Layout(self._cluster.num_devices))) - self._cluster.overhead_bytes

    @cached_property
    def _num_layers(self) -> int:
        return len(self.scenario.profile.layers)

    @cached_property
    def _border(self) -> int:
        return encoder_layers(self.scenario.profile)

    @cached_property
    def _mean_sample(self) -> Load:
        samples = self.scenario.draws[0]
        return (samples if self.scenario.spares_rows else samples.all_rows).load.mean()

    def _profile(self, encoder: int, language: int) -> ModelProfile:
        if (encoder, language) not in self._profiles:
            alone = (encoder, language) == (1, 1)
            self._profiles[encoder, language] = self.scenario.profile if alone else self.profiles(encoder, language)
        return self._profiles[encoder, language]

    def _counted(self, encoder: int, language: int) -> tuple[_Counts, _Counts] | None:
        """Counts of encoder and LLM; None where so many devices cannot share their layers."""
        if (encoder, language) not in self._counts:
            try:
                parts = split_profile(self._profile(encoder, language))
            except ConfigError:
                return None
            counts = [_Counts.of(part, self._mean_sample, lambda count: self._layout(1, count, 1)) for part in parts]
            self._counts[encoder, language] = (counts[0], counts[1])
        return self._counts[encoder, language]

    def _layout(self, stages: int, replicas: int, degree: int, encoder: Encoder | None = None) -> Layout:
        precision = self.scenario.profile.dtype
        return Layout(stages, replicas, num_tensor=degree, encoder=encoder, precision=precision)  # type: ignore[arg-type]

    def _micro_batches(self, layout: Layout) -> list[int]:
        """Numbers of micro-batches of a replica in about equal ratios, up to one for each sample."""
        return _doubling(self.scenario.samples_per_step // layout.num_replicas)

    def _packing(self, num_replicas: int, micro_batches: int) -> Packing:
        """Even packs of the first drawn steps; the largest of all drawn steps counts for memory."""
        if (num_replicas, micro_batches) not in self._packings:
            scenario = self.scenario
            made = [
                even_packs(
                    samples if scenario.spares_rows else samples.all_rows, alone, num_ranks=num_replicas,
                    micro_batches=micro_batches, samples_per_step=scenario.samples_per_step,
                )
                for samples, alone in zip(scenario.draws, scenario.alone, strict=True)
            ]  # fmt: skip
            largest = Load.stack([batches.loads.max() for batches in made]).max()
            steps = tuple(tuple(step) for step in made[0].loads)
            limits = made[0].largest
            self._packings[num_replicas, micro_batches] = Packing(
                limits, micro_batches, float(scenario.samples_per_step), steps, largest
            )
        return self._packings[num_replicas, micro_batches]


def _doubling(most: int) -> list[int]:
    """1, 2, 4, … up to ``most``, and ``most`` itself.

    >>> _doubling(6)
    [1, 2, 4, 6]
    """
    powers = [2**power for power in range(max(most, 1).bit_length()) if 2**power < most]
    return [*powers, most] if most > 0 else []


def _between(first: Any, last: Any, share: float) -> Any:
    return first + share * (last - first)


def _in_flight(num_stages: int, micro_batches: int) -> float:
    """Micro-batches in flight on a mean stage under 1F1B."""
    return sum(min(num_stages - stage, micro_batches) for stage in range(num_stages)) / num_stages


def _module_cost(name: str, counts: Mapping[int, _Counts], samples: int, level: Level) -> ModuleCost:
    """A part of the model with packs of so many samples in place of samples; ``counts`` are by tensor degree."""
    whole, trained = counts[1], counts[1].kept > 0
    ratio = 2.0 if trained else 0.0  # only the sum of forward and backward pass counts here
    again = level == "full"
    return ModuleCost(
        name,
        {degree: samples * (part.seconds + again * part.recompute) / (1 + ratio) for degree, part in counts.items()},
        backward_ratio=ratio,
        parameter_bytes=whole.state,
        optimizer_bytes=whole.shared,
        activation_bytes=samples * (whole.kept_recomputed if again else whole.kept),
        num_layers=whole.num_layers,
    )


def _device_seconds(profile: ModelProfile, degrees: tuple[int, int], loads: Load) -> tuple[float, float]:
    """Seconds of all devices together for a mean step in encoder and LLM, nothing recomputed."""
    costs: FloatArray = np.zeros(2)
    for phase, cost in phase_costs(profile).items():
        part = 0 if phase.startswith("vision") else 1
        costs[part] += float(cost(loads).sum()) / len(loads) * degrees[part]
    return float(costs[0]), float(costs[1])
