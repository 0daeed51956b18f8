"""Proves packs of a model exact: `check_packing` for any collator, `check_packed` before a training on packs begins.

Both make rows, run them, and compare a pack with its samples alone. What only longer rows than these would show is
tried in a small model with random weights, for which rows of a few words are long.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, reduce
from itertools import pairwise
from typing import Any, Final
from warnings import warn

import torch
from torch import Tensor

from omnibal.errors import ConfigError
from omnibal.packs.apart import (
    HEEDED,
    KINDS,
    TYPES,
    WINDOWS,
    StatefulLayers,
    Threshold,
    attend_by_bounds,
    is_rotated_by_sample,
    mask_images,
    plain_words,
    refuse_other_parts,
    rotate_by_sample,
    shown_by_samples,
    thresholds,
    transformers_model,
)
from omnibal.packs.collator import FAMILIES, Collator, PackCollator, arguments_of, as_alone, positions_of, videos_of
from omnibal.packs.leaks import Leak, PackingCheck, compare

SHAPES: Final = ((1, 0, 11), (0, 1, 14), (2, 0, 5), (0, 0, 8))
"""Images, videos and words of made-up samples: unlike in size, and no two of them with as many tokens."""
SLICES: Final = 2
"""Temporal slices of a made-up video."""
CHECKED_TOKENS: Final = 8
"""Made-up texts have so many words, or a small multiple."""
MOST_IN_64_BITS: Final = 2**28
"""Weights of a model that is checked in 64 bits: it takes three times its memory for a while."""
NO_SMALL_MODEL: Final = (ConfigError, ValueError, TypeError, RuntimeError, LookupError, AttributeError)
"""What a model's code raises if its configuration cannot be made small."""

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
    return _beyond(transformers_model(model), found, alone, packed) if found.is_exact else found


def check_packed(
    model: torch.nn.Module,
    collator: PackCollator,
    items: Sequence[Any],
    *,
    device: torch.device | None = None,
    rounded: bool = False,
) -> None:
    """Check that a pack gives each sample the logits that it gets alone."""
    # From then on, layers that would let a state, an image or a sample's length across keep samples apart.
    # The model is wrapped if it is trained so: where layers gather their weights from other ranks, all ranks check the
    # same items at the same time. ``rounded``: it computes in 16 bits whatever its logits come in, as under autocast.
    # With more than two items each module is looked at, whatever the logits are.
    by_bounds = _check_long_rows(model)
    isolation = len(items) > 2
    found = _kept_apart(model, collator, items, by_bounds, device=device, rounded=rounded, isolation=isolation)
    if not found.is_exact:
        raise ConfigError(
            f"packed samples must get the logits that they get alone, got {found.errors}, through {found.through}; "
            "such packs cannot train it, but balance(..., padded=True) trains it on balanced batches with padding"
        )


def _kept_apart(
    model: torch.nn.Module, collator: PackCollator, items: Sequence[Any], by_bounds: bool, **options: Any
) -> PackingCheck:
    """Keep samples apart in a model's layers, and compare; ``by_bounds``: attention may tell samples by bounds."""
    samples = [collator.sample(item) for item in items]
    check = partial(compare, model, [*map(as_alone, samples)], collator.pack(samples), **options)
    mask_images(model)
    rotate_by_sample(model)
    found = _by_bounds_if_exact(check, attend_by_bounds(model) if by_bounds else None)
    if _leaks_states(found):
        layers = StatefulLayers(model, [leak.module for leak in found.leaks])
        found = check(isolation=True)
        if layers.by_kernels and not found.is_exact:
            layers.by_kernels = False
            found = check()
    return found


def _by_bounds_if_exact(check: Callable[[], PackingCheck], undo: Callable[[], None] | None) -> PackingCheck:
    """Check; where attention by bounds is not exact, undo it and check the model with its own attention."""
    try:
        found = check()
        if undo is None or found.is_exact or _leaks_states(found):
            return found
    except ConfigError:  # raised by attention that is no plain scaled dot product
        if undo is None:
            raise
    undo()
    return check()


def _leaks_states(found: PackingCheck) -> bool:
    """Whether all that leaks are states, which `StatefulLayers` keep apart."""
    return bool(found.leaks) and {leak.kind for leak in found.leaks} <= KINDS


def _check_long_rows(model: torch.nn.Module) -> bool:
    """Check what only long samples show, in a small model of the same kind for which those of a few words are long."""
    # Returns whether attention by bounds was exact there: kernels know windows, but no chunks.
    base = transformers_model(model)
    refuse_other_parts(base)
    long = shown_by_samples(base)
    if not long:
        return True
    names = " or ".join(map(str, long))
    try:
        small = scaled_model(base, 2 * CHECKED_TOKENS - 2, long)
    except NO_SMALL_MODEL as error:
        if not all(each.word in HEEDED for each in long):
            warn(f"packs beyond {names} have not been tried: no small model could be made ({error})", stacklevel=2)
        return all(each.word == WINDOWS for each in long)
    found = _kept_apart(small, *_texts(small.config, (1, 3, 2)), by_bounds=True)
    if not found.is_exact:
        raise ConfigError(
            f"samples beyond {names} must get the logits in a pack that they get alone, got {found.errors} in a small "
            f"model with random weights, through {found.through}; balance(..., padded=True) trains on padded batches"
        )
    return bool(small.config.get_text_config()._attn_implementation != "sdpa")


def _beyond(
    base: Any, found: PackingCheck, alone: Sequence[Mapping[str, Any]], packed: Mapping[str, Any]
) -> PackingCheck:
    """The check with what longer samples would show, number by number: a leak is named by its number."""
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
        except NO_SMALL_MODEL:
            if each.word not in HEEDED:
                beyond.append(str(each))
            continue
        if not tried.is_exact:
            beyond.append(str(each))
            leaks |= {leak.module: leak for leak in tried.leaks}
    return replace(found, leaks=tuple(leaks.values()), beyond=tuple(beyond))


def _compare_in_64_bits(
    model: Any, alone: Sequence[Mapping[str, Any]], packed: Mapping[str, Any], gradients: bool
) -> PackingCheck:
    """Compare in 64 bits, in which smaller leaks stand out, if a CPU holds the model in 32 bits and has room."""
    weights = [*model.parameters()]
    plain = all(type(each.data) is Tensor and not hasattr(each, "ds_id") for each in weights)
    fits = plain and sum(weight.numel() for weight in weights) <= MOST_IN_64_BITS
    if fits and {(each.device.type, each.dtype) for each in weights} == {("cpu", torch.float32)}:
        with suppress(RuntimeError):  # a product that exists in fewer bits alone, as of grouped experts
            doubled = copy.deepcopy(model).double()
            return compare(doubled, [*map(_doubled, alone)], _doubled(packed), gradients=gradients)
    return compare(model, alone, packed, gradients=gradients)


def _doubled(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def two_texts(config: Any) -> tuple[PackCollator, list[Tensor]]:
    """A collator and two made-up texts, the same on all ranks: to check a model before anything is drawn."""
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"model_type must be one of {', '.join(FAMILIES)} to pack samples that nobody has read yet, got "
            f"{config.model_type!r}; packs of a dataset that is read by index may prove exact, and padded=True works"
        )
    return _texts(config, (1, 2))


def _texts(config: Any, sizes: Sequence[int]) -> tuple[PackCollator, list[Tensor]]:
    """A collator and made-up texts of so many times ``CHECKED_TOKENS`` words."""
    words = plain_words(config)
    bounds = [CHECKED_TOKENS * sum(sizes[:number]) for number in range(len(sizes) + 1)]
    collator = PackCollator(lambda items: dict.fromkeys(("input_ids", "labels"), items[0][None]), positions_of(config))
    return collator, [words[start:stop] for start, stop in pairwise(bounds)]


def made_samples(model: Any) -> list[dict[str, Tensor]]:
    """Samples of random words, some with random images: by token (tokens,), by image as the model takes them."""
    # A model whose configuration does not tell what an image looks like gets words alone, which `PackingCheck` says.
    from omnibal.packs.encoders import blank_image, image_tokens  # loops of models from elsewhere need no transformers

    config, generator = model.config, torch.Generator().manual_seed(0)
    words, takes = plain_words(config), arguments_of(model) or ()
    try:
        image, token = blank_image(model), getattr(config, "image_token_id", None)
        token = int(config.image_token_index if token is None else token)
    except (AttributeError, ConfigError):  # a language model, or images of a shape that only a processor knows
        image, token = {}, -1
    run = torch.full((image_tokens(model, image),), token)
    video_token = videos_of(positions_of(config)) if image else None
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


def _images(image: Mapping[str, Tensor], count: int, generator: torch.Generator) -> dict[str, Tensor]:
    if not (image and count):
        return {}
    fields = {name: torch.cat([value] * count) for name, value in image.items()}
    noise = torch.randn(fields["pixel_values"].shape, generator=generator)
    return fields | {"pixel_values": noise.to(fields["pixel_values"])}


def as_pack(model: Any, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    collator = PackCollator(lambda items: items[0], positions_of(model.config))
    return collator.pack([{**sample, "labels": sample["input_ids"]} for sample in samples])


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
