"""What ranks' buffers hold, what all ranks' next packs should hold, and the packs that a rank makes of its buffer.

Ranks tell each other what their buffers hold in all, four numbers each, and agree on what a pack should hold. Each one
takes about the oldest samples that make so many of these packs, and levels the packs among themselves: then any pack of
one rank is like any of another, whichever run at the same time. Packs run in random order, so steps are random, too.

Ranks fill their buffers at the same time (``SharedFilling``): all hear whom they wait for, and what failed.
"""

import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from omnibal.cost import FloatArray, IntArray, Load
from omnibal.data.balance.rules import VISION_PACKS, make_rules, survey
from omnibal.data.balance.window import plan_window
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packing_spec import DEFAULT_COST, PackingSpec, Ranks
from omnibal.data.packs import Packs
from omnibal.errors import ConfigError, DataError, said
from omnibal.feeds.buffer import SampleBuffer, StreamSettings

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
FIRST_SAMPLES: Final = 16
"""Samples by which ranks notice that they draw the same."""
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
    """The factor by which each rank's buffer must grow before packs are planned; 1 where it need not or cannot."""
    # A buffer of short samples may not fill a step. It then grows until it does, but never beyond the bytes that it may
    # take: a rank whose bytes are used up ends the others' growth, too.
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
    """Make ``aim.num_packs`` packs of a buffer, in random order; samples that are left over stay in the buffer."""
    # ``lengths`` are the buffer's samples, the oldest first; the last window left the first ``waited`` ones over.
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


class _Waiting(NamedTuple):
    """What a rank tells whose buffer is not full yet."""

    source: str
    idle_seconds: float


class FullBuffer(NamedTuple):
    """What a rank tells of its full buffer."""

    load: BufferLoad
    kinds: int
    """Kinds of input that the rank has met, by the bits of ``SampleLengths.kinds``."""
    first: str
    """A digest of the first samples, in the first window only: equal digests mean that two ranks read the same data."""
    num_oversized: int
    """Samples over a limit that the rank met since the window before."""
    first_oversized: str


_Count = Callable[[SampleBuffer], FullBuffer | DataError]


class SharedFilling:
    """Fills a rank's buffer together with all other ranks'; a rank without a buffer only gathers (see `StreamFeed`)."""

    def __init__(self, gather: Callable[[Any], list[Any]], settings: StreamSettings, rank: int) -> None:
        self.warn_seconds, self.wait_seconds = settings.warn_seconds, settings.wait_seconds
        if not 0 < self.warn_seconds <= self.wait_seconds:
            raise ConfigError(f"warn_seconds must lie between 0 and {self.wait_seconds}, got {self.warn_seconds}")
        self._gather, self._settings, self._rank = gather, settings, rank

    def heard(self, told: Any) -> list[Any]:
        """What all ranks that draw tell; raises on all ranks where one of them tells a failure."""
        return [theirs for theirs in self._gather(told) if theirs is not None]

    def restore(self, buffer: SampleBuffer | None, kinds: int) -> list[FullBuffer]:
        """Let all ranks come back to the buffers of a state; ``kinds`` are those met before."""
        return self._drawn(buffer, SampleBuffer.restore, partial(self._full, kinds, False))

    def fill(self, buffer: SampleBuffer | None, kinds: int, step: int, *, is_first: bool) -> list[FullBuffer]:
        """Fill all ranks' buffers, further than usual where their samples are so short that they do not fill a step."""
        count = partial(self._full, kinds, is_first)
        of_ranks = self._drawn(buffer, partial(SampleBuffer.fill, step=step), count)
        _refuse_same(of_ranks)
        # A round ends where no rank has to grow further, which all know from the same numbers.
        while max(times := growth([rank.load for rank in of_ranks], self._settings.micro_batches)) > 1:
            size = 0 if buffer is None else grown(len(buffer.samples), times[self._rank])
            of_ranks = self._drawn(buffer, partial(SampleBuffer.fill_up, num_samples=size), count)
        return of_ranks

    def _drawn(
        self, buffer: SampleBuffer | None, draw: Callable[[SampleBuffer], None], count: _Count
    ) -> list[FullBuffer]:
        """Let all ranks draw, each in a thread of its own; nobody is waited for in silence, or without end."""
        failures: list[DataError] = []

        def drawing(buffer: SampleBuffer) -> None:
            try:
                draw(buffer)
            except Exception as error:
                failures.append(failure_of(error))

        thread = threading.Thread(target=drawing, args=(buffer,), daemon=True, name="omnibal-draws")
        heard, since = 0 if buffer is None else buffer.heard, time.monotonic()
        if buffer is not None:
            thread.start()
        # Every warn_seconds at most, ranks tell each other that they are done, or for which source they wait.
        while True:
            told: Any = None
            if buffer is not None:
                thread.join(self.warn_seconds)
                if buffer.heard != heard:
                    heard, since = buffer.heard, time.monotonic()
                if thread.is_alive():
                    told = _Waiting(buffer.drawing_from, time.monotonic() - since)
                else:
                    told = failures[0] if failures else count(buffer)
            of_ranks = self.heard(told)
            waiting = {rank: what for rank, what in enumerate(of_ranks) if isinstance(what, _Waiting)}
            if not waiting:
                return of_ranks
            self._name(waiting)

    def _full(self, kinds: int, is_first: bool, buffer: SampleBuffer) -> FullBuffer | DataError:
        try:
            samples, lengths = buffer.samples.values(), buffer.lengths()
            kinds = int(np.bitwise_or.reduce(lengths.kinds, initial=kinds))
            first = [
                (sample.loads, _ids(sample.held)) for sample, _ in zip(samples, range(FIRST_SAMPLES), strict=False)
            ]
            load = buffer_load(lengths, self._settings.limits, ended=buffer.ended, bounded=buffer.is_bounded)
            first_samples = repr(first) if is_first else ""
            return FullBuffer(load, kinds, first_samples, buffer.num_oversized, buffer.first_oversized)
        except Exception as error:  # such as lengths that are none
            return failure_of(error)

    def _name(self, waiting: Mapping[int, _Waiting]) -> None:
        for rank, (source, idle) in waiting.items():
            if idle >= self.wait_seconds:
                raise DataError(f"source {source!r} must bring samples, got none for {idle:.0f} s on rank {rank}")
        told = [f"source {source!r} of rank {rank}, idle for {idle:.0f} s" for rank, (source, idle) in waiting.items()]
        warnings.warn(f"all ranks wait for {'; '.join(told)}", stacklevel=2)


def failure_of(error: Exception) -> DataError:
    return DataError(said(error))


def _refuse_same(of_ranks: list[FullBuffer]) -> None:
    """Refuse ranks that draw the same samples: each would be trained several times."""
    seen: dict[str, int] = {}
    for number, rank in enumerate(of_ranks):
        if len(rank.first) > len("[]") and rank.first in seen:
            raise DataError(
                f"ranks must draw samples of their own, got the same first ones on ranks {seen[rank.first]} and "
                f"{number}; divide the source over the ranks"
            )
        seen[rank.first] = number


def _ids(held: Any) -> list[int]:
    return np.asarray(held["input_ids"]).ravel().tolist() if isinstance(held, Mapping) and "input_ids" in held else []
