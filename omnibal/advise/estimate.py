"""Where the time of the devices goes under one way to train, and how much ranks hold: estimated on drawn steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import numpy as np

from omnibal.advise.batches import GROUPED, Batches, Batching, Samples, even_packs, padded_batches, random_packs
from omnibal.advise.communication import exposed_seconds
from omnibal.advise.costs import phase_costs, phase_seconds
from omnibal.advise.memory import RankMemory
from omnibal.advise.state import USUAL, TrainingPrecision
from omnibal.advise.wait import Trainer, wait
from omnibal.cluster import Cluster
from omnibal.cost import FloatArray
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.profile.records import Level, ModelProfile

CAUSES: Final = (
    "useful", "padding", "waiting for others' ViT", "waiting for others' LLM", "recomputation", "communication"
)  # fmt: skip
"""What the devices' time goes to; the update of the weights is useful."""
DRAWS: Final = 8
"""Times that samples are drawn anew, to learn how far chance moves an estimate."""
LEAST_SAMPLES, LEAST_STEPS, MOST_SAMPLES = 1024, 2, 16_384
"""Of each draw, which is one step where a step holds more than the most."""


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        trainer: How ranks share their work.
        batching: What shares a micro-batch.
        batch: Samples of a micro-batch where ``batching`` makes no packs.
        micro_batches: Per step and rank.
        recompute: At which level layers run.
        limits: Of packs at random.
        target_rows: Whether the head works on the rows that predict a target alone, as far as lengths tell them.
        offloaded: What the host's memory holds, as far as ranks share it: "optimizer", "parameters".
    """

    trainer: Trainer = "zero3"
    batching: Batching = "random"
    batch: int = 1
    micro_batches: int = 1
    recompute: Level = "full"
    limits: PackLimits | None = None
    target_rows: bool = False
    offloaded: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Setting:
    """What stays whatever way is taken: data, model, machines, and samples of a step.

    Attributes:
        lengths: Of the samples, or of a part of them drawn at random.
        profile: What the layers cost, with what is frozen or adapted.
        cluster: All of its devices are ranks.
        samples_per_step: Of all ranks, where packs do not decide it.
        adapted: What the layers would cost with adapters, where these are not trained already.
        spares_rows: Whether the head can work on target rows alone: the trainer's drop-in does, and lengths tell them.
        offered: What the trainer has by one setting or call, without packs of ours: ways to batch, and ``"head"`` for a
            head on target rows alone.
        cutoff: Tokens of the trainer's own packs, where ``offered`` has them.
        precision: What optimizer, copies of weights, and frozen weights take.
        seed: Of the draws.
    """

    lengths: SampleLengths
    profile: ModelProfile
    cluster: Cluster
    samples_per_step: int
    adapted: ModelProfile | None = None
    spares_rows: bool = False
    offered: tuple[Batching | Literal["head"], ...] = ()
    cutoff: int | None = None
    precision: TrainingPrecision = USUAL
    seed: int = 0

    @cached_property
    def draws(self) -> tuple[Samples, ...]:
        """Samples of some steps each; the same for all ways, so that chance moves them alike."""
        sorted_at_once = -(-GROUPED // self.cluster.num_devices)  # steps, under group_by_length
        least = max(-(-LEAST_SAMPLES // self.samples_per_step), LEAST_STEPS, sorted_at_once)
        steps = max(min(least, MOST_SAMPLES // self.samples_per_step), 1)
        generator = np.random.default_rng(self.seed)
        # the lengths themselves are drawn anew each time, as if others had been sampled (the bootstrap of Efron, 1979)
        return tuple(
            Samples.draw(
                self.lengths.take(generator.integers(0, len(self.lengths), len(self.lengths)))
                if len(self.lengths) <= MOST_SAMPLES
                else self.lengths,
                steps * self.samples_per_step,
                generator,
            )
            for _ in range(DRAWS)
        )

    @cached_property
    def alone(self) -> tuple[FloatArray, ...]:
        """Of each draw, seconds that every sample takes alone in vision and in language, shape (samples, 2)."""
        costs = phase_costs(self.profile)
        vision = costs["vision forward"] + costs["vision backward"]
        language = costs["language forward"] + costs["language backward"]
        # as if every token were a target, as the planner has it
        loads = (samples.all_rows.load for samples in self.draws)
        return tuple(np.stack([cost(load) for cost in (vision, language)], axis=1) for load in loads)

    def batches(self, way: Way, draw: int) -> Batches:
        """The micro-batches that a way makes of a draw."""
        samples, shape = self.draws[draw], {"num_ranks": self.cluster.num_devices, "micro_batches": way.micro_batches}
        samples = samples if way.target_rows else samples.all_rows
        if way.batching == "even":
            return even_packs(samples, self.alone[draw], samples_per_step=self.samples_per_step, **shape)
        if way.batching == "packed":
            assert way.limits is not None, "packs at random have limits"
            return random_packs(samples, way.limits, **shape)
        return padded_batches(samples, batch=way.batch, batching=way.batching, **shape)

    def estimate(self, way: Way, draws: Sequence[int] = range(DRAWS)) -> "Estimate":
        """What a way takes and holds."""
        return Estimate(self, way, tuple(self.batches(way, draw) for draw in draws))


@dataclass(frozen=True, eq=False)
class Estimate:
    """What one way takes and holds.

    Attributes:
        setting: What it was estimated for.
        way: It.
        batches: Its micro-batches, draw by draw.
    """

    setting: Setting
    way: Way
    batches: tuple[Batches, ...]

    @cached_property
    def spent(self) -> FloatArray:
        """Seconds of a device per sample that go to each of ``CAUSES``, shape (draws, causes)."""
        return np.array([self._spent(batches) for batches in self.batches])

    @property
    def sample_seconds(self) -> FloatArray:
        """Seconds of a device per sample, one for each draw."""
        seconds: FloatArray = self.spent.sum(axis=1)
        return seconds

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the devices' time by cause; they add up to 1."""
        spent = self.spent.mean(axis=0)
        return dict(zip(CAUSES, (spent / spent.sum()).tolist(), strict=True))

    @property
    def samples_per_step(self) -> float:
        """Of all ranks, on average."""
        return float(np.mean([batches.samples_per_step for batches in self.batches]))

    @property
    def samples_per_pack(self) -> float:
        """On average."""
        return self.samples_per_step / (self.setting.cluster.num_devices * self.way.micro_batches)

    @property
    def limits(self) -> PackLimits:
        """The most vision units and tokens of any micro-batch."""
        largest = [batches.largest for batches in self.batches]
        return PackLimits(max(most.vision_units for most in largest), max(most.llm_tokens for most in largest))

    @cached_property
    def memory(self) -> RankMemory:
        """What ranks hold."""
        way, setting = self.way, self.setting
        return RankMemory(
            setting.profile, way.trainer, setting.cluster, way.recompute, way.target_rows, way.offloaded,
            setting.precision,
        )  # fmt: skip

    @cached_property
    def peaks(self) -> tuple[float, float]:
        """Bytes of the fullest rank of any step, and of a rank on average."""
        ranks = [self.memory.peak_bytes(batches.loads).max(axis=2) for batches in self.batches]
        return max(float(peaks.max()) for peaks in ranks), float(np.mean([peaks.mean() for peaks in ranks]))

    def _spent(self, batches: Batches) -> FloatArray:
        profile, way, cluster = self.setting.profile, self.way, self.setting.cluster
        costs = phase_seconds(profile, batches.loads, recompute=way.recompute)
        plain, real = phase_seconds(profile, batches.loads), phase_seconds(profile, batches.real)
        run, once, useful = (float(sum(seconds.sum() for seconds in each.values())) for each in (costs, plain, real))
        steps, ranks, _ = batches.loads.shape
        waits = wait(costs, way.trainer)
        by_part = {
            part: float(sum(seconds.sum() for phase, seconds in waits.items() if phase.startswith(part)))
            for part in ("vision", "language")
        }
        talking = float(exposed_seconds(self.memory.held, way.trainer, cluster, costs).sum()) * ranks
        update = sum(layer.optimizer_seconds for layer in self.memory.held.layers) * steps
        update *= ranks if way.trainer == "ddp" else 1  # under ZeRO and FSDP each updates its share
        spent = [useful + update, once - useful, *_parts(by_part), run - once, talking]
        return np.array(spent) / batches.num_samples


def _parts(waits: dict[str, float]) -> tuple[float, float]:
    """Waits for vision and for language: one that makes up for a part of the other is taken off the other."""
    total = sum(waits.values())
    vision = min(max(waits["vision"], 0.0), total)
    return vision, total - vision
