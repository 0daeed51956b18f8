"""`check_packing`: whether packs of a model, by its trainer's collator or by omnibal's, leak from sample to sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from omnibal.errors import ConfigError
from omnibal.packs.apart import TYPES, is_rotated_by_sample, rotate_by_sample
from omnibal.packs.collator import Collator, PackCollator, arguments_of, as_alone, positions_of, videos_of
from omnibal.packs.encoders import blank_image, image_tokens
from omnibal.packs.leaks import Leak, PackingCheck, compare, plain_words
from omnibal.packs.row_lengths import HEEDED, base_of, thresholds
from omnibal.packs.small_models import scaled_model

SHAPES: Final = ((1, 0, 11), (0, 1, 14), (2, 0, 5), (0, 0, 8))
"""Images, videos and words of made-up samples: unlike in size, and no two of them with as many tokens."""
SLICES: Final = 2
"""Temporal slices of a made-up video."""
MOST_IN_64_BITS: Final = 2**28
"""Weights of a model that is checked in 64 bits: it takes three times its memory for a while."""


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
        alone, packed = [as_alone(sample) for sample in samples], as_pack(model, samples)
    else:
        alone, packed = [dict(collate([item])) for item in items], dict(collate(list(items)))
    found = _compare_in_64_bits(model, alone, packed, gradients)
    return _beyond(base_of(model), found, alone, packed) if found.is_exact else found


def _compare_in_64_bits(
    model: Any, alone: Sequence[Mapping[str, Any]], packed: Mapping[str, Any], gradients: bool
) -> PackingCheck:
    """Compare in 64 bits, in which smaller leaks stand out, if a CPU holds the model in 32 bits and has room."""
    weights = [*model.parameters()]
    plain = all(type(each.data) is Tensor and not hasattr(each, "ds_id") for each in weights)
    fits = plain and sum(weight.numel() for weight in weights) <= MOST_IN_64_BITS
    if fits and {(each.device.type, each.dtype) for each in weights} == {("cpu", torch.float32)}:
        try:
            with _in_64_bits(model):
                return compare(model, [*map(_doubled, alone)], _doubled(packed), gradients=gradients)
        except RuntimeError:  # a product that exists in fewer bits alone, as of grouped experts
            pass
    return compare(model, alone, packed, gradients=gradients)


def _doubled(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


@contextmanager
def _in_64_bits(model: torch.nn.Module) -> Iterator[None]:
    """Let a model compute in 64 bits; its weights and buffers are then put back to the bit."""
    parameters = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.data)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        model.double()
        yield
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for module, name, buffer, data in buffers:
            buffer.data = data
            setattr(module, name, buffer)


def _beyond(
    base: Any, found: PackingCheck, alone: Sequence[Mapping[str, Any]], packed: Mapping[str, Any]
) -> PackingCheck:
    """The check with what longer samples would show, tried in a small model for which these are long."""
    longest, row = max(sample["input_ids"].shape[1] for sample in alone), packed["input_ids"].shape[1]
    config = getattr(base, "config", None)
    leaks: dict[str, Leak] = {}
    beyond = []
    for each in thresholds(config) if hasattr(config, "get_text_config") else ():
        if (row if each.by_place else longest) > each.tokens:
            continue  # the samples have shown it
        try:
            small = scaled_model(base, max(longest // 2, 1), [each])
            if is_rotated_by_sample(base):
                rotate_by_sample(small)
            tried = _compare_in_64_bits(small, alone, packed, gradients=False)
        except (ConfigError, ValueError, TypeError, RuntimeError, LookupError, AttributeError):
            if each.word not in HEEDED:
                beyond.append(str(each))
            continue
        if not tried.is_exact:
            beyond.append(str(each))
            leaks |= {leak.module: leak for leak in tried.leaks}
    return replace(found, leaks=tuple(leaks.values()), beyond=tuple(beyond))


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
