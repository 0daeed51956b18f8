"""A parameter of no effect: what DeepSpeed needs in a stage that trains nothing of its own."""

from typing import Any

import torch
from deepspeed.runtime.constants import PIPE_REPLICATED
from torch import Tensor, nn


def trains_its_own(module: nn.Module) -> bool:
    """Whether a stage trains a parameter that is not the copy of an earlier stage's.

    DeepSpeed leaves such copies out of the norm of gradients, which bf16's optimizer cannot take of none at all.
    """
    return any(
        parameter.requires_grad and not getattr(parameter, PIPE_REPLICATED, False) for parameter in module.parameters()
    )


class Attach(torch.autograd.Function):
    """Pass hidden states on unchanged, as if they depended on a parameter, whose gradient is zero.

    DeepSpeed's engine wants an optimizer on every stage and a backward pass through every stage's output. Behind the
    last layer of a stage this gives it both, and runs no layer backward that would not run otherwise.
    """

    @staticmethod
    def forward(context: Any, hidden: Tensor, parameter: Tensor) -> Tensor:  # noqa: D102  # torch's names
        return hidden.view_as(hidden)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # noqa: D102
        return gradient, gradient.new_zeros(1)
