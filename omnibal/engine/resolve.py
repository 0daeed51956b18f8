"""What initialize is given, read and checked: the model's layers, the stages, and the plan that the run follows."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from omnibal.cluster import Layout, replicas_of
from omnibal.config import (
    OmnibalSection,
    PipelineSection,
    check_learning_rates,
    layout_of,
    micro_batches_of,
    named_plan,
    read_config,
)
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, choose_limits
from omnibal.errors import ConfigError
from omnibal.families.base import LayerRecord, Trained, check_frozen, trained_by_module
from omnibal.pipeline.partition import Partition, balanced_boundaries
from omnibal.plan import Plan
from omnibal.profile.records import Level
from omnibal.vlm import load_model
from omnibal.vlm.layers import VisionLanguageModel


@dataclass(frozen=True)
class Given:
    """What the arguments of initialize say, read and checked."""

    config: dict[str, Any]
    """ds_config without the section."""
    section: OmnibalSection
    folder: Path | None
    """Hugging Face folder of the model; None where it has none."""
    vlm: VisionLanguageModel
    layout: Layout
    """Of the processes at hand."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """All of the model's, by name, where they are in memory."""
    spare: dict[str, Tensor] = field(default_factory=dict)
    """Those that no layer has, on the first rank: checkpoints keep them."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the forward pass."""
        dtype: torch.dtype = getattr(torch, self.layout.precision)
        return dtype

    @property
    def trained(self) -> dict[str, Trained]:
        """What each module trains."""
        frozen = self.section.model.frozen
        return trained_by_module((record, record.trained(frozen)) for record in self.vlm.records)

    @property
    def source(self) -> Path | Mapping[str, Tensor] | None:
        """Where weights are read; None where initial ones are drawn."""
        return self.weights or (self.folder if self.section.model.weights == "load" else None)

    @property
    def base(self) -> Path | None:
        """The folder where the weights are and stay that adapters are trained beside; None where there is none."""
        return self.folder if self.vlm.adapters is not None and self.source is self.folder else None


def read(config: Any, model: Any, num_processes: int) -> Given:
    """Read and check ``initialize``'s config and model, for so many processes.

    Raises:
        ConfigError: As of ``initialize``, but for what the lengths of samples decide.
    """
    deepspeed_config, section = read_config(config)
    check_learning_rates(deepspeed_config, section.optimizer.learning_rates)
    source = named(model, section.model.path, "model", "omnibal.model.path")
    if isinstance(source, nn.Module) and not isinstance(source, PreTrainedModel):
        raise ConfigError(
            f"model must be a Hugging Face folder, model or configuration, got an instance of {type(source).__name__}; "
            "where it wraps a transformers model, pass that"
        )
    folder = Path(source) if isinstance(source, str | Path) else None
    _check_source(source, section.model.weights)
    frozen, described = section.model.frozen, source.config if isinstance(source, PreTrainedModel) else source
    vlm = load_model(described, section.model.lora, frozen)
    if isinstance(source, PreTrainedModel):
        _check_frozen_alike(source, vlm, frozen)
    num_stages, num_replicas = shape_of(section, len(vlm.records), num_processes)
    return Given(
        config=deepspeed_config,
        section=section,
        folder=folder,
        vlm=vlm,
        layout=layout_of(deepspeed_config, num_stages, num_replicas),
        weights=dict(source.state_dict()) if isinstance(source, PreTrainedModel) else {},
    )


def _check_source(source: Any, weights: str) -> None:
    if isinstance(source, PreTrainedConfig) and weights == "load":
        raise ConfigError(
            "omnibal.model.weights must be 'random' with a configuration as model, got 'load'; pass the folder that "
            "holds the weights, or say 'random' to train from initial ones"
        )
    if isinstance(source, PreTrainedModel) and weights == "random":
        raise ConfigError(
            "omnibal.model.weights must be 'load' with a model that has weights, got 'random'; pass its config to "
            "train from initial ones"
        )


def _check_frozen_alike(model: PreTrainedModel, vlm: VisionLanguageModel, frozen: Collection[str]) -> None:
    """Refuse a model with frozen parameters that the section does not name: they would be trained."""
    trained = {
        name
        for index, record in enumerate(vlm.records)
        for name in vlm.weight_names(index).values()
        if not record.freezes(name, frozen)
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and vlm.disk_name(name) in trained:
            raise ConfigError(
                f"parameters of model must be trained but for those of omnibal.model.frozen, got {name} with "
                "requires_grad False; name it there"
            )


def named(argument: Any, setting: Any, name: str, key: str) -> Any:
    """An argument, or else the section's setting.

    Raises:
        ConfigError: There is neither.
    """
    if argument is None and setting is None:
        raise ConfigError(f"{name} must be given, got none; pass it to initialize or set {key}")
    return setting if argument is None else argument


def shape_of(section: OmnibalSection, num_layers: int, num_processes: int) -> tuple[int, int]:
    """Pipeline stages and replicas.

    Raises:
        ConfigError: The number of stages does not divide the processes or exceeds the layers, or the plan cannot be
            read.
    """
    num_stages = section.pipeline.num_stages
    if num_stages == "auto":
        plan = named_plan(section)
        num_stages = num_processes if plan is None else plan.num_stages
    return num_stages, replicas_of(num_stages, num_processes, num_layers=num_layers, devices="processes")


def resolve_plan(given: Given, lengths: SampleLengths | None) -> Plan:
    """The plan file that the section names, or the plan that its keys spell out.

    Args:
        given: The section, the model and the layout.
        lengths: Of the samples, by which limits are chosen; None for streams.

    Raises:
        ConfigError: The plan does not fit the model, the layout, the micro-batches or the frozen parts of the run; or
            what is frozen does not fit the model.
    """
    pipeline, packing, frozen = given.section.pipeline, given.section.packing, given.section.model.frozen
    records, num_stages, micro_batches = given.vlm.records, given.layout.num_stages, micro_batches_of(given.config)
    num_layers = len(records)
    parts = check_frozen(records, frozen)
    plan = named_plan(given.section)
    if plan is not None:
        _check("micro_batches of the plan", plan.micro_batches, micro_batches)
        if "frozen" in plan.made_from:  # times and memory are other ones where other layers are trained
            _check("frozen parts of the plan", sorted(plan.made_from["frozen"]), list(parts))
            adapters = sum(record.sizes.get("adapters", 0) for record in records)
            _check("adapters' parameters in the plan", plan.made_from.get("adapters", 0), adapters)
        _check_partition(plan.partition, num_layers, num_stages)
        if plan.cluster is not None:  # predicted for this layout; else it is a default that nobody chose
            _check_layout(plan.layout, given.layout)
        schedule = plan.schedule if pipeline.schedule == "auto" else pipeline.schedule
        # a prediction holds for its schedule only
        return plan if schedule == plan.schedule else replace(plan, schedule=schedule, predicted=None)
    partition = _partition(pipeline, records, num_stages, frozen)
    _check_partition(partition, num_layers, num_stages)
    recompute = _recompute(pipeline, num_layers)
    schedule = "1f1b" if pipeline.schedule == "auto" else pipeline.schedule
    stated = packing.vision_units, packing.llm_tokens
    limits = _stated_limits(*stated) if lengths is None else choose_limits(lengths, *stated)
    return Plan(limits, micro_batches, partition, recompute, schedule=schedule)


def _stated_limits(vision_units: int | None, llm_tokens: int | None) -> PackLimits:
    if vision_units is None or llm_tokens is None:
        raise ConfigError(
            "omnibal.packing must give vision_units and llm_tokens for a stream, whose lengths nobody knows, got "
            f"{vision_units} and {llm_tokens}"
        )
    return PackLimits(vision_units, llm_tokens)


def _check_partition(partition: Partition, num_layers: int, num_stages: int) -> None:
    _check("layers of the partition", partition.num_layers, num_layers)
    _check("stages of the partition", partition.num_stages, num_stages)


def _check_layout(planned: Layout, run: Layout) -> None:
    """Refuse a plan whose predictions, of memory above all, are of another layout."""
    names = ("num_replicas", "num_tensor", "encoder", "zero_stage", "precision", "sums_float32")
    differing = [name for name in names if getattr(planned, name) != getattr(run, name)]
    if differing:
        ours, theirs = (", ".join(f"{name} {getattr(layout, name)}" for name in differing) for layout in (run, planned))
        raise ConfigError(f"layout of the plan must be that of the run, {ours}, got {theirs}; plan again for this run")


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
