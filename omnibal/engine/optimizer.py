"""A stage's optimizer: its groups of parameters, their gradients, and what a caller of initialize makes itself."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from typing import Any

from omnibal.engine.module import OnGradient, ParameterGroup
from omnibal.engine.resolve import Given
from omnibal.errors import ConfigError

MakeOptimizer = Callable[[list[ParameterGroup]], Any]
MakeScheduler = Callable[..., Any]


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
