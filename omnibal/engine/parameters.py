"""The parameters of a stage: their names on disk, their gradients, and the groups that an optimizer keeps apart."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from omnibal.config import OptimizerSection
from omnibal.engine.module import VlmPipelineModule
from omnibal.families.base import Module

ParameterGroup = dict[str, Any]
"""As torch's optimizers take it: ``params``, and what differs from the optimizer's own settings."""


def parameter_groups(module: VlmPipelineModule, settings: OptimizerSection) -> list[ParameterGroup]:
    """The parameters that a stage trains, apart where the section treats them differently.

    Args:
        module: This process's stage.
        settings: Of the ds_config's "omnibal" section.

    Returns:
        One group or several: ``params``; ``names``, theirs on disk; ``lr`` and ``weight_decay`` where the section
        decides them.
    """
    places = _places(module)
    groups: dict[tuple[Any, ...], ParameterGroup] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            # A stage that trains nothing of its own has a parameter of no effect, which is in no file.
            name, part = places.get(parameter, ("placeholder", "language"))
            apart = _apart(parameter, part, settings)
            group = groups.setdefault(tuple(apart.items()), {"params": [], "names": [], **apart})
            group["params"].append(parameter)
            group["names"].append(name)
    return list(groups.values())


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


def _apart(parameter: nn.Parameter, part: Module, settings: OptimizerSection) -> dict[str, float]:
    """What the section says about a parameter, as an optimizer's groups have it."""
    rate = getattr(settings.learning_rates, part)
    decayed = settings.weight_decay == "all" or parameter.dim() > 1
    return ({} if rate is None else {"lr": rate}) | ({} if decayed else {"weight_decay": 0.0})
