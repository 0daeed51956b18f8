"""What in a model depends on the length of a row, and small models for which few tokens are long.

| in the configuration | depends on | packs |
|---|---|---|
| rope type `dynamic` or `longrope`, transformers' modules | the longest sample of a row | get tables by sample |
| the same in other code | the row's length | have a longest row |
| `attn_temperature_tuning`, `use_logn_attn`, `use_dynamic_ntk` | a place in the row | the same |
| windows, chunks, `llama_4_scaling_beta` | distances and positions in a sample | are exact if the code heeds them |

Frequencies of "linear", "yarn", "llama3" and "proportional" are the same for all lengths.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError

BY_PLACE: Final = {
    "attn_temperature_tuning": ("floor_scale", 1),
    "use_logn_attn": ("seq_length", 0),
    "use_dynamic_ntk": ("seq_length", 0),
}
"""By a field that switches on what depends on a token's place in its row: the field with the longest row that does not
show it, and how many tokens that row lies below the number."""
LONGROPE: Final = "longrope"
WINDOWS: Final = "attention in windows"
CHUNKS: Final = "attention in chunks"
HEEDED: Final = (WINDOWS, CHUNKS)
"""What masks of transformers apply within samples."""
ROPE_FIELDS: Final = ("rope_parameters", "rope_scaling")
FOLLOWING: Final = ("dynamic", LONGROPE)
NOT_PACKED: Final = ("audio", "speech", "sound")
"""Parts of names of sub-models whose rows are single sounds."""

# Of small models.
FEW: Final = 2
"""Layers and heads of a small model, where one of each kind needs no more."""
WIDTHS: Final = ("embed_dim", "hidden_size")
HEADS: Final = ("num_attention_heads", "num_heads")
LAYERS: Final = ("num_hidden_layers", "depth")
OUTPUTS: Final = ("out_hidden_size", "projection_dim", "text_hidden_size", "vision_output_dim")
"""Widths that lead from the encoder to the language model."""
SPECIAL_LAYERS: Final = ("deepstack_visual_indexes", "fullatt_block_indexes", "full_attn_idxs")
LARGE: Final = {
    "num_key_value_heads": 1, "intermediate_size": 64, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
"""Numbers of a part that a small model may have at most."""
LARGE_WEIGHTS: Final = 0.1
"""Standard deviation of random weights that let a leak show."""


class Threshold(NamedTuple):
    """A number in a configuration: rows or samples of more tokens are computed otherwise than shorter ones."""

    part: tuple[str, ...]
    """Where in the configuration ``field`` stands: attributes, or keys of dictionaries."""
    field: str
    tokens: int
    word: str
    """What depends on the length, as the configuration calls it."""
    by_place: bool
    """Whether a token's place in its row counts, where otherwise positions and distances in its sample do."""
    below: int = 0
    """The number in the configuration less ``tokens``."""

    def __str__(self) -> str:
        number = f"{self.tokens} tokens of a {'row' if self.by_place else 'sample'}"
        return f"{number} ({'.'.join((*self.part, self.field))}: {self.word})"


def thresholds(config: Any) -> list[Threshold]:
    """What depends on length in a configuration of transformers, in all of its sub-models."""
    return [*_of_part(config.to_dict(), ())]


def _of_part(part: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[Threshold]:
    for name, value in part.items():
        if isinstance(value, Mapping) and not any(word in name for word in NOT_PACKED):
            if name not in ROPE_FIELDS:
                yield from _of_part(value, (*path, name))
                continue
            # Gemma's models have parameters for each kind of layer.
            by_layer = {(): value} | {(key,): each for key, each in value.items() if isinstance(each, Mapping)}
            for key, parameters in by_layer.items():
                yield from _of_rope(part, path, (*path, name, *key), parameters)
    for name, (field, below) in BY_PLACE.items():
        if part.get(name) and isinstance(part.get(field), int):
            yield Threshold(path, field, int(part[field]) - below, name, True, below)
    for name, word in (("sliding_window", WINDOWS), ("attention_chunk_size", CHUNKS)):
        if isinstance(part.get(name), int) and part.get(f"use_{name}", True):
            yield Threshold(path, name, part[name], word, False)


def _of_rope(
    part: Mapping[str, Any], path: tuple[str, ...], own: tuple[str, ...], parameters: Mapping[str, Any]
) -> Iterator[Threshold]:
    kind = str(parameters.get("rope_type", parameters.get("type", "")))
    original, fields = "original_max_position_embeddings", ((own, parameters), (path, part))
    if "dynamic" in kind and isinstance(part.get("max_position_embeddings"), int):
        yield Threshold(path, "max_position_embeddings", part["max_position_embeddings"], "dynamic", False)
    elif kind in (LONGROPE, "su") or parameters.get("llama_4_scaling_beta"):
        word = LONGROPE if kind in (LONGROPE, "su") else "llama_4_scaling_beta"
        for where, numbers in fields:  # Phi-3 has the number in both
            if isinstance(numbers.get(original), int):
                yield Threshold(where, original, numbers[original], word, False)


def longest_row(model: Any) -> Threshold | None:
    """What limits the rows of a model: packs of several samples that hold more tokens are not exact."""
    return min(_of_rows(transformers_model(model)), key=lambda each: each.tokens, default=None)


def shown_by_samples(base: Any) -> list[Threshold]:
    """What depends on a sample's own length alone, if packs keep samples apart: samples that are longer show it."""
    of_rows = _of_rows(base)
    return [each for each in _in_text(base) if each not in of_rows]


def _of_rows(base: Any) -> list[Threshold]:
    by_sample = any(follows_length(module) for module in base.modules())
    return [each for each in _in_text(base) if each.by_place or (each.word in FOLLOWING and not by_sample)]


def _in_text(base: Any) -> list[Threshold]:
    config: Any = getattr(base, "config", None)
    if not hasattr(config, "get_text_config"):
        return []
    text = config.get_text_config()
    names = [name for name in config.sub_configs if getattr(config, name, None) is not text]
    return [each for each in thresholds(config) if each.part[:1] not in [(name,) for name in names]]


def refuse_other_parts(base: Any) -> None:
    """Refuse encoders whose rotary embeddings follow the largest image of a row, which no limit of tokens prevents."""
    of_text = _in_text(base)
    for each in thresholds(base.config) if hasattr(base, "config") else ():
        if each.word in FOLLOWING and each not in of_text:
            raise ConfigError(
                f"rope_type of {each.part[0]} must not follow the other images of a row to train packs, got "
                f"{each.word!r}; balance(..., padded=True) trains on padded batches"
            )


def follows_length(module: nn.Module) -> bool:
    """Whether a module has rotary embeddings of transformers that follow the length of a row."""
    if not any(name.endswith("original_inv_freq") for name, _ in module.named_buffers(recurse=False)):
        return False
    from omnibal.vlm.attention import length_types  # loops of models from elsewhere need no transformers

    return bool(length_types(module))


def refuse_long_rows(model: Any, limits: PackLimits | None) -> None:
    """Refuse limits whose packs may be longer than the longest row that computes samples as alone."""
    row = longest_row(model)
    if row is not None and (limits is None or limits.llm_tokens > row.tokens):
        raise ConfigError(
            f"limits.llm_tokens must be at most {row.tokens} for packs of this model, which computes longer rows "
            f"otherwise ({'.'.join((*row.part, row.field))}), got {'none' if limits is None else limits.llm_tokens}"
        )


def transformers_model(model: Any) -> Any:
    """The model of transformers in wrappers, or the model itself."""
    return next((part for part in model.modules() if hasattr(type(part), "config_class")), model)


def small_config(config: Any) -> Any:
    """A model's configuration with few and narrow layers, one of each kind at least, and heads as wide as they are."""
    small = copy.deepcopy(config)
    text, vision = small.get_text_config(), getattr(small, "vision_config", None)
    new_widths = {}  # by old width: what projectors and mergers lead to
    for part in filter(None, (vision, text)):
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
        # As many layers as one of each kind takes.
        layers = next(name for name in LAYERS if hasattr(part, name))
        kinds = getattr(part, "layer_types", None) or []
        count = min(max([FEW, *(kinds.index(kind) + 1 for kind in kinds)]), getattr(part, layers))
        setattr(part, layers, count)
        if kinds:
            part.layer_types = kinds[:count]
        for special in SPECIAL_LAYERS:
            if getattr(part, special, None):
                setattr(part, special, [*range(min(count, len(getattr(part, special))))])
    for part in filter(None, (small, text, vision)):
        for name in (*WIDTHS, *OUTPUTS):
            if getattr(part, name, None) in new_widths:
                setattr(part, name, new_widths[getattr(part, name)])
    return small


def scaled_model(base: Any, tokens: int, long: Sequence[Threshold]) -> Any:
    """A small model of the kind of ``base``, with random weights; more than ``tokens`` tokens show what is ``long``."""
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
