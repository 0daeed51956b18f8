"""What the estimate makes of samples beside what trainers and the planner make: python -m tools.advise.packs.

First the time of all ranks over the time that the samples take alone, by counted costs of InternVL3-8B, batches of
four; then the samples of a step that advice names beside those that the planner makes under its limits.
"""

from itertools import product

import numpy as np

from omnibal.advise.batches import Batches, Samples, even_packs, padded_batches, random_packs
from omnibal.advise.estimate import Recipe, Scenario
from omnibal.advise.models import Model
from omnibal.advise.paste import propose
from omnibal.advise.wait import phase_costs, wait
from omnibal.cluster import Cluster
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.device import DEVICES
from omnibal.profile.counted import analytic_profile
from tools.dropin.ways import Task, Way, group_by_length, rebalance
from tools.sampling.data import real_lengths
from tools.synthetic import patch_lengths, tiled_lengths

STEPS, BATCH, LIMITS = 32, 4, PackLimits(16, 5120)
LAYOUTS = ((8, 16), (64, 1))
TRAINERS = ("ddp", "zero2", "zero3")
SEEN = 1000
"""Samples that advice knows."""


def rows(lengths: SampleLengths, ranks: int, micro_batches: int) -> dict[str, Batches]:
    """Each way's batches, of the same samples."""
    per_step = ranks * micro_batches * BATCH
    drawn = lengths.take(np.random.default_rng(0).permutation(len(lengths))[: per_step * STEPS])
    samples = Samples(drawn)
    shape = {"num_ranks": ranks, "micro_batches": micro_batches}
    task, padded = Task(drawn, ranks, micro_batches, BATCH), {"batch": BATCH, **shape}
    return {
        "padded": padded_batches(samples, **padded),
        "group_by_length, transformers'": _as_batches(group_by_length(task), drawn),
        "group_by_length, the estimate's": padded_batches(samples, batching="group_by_length", **padded),
        "batch_rebalance, transformers'": _as_batches(rebalance(task), drawn),
        "batch_rebalance, the estimate's": padded_batches(samples, batching="batch_rebalance", **padded),
        "random packs": random_packs(samples, LIMITS, **shape),
        "planner's packs": even_packs(samples, LIMITS, **shape),
    }


def _as_batches(way: Way, lengths: SampleLengths) -> Batches:
    """What transformers' own classes make, with and without padding."""
    return Batches(way.load(lengths), Way(way.name, False, way.steps).load(lengths), way.samples_a_step)


def over_useful(batches: Batches, trainer: str) -> float:
    """Time of all ranks over that of real tokens."""
    costs = phase_costs(PROFILE)
    run, real = ({phase: cost(loads) for phase, cost in costs.items()} for loads in (batches.loads, batches.real))
    waits = sum(waited.sum() for waited in wait(run, trainer).values())
    return float((sum(s.sum() for s in run.values()) + waits) / sum(s.sum() for s in real.values()))


PROFILE = analytic_profile(Model.known("InternVL3-8B").records, DEVICES["A100-80GB"])


def long_tail(count: int) -> SampleLengths:
    """A few hundred patches in most samples, tens of thousands in some."""
    generator = np.random.default_rng(5)
    patches = np.minimum(generator.pareto(1.6, count) * 200 + 200, 16_000).astype(int) // 4 * 4
    return SampleLengths(patches, patches // 4 + generator.integers(50, 400, count))


def step_sizes() -> None:
    """Print samples of a step: today's, those that advice names, and those that the planner makes."""
    datasets = {
        "real": real_lengths()[0], "mix": tiled_lengths(60_000, seed=1),
        "text-heavy": tiled_lengths(60_000, seed=2, text_share=0.7), "native resolution": patch_lengths(60_000, seed=3),
        "long tail": long_tail(60_000),
    }  # fmt: skip
    print("| data | ranks | batch × micro-batches | limits | today | said | the planner makes | off |")
    print("|---|---|---|---|---|---|---|---|")
    for (name, lengths), nodes, (batch, micro_batches) in product(datasets.items(), (1, 8), ((4, 1), (4, 8))):
        seen = lengths.take(np.random.default_rng(3).permutation(len(lengths))[:SEEN])
        cluster = Cluster(nodes, 8, DEVICES["A100-80GB"])
        scenario = Scenario(seen, PROFILE, cluster, cluster.num_devices * batch * micro_batches)
        recipe = scenario.packed(Recipe("zero3", "random", batch, micro_batches))
        proposal = propose(scenario.estimate(recipe))
        shape = {"num_replicas": cluster.num_devices, "micro_batches": recipe.micro_batches}
        made = len(lengths) / arrange_epoch(lengths, proposal.limits, **shape).num_steps
        limits = f"{proposal.limits.vision_units} / {proposal.limits.llm_tokens}"
        print(
            f"| {name} | {cluster.num_devices} | {batch} × {micro_batches} | {limits} | {scenario.samples_per_step} | "
            f"{proposal.samples_per_step:.0f} | {made:.0f} | {proposal.samples_per_step / made - 1:+.1%} |", flush=True
        )  # fmt: skip


def main() -> None:
    """Print two tables."""
    print(f"| data | ranks × accumulation | packs | {' | '.join(TRAINERS)} |")
    print(f"|{'---|' * (3 + len(TRAINERS))}")
    for name, lengths in {"real": real_lengths()[0], "mix": tiled_lengths(150_000, seed=1)}.items():
        for ranks, micro_batches in LAYOUTS:
            for way, batches in rows(lengths, ranks, micro_batches).items():
                cells = " | ".join(f"{over_useful(batches, trainer):.3f}" for trainer in TRAINERS)
                print(f"| {name} | {ranks} × {micro_batches} | {way} | {cells} |", flush=True)
    step_sizes()


if __name__ == "__main__":
    main()
