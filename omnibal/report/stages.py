"""What each stage of a pipeline holds and does in a simulated step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from omnibal.pipeline.boundaries import Partition
from omnibal.pipeline.schedule import Operation
from omnibal.pipeline.simulate import Simulation, StepSimulation
from omnibal.profile.records import ModelProfile
from omnibal.report.memory import unit_of


@dataclass(frozen=True)
class StageFigures:
    """A stage of one replica's pipeline, in figures.

    Attributes:
        stage: Its place in the pipeline.
        first_layer: Name of the first layer it holds.
        last_layer: Name of the last one.
        vision_layers: How many of its layers belong to the ViT, the projector included.
        language_layers: How many belong to the LLM.
        memory_bytes: What a device holds at its peak.
        forward_seconds: Of the step's micro-batches on average.
        backward_seconds: The same.
        busy_seconds: Computing, in the whole step.
        transfer_seconds: In transfers, of the idle time; 0 where they run beside the computations.
        idle_seconds: Not computing until the pipeline's last stage is done.
        idle_ratio: The same as a share.
        in_flight: Most forward passes that await their backward.
        reduce_seconds: All-reduce of the gradients.
        optimizer_seconds: Optimizer step.
    """

    stage: int
    first_layer: str
    last_layer: str
    vision_layers: int
    language_layers: int
    memory_bytes: int
    forward_seconds: float
    backward_seconds: float
    busy_seconds: float
    transfer_seconds: float
    idle_seconds: float
    idle_ratio: float
    in_flight: int
    reduce_seconds: float
    optimizer_seconds: float


@dataclass(frozen=True)
class PartitionFigures:
    """A simulated step under a partition, in figures.

    Attributes:
        boundaries: The partition's.
        micro_batches: Per replica and step.
        step_seconds: Until the optimizer is done.
        pipeline_seconds: Until the slowest replica's pipeline is done.
        bubble_ratio: Share of all stages' time in all replicas that is idle until then.
        stages: Of the slowest replica.
    """

    boundaries: tuple[int, ...]
    micro_batches: int
    step_seconds: float
    pipeline_seconds: float
    bubble_ratio: float
    stages: tuple[StageFigures, ...]

    @classmethod
    def of(
        cls, profile: ModelProfile, partition: Partition, step: StepSimulation, memory_bytes: Sequence[int]
    ) -> PartitionFigures:
        """Figures of a step that was simulated under the partition.

        Args:
            profile: What the layers cost.
            partition: Of the profile's layers.
            step: The simulated step.
            memory_bytes: What a device of each stage holds at its peak.
        """
        return cls(
            boundaries=partition.boundaries,
            micro_batches=step.replicas[0].schedule.micro_batches,
            step_seconds=step.step_seconds,
            pipeline_seconds=step.pipeline_seconds,
            bubble_ratio=step.bubble_ratio,
            stages=tuple(_figures(profile, partition, step, *entry) for entry in enumerate(memory_bytes)),
        )

    def to_record(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return asdict(self)


def slowest_replica(step: StepSimulation) -> int:
    """The replica whose pipeline is done last."""
    return int(np.argmax([replica.makespan_seconds for replica in step.replicas]))


def operation_seconds(simulation: Simulation, stage: int, *operations: Operation) -> float:
    """How long a stage runs some operations, in all."""
    ran = np.isin(simulation.table.operations[stage], operations)
    ran &= np.arange(len(ran)) < simulation.table.lengths[stage]
    return float((simulation.ends[stage] - simulation.starts[stage])[ran].sum())


def _figures(
    profile: ModelProfile, partition: Partition, step: StepSimulation, stage: int, memory_bytes: int
) -> StageFigures:
    simulation = step.replicas[slowest_replica(step)]
    layers = [profile.layers[index] for index in partition.layers(stage)]
    vision = sum(layer.module != "language" for layer in layers)
    micro_batches, makespan = simulation.schedule.micro_batches, simulation.makespan_seconds
    idle = float(simulation.idle_seconds[stage])
    transfers = [operation for operation in Operation if operation.is_transfer]
    return StageFigures(
        stage=stage,
        first_layer=layers[0].name,
        last_layer=layers[-1].name,
        vision_layers=vision,
        language_layers=len(layers) - vision,
        memory_bytes=memory_bytes,
        forward_seconds=operation_seconds(simulation, stage, Operation.F) / micro_batches,
        backward_seconds=operation_seconds(simulation, stage, Operation.BW, Operation.B, Operation.W) / micro_batches,
        busy_seconds=float(simulation.busy_seconds[stage]),
        transfer_seconds=operation_seconds(simulation, stage, *transfers),
        idle_seconds=idle,
        idle_ratio=idle / makespan if makespan else 0.0,
        in_flight=simulation.in_flight[stage],
        reduce_seconds=float(step.reduce_seconds[stage]),
        optimizer_seconds=float(step.optimizer_seconds[stage]),
    )


def stage_table(stages: Sequence[StageFigures]) -> Table:
    """A row per stage: its layers, its peak memory, its time for a micro-batch, and how much of the step it is idle."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("stage", justify="right")
    table.add_column("first layer", no_wrap=True)
    unit, unit_name = unit_of(row.memory_bytes for row in stages)
    for name in ("V+L", unit_name, "forward\nms", "backward\nms", "idle\nms", "idle", "in\nflight"):
        table.add_column(name, justify="right")
    for row in stages:
        table.add_row(
            f"{row.stage}",
            row.first_layer,
            f"{row.vision_layers}+{row.language_layers}",
            f"{row.memory_bytes / unit:,.1f}",
            f"{1e3 * row.forward_seconds:,.1f}",
            f"{1e3 * row.backward_seconds:,.1f}",
            f"{1e3 * row.idle_seconds:,.0f}",
            f"{row.idle_ratio:.1%}",
            f"{row.in_flight}",
        )
    return table
