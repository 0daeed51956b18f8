"""Streams simulated: what ranks' buffers make of lengths that come at random, and what a plan of them all would."""

from typing import Final, NamedTuple

import numpy as np

from omnibal.cost import IntArray
from omnibal.data.balance import BalancedPacks
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio, volume_bound
from omnibal.data.packing_spec import PackingSpec, Ranks
from omnibal.data.packs import Packs
from omnibal.data.policies import DEFAULT_COST
from omnibal.feeds.buffer import agree, asked, grown, growth, plan_buffer

LEAST_WINDOWS: Final = 3
LEAST_STEPS: Final = 60
MOST_DRAWN: Final = 1 << 22
"""Samples of all ranks together."""


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
        """Of packs in running order, step after step and rank after rank; micro-batches count as steps."""
        load, steps = packs.load(lengths), np.arange(len(packs)).reshape(-1, ranks)
        over = len(packs) / max(volume_bound(lengths.take(packs.samples), limits), 1) - 1
        return cls(dist_ratio(load.vision_units[steps]), dist_ratio(DEFAULT_COST(load)[steps]), over)

    def __str__(self) -> str:
        return f"{self.vision:.1%} / {self.cost:.1%} / {self.over:+.1%}"


def packed_ahead(
    lengths: SampleLengths,
    limits: PackLimits,
    *,
    num_ranks: int,
    buffer: int,
    micro_batches: int = 1,
    least_windows: int = LEAST_WINDOWS,
    least_steps: int = LEAST_STEPS,
) -> tuple[Packs, int]:
    """What ranks make of a stream that never ends, whose samples are drawn at random with replacement.

    Args:
        lengths: What is drawn from.
        limits: The most a pack may hold.
        num_ranks: Each with a buffer of its own.
        buffer: Samples of each rank that are planned at a time.
        micro_batches: Packs of a rank and step.
        least_windows: As many windows are planned, and
        least_steps: as many micro-batches, while no more than four million samples are drawn.

    Returns:
        Packs, micro-batch after micro-batch, rank after rank; and how many samples of its own a rank had drawn since,
        where the one that waited longest was packed.
    """
    chance = np.random.default_rng([num_ranks, buffer])
    held: list[IntArray] = [np.zeros(0, dtype=np.int64)] * num_ranks
    drawn_at = list(held)
    micro: list[Packs] = []
    oldest = window = drawn = 0
    while window < least_windows or (len(micro) < least_steps and drawn < MOST_DRAWN):
        waited = [len(samples) for samples in held]
        sizes = [buffer] * num_ranks
        while True:
            for rank, size in enumerate(sizes):
                more = max(size - len(held[rank]), 0)
                held[rank] = np.append(held[rank], chance.integers(0, len(lengths), more))
                first = drawn_at[rank].max(initial=-1) + 1
                drawn_at[rank] = np.append(drawn_at[rank], np.arange(first, first + more))
                drawn += more
            of_buffers = [asked(lengths.take(samples), limits, ended=False) for samples in held]
            if max(times := growth(of_buffers, micro_batches)) == 1:
                break
            sizes = [grown(len(samples), by) for samples, by in zip(held, times, strict=True)]
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


def given_up(
    lengths: SampleLengths, limits: PackLimits, *, num_ranks: int, micro_batches: int, buffer: int
) -> tuple[Evenness, Evenness]:
    """How even a stream's steps are, and how even those of a plan of the very samples that they hold.

    Args:
        lengths: As of ``packed_ahead``, like all arguments.
        limits: See there.
        num_ranks: See there.
        micro_batches: See there.
        buffer: See there.
    """
    ranks = {"num_ranks": num_ranks, "micro_batches": micro_batches}
    packs, _ = packed_ahead(lengths, limits, buffer=buffer, least_windows=2, least_steps=0, **ranks)
    drawn = lengths.take(packs.samples)
    plan = BalancedPacks(PackingSpec(drawn, limits), Ranks(num_ranks, micro_batches))
    whole = Packs.concatenate(plan.window(0, index) for index in range(len(plan.window_starts(0)) - 1))
    # Steps hold a rank's micro-batches one after the other.
    order = np.arange(len(whole)).reshape(-1, num_ranks, micro_batches).transpose(0, 2, 1).ravel()
    return (
        Evenness.of(lengths, packs, limits, num_ranks),
        Evenness.of(drawn, whole.take(order), limits, num_ranks),
    )
