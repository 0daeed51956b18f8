"""How long a simulation and a search take, compiled and on one thread; see README.md."""

import time
from collections.abc import Callable
from statistics import median

import numpy as np

from omnibal.cluster import Links
from omnibal.cost import Load
from omnibal.data.epoch import arrange_epoch
from omnibal.data.limits import PackLimits
from omnibal.pipeline.schedule import SCHEDULES
from omnibal.pipeline.search import search_partition
from omnibal.pipeline.simulate import Mode, simulate
from tools.bench import table
from tools.partition.paper_models import TABLE_9, counted_profile
from tools.synthetic import tiled_lengths

MICRO_BATCHES, STAGES = 64, 16
MODES: tuple[Mode, ...] = ("rendezvous", "overlap")
ROW = next(row for row in TABLE_9 if row.language == "Llama3-70B")
LIMITS = PackLimits(9, 4096)
LINKS = Links(25e9)
SIMULATIONS, SEARCHES = 200, 5


def main() -> None:
    """Print both tables."""
    print(f"### A simulation of {MICRO_BATCHES} micro-batches on {STAGES} stages\n\n{simulations()}\n")
    print(f"### A search for {STAGES} stages, {MICRO_BATCHES} micro-batches\n\n{searches()}")


def simulations() -> str:
    """A row per schedule and mode."""
    shape, rng = (MICRO_BATCHES, STAGES), np.random.default_rng(0)
    forward, backward, weight = rng.uniform(1, 2, shape), rng.uniform(1, 2, shape), rng.uniform(1, 2, shape)
    transfer = rng.uniform(0, 0.1, (MICRO_BATCHES, STAGES - 1))
    rows = []
    for name, make in SCHEDULES.items():
        schedule = make(STAGES, MICRO_BATCHES)
        for mode in MODES:
            if name != "1f1b" and mode == "rendezvous":
                continue  # where weight gradients wait, transfers run beside the computations

            def once() -> object:
                return simulate(schedule, forward, backward, weight, transfer, mode=mode).makespan_seconds  # noqa: B023

            rows.append((name, mode, *milliseconds(once, SIMULATIONS)))
    return table(("schedule", "mode", "median ms", "slowest ms"), rows)


def searches() -> str:
    """A row per number of replicas and mode."""
    profile = counted_profile(ROW)
    rows = []
    for num_replicas in (1, 4):
        loads = real_loads(num_replicas)
        for mode in MODES:

            def once() -> object:
                return search_partition(profile, loads, STAGES, LINKS, mode=mode)  # noqa: B023

            rows.append((f"{len(profile.layers)}", f"{num_replicas}", mode, *milliseconds(once, SEARCHES)))
    return table(("layers", "replicas", "mode", "median ms", "slowest ms"), rows)


def real_loads(num_replicas: int) -> list[Load]:
    """A step of packs of InternVL's mix."""
    lengths = tiled_lengths(40_000, seed=1)
    epoch = arrange_epoch(lengths, LIMITS, num_replicas=num_replicas, micro_batches=MICRO_BATCHES)
    return list(epoch.step(0).load)


def milliseconds(run: Callable[[], object], repeats: int) -> tuple[str, str]:
    """Median and slowest of some runs, after one that compiles."""
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - started))
    return f"{median(times):.3g}", f"{max(times):.3g}"


if __name__ == "__main__":
    main()
