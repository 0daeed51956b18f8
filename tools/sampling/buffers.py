"""How much balance a buffer gives up against the plan of a whole epoch: the table of ``docs/streams.md``.

Every rank draws samples of its own from an endless stream and plans those in its buffer. A cell holds the Dist Ratio of
vision units, that of cost, χ² of the steps' mixes of sources, and packs over the volume bound.

    python tools/sampling/buffers.py    # a quarter of an hour
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from data import mixed_lengths, real_lengths

from omnibal.data.balance import BalancedPacks
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio, source_mix, step_randomness, volume_bound
from omnibal.data.packs import Packs
from omnibal.data.policies import DEFAULT_COST
from omnibal.data.streaming.buffer import agree, asked, plan_buffer

BUFFERS: Final = (64, 256, 1024, 4096, 16384)
RANKS: Final = (8, 64, 512)
LEAST_WINDOWS: Final = 3
LEAST_STEPS: Final = 60
MOST_DRAWN: Final = 1 << 22
"""Samples of all ranks together."""


def stream(lengths: SampleLengths, limits: PackLimits, ranks: int, size: int) -> tuple[Packs, int]:
    """Packs of some windows, step after step, rank after rank; and the oldest sample's age, in samples drawn since."""
    chance = np.random.default_rng([ranks, size])
    held = [np.zeros(0, dtype=np.int64)] * ranks
    drawn_at = [np.zeros(0, dtype=np.int64)] * ranks
    steps: list[Packs] = []
    oldest = window = drawn = 0
    while window < LEAST_WINDOWS or (len(steps) < LEAST_STEPS and drawn < MOST_DRAWN):
        waited = [len(samples) for samples in held]
        drawn += sum(size - count for count in waited)
        for rank, count in enumerate(waited):
            held[rank] = np.append(held[rank], chance.integers(0, len(lengths), size - count))
            first = drawn_at[rank].max(initial=-1) + 1
            drawn_at[rank] = np.append(drawn_at[rank], np.arange(first, first + size - count))
        aim = agree([asked(lengths.take(samples), limits, ended=False) for samples in held], 1)
        of_ranks = []
        for rank, samples in enumerate(held):
            packs = plan_buffer(lengths.take(samples), aim, limits, waited=waited[rank], seed=[window, rank])
            oldest = max(oldest, int(drawn_at[rank].max() - drawn_at[rank][packs.samples].min(initial=1 << 40)))
            of_ranks.append(Packs(samples[packs.samples], packs.starts))
            held[rank], drawn_at[rank] = np.delete(samples, packs.samples), np.delete(drawn_at[rank], packs.samples)
        steps += [Packs.concatenate(packs.between(step, step + 1) for packs in of_ranks) for step in range(len(packs))]
        window += 1
    return Packs.concatenate(steps), oldest


def whole(lengths: SampleLengths, limits: PackLimits, ranks: int) -> Packs:
    """An epoch of all samples, planned at once."""
    arranged = BalancedPacks(lengths, limits, num_replicas=ranks)
    return Packs.concatenate(arranged.window(0, index) for index in range(len(arranged.window_starts(0)) - 1))


def figures(lengths: SampleLengths, limits: PackLimits, packs: Packs, ranks: int) -> str:
    """One cell."""
    load, steps = packs.load(lengths), np.arange(len(packs)).reshape(-1, ranks)
    over = len(packs) / max(volume_bound(lengths.take(packs.samples), limits), 1) - 1
    randomness = step_randomness(source_mix(lengths.source, packs, steps))
    vision, cost = dist_ratio(load.vision_units[steps]), dist_ratio(DEFAULT_COST(load)[steps])
    return f"{vision:.1%} / {cost:.1%} / {randomness:.2f} / {over:+.1%}"


def table(cells: dict[str, tuple[SampleLengths, PackLimits]]) -> Iterator[str]:
    """A row for each number of ranks and size of the buffer."""
    yield f"| ranks | buffer | out after | {' | '.join(cells)} |"
    yield f"|{' --- |' * (len(cells) + 3)}"
    for ranks in RANKS:
        for size in BUFFERS:
            if ranks * size > MOST_DRAWN:
                continue  # would take longest, and larger buffers than 1,024 bring nothing
            found = [(cell, stream(*cell, ranks, size)) for cell in cells.values()]
            age = max(oldest for _, (_, oldest) in found) / size
            row = [figures(*cell, packs, ranks) for cell, (packs, _) in found]
            yield f"| {ranks} | {size:,} | {age:.1f} | {' | '.join(row)} |"
        row = [figures(*cell, whole(*cell, ranks), ranks) for cell in cells.values()]
        yield f"| {ranks} | a whole epoch | | {' | '.join(row)} |"


def main() -> None:
    """Print the table."""
    real, name = real_lengths()
    mix = mixed_lengths()[0].take(np.arange(400_000))
    print(f"real: {name}")
    cells = {
        "real 16/5120": (real, PackLimits(16, 5120)),
        "real 33/10240": (real, PackLimits(33, 10240)),
        "mix 16/7296": (mix, PackLimits(16, 7296)),
    }
    for row in table(cells):
        print(row, flush=True)


if __name__ == "__main__":
    main()
