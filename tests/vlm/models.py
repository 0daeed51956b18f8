"""Tiny models and samples, and plain transformers as the oracle for both."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import InternVLConfig, InternVLForConditionalGeneration

from omnibal.formats.collate import pack_samples
from omnibal.loss import targets_of
from omnibal.profile.records import Level
from omnibal.vlm import Payload, VisionLanguageModel
from omnibal.vlm.payload import run_layer
from tests.families.models import small_config

IMAGE_TOKEN, PAD_TOKEN, VOCAB = 3, 0, 61
TILE, TOKENS_PER_TILE = 28, 4
PIXEL_SHAPE = (3, TILE, TILE)


VISION = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40,
    "image_size": TILE, "patch_size": 7,
}  # fmt: skip
LANGUAGE = {
    "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "pad_token_id": PAD_TOKEN,
    "max_position_embeddings": 128, "initializer_range": 0.1,
}  # fmt: skip


def tiny_config(
    *,
    tied: bool = False,
    text: str = "qwen2",
    vision_options: dict[str, Any] | None = None,
    text_options: dict[str, Any] | None = None,
    **options: Any,
) -> InternVLConfig:
    return small_config(
        "internvl",
        image_token_id=IMAGE_TOKEN,
        vision=VISION | (vision_options or {}),
        text=LANGUAGE | {"model_type": text} | (text_options or {}),
        tie_word_embeddings=tied,
        **options,
    )


def make_sample(seed: int, *, tiles: tuple[int, ...] = (), question: int = 4, answer: int = 3) -> dict[str, Any]:
    """A question, after each word of which stands one of the images (by its number of tiles), and an answer."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(4, VOCAB, (question + answer,), generator=generator).tolist()
    ids: list[int] = words[:1]
    for num_tiles in tiles:
        ids += [IMAGE_TOKEN] * (num_tiles * TOKENS_PER_TILE) + words[1:2]
    ids += words[1:]
    labels = [-100] * (len(ids) - answer) + ids[len(ids) - answer :]
    pixels = torch.randn(sum(tiles), *PIXEL_SHAPE, generator=generator) if tiles else None
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels), "pixel_values": pixels}


def make_pack(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return pack_samples(samples, pad_token_id=PAD_TOKEN, pixel_shape=PIXEL_SHAPE)


def build_layers(model: VisionLanguageModel, *, seed: int = 0, **options: Any) -> list[nn.Module]:
    """All layers, tied ones being one module, as a pipeline on one stage has them."""
    layers: list[nn.Module] = []
    for index in range(len(model.records)):
        first = model.first_tied(index)
        layers.append(layers[first] if first < index else model.build_layer(index, seed=seed, **options))
    return layers


def run_layers(layers: list[nn.Module], pack: dict[str, Tensor], level: Level = "none") -> Tensor:
    """Logits (1, tokens, vocab) of a pack."""
    return _run(layers, Payload.of_pack(pack), level)


def pack_loss(layers: list[nn.Module], pack: dict[str, Tensor], level: Level = "none") -> Tensor:
    """Sum of the losses of a pack's target tokens."""
    return _run(layers, Payload.of_pack(pack).with_integers(targets_of(pack["labels"])), level)


def _run(layers: list[nn.Module], payload: Payload, level: Level) -> Tensor:
    for layer in layers:
        payload = run_layer(layer, payload, level)
    return payload.hidden


def disk_state(model: VisionLanguageModel, layers: list[nn.Module], *, gradients: bool = False) -> dict[str, Tensor]:
    """Weights or gradients of all layers by their names on disk."""
    state = {}
    for index, layer in enumerate(layers):
        names = model.weight_names(index)
        for name, parameter in layer.named_parameters():
            state[names[name]] = parameter.grad if gradients else parameter.detach()
    return state


def plain_model(model: VisionLanguageModel, layers: list[nn.Module]) -> InternVLForConditionalGeneration:
    """Plain transformers with the weights of ``layers``."""
    plain = InternVLForConditionalGeneration._from_config(model.config, attn_implementation="sdpa")
    weights = disk_state(model, layers)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(weights[model.disk_name(name)])
    return plain


def plain_logits(plain: InternVLForConditionalGeneration, sample: dict[str, Any]) -> Tensor:
    """Logits (tokens, vocab) of one sample alone, unpadded."""
    return plain(input_ids=sample["input_ids"][None], pixel_values=sample["pixel_values"]).logits[0]


def plain_loss(plain: InternVLForConditionalGeneration, samples: list[dict[str, Any]]) -> Tensor:
    """Sum of the losses of all target tokens, one sample at a time, by transformers' own loss."""
    total = torch.zeros(())
    for sample in samples:
        labels = sample["labels"][None]
        loss = plain(input_ids=sample["input_ids"][None], pixel_values=sample["pixel_values"], labels=labels).loss
        total = total + loss * (labels[:, 1:] != -100).sum()
    return total


def plain_gradients(model: VisionLanguageModel, plain: InternVLForConditionalGeneration) -> dict[str, Tensor | None]:
    return {model.disk_name(name): parameter.grad for name, parameter in plain.named_parameters()}
