"""DistTrain's order of micro-batches: what it gains and what it takes; see README.md."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np

from omnibal.advise.models import Model
from omnibal.cluster import Cluster, Layout
from omnibal.cost import FloatArray, IntArray, Load
from omnibal.data.epoch import arrange_epoch
from omnibal.data.isf import ShuffledPacks
from omnibal.data.lengths import SampleLengths
from omnibal.data.packing_spec import Method, PackingSpec
from omnibal.data.packs import Packs
from omnibal.dispatch.divide import divide
from omnibal.feeds.buffer_plan import buffer_of
from omnibal.pipeline.schedule import Schedule, one_f_one_b
from omnibal.pipeline.search import search_partition
from omnibal.pipeline.simulate import Simulation, simulate
from omnibal.pipeline.times import step_times
from omnibal.profile.counted import analytic_profile
from tools.bench import machine, print_table
from tools.disttrain.order import fill_intervals, order_micro_batches
from tools.partition.paper_models import LIMITS
from tools.sampling.buffers import simulate_buffers
from tools.sampling.rules import Task, random_batches
from tools.synthetic import tiled_lengths

MODEL: Final = "InternVL3-38B"
CLUSTER: Final = Cluster.parse("8x8xA100-80GB")
PROFILE: Final = analytic_profile(Model.known(MODEL).records, CLUSTER.device)
SAMPLES: Final = 1920
"""The paper's global batch."""
STAGES: Final = 12
"""Of MLLM-72B: one each of encoder and generator, ten of the language model."""
REPLICAS: Final = 4
STEPS: Final = 4
BATCH: Final = 4
"""Samples of a padded micro-batch."""
MOST_SIMULATIONS: Final = 4000
DRAWN = tiled_lengths(20_000, seed=1)
LENGTHS: Final = SampleLengths(DRAWN.vision_units, DRAWN.llm_tokens, vision_squared=DRAWN.vision_squared)


def in_steps(packs: Packs, load: Load, micro_batches: int) -> list[list[Load]]:
    """The first steps; packs stand micro-batch after micro-batch, rank after rank."""
    rows = np.arange(STEPS * micro_batches * REPLICAS).reshape(STEPS, micro_batches, REPLICAS)
    return [[load[step[:, replica]] for replica in range(REPLICAS)] for step in rows]


def arranged(method: Method, *, as_dealt: bool = False) -> Callable[[int], list[list[Load]]]:
    def steps(micro_batches: int) -> list[list[Load]]:
        epoch = arrange_epoch(LENGTHS, LIMITS, num_replicas=REPLICAS, micro_batches=micro_batches, method=method)
        if not as_dealt:
            return [list(epoch.step(step).load) for step in range(STEPS)]
        dealt = ShuffledPacks(PackingSpec(LENGTHS, LIMITS, method=method), epoch.ranks).window(0, 0)
        load = dealt.load(LENGTHS).reshape((-1, REPLICAS, micro_batches))
        return [list(load[step]) for step in range(STEPS)]

    return steps


def padded(micro_batches: int) -> list[list[Load]]:
    packs = random_batches(Task(LENGTHS, LIMITS, REPLICAS, BATCH))
    longest = np.maximum.reduceat(LENGTHS.llm_tokens[packs.samples], packs.starts[:-1]).astype(np.int64)
    load = Load(packs.vision_units(LENGTHS), packs.sizes * longest, packs.sizes * longest**2)
    return in_steps(packs, load, micro_batches)


def buffered(micro_batches: int) -> list[list[Load]]:
    packs, _ = simulate_buffers(
        LENGTHS, LIMITS, num_ranks=REPLICAS, buffer=buffer_of(micro_batches), micro_batches=micro_batches
    )
    return in_steps(packs, packs.load(LENGTHS), micro_batches)


KINDS: Final[dict[str, Callable[[int], list[list[Load]]]]] = {
    "even packs": arranged("balanced"),
    "a stream's buffers": buffered,
    "ISF": arranged("isf"),
    "ISF as dealt": arranged("isf", as_dealt=True),
    "a stream as it comes": arranged("random"),
    "random padded batches": padded,
}


class Pipeline(NamedTuple):
    """A replica's step."""

    schedule: Schedule
    forward: FloatArray
    backward: FloatArray
    transfers: FloatArray

    def run(self, order: IntArray) -> Simulation:
        transfers = self.transfers[order]
        return simulate(self.schedule, self.forward[order], self.backward[order], transfer_seconds=transfers)

    def ordered(self, most: int) -> IntArray:
        return order_micro_batches(
            self.schedule, self.forward, self.backward, transfer_seconds=self.transfers, max_simulations=most
        )


def gains(num_stages: int, micro_batches: int) -> Iterator[list[object]]:
    """For every kind of packs: seconds of a step and bubble as given, and how many times as fast it is otherwise."""
    schedule, links = one_f_one_b(num_stages, micro_batches), CLUSTER.links_of(Layout(num_stages, REPLICAS))
    even = KINDS["even packs"](micro_batches)
    cut = search_partition(PROFILE, even[0], num_stages, links, method="model").best.partition
    boundaries = np.array(cut.boundaries)
    for kind, packs in KINDS.items():
        seconds, bubbles = np.zeros(4), []
        for step in packs(micro_batches):
            times = step_times(PROFILE, step, links)
            of_replicas = []
            for replica in range(REPLICAS):
                forward, backward, weight = (
                    np.diff(sums[replica][:, boundaries]) for sums in (times.forward, times.backward, times.weight)
                )
                backward += weight
                pipeline = Pipeline(schedule, forward, backward, times.crossing[replica][:, boundaries[1:-1]])
                given = pipeline.run(np.arange(micro_batches))
                by_rule = pipeline.run(fill_intervals(forward, backward)).makespan_seconds
                found = (pipeline.run(pipeline.ordered(most)).makespan_seconds for most in (3, MOST_SIMULATIONS))
                of_replicas.append([given.makespan_seconds, min(given.makespan_seconds, by_rule), *found])
                bubbles.append(given.bubble_ratio)
            seconds += np.max(of_replicas, axis=0)  # a step ends with its slowest replica
        row = [f"{seconds[0] / each:.3f}" for each in seconds[1:]]
        yield [kind, num_stages, micro_batches, f"{seconds[0] / STEPS:.3f}", f"{np.mean(bubbles):.3f}", *row]


def print_gains() -> None:
    rows = (row for stages in (4, 8) for count in (8, 16, 32) for row in gains(stages, count))
    names = ["packs", "stages", "micro-batches", "seconds", "bubble", "DistTrain's rule", "three orders", "swaps"]
    print_table(names, rows)


def milliseconds(work: Callable[[], object]) -> float:
    """Of the processor, the least of some runs."""
    taken = []
    for _ in range(7):
        begun = time.process_time()
        work()
        taken.append(time.process_time() - begun)
    return 1000 * min(taken)


def print_times() -> None:
    """The paper's Table 3: 1920 samples shared among replicas, and each replica's micro-batches put in order."""
    rng, rows = np.random.default_rng(0), []
    for replicas, published in ((30, (1.82, 5.87)), (60, (1.87, 3.02)), (120, (1.89, 1.71)), (1, None)):
        count = SAMPLES // replicas
        schedule = one_f_one_b(STAGES, count)
        forward = rng.lognormal(size=(replicas, count, 1)) * np.ones(STAGES)
        pipelines = [Pipeline(schedule, each, 2 * each, np.zeros((count, STAGES - 1))) for each in forward]
        works: tuple[Callable[[], object], ...] = (
            lambda: divide(forward[..., 0].ravel(), replicas, method="longest_first"),  # noqa: B023
            lambda: [fill_intervals(each.forward, each.backward) for each in pipelines],  # noqa: B023
            lambda: [each.ordered(3) for each in pipelines],  # noqa: B023
        )
        paper = published or ("", "")
        shared, filled, ordered = (f"{milliseconds(work):.2f}" for work in works)
        rows.append([replicas, paper[0], shared, paper[1], filled, ordered])
    names = ["replicas", "shared, paper", "shared", "rule, paper", "rule", "rule and three simulations of each replica"]
    print_table(names, rows)


PARTS: Final = {"order": print_gains, "times": print_times}

if __name__ == "__main__":
    print(f"Made {machine('numpy', 'numba')}.")
    for name in sys.argv[1:] or PARTS:
        print(f"\n## {name}\n")
        PARTS[name]()
