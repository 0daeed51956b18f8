"""BalancedPacks: how many steps an epoch takes, and the packs of any window of any epoch."""

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from omnibal.compiled import compiled
from omnibal.data.balance.rules import CLOSING, RESERVE, make_rules, survey
from omnibal.data.balance.tables import Int32Array, Int64Array, scrambled
from omnibal.data.balance.window import driving_loads, plan_window
from omnibal.data.packing_spec import PackingSpec, Ranks
from omnibal.data.packs import Packs
from omnibal.errors import InfeasibleError

WINDOW: Final = 1 << 15  # samples in a window, about: planning them takes some hundredths of a second
BLOCK: Final = 1 << 19  # samples in a block, about: finding its windows takes some hundredths of a second
SURVEY: Final = 1 << 15  # samples that stand for all where these are too many to count
# Doubled from trial to trial: what is found is at most twice the least margin that would do.
MARGINS: Final[tuple[float, ...]] = (0.0, *(0.001 * 2**grown for grown in range(17)))
"""Shares of packs that are added until a trial succeeds: samples that do not combine to fill packs need them."""
ATTEMPTS: Final = 32  # orders of a window's samples that are tried. Nearly always the first one fits.
BLOCKS_KEPT: Final = 4  # blocks whose windows are remembered
SHUFFLE_ROUNDS: Final = 4
LEAST_BITS: Final = 10  # on a smaller domain the network does not reach all permutations equally often

UInt64Array = npt.NDArray[np.uint64]


def blocks_of(num_samples: int) -> int:
    """Number of blocks in an order of so many samples, at least 1; fewer where there are fewer steps."""
    return max(round(num_samples / BLOCK), 1)


def cut_evenly(shares: Int32Array, steps: Int64Array, step_packs: int) -> Int64Array:
    """Cut samples in a row into windows where their load is divided as their steps are.

    Args:
        steps: First step of every window, from 0, and the number of steps behind them.

    Returns:
        Where each window begins, and where the last one ends. No window has fewer samples than packs, but the last
        one where there are too few.
    """
    number, packs = len(shares), steps * step_packs
    if number <= packs[-1]:
        return np.minimum(packs, number)
    # A window of a tenth of the steps ends where a tenth of the load is reached. All are integers: machines cut alike.
    sums = np.cumsum(shares, dtype=np.int64)
    places = np.searchsorted(sums, steps * sums[-1] // steps[-1], side="right")
    # Many samples without load may stand in a row: windows before and behind must keep a sample for every pack.
    cuts: Int64Array = np.clip(places, packs, number - packs[-1] + packs)
    cuts[0], cuts[-1] = 0, number  # also where samples at the ends have no load
    return cuts


class BalancedPacks:
    """Arranges epochs of steps that are balanced in vision units and in cost."""

    # The random order of an epoch is cut at fixed places into blocks that have equal numbers of steps, whatever they
    # hold: so no part of an epoch depends on what comes before it. Each block's steps are divided evenly into windows;
    # where the windows begin in the order depends on the loads in the block. Steps of windows are the same in all
    # epochs.

    def __init__(self, spec: PackingSpec, ranks: Ranks) -> None:
        self._spec, self._ranks = spec, ranks
        self._num_samples = spec.num_samples
        # Of many samples a random part says what means and spreads are; packs are counted from all (`survey`).
        self._demand = survey(spec, drawn=None if self._num_samples <= BLOCK else self._draw(0, SURVEY, 0))
        self._tried: list[Packs] = []  # the first windows of epoch 0: planned already, and known to fit
        self._cuts: dict[tuple[int, int], Int64Array] = {}
        # Sets the number of steps, windows and rules. Trials plan epoch 0: it need not be planned again.
        self._size()

    def window_starts(self, epoch: int) -> Int64Array:  # the same in all epochs
        return self._starts

    def window(self, epoch: int, index: int) -> Packs:
        if epoch == 0 and index < len(self._tried):
            return self._tried[index]
        # The number of steps was found by trials of other windows: this one may hold samples that combine worse.
        # Another order of the same samples nearly always fits.
        for attempt in range(ATTEMPTS):
            packs = self._plan(epoch, index, attempt)
            if packs is not None:
                return packs
        # One window is the whole epoch: the plan of the trial holds all samples, and any epoch can run its packs in
        # another order.
        if len(self._starts) == 2 and self._tried:
            order = np.random.default_rng([self._spec.seed, epoch]).permutation(len(self._tried[0]))
            return self._tried[0].take(order)
        limits = self._spec.limits
        raise InfeasibleError(
            f"window {index} of epoch {epoch} must fit into packs of {limits.vision_units} vision units "
            f"and {limits.llm_tokens} LLM tokens, but in {ATTEMPTS} orders of its samples some packs "
            "would hold too much; choose other limits"
        )

    def _size(self) -> None:
        """Find the number of steps: the bound and its reserve, unless a trial shows that samples do not combine so."""
        # Up to two windows' samples are one window: then nothing is planned alone, and no reserve is due for that.
        single = self._num_samples < 2 * WINDOW
        blocks, window = (1, self._num_samples) if single else (blocks_of(self._num_samples), WINDOW)
        needed = self._demand.packs_needed(blocks, window)
        self._least_steps = self._steps_of(needed)
        fewer = self._steps_of(self._demand.packs_needed(blocks, window, CLOSING))
        # A reserve is there to move samples. In an epoch of few steps it rounds up to a whole step, which costs more
        # than it can bring: so a step fewer is tried first. A trial of one window is a whole plan, and settles it.
        if single and fewer < self._least_steps < 1 / RESERVE and self._try(fewer):
            return
        tried = 0
        # Margins grow until the first windows fit: the first step number that a trial proves is taken.
        for margin in MARGINS:
            steps = self._steps_of(needed * (1 + margin))
            # Samples that do not combine to fill packs hardly fit unless limits come first: no trial need show it.
            easy = self._demand.by_volume
            if steps != tried and ((easy and self._try(steps)) or self._try(steps, repair_first=True)):
                return
            tried = steps
        self._try(self._steps_of(math.inf))  # every sample has a pack of its own

    def _steps_of(self, num_packs: float) -> int:
        """Steps of so many packs, at most as many as have one sample in every pack."""
        most = -(-self._num_samples // self._ranks.step_packs)
        return min(max(math.ceil(min(num_packs, self._num_samples) / self._ranks.step_packs), 1), most)

    def _try(self, num_steps: int, *, repair_first: bool = False) -> bool:
        """Take a number of steps, and tell whether first windows fit: of a small epoch, all of it.

        Where samples fit easily, one window stands for all. Where they do not, the first one may fit by luck: then a
        second one must, too.
        """
        # More steps than the bound asks for mean that a trial has failed: samples do not combine.
        hard = repair_first or num_steps > self._least_steps
        self._divide(num_steps)
        # Weights of loads depend on how many packs share the samples, so every number of steps has rules of its own.
        packs = num_steps * self._ranks.step_packs
        rules = make_rules(self._demand, self._spec, self._ranks, packs)
        self._rules = rules._replace(repair_first=repair_first)
        self._cuts.clear()  # these are of other numbers of steps
        self._tried.clear()
        for index in range(min(len(self._starts) - 1, 1 + hard)):
            found = self._plan(0, index, 0)
            if found is None:
                return False
            self._tried.append(found)
        return True

    def _divide(self, num_steps: int) -> None:
        blocks = min(blocks_of(self._num_samples), max(num_steps, 1))
        steps = np.arange(blocks + 1) * num_steps // blocks
        # As many samples as the steps before have of all steps; at least one for each of their packs.
        step_packs, number = self._ranks.step_packs, self._num_samples
        few = number <= num_steps * step_packs
        places = np.minimum(steps * step_packs, number) if few else steps * number // num_steps
        windows = np.maximum(np.minimum(np.diff(places) // WINDOW, np.diff(steps)), 1)
        starts = [
            first + np.arange(count) * (last - first) // count
            for first, last, count in zip(steps[:-1], steps[1:], windows, strict=True)
        ]
        self._starts: Int64Array = np.concatenate([*starts, steps[-1:]])
        self._block_places: Int64Array = places
        self._block_windows: Int64Array = np.concatenate([[0], np.cumsum(windows)])  # windows before each block

    def _plan(self, epoch: int, index: int, attempt: int) -> Packs | None:
        """Plan a window; after the first attempt in another order, and with limits before all else."""
        block = int(np.searchsorted(self._block_windows, index, side="right")) - 1
        begin, end = self._find_cuts(epoch, block)[index - self._block_windows[block] :][:2]
        # Seeded by the position alone: a resumed run, and every rank, plans the same packs without those before.
        rng = np.random.default_rng([self._spec.seed, epoch, index, attempt])
        chosen, rules = self._draw(int(begin), int(end), epoch), self._rules
        if attempt:
            chosen, rules = rng.permutation(chosen), rules.for_another_attempt()
        return plan_window(chosen, self._spec, rules, int(self._starts[index + 1] - self._starts[index]), rng)

    def _draw(self, begin: int, end: int, epoch: int) -> Int64Array:
        places = shuffled(self._num_samples, begin, end, shuffle_keys(self._spec.seed, epoch))
        return places if self._spec.samples is None else self._spec.samples[places]

    def _find_cuts(self, epoch: int, block: int) -> Int64Array:
        """Where the windows of a block begin, and where the last one ends; those of some blocks are remembered."""
        cuts = self._cuts.get((epoch, block))
        if cuts is None:
            begin, end = self._block_places[block : block + 2].tolist()
            shares = driving_loads(self._draw(begin, end, epoch), self._spec, self._rules)
            first, last = self._block_windows[block : block + 2]
            starts = self._starts[first : last + 1]
            cuts = begin + cut_evenly(shares, starts - starts[0], self._ranks.step_packs)
            # The oldest go first; popped with a default, because several threads may plan (a loader's, for example).
            while len(self._cuts) >= BLOCKS_KEPT:
                self._cuts.pop(next(iter(self._cuts)), None)
            self._cuts[epoch, block] = cuts
        return cuts


def shuffled(size: int, first: int, last: int, keys: UInt64Array) -> Int64Array:
    """Return places ``first`` … ``last`` − 1 of a random permutation of 0 … ``size`` − 1.

    A Feistel network over the smallest power of two that holds ``size``; a value outside is encrypted again until it
    falls inside (cycle walking: less than two turns on average). No memory but the result, and any part of the order
    without the rest. Sources: Luby and Rackoff, How to construct pseudorandom permutations from pseudorandom
    functions, 1988; Black and Rogaway, Ciphers with arbitrary finite domains, 2002.

    >>> keys = shuffle_keys(0, 7)
    >>> sorted(shuffled(10, 0, 10, keys).tolist()), (shuffled(10, 4, 6, keys) == shuffled(10, 0, 10, keys)[4:6]).all()
    ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], np.True_)
    """
    bits = max(int(size - 1).bit_length(), LEAST_BITS)
    order = np.empty(last - first, dtype=np.int64)
    _write_order(np.uint64(size), first, bits, keys, order)
    return order


def shuffle_keys(*seed: int) -> UInt64Array:
    return np.random.SeedSequence(seed).generate_state(SHUFFLE_ROUNDS, np.uint64).astype(np.uint64)


@compiled
def _write_order(size: Any, first: int, bits: int, keys: UInt64Array, order: Int64Array) -> None:
    low_bits = np.uint64(bits // 2)
    high_bits = np.uint64(bits - bits // 2)
    one = np.uint64(1)
    low_mask = (one << low_bits) - one
    high_mask = (one << high_bits) - one
    for index in range(len(order)):
        # The place in two halves; each round mixes one of them with a scrambled key and the other one. Every round can
        # be undone, so different places become different values.
        value = np.uint64(first + index)
        while True:
            low, high = value & low_mask, value >> low_bits
            for turn in range(0, SHUFFLE_ROUNDS, 2):
                high ^= scrambled(low + keys[turn]) & high_mask
                low ^= scrambled(high + keys[turn + 1]) & low_mask
            value = (high << low_bits) | low
            if value < size:
                break  # else it is encrypted once more
        order[index] = value
