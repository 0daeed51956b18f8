"""Epoch: which samples every rank runs in every step."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Final, Unpack

import numpy as np
import numpy.typing as npt

from omnibal.cost import Load, smallest_first
from omnibal.data.balance.planner import BalancedPacks
from omnibal.data.isf import ShuffledPacks
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.mixed_packs import MixedPacks, Origin
from omnibal.data.packing_spec import Oversized, PackingOptions, PackingSpec, Ranks
from omnibal.data.packs import Packs, deal
from omnibal.errors import ConfigError, integer

WINDOWS_KEPT: Final = 2  # a step of other ranks may lie across two windows
STEPS_KEPT: Final = 4  # of whoever reads ahead, and of whoever trains
MOST_REMEMBERED: Final = 8  # samples of the next pack that a state remembers
Arrangement = BalancedPacks | MixedPacks | ShuffledPacks
"""A method applied to a spec and ranks: ``window_starts`` and ``window`` plan any window (steps) of any epoch."""


@dataclass(frozen=True)
class Step:
    """What all ranks together process before the next optimizer update.

    Attributes:
        epoch, index: Epochs, or passes over a stream, before this one; steps of the epoch or pass before this one.
        load: Loads of all packs, in arrays of shape (num_replicas, micro_batches); without fillers.
        shares: For each source of a mixture: the share that was asked for, and the one that the step holds.
        oversized: Of a stream: what becomes of samples over a limit, and how many the run has met of them so far.
        target_tokens: Tokens that carry loss in all packs; None where lengths do not know them. A rank's sum of token
            losses, times the number of ranks, divided by this is exact under gradient averaging.
        left_out: Samples left out of the step, or of a stream since the step before, as they cannot be read.
        packs: Rank after rank, micro-batch after micro-batch; None where ranks know their own alone.
    """

    epoch: int
    index: int
    num_samples: int
    load: Load
    shares: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    oversized: Mapping[Oversized, int] = field(default_factory=dict)
    target_tokens: int | None = None
    left_out: int = 0
    packs: Packs | None = field(default=None, compare=False)

    @property
    def llm_tokens(self) -> int:
        return int(np.sum(self.load.llm_tokens))

    def pack(self, rank: int, micro_batch: int) -> IntArray:
        assert self.packs is not None, "a step of an epoch has its packs"
        return self.packs[rank * np.shape(self.load.vision_units)[1] + micro_batch]

    def balance(self) -> dict[str, float]:
        """Mean load of a pack over the largest one, for vision units and LLM tokens: 1 where all packs are alike.

        Packs of one rank hold up each other in the pipeline, those of different ranks at the end of the step.
        """
        loads = {"vision": np.asarray(self.load.vision_units), "llm": np.asarray(self.load.llm_tokens)}
        return {name: float(each.mean() / each.max()) if each.any() else 1.0 for name, each in loads.items()}

    def needs_dummy_tile(self) -> npt.NDArray[np.bool_]:
        """Tell which packs, shape (ranks, micro-batches), have no image while another rank has one at the same time.

        Where parameters are gathered as layers run (ZeRO-3, FSDP), all ranks must run the ViT or none: such a pack
        must pass a dummy tile through it.
        """
        images = np.asarray(self.load.vision_units) > 0
        return np.asarray(~images & images.any(axis=0))


class Epoch:
    """One epoch's samples, arranged as steps × ranks × micro-batches.

    Every sample is in exactly one pack. All ranks have the same number of steps. Packs keep the limits but for single
    oversized samples. Packs without a sample are in the last step only.

    Under ``"balanced"`` all epochs have the same number of steps, and no pack is empty unless there are fewer samples
    than packs. Under ``"isf"`` and ``"random"`` an epoch has the steps that its packs fill.

    Iterating yields the packs of whole steps, as many together as are planned together: in each step rank after rank,
    micro-batch after micro-batch. They are planned when asked for, without those before them.
    """

    # An epoch is arranged once, for the ranks that begin it (`begun_by`). A position in its packs is all that another
    # number of ranks needs to go on: they cut the same packs, behind the first `packs_done`, into steps of their own
    # size, and sort each into micro-batches of like load. Nothing is lost or repeated, and only the window at hand is
    # planned again.

    def __init__(
        self,
        spec: PackingSpec,
        arrangement: Arrangement,
        epoch: int,
        ranks: Ranks,
        *,
        begun_by: Ranks | None = None,
        packs_done: int = 0,
        first_step: int = 0,
        origin: Origin | None = None,
    ) -> None:
        self.epoch, self.ranks, self.begun_by, self.origin = epoch, ranks, begun_by or ranks, origin
        self.num_replicas, self.micro_batches = ranks.num_replicas, ranks.micro_batches
        self.first_step = first_step
        self._spec, self._arrangement, self._first_pack = spec, arrangement, packs_done
        self._untouched = ranks == self.begun_by and packs_done % ranks.step_packs == 0
        # The balanced planner splits packs so that none is empty while there are as many samples.
        self._splits = spec.method == "balanced"
        self._windows: dict[int, tuple[int, Packs]] = {}
        self._steps: dict[int, Packs] = {}
        self._current: Step | None = None

    def __repr__(self) -> str:
        shape = f"{self.num_steps} steps, {self.num_replicas} ranks, {self.micro_batches} micro-batches"
        return f"Epoch({self.epoch}: {shape})"

    @property
    def num_steps(self) -> int:
        """Steps of the whole epoch, as it was begun: known before anything is planned under ``"balanced"``."""
        return int(self._arrangement.window_starts(self.epoch)[-1])

    def at(self, epoch: int) -> "Epoch":
        return Epoch(self._spec, self._arrangement, epoch, self.ranks)

    def __iter__(self) -> Iterator[Packs]:
        for index in range(len(self._arrangement.window_starts(self.epoch)) - 1):
            packs = self._arrangement.window(self.epoch, index)
            yield packs if self._spec.method != "isf" else packs.take(self._running_order(packs))

    @cached_property
    def packs(self) -> Packs:
        """All packs: step after step, rank after rank. Plans and keeps the whole epoch."""
        return Packs.concatenate(self)

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """Indices into ``packs`` by (step, rank, micro-batch)."""
        return np.arange(self.num_steps * self.ranks.step_packs).reshape(-1, self.num_replicas, self.micro_batches)

    @cached_property
    def _num_packs(self) -> int:
        # Packs of the whole epoch; empty ones count only if the steps are passed on untouched. Only the last window may
        # have empty packs: it is planned to count them.
        packs = self.num_steps * self.begun_by.step_packs
        none_empty = self._splits and self._spec.num_samples >= packs
        if self._untouched or none_empty or not packs:
            return packs
        first, last_window = self._window(packs - 1)
        return first + int((last_window.sizes > 0).sum())

    @property
    def last_step(self) -> int:
        return self.first_step - (-max(self._num_packs - self._first_pack, 0) // self.ranks.step_packs)

    def packs_done(self, steps_done: int) -> int:
        steps_done = integer("steps_done", steps_done, self.first_step, self.last_step)
        return min(self._first_pack + (steps_done - self.first_step) * self.ranks.step_packs, self._num_packs)

    def step_packs(self, index: int) -> Packs:
        """The packs of one step, rank after rank, micro-batch after micro-batch; those asked for last are kept."""
        packs = self._steps.get(index)
        if packs is None:
            packs = self._make_step(index)
            while len(self._steps) >= STEPS_KEPT:
                self._steps.pop(next(iter(self._steps)), None)  # another thread may have been faster
            self._steps[index] = packs
        return packs

    def step(self, index: int) -> Step:
        """The step before which ``index`` steps of the epoch are done; the current one is kept."""
        current = self._current
        if current is None or current.index != index:
            current = self._current = self.step_of(index, self.step_packs(index))
        return current

    def step_of(self, index: int, packs: Packs) -> Step:
        lengths, shares = self._spec.lengths, {}
        if isinstance(self._arrangement, MixedPacks):
            shares = self._arrangement.shares_of(self.epoch, index, packs)
        load, targets = packs.load(lengths).reshape((self.num_replicas, self.micro_batches)), lengths.target_tokens
        num_targets = None if targets is None else int(targets[packs.samples].sum(dtype=np.int64))
        return Step(self.epoch, index, len(packs.samples), load, shares, target_tokens=num_targets, packs=packs)

    def _make_step(self, index: int) -> Packs:
        if not self.first_step <= index < self.last_step:
            raise ConfigError(f"step must lie between {self.first_step} and {self.last_step - 1}, got {index}")
        first, last = self.packs_done(index), self.packs_done(index + 1)
        packs = self._slice(first, last)
        if self._untouched:
            return packs.take(self._running_order(packs)) if self._spec.method == "isf" else packs
        # Seeded by the position: all ranks deal alike, whichever steps they have read before.
        generator = np.random.default_rng([first, self.num_replicas])
        if last - first < self.ranks.step_packs:
            packs = deal(packs, self.ranks.step_packs, generator, split=self._splits)
        # Packs of one micro-batch, over all ranks, have like loads.
        load = packs.load(self._spec.lengths)
        by_load = np.lexsort((load.llm_tokens, load.vision_units)).reshape(self.micro_batches, self.num_replicas)
        groups = generator.permuted(by_load, axis=1)[smallest_first(np.arange(self.micro_batches))]
        return packs.take(groups.T.ravel())

    def _running_order(self, packs: Packs) -> npt.NDArray[np.int64]:
        """An order in which ISF's uneven packs run as even ones do: a rank's smallest first, then from the largest on.

        A pack's size is its share of its rank's vision units in the step plus its share of the tokens.
        """
        # Packs themselves stay as they were dealt: saved positions count them, and earlier versions ran them so.
        places = np.arange(len(packs)).reshape(-1, self.num_replicas, self.micro_batches)
        sizes = np.zeros(places.shape)
        for load in (packs.vision_units(self._spec.lengths)[places], packs.llm_tokens(self._spec.lengths)[places]):
            sizes += load / np.maximum(load.sum(axis=-1, keepdims=True), 1)
        return np.take_along_axis(places, smallest_first(sizes), axis=-1).ravel()

    def next_pack(self, steps_done: int) -> list[int]:
        """First samples of the next pack that has any; the same for all ranks, none at the end."""
        position = self.packs_done(steps_done)
        packs = self._slice(position, min(position + self.begun_by.step_packs, self._num_packs))
        filled = np.flatnonzero(packs.sizes)
        return packs[filled[0]][:MOST_REMEMBERED].tolist() if len(filled) else []

    def record(self) -> dict[str, Any]:
        return {
            "arranged_for": [self.begun_by.num_replicas, self.begun_by.micro_batches],
            "ranks": [self.num_replicas, self.micro_batches],
            "packs_done": [self._first_pack],
            "first_step": self.first_step,
            **({} if self.origin is None else {"origin": asdict(self.origin) | {"units": list(self.origin.units)}}),
        }

    def origin_behind(self) -> Origin | None:
        """The origin of a mixture's later epochs, where their ranks are not those that began this one."""
        if not isinstance(self._arrangement, MixedPacks):
            return None
        schedule = self._arrangement.schedule
        return schedule.after(self.epoch, step=schedule.first_step(self.epoch) + self.last_step)

    def _slice(self, first: int, last: int) -> Packs:
        parts = []
        while first < last:
            begin, window = self._window(first)
            end = min(last - begin, len(window))
            parts.append(window.between(first - begin, end))
            first = begin + end
        return parts[0] if len(parts) == 1 else Packs.concatenate(parts)

    def _window(self, position: int) -> tuple[int, Packs]:
        for first, packs in self._windows.values():
            if first <= position < first + len(packs):
                return first, packs
        starts = self._arrangement.window_starts(self.epoch)
        index = int(np.searchsorted(starts, position // self.begun_by.step_packs, side="right")) - 1
        packs = self._arrangement.window(self.epoch, index)
        if not self._untouched:
            packs = packs.take(np.flatnonzero(packs.sizes))
        if len(self._windows) == WINDOWS_KEPT:
            self._windows.pop(next(iter(self._windows)))
        self._windows[index] = int(starts[index]) * self.begun_by.step_packs, packs
        return self._windows[index]


def arrange_epoch(
    lengths: SampleLengths,
    limits: PackLimits,
    *,
    num_replicas: int,
    micro_batches: int = 1,
    epoch: int = 0,
    **options: Unpack[PackingOptions],
) -> Epoch:
    """Arrange all samples as packs for every step, rank and micro-batch; or under a mixture what it draws of them.

    Args:
        lengths: Loads of every sample.
        limits: The most a pack may hold.
        num_replicas: Data-parallel ranks.
        micro_batches: Packs per rank and step.
        epoch: Which epoch; each one draws other packs.
        **options: ``method``, ``seed``, ``oversized``, ``cost``, ``exchange_steps``, ``iterations`` and ``mixture``:
            see ``PackingSpec``.

    Raises:
        ConfigError: An argument is out of range.
        InfeasibleError: The samples do not fit into packs in any order that is tried.
        DataError: ``oversized`` is ``"error"`` and there is such a sample, or ``"drop"`` and there is no other.

    >>> lengths = SampleLengths([1, 3, 5, 4, 1], [300, 800, 1400, 1100, 300])
    >>> epoch = arrange_epoch(lengths, PackLimits(9, 4096), num_replicas=2, method="random")
    >>> epoch.num_steps, sorted(epoch.packs.samples.tolist())
    (1, [0, 1, 2, 3, 4])
    """
    spec = PackingSpec(lengths, limits, **options)  # type: ignore[arg-type]  # a mapping becomes a mixture
    ranks = Ranks(num_replicas, micro_batches)
    return Epoch(spec, arrange(spec, ranks), integer("epoch", epoch, 0), ranks)


def arrange(spec: PackingSpec, ranks: Ranks, origin: Origin | None = None) -> Arrangement:
    """Apply a spec's method; ``origin`` is where other ranks left a mixture, None if nobody did."""
    if spec.mixture is not None:
        return MixedPacks(spec, ranks, origin)
    return BalancedPacks(spec, ranks) if spec.method == "balanced" else ShuffledPacks(spec, ranks)
