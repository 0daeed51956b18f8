"""MixedPacks: balanced packs of draws from several sources, each with the share that it was given."""

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from omnibal.data.balance.demand import survey
from omnibal.data.balance.layout import WINDOW, cut_evenly
from omnibal.data.balance.planner import ATTEMPTS, MARGINS
from omnibal.data.balance.rules import Rules, Setting, make_rules
from omnibal.data.balance.tables import Int32Array
from omnibal.data.balance.window import columns_of, driving_loads, plan_window
from omnibal.data.lengths import IntArray
from omnibal.data.mixing.draw_schedule import DrawSchedule, Origin, Span
from omnibal.data.mixing.draws import Draws, Int64Array
from omnibal.data.mixing.rates import PackRates
from omnibal.data.mixture import FloatArray
from omnibal.data.packing_spec import PackingSpec, Ranks
from omnibal.data.packs import Packs
from omnibal.errors import InfeasibleError

KEPT: Final = 2
"""Stretches and epochs that are remembered."""
TRIED: Final = 2
"""Windows of a trial."""
WINDOW_STEPS: Final = 256
"""Most steps of a window: packs that do not fit exchange samples with any other of their window, and shares wander."""


class Stretch(NamedTuple):
    """Some consecutive steps: what is drawn for them, and how they are planned."""

    samples: Int64Array
    """Draws, block after block, in random order within each."""
    blocks: Int64Array
    """The block of each."""
    starts: Int64Array
    """First step of every window, from 0, and the number of steps behind them."""
    cuts: Int64Array
    """Where every window begins in the samples, and where the last one ends."""
    rules: Rules
    share_of: Int32Array


class MixedPacks:
    """Arranges steps that hold the sources' shares, balanced as ``BalancedPacks`` does it.

    Steps come without end; an epoch is a part of them. They are cut into stretches that get a fixed number of draws of
    each source (``DrawSchedule``). A stretch is cut into windows where these have their share of the load, and each
    window is planned alone, without those before it.

    Args:
        spec: With a mixture.
        ranks: Who runs the steps.
        origin: Where other ranks left the mixture; None if nobody did.

    Raises:
        ConfigError: The mixture does not name the sources of the lengths.
        DataError: A source has no samples to draw.
        InfeasibleError: No margin lets the first samples of some mix fit into packs.
    """

    def __init__(self, spec: PackingSpec, ranks: Ranks, origin: Origin | None = None) -> None:
        assert spec.mixture is not None, "a spec without a mixture is arranged by BalancedPacks"
        lengths, limits, mixture = spec.lengths, spec.limits, spec.mixture
        self._setting = Setting(
            limits, spec.pack_cost, ranks.num_replicas, ranks.micro_batches, spec.exchange_steps
        )  # fmt: skip
        self._lengths, self._columns, self._seed, self._mixture = lengths, columns_of(lengths), spec.seed, mixture
        self._draws = Draws(lengths, mixture, seed=spec.seed, samples=spec.samples)
        self._rates = PackRates(lengths, limits, self._draws)
        self._stretch = lru_cache(KEPT)(self._draw_stretch)
        self.window_starts = lru_cache(KEPT)(self._window_starts)
        self._repair_first = False
        self.schedule = self._draw_schedule(self._margins(), origin)

    def _window_starts(self, epoch: int) -> IntArray:
        """First step of every window of an epoch, and the number of steps behind them."""
        spans, first = self.schedule.epoch(epoch), self.schedule.first_step(epoch)
        starts = [span.first - first + self._starts(self.schedule, span)[:-1] for span in spans]
        return np.concatenate([*starts, [self.schedule.epoch_steps]])

    def window(self, epoch: int, index: int) -> Packs:
        """Plan one window: the packs of its steps in running order.

        Raises:
            InfeasibleError: Its samples do not fit into its packs in any order that is tried.
        """
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
            f"{self._setting.limits.vision_units} vision units and {self._setting.limits.llm_tokens} LLM tokens, but "
            f"in {ATTEMPTS} orders of their samples some packs would hold too much; allow larger packs, or let shares "
            "change over more steps"
        )

    def shares_of(self, epoch: int, step: int, packs: Packs) -> tuple[FloatArray, FloatArray]:
        """Shares that a step of an epoch was to hold of each source, and those that its packs hold."""
        asked = self._draws.shares_at(self.schedule.first_step(epoch) + step + 0.5)
        return asked, self._draws.shares_given(packs.samples)

    def _draw_schedule(self, margins: FloatArray, origin: Origin | None = None) -> DrawSchedule:
        return DrawSchedule(
            self._mixture,
            self._draws,
            self._rates,
            step_packs=self._setting.step_packs,
            margins=margins,
            origin=origin,
        )

    def _margins(self) -> FloatArray:
        """Find how many packs more the samples need than they ask for, at the first step and at each knot."""
        steps = [0, *(knot.step for knot in self._mixture.schedule)]
        margins = np.zeros(len(steps))
        for number, step in enumerate(steps):
            for margin in MARGINS:
                margins[number] = margin
                schedule = self._draw_schedule(margins)
                # Samples that hardly fit may do so by luck: then those behind them must, too.
                if self._fits(schedule, step, 0) and (
                    not (margin or self._repair_first) or self._fits(schedule, step, 1)
                ):
                    break
            else:
                raise InfeasibleError(
                    f"limits must let packs hold more than one sample on average for a mixture, got "
                    f"{self._setting.limits}; choose larger ones"
                )
        return margins

    def _fits(self, schedule: DrawSchedule, step: int, trial: int) -> bool:
        """Whether windows of a mix can be planned: as many draws as an epoch's, up to those of two windows.

        Where they can only with limits before all else, all are planned so: steps are more random then than where this
        is done late.
        """
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

    def _draw_stretch(self, epoch: int, span: Span) -> Stretch:
        return self._make_stretch(self.schedule, span, self.schedule.cursors(epoch, span))

    def _make_stretch(self, schedule: DrawSchedule, span: Span, cursors: Int64Array) -> Stretch:
        """Draw what cursors say, shape (blocks + 1, sources), and find how to plan it."""
        numbers = np.arange(len(cursors) - 1)
        drawn = [self._draws.samples(source, *ends) for source, ends in enumerate(cursors[[0, -1]].T.tolist())]
        samples = np.concatenate(drawn)
        blocks = np.concatenate([np.repeat(numbers, given) for given in np.diff(cursors, axis=0).T])
        order = _shuffled_blocks(blocks, np.random.default_rng([self._seed, span.first]))
        samples, blocks = samples[order], blocks[order]
        demand = survey(self._lengths, self._setting.limits, self._setting.cost, samples=samples, drawn=None)
        # Where samples do not combine to fill packs, steps that exchange them for balance sort the sources: on real
        # lengths at 9 tiles and 4096 tokens χ² is 1.2 to 1.3 then, and 1.04 to 1.07 without.
        setting = self._setting if demand.by_volume else self._setting._replace(exchange_steps=1)
        rules, share_of = make_rules(demand, setting, span.steps * setting.step_packs)
        rules = rules._replace(repair_first=self._repair_first)
        starts = self._starts(schedule, span)
        loads = driving_loads(samples, self._columns, rules, share_of)
        return Stretch(samples, blocks, starts, cut_evenly(loads, starts, rules.step_packs), rules, share_of)

    def _starts(self, schedule: DrawSchedule, span: Span) -> Int64Array:
        """First step of every window of a stretch, from 0, and the number of steps behind them."""
        windows = int(min(max(round(schedule.num_draws(span) / WINDOW), -(-span.steps // WINDOW_STEPS)), span.steps))
        return np.arange(windows + 1) * span.steps // windows

    def _plan(self, stretch: Stretch, place: int, chance_of: list[int]) -> Packs | None:
        """Plan a window; after the first attempt in another order, and with limits before all else."""
        chance = np.random.default_rng([self._seed, *chance_of])
        part, rules = slice(*stretch.cuts[place : place + 2].tolist()), stretch.rules
        chosen, num_steps = stretch.samples[part], int(np.diff(stretch.starts)[place])
        if chance_of[-1]:
            chosen = chosen[_shuffled_blocks(stretch.blocks[part], chance)]
            rules = rules.for_another_attempt()
        return plan_window(chosen, self._columns, stretch.share_of, rules, num_steps, chance)


def _shuffled_blocks(blocks: Int64Array, chance: np.random.Generator) -> Int64Array:
    """An order in which blocks follow each other, and each is shuffled."""
    return np.argsort(blocks + chance.random(len(blocks)), kind="stable")
