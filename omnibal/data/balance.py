"""The balanced planner: random steps, split into packs that are alike in vision units and in cost.

A keyed shuffle puts the samples into random order; the order is cut into steps of equal load; the samples of each
step are spread over its packs, largest first; and exchanges of a few samples, within the step and between
neighbouring steps, make its packs alike and keep them within the limits. Steps stay as random as plain shuffling,
because they are drawn before anything is sorted.

Any window of steps is planned without those before it: an epoch is ready at its first step and at any other.
"""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from omnibal.cost import CostModel
from omnibal.data.balancing.dense import MOST_PACKS
from omnibal.data.balancing.instructions import Instructions, instruct
from omnibal.data.balancing.layout import BLOCK, WINDOW, Layout, blocks_of
from omnibal.data.balancing.planning import driving_shares, plan_steps
from omnibal.data.balancing.scales import columns_of
from omnibal.data.balancing.shuffle import shuffle_keys, shuffled
from omnibal.data.balancing.sizing import CLOSING, FULL, RESERVE, packs_needed, survey
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packs import Packs
from omnibal.data.policies import DEFAULT_COST, EXCHANGE_STEPS
from omnibal.errors import InfeasibleError

SURVEY: Final = 1 << 15
"""Samples that stand for all where there is more than a block of them."""
TRIAL: Final = 1 << 13
"""Samples that stand for all in a trial of whether the number of steps suffices."""
TRIAL_STEP_PACKS: Final = 16
"""Most packs in a step of the trial: rounding to whole steps would blur its result."""
TRIALS: Final = 2
"""Parts of the samples that must all fit."""
MARGINS: Final[tuple[float, ...]] = (0.0, *(0.001 * 1.5**grown for grown in range(28)))
"""Shares of packs that are added until a trial succeeds: samples that do not combine to fill packs need them."""
SPARSE_MARGINS: Final = 11
"""Margins up to 0.04 that are tried before packs are filled densely."""
GROWTH: Final = (
    *((False, number) for number in range(SPARSE_MARGINS)),
    *((True, number) for number in range(len(MARGINS))),
)
"""Whether packs are filled densely, and the margin's number, in the order of trials."""
ATTEMPTS: Final = 32
"""Orders of a window's samples that are tried. Nearly always the first one fits."""
DENSE_ATTEMPTS: Final = range(3, 6)
"""Those with packs filled densely."""
DENSEST_ATTEMPT: Final = 6
"""The one that gives up evenness for the densest packs there are."""
BLOCKS_KEPT: Final = 4
"""Blocks whose windows are remembered."""


class BalancedPacks:
    """Arranges epochs of steps that are balanced in vision units and in cost.

    Args:
        lengths: Loads of every sample.
        limits: The most a pack may hold.
        num_replicas: Data-parallel ranks.
        micro_batches: Packs per rank and step.
        cost: What is made even besides vision units; by default ``DEFAULT_COST``.
        seed: The same seed gives the same epochs.
        samples: Which samples take part; None for all.
        exchange_steps: Consecutive steps that may exchange samples for the sake of balance. With 1 every step keeps
            those that it drew.
    """

    def __init__(
        self,
        lengths: SampleLengths,
        limits: PackLimits,
        *,
        num_replicas: int,
        micro_batches: int = 1,
        cost: CostModel | None = None,
        seed: int = 0,
        samples: npt.NDArray[np.int64] | None = None,
        exchange_steps: int = EXCHANGE_STEPS,
    ) -> None:
        self._columns = columns_of(lengths)
        self._limits = limits
        self._num_replicas = num_replicas
        self._step_packs = num_replicas * micro_batches
        self._cost = DEFAULT_COST if cost is None else cost
        self._seed = seed
        self._samples = samples
        self._num_samples = len(lengths) if samples is None else len(samples)
        self._exchange_steps = exchange_steps
        drawn = None if self._num_samples <= BLOCK else self._draw(0, SURVEY, shuffle_keys(seed))
        self._known = survey(lengths, limits, self._cost, samples, drawn)
        self._witness: Packs | None = None
        num_steps, self._dense = self._size()
        self._layout = Layout(self._num_samples, num_steps, self._step_packs)
        self._instructions = self._instruct(self._dense, num_steps * self._step_packs)
        self._cuts: dict[tuple[int, int], IntArray] = {}

    def window_starts(self, epoch: int) -> IntArray:  # the same in all epochs
        """First step of every window, and the number of steps behind them."""
        return self._layout.window_starts

    def window(self, epoch: int, index: int) -> Packs:
        """Plan one window: the packs of its steps in running order.

        Raises:
            InfeasibleError: Its samples do not fit into its packs in any order that is tried. Epochs of one window have
                a plan to fall back to; no larger one is known where this happens.
        """
        if self._witness is not None and epoch == 0:
            return self._witness
        num_steps = int(np.diff(self.window_starts(epoch))[index])
        samples = self._draw(*self._find_places(epoch, index), shuffle_keys(self._seed, epoch))
        for attempt in range(ATTEMPTS if self._witness is None else DENSEST_ATTEMPT):
            packs = self._plan(samples, self._instructed(attempt, num_steps), num_steps, epoch, index, attempt)
            if packs is not None:
                return packs
        if self._witness is not None:
            return self._witness.take(np.random.default_rng([self._seed, epoch]).permutation(len(self._witness)))
        raise InfeasibleError(
            f"the {len(samples)} samples of window {index} in epoch {epoch} must fit into "
            f"{num_steps * self._step_packs} packs of {self._limits.vision_units} vision units and "
            f"{self._limits.llm_tokens} LLM tokens, but some would hold too much; choose other limits"
        )

    def _instructed(self, attempt: int, num_steps: int) -> Instructions:
        """The instructions for an attempt."""
        if attempt in DENSE_ATTEMPTS:
            return self._instructions._replace(together=MOST_PACKS)
        if attempt == DENSEST_ATTEMPT:
            return self._instructions._replace(together=num_steps * self._step_packs, exchange_steps=0)
        return self._instructions

    def _plan(
        self, samples: npt.NDArray[np.int64], instructions: Instructions, num_steps: int, *seed: int
    ) -> Packs | None:
        """Plan steps of samples in random order; by the last of the seeds other than 0, in another one."""
        chance = np.random.default_rng([self._seed, *seed])
        drawn = chance.permutation(samples) if seed[-1] else samples
        return plan_steps(drawn, self._columns, instructions, num_steps, int(chance.integers(1 << 62)))

    def _draw(self, begin: int, end: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Samples at some places of the random order."""
        places = shuffled(self._num_samples, begin, end, keys)
        return places if self._samples is None else self._samples[places]

    def _instruct(self, dense: bool, num_packs: float, *, step_packs: int | None = None) -> Instructions:
        return instruct(
            self._known,
            self._limits,
            self._cost,
            num_replicas=self._num_replicas if step_packs is None else step_packs,
            micro_batches=self._step_packs // self._num_replicas if step_packs is None else 1,
            num_packs=num_packs,
            exchange_steps=self._exchange_steps,
            dense=dense,
        )

    def _size(self) -> tuple[int, bool]:
        """Find the number of steps, and whether packs must be filled densely.

        The bound and its reserve do, unless a trial shows that samples do not combine to fill packs.
        """
        return self._size_by_plan() if self._num_samples < 2 * WINDOW else self._size_by_trials()

    def _size_by_plan(self) -> tuple[int, bool]:
        """Of an epoch of one window: what suffices for epoch 0."""
        needed = packs_needed(self._known, blocks=1, window=self._num_samples)
        least = packs_needed(self._known, blocks=1, window=self._num_samples, reserve=CLOSING)
        steps, fewer = self._steps_of(needed), self._steps_of(least)
        # No reserve is worth a step that is more than it.
        if fewer < steps < 1 / RESERVE and self._try_all(fewer, dense=False):
            return fewer, False
        for dense, number in GROWTH:
            steps = self._steps_of(needed * (1 + MARGINS[number]))
            if steps == self._most_steps:
                break
            if self._try_all(steps, dense):
                return steps, dense
        return self._most_steps, False

    def _size_by_trials(self) -> tuple[int, bool]:
        """Of a larger epoch: what suffices for parts of it."""
        needed = packs_needed(self._known, blocks=blocks_of(self._num_samples), window=WINDOW)
        for dense, number in GROWTH:
            packs = needed * (1 + MARGINS[number])
            if self._steps_of(packs) == self._most_steps:
                break
            if self._try_parts(packs, dense):
                # A whole window combines what small parts may not.
                if number == 0 or (not dense and self._try_part(0, WINDOW, needed)):
                    return self._steps_of(needed), dense
                # What suffices for some samples may just do so: one more.
                return self._steps_of(needed * (1 + MARGINS[number + 1])), dense
        return self._most_steps, False

    @property
    def _most_steps(self) -> int:
        """Steps with one sample in every pack."""
        return -(-self._num_samples // self._step_packs)

    def _steps_of(self, num_packs: float) -> int:
        """Steps of so many packs."""
        return min(max(math.ceil(num_packs / self._step_packs), 1), self._most_steps)

    def _try_all(self, num_steps: int, dense: bool) -> bool:
        """Plan epoch 0, and keep the plan to fall back to in others; tell whether all samples fit."""
        samples = self._draw(0, self._num_samples, shuffle_keys(self._seed, 0))
        instructions = self._instruct(dense, num_steps * self._step_packs)
        self._witness = self._plan(samples, instructions, num_steps, 0, 0, 0)
        return self._witness is not None

    def _try_parts(self, num_packs: float, dense: bool) -> bool:
        """Plan small parts of a large epoch; tell whether their samples fit."""
        ranges = [(part * TRIAL, (part + 1) * TRIAL) for part in range(TRIALS)]
        return all(self._try_part(*places, num_packs, dense=dense, harder=True) for places in ranges)

    def _try_part(self, begin: int, end: int, num_packs: float, *, dense: bool = False, harder: bool = False) -> bool:
        """Plan as many of the samples at some places as fill whole steps; tell whether they fit.

        It may be made harder than the windows of the epoch: half of the reserve, no second chance. Where a small part
        fits by luck, windows need more than one attempt.
        """
        samples = self._draw(begin, end, shuffle_keys(self._seed, 0))
        step_packs = min(self._step_packs, TRIAL_STEP_PACKS)
        instructions = self._instruct(dense, num_packs, step_packs=step_packs)
        if harder:
            instructions = instructions._replace(scatterings=0)
            num_packs *= 1 - RESERVE / 2
        shares = np.cumsum(driving_shares(samples, self._columns, instructions), dtype=np.int64)
        mean_share = self._known.mean_vision if instructions.rule.share_unit > 1 else self._known.driver.mean * FULL
        packs = shares * (num_packs / (self._num_samples * mean_share))
        num_steps = max(int(packs[-1]) // step_packs, 1)
        trial = samples[: np.searchsorted(packs, num_steps * step_packs, side="right")]
        return self._plan(trial, instructions, num_steps, 0, 0, 0) is not None

    def _find_places(self, epoch: int, index: int) -> tuple[int, int]:
        """Places of a window in the epoch's random order."""
        starts = self.window_starts(epoch)
        block = self._layout.block_of(int(starts[index]))
        first = int(np.searchsorted(starts, self._layout.block_steps(block)[0]))
        begin, end = self._find_cuts(epoch, block)[index - first : index - first + 2]
        return int(begin), int(end)

    def _find_cuts(self, epoch: int, block: int) -> IntArray:
        """Where the windows of a block begin, and where the last one ends; those of some blocks are remembered."""
        cuts = self._cuts.get((epoch, block))
        if cuts is None:
            samples = self._draw(*self._layout.block_places(block), shuffle_keys(self._seed, epoch))
            cuts = self._layout.cut(block, driving_shares(samples, self._columns, self._instructions))
            while len(self._cuts) >= BLOCKS_KEPT:
                self._cuts.pop(next(iter(self._cuts)), None)
            self._cuts[epoch, block] = cuts
        return cuts
