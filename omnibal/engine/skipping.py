"""Steps whose gradients are not finite: no weight ever takes one in, and a run that only has such steps ends."""

import logging
from collections.abc import Callable
from math import isfinite
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.schedule import OptimizerStep
from torch import Tensor

from omnibal.engine.table import TableEngine
from omnibal.errors import OmnibalError

logger = logging.getLogger(__name__)

MOST_SKIPPED = 5
"""Steps in a row without finite gradients after which a run ends: one broken sample is survived, a diverged run not."""


class SkippingEngine(TableEngine):
    """Leaves out optimizer steps whose gradients are not finite, as DeepSpeed does under ZeRO 1 or bf16 alone."""

    _skipped_in_a_row = 0

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        if self.optimizer is not self.basic_optimizer or self._gradients_are_finite():
            super()._exec_optimizer_step(lr_kwargs)
            return
        self.zero_grad()
        self.skipped_steps += 1
        self.global_steps += 1
        self.global_samples += self.train_batch_size()

    def _gradients_are_finite(self) -> bool:
        """Whether all gradients of all ranks are."""
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        largest = torch.stack(torch._foreach_norm(gradients, float("inf")))
        finite = largest.isfinite().all().to(torch.int32)
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        return bool(finite)

    def _check_step(self, loss: Tensor, skipped: int) -> None:
        """Say that the step was skipped, if it was; all ranks together.

        Args:
            loss: Of the step.
            skipped: How many steps were skipped in it: 0 or 1.

        Raises:
            OmnibalError: It is the last of ``MOST_SKIPPED`` steps in a row that were skipped or have no finite loss.
        """
        value = loss.item()
        if isfinite(value) and not skipped:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        last = self.global_steps
        if self.global_rank == 0:
            effect = "the step is skipped, weights stay" if skipped else "weights took it in"
            logger.warning(
                "Loss and gradients must be finite, got others in step %d (loss %s); %s", last, value, effect
            )
        if self._skipped_in_a_row == MOST_SKIPPED:
            raise OmnibalError(
                f"loss and gradients must be finite, got others in each of the last {MOST_SKIPPED} steps (loss {value} "
                f"in step {last}); look for NaN in the samples, or lower the learning rate"
            )

    # DeepSpeed looks for what an instruction runs in this mapping.
    _INSTRUCTION_MAP: ClassVar[dict[type, Callable[..., None]]] = {
        **TableEngine._INSTRUCTION_MAP,
        OptimizerStep: _exec_optimizer_step,
    }
