"""PackingSpec: everything that decides which samples share a pack and a step, on all ranks and after every restart."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from omnibal.cost import CostModel
from omnibal.data.checks import kind
from omnibal.data.epoch import Epoch, arrange_epoch
from omnibal.data.epoch_steps import EpochSteps
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.mixing import MixedPacks, Origin
from omnibal.data.mixture import Mixture
from omnibal.data.pack_stream import PackStream, Population, Ranks
from omnibal.data.policies import EXCHANGE_STEPS, ITERATIONS, Method, Oversized, TextOnly
from omnibal.errors import ConfigError

MOST_NAMED = 10  # samples that a message names


@dataclass(frozen=True, eq=False)
class PackingSpec:
    """What all ranks must agree on; arguments as of ``BalancedBatchSampler``.

    Raises:
        ConfigError: ``text_only`` is unknown.
        DataError: ``oversized`` is ``"error"`` and there is such a sample.
    """

    lengths: SampleLengths
    limits: PackLimits
    method: Method = "balanced"
    seed: int = 0
    oversized: Oversized = "alone"
    cost: CostModel | None = None
    text_only: TextOnly = "mix"
    exchange_steps: int = EXCHANGE_STEPS
    iterations: int = ITERATIONS
    mixture: Mixture | None = None
    _arranged: dict[tuple[Ranks, Origin | None], list[Epoch]] = field(default_factory=dict, init=False, repr=False)
    _newest: dict[tuple[int, Ranks, Origin | None], EpochSteps] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        kind("lengths", self.lengths, SampleLengths)
        kind("limits", self.limits, PackLimits)
        if self.text_only not in get_args(TextOnly):
            raise ConfigError(f"text_only must be one of {get_args(TextOnly)}, got {self.text_only!r}")
        if self.mixture is not None and self.text_only != "mix":
            raise ConfigError(f"text_only must be 'mix' under a mixture, got {self.text_only!r}")
        if self.oversized == "error":
            self.limits.refuse_oversized(self.lengths)

    @cached_property
    def oversized_samples(self) -> npt.NDArray[np.int64]:
        """Samples that exceed a limit on their own."""
        return self.limits.oversized(self.lengths)

    def oversized_report(self) -> str:
        """Say how many samples exceed a limit, which, and what becomes of them."""
        over = self.oversized_samples
        if len(over) == 0:
            return "no sample exceeds the limits"
        fate = "are left out" if self.oversized == "drop" else "have packs of their own"
        named = ", ".join(map(str, over[:MOST_NAMED])) + (", …" if len(over) > MOST_NAMED else "")
        limits = f"{self.limits.vision_units} vision units and {self.limits.llm_tokens} LLM tokens"
        return f"{len(over)} of {len(self.lengths)} samples exceed the limits of {limits} and {fate}: {named}"

    def fingerprint(self) -> dict[str, Any]:
        """All of it in a few JSON values; equal where the same epochs come out."""
        return {
            "num_samples": len(self.lengths),
            "content_hash": self.lengths.content_hash,
            "limits": list(asdict(self.limits).values()),
            "method": self.method,
            "seed": self.seed,
            "oversized": self.oversized,
            "cost": None if self.cost is None else list(asdict(self.cost).values()),
            "text_only": self.text_only,
            "exchange_steps": self.exchange_steps,
            **({"iterations": self.iterations} if self.method == "isf" else {}),
            "mixture": None if self.mixture is None else self.mixture.record(self.lengths.source_names),
        }

    def epoch_steps(
        self,
        epoch: int,
        ranks: Ranks,
        *,
        arranged_for: Ranks | None = None,
        packs_done: Sequence[int] | None = None,
        first_step: int = 0,
        origin: Origin | None = None,
    ) -> EpochSteps:
        """The steps of an epoch, from its beginning or from the positions where other ranks left it.

        Args:
            epoch: Which epoch.
            ranks: Who runs the steps.
            arranged_for: Who began the epoch; by default ``ranks``.
            packs_done: Packs that are done in each stream; by default none.
            first_step: Steps of the epoch that are done.
            origin: Where yet other ranks left a mixture before it; None where nobody did.
        """
        if packs_done is None:
            return self._whole(epoch, ranks, origin)
        streams = [
            PackStream(begun.at(epoch), population, packs_done=position, ranks=ranks, split=self.method == "balanced")
            for begun, population, position in zip(
                self._arrange(arranged_for or ranks, origin), self._populations, packs_done, strict=True
            )
        ]
        return EpochSteps(streams, epoch=epoch, first_step=first_step, seed=self.seed, origin=origin)

    def shares_of(self, steps: EpochSteps, index: int) -> dict[str, tuple[float, float]]:
        """Of a mixture's sources, by name: the share that a step was to hold of each, and the one that it holds."""
        arrangement = self._arrange(steps.streams[0].arranged_for, steps.origin)[0].arrangement
        if not isinstance(arrangement, MixedPacks):
            return {}
        asked, given = arrangement.shares_of(steps.epoch, index, steps.step(index).packs)
        return dict(zip(self.lengths.source_names, zip(asked.tolist(), given.tolist(), strict=True), strict=True))

    def origin_behind(self, steps: EpochSteps) -> Origin | None:
        """What later epochs of a mixture go on from, where other ranks than theirs began this one."""
        arrangement = self._arrange(steps.streams[0].arranged_for, steps.origin)[0].arrangement
        if not isinstance(arrangement, MixedPacks):
            return None
        schedule = arrangement.schedule
        return schedule.after(steps.epoch, step=schedule.first_step(steps.epoch) + steps.last_step)

    def steps_of(self, epoch: int, ranks: Ranks) -> int:
        """Steps of a whole epoch."""
        return sum(begun.at(epoch).num_steps for begun in self._arrange(ranks, None))

    def _whole(self, epoch: int, ranks: Ranks, origin: Origin | None) -> EpochSteps:
        """An epoch from its beginning; the newest one is kept, since whoever reads ahead begins it first."""
        if (epoch, ranks, origin) not in self._newest:
            steps = self.epoch_steps(epoch, ranks, packs_done=[0] * len(self._populations), origin=origin)
            self._newest.clear()
            self._newest[epoch, ranks, origin] = steps
        return self._newest[epoch, ranks, origin]

    def _arrange(self, ranks: Ranks, origin: Origin | None) -> list[Epoch]:
        """Each population's epoch 0 for the given ranks."""
        if (ranks, origin) not in self._arranged:
            self._arranged[ranks, origin] = [
                arrange_epoch(
                    population.lengths,
                    self.limits,
                    num_replicas=ranks.num_replicas,
                    micro_batches=ranks.micro_batches,
                    method=self.method,
                    cost=self.cost,
                    seed=self.seed,
                    oversized=self.oversized,
                    exchange_steps=self.exchange_steps,
                    iterations=self.iterations,
                    mixture=self.mixture,
                    origin=origin,
                )
                for population in self._populations
            ]
        return self._arranged[ranks, origin]

    @cached_property
    def _populations(self) -> list[Population]:
        """The samples that may share a step: all of them, or those with an image and those without."""
        dropped = self.oversized_samples if self.oversized == "drop" else np.zeros(0, dtype=np.int64)
        with_image = self.lengths.vision_units > 0 if self.text_only == "together" else np.zeros(0, dtype=np.bool_)
        if with_image.all() or not with_image.any():
            return [Population(self.lengths, None, len(self.lengths) - len(dropped))]
        kinds = [
            Population(self.lengths.take(samples), samples, len(samples) - int(np.isin(dropped, samples).sum()))
            for samples in (np.flatnonzero(with_image), np.flatnonzero(~with_image))
        ]
        return [kind for kind in kinds if kind.num_admitted] or kinds
