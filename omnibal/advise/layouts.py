"""Which layout wins: ZeRO as it is, with samples rearranged, one pipeline, a spread encoder, or units.

Every kind is estimated on the same samples, global batch, memory and costs. A formula ranks all layouts of a kind in
microseconds each; the best ones are then placed and simulated with partition, recompute levels and schedule searched
alike (`omnibal.planner.search.placed_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from statistics import fmean
from typing import Final, Literal

import numpy as np

from omnibal.advise.batches import Batches, even_packs
from omnibal.advise.estimate import Estimate, Recipe, Scenario
from omnibal.advise.layout_ranking import LEVELS_TRIED, LayoutRanking, PipelineKind, RankedLayout, degrees_of
from omnibal.advise.wait import Sharding, bandwidth, exposed_seconds, phase_costs, phase_seconds
from omnibal.cluster import Cluster, Layout
from omnibal.cost import FloatArray, Load
from omnibal.data.limits import fullest_load
from omnibal.data.step_size import limits_of_step
from omnibal.errors import ConfigError, InfeasibleError
from omnibal.pipeline.schedule import SCHEDULES, ScheduleName
from omnibal.plan import Plan
from omnibal.planner.packings import Packing
from omnibal.planner.search import PlacedStep, placed_step
from omnibal.planner.step_model import StepCosts
from omnibal.profile.records import ModelProfile

Kind = Literal["zero", "rearranged", "pipeline", "tensor", "spread", "units"]
KINDS: Final[Mapping[Kind, str]] = {
    "zero": "ZeRO with balanced packs",
    "rearranged": "ZeRO with samples rearranged for each encoder and the LLM (OrchMLLM)",
    "pipeline": "one pipeline through ViT and LLM (OmniBal)",
    "tensor": "one pipeline with tensor ranks in its stages",
    "spread": "the ViT on all devices, the LLM in a pipeline",
    "units": "ViT and LLM on devices of their own (DistTrain)",
}
"""From the simplest to adopt to the most complicated one."""
DATA_PARALLEL: Final[frozenset[Kind]] = frozenset({"zero", "rearranged"})
EQUAL: Final = 0.03
"""Share by which layouts may differ and still count as equally fast: take the simplest of these."""
MOST_PLACED: Final = 20  # layouts and numbers of micro-batches of each kind that are placed and fit
MOST_TRIED: Final = 30
"""Layouts and numbers of micro-batches of each kind that are tried, with those that turn out not to fit."""
MOST_SCHEDULED: Final = 5
"""The fastest of these that are simulated under every schedule; all others under ``LEAN`` alone, if it fits."""
LEAN: Final[ScheduleName] = "zero-bubble-lean"
MANY_DEVICES: Final = 96
"""On fewer devices, whose steps are simulated faster, up to ``MOST_TIMES`` as many are tried and placed."""
MOST_TIMES: Final = 4
MARGIN: Final = 1.15
"""Ranked layouts are tried while the formula says that they take at most so many times the fastest step so far."""
SHARDINGS: Final[tuple[Sharding, ...]] = ("zero1", "zero2", "zero3")


@dataclass(frozen=True, kw_only=True)
class WeighedLayout:
    kind: Kind
    layout: str  # the layout in words, with its schedule or sharding
    samples_per_second: float
    peak_bytes: int
    micro_batches: int
    shares: Mapping[str, float]  # shares of all devices' time by cause; they add up to 1
    unhidden_samples_per_second: float | None = None
    """Samples a second if nothing were computed while ranks communicate; None where hiding is not assumed."""
    plan: Plan | None = None
    recipe: Recipe | None = None
    recomputed: float = 0.0  # share of the layers that recompute, under data parallelism

    @property
    def runs_today(self) -> bool:
        """Whether omnibal can train so; otherwise it can only be weighed."""
        # A spread encoder and units run without tensor ranks alone.
        of_its_own = self.kind in ("spread", "units")
        return not (of_its_own and self.plan is not None and self.plan.layout.has_tensor_ranks)


@dataclass(frozen=True)
class LayoutAnswer:
    """The fastest layout of every kind that fits, and what the others lack."""

    candidates: tuple[WeighedLayout, ...]  # the best layout of each kind that fits, fastest first
    missing_bytes: Mapping[Kind, int]
    """Bytes that a device lacks at least, for kinds that do not fit; 0 where memory is not the reason."""
    refused: tuple[str, ...] = ()
    """Why some numbers of tensor ranks could not be weighed, such as one that does not divide the heads."""

    @property
    def winner(self) -> WeighedLayout | None:
        """The simplest of those that are as fast as the fastest one; None where nothing fits."""
        return self._simplest(self.candidates)

    @property
    def winner_today(self) -> WeighedLayout | None:
        """The simplest of the fastest that omnibal can run; None where only others fit."""
        return self._simplest(tuple(found for found in self.candidates if found.runs_today))

    def equals(self, first: WeighedLayout, second: WeighedLayout) -> bool:
        """Whether two are equally fast as far as an estimate can tell."""
        slower, faster = sorted((first.samples_per_second, second.samples_per_second))
        return faster <= slower * (1 + EQUAL)

    def _simplest(self, found: tuple[WeighedLayout, ...]) -> WeighedLayout | None:
        order = list(KINDS)
        equals = (each for each in found if self.equals(found[0], each))
        return min(equals, key=lambda each: order.index(each.kind), default=None)


def weigh_layouts(
    scenario: Scenario,
    profiles: Callable[[int, int], ModelProfile],
    *,
    kinds: tuple[Kind, ...] = tuple(KINDS),
    num_stages: int | None = None,
    report: Callable[[str], object] = lambda doing: None,
) -> LayoutAnswer:
    """Find the fastest layout of every kind, or what its devices lack; ``report`` is told what is being done.

    ``profiles`` are costs where so many devices share each layer of the encoder, and of the LLM.
    """
    cluster, per_step = scenario.cluster, scenario.samples_per_step
    if cluster.num_devices < 2:
        raise ConfigError(f"cluster must have at least 2 devices for layouts to differ, got {cluster}")
    if per_step < cluster.num_devices:
        raise ConfigError(
            f"samples of a step must be at least as many as the {cluster.num_devices} devices of {cluster} for layouts "
            f"to be weighed, got {per_step}; take more accumulation, or fewer devices"
        )
    if scenario.hears:
        kinds = tuple(kind for kind in kinds if kind in DATA_PARALLEL)
    ranking = LayoutRanking(scenario, profiles, num_stages)
    weighing = Weighing(scenario, ranking, report)
    found: list[WeighedLayout] = []
    missing: dict[Kind, int] = {}
    for kind in kinds:
        report(f"weighing {KINDS[kind]}")
        best = weighing.best(kind)
        if isinstance(best, WeighedLayout):
            found.append(best)
        else:
            missing[kind] = best
    refused = dict.fromkeys(ranking.refused.values())
    if scenario.hears:
        refused["pipelines, a spread encoder and units, which know no encoder of sound"] = None
    if num_stages is not None and set(kinds) - DATA_PARALLEL:
        refused[f"pipelines of other than the {num_stages} stages that omnibal.pipeline.num_stages says"] = None
    by_speed = sorted(found, key=lambda each: -each.samples_per_second)
    return LayoutAnswer(tuple(by_speed), missing, tuple(refused))


@dataclass(frozen=True, eq=False)
class Weighing:
    scenario: Scenario
    ranking: LayoutRanking
    report: Callable[[str], object]
    _batches: dict[tuple[int, int], list[Batches]] = field(default_factory=dict)

    def best(self, kind: Kind) -> WeighedLayout | int:
        if kind == "zero" or kind == "rearranged":  # noqa: PLR1714  (mypy narrows the literal so)
            return self._data_parallel(rearranged=kind == "rearranged")
        missing = list[int]()
        for step, ranked in self.tried(kind, missing):
            try:
                # On all draws, as ZeRO: on the first one alone a kind may be some percent lucky.
                costs = self._costs(ranked, len(self.scenario.draws))
                return self._candidate(kind, placed_step(costs, step.plan.schedule, ranked.level))
            except InfeasibleError as lacking:  # another draw may have a larger step
                missing.append(lacking.missing_bytes)
        return min(missing, default=0)

    def tried(self, kind: PipelineKind, missing: list[int]) -> list[tuple[PlacedStep, RankedLayout]]:
        """Steps of the best ranked layouts on the first draw, fastest first; ``missing`` gets what others lack."""
        found = list[tuple[PlacedStep, RankedLayout]]()
        tried, placed, times = 0, 0, min(max(MANY_DEVICES // self._cluster.num_devices, 1), MOST_TIMES)
        for ranked in self.ranking.rank(kind, missing):
            if tried == times * MOST_TRIED or placed == times * MOST_PLACED:
                break
            if not found or ranked.seconds <= MARGIN * min(step.step_seconds for step, _ in found):
                steps = self.placed(ranked, missing, [LEAN]) or self.placed(ranked, missing, ["1f1b"])
                found += [(step, ranked) for step in steps]
                tried, placed = tried + 1, placed + bool(steps)
        found.sort(key=lambda each: each[0].step_seconds)
        # Schedules of one layout differ by less than layouts do: only the fastest ones deserve all.
        for step, ranked in found[: times * MOST_SCHEDULED]:
            others = [schedule for schedule in SCHEDULES if schedule != step.plan.schedule]
            found += [(other, ranked) for other in self.placed(ranked, missing, others)]
        return sorted(found, key=lambda each: each[0].step_seconds)

    @property
    def _cluster(self) -> Cluster:
        return self.scenario.cluster

    def placed(
        self, ranked: RankedLayout, missing: list[int], schedules: Iterable[ScheduleName] = tuple(SCHEDULES)
    ) -> list[PlacedStep]:
        """Steps of a layout on the first draw, under each schedule with which it fits."""
        layout, costs, found = ranked.layout, self._costs(ranked, 1), list[PlacedStep]()
        self.report(f"simulating {layout}, {ranked.micro_batches} micro-batches")
        has_bubble = layout.num_stages - layout.encoder_stages > 1  # that another schedule than 1F1B could fill
        for schedule in schedules:
            if schedule != "1f1b" and not has_bubble:
                continue
            try:
                found.append(placed_step(costs, schedule, ranked.level))
            except InfeasibleError as lacking:
                missing.append(lacking.missing_bytes)
        return found

    def _costs(self, ranked: RankedLayout, draws: int) -> StepCosts:
        layout = ranked.layout
        profile = self.ranking.profile(*degrees_of(layout))
        return StepCosts(
            profile, self._packing(layout.num_replicas, ranked.micro_batches, draws), layout, self.ranking.request
        )

    def _candidate(self, kind: Kind, step: PlacedStep) -> WeighedLayout:
        plan, layout, devices = step.plan, step.plan.layout, self._cluster.num_devices
        packing = self._packing(layout.num_replicas, plan.micro_batches, len(self.scenario.draws))
        loads, total = packing.all_loads, step.step_seconds * devices
        # Work as one device would do it, and what sharing layers adds: all-reduces, and what every rank does in whole.
        degrees = degrees_of(layout)
        useful = sum(_device_seconds(self.ranking.profile(1, 1), (1, 1), loads))
        shared = sum(_device_seconds(self.ranking.profile(*degrees), degrees, loads))
        spent = {"useful": useful, "tensor ranks": shared - useful, "recomputation": step.recompute_seconds}
        shares = {cause: seconds / total for cause, seconds in spent.items()}
        shares["bubbles, transfers, sums of gradients"] = 1 - sum(shares.values())
        return WeighedLayout(
            kind=kind,
            layout=f"{layout}, {plan.schedule}",
            samples_per_second=packing.samples_per_step / step.step_seconds,
            peak_bytes=step.peak_bytes,
            micro_batches=plan.micro_batches,
            shares=shares,
            plan=plan,
        )

    # Data parallelism

    def _data_parallel(self, *, rearranged: bool) -> WeighedLayout | int:
        found, missing = list[WeighedLayout](), list[int]()
        sizes = self.ranking.micro_batches(Layout(1, self._cluster.num_devices))  # samples of a pack
        for sharding, size in product(SHARDINGS[1:] if rearranged else SHARDINGS, sizes):
            recipe = self.scenario.packed(Recipe(sharding, batch=size, target_rows=self.scenario.spares_rows))
            kept, again = (self.scenario.estimate(replace(recipe, recompute=level)) for level in LEVELS_TRIED)
            if again.missing_bytes > 0:
                missing.append(again.missing_bytes)
                continue
            # Between no layer and all of them, as many recompute as must.
            share = max(kept.missing_bytes, 0) / max(kept.missing_bytes - again.missing_bytes, 1)
            found.append(self._shared(kept, again, share, rearranged=rearranged))
        return max(found, key=lambda each: each.samples_per_second, default=min(missing, default=0))

    def _shared(self, kept: Estimate, again: Estimate, share: float, *, rearranged: bool) -> WeighedLayout:
        """Data parallelism where a share of the layers recomputes."""
        recipe, devices = kept.recipe if share == 0 else again.recipe, self._cluster.num_devices
        # Peaks and seconds grow with the number of layers that recompute.
        without, full = kept.spent.mean(axis=0), again.spent.mean(axis=0)
        spent = without + share * (full - without)
        of_cause = dict(zip(self.scenario.causes, spent.tolist(), strict=True))
        useful, recomputed = of_cause["useful"] + of_cause["padding"], of_cause["recomputation"]
        waited = sum(seconds for cause, seconds in of_cause.items() if cause.startswith("waiting"))
        sent = hidden = of_cause["communication"]  # what starting kernels takes is counted of no layout
        if rearranged:
            # Each phase gets an even division of its own. Images are few and large, so that some of a phase's waits
            # stay; then features go to their samples' ranks, and their gradients back.
            waited = self._rearranged_waits
            sent += self._exchange_seconds
        whole = useful + waited + recomputed + sent
        # What is sent does not depend on what recomputes.
        costs = [phase_seconds(self.scenario.profile, batches.timed()) for batches in kept.batches]
        unhidden = np.mean(
            [
                exposed_seconds(kept.memory.held, recipe.sharding, self._cluster, phases, hides=False).sum()
                * devices
                / batches.num_samples
                for phases, batches in zip(costs, kept.batches, strict=True)
            ]
        )
        openly = whole - hidden + float(unhidden)
        shares = {"useful": useful, "waits": waited, "recomputation": recomputed, "communication": sent}
        return WeighedLayout(
            kind="rearranged" if rearranged else "zero",
            layout=f"{recipe.sharding} on {devices} ranks, {share:.0%} of the layers recompute",
            samples_per_second=devices / whole,
            peak_bytes=int(kept.peaks[0] + share * (again.peaks[0] - kept.peaks[0])),
            micro_batches=recipe.micro_batches,
            shares={cause: seconds / whole for cause, seconds in shares.items()},
            unhidden_samples_per_second=devices / openly,
            recipe=recipe,
            recomputed=share,
        )

    @cached_property
    def _rearranged_waits(self) -> float:
        """Device seconds per sample that ranks wait where every part's samples are dealt longest first."""
        devices, per_step = self._cluster.num_devices, self.scenario.samples_per_step
        steps = [
            alone[begin : begin + per_step]
            for alone in self.scenario.alone
            for begin in range(0, len(alone) - per_step + 1, per_step)
        ]
        waited = 0.0
        for part in range(len(self.scenario.parts)):
            for step in steps:
                loads = np.zeros(devices)
                for seconds in np.sort(step[:, part])[::-1]:
                    loads[loads.argmin()] += seconds
                waited += float((loads.max() - loads).sum()) / per_step / len(steps)
        return waited

    @cached_property
    def _exchange_seconds(self) -> float:
        """Device seconds per sample of features on their way to other ranks, and of their gradients back."""
        layers, devices = self.scenario.profile.layers, self._cluster.num_devices
        sample, border = self.ranking.mean_sample, self.ranking.border
        # The last layer of each encoder; a projector behind an encoder of sound belongs to it.
        module = [layer.module for layer in layers]
        last = [n for n in range(border) if n + 1 == border or (module[n] == "sound" and module[n + 1] == "vision")]
        moved = sum(float(layers[n].output_bytes(sample)) for n in last) * (devices - 1) / devices
        return 2 * moved / bandwidth(self._cluster)

    def _packing(self, num_replicas: int, micro_batches: int, draws: int) -> Packing:
        """Even packs of the first draws."""
        scenario, lengths = self.scenario, self.scenario.lengths
        limits = limits_of_step(lengths, scenario.samples_per_step, num_replicas * micro_batches)
        if (num_replicas, micro_batches) not in self._batches:
            shape = {"num_ranks": num_replicas, "micro_batches": micro_batches}
            self._batches[num_replicas, micro_batches] = [
                even_packs(scenario.samples(draw), limits, **shape) for draw in range(len(scenario.draws))
            ]
        made = self._batches[num_replicas, micro_batches][:draws]
        steps = tuple(tuple(step) for batches in made for step in batches.loads)
        per_step = fmean(batches.samples_per_step for batches in made)
        return Packing(limits, micro_batches, per_step, steps, fullest_load(lengths, limits))


def _device_seconds(profile: ModelProfile, degrees: tuple[int, int], loads: Load) -> tuple[float, float]:
    """Seconds of all devices together for a mean step in encoder and LLM, nothing recomputed."""
    costs: FloatArray = np.zeros(2)
    for phase, cost in phase_costs(profile).items():
        part = 0 if phase.startswith("vision") else 1
        costs[part] += float(cost(loads).sum()) / len(loads) * degrees[part]
    return float(costs[0]), float(costs[1])
