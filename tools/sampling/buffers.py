"""How much balance a buffer gives up against the plan of a whole epoch: the table of ``docs/streams.md``.

Every rank draws samples of its own from an endless stream and plans those in its buffer. A cell holds the Dist Ratio of
vision units, that of cost, χ² of the steps' mixes of sources, and packs over the volume bound.

    python -m tools.sampling.buffers    # a quarter of an hour
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from omnibal.data.balance.planner import BalancedPacks
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import source_mix, step_randomness
from omnibal.data.packing_spec import PackingSpec, Ranks
from omnibal.data.packs import Packs
from omnibal.feeds.buffer_plan import Evenness, simulate_buffers
from tools.sampling.data import mixed_lengths, real_lengths

BUFFERS: Final = (64, 256, 1024, 4096, 16384)
RANKS: Final = (8, 64, 512)
MOST_DRAWN: Final = 1 << 22


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
