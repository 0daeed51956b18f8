"""Which layouts of a kind are worth a simulation: a formula ranks all of them in microseconds each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product, zip_longest
from typing import Final, Literal, NamedTuple

from omnibal.advise.estimate import Scenario
from omnibal.advise.layout_formula import PartCounts, StepFormula
from omnibal.cluster import Cluster, Encoder, Layout
from omnibal.cost import Load
from omnibal.errors import ConfigError, InfeasibleError
from omnibal.families.base import encoder_layers
from omnibal.pipeline.spread import split_profile
from omnibal.planner.allocation import ModuleCost, allocate
from omnibal.planner.packings import PlanRequest
from omnibal.profile.records import Level, ModelProfile

PipelineKind = Literal["pipeline", "tensor", "spread", "units"]
DEGREES: Final = (1, 2, 4, 8)
"""Tensor degrees that are tried, as far as their ranks lie in one node."""
MOST_STAGES: Final = 32
"""Most stages that are tried: deeper pipelines are hardly ever run, and take longest to simulate."""
LARGEST_PACK: Final = 8
"""Samples of the largest packs for which devices are allocated to units."""
MOST_ALIKE: Final = 3
"""Ranked layouts that may have the LLM and the number of micro-batches alike, with other encoders."""
FACTORS: Final = 2**9 * 3**3 * 5**2 * 7
"""Replicas of units are divisors of this number: few others have many encoders or LLMs that divide them."""
MOST_ALLOCATED: Final = 128
"""Allocations of devices to units of each size of packs."""
LEVELS_TRIED: Final[tuple[Level, ...]] = ("none", "full")


class RankedLayout(NamedTuple):
    seconds: float  # of a step
    layout: Layout
    micro_batches: int
    level: Level = "none"  # of a spread encoder


@dataclass(frozen=True, eq=False)
class LayoutRanking:
    """All layouts of a cluster for one model and data, ranked by a formula.

    ``profiles`` are the costs where so many devices share each layer of the encoder, and of the LLM.
    """

    scenario: Scenario
    profiles: Callable[[int, int], ModelProfile]
    num_stages: int | None = None
    """Stages that every pipeline has; None: any number. Those of units count the encoder's."""
    _counts: dict[tuple[int, int], tuple[PartCounts, PartCounts]] = field(default_factory=dict)
    refused: dict[tuple[int, int], str] = field(default_factory=dict)
    """Why the tensor degrees (encoder, LLM) that were tried in vain cannot be."""
    _profiles: dict[tuple[int, int], ModelProfile] = field(default_factory=dict)

    def rank(self, kind: PipelineKind, missing: list[int]) -> list[RankedLayout]:
        """Layouts of a kind, the fastest of each tensor degree in turns.

        What a device lacks for those that do not fit goes to ``missing``.
        """
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
        for layout, level in self._whole_layouts(kind):
            yield from ((layout, micro_batches, level) for micro_batches in self.micro_batches(layout))

    def _whole_layouts(self, kind: PipelineKind) -> Iterator[tuple[Layout, Level]]:
        degrees = degrees_within(self._cluster)
        if kind in ("pipeline", "tensor"):
            for degree in [1] if kind == "pipeline" else degrees[1:]:
                if self.counts(degree, degree):
                    yield from ((layout, "none") for layout in self._pipelines(degree, self.num_layers))
            return
        for language, encoder in product(degrees, degrees) if kind == "spread" else ():
            if encoder <= language and self.counts(encoder, language) and self._cluster.num_devices % encoder == 0:
                copies = self._cluster.num_devices // encoder
                for layout in self._pipelines(language, self.num_layers - self.border):
                    spread = replace(layout, encoder=Encoder(0, copies, encoder, "spread"))
                    yield from ((spread, level) for level in LEVELS_TRIED)

    def _pipelines(self, degree: int, most_stages: int) -> Iterator[Layout]:
        """Pipelines on all devices, of every number of stages that divides them."""
        ranks, left = divmod(self._cluster.num_devices, degree)
        # One stage on one device is no pipeline but data parallelism, which is weighed as ZeRO.
        for stages in range(2 if degree == 1 else 1, min(ranks, most_stages, MOST_STAGES) + 1):
            if left == 0 and ranks % stages == 0 and self.num_stages in (None, stages):
                yield self.layout(stages, ranks // stages, degree)

    def formula_seconds(self, layout: Layout, micro_batches: int, level: Level) -> float:
        counts = self.counts(*degrees_of(layout))
        assert counts is not None, "layouts are made of degrees that were counted"
        return self._formula.seconds(*counts, layout, micro_batches, level)

    def _units(self, missing: list[int]) -> Iterator[tuple[Layout, int, Level]]:
        """DistTrain's allocations for packs of several sizes, each part with and without recomputation."""
        degrees = degrees_within(self._cluster)
        counted = {degree: counts for degree in degrees if (counts := self.counts(degree, degree))}
        if counted[1][0].seconds == 0:  # text alone leaves an encoder's devices idle
            return
        replicas = [count for count in range(1, self._cluster.num_devices) if FACTORS % count == 0]
        for samples, *levels in product(_doubling(LARGEST_PACK), LEVELS_TRIED, LEVELS_TRIED):
            num_packs = self.scenario.samples_per_step // samples
            modules = [
                _module_cost(name, {degree: counts[part] for degree, counts in counted.items()}, samples, level)
                for part, (name, level) in enumerate(zip(("vision", "language"), levels, strict=True))
            ]
            try:
                found = allocate(
                    modules, self._cluster.num_devices, global_batch=max(num_packs, 1),
                    device_memory_bytes=self._formula.room, degrees=counted, replicas=replicas, most=MOST_ALLOCATED,
                )  # fmt: skip
            except InfeasibleError as lacking:
                missing.append(lacking.missing_bytes)
                continue
            for allocation in found:
                encoder, language = allocation.units["vision"], allocation.units["language"]
                own = Encoder(encoder.num_stages, encoder.num_replicas, encoder.num_tensor)
                stages = own.num_stages + language.num_stages
                layout = self.layout(stages, language.num_replicas, language.num_tensor, own)
                if self.num_stages in (None, stages) and units_can_be(layout, self._cluster):
                    for count in self.micro_batches(layout):
                        if count * layout.num_replicas % own.num_replicas == 0:
                            yield layout, count, "none"

    @property
    def _cluster(self) -> Cluster:
        return self.scenario.cluster

    @cached_property
    def request(self) -> PlanRequest:
        return PlanRequest(cluster=self._cluster, global_batch=self.scenario.samples_per_step, schedule="auto")

    @cached_property
    def _formula(self) -> StepFormula:
        per_step, seconds = self.scenario.samples_per_step, self.scenario.alone[0].sum(axis=1)
        longest = float(seconds.reshape(-1, per_step).max(axis=1).mean() / seconds.mean())
        # The memory of a device without its head room and what it holds beside the model.
        room = min(self.request.budgets(Layout(self._cluster.num_devices))) - self._cluster.overhead_bytes
        return StepFormula(self._cluster, per_step, longest, room)

    @cached_property
    def num_layers(self) -> int:
        return len(self.scenario.profile.layers)

    @cached_property
    def border(self) -> int:
        return encoder_layers(self.scenario.profile.layers)

    @cached_property
    def mean_sample(self) -> Load:
        samples = self.scenario.draws[0]
        return (samples if self.scenario.spares_rows else samples.all_rows).load.mean()

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
        return _doubling(self.scenario.samples_per_step // layout.num_replicas)


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


def _doubling(most: int) -> list[int]:
    """1, 2, 4, … up to ``most``, and ``most`` itself.

    >>> _doubling(6)
    [1, 2, 4, 6]
    """
    powers = [2**power for power in range(max(most, 1).bit_length()) if 2**power < most]
    return [*powers, most] if most > 0 else []


def _module_cost(name: str, counts: Mapping[int, PartCounts], samples: int, level: Level) -> ModuleCost:
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
        num_layers=min(whole.num_layers, MOST_STAGES),
    )
