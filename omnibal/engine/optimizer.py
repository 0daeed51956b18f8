"""A stage's optimizer: its groups of parameters, their gradients, and what a caller of initialize makes itself."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn

from omnibal.config import OptimizerSection
from omnibal.engine.module import VlmPipelineModule
from omnibal.engine.resolve import Given
from omnibal.errors import ConfigError
from omnibal.families.base import Module
from omnibal.ranks import gather

ParameterGroup = dict[str, Any]
"""As torch's optimizers take it: ``params``, and what differs from the optimizer's own settings."""
Apart = tuple[tuple[str, float], ...]
"""What the section says about a parameter: settings of its group, with their values."""
MakeOptimizer = Callable[[list[ParameterGroup]], Any]
MakeScheduler = Callable[..., Any]
OnGradient = Callable[[str, Tensor], object]


@dataclass(frozen=True)
class Own:
    """What a caller makes or sees itself; as of ``initialize``."""

    optimizer: MakeOptimizer | None = None
    lr_scheduler: MakeScheduler | None = None
    on_gradient: OnGradient | None = None

    def checked(self, given: Given) -> Given:
        """What else is given, if nothing of this is made already, or named there too, and there is an optimizer.

        Raises:
            ConfigError: Something is.
        """
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
            if key in given.config:
                raise ConfigError(f"{name} must be given once, got one beside the ds_config's {key}; leave one out")
        if self.optimizer is None and given.config.get("optimizer", {}).get("type") is None:
            raise ConfigError(
                'optimizer must be given, got none; set "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}} in the '
                "ds_config, or pass one to initialize"
            )
        return given

    def over(self, total_steps: int) -> "Own":
        """The same; a scheduler that asks for the steps of the run has them."""
        if self.lr_scheduler is None:
            return self
        wanted = signature(self.lr_scheduler).parameters.get("total_steps")
        if wanted is None or wanted.default not in (None, Parameter.empty):
            return self
        return replace(self, lr_scheduler=partial(self.lr_scheduler, total_steps=total_steps))


def parameter_groups(module: VlmPipelineModule, settings: OptimizerSection) -> list[ParameterGroup]:
    """The parameters that a stage trains, apart where the section treats them differently; all ranks together.

    All stages have the same groups in the same order: under ZeRO they meet once for the norm of each. Where a stage
    trains nothing of a group, it has a placeholder there.

    Args:
        module: This process's stage.
        settings: Of the ds_config's "omnibal" section.

    Returns:
        One group or several: ``params``; ``names``, theirs on disk, or ``"placeholder"``; ``lr`` and ``weight_decay``
        where the section decides them.
    """
    places, unused = _places(module), list(module.placeholders)
    own: dict[Apart, dict[nn.Parameter, str]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad and parameter in places:
            name, part = places[parameter]
            own.setdefault(_apart(parameter, part, settings), {})[parameter] = name
    of_all_stages = dict.fromkeys(apart for of_rank in gather(list(own)) for apart in of_rank)
    for apart in of_all_stages:
        if apart not in own:
            own[apart] = {unused.pop() if unused else module.add_placeholder(): "placeholder"}
    for placeholder in unused:  # of a stage whose own parameters are all copies of an earlier stage's
        own[next(iter(of_all_stages))][placeholder] = "placeholder"
    return [{"params": [*own[apart]], "names": [*own[apart].values()], **dict(apart)} for apart in of_all_stages]


def grouping(settings: OptimizerSection) -> str | None:
    """What groups keep apart, in words; None where all parameters are treated alike."""
    apart = ["weight decay of matrices"] if settings.weight_decay == "matrices" else []
    apart += [f"learning rate of {module}" for module, rate in settings.learning_rates if rate is not None]
    return ", ".join(apart) or None


def gradients(module: VlmPipelineModule) -> Iterator[tuple[str, Tensor]]:
    """A step's gradients, when replicas and tied layers are added up and the optimizer has not stepped.

    All replicas of a stage go through all of them together: ZeRO has each keep a part.

    Yields:
        A weight's name on disk, and its whole gradient, not yet clipped: float32 under ZeRO or bfloat16, where it is a
        copy.
    """
    for parameter, (name, _) in _places(module).items():
        if hasattr(parameter, "get_full_hp_grad"):
            yield name, parameter.get_full_hp_grad()
        elif parameter.grad is not None:
            yield name, parameter.grad


def _places(module: VlmPipelineModule) -> dict[nn.Parameter, tuple[str, Module]]:
    """Name on disk and module of a stage's parameters; of tied ones, those of their first use."""
    found: dict[nn.Parameter, tuple[str, Module]] = {}
    for index, layer in enumerate(module.forward_funcs, start=module._local_start):
        names = module.vlm.weight_names(index)
        for name, parameter in layer.named_parameters():
            found.setdefault(parameter, (names[name], module.vlm.records[index].module))
    return found


def _apart(parameter: nn.Parameter, part: Module, settings: OptimizerSection) -> Apart:
    rate = getattr(settings.learning_rates, part)
    decayed = settings.weight_decay == "all" or parameter.dim() > 1
    return (() if rate is None else (("lr", rate),)) + (() if decayed else (("weight_decay", 0.0),))
