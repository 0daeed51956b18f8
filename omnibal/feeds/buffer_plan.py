"""What ranks' buffers hold, what all ranks' next packs should hold, and the packs that a rank makes of its buffer.

Ranks tell each other what their buffers hold in all, four numbers each, and agree on what a pack should hold. Each one
takes about the oldest samples that make so many of these packs, and levels the packs among themselves: then any pack of
one rank is like any of another, whichever run at the same time. Packs run in random order, so steps are random, too.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from omnibal.cost import FloatArray, IntArray, Load
from omnibal.data.balance.rules import VISION_PACKS, make_rules, survey
from omnibal.data.balance.window import plan_window
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio, volume_bound
from omnibal.data.packing_spec import DEFAULT_COST, PackingSpec, Ranks
from omnibal.data.packs import Packs

PART: Final = 0.75
"""The part of the emptiest buffer that a window takes: the rest is there to choose from."""
MOST_GROWTH: Final = 2.0
"""A buffer that does not fill a step grows to so many times its samples before ranks look again."""
RESERVE: Final = 0.005
"""Share of packs beyond what samples ask for: room to move them."""
BUFFER: Final = 256
"""Samples that a rank plans at a time: more have hardly made ranks more even (docs/streams.md)."""
SAMPLES_A_PACK: Final = 32
"""Samples for each pack of a step, where that is more than ``BUFFER``: a buffer must hold a step."""
EDGE: Final = 64
"""Last samples of a window, and first ones behind it, that may change places."""
NEAR: Final = 0.05
"""A window whose sums are within this share of a pack exchanges no more samples, as exchanges sort the sources."""
SHED: Final = (0.0, 0.0, 0.0, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
"""Shares of the samples that are left for the next window where they do not fit, try after try."""


def buffer_of(micro_batches: int) -> int:
    """Samples that a rank plans at a time where nobody says how many."""
    return max(BUFFER, SAMPLES_A_PACK * micro_batches)


class BufferLoad(NamedTuple):
    """What a rank's buffer holds, as it tells the others."""

    packs: float
    """Packs that its samples ask for."""
    vision_units: float
    cost: float
    ended: bool
    """Whether nothing more will come."""
    bounded: bool = False
    """Whether its bytes allow no more samples."""
    sound_units: float = 0.0


class Aim(NamedTuple):
    """What ranks agree on for their next packs."""

    num_packs: int
    """Packs of each rank; they make whole steps."""
    vision_units: float
    """Vision units of a pack."""
    cost: float
    """Cost of a pack, by ``DEFAULT_COST``."""
    sound_units: float = 0.0
    """Sound units of a pack."""


def buffer_load(lengths: SampleLengths, limits: PackLimits, *, ended: bool, bounded: bool = False) -> BufferLoad:
    """Count what a buffer holds; a sample over a limit counts as if it were at both.

    >>> buffer_load(SampleLengths([4, 4], [50, 50]), PackLimits(4, 200), ended=False).packs
    2.0
    """
    demand = survey(PackingSpec(lengths, limits))
    count = demand.num_samples
    packs = max(demand.driver, demand.other, demand.further) * count
    sounds = demand.mean_further.get("sound_units", 0.0)
    return BufferLoad(packs, demand.mean_vision * count, demand.mean_cost * count, ended, bounded, sounds * count)


def growth(of_ranks: Sequence[BufferLoad], micro_batches: int) -> list[float]:
    """The factor by which each rank's buffer must grow before packs are planned; 1 where it need not or cannot.

    A buffer of short samples may not fill a step. It then grows until it does, but never beyond the bytes that it may
    take: a rank whose bytes are used up ends the others' growth, too.
    """
    _, cost, _ = _mean_pack(of_ranks)
    held = [rank.cost / max(cost, 1e-9) for rank in of_ranks]
    wanted = min([micro_batches, *(packs for packs, rank in zip(held, of_ranks, strict=True) if rank.bounded)])
    return [
        1.0
        if rank.ended or rank.bounded or packs >= wanted
        # A little at a time, as the next samples may be longer; to PART, to have some to choose from.
        else min(micro_batches / (PART * max(packs, 1e-9)), MOST_GROWTH)
        for packs, rank in zip(held, of_ranks, strict=True)
    ]


def grown(num_samples: int, factor: float) -> int:
    """Samples of a buffer that has grown by a factor; at least one more where it grows."""
    return num_samples if factor == 1 else max(math.ceil(num_samples * factor), num_samples + 1)


def agree(of_ranks: Sequence[BufferLoad], micro_batches: int) -> Aim:
    """What packs should hold, and how many each rank makes now: the same on all ranks, from the same numbers."""
    # The emptiest buffer says how many packs, as it must fill them and leave samples to choose from; where its bytes
    # allow less than a step, packs are emptier on all ranks. Ranks whose sources have ended are not waited for: their
    # packs stay empty once they have no samples. When all have ended, all samples are taken.
    vision, cost, sounds = _mean_pack(of_ranks)
    going = [rank.cost / cost for rank in of_ranks if not rank.ended]
    if not going:
        needed = max(rank.packs for rank in of_ranks) * (1 + RESERVE)
        return Aim(math.ceil(needed / micro_batches) * micro_batches, vision, cost, sounds)
    filled = min(min(going) / micro_batches, 1.0)
    num_packs = max(int(PART * min(going)) // micro_batches, 1) * micro_batches
    return Aim(num_packs, filled * vision, filled * cost, filled * sounds)


def _mean_pack(of_ranks: Sequence[BufferLoad]) -> tuple[float, float, float]:
    """Vision units, cost and sound units of a pack, as all ranks' samples would fill them."""
    packs = max(sum(rank.packs for rank in of_ranks) * (1 + RESERVE), 1e-9)
    loads = ((rank.vision_units, rank.cost, rank.sound_units) for rank in of_ranks)
    vision, cost, sounds = (sum(of_all) / packs for of_all in zip(*loads, strict=True))
    return vision, cost, sounds


def plan_buffer(lengths: SampleLengths, aim: Aim, limits: PackLimits, *, waited: int, seed: Sequence[int]) -> Packs:
    """Make ``aim.num_packs`` packs of a buffer, in random order; samples that are left over stay in the buffer.

    ``lengths`` are the buffer's samples, the oldest first; the last window left the first ``waited`` ones over.
    """
    # Older samples come first. Only samples that no window has passed over yet may have to wait for the next one, so
    # that this window holds just what was agreed on. Where samples do not fit into the packs, the newest are left for
    # later; a sample over a limit gets a pack of its own. O(samples).
    rng = np.random.default_rng(seed)
    chosen = _choose(lengths, aim, limits, waited)
    for attempt, shed in enumerate(SHED):
        packs = _packed(lengths, chosen[: len(chosen) - int(shed * len(chosen))], aim, limits, rng, attempt > 0)
        if packs is not None:
            return packs
    order = rng.permutation(aim.num_packs)  # no order of the samples fits: one sample in each pack does
    return Packs(chosen[: aim.num_packs], np.minimum(np.arange(aim.num_packs + 1), len(chosen))).take(order)


def _choose(lengths: SampleLengths, aim: Aim, limits: PackLimits, waited: int) -> npt.NDArray[np.int64]:
    """The oldest samples that together cost what was agreed on, some of the newest exchanged to come nearer."""
    vision, tokens = lengths.vision_units.astype(np.float64), lengths.llm_tokens.astype(np.float64)
    over = (vision > limits.vision_units) | (tokens > limits.llm_tokens)
    vision[over], tokens[over] = limits.vision_units, limits.llm_tokens  # as `buffer_load` counts them
    cost = DEFAULT_COST(Load(vision, tokens, tokens**2))
    # A sample is in if the sum is nearer with it than without.
    count = min(max(int(np.searchsorted(np.cumsum(cost) - cost / 2, aim.num_packs * aim.cost)), 1), len(cost))
    sounds = np.zeros(len(cost)) if lengths.sound_units is None else lengths.sound_units.astype(np.float64)
    most = limits.most("sound_units")
    sounds = np.minimum(sounds, most)
    # As the planner weighs them: a mean pack's sounds as much as its cost.
    weights = np.array([VISION_PACKS / max(aim.vision_units, 1e-9), 1 / aim.cost, 1 / max(aim.sound_units, 1e-9)])
    loads = np.stack([vision, cost, sounds], axis=1) * weights
    chosen = _exchanged(np.arange(len(cost)), count, waited, loads, aim.num_packs * np.array(aim[1:]) * weights)
    shares = (vision, limits.vision_units), (tokens, limits.llm_tokens), (sounds, most)
    filled = np.maximum.reduce([np.cumsum(units[chosen]) / max(limit, 1) for units, limit in shares])
    # Only what cannot fit is cut: had each rank stayed below from the beginning, all would take large samples first.
    if len(chosen) and filled[-1] > aim.num_packs:
        most = int(np.searchsorted(filled, aim.num_packs / (1 + RESERVE), side="right"))
        chosen = chosen[: max(most, 1)]  # at least one, so that all are taken some day
    return chosen


def _exchanged(
    order: npt.NDArray[np.int64], count: int, waited: int, loads: FloatArray, wanted: FloatArray
) -> npt.NDArray[np.int64]:
    """The first ``count`` samples of an order, after exchanges that bring the sum of their loads near to ``wanted``."""
    # Loads are weighted vision units, cost and sound units, (samples, 3); the first `waited` samples of the order stay.
    # Of all pairs of a sample inside and one outside, the one whose exchange comes nearest is made, until the sums are
    # near enough or no pair helps: at most EDGE x EDGE pairs are looked at each time.
    inside, outside = slice(max(count - EDGE, waited), count), slice(count, count + EDGE)
    missed = loads[order[:count]].sum(axis=0) - wanted
    while len(order[inside]) and len(order[outside]) and (missed**2).sum() > NEAR**2:
        after = missed - loads[order[inside], None] + loads[None, order[outside]]
        squares = (after**2).sum(axis=2)
        mine, theirs = np.unravel_index(int(squares.argmin()), squares.shape)
        if not squares[mine, theirs] < (missed**2).sum() * (1 - 1e-6):
            break
        missed = after[mine, theirs]
        swapped = [inside.start + mine, count + theirs]
        order[swapped] = order[swapped[::-1]]
    return order[:count]


def _packed(
    lengths: SampleLengths, chosen: IntArray, aim: Aim, limits: PackLimits, rng: np.random.Generator, hard: bool
) -> Packs | None:
    """Samples in packs that are all alike, in random order; None where some would hold too much."""
    if not len(chosen):
        return Packs([], np.zeros(aim.num_packs + 1, dtype=np.int64))
    part = lengths.take(chosen)
    # For the planner these are the packs of one step of one rank: it makes the packs of a step alike.
    spec = PackingSpec(part, limits, exchange_steps=1)
    rules = make_rules(survey(spec), spec, Ranks(1, aim.num_packs), aim.num_packs)._replace(repair_first=hard)
    packs = plan_window(rng.permutation(len(part)), spec, rules, 1, rng)
    # The planner runs packs of like load at the same time; here that would make steps of one kind of sample.
    return None if packs is None else Packs(chosen[packs.samples], packs.starts).take(rng.permutation(len(packs)))


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


def compare_with_plan(
    lengths: SampleLengths, limits: PackLimits, *, num_ranks: int, micro_batches: int, buffer: int
) -> tuple[Evenness, Evenness]:
    """How even a stream's steps are, and how even those of one plan of all samples that they hold."""
    shape = {"num_ranks": num_ranks, "micro_batches": micro_batches, "buffer": buffer}
    packs, _ = simulate_buffers(lengths, limits, **shape, least_windows=2, least_steps=0)
    drawn = lengths.take(packs.samples)
    whole = arrange_epoch(drawn, limits, num_replicas=num_ranks, micro_batches=micro_batches).packs
    # Steps hold a rank's micro-batches one after the other.
    order = np.arange(len(whole)).reshape(-1, num_ranks, micro_batches).transpose(0, 2, 1).ravel()
    return Evenness.of(lengths, packs, limits, num_ranks), Evenness.of(drawn, whole.take(order), limits, num_ranks)
