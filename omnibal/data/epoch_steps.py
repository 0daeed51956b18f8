"""EpochSteps: the steps of one epoch from any position on, for the ranks that run it now."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from omnibal.cost import Load
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.mixing import Origin
from omnibal.data.pack_stream import PackStream, Ranks
from omnibal.data.packs import Packs
from omnibal.errors import ConfigError


@dataclass(frozen=True)
class StepPacks:
    """One step: the packs of all ranks.

    Args:
        epoch: Which epoch.
        index: Steps of the epoch before this one.
        ranks: Who runs it.
        packs: Rank after rank, micro-batch after micro-batch.
    """

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

        Raises:
            ConfigError: The lengths do not know their target tokens.
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
    """The steps of one epoch from ``first_step`` on; several streams take turns in a random order.

    Args:
        streams: Streams of packs that never share a step.
        epoch: Which epoch.
        first_step: Steps of the epoch that are done.
        seed: Seed of the streams' turns.
        origin: What a mixture was arranged from, None for its beginning.
    """

    def __init__(
        self,
        streams: Sequence[PackStream],
        *,
        epoch: int,
        first_step: int,
        seed: int,
        origin: Origin | None = None,
    ) -> None:
        self.streams = tuple(streams)
        self.epoch = epoch
        self.first_step = first_step
        self._seed = seed
        self.origin = origin

    @property
    def last_step(self) -> int:
        """Steps that are done when the epoch is."""
        return self.first_step + sum(stream.num_steps for stream in self.streams)

    def step(self, index: int) -> StepPacks:
        """The step before which ``index`` steps of the epoch are done.

        Raises:
            ConfigError: The index lies outside ``first_step`` … ``last_step`` − 1.
        """
        if not self.first_step <= index < self.last_step:
            raise ConfigError(f"step must lie between {self.first_step} and {self.last_step - 1}, got {index}")
        before, after = self._turns_before(index), self._turns_before(index + 1)
        turn = next(number for number in range(len(self.streams)) if before[number] < after[number])
        stream = self.streams[turn]
        return StepPacks(self.epoch, index, stream.ranks, stream.step(before[turn]))

    def packs_done(self, steps_done: int) -> list[int]:
        """Position in every stream when ``steps_done`` steps of the epoch are done.

        Raises:
            ConfigError: ``steps_done`` lies outside ``first_step`` … ``last_step``.
        """
        if not self.first_step <= steps_done <= self.last_step:
            raise ConfigError(f"steps_done must lie between {self.first_step} and {self.last_step}, got {steps_done}")
        turns = self._turns_before(steps_done)
        return [stream.position(steps) for stream, steps in zip(self.streams, turns, strict=True)]

    def record(self) -> dict[str, Any]:
        """What it takes to make these steps again, as JSON values."""
        stream = self.streams[0]
        return {
            "arranged_for": [stream.arranged_for.num_replicas, stream.arranged_for.micro_batches],
            "ranks": [stream.ranks.num_replicas, stream.ranks.micro_batches],
            "packs_done": [stream.packs_done for stream in self.streams],
            "first_step": self.first_step,
            **({} if self.origin is None else {"origin": asdict(self.origin) | {"units": list(self.origin.units)}}),
        }

    def _turns_before(self, index: int) -> tuple[int, ...]:
        """How many steps each stream has had before a step."""
        if len(self.streams) == 1:
            return (index - self.first_step,)
        return tuple(int(turns) for turns in self._turns[:, index - self.first_step])

    @cached_property
    def _turns(self) -> npt.NDArray[Any]:
        """Turns that each stream has had, shape (streams, steps + 1)."""
        steps = [stream.num_steps for stream in self.streams]
        positions = [stream.packs_done for stream in self.streams]
        generator = np.random.default_rng([self._seed, self.epoch, *positions])
        order = generator.permutation(np.repeat(np.arange(len(steps)), steps))
        taken = order == np.arange(len(steps))[:, None]
        return np.concatenate([np.zeros((len(steps), 1), dtype=np.int64), np.cumsum(taken, axis=1)], axis=1)
