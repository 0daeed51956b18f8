"""Measures rearranging on this machine and records it in RESULTS.md: measure.py [MINUTES for each model].

Two processes of one thread train the same samples in turn as they were drawn and rearranged. Then one process plans the
steps of up to 2560 ranks, before its own steps and in a thread beside them.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from omnibal.dispatch.step_plan import Costs, StepPlan, plan_step
from omnibal.integrations.rearranging import RearrangedModel
from omnibal.integrations.rearranging_loader import RearrangingLoader
from omnibal.packs.collator import PackCollator, positions_of
from omnibal.packs.encoders import encoders_of
from omnibal.processes import free_port
from tools.bench import machine
from tools.dropin.run import RANKS, SHORTER, Samples, add_up, lengths_of, model_of
from tools.synthetic import tiled_lengths

BATCH = 8
"""Samples that a rank draws."""
RESULTS, HEADING = Path(__file__).with_name("RESULTS.md"), "## Measured\n"
STEP, STEPS = 1024, 60
"""Of the measurement of planning: the size of the matrices that a step multiplies, and how many steps."""


class TimedLoader(RearrangingLoader):
    """Notes the processor seconds that its thread takes for a step, and those of them that planning takes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps, self.plans = list[float](), list[float]()

    def _next_step(self, *where: Any) -> Any:
        return timed(self.steps, partial(super()._next_step, *where))

    def _plan(self, ranks: Any, total_targets: float) -> StepPlan:
        return timed(self.plans, partial(super()._plan, ranks, total_targets))


def timed(seconds: list[float], work: Callable[[], Any], clock: Callable[[], float] = time.thread_time) -> Any:
    """Do it and note how long it took."""
    begun = clock()
    result = work()
    seconds.append(clock() - begun)
    return result


def compare(rank: int, port: int, kind: str, minutes: float, out: str) -> None:
    """A process: a step as drawn, the same step rearranged, and so on."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    lengths = lengths_of(kind)
    samples, model = Samples(kind, lengths), model_of(kind)
    rearranged = RearrangedModel(model)
    collator = PackCollator(samples.collate, positions_of(model.config))

    def order() -> Iterator[Any]:
        """Pass after pass: a quiet machine trains more samples in some minutes than there are."""
        for number in count():
            yield from np.random.default_rng(number).permutation(len(lengths)).reshape(-1, RANKS, BATCH)

    loaders = [
        TimedLoader(
            ([samples[int(number)] for number in of_ranks[rank]] for of_ranks in order()),
            collator,
            encoders=encoders_of(model),
            costs=Costs(least_gain=least_gain),
            prints=False,
        )
        for least_gain in (1.1, 0.01)  # as drawn, since no gain is that large; rearranged
    ]
    iterators, walls, waits = [iter(loader) for loader in loaders], ([], []), list[float]()
    busy: tuple[list[float], list[float]] = ([], [])
    imbalance, ends = [], time.perf_counter() + 60 * minutes
    while True:
        for way, iterator in enumerate(iterators):
            drawn = timed(waits, partial(next, iterator), time.perf_counter)
            dist.barrier()
            step = partial(lambda drawn: rearranged(drawn).backward(), drawn)
            timed(walls[way], lambda step=step, way=way: (timed(busy[way], step), dist.barrier()), time.perf_counter)
            add_up(model)
            model.zero_grad()
        imbalance.append([*drawn.plan.imbalance.values()])
        late = torch.tensor(float(time.perf_counter() > ends))
        dist.all_reduce(late)
        if late:
            break
    slowest = torch.tensor(busy)  # of the ranks, by the processor time of their main threads
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        (drawn_wall, moved_wall), (drawn_busy, moved_busy) = (
            [np.median(values[1:]) for values in found] for found in (walls, slowest.tolist())
        )
        cells = [f"{before:.2f} -> {after:.2f}" for before, after in np.mean(imbalance, axis=0)]
        cells += [f"{RANKS * BATCH / drawn_wall:.1f}", f"{RANKS * BATCH / moved_wall:.1f}"]
        cells += [f"{drawn_wall / moved_wall:.2f}", f"{drawn_busy / moved_busy:.2f}"]
        thread, plan, wait = (1e3 * np.median(found[3:]) for found in (loaders[1].steps, loaders[1].plans, waits))
        cells += [f"{1e3 * moved_wall:.0f}", f"{thread:.1f}", f"{plan:.2f}", f"{wait:.2f}"]
        Path(out).write_text(f"| {kind} | {len(imbalance) - 1} | {' | '.join(cells)} |\n")
    for iterator in iterators:
        iterator.close()
    dist.destroy_process_group()


def planning(num_ranks: int) -> str:
    """A row: what planning takes, and how much longer a step takes with it, before the step or beside it."""
    torch.set_num_threads(1)
    lengths, generator = tiled_lengths(200_000, seed=1), np.random.default_rng(0)
    source, matrix = np.repeat(np.arange(num_ranks), 16), torch.rand(STEP, STEP)
    samples = generator.choice(len(lengths), len(source))
    units, tokens = lengths.vision_units[samples], lengths.llm_tokens[samples]
    sizes = {"vision_units": units, "vision_squared": 0 * units, "vision_tokens": units}
    sizes |= {"llm_tokens": tokens, "target_tokens": tokens}
    taken: list[float] = []

    def plan() -> None:
        made = timed(taken, lambda: plan_step(source, sizes, num_ranks, Costs(), total_targets=1))
        _ = made.features, made.imbalance

    def step() -> None:
        for _ in range(4):
            matrix @ matrix

    plan()  # compiles
    alone, before, beside = list[float](), list[float](), list[float]()
    with ThreadPoolExecutor(1) as thread:
        for _ in range(STEPS):
            timed(alone, step, time.perf_counter)
            timed(before, lambda: (plan(), step()), time.perf_counter)
            planned = thread.submit(plan)
            timed(beside, step, time.perf_counter)
            planned.result()
    base, inline, threaded = (1e3 * np.median(found) for found in (alone, before, beside))
    cells = [f"{1e3 * np.median(taken[1:]):.2f}", f"{base:.1f}", f"{inline - base:+.2f}", f"{threaded - base:+.2f}"]
    return f"| {num_ranks} | {' | '.join(cells)} |"


def main() -> None:
    """Replace what RESULTS.md had measured before."""
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    load, rows = os.getloadavg()[0], []
    for kind in ("mix", "native"):
        out = f"/tmp/omnibal_orchmllm_{os.getpid()}.md"
        torch.multiprocessing.spawn(compare, args=(free_port(), kind, minutes, out), nprocs=RANKS)
        rows.append(Path(out).read_text())
        Path(out).unlink()
    plans = "\n".join(planning(num_ranks) for num_ranks in (8, 128, 512, 2560))
    text = f"""{HEADING}
    python -m tools.orchmllm.measure {minutes:g}

{machine("torch")}; load average {load:.1f} at the start. Two gloo
processes of one thread each train the same draws of {BATCH} samples a rank in turn, as drawn and rearranged: tiny
models, and data {SHORTER} times shorter than real ones. Gains are by wall time, and by the processor time of the
slowest rank's main thread, on which other work on the machine has less say. The loader's thread draws, collates and
plans; what the main thread waits for it is all of that which lies on the critical path.

| data | steps | ViT, largest over mean | LLM | samples/s as drawn | rearranged | gain | gain by processor time \
| step, ms | its loading thread, ms | of that planning | waited for, ms |
{"|---" * 12}|
{"".join(rows)}
What planning 16 samples of each rank takes in processor time, and how much longer a step of torch takes if they are
planned before it, or beside it in a thread as the loader does. Both differences are wall time: they need a quiet
machine.

| ranks | planning, ms | step alone, ms | planned before, ms | planned beside, ms |
{"|---:" * 5}|
{plans}

"""
    found = RESULTS.read_text()
    start = found.find(HEADING)
    if start < 0:
        found, start = found + "\n", len(found) + 1
    end = found.find("\n## ", start + 1)
    RESULTS.write_text(found[:start] + text + (found[end + 1 :] if end >= 0 else ""))
    print(text)


if __name__ == "__main__":
    main()
