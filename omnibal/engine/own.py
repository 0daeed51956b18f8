"""What a caller of initialize brings along in place of what the ds_config would name."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from typing import Any

from omnibal.engine.engine import OnGradient
from omnibal.engine.parameters import ParameterGroup
from omnibal.errors import ConfigError

MakeOptimizer = Callable[[list[ParameterGroup]], Any]
MakeScheduler = Callable[..., Any]


@dataclass(frozen=True)
class Own:
    """What a caller makes or sees itself; as of ``initialize``."""

    optimizer: MakeOptimizer | None = None
    lr_scheduler: MakeScheduler | None = None
    on_gradient: OnGradient | None = None

    def check(self, config: dict[str, Any]) -> None:
        """Refuse what is made already, or named twice.

        Raises:
            ConfigError: See above.
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
            if key in config:
                raise ConfigError(f"{name} must be given once, got one beside the ds_config's {key}; leave one out")

    def over(self, total_steps: int) -> "Own":
        """The same; a scheduler that asks for the steps of the run has them."""
        if self.lr_scheduler is None:
            return self
        wanted = signature(self.lr_scheduler).parameters.get("total_steps")
        if wanted is None or wanted.default not in (None, Parameter.empty):
            return self
        return replace(self, lr_scheduler=partial(self.lr_scheduler, total_steps=total_steps))
