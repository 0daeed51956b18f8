"""What a run resolves to: a ds_config with its model, on the processes at hand, and what a caller makes itself."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from omnibal.cluster import Layout
from omnibal.config import OmnibalSection, check_learning_rates
from omnibal.errors import ConfigError
from omnibal.families.base import TrainedCount, trained_by_module
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

    config: dict[str, Any]
    """ds_config without the section."""
    section: OmnibalSection
    folder: Path | None
    """Hugging Face folder of the model; None where it has none."""
    vlm: VisionLanguageModel
    layout: Layout

    @property
    def dtype(self) -> torch.dtype:
        """The forward pass computes in this dtype."""
        dtype: torch.dtype = getattr(torch, self.layout.precision)
        return dtype

    @property
    def trained(self) -> dict[str, TrainedCount]:
        """What each module trains."""
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
    # In the order of what each check needs: settings alone, the kind of model, its layers, the processes.
    section = workspace.section
    check_learning_rates(workspace.config, section.optimizer.learning_rates)
    source = _named(model, section.model.path, "model", "omnibal.model.path")
    if isinstance(source, nn.Module) and not isinstance(source, PreTrainedModel):
        raise ConfigError(
            f"model must be a Hugging Face folder, model or configuration, got an instance of {type(source).__name__}; "
            "where it wraps a transformers model, pass that"
        )
    _check_source(source, section.model.weights)
    frozen = section.model.frozen
    vlm = load_model(source, section.model.lora, frozen)
    if isinstance(source, PreTrainedModel):
        _check_frozen_alike(source, vlm, frozen)
    folder = Path(source) if isinstance(source, str | Path) else None
    layout = workspace.layout_on(num_processes, "processes", len(vlm.records))
    # DeepSpeed reads micro-batches from the ds_config, which may leave them to the plan.
    config = workspace.config | {"gradient_accumulation_steps": workspace.micro_batches}
    return ResolvedRun(config, section, folder, vlm, layout)


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


def _named(argument: Any, setting: Any, name: str, key: str) -> Any:
    """An argument, or else the section's setting."""
    if argument is None and setting is None:
        raise ConfigError(f"{name} must be given, got none; pass it to initialize or set {key}")
    return setting if argument is None else argument
