"""EpochSteps: the steps of one epoch from any position on, for the ranks that run it now."""

# An epoch is arranged once, for the ranks that begin it. A position in its packs is all that another number
# of ranks needs to go on: they cut the same packs into steps of their own size. Nothing is lost or repeated, and
# only the window at hand is planned again.

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from omnibal.cost import Load, smallest_first
from omnibal.data.epoch import Epoch, arrange
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.mixed_packs import MixedPacks, Origin
from omnibal.data.packing_spec import PackingSpec, Ranks
from omnibal.data.packs import Packs, deal
from omnibal.errors import ConfigError

MOST_WINDOWS_KEPT: Final = 2  # a step of other ranks may lie across two windows
MOST_REMEMBERED: Final = 8  # samples of the next pack that a state remembers


@dataclass(frozen=True)
class StepPacks:
    """One step: the packs of all ranks."""

    epoch: int
    index: int
    ranks: Ranks
    packs: Packs

    def pack(self, rank: int, micro_batch: int) -> IntArray:
        """Samples of one micro-batch."""
        return self.packs[rank * self.ranks.micro_batches + micro_batch]

    @property
    def num_samples(self) -> int:
        """Samples in the whole step."""
        return len(self.packs.samples)

    def load(self, lengths: SampleLengths) -> Load:
        """What every pack holds, in arrays of shape (ranks, micro-batches)."""
        return self.packs.load(lengths).reshape((self.ranks.num_replicas, self.ranks.micro_batches))

    def target_tokens(self, lengths: SampleLengths) -> int:
        """Tokens that carry loss in the whole step.

        A rank's sum of token losses, times the number of ranks, divided by this is exact under gradient averaging.
        """
        if lengths.target_tokens is None:
            raise ConfigError("lengths must have target_tokens to count those of a step, got none")
        return int(lengths.target_tokens[self.packs.samples].sum(dtype=np.int64))

    def needs_dummy_tile(self, lengths: SampleLengths) -> npt.NDArray[np.bool_]:
        """Tell which packs, shape (ranks, micro-batches), have no image while another rank has one at the same time.

        Where parameters are gathered as layers run (ZeRO-3, FSDP), all ranks must run the ViT or none: such a pack
        must pass a dummy tile through it.
        """
        images = self.packs.vision_units(lengths).reshape(self.ranks.num_replicas, self.ranks.micro_batches) > 0
        needs: npt.NDArray[np.bool_] = ~images & images.any(axis=0)
        return needs


class EpochSteps:
    """The steps of one epoch from ``first_step`` on, for ``ranks``, behind ``packs_done`` packs of the epoch.

    Where the ranks are those that the epoch was begun by, its steps are passed on. Otherwise the packs of a step are
    sorted into micro-batches of like load.
    """

    def __init__(
        self,
        spec: PackingSpec,
        begun: Epoch,
        ranks: Ranks,
        *,
        packs_done: int = 0,
        first_step: int = 0,
        origin: Origin | None = None,
    ) -> None:
        self._spec, self._begun, self.ranks, self.origin = spec, begun, ranks, origin
        self.epoch, self.first_step, self._first_pack = begun.epoch, first_step, packs_done
        self._windows: dict[int, tuple[int, Packs]] = {}
        self._untouched = ranks == begun.ranks and packs_done % ranks.step_packs == 0
        # The balanced planner splits packs so that none is empty while there are as many samples.
        self._splits = spec.method == "balanced"

    @property
    def arranged_for(self) -> Ranks:
        """The ranks that began the epoch."""
        return self._begun.ranks

    @cached_property
    def _num_packs(self) -> int:
        # Packs of the whole epoch; empty ones count only if the steps are passed on untouched. Only the last window may
        # have empty packs: it is planned to count them.
        packs = self._begun.num_steps * self.arranged_for.step_packs
        none_empty = self._splits and self._spec.num_samples >= packs
        if self._untouched or none_empty or not packs:
            return packs
        first, last_window = self._window(packs - 1)
        return first + int((last_window.sizes > 0).sum())

    @property
    def last_step(self) -> int:
        """Steps that are done when the epoch is."""
        return self.first_step - (-max(self._num_packs - self._first_pack, 0) // self.ranks.step_packs)

    def packs_done(self, steps_done: int) -> int:
        """Packs of the epoch that are done when ``steps_done`` of its steps are."""
        if not self.first_step <= steps_done <= self.last_step:
            raise ConfigError(f"steps_done must lie between {self.first_step} and {self.last_step}, got {steps_done}")
        return min(self._first_pack + (steps_done - self.first_step) * self.ranks.step_packs, self._num_packs)

    def step(self, index: int) -> StepPacks:
        """The step before which ``index`` steps of the epoch are done."""
        if not self.first_step <= index < self.last_step:
            raise ConfigError(f"step must lie between {self.first_step} and {self.last_step - 1}, got {index}")
        first, last = self.packs_done(index), self.packs_done(index + 1)
        packs = self._slice(first, last)
        if self._untouched:
            order = self._begun.running_order(packs).ravel()
        else:
            # Seeded by the position: all ranks deal alike, whichever steps they have read before.
            generator = np.random.default_rng([first, self.ranks.num_replicas])
            if last - first < self.ranks.step_packs:
                packs = deal(packs, self.ranks.step_packs, generator, split=self._splits)
            order = _alike(packs.load(self._spec.lengths), self.ranks, generator)
        return StepPacks(self.epoch, index, self.ranks, packs.take(order))

    def next_pack(self, steps_done: int) -> list[int]:
        """First samples of the next pack that has any; the same for all ranks, none at the end."""
        position = self.packs_done(steps_done)
        packs = self._slice(position, min(position + self.arranged_for.step_packs, self._num_packs))
        filled = np.flatnonzero(packs.sizes)
        return packs[filled[0]][:MOST_REMEMBERED].tolist() if len(filled) else []

    def record(self) -> dict[str, Any]:
        """What it takes to make these steps again, as JSON values."""
        return {
            "arranged_for": [self.arranged_for.num_replicas, self.arranged_for.micro_batches],
            "ranks": [self.ranks.num_replicas, self.ranks.micro_batches],
            "packs_done": [self._first_pack],
            "first_step": self.first_step,
            **({} if self.origin is None else {"origin": asdict(self.origin) | {"units": list(self.origin.units)}}),
        }

    def shares_of(self, index: int) -> dict[str, tuple[float, float]]:
        """For each source of a mixture: the share that a step was to hold of it, and the share that it holds."""
        arrangement = self._begun.arrangement
        if not isinstance(arrangement, MixedPacks):
            return {}
        return arrangement.shares_of(self.epoch, index, self.step(index).packs)

    def origin_behind(self) -> Origin | None:
        """The origin of a mixture's later epochs, where their ranks are not those that began this one."""
        arrangement = self._begun.arrangement
        if not isinstance(arrangement, MixedPacks):
            return None
        schedule = arrangement.schedule
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
        """The window that holds a pack, and the position of its first pack."""
        for first, packs in self._windows.values():
            if first <= position < first + len(packs):
                return first, packs
        window = next(self._begun.windows(position // self.arranged_for.step_packs))
        packs = window.packs if self._untouched else window.packs.take(np.flatnonzero(window.packs.sizes))
        if len(self._windows) == MOST_WINDOWS_KEPT:
            self._windows.pop(next(iter(self._windows)))
        self._windows[window.first_step] = (window.first_step * self.arranged_for.step_packs, packs)
        return self._windows[window.first_step]


class Epochs:
    """The epochs of a spec, arranged once for each ranks that begin them."""

    def __init__(self, spec: PackingSpec) -> None:
        self._spec = spec
        self._arranged: dict[tuple[Ranks, Origin | None], Epoch] = {}
        self._newest: dict[tuple[int, Ranks, Origin | None], EpochSteps] = {}

    def begin(self, epoch: int, ranks: Ranks, origin: Origin | None = None) -> EpochSteps:
        """An epoch from its beginning."""
        # The newest one is kept, since whoever reads ahead begins it first.
        if (epoch, ranks, origin) not in self._newest:
            steps = self.resume(epoch, ranks, arranged_for=ranks, origin=origin)
            self._newest.clear()
            self._newest[epoch, ranks, origin] = steps
        return self._newest[epoch, ranks, origin]

    def resume(
        self,
        epoch: int,
        ranks: Ranks,
        *,
        arranged_for: Ranks,
        packs_done: int = 0,
        first_step: int = 0,
        origin: Origin | None = None,
    ) -> EpochSteps:
        """An epoch from the position where other ranks left it."""
        begun = self._arrange(arranged_for, origin).at(epoch)
        return EpochSteps(self._spec, begun, ranks, packs_done=packs_done, first_step=first_step, origin=origin)

    def steps_of(self, epoch: int, ranks: Ranks) -> int:
        """Steps of a whole epoch."""
        return self._arrange(ranks, None).at(epoch).num_steps

    def _arrange(self, ranks: Ranks, origin: Origin | None) -> Epoch:
        if (ranks, origin) not in self._arranged:
            self._arranged[ranks, origin] = arrange(self._spec, ranks, origin)
        return self._arranged[ranks, origin]


def _alike(load: Load, ranks: Ranks, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """An order of packs in which those of one micro-batch, over all ranks, have like loads."""
    by_load = np.lexsort((load.llm_tokens, load.vision_units)).reshape(ranks.micro_batches, ranks.num_replicas)
    groups = generator.permuted(by_load, axis=1)[smallest_first(np.arange(ranks.micro_batches))]
    return groups.T.ravel()
