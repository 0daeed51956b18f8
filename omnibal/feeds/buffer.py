"""Streams: every rank plans what it has drawn ahead, and ranks stay even though no sample leaves its rank.

Ranks tell each other what their buffers hold in all, three numbers each, and agree on what a pack should hold. Each one
takes about the oldest samples that make so many of these packs, and levels the packs among themselves: then any pack of
one rank is like any of another, whichever run at the same time. Packs run in random order, so steps are random, too.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from omnibal.cost import FloatArray, IntArray, Load
from omnibal.data.balance.demand import Demand, survey
from omnibal.data.balance.rules import VISION_PACKS, Setting, make_rules
from omnibal.data.balance.window import columns_of, plan_window
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packs import Packs
from omnibal.data.policies import DEFAULT_COST

PART: Final = 0.75
"""The part of the emptiest buffer that a window takes: the rest is there to choose from."""
MOST_GROWTH: Final = 2.0
"""Times as many samples that a buffer which does not fill a step grows to before ranks look again."""
RESERVE: Final = 0.005
"""Share of packs beyond what samples ask for: room to move them."""
BUFFER: Final = 256
"""Samples that a rank plans at a time: more have hardly made ranks more even (docs/streams.md)."""
SAMPLES_A_PACK: Final = 32
"""As many for each pack of a step, where that is more: a buffer must hold a step."""
EDGE: Final = 64
"""Last samples of a window, and first ones behind it, that may change places."""
NEAR: Final = 0.05
"""Of a pack: where a window's sums are as near as that, it exchanges no more samples, as exchanges sort the sources."""
SHED: Final = (0.0, 0.0, 0.0, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
"""Shares of the samples that are left for the next window where they do not fit, try after try."""


def buffer_of(micro_batches: int) -> int:
    """Samples that a rank plans at a time where nobody says how many."""
    return max(BUFFER, SAMPLES_A_PACK * micro_batches)


class Asked(NamedTuple):
    """What a rank's buffer holds, as it tells the others."""

    packs: float
    """As many as its samples ask for."""
    vision_units: float
    cost: float
    ended: bool
    """Whether nothing more will come."""
    bounded: bool = False
    """Whether its bytes allow no more samples."""


class Aim(NamedTuple):
    """What ranks agree on for their next packs."""

    num_packs: int
    """Of each rank: of whole steps."""
    vision_units: float
    """Of a pack."""
    cost: float
    """Of a pack."""


def asked(lengths: SampleLengths, limits: PackLimits, *, ended: bool, bounded: bool = False) -> Asked:
    """Count what a buffer holds; a sample over a limit counts as if it were at both.

    Args:
        lengths: Of its samples.
        limits: The most a pack may hold.
        ended: Whether nothing more will come.
        bounded: Whether its bytes allow no more samples.

    >>> asked(SampleLengths([4, 4], [50, 50]), PackLimits(4, 200), ended=False).packs
    2.0
    """
    demand = _survey(lengths, limits)
    count = demand.num_samples
    packs = max(demand.driver, demand.other) * count
    return Asked(packs, demand.mean_vision * count, demand.mean_cost * count, ended, bounded)


def growth(of_ranks: Sequence[Asked], micro_batches: int) -> list[float]:
    """How many times as many samples each rank must hold before packs are planned; 1 where it need not or cannot.

    A buffer of short samples may not fill a step. It then grows until it does, but never beyond the bytes that it may
    take: a rank that has come to these ends the others' growth, too.
    """
    _, cost = _mean_pack(of_ranks)
    held = [rank.cost / max(cost, 1e-9) for rank in of_ranks]
    wanted = min([micro_batches, *(packs for packs, rank in zip(held, of_ranks, strict=True) if rank.bounded)])
    return [
        1.0
        if rank.ended or rank.bounded or packs >= wanted
        # A little at a time, as the next samples may be longer; to PART, to have some to choose from.
        else min(micro_batches / (PART * max(packs, 1e-9)), MOST_GROWTH)
        for packs, rank in zip(held, of_ranks, strict=True)
    ]


def grown(num_samples: int, times: float) -> int:
    """How many samples a buffer holds that grows so many times; at least one more where it grows."""
    return num_samples if times == 1 else max(math.ceil(num_samples * times), num_samples + 1)


def agree(of_ranks: Sequence[Asked], micro_batches: int) -> Aim:
    """What packs should hold, and how many each rank makes now: the same on all ranks, from the same numbers.

    As many as the emptiest buffer can fill and choose from; where its bytes allow less than a step, packs are emptier
    on all ranks. Ranks whose samples have come to an end are not waited for: once they have no more, their packs stay
    empty. When all have ended, all samples are taken.
    """
    vision, cost = _mean_pack(of_ranks)
    going = [rank.cost / cost for rank in of_ranks if not rank.ended]
    if not going:
        needed = max(rank.packs for rank in of_ranks) * (1 + RESERVE)
        return Aim(math.ceil(needed / micro_batches) * micro_batches, vision, cost)
    filled = min(min(going) / micro_batches, 1.0)
    return Aim(max(int(PART * min(going)) // micro_batches, 1) * micro_batches, filled * vision, filled * cost)


def _mean_pack(of_ranks: Sequence[Asked]) -> tuple[float, float]:
    """Vision units and cost of a pack, as all ranks' samples would fill them."""
    packs = sum(rank.packs for rank in of_ranks) * (1 + RESERVE)
    vision, cost = (sum(loads) / max(packs, 1e-9) for loads in zip(*(rank[1:3] for rank in of_ranks), strict=True))
    return vision, cost


def plan_buffer(lengths: SampleLengths, aim: Aim, limits: PackLimits, *, waited: int, seed: Sequence[int]) -> Packs:
    """Make a rank's next packs of its buffer; what they leave stays in it.

    Older samples come first. Only such as no window has passed over yet may have to wait for the next one, so that this
    window holds just what was agreed on. Where samples do not fit into the packs, the newest are left for later.

    Args:
        lengths: Of the samples in the buffer, the oldest first.
        aim: What ranks have agreed on.
        limits: The most a pack may hold; a sample over a limit gets a pack of its own.
        waited: How many of the first samples were there when the last window was planned.
        seed: What chance decides by.

    Returns:
        ``aim.num_packs`` packs of numbers of samples, in random order, empty ones where there are too few samples.

    Complexity: O(samples).
    """
    chance = np.random.default_rng(seed)
    chosen = _choose(lengths, aim, limits, waited)
    for number, shed in enumerate(SHED):
        packs = _packed(lengths, chosen[: len(chosen) - int(shed * len(chosen))], aim, limits, chance, number > 0)
        if packs is not None:
            return packs
    alone = chance.permutation(aim.num_packs)  # one sample in each
    return Packs(chosen[: aim.num_packs], np.minimum(np.arange(aim.num_packs + 1), len(chosen))).take(alone)


def _survey(lengths: SampleLengths, limits: PackLimits) -> Demand:
    return survey(lengths, limits, DEFAULT_COST, samples=None, drawn=None)


def _choose(lengths: SampleLengths, aim: Aim, limits: PackLimits, waited: int) -> npt.NDArray[np.int64]:
    """The oldest samples that together cost what was agreed on, then the nearest exchange of some of the newest."""
    vision, tokens = lengths.vision_units.astype(np.float64), lengths.llm_tokens.astype(np.float64)
    over = (vision > limits.vision_units) | (tokens > limits.llm_tokens)
    vision[over], tokens[over] = limits.vision_units, limits.llm_tokens
    cost = DEFAULT_COST(Load(vision, tokens, tokens**2))
    # A sample is in if the sum is nearer with it than without.
    count = min(max(int(np.searchsorted(np.cumsum(cost) - cost / 2, aim.num_packs * aim.cost)), 1), len(cost))
    weights = np.array([VISION_PACKS / max(aim.vision_units, 1e-9), 1 / aim.cost])
    loads = np.stack([vision, cost], axis=1) * weights
    chosen = _nearest(np.arange(len(cost)), count, waited, loads, aim.num_packs * np.array(aim[1:]) * weights)
    filled = np.maximum(
        np.cumsum(vision[chosen]) / max(limits.vision_units, 1), np.cumsum(tokens[chosen]) / limits.llm_tokens
    )
    # Only what cannot fit is cut: had each rank stayed below from the beginning, all would take large samples first.
    if len(chosen) and filled[-1] > aim.num_packs:
        most = int(np.searchsorted(filled, aim.num_packs / (1 + RESERVE), side="right"))
        chosen = chosen[: max(most, 1)]  # at least one, so that all are taken some day
    return chosen


def _nearest(
    order: npt.NDArray[np.int64], count: int, waited: int, loads: FloatArray, wanted: FloatArray
) -> npt.NDArray[np.int64]:
    """The first ``count`` samples, after the exchanges of one for one that bring their loads near to the wanted.

    Args:
        order: Samples, the oldest first; changed in place.
        count: How many are wanted.
        waited: How many of the first ones stay.
        loads: Of each sample, (samples, 2).
        wanted: Sums, (2,).
    """
    inside, outside = slice(max(count - EDGE, waited), count), slice(count, count + EDGE)
    excess = loads[order[:count]].sum(axis=0) - wanted
    while len(order[inside]) and len(order[outside]) and (excess**2).sum() > NEAR**2:
        after = excess - loads[order[inside], None] + loads[None, order[outside]]
        squares = (after**2).sum(axis=2)
        mine, theirs = np.unravel_index(int(squares.argmin()), squares.shape)
        if not squares[mine, theirs] < (excess**2).sum() * (1 - 1e-6):
            break
        excess = after[mine, theirs]
        swapped = [inside.start + mine, count + theirs]
        order[swapped] = order[swapped[::-1]]
    return order[:count]


def _packed(
    lengths: SampleLengths, chosen: IntArray, aim: Aim, limits: PackLimits, chance: np.random.Generator, hard: bool
) -> Packs | None:
    """Samples in packs that are all alike, in random order; None where some would hold too much.

    For the planner these are the packs of one step of one rank.
    """
    if not len(chosen):
        return Packs([], np.zeros(aim.num_packs + 1, dtype=np.int64))
    part = lengths.take(chosen)
    setting = Setting(limits, DEFAULT_COST, num_replicas=1, micro_batches=aim.num_packs, exchange_steps=1)
    rules, share_of = make_rules(_survey(part, limits), setting, aim.num_packs)
    rules = rules._replace(repair_first=hard)
    packs = plan_window(chance.permutation(len(part)), columns_of(part), share_of, rules, 1, chance)
    # The planner runs packs of like load at the same time; here that would make steps of one kind of sample.
    return None if packs is None else Packs(chosen[packs.samples], packs.starts).take(chance.permutation(len(packs)))
