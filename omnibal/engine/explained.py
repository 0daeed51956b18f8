"""DeepSpeed's PipelineEngine that says in one line what it cannot do, or what would be wrong here."""

from collections.abc import Callable
from functools import partial
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from omnibal.errors import ConfigError, said


class ExplainedEngine(PipelineEngine):
    """Turns what DeepSpeed says of a ds_config into ConfigError, and refuses methods that count packs as samples."""

    def eval_batch(self, *_: Any, **__: Any) -> Tensor:
        """Refused: DeepSpeed's takes a mean over packs, whatever they hold.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("eval_batch must not be called; engine.evaluate(engine.held_out_loader(dataset)) evaluates")

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Refused: packs are arranged for the micro-batches of the ds_config.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"train_batch_size must stay as it is, got {train_batch_size}; set gradient_accumulation_steps in the "
            "ds_config and resume"
        )

    set_train_micro_batch_size = set_train_batch_size

    def _do_sanity_check(self) -> None:
        try:
            super()._do_sanity_check()
        except (AssertionError, ValueError) as error:
            raise ConfigError(f"ds_config must be one that DeepSpeed takes, got: {said(error)}") from error

    def _configure_basic_optimizer(self, model_parameters: Any) -> Any:
        return _made("optimizer", self, partial(super()._configure_basic_optimizer, model_parameters))

    def _scheduler_from_config(self, optimizer: Any) -> Any:
        return _made("scheduler", self, partial(super()._scheduler_from_config, optimizer))


def _made(key: str, engine: PipelineEngine, make: Callable[[], Any]) -> Any:
    """What DeepSpeed makes of a ds_config's optimizer or scheduler.

    Raises:
        ConfigError: It cannot.
    """
    try:
        return make()
    except Exception as error:  # assertions, and what torch's own say of parameters
        name, params = getattr(engine, f"{key}_name")(), getattr(engine, f"{key}_params")()
        raise ConfigError(
            f"{key} of a ds_config must be one that DeepSpeed can make, got {name} with {params}: {said(error)}"
        ) from error
