"""The step that a command predicts: what its packs hold, what layers cost, how fast links are."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from omnibal.cli.inputs import Reading, read_lengths
from omnibal.cli.step_packs import LLM_TOKENS, VISION_UNITS
from omnibal.cluster import Layout, Links
from omnibal.cost import CostModel, FloatArray, Load
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, choose_limits, largest_load
from omnibal.errors import ConfigError
from omnibal.memory.footprint import Footprint, StageMemory
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import SCHEDULES, Schedule, ScheduleName
from omnibal.pipeline.search import PartitionSearch, search_partition
from omnibal.pipeline.simulate import Mode, StepSimulation, simulate_step
from omnibal.profile.levels import Level
from omnibal.profile.records import ModelProfile
from omnibal.report.stages import PartitionFigures


@dataclass(frozen=True)
class StepPacks:
    """The packs of one step.

    Attributes:
        limits: The most a pack may hold.
        loads: One per replica, with an entry per micro-batch.
        largest: A pack that none within the limits exceeds.
        num_samples: In all packs.
        description: Where they come from, for people.
    """

    limits: PackLimits
    loads: tuple[Load, ...]
    largest: Load
    num_samples: int
    description: str

    @property
    def micro_batches(self) -> int:
        """Per replica."""
        return len(self.loads[0])

    def to_record(self) -> dict[str, Any]:
        """The packs as JSON values."""
        return {
            "packs": self.description,
            "limits": {"vision_units": self.limits.vision_units, "llm_tokens": self.limits.llm_tokens},
            "num_replicas": len(self.loads),
            "micro_batches": self.micro_batches,
        }


def full_pack(vision_units: int | None, llm_tokens: int | None) -> Load:
    """A pack of the given size, the paper's by default, of one sample."""
    tokens = LLM_TOKENS if llm_tokens is None else llm_tokens
    return Load(VISION_UNITS if vision_units is None else vision_units, tokens, tokens**2)


def step_packs(
    profile: ModelProfile,
    lengths: Sequence[Path] | None,
    *,
    vision_units: int | None,
    llm_tokens: int | None,
    num_replicas: int,
    micro_batches: int,
    step: int | None = None,
) -> StepPacks:
    """The packs of a step, as a command's arguments describe them.

    Args:
        profile: Tells which step of a dataset is the median one.
        lengths: Saved lengths, or JSON lists; without, all packs are equal.
        vision_units: In each pack, or at most.
        llm_tokens: The same.
        num_replicas: Data-parallel ranks.
        micro_batches: Packs per replica.
        step: Of a dataset.

    Raises:
        ConfigError: A step is given without lengths or not in the epoch, or lengths cannot be read.
    """
    if lengths:
        samples = _read(lengths)
        return _real_packs(
            profile, samples, choose_limits(samples, vision_units, llm_tokens), num_replicas, micro_batches, step
        )
    if step is not None:
        raise ConfigError(f"--step must come with --lengths, got {step} alone: equal packs are the same in every step")
    pack = full_pack(vision_units, llm_tokens)
    limits = PackLimits(int(pack.vision_units), int(pack.llm_tokens))
    load = Load.stack([pack] * micro_batches)
    description = f"equal packs of {limits.vision_units:,} vision units and {limits.llm_tokens:,} LLM tokens"
    return StepPacks(limits, (load,) * num_replicas, pack, num_replicas * micro_batches, description)


def _read(paths: Sequence[Path]) -> SampleLengths:
    try:
        return read_lengths(paths, Reading()).lengths
    except ConfigError as error:
        raise ConfigError(f"{error}; run `omnibal lengths` first and name its folder") from error


def _real_packs(
    profile: ModelProfile,
    lengths: SampleLengths,
    limits: PackLimits,
    num_replicas: int,
    micro_batches: int,
    step: int | None,
) -> StepPacks:
    epoch = arrange_epoch(lengths, limits, num_replicas=num_replicas, micro_batches=micro_batches)
    if step is not None and step >= epoch.num_steps:
        raise ConfigError(f"--step must be below the epoch's {epoch.num_steps} steps, got {step}")
    window = next(epoch.windows(step or 0))
    load = window.packs.load(lengths)
    chosen = _median_step(_seconds(profile)(load)[window.steps]) if step is None else step - window.first_step
    packs = window.steps[chosen]
    description = (
        f"step {window.first_step + chosen} of an epoch of {epoch.num_steps:,}, {len(lengths):,} samples, at most "
        f"{limits.vision_units:,} vision units and {limits.llm_tokens:,} LLM tokens in a pack"
    )
    loads = tuple(load[of_replica] for of_replica in packs)
    num_samples = int(window.packs.sizes[packs].sum())
    return StepPacks(limits, loads, largest_load(lengths, limits), num_samples, description)


def _seconds(profile: ModelProfile) -> CostModel:
    """What a micro-batch costs the whole model."""
    parts = (layer.forward_seconds + layer.backward_seconds + layer.weight_seconds for layer in profile.layers)
    return sum(parts, start=CostModel())


def _median_step(seconds: FloatArray) -> int:
    """Of seconds by (step, replica, micro-batch): the step whose slowest replica is the median one."""
    order = np.argsort(seconds.sum(axis=2).max(axis=1), kind="stable")
    return int(order[len(order) // 2])


def every_layer(level: Level, num_layers: int) -> tuple[Level, ...]:
    """The same level for each layer."""
    return (level,) * num_layers


@dataclass(frozen=True)
class StepTask:
    """A step to be predicted.

    Attributes:
        profile: What the layers cost.
        packs: What the micro-batches hold.
        links: How fast data moves.
        zero_stage: 0, or 1: replicas share the optimizer's work.
        recompute: A level for each layer.
        mode: How transfers of 1F1B run.
        schedule: What the stages run.
    """

    profile: ModelProfile
    packs: StepPacks
    links: Links
    zero_stage: int
    recompute: tuple[Level, ...]
    mode: Mode
    schedule: ScheduleName = "1f1b"

    def search(self, num_stages: int, method: str, top: int) -> PartitionSearch:
        """The best partitions by a method."""
        return search_partition(
            self.profile, self.packs.loads, num_stages, self.links, method=method, mode=self.mode,
            zero_stage=self.zero_stage, recompute=self.recompute, top=top,
        )  # fmt: skip

    def simulate(self, partition: Partition) -> StepSimulation:
        """The step under a partition."""
        table = self.table(partition)
        return simulate_step(
            self.profile, partition, self.packs.loads, self.links, zero_stage=self.zero_stage,
            recompute=self.recompute, schedule=table, mode=self.mode,
        )  # fmt: skip

    def layout(self, partition: Partition) -> Layout:
        """How the step is spread over devices."""
        return Layout(
            partition.num_stages, len(self.packs.loads), num_tensor=self.profile.tensor_parallel,
            zero_stage=self.zero_stage, precision=self.profile.dtype,  # type: ignore[arg-type]  # a layout checks it
        )  # fmt: skip

    def table(self, partition: Partition) -> Schedule:
        """What every stage runs."""
        return SCHEDULES[self.schedule](partition.num_stages, self.packs.micro_batches)

    def without_recompute(self) -> "StepTask":
        """The same step with nothing recomputed."""
        return replace(self, recompute=every_layer("none", len(self.recompute)))

    def to_record(self) -> dict[str, Any]:
        """The task as JSON values."""
        profile = {"hash": self.profile.content_hash, "device": self.profile.devices, "dtype": self.profile.dtype}
        return {
            "profile": profile,
            **self.packs.to_record(),
            **asdict(self.links),
            "shard_optimizer": self.zero_stage == 1,
            "mode": self.mode,
            "schedule": self.schedule,
        }

    def figures(self, partition: Partition) -> PartitionFigures:
        """The step under a partition, in figures."""
        memory = [stage.total for stage in self.memory(partition)]
        return PartitionFigures.of(self.profile, partition, self.simulate(partition), memory)

    def memory(self, partition: Partition) -> tuple[StageMemory, ...]:
        """What a device of each stage holds at its peak, if a pack is as large as the limits allow."""
        footprint = Footprint(self.profile, self.packs.largest, self.table(partition), self.layout(partition))
        return footprint.stages(partition, self.recompute)

    def __str__(self) -> str:
        replicas = len(self.packs.loads)
        return (
            f"{len(self.profile.layers)} layers on {self.profile.devices} ({self.profile.dtype})\n"
            f"{replicas} replica{'s' * (replicas > 1)} × {self.packs.micro_batches} micro-batches: "
            f"{self.packs.description}"
        )
