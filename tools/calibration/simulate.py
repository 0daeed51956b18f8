"""Are counted costs that are wrong put right within 20 steps, and what does that bring? All simulated.

A device whose costs differ from the counted ones runs 20 steps, with noise. Costs are fitted to steps 3 to 20 as a run
does it, beside a fit of whole micro-batches to their loads alone, as without times of the parts.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from omnibal.advise.models import Model
from omnibal.advise.wait import PHASES, Sharding, phase_costs, step_seconds
from omnibal.cluster import Cluster, Layout
from omnibal.cost import CostModel, Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.device import Device
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.pipeline.search import search_partition
from omnibal.pipeline.simulate import simulate_step
from omnibal.profile.calibration import STEPS, WARM_UP, TimedPass, calibrate, sizes_of
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import LayerCost, ModelProfile, every_layer
from tools.bench import machine, print_table
from tools.sampling.data import real_lengths

NOISE, SLOW, SLOWER = 0.05, 0.03, 4.0  # of a pass; share of passes that something else holds up, and how much
STAGES, MICRO_BATCHES = 4, 8
# What ViT's seconds, squared patches' and squared tokens' are multiplied by: what the guess did not know.
WRONG = {
    "nothing": (1.0, 1.0, 1.0),
    "ViT halved": (0.5, 1.0, 1.0),
    "ViT doubled": (2.0, 1.0, 1.0),
    "squared patches x 4": (1.0, 4.0, 1.0),
    "squared tokens x 4": (1.0, 1.0, 4.0),
}


def native_lengths(count: int = 20_000) -> SampleLengths:
    """Made-up samples of one or two images at native resolution, 256 to 6400 patches each."""
    rng = np.random.default_rng(0)
    first, second = np.exp(rng.uniform(np.log(256), np.log(6400), (2, count))).astype(np.int64)
    second[rng.random(count) < 0.3] = 0
    words = rng.lognormal(5, 0.8, count).astype(np.int64) + 20
    return SampleLengths(first + second, words + (first + second) // 4, vision_squared=first**2 + second**2)


def true_profile(counted: ModelProfile, wrong: tuple[float, float, float]) -> ModelProfile:
    """What the device really takes."""
    vision, patches, tokens = wrong

    def of(layer: LayerCost) -> LayerCost:
        factor = 1.0 if layer.module == "language" else vision

        def scaled(cost: CostModel) -> CostModel:
            squares = {"vision_squared": patches, "llm_tokens_squared": tokens}
            return replace(factor * cost, **{name: factor * by * getattr(cost, name) for name, by in squares.items()})

        times = {
            name: scaled(getattr(layer, name)) for name in ("forward_seconds", "backward_seconds", "weight_seconds")
        }
        again = {level: scaled(cost) for level, cost in layer.recompute_seconds.items()}
        return replace(layer, **times, recompute_seconds=again)

    return replace(counted, layers=tuple(map(of, counted.layers)))


class Trained:
    """A model on some data: counted costs, and what 20 steps on a device make of them."""

    def __init__(self, name: str, lengths: SampleLengths, limits: PackLimits) -> None:
        self.name, self.lengths, self.limits = name, lengths, limits
        self.counted = analytic_profile(Model.known(name).records, Device.named("A100-80GB"))
        layers = self.counted.layers
        first = next(number for number, layer in enumerate(layers) if layer.module == "language")
        self.parts = {"vision": (0, first), "language": (first, len(layers))}
        self.levels = every_layer("full", len(layers))
        self.plan = partial(BalancedBatchSampler, lengths, limits, rank=0)

    def loads(self, ranks: int, cost: CostModel | None = None, steps: Iterable[int] = range(64)) -> Load:
        """Shape (steps, ranks, micro-batches); all tokens are targets, as in a trainer."""
        sampler = self.plan(num_replicas=ranks, cost=cost)
        found = Load.stack(sampler.step(step).load for step in steps if step < sampler.num_steps)
        return Load(found.vision_units, found.llm_tokens, found.llm_tokens_squared, found.vision_squared)

    def fitted(self, truth: ModelProfile) -> tuple[ModelProfile, CostModel, float]:
        """Costs by parts, those of whole micro-batches by their loads alone, and how far off the former is."""
        rng, costs = np.random.default_rng(1), phase_costs(truth, recompute="full")
        loads = self.loads(8, steps=range(WARM_UP, STEPS)).ravel()
        passes, whole = [], np.zeros(len(loads))
        for phase in PHASES:
            slow = np.where(rng.random(len(loads)) < SLOW, SLOWER, 1.0)
            seconds = costs[phase](loads) * rng.lognormal(0, NOISE, len(loads)) * slow
            whole += seconds
            part, direction = phase.split()
            passes += [
                TimedPass(self.parts[part], direction == "backward", sizes, float(taken))
                for sizes, taken in zip(sizes_of(loads), seconds, strict=True)
            ]
        found = calibrate(self.counted, passes, self.levels, device="simulated")
        assert found is not None
        return found.apply(self.counted), CostModel.fit(loads, whole), found.error


def share_of_vision(cost: CostModel, load: Load) -> float:
    vision = cost.vision_units * load.vision_units + cost.vision_squared * load.vision_squared
    return float(vision.sum() / cost(load).sum())


def whole_cost(profile: ModelProfile) -> CostModel:
    return replace(sum(phase_costs(profile, recompute="full").values(), CostModel()), fixed=0.0)


def over_ideal(trained: Trained, truth: ModelProfile, ranks: int, cost: CostModel | None, layout: Sharding) -> float:
    """Seconds of a step over those that ranks compute on average."""
    loads, costs = trained.loads(ranks, cost), phase_costs(truth, recompute="full")
    busy, waited = step_seconds(loads, costs, layout)
    return float((busy + waited).mean()) / float(sum(each(loads) for each in costs.values()).sum(axis=2).mean())


def pipelined(trained: Trained, truth: ModelProfile, guess: ModelProfile) -> float:
    """Seconds of a step on the device, cut as the guess has it."""
    load = trained.plan(num_replicas=1, micro_batches=MICRO_BATCHES).step(3).load
    links = Cluster(1, STAGES, Device.named("A100-80GB")).links_of(Layout(STAGES))
    cut = search_partition(guess, [load[0]], STAGES, links, recompute=trained.levels).candidates[0].partition
    return simulate_step(truth, cut, [load[0]], links, recompute=trained.levels).step_seconds


def main() -> None:
    lengths, said = real_lengths()
    cases = [
        Trained("InternVL3-8B", lengths, PackLimits(36, 16384)),
        Trained("Qwen2.5-VL-7B", native_lengths(), PackLimits(16384, 8192)),
        Trained("Qwen2-VL-2B", native_lengths(), PackLimits(16384, 8192)),
    ]
    print(f"{machine('numpy', 'scipy')}; tiles: {said}; native resolution: 20,000 made-up samples\n")
    rows, waits = [], []
    for trained in cases:
        for name, wrong in WRONG.items():
            truth = true_profile(trained.counted, wrong)
            found, alone, error = trained.fitted(truth)
            loads, right = trained.loads(8), whole_cost(truth)
            vision = [
                share_of_vision(cost, loads) for cost in (right, whole_cost(trained.counted), whole_cost(found), alone)
            ]
            phases = phase_costs(found, recompute="full"), phase_costs(truth, recompute="full")
            off = max(abs(float(phases[0][p](loads).sum() / phases[1][p](loads).sum()) - 1) for p in PHASES)
            cuts = [pipelined(trained, truth, guess) for guess in (trained.counted, found, truth)]
            rows.append(
                (trained.name, name, *(f"{share:.3f}" for share in vision), f"{off:.1%}", f"{error:.1%}",
                 f"{cuts[0] / cuts[2]:.3f}", f"{cuts[1] / cuts[2]:.3f}")
            )  # fmt: skip
            for ranks in (8, 64):
                costs = (None, whole_cost(trained.counted), whole_cost(found))
                waits.append(
                    (trained.name, name, ranks, *(
                        f"{over_ideal(trained, truth, ranks, cost, layout):.3f}"
                        for layout in ("ddp", "zero3") for cost in costs
                    ))
                )  # fmt: skip
            print(".", end="", flush=True)
    print("\n")
    print_table(
        ("model", "wrong in the guess", "ViT's share", "counted", "by parts", "by loads alone", "worst phase off",
         "error said", "step, cut as counted", "cut as measured"), rows,
    )  # fmt: skip
    print()
    print_table(
        ("model", "wrong in the guess", "ranks", "ddp, packs as ever", "even as counted", "as measured",
         "zero3, packs as ever", "even as counted", "as measured"), waits,
    )  # fmt: skip


if __name__ == "__main__":
    main()
