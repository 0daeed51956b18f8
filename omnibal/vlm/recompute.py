"""Run a pipeline layer under a recompute level."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from omnibal.profile.levels import Level
from omnibal.vlm.payload import Layout, Payload

# Operators whose results "selective" keeps: matrix products and attention, nearly all of the work.
_EXPENSIVE = {
    f"aten::{name}"
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "linear",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
} | {"torch_attn::_varlen_attn"}


def run_layer(layer: nn.Module, payload: Payload, level: Level) -> Payload:
    """Run a layer forward, keeping for its backward pass what the level says.

    Outputs and gradients are the same bits at every level: recomputation repeats the same operations, and dropout with
    the same random numbers.

    Args:
        layer: A pipeline layer.
        payload: The layer's input.
        level: ``"none"`` keeps all that autograd saves, ``"selective"`` the input and the results of matrix products
            and attention, ``"full"`` the input alone. A layer that computes its gradients in the forward pass
            (``at_once``) keeps them at every level: recomputing would compute them twice.
    """
    if level == "none" or getattr(layer, "at_once", False) or not torch.is_grad_enabled():
        return layer(payload)  # type: ignore[no-any-return]
    options: dict[str, Any] = {}
    if level == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    # checkpoint sees only tensors that are arguments themselves: inside a record their gradients would be lost.
    layout = Layout.of(payload)
    return checkpoint(_run, layer, layout, *layout.flatten(payload), use_reentrant=False, **options)  # type: ignore[no-any-return]


def _run(layer: nn.Module, layout: Layout, *tensors: Tensor) -> Payload:
    return layer(layout.build(tensors))  # type: ignore[no-any-return]


def _policy(context: SelectiveCheckpointContext, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    if operator.name().split(".")[0] in _EXPENSIVE:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
