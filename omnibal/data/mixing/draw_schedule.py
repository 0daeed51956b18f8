"""How many draws of each source every stretch of a mixture's steps gets, without those before it."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from omnibal.data.balance.layout import BLOCK, WINDOW
from omnibal.data.mixing.draws import Draws, Int64Array
from omnibal.data.mixing.rates import PackRates
from omnibal.data.mixture import FloatArray, Mixture
from omnibal.errors import ConfigError

BLOCK_STEPS: Final = 64
"""Steps over which shares are exact; within them draws come in any order, so that steps are as random as by chance."""
PARTS: Final = 16
"""While shares change from one knot to the next, stretches are at most such a part of the way, if that is enough."""
LEAST_DRAWS: Final = 1024
"""An epoch has so many draws at least, and what is cut from it for other reasons: chance makes too much of fewer."""
EPOCHS_KEPT: Final = 4
STRETCHES_KEPT: Final = 1024
UNIT: Final = 1 << 16
"""What a sample or token counts where sums must be exact: all are integers."""
RATE: Final = 1 << 10
"""Samples per step are multiples of a part of one: the same on machines that differ in the last bits of sums."""


@dataclass(frozen=True)
class Origin:
    """Where other ranks left a mixture: what the epochs behind theirs go on from.

    Attributes:
        epoch: The first epoch behind theirs.
        step: Steps that were trained before it.
        units: What each source was to give before it, in parts of 1 / ``UNIT`` of a sample or token.
    """

    epoch: int
    step: int
    units: tuple[int, ...]


class Span(NamedTuple):
    """A stretch of steps, counted from the mixture's first one."""

    first: int
    last: int

    @property
    def steps(self) -> int:
        """How many there are."""
        return self.last - self.first


class DrawSchedule:
    """Cuts a mixture's steps into epochs, these into stretches, and says what each source gives in every one.

    A stretch gets as many draws as fill its packs on average, less a reserve for what chance makes of them: so a step
    has more samples where the mix is lighter. All of it is known from the step alone.

    Args:
        mixture: What is asked for.
        draws: The sources.
        rates: What samples ask of packs.
        step_packs: Packs per step.
        margins: Share of packs beyond the bound and its reserve, at the first step and at each knot: for samples that
            do not combine to fill packs.
        origin: Where other ranks left it, None if nobody did.
    """

    def __init__(
        self,
        mixture: Mixture,
        draws: Draws,
        rates: PackRates,
        *,
        step_packs: int,
        margins: FloatArray,
        origin: Origin | None = None,
    ) -> None:
        self._draws, self._rates, self._step_packs, self._margins = draws, rates, step_packs, margins
        self._knots = [0, *(knot.step for knot in mixture.schedule)]
        wanted = max(mixture.epoch_samples or draws.num_samples, LEAST_DRAWS)
        self.epoch_steps = max(round(wanted / self.samples_per_step(Span(0, 0), min(wanted, BLOCK))), 1)
        """Steps of every epoch: about as many samples as there are, at the first shares."""
        self._origin = origin or Origin(0, 0, (0,) * len(draws.sizes))
        self._units = [np.array(self._origin.units, dtype=np.int64)]  # before each epoch from the origin's on
        self.epoch = lru_cache(EPOCHS_KEPT)(self._cut_epoch)
        self.blocks = lru_cache(STRETCHES_KEPT)(self._cut_stretch)

    def _cut_epoch(self, epoch: int) -> list[Span]:
        """The stretches of an epoch.

        Raises:
            ConfigError: The epoch lies before the origin.
        """
        if epoch < self._origin.epoch:
            raise ConfigError(f"epoch must be at least {self._origin.epoch}, as other ranks began it, got {epoch}")
        first = self.first_step(epoch)
        last = first + self.epoch_steps
        inner = self._knots[bisect_right(self._knots, first) :]
        borders = [first, *(knot for knot in inner if knot < last), last]
        return [part for begin, end in pairwise(borders) for part in self._parts(begin, end)]

    def after(self, epoch: int, *, step: int) -> Origin:
        """The origin of others that go on behind an epoch, when so many steps have been trained."""
        return Origin(epoch + 1, step, tuple(self._units_before(epoch + 1).tolist()))

    def first_step(self, epoch: int) -> int:
        """Of an epoch, counted from the mixture's first one."""
        return self._origin.step + (epoch - self._origin.epoch) * self.epoch_steps

    def num_draws(self, span: Span) -> float:
        """Draws of a stretch, about."""
        return span.steps * self.samples_per_step(span, span.steps * self._roughly(span))

    def _cut_stretch(self, span: Span) -> tuple[Int64Array, Int64Array]:
        """What the sources give within a stretch.

        Returns:
            Where its blocks end (its beginning included), shape (blocks + 1,); what each source gives up to there, in
            parts of 1 / ``UNIT``, shape (blocks + 1, sources).
        """
        edges = np.append(np.arange(span.first, span.last, BLOCK_STEPS), span.last)
        mixes = self._draws.sample_shares_at((edges[1:] + edges[:-1]) / 2)
        per_step = self.num_draws(span) / span.steps
        given = np.cumsum(mixes * np.diff(edges)[:, None], axis=0) * per_step * self._draws.means
        units = np.zeros((len(edges), given.shape[1]), dtype=np.int64)
        units[1:] = np.rint(given * UNIT)
        return edges, units

    def cursors(self, epoch: int, span: Span) -> Int64Array:
        """Draws of each source before the blocks of a stretch, and behind the last one, shape (blocks + 1, sources)."""
        before = self._units_before(epoch)
        for earlier in self.epoch(epoch):
            given = self.blocks(earlier)[1]
            if earlier == span:
                return self._draws.cursors((before + given) / UNIT)
            before = before + given[-1]
        raise AssertionError("the stretch is one of the epoch's")

    def _units_before(self, epoch: int) -> Int64Array:
        """What each source gives before an epoch; epochs behind the schedule's end are all alike."""
        number = epoch - self._origin.epoch
        while len(self._units) <= number:
            newest = self._origin.epoch + len(self._units) - 1
            given = self._given(newest)
            if self.first_step(newest) >= self._knots[-1]:
                behind: Int64Array = self._units[-1] + (number + 1 - len(self._units)) * given
                return behind
            self._units.append(self._units[-1] + given)
        return self._units[number]

    def _given(self, epoch: int) -> Int64Array:
        given: Int64Array = np.sum([self.blocks(span)[1][-1] for span in self.epoch(epoch)], axis=0)
        return given

    def _parts(self, first: int, last: int) -> list[Span]:
        """Stretches of steps between which there is no knot."""
        steps = last - first
        draws = steps * self._roughly(Span(first, last))
        parts = -(-draws // BLOCK)
        if not np.allclose(*self._draws.shares_at([first, last])):
            behind = bisect_right(self._knots, first)
            way = self._knots[behind] - self._knots[behind - 1]
            parts = max(-(-draws // WINDOW), min(-(-PARTS * steps // way), draws // LEAST_DRAWS), 1)
        parts = int(min(parts, steps))
        borders = [first + part * steps // parts for part in range(parts + 1)]
        return [Span(*borders[part : part + 2]) for part in range(parts)]

    def _roughly(self, span: Span) -> float:
        """Samples per step, as if chance made little of them."""
        return self.samples_per_step(span, BLOCK)

    def samples_per_step(self, span: Span, num_draws: float) -> float:
        """Samples per step of a stretch that has about so many draws in all."""
        middle = (span.first + span.last) / 2
        needed = float(self._rates.packs_per_sample(self._draws.sample_shares_at(middle), num_draws))
        needed *= 1 + float(np.interp(middle, self._knots, self._margins))
        # Cursors are rounded, and no pack may stay empty.
        needed = min(needed, 1 - len(self._draws.sizes) / max(num_draws, 2 * len(self._draws.sizes)))
        return math.floor(RATE * self._step_packs / needed) / RATE
