"""The balanced planner's targets, each measured; see README.md."""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer

from omnibal.data.epoch import Epoch, arrange_epoch
from omnibal.data.isf import iterative_sampling_and_filtering
from omnibal.data.lengths import SampleLengths
from omnibal.data.limit_search import search_limits
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import measure_packing, min_packs
from omnibal.data.packing_spec import DEFAULT_COST
from omnibal.feeds.sampler import BalancedBatchSampler
from tools.bench import machine, print_table
from tools.sampling.bounds import fewest_packs, least_cost_ratio
from tools.sampling.data import mixed_lengths, real_lengths
from tools.sampling.rules import Task, best_fit_packs
from tools.synthetic import patch_lengths

Rows = Iterator[Sequence[str]]

SEARCHED: Final = (PackLimits(16, 5120), PackLimits(36, 12288))
"""Ceilings of the searches whose best limits are measured."""
TIGHT: Final = PackLimits(9, 4096)
"""The paper's limits, where five tiles and five tiles never share a pack."""
MANY: Final = 1_200_000
HUGE: Final = 100_000_000
RANKS: Final = (8, 16)
REPEATS: Final = 5
"""Times are the least of so many."""


def main(
    part: Annotated[str, typer.Argument(help="bound, quality, mix, speed, or huge: each takes minutes.")],
) -> None:
    """Measure one part of the targets and print its rows as Markdown."""
    columns, rows = PARTS[part]
    print(f"{machine()}\n")
    print_table(columns, rows())


def quality() -> Rows:
    """Balance, randomness and packs on real lengths, and on made-up patches."""
    lengths, _ = real_lengths()
    yield from (_searched("real", lengths, ceiling) for ceiling in SEARCHED)
    yield from (_balance("real", lengths, limits) for limits in (PackLimits(33, 10240), TIGHT))
    patches = patch_lengths(60_000)
    yield from (_searched("patches", patches, PackLimits(32768 * times, 16384 * times)) for times in (1, 2))
    yield _balance("patches", patches, PackLimits(16384, 8192))


def mix_quality() -> Rows:
    """The same on the made-up mix of nine sources."""
    lengths = mixed_lengths()[0].take(np.arange(200_000))
    ceilings = (TIGHT, PackLimits(16, 8192), PackLimits(36, 24576))
    yield from (_searched("mix", lengths, ceiling) for ceiling in ceilings)
    yield from (_balance("mix", lengths, limits) for limits in (TIGHT, SEARCHED[0]))


def _searched(name: str, lengths: SampleLengths, ceiling: PackLimits) -> Sequence[str]:
    best = [search_limits(lengths, ceiling, num_replicas=ranks)[0].limits for ranks in RANKS]
    return _balance(f"{name}, best under {_named(ceiling)}:", lengths, *best)


def _balance(name: str, lengths: SampleLengths, *limits: PackLimits) -> Sequence[str]:
    """A row: figures under limits that are the same for all numbers of ranks, or one for each."""
    found, least_over, least_costs = [], [], []
    for ranks, own in zip(RANKS, limits * len(RANKS), strict=False):
        epoch = arrange_epoch(lengths, own, num_replicas=ranks)
        found.append(measure_packing("", lengths, own, epoch.packs, epoch.steps, seconds=0.0))
        fewest = min_packs(lengths, own)
        least_over.append(-(-fewest // ranks) * ranks / fewest - 1)
        least_costs.append(least_cost_ratio(lengths, DEFAULT_COST, epoch))

    def both(form: str, values: Sequence[float]) -> str:
        return " / ".join(format(value, form) for value in values)

    return (
        f"{name} {', '.join(map(_named, dict.fromkeys(limits)))}",
        both(".1f", [entry.samples_per_pack for entry in found]),
        both("+.2%", [entry.packs_over_fewest for entry in found]),
        both("+.2%", least_over),
        both(".4f", [entry.dist_ratio_vision for entry in found]),
        both(".4f", [entry.dist_ratio_cost for entry in found]),
        both(".4f", least_costs),
        both(".2f", [entry.randomness for entry in found]),
        " / ".join(f"{entry.lost}, {entry.repeated}, {entry.over_limit}" for entry in found),
    )


def speed() -> Rows:
    """Processor time for 1.2 million samples on one core, and to resume."""
    real, _ = real_lengths()
    copies = np.tile(np.arange(len(real)), -(-MANY // len(real)))[:MANY]
    many = {"real, repeated": real.take(copies), "mix": mixed_lengths()[0].take(np.arange(MANY))}
    for name, lengths in many.items():
        _, seconds = _timed(lambda lengths=lengths: iterative_sampling_and_filtering(lengths, TIGHT))
        yield "ISF, 10 iterations", f"{name} {_named(TIGHT)}", "≤ 0.5 s", f"{seconds:.2f} s"
        for limits in (TIGHT, PackLimits(16, 5120), PackLimits(16, 7488), PackLimits(33, 10240)):
            where = f"{name} {_named(limits)}"
            first_run, seconds = _timed(
                lambda lengths=lengths, limits=limits: sum(
                    len(packs) for packs in arrange_epoch(lengths, limits, num_replicas=8)
                )
            )
            yield (
                "balanced, construction and whole plan",
                where,
                "≤ 1 s",
                f"{seconds:.2f} s (first run {first_run:.2f} s)",
            )
            worst = max(_resume_seconds(lengths, limits, at) for at in (0.0, 0.37, 0.99))
            yield "resume: new sampler, state, next micro-batch", where, "≤ 0.1 s", f"{worst:.2f} s"


def _timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Processor seconds of the first run, which may compile, and the least of some more."""
    seconds = []
    for _ in range(REPEATS + 1):
        started = time.process_time()
        run()
        seconds.append(time.process_time() - started)
    return seconds[0], min(seconds[1:])


def _resume_seconds(lengths: SampleLengths, limits: PackLimits, share: float) -> float:
    """Seconds from lengths in memory to the next micro-batch, in the middle of an epoch."""
    sampler = BalancedBatchSampler(lengths, limits, num_replicas=8, rank=0)
    state = sampler.state_dict(int(share * sampler.num_steps))

    def resume() -> None:
        resumed = BalancedBatchSampler(lengths, limits, num_replicas=8, rank=0)
        resumed.load_state_dict(state)
        next(iter(resumed))

    return _timed(resume)[1]


def huge() -> Rows:
    """Time and memory for 100 million samples, memory-mapped, on two cores."""
    real, _ = real_lengths()
    with tempfile.TemporaryDirectory() as folder:
        copies = -(-HUGE // len(real))
        columns = (np.tile(column, copies)[:HUGE] for column in (real.vision_units, real.llm_tokens))
        SampleLengths(*columns).save(Path(folder) / "lengths")
        limits = PackLimits(16, 5120)
        next(iter(arrange_epoch(real.take(np.arange(MANY) % len(real)), limits, num_replicas=8)))  # compiles
        before = _own_bytes()
        started, worked = time.perf_counter(), time.process_time()
        lengths = SampleLengths.load(Path(folder) / "lengths")
        epoch = arrange_epoch(lengths, limits, num_replicas=8)
        next(iter(epoch))
        first, first_work = time.perf_counter() - started, time.process_time() - worked
        most = _plan_halves(epoch)
        seconds, work = time.perf_counter() - started, time.process_time() - worked
    where = f"100 million, real, repeated, {_named(limits)}, 2 threads"
    yield "first micro-batch", where, "≤ 0.1 s", f"{first:.2f} s; {first_work:.2f} s of processor time"
    yield "whole plan", where, "≤ 60 s", f"{seconds:.0f} s; {work:.0f} s of processor time"
    yield "memory beyond the lengths", where, "≤ 0.5 GB", f"{(most - before) / 1e9:.2f} GB"


def _plan_halves(epoch: Epoch) -> int:
    """Plan half of an epoch in each of two threads; return the most bytes that the process held."""
    half = epoch.num_steps // 2
    held: list[int] = []

    def plan(first: int, last: int) -> None:
        for step in range(first, last):
            epoch.step_packs(step)
            held.append(_own_bytes())

    threads = [threading.Thread(target=plan, args=part) for part in ((0, half), (half, epoch.num_steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(held)


def _own_bytes() -> int:
    """Memory of this process that is no file's (Linux)."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def _named(limits: PackLimits) -> str:
    return f"{limits.vision_units} / {limits.llm_tokens}"


def bound() -> Rows:
    """Packs by the bound on either limit, by the relaxation over both, and by best fit over all samples at once."""
    lengths = {"real": real_lengths()[0], "mix": mixed_lengths()[0].take(np.arange(60_000))}
    for name, part in lengths.items():
        relaxed = fewest_packs(part, TIGHT)
        packed = len(best_fit_packs(Task(part, TIGHT, 8, 4)))
        where = f"{name} {_named(TIGHT)}"
        yield where, f"{min_packs(part, TIGHT):,}", f"{relaxed:,.1f}", f"{packed:,} ({packed / relaxed - 1:+.2%})"


BALANCE: Final = (
    "lengths and limits, dp 8 / dp 16", "samples per pack", "packs over fewest", "in whole steps at least", "DR vision",
    "DR cost", "with even vision at least", "χ²", "lost, repeated, over limit",
)  # fmt: skip
TIMES: Final = ("what", "where", "target", "measured")
PARTS: Final = {
    "bound": (("where", "bound on either limit", "relaxation over both", "best fit in both"), bound),
    "quality": (BALANCE, quality),
    "mix": (BALANCE, mix_quality),
    "speed": (TIMES, speed),
    "huge": (TIMES, huge),
}


if __name__ == "__main__":
    typer.run(main)
