"""Small models with the kinds of layers that a large one has: to see in seconds what the large one would do."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import reduce
from typing import Any, Final

import torch

from omnibal.errors import ConfigError
from omnibal.packs.row_lengths import Threshold

FEW: Final = 2
"""Layers and heads of a small model, where one of each kind needs no more."""
WIDTHS: Final = ("embed_dim", "hidden_size")
HEADS: Final = ("num_attention_heads", "num_heads")
LAYERS: Final = ("num_hidden_layers", "depth")
OUTPUTS: Final = ("out_hidden_size", "projection_dim", "text_hidden_size", "vision_output_dim")
"""Widths that lead from the encoder to the language model."""
PLACES: Final = ("deepstack_visual_indexes", "fullatt_block_indexes", "full_attn_idxs")
LARGE: Final = {
    "num_key_value_heads": 1, "intermediate_size": 64, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
"""Numbers of a part that a small model may have at most."""
LARGE_WEIGHTS: Final = 0.1
"""Standard deviation of random weights that let a leak show."""


def small_config(config: Any) -> Any:
    """A model's configuration with few and narrow layers, one of each kind at least, and heads as wide as they are.

    Raises:
        ConfigError: The configuration has no sizes by the names that most models give them.
    """
    small = copy.deepcopy(config)
    text, vision = small.get_text_config(), getattr(small, "vision_config", None)
    new_widths = {}  # by old width: what projectors and mergers lead to
    for part in (each for each in (vision, text) if each is not None):
        width_name = next((name for name in WIDTHS if hasattr(part, name)), None)
        heads_name = next((name for name in HEADS if hasattr(part, name)), None)
        if width_name is None or heads_name is None:
            raise ConfigError(
                f"config of {config.model_type} must have one each of {', '.join(WIDTHS)} and of {', '.join(HEADS)} to "
                "be made small, got neither or one"
            )
        width, heads = getattr(part, width_name), getattr(part, heads_name)
        head_width = getattr(part, "head_dim", None) or width // heads
        new_widths[width] = FEW * head_width
        for name, most in (LARGE | {heads_name: FEW}).items():
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, min(getattr(part, name), most))
        _cut_layers(part)
    for part in (small, text, vision):
        for name in (*WIDTHS, *OUTPUTS):
            if part is not None and getattr(part, name, None) in new_widths:
                setattr(part, name, new_widths[getattr(part, name)])
    return small


def _cut_layers(part: Any) -> None:
    """Keep so many layers that one of each kind is there."""
    name = next(name for name in LAYERS if hasattr(part, name))
    kinds = getattr(part, "layer_types", None) or []
    count = min(max([FEW, *(kinds.index(kind) + 1 for kind in kinds)]), getattr(part, name))
    setattr(part, name, count)
    if kinds:
        part.layer_types = kinds[:count]
    for places in PLACES:  # of special layers
        if getattr(part, places, None):
            setattr(part, places, [*range(min(count, len(getattr(part, places))))])


def scaled_model(base: Any, tokens: int, long: Sequence[Threshold]) -> Any:
    """A small model of the same kind with random weights, in which rows of more than ``tokens`` show what is ``long``.

    Raises:
        ConfigError: The configuration has no sizes by the names that most models give them.
    """
    small = small_config(base.config)
    for each in long:
        holder = reduce(lambda at, name: at[name] if isinstance(at, dict) else getattr(at, name), each.part, small)
        number = max(min(tokens, each.tokens), 1) + each.below
        if isinstance(holder, dict):
            holder[each.field] = number
        else:
            setattr(holder, each.field, number)
    if small._attn_implementation not in ("eager", "sdpa"):  # kernels that no CPU has
        small._attn_implementation = "sdpa"
    for part in (small, small.get_text_config()):
        part.initializer_range = LARGE_WEIGHTS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return type(base)(small).float().cpu()
