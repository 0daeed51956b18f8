"""How much balance a buffer gives up against the plan of a whole epoch: the table of ``docs/streams.md``.

Every rank draws samples of its own from an endless stream and plans those in its buffer. A cell holds the Dist Ratio of
vision units, that of cost, χ² of the steps' mixes of sources, and packs over the volume bound.

    python -m tools.sampling.buffers    # a quarter of an hour
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from omnibal.data.balance.planner import BalancedPacks
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio, source_mix, step_randomness, volume_bound
from omnibal.data.packing_spec import DEFAULT_COST, PackingSpec, Ranks
from omnibal.data.packs import Packs
from omnibal.feeds.buffer_plan import agree, buffer_load, grown, growth, plan_buffer
from tools.sampling.data import mixed_lengths, real_lengths

BUFFERS: Final = (64, 256, 1024, 4096, 16384)
RANKS: Final = (8, 64, 512)
MOST_DRAWN: Final = 1 << 22


class Evenness(NamedTuple):
    """How even steps are, and how full their packs."""

    vision: float
    """Dist Ratio of vision units."""
    cost: float
    """Dist Ratio of cost."""
    over: float
    """Share of packs beyond the volume bound."""

    @classmethod
    def of(cls, lengths: SampleLengths, packs: Packs, limits: PackLimits, ranks: int) -> "Evenness":
        """Evenness of packs in running order, step after step and rank after rank; micro-batches count as steps."""
        load, steps = packs.load(lengths), np.arange(len(packs)).reshape(-1, ranks)
        over = len(packs) / max(volume_bound(lengths.take(packs.samples), limits), 1) - 1
        return cls(dist_ratio(load.vision_units[steps]), dist_ratio(DEFAULT_COST(load)[steps]), over)


def simulate_buffers(
    lengths: SampleLengths,
    limits: PackLimits,
    *,
    num_ranks: int,
    buffer: int,
    micro_batches: int = 1,
    least_windows: int = 3,
    least_steps: int = 60,
    most_drawn: int = 1 << 22,
) -> tuple[Packs, int]:
    """Packs that ranks make of a stream that never ends, whose samples are drawn at random with replacement.

    Packs come micro-batch after micro-batch, rank after rank. The number beside them is the longest wait of a sample,
    in samples that its rank drew between drawing and packing it.
    """
    rng = np.random.default_rng([num_ranks, buffer])
    held: list[IntArray] = [np.zeros(0, dtype=np.int64)] * num_ranks
    drawn_at = list(held)
    micro: list[Packs] = []
    oldest = window = drawn = 0
    # Window after window, as `StreamFeed` plans them: all ranks draw, grow alike, agree, and pack what they hold.
    while window < least_windows or (len(micro) < least_steps and drawn < most_drawn):
        waited = [len(samples) for samples in held]
        sizes = [buffer] * num_ranks
        while True:
            for rank, size in enumerate(sizes):
                more = max(size - len(held[rank]), 0)
                held[rank] = np.append(held[rank], rng.integers(0, len(lengths), more))
                first = drawn_at[rank].max(initial=-1) + 1
                drawn_at[rank] = np.append(drawn_at[rank], np.arange(first, first + more))
                drawn += more
            of_buffers = [buffer_load(lengths.take(samples), limits, ended=False) for samples in held]
            if max(factors := growth(of_buffers, micro_batches)) == 1:
                break
            sizes = [grown(len(samples), by) for samples, by in zip(held, factors, strict=True)]
        aim = agree(of_buffers, micro_batches)
        of_ranks = []
        for rank, samples in enumerate(held):
            packs = plan_buffer(lengths.take(samples), aim, limits, waited=waited[rank], seed=[window, rank])
            oldest = max(oldest, int(drawn_at[rank].max() - drawn_at[rank][packs.samples].min(initial=1 << 40)))
            of_ranks.append(Packs(samples[packs.samples], packs.starts))
            held[rank], drawn_at[rank] = np.delete(samples, packs.samples), np.delete(drawn_at[rank], packs.samples)
        micro += [Packs.concatenate(packs.between(at, at + 1) for packs in of_ranks) for at in range(len(packs))]
        window += 1
    return Packs.concatenate(micro), oldest


def whole(lengths: SampleLengths, limits: PackLimits, ranks: int) -> Packs:
    """An epoch of all samples, planned at once."""
    arranged = BalancedPacks(PackingSpec(lengths, limits), Ranks(ranks))
    return Packs.concatenate(arranged.window(0, index) for index in range(len(arranged.window_starts(0)) - 1))


def figures(lengths: SampleLengths, limits: PackLimits, packs: Packs, ranks: int) -> str:
    """One cell."""
    even = Evenness.of(lengths, packs, limits, ranks)
    steps = np.arange(len(packs)).reshape(-1, ranks)
    randomness = step_randomness(source_mix(lengths.source, packs, steps))
    return f"{even.vision:.1%} / {even.cost:.1%} / {randomness:.2f} / {even.over:+.1%}"


def table(cells: dict[str, tuple[SampleLengths, PackLimits]]) -> Iterator[str]:
    """A row for each number of ranks and size of the buffer."""
    yield f"| ranks | buffer | out after | {' | '.join(cells)} |"
    yield f"|{' --- |' * (len(cells) + 3)}"
    for ranks in RANKS:
        for size in BUFFERS:
            if ranks * size > MOST_DRAWN:
                continue  # would take longest, and larger buffers than 1,024 bring nothing
            found = [(cell, simulate_buffers(*cell, num_ranks=ranks, buffer=size)) for cell in cells.values()]
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
