"""Lets torch.compile take the blocks of a model that trains on packs: one graph for packs of any number of samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import getclosurevars, isfunction, signature
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from omnibal.errors import ConfigError

BY_IMAGE: Final = "cu_seqlens"
"""What blocks of encoders take that cut their rows at images, a number of pieces that no graph can hold."""


class CompiledBlocks(NamedTuple):
    """Blocks that run compiled, until ``undo``; and those that stay as they are."""

    blocks: list[Any]
    left: list[Any]

    def undo(self) -> None:
        for block in self.blocks:
            vars(block).pop("forward", None)

    def __str__(self) -> str:
        left = f"; {_in_words(self.left)} left" if self.left else ""
        return f"{_in_words(self.blocks)} compiled{left}"


def compile_blocks(model: nn.Module, *, backend: Any = "inductor") -> CompiledBlocks:
    """Compile the blocks of a model's encoders and LLM one by one, as they run where they are trained."""
    # All blocks of a class share their graphs. Hooks on blocks and around them stay outside. Evaluation and generation
    # run as before. Call it when layers that keep samples apart are in place (``check_packed``): blocks that attend
    # image by image, or whose layers run sample by sample, count in Python what a pack holds, and are left.
    found = CompiledBlocks([], [])
    forwards: dict[type, Callable[..., Any]] = {}
    for block in blocks_of(model):
        kind = type(block)
        if BY_IMAGE in signature(kind.forward).parameters or any("forward" in vars(part) for part in block.modules()):
            found.left.append(block)
            continue
        if kind not in forwards:
            forwards[kind] = torch.compile(kind.forward, dynamic=True, backend=backend)
        block.forward = partial(_run, forwards[kind], block)
        found.blocks.append(block)
    if not found.blocks:
        raise ConfigError(
            "model must have blocks that torch.compile can take, none of which attends image by image or runs sample "
            f"by sample, got {_in_words(found.left) or 'none'}; leave compile=True out"
        )
    return found


def _in_words(blocks: Sequence[Any]) -> str:
    counts = Counter(type(block).__name__ for block in blocks)
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def blocks_of(model: nn.Module) -> Iterator[Any]:
    """The blocks of a model of transformers, of encoders and LLM, in the order of its modules."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    inner = set[nn.Module]()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module not in inner:
            inner.update(module.modules())
            yield module


def _run(compiled: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Batches of an evaluation, which are padded, would each want a graph.
    forward = compiled if block.training else type(block).forward
    return forward(block, *args, **kwargs)


def let_encoders_be_traced(model: nn.Module, decoder: nn.Module) -> None:
    """Keep transformers' hooks that capture attention weights out of graphs, where attention makes none."""
    # All attention modules have one in an encoder whose hidden states are asked for. It asks a context variable: there
    # dynamo ends its graph, or gives up where the block is checkpointed. Uncompiled, the hooks do what they did.
    try:
        from transformers.utils.output_capturing import maybe_install_capturing_hooks
    except ImportError:  # an older one has no such hooks
        return
    for encoder in _parts_beside(model, decoder):
        maybe_install_capturing_hooks(encoder)  # else its first forward pass does it
        for module in encoder.modules():
            if getattr(getattr(module, "config", None), "_attn_implementation", None) != "sdpa":
                continue
            hooks: dict[int, Any] = module._forward_hooks
            for number, hook in hooks.items():
                if _captured(hook) == "attentions":
                    hooks[number] = partial(_unless_traced, hook)


def _parts_beside(model: Any, decoder: nn.Module) -> Iterator[Any]:
    """The models of transformers within a model that the decoder is no part of."""
    from transformers import PreTrainedModel

    for part in model.modules():
        if isinstance(part, PreTrainedModel) and all(each is not decoder for each in part.modules()):
            yield part


def _captured(hook: Any) -> object:
    """What a hook of transformers captures; None for other hooks."""
    known: Mapping[str, Any] = getclosurevars(hook).nonlocals if isfunction(hook) else {}
    return known.get("key") if "capture_initial_hidden_state" in known else None


def _unless_traced(hook: Callable[..., Any], *args: Any) -> Any:
    return None if torch.compiler.is_compiling() else hook(*args)
