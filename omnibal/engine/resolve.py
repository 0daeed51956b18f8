"""What initialize is given, read and checked: the model's layers, the stages, and the plan that the run follows."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
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
from omnibal.families.base import LayerRecord, TrainedCount, check_frozen, trained_by_module
from omnibal.pipeline.partition import Partition, balanced_boundaries
from omnibal.plan import Plan
from omnibal.profile.records import Level
from omnibal.vlm import load_model
from omnibal.vlm.layers import VisionLanguageModel

ParameterGroup = dict[str, Any]
"""Parameters with settings of their own, as torch's optimizers take them: ``params``, ``lr``, ``weight_decay``."""
MakeOptimizer = Callable[[list[ParameterGroup]], Any]
MakeScheduler = Callable[..., Any]
OnGradient = Callable[[str, Tensor], object]
Weights = Path | Mapping[str, Tensor]
"""Where the weights of a model are read: a Hugging Face folder, or all of them by their names."""


@dataclass(frozen=True)
class ResolvedRun:
    """What is trained and how: a ds_config with the model that it names, on the processes at hand."""

    config: dict[str, Any]
    """ds_config without the section."""
    section: OmnibalSection
    folder: Path | None
    """Hugging Face folder of the model; None where it has none."""
    vlm: VisionLanguageModel
    layout: Layout

    @property
    def dtype(self) -> torch.dtype:
        """Of the forward pass."""
        dtype: torch.dtype = getattr(torch, self.layout.precision)
        return dtype

    @property
    def trained(self) -> dict[str, TrainedCount]:
        """What each module trains."""
        frozen = self.section.model.frozen
        return trained_by_module((record, record.trained(frozen)) for record in self.vlm.records)

    @property
    def weights_folder(self) -> Path | None:
        """The folder that weights are read from; None where initial ones are drawn, or the caller has a model."""
        return self.folder if self.section.model.weights == "load" else None

    @property
    def base(self) -> Path | None:
        """The folder with the weights that adapters are trained beside; None without adapters or without a folder."""
        return None if self.vlm.adapters is None else self.weights_folder


@dataclass(frozen=True)
class UserOptimizer:
    """What a caller of initialize makes or sees itself: optimizer, learning-rate schedule, gradients."""

    optimizer: MakeOptimizer | None = None
    lr_scheduler: MakeScheduler | None = None
    on_gradient: OnGradient | None = None

    def check(self, config: Mapping[str, Any]) -> None:
        """Refuse what is no callable or is named in the ds_config, too, and a run without any optimizer."""
        remedies = {
            "optimizer": "each stage makes one of its own parameters: pass partial(AdamW, lr=...)",
            "lr_scheduler": "its optimizer is yet to be made: pass partial(StepLR, step_size=9)",
            "on_gradient": "it is called with each name and gradient",
        }
        for name, remedy in remedies.items():
            value, key = getattr(self, name), name.removeprefix("lr_")
            if value is None:
                continue
            if not callable(value):
                raise ConfigError(f"{name} must be a callable, got an instance of {type(value).__name__}; {remedy}")
            if key in config:
                raise ConfigError(f"{name} must be given once, got one beside the ds_config's {key}; leave one out")
        if self.optimizer is None and config.get("optimizer", {}).get("type") is None:
            raise ConfigError(
                'optimizer must be given, got none; set "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}} in the '
                "ds_config, or pass one to initialize"
            )

    def over(self, total_steps: int) -> "UserOptimizer":
        """The same callables; a scheduler that asks for the steps of the run gets them."""
        if self.lr_scheduler is None:
            return self
        wanted = signature(self.lr_scheduler).parameters.get("total_steps")
        if wanted is None or wanted.default not in (None, Parameter.empty):
            return self
        return replace(self, lr_scheduler=partial(self.lr_scheduler, total_steps=total_steps))


def read(config: Any, model: Any, num_processes: int) -> ResolvedRun:
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
    return ResolvedRun(
        config=deepspeed_config,
        section=section,
        folder=folder,
        vlm=vlm,
        layout=layout_of(deepspeed_config, num_stages, num_replicas),
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


def resolve_plan(resolved: ResolvedRun, lengths: SampleLengths | None) -> Plan:
    """The plan file that the section names, or the plan that its keys spell out.

    Args:
        resolved: The section, the model and the layout.
        lengths: Of the samples, by which limits are chosen; None for streams.

    Raises:
        ConfigError: The plan does not fit the model, the layout, the micro-batches or the frozen parts of the run; or
            what is frozen does not fit the model.
    """
    pipeline, packing, frozen = resolved.section.pipeline, resolved.section.packing, resolved.section.model.frozen
    records, num_stages, micro_batches = (
        resolved.vlm.records,
        resolved.layout.num_stages,
        micro_batches_of(resolved.config),
    )
    num_layers = len(records)
    parts = check_frozen(records, frozen)
    plan = named_plan(resolved.section)
    if plan is not None:
        _check("micro_batches of the plan", plan.micro_batches, micro_batches)
        if "frozen" in plan.made_from:  # times and memory are other ones where other layers are trained
            _check("frozen parts of the plan", sorted(plan.made_from["frozen"]), list(parts))
            adapters = sum(record.sizes.get("adapters", 0) for record in records)
            _check("adapters' parameters in the plan", plan.made_from.get("adapters", 0), adapters)
        _check_partition(plan.partition, num_layers, num_stages)
        if plan.cluster is not None:  # predicted for this layout; else it is a default that nobody chose
            _check_layout(plan.layout, resolved.layout)
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
