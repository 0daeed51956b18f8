"""`check_packing`: whether packs of a model, by its trainer's collator or by omnibal's, leak from sample to sample."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from omnibal.errors import ConfigError
from omnibal.integrations.apart import TYPES
from omnibal.integrations.encoders import blank_image, image_tokens
from omnibal.integrations.leaks import PackingCheck, compare, plain_words
from omnibal.integrations.packing import Collator, PackCollator, arguments_of, as_alone, positions_of, videos_of

SHAPES: Final = ((1, 0, 11), (0, 1, 14), (2, 0, 5), (0, 0, 8))
"""Images, videos and words of made-up samples: unlike in size, and no two of them with as many tokens."""
SLICES: Final = 2
"""Temporal slices of a made-up video."""
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


def check_packing(
    model: Any, collate: Collator | None = None, items: Sequence[Any] | None = None, *, gradients: bool = True
) -> PackingCheck:
    """Check that samples in a pack do not change each other; name the layers that let them.

    A pack is compared with its samples alone: logits, gradients, and, with other contents in one sample, what every
    module computes for the others. The model's weights, gradients and modes stay as they are.

    Args:
        model: A causal or vision-language model of transformers, with real or random weights; large enough weights
            (``initializer_range`` of 0.02 and more) let a leak show.
        collate: Your trainer's collator, from a list of items to the model's inputs: it must lay the tokens of several
            items one after another in one row. By default packs are made as omnibal makes them: positions that restart,
            no mask and no cache.
        items: Two or more items for ``collate``, with and without images; by default made-up samples.
        gradients: Whether to compare gradients too; False for a model that ZeRO 3 or FSDP has wrapped.

    Returns:
        What was found; ``print`` shows it, ``is_exact`` sums it up, ``require()`` raises unless packs are exact.

    Raises:
        ConfigError: The collator does not lay samples in one row, or the model does not run what it is given.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        >>> config = LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=None)
        >>> check_packing(LlamaForCausalLM(config)).is_exact
        True
    """
    if (collate is None) != (items is None):
        raise ConfigError(
            f"collate and items must come together, got {'items' if collate is None else 'collate'} alone"
        )
    if collate is None or items is None:
        samples = made_samples(model)
        alone = [as_alone(sample) for sample in samples]
        return compare(model, alone, as_pack(model, samples), gradients=gradients)
    return compare(model, [collate([item]) for item in items], collate(list(items)), gradients=gradients)


def made_samples(model: Any) -> list[dict[str, Tensor]]:
    """Samples of random words, some with random images: by token (tokens,), by image as the model takes them.

    A model whose configuration does not tell what an image looks like gets words alone, which `PackingCheck` says.
    """
    generator = torch.Generator().manual_seed(0)
    words, takes = plain_words(model.config), arguments_of(model) or ()
    try:
        image, token = blank_image(model), _image_token(model.config)
    except (AttributeError, ConfigError):  # a language model, or images of a shape that only a processor knows
        image, token = {}, -1
    run = torch.full((image_tokens(model, image),), token)
    video_token = videos_of(positions_of(model.config)) if image else None
    samples = []
    for num_images, num_videos, num_words in SHAPES:
        text = words[torch.randint(len(words), (num_words,), generator=generator)][:, None].unbind()
        slices = 0 if video_token is None else SLICES * num_videos  # each a video of one slice, alike in all models
        parts = [run] * num_images + [torch.full_like(run, video_token or 0)] * slices
        # A word stands before each image and each slice: models find images by runs of their tokens.
        ids = torch.cat([part for pair in zip(text, parts, strict=False) for part in pair] + [*text[len(parts) :]])
        types = {name: (ids == token).long() + 2 * (ids == video_token) for name in TYPES if name in takes}
        fields = _images(image, num_images, generator)
        for each in [_images(image, 1, generator) for _ in range(slices)]:
            given = {"pixel_values_videos": each["pixel_values"], "video_grid_thw": each["image_grid_thw"]}
            fields |= {name: torch.cat([fields[name], new]) if name in fields else new for name, new in given.items()}
        samples.append({"input_ids": ids} | types | fields)
    return samples


def as_pack(model: Any, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Samples as `PackCollator` packs them."""
    collator = PackCollator(lambda items: items[0], positions_of(model.config))
    return collator.pack([{**sample, "labels": sample["input_ids"]} for sample in samples])


def _image_token(config: Any) -> int:
    found = getattr(config, "image_token_id", None)
    return int(config.image_token_index if found is None else found)


def _images(image: Mapping[str, Tensor], count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Images of random pixels with the shape of one."""
    if not (image and count):
        return {}
    fields = {name: torch.cat([value] * count) for name, value in image.items()}
    noise = torch.randn(fields["pixel_values"].shape, generator=generator)
    return fields | {"pixel_values": noise.to(fields["pixel_values"])}


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
