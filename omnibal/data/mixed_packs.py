"""MixedPacks: balanced packs of draws from several sources, each with the share that it was given."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from omnibal.cost import FloatArray
from omnibal.data.balance.planner import ATTEMPTS, BLOCK, MARGINS, WINDOW, cut_evenly
from omnibal.data.balance.rules import Rules, make_rules, survey
from omnibal.data.balance.window import driving_loads, plan_window
from omnibal.data.lengths import IntArray
from omnibal.data.packing_spec import Mixture, PackingSpec, Ranks
from omnibal.data.packs import Packs
from omnibal.data.source_draws import Int64Array, PackRates, SourceDraws
from omnibal.errors import ConfigError, InfeasibleError

BLOCK_STEPS: Final = 64
"""Steps over which shares are exact; within them draws come in any order, so that steps are as random as by chance."""
PARTS: Final = 16
"""While shares change from one knot to the next, stretches are at most such a part of the way, if that is enough."""
LEAST_DRAWS: Final = 1024
"""An epoch has so many draws at least, and what is cut from it for other reasons: chance makes too much of fewer."""
UNIT: Final = 1 << 16  # what a sample or token counts where sums must be exact: all are integers
RATE: Final = 1 << 10
"""Samples per step are multiples of a part of one: the same on machines that differ in the last bits of sums."""
WINDOW_STEPS: Final = 256
"""Most steps of a window: packs that do not fit exchange samples with any other of their window, and shares wander."""
TRIED: Final = 2  # windows of a trial
# Remembered, as they are asked for again:
EPOCHS_KEPT: Final = 4
BLOCKS_KEPT: Final = 1024
STRETCHES_KEPT: Final = 2


@dataclass(frozen=True)
class Origin:
    """The position in a mixture at which another number of ranks stopped; later epochs are counted from it."""

    epoch: int  # the first epoch behind those of the other ranks
    step: int  # steps that were trained before that epoch
    # What each source was to give before that epoch, in parts of 1 / ``UNIT`` of a sample or token.
    units: tuple[int, ...]


class Span(NamedTuple):
    """A stretch of steps, counted from the mixture's first one."""

    first: int
    last: int

    @property
    def steps(self) -> int:
        return self.last - self.first


class DrawSchedule:
    """Cuts a mixture's steps into epochs, these into stretches, and says what each source gives in every one.

    A stretch gets as many draws as fill its packs on average, less a reserve for what chance makes of them: so a step
    has more samples where the mix is lighter. ``margins``, one for the first step and each knot, are shares of packs
    beyond that, for samples that do not combine to fill packs.
    """

    def __init__(
        self,
        mixture: Mixture,
        draws: SourceDraws,
        rates: PackRates,
        step_packs: int,
        margins: FloatArray,
        origin: Origin | None = None,
    ) -> None:
        self._draws, self._rates, self._step_packs, self._margins = draws, rates, step_packs, margins
        self._knots = mixture.steps
        wanted = max(mixture.epoch_samples or draws.num_samples, LEAST_DRAWS)
        # An epoch holds about as many samples as there are, at the first shares.
        self.epoch_steps = max(round(wanted / self.samples_per_step(Span(0, 0), min(wanted, BLOCK))), 1)
        self._origin = origin or Origin(0, 0, (0,) * len(draws.sizes))
        self._units = [np.array(self._origin.units, dtype=np.int64)]  # before each epoch from the origin's on
        self.epoch = lru_cache(EPOCHS_KEPT)(self._cut_epoch)
        self.blocks = lru_cache(BLOCKS_KEPT)(self._cut_stretch)

    def _cut_epoch(self, epoch: int) -> list[Span]:
        # Stretches end at each knot, so that shares change linearly within one.
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
        return self._origin.step + (epoch - self._origin.epoch) * self.epoch_steps

    def num_draws(self, span: Span) -> float:
        roughly = self.samples_per_step(span, BLOCK)  # as if chance made little of them
        return span.steps * self.samples_per_step(span, span.steps * roughly)

    def _cut_stretch(self, span: Span) -> tuple[Int64Array, Int64Array]:
        """The edges of a stretch's blocks, (blocks + 1,), and what each source gives up to each, (blocks + 1, sources).

        What sources give is counted in parts of 1 / ``UNIT`` of a sample or token.
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
            given: Int64Array = np.sum([self.blocks(span)[1][-1] for span in self.epoch(newest)], axis=0)
            if self.first_step(newest) >= self._knots[-1]:
                behind: Int64Array = self._units[-1] + (number + 1 - len(self._units)) * given
                return behind
            self._units.append(self._units[-1] + given)
        return self._units[number]

    def _parts(self, first: int, last: int) -> list[Span]:
        steps = last - first
        draws = steps * self.samples_per_step(Span(first, last), BLOCK)
        parts = -(-draws // BLOCK)
        if not np.allclose(*self._draws.shares_at([first, last])):
            behind = bisect_right(self._knots, first)
            way = self._knots[behind] - self._knots[behind - 1]
            parts = max(-(-draws // WINDOW), min(-(-PARTS * steps // way), draws // LEAST_DRAWS), 1)
        parts = int(min(parts, steps))
        borders = [first + part * steps // parts for part in range(parts + 1)]
        return [Span(*borders[part : part + 2]) for part in range(parts)]

    def samples_per_step(self, span: Span, num_draws: float) -> float:
        """Samples per step of a stretch that has about so many draws in all."""
        middle = (span.first + span.last) / 2
        needed = float(self._rates.packs_per_sample(self._draws.sample_shares_at(middle), num_draws))
        needed *= 1 + float(np.interp(middle, self._knots, self._margins))
        # Cursors are rounded, and no pack may stay empty.
        needed = min(needed, 1 - len(self._draws.sizes) / max(num_draws, 2 * len(self._draws.sizes)))
        return math.floor(RATE * self._step_packs / needed) / RATE


class Stretch(NamedTuple):
    """Some consecutive steps: what is drawn for them, and how they are planned."""

    samples: Int64Array  # draws, block after block, in random order within each
    blocks: Int64Array  # the block of each
    starts: Int64Array  # first step of every window, from 0, and the number of steps behind them
    cuts: Int64Array  # where every window begins in the samples, and where the last one ends
    rules: Rules


class MixedPacks:
    """Arranges steps that hold the sources' shares, balanced as ``BalancedPacks`` does it.

    Steps come without end; an epoch is a part of them. They are cut into stretches that get a fixed number of draws of
    each source (``DrawSchedule``). A stretch is cut into windows where these have their share of the load, and each
    window is planned alone, without those before it.
    """

    def __init__(self, spec: PackingSpec, ranks: Ranks, origin: Origin | None = None) -> None:
        assert spec.mixture is not None, "a spec without a mixture is arranged by BalancedPacks"
        self._spec, self._ranks, self._mixture = spec, ranks, spec.mixture
        self._draws = SourceDraws(spec.lengths, spec.mixture, seed=spec.seed, samples=spec.samples)
        self._rates = PackRates(spec.lengths, spec.limits, self._draws)
        self._stretch = lru_cache(STRETCHES_KEPT)(
            lambda epoch, span: self._make_stretch(self.schedule, span, self.schedule.cursors(epoch, span))
        )
        self.window_starts = lru_cache(STRETCHES_KEPT)(self._window_starts)
        self._repair_first = False
        margins = self._margins()
        self.schedule = DrawSchedule(spec.mixture, self._draws, self._rates, ranks.step_packs, margins, origin)

    def _window_starts(self, epoch: int) -> IntArray:
        spans, first = self.schedule.epoch(epoch), self.schedule.first_step(epoch)
        starts = [span.first - first + self._starts(self.schedule, span)[:-1] for span in spans]
        return np.concatenate([*starts, [self.schedule.epoch_steps]])

    def window(self, epoch: int, index: int) -> Packs:
        step = self.schedule.first_step(epoch) + int(self.window_starts(epoch)[index])
        span = next(span for span in self.schedule.epoch(epoch) if span.first <= step < span.last)
        stretch = self._stretch(epoch, span)
        place = int(np.searchsorted(stretch.starts, step - span.first))
        for attempt in range(ATTEMPTS):
            packs = self._plan(stretch, place, [step, attempt])
            if packs is not None:
                return packs
        raise InfeasibleError(
            f"step {step} of the mixture, and those behind it, must fit into packs of "
            f"{self._spec.limits.vision_units} vision units and {self._spec.limits.llm_tokens} LLM tokens, but "
            f"in {ATTEMPTS} orders of their samples some packs would hold too much; allow larger packs, or let shares "
            "change over more steps"
        )

    def shares_of(self, epoch: int, step: int, packs: Packs) -> dict[str, tuple[float, float]]:
        given = zip(self._spec.lengths.source_names, self._draws.units_of(packs.samples).tolist(), strict=True)
        return self._mixture.shares_of_step(self.schedule.first_step(epoch) + step, dict(given))

    def _margins(self) -> FloatArray:
        """Find how many packs more the samples need than they ask for, at the first step and at each knot."""
        mixture, step_packs = self._mixture, self._ranks.step_packs
        margins = np.zeros(len(mixture.steps))
        for number, step in enumerate(mixture.steps):
            for margin in MARGINS:
                margins[number] = margin
                schedule = DrawSchedule(mixture, self._draws, self._rates, step_packs, margins)
                # Samples that hardly fit may do so by luck: then those behind them must, too.
                if self._fits(schedule, step, 0) and (
                    not (margin or self._repair_first) or self._fits(schedule, step, 1)
                ):
                    break
            else:
                raise InfeasibleError(
                    f"limits must let packs hold more than one sample on average for a mixture, got "
                    f"{self._spec.limits}; choose larger ones"
                )
        return margins

    def _fits(self, schedule: DrawSchedule, step: int, trial: int) -> bool:
        """Whether windows of a mix can be planned: as many draws as an epoch's, up to those of two windows."""
        # Where windows can be planned only with limits repaired first, all are: steps are more random then than where
        # limits are repaired late.
        draws = min(TRIED * WINDOW, schedule.epoch_steps * schedule.samples_per_step(Span(step, step), WINDOW))
        per_step = schedule.samples_per_step(Span(step, step), draws)
        steps = max(round(draws / per_step), 1)
        mix = self._draws.sample_shares_at(step)
        numbers = np.floor(np.outer([trial * steps, (trial + 1) * steps], mix) * per_step + 0.5)
        stretch = self._make_stretch(schedule, Span(step, step + steps), numbers.astype(np.int64))
        for attempt in range(self._repair_first, 2):
            if all(self._plan(stretch, place, [step, attempt]) is not None for place in range(len(stretch.cuts) - 1)):
                self._repair_first = attempt > 0
                return True
        return False

    def _make_stretch(self, schedule: DrawSchedule, span: Span, cursors: Int64Array) -> Stretch:
        numbers = np.arange(len(cursors) - 1)
        drawn = [self._draws.samples(source, *ends) for source, ends in enumerate(cursors[[0, -1]].T.tolist())]
        samples = np.concatenate(drawn)
        blocks = np.concatenate([np.repeat(numbers, given) for given in np.diff(cursors, axis=0).T])
        order = _shuffled_blocks(blocks, np.random.default_rng([self._spec.seed, span.first]))
        samples, blocks = samples[order], blocks[order]
        packs = span.steps * self._ranks.step_packs
        rules = make_rules(survey(self._spec, samples), self._spec, self._ranks, packs)
        rules = rules._replace(repair_first=self._repair_first)
        starts = self._starts(schedule, span)
        cuts = cut_evenly(driving_loads(samples, self._spec, rules), starts, rules.step_packs)
        return Stretch(samples, blocks, starts, cuts, rules)

    def _starts(self, schedule: DrawSchedule, span: Span) -> Int64Array:
        windows = int(min(max(round(schedule.num_draws(span) / WINDOW), -(-span.steps // WINDOW_STEPS)), span.steps))
        return np.arange(windows + 1) * span.steps // windows

    def _plan(self, stretch: Stretch, place: int, chance_of: list[int]) -> Packs | None:
        chance = np.random.default_rng([self._spec.seed, *chance_of])
        part, rules = slice(*stretch.cuts[place : place + 2].tolist()), stretch.rules
        chosen, num_steps = stretch.samples[part], int(np.diff(stretch.starts)[place])
        if chance_of[-1]:
            chosen = chosen[_shuffled_blocks(stretch.blocks[part], chance)]
            rules = rules.for_another_attempt()
        return plan_window(chosen, self._spec, rules, num_steps, chance)


def _shuffled_blocks(blocks: Int64Array, chance: np.random.Generator) -> Int64Array:
    return np.argsort(blocks + chance.random(len(blocks)), kind="stable")
