"""What a run resolves to: a ds_config with its model, on the processes at hand, and what a caller makes itself.

Whatever can be refused is refused here, before samples are measured, which may take hours, and weights are read.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from omnibal.cluster import Layout
from omnibal.config import check_batch, complete_deepspeed_config, partition_of, resolve_plan
from omnibal.config.section import OmnibalSection
from omnibal.data.lengths import SampleLengths
from omnibal.errors import ConfigError, said
from omnibal.families.base import TrainedCount, trained_by_module
from omnibal.families.parts import check_degree
from omnibal.formats.collate import GRIDS
from omnibal.pipeline.partition import Partition, language_partition
from omnibal.pipeline.schedule import schedule_of
from omnibal.plan import Plan
from omnibal.vlm import load_model
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.workspace import Workspace

# Parameters with settings of their own, as torch's optimizers take them: `params`, `lr`, `weight_decay`.
ParameterGroup = dict[str, Any]
MakeOptimizer = Callable[[list[ParameterGroup]], Any]
MakeScheduler = Callable[..., Any]
OnGradient = Callable[[str, Tensor], object]
# Where the weights of a model are read: a Hugging Face folder, or all of them by their names.
Weights = Path | Mapping[str, Tensor]


@dataclass(frozen=True)
class ResolvedRun:
    """What is trained and how: a ds_config with the model that it names, on the processes at hand."""

    config: dict[str, Any]  # ds_config without the section
    section: OmnibalSection
    folder: Path | None  # Hugging Face folder of the model; None where it has none
    vlm: VisionLanguageModel
    layout: Layout
    named: Plan | None = None  # the plan that the ds_config names
    # Layers of each stage, by that plan or by the ds_config's keys; None where a plan is given beside
    partition: Partition | None = None

    def plan_of(self, lengths: SampleLengths | None) -> Plan:
        """The plan that the run follows; ``lengths`` are None for samples of a stream."""
        records = self.vlm.records
        return resolve_plan(self.config, self.section, self.named, records, self.layout, lengths, self.partition)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a replica of the language model in a step."""
        return int(self.config.get("gradient_accumulation_steps", 1))

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.layout.precision)
        return dtype

    @property
    def trained(self) -> dict[str, TrainedCount]:
        frozen = self.section.model.frozen
        return trained_by_module([(record, record.trained(frozen)) for record in self.vlm.records])

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
        # Schedules such as torch's OneCycleLR want the number of steps, which only the packs tell.
        wanted = signature(self.lr_scheduler).parameters.get("total_steps")
        if wanted is None or wanted.default not in (None, Parameter.empty):
            return self
        return replace(self, lr_scheduler=partial(self.lr_scheduler, total_steps=total_steps))


def resolve(workspace: Workspace, model: Any, num_processes: int) -> ResolvedRun:
    """Load the layers of ``initialize``'s model, and lay them out on so many processes."""
    # In the order of what each check needs: the kind of model, its layers, the processes.
    section = workspace.section
    source = section.model.path if model is None else model
    if source is None:
        raise ConfigError("model must be given, got none; pass it to initialize or set omnibal.model.path")
    if isinstance(source, nn.Module) and not isinstance(source, PreTrainedModel):
        raise ConfigError(
            f"model must be a Hugging Face folder, model or configuration, got an instance of {type(source).__name__}; "
            "where it wraps a transformers model, pass that"
        )
    weights = section.model.weights
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
    frozen = section.model.frozen
    vlm = load_model(source, section.model.lora, frozen)
    if isinstance(source, PreTrainedModel):
        _check_frozen_alike(source, vlm, frozen)
    folder = Path(source) if isinstance(source, str | Path) else None
    layout = workspace.layout_on(num_processes, "processes", len(vlm.records))
    named = workspace.named_plan
    partition = partition_of(section, named, vlm.records, layout)
    resolved = ResolvedRun(workspace.run_config, section, folder, vlm, layout, named, partition)
    check_run(resolved, partition)
    return resolved


def _check_frozen_alike(model: PreTrainedModel, vlm: VisionLanguageModel, frozen: Collection[str]) -> None:
    """Refuse a model with frozen parameters that the section does not name: they would be trained."""
    # The engine builds layers of its own and copies weights: requires_grad of the caller's model would be forgotten.
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


def check_run(resolved: ResolvedRun, partition: Partition) -> None:
    """Refuse what units, a spread encoder or tensor ranks cannot run with; a layout without them passes."""
    layout, vlm = resolved.layout, resolved.vlm
    where = "where tensor ranks share layers"
    if layout.encoder is not None and layout.num_tensor > 1:
        raise ConfigError(f"omnibal.pipeline.encoder must be left out {where}, got {layout.encoder}")
    if layout.has_units:
        _check_units(resolved, partition)
    if layout.is_spread:
        _check_spread(resolved, partition)
    if layout.num_tensor == 1:
        return
    if not vlm.family.cuts:
        raise ConfigError(
            f"num_tensor must be 1 for the family of {vlm.config.model_type}, which does not say how layers are cut, "
            f"got {layout.num_tensor}"
        )
    check_degree(vlm.records, layout.num_tensor)
    _check_exchanged(resolved.config, where)


def _check_units(resolved: ResolvedRun, partition: Partition) -> None:
    layout, where = resolved.layout, "where the encoder has replicas of its own"
    schedule_of(layout, resolved.micro_batches, "1f1b")  # replicas and micro-batches
    if (num_tensor := layout.shape(0)[1]) > 1:
        raise ConfigError(f"num_tensor must be 1 {where}, got {num_tensor}")
    stages: dict[str, set[int]] = {}
    for index, record in enumerate(resolved.vlm.records):
        if record.tied_key is not None:
            stages.setdefault(record.tied_key, set()).add(bisect_right(partition.boundaries, index) - 1)
    for key, found in stages.items():
        if len(found) > 1:
            raise ConfigError(
                f"layers that share {key} must be on one stage {where}, got stages {', '.join(map(str, sorted(found)))}"
            )


def _check_spread(resolved: ResolvedRun, partition: Partition) -> None:
    vlm, where = resolved.vlm, "where the encoder is spread"
    _check_exchanged(resolved.config, where)
    language_partition(vlm.records, partition)  # the first stage must end in the language model
    if not set(vlm.image_integers) <= {GRIDS}:
        raise ConfigError(
            f"tiles must be encoded one by one {where}, got {vlm.config.model_type}, which joins the tiles of an image"
        )


def _check_exchanged(config: Mapping[str, Any], where: str) -> None:
    """Refuse what lets DeepSpeed reduce gradients itself, over the replicas of a stage (`reduction.exchange_of`)."""
    zero = config.get("zero_optimization", {})
    asked = {
        "zero_optimization.offload_optimizer": (zero.get("offload_optimizer") or {}).get("device") == "cpu",
        "zero_optimization.contiguous_gradients": zero.get("contiguous_gradients"),
    }
    for key, is_asked in asked.items():
        if is_asked:
            raise ConfigError(
                f"{key} must be left out {where}, got it; DeepSpeed would sum gradients over a stage's replicas only"
            )


def deepspeed_config_of(resolved: ResolvedRun, rank: int) -> DeepSpeedConfig:
    """The ds_config as DeepSpeed reads it on a rank, where the steps of the run may still be ``"auto"``."""
    layout, config = resolved.layout, resolved.config
    if layout.has_units:  # DeepSpeed's view is that of the rank's stage: its replicas, and its micro-batches of a step
        check_batch(config, layout.num_replicas)
        packs, layout = resolved.micro_batches * layout.num_replicas, layout.of_stage(layout.position(rank).stage)
        config = {**config, "gradient_accumulation_steps": packs // layout.num_replicas}
    # DeepSpeedConfig asks its mpu for nothing but the data-parallel ranks; the grid that knows them is yet to be made.
    replicas = SimpleNamespace(get_data_parallel_world_size=lambda: layout.num_replicas)
    complete = complete_deepspeed_config(config, layout)
    try:
        return DeepSpeedConfig(complete, replicas)
    except Exception as error:  # pydantic's, assertions, and DeepSpeed's own
        raise ConfigError(f"ds_config must be one that DeepSpeed takes, got: {said(error)}") from error
