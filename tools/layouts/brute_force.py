"""Layouts that a formula chooses against simulating all: python -m tools.layouts.brute_force [SETTINGS [FIRST]].

Settings are random: model, devices, nodes, links between these, samples of a step, memory, and what is trained.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from omnibal.advise import estimate, layout_ranking
from omnibal.advise.estimate import Scenario
from omnibal.advise.layout_ranking import LayoutRanking, PipelineKind, RankedLayout
from omnibal.advise.layouts import Kind, Weighing
from omnibal.advise.models import Model, adapted_profile
from omnibal.cluster import Cluster, Encoder, Layout
from omnibal.errors import ConfigError, InfeasibleError
from omnibal.planner.search import PlacedStep
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import ModelProfile
from tools.bench import line
from tools.synthetic import patch_lengths, tiled_lengths

KINDS: Final[tuple[PipelineKind, ...]] = ("pipeline", "tensor", "spread", "units")
SLACK: Final = 0.98
"""Part of a lower bound that is trusted: costs of a micro-batch that do not grow with it are counted per sample."""
FEW: Final = 6
"""Devices up to which all layouts are simulated whose lower bound is not above the fastest one found."""
MOST_RANKS: Final = 4
"""Tensor ranks that are compared."""
FAR: Final = 1.2
"""On more devices, layouts are left out for which the formula says more seconds than this many times the fastest."""


SHAPES: Final = ((1, 4), (1, 6), (2, 2), (2, 3), (3, 2), (1, 8), (2, 4), (4, 2), (3, 4), (2, 6), (2, 8), (3, 8))
"""Nodes, and devices of a node."""


@dataclass(frozen=True)
class Setting:
    """One random question."""

    model: str
    cluster: Cluster
    per_device: int
    trained: str
    seed: int

    @classmethod
    def drawn(cls, seed: int) -> "Setting":
        rng = np.random.default_rng(seed)
        device = rng.choice(["A100-40GB", "A100-80GB", "H100-80GB"])
        nodes, each = SHAPES[rng.integers(len(SHAPES))]
        model = rng.choice(["InternVL3-1B", "InternVL3-2B", "InternVL3-8B", "Qwen2.5-VL-3B", "Qwen2.5-VL-7B"])
        cluster = replace(
            Cluster.parse(f"{nodes}x{each}x{device}"), node_bytes_per_second=float(rng.choice([1e9, 3e9, 12e9, 50e9]))
        )
        trained = rng.choice(["everything", "frozen ViT", "frozen LLM", "LoRA"])
        return cls(str(model), cluster, int(rng.choice([2, 4, 8])), str(trained), seed)

    def __str__(self) -> str:
        links = f"{self.cluster.node_bytes_per_second or 0:.0e} B/s"
        return f"{self.model}, {self.cluster}, {links}, {self.per_device} samples a device, {self.trained}"

    def profile(self, encoder: int, language: int) -> ModelProfile:
        if max(encoder, language) > MOST_RANKS:
            raise ConfigError(f"degrees of at most {MOST_RANKS} are compared")
        records, degrees = Model.known(self.model).records, {"vision": encoder, "language": language}
        if self.trained == "LoRA":
            return adapted_profile(records, self.cluster.device, rank=16, tensor_parallel=degrees)
        frozen = {"everything": (), "frozen ViT": ("vision",), "frozen LLM": ("language",)}[self.trained]
        return analytic_profile(records, self.cluster.device, frozen=frozen, tensor_parallel=degrees)

    def weighing(self) -> Weighing:
        lengths = tiled_lengths if self.model.startswith("InternVL") else patch_lengths
        per_step = self.per_device * self.cluster.num_devices
        scenario = Scenario(lengths(4000, seed=self.seed), self.profile(1, 1), self.cluster, per_step, spares_rows=True)
        return Weighing(scenario, LayoutRanking(scenario, self.profile), lambda doing: None)


def every_layout(ranking: LayoutRanking, kind: PipelineKind) -> Iterator[RankedLayout]:
    """All layouts, numbers of micro-batches and levels of a kind, with a lower bound of a step's seconds."""
    made = _units(ranking) if kind == "units" else ranking.layouts_of(kind)
    samples = ranking.scenario.samples_per_step
    for layout, micro_batches, level in made:
        own, counts = layout.encoder, ranking.counts(*layout_ranking.degrees_of(layout))
        assert counts is not None
        seconds = np.array([part.seconds for part in counts]) * samples * SLACK
        if own is None:
            bound = seconds.sum() * layout.num_tensor / layout.num_devices
        elif own.placement == "own":
            stages = layout.num_stages - own.num_stages
            bound = max(seconds / (own.num_stages * own.num_replicas, stages * layout.num_replicas))
        else:
            bound = float(seconds @ (1 / own.num_replicas, 1 / (layout.num_stages * layout.num_replicas)))
        yield RankedLayout(float(bound), layout, micro_batches, level)


def _units(ranking: LayoutRanking) -> Iterator[tuple[Layout, int, str]]:
    cluster, border, num_layers = ranking.scenario.cluster, ranking.border, len(ranking.scenario.profile.layers)
    degrees = [degree for degree in layout_ranking.degrees_within(cluster) if degree <= MOST_RANKS]

    def parts(most: int, layers: int) -> Iterator[tuple[int, int, int]]:
        for degree in degrees:
            if ranking.counts(degree, degree) is None:
                continue
            for replicas in range(1, most // degree + 1):
                for stages in range(1, min(layers, most // (degree * replicas)) + 1):
                    yield stages, replicas, degree

    for stages, replicas, degree in parts(cluster.num_devices - 1, num_layers - border):
        left = cluster.num_devices - stages * replicas * degree
        for own in parts(left, border):
            layout = ranking.layout(own[0] + stages, replicas, degree, Encoder(*own))
            if layout_ranking.units_can_be(layout, cluster) and ranking.counts(own[2], degree) is not None:
                for micro_batches in ranking.micro_batches(layout):
                    if replicas * micro_batches % own[1] == 0:
                        yield layout, micro_batches, "none"


def fastest(weighing: Weighing, kind: PipelineKind) -> tuple[float, str, int]:
    """Seconds of the fastest step of a kind's layouts, that layout, and how many were simulated."""
    best, name, count, is_small = np.inf, "", 0, weighing.ranking.scenario.cluster.num_devices <= FEW
    for guess, each in _by_formula(weighing.ranking, kind):
        if each.seconds >= best or (not is_small and guess > FAR * best):
            continue
        count += 1
        for step in weighing.placed(each, []):
            if step.step_seconds < best:
                best, name = (
                    step.step_seconds,
                    f"{step.plan.layout}, {step.plan.micro_batches} micro-batches, {step.plan.schedule}",
                )
    return best, name, count


def _in_words(step: PlacedStep) -> str:
    plan = step.plan
    return f"{plan.layout}, {plan.schedule}, {plan.micro_batches} micro-batches"


def _by_formula(ranking: LayoutRanking, kind: PipelineKind) -> list[tuple[float, RankedLayout]]:
    def guess(each: RankedLayout) -> float:
        try:
            return ranking.formula_seconds(each.layout, each.micro_batches, each.level)
        except InfeasibleError:
            return np.inf

    return sorted(((guess(each), each) for each in every_layout(ranking, kind)), key=lambda pair: pair[0])


def compare(setting: Setting, kinds: Iterable[PipelineKind] = KINDS) -> dict[Kind, float]:
    """By kind, the share by which the chosen layout is slower than the fastest one, where any fits."""
    lost: dict[Kind, float] = {}
    for kind in kinds:
        weighing = setting.weighing()
        begun = time.process_time()
        found = weighing.tried(kind, [])
        chosen, (best, name, count) = time.process_time() - begun, fastest(weighing, kind)
        if found:
            step = found[0][0]
            lost[kind] = step.step_seconds / best - 1
            words = _in_words(step)
        elif best < np.inf:
            lost[kind], words = np.inf, "none"
        if kind in lost:
            print(
                line([setting.seed, setting, kind, f"{lost[kind]:.2%}", words, name, count, f"{chosen:.1f} s"]),
                flush=True,
            )
    return lost


if __name__ == "__main__":
    estimate.LEAST_SAMPLES = 128  # eight times fewer steps than usual to simulate each layout on
    settings, first = [*map(int, sys.argv[1:]), 40, 0][:2] if len(sys.argv) != 2 else [int(sys.argv[1]), 0]
    lost = [share for seed in range(first, first + settings) for share in compare(Setting.drawn(seed)).values()]
    shares = np.array(lost)
    print(
        f"{len(shares)} answers: "
        + ", ".join(f"within {most:.1%}: {(shares <= most).sum()}" for most in (0, 0.005, 0.01, 0.02, 0.03))
    )
