"""From the "omnibal" section to the plan that a run follows: number of stages, limits, partition, recompute."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from omnibal.config import OmnibalSection, PipelineSection
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import choose_limits
from omnibal.errors import ConfigError
from omnibal.families.base import LayerRecord, check_frozen
from omnibal.memory.footprint import Level
from omnibal.pipeline.balanced import balanced_boundaries
from omnibal.pipeline.boundaries import Partition
from omnibal.plan import Plan
from omnibal.vlm.layers import VisionLanguageModel


def stages_of(section: OmnibalSection, num_layers: int, num_processes: int) -> int:
    """Number of pipeline stages.

    Raises:
        ConfigError: It does not divide the processes, or exceeds the layers.
    """
    wanted = section.pipeline.num_stages
    num_stages = num_processes if wanted == "auto" else wanted
    if num_processes % num_stages:
        raise ConfigError(f"num_stages must divide the {num_processes} processes, got {num_stages}")
    if num_stages > num_layers:
        raise ConfigError(f"num_stages must be at most the model's {num_layers} layers, got {num_stages}")
    return num_stages


def resolve_plan(
    section: OmnibalSection, vlm: VisionLanguageModel, lengths: SampleLengths, num_stages: int, micro_batches: int
) -> Plan:
    """The plan file that the section names, or the plan that its keys spell out.

    Raises:
        ConfigError: The plan does not fit the model, the number of stages, the micro-batches or the frozen layers of
            the run; or what is frozen does not fit the model.
    """
    pipeline, frozen = section.pipeline, section.model.frozen
    num_layers = len(vlm.records)
    check_frozen(vlm.records, frozen)
    if pipeline.plan is not None:
        plan = Plan.load(pipeline.plan)
        _check("micro_batches of the plan", plan.micro_batches, micro_batches)
        if "frozen" in plan.made_from:  # times and memory are other ones where other layers are trained
            _check("frozen kinds of the plan", sorted(plan.made_from["frozen"]), sorted(set(frozen)))
        _check_partition(plan.partition, num_layers, num_stages)
        schedule = plan.schedule if pipeline.schedule == "auto" else pipeline.schedule
        # a prediction holds for its schedule only
        return plan if schedule == plan.schedule else replace(plan, schedule=schedule, predicted=None)
    partition = _partition(pipeline, vlm.records, num_stages, frozen)
    _check_partition(partition, num_layers, num_stages)
    recompute = _recompute(pipeline, num_layers)
    packing = section.packing
    limits = choose_limits(
        lengths,
        packing.vision_units,
        packing.llm_tokens,
        full_vision_units=packing.full_vision_units,
        full_llm_tokens=packing.full_llm_tokens,
    )
    schedule = "1f1b" if pipeline.schedule == "auto" else pipeline.schedule
    return Plan(limits, micro_batches, partition, recompute, schedule=schedule)


def _check_partition(partition: Partition, num_layers: int, num_stages: int) -> None:
    _check("layers of the partition", partition.num_layers, num_layers)
    _check("stages of the partition", partition.num_stages, num_stages)


def _check(name: str, got: object, expected: object) -> None:
    if got != expected:
        raise ConfigError(f"{name} must be {expected} as the model and the ds_config say, got {got}")


def _partition(
    pipeline: PipelineSection, records: Sequence[LayerRecord], num_stages: int, frozen: Collection[str]
) -> Partition:
    if isinstance(pipeline.partition, list):
        return Partition(pipeline.partition)
    if pipeline.partition == "parameters":
        return Partition(balanced_boundaries([record.trainable_parameters(frozen) for record in records], num_stages))
    return Partition.uniform(len(records), num_stages)


def _recompute(pipeline: PipelineSection, num_layers: int) -> tuple[Level, ...]:
    if isinstance(pipeline.recompute, list):
        return tuple(pipeline.recompute)
    return (pipeline.recompute,) * num_layers
