"""Small InternVL models and samples that keep a CPU core busy for tens of milliseconds a layer."""

from functools import cache

import numpy as np
import torch
from transformers import InternVLConfig, InternVLVisionConfig, Qwen2Config

from omnibal.data.lengths import SampleLengths
from tools.synthetic import tiled_lengths

TILE, PATCH, TOKENS_PER_TILE, IMAGE_TOKEN, VOCABULARY = 112, 14, 16, 3, 512
TEXT_DIVISOR = 4
"""Texts are so many times shorter than in the mix that the samples follow; a tile brings 16 tokens, not 256."""


def model_config(*, vision_width: int, vision_layers: int, width: int, layers: int) -> InternVLConfig:
    """An InternVL model with heads of 64, an untied head, and MLPs of four and three times the width."""
    vision = InternVLVisionConfig(
        hidden_size=vision_width,
        intermediate_size=4 * vision_width,
        num_hidden_layers=vision_layers,
        num_attention_heads=vision_width // 64,
        image_size=TILE,
        patch_size=PATCH,
    )
    text = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    return InternVLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE_TOKEN,
        image_seq_length=TOKENS_PER_TILE,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )


MODELS = {
    "mixed": model_config(vision_width=256, vision_layers=8, width=384, layers=6),
    "ViT-heavy": model_config(vision_width=384, vision_layers=10, width=256, layers=4),
    "LLM-heavy": model_config(vision_width=128, vision_layers=4, width=448, layers=10),
}


@cache
def sample_lengths(num_samples: int = 4000) -> SampleLengths:
    """Samples in the shape of InternVL's mix, smaller."""
    drawn = tiled_lengths(num_samples, seed=2)
    text = drawn.llm_tokens - 256 * drawn.vision_units
    tokens = TOKENS_PER_TILE * drawn.vision_units + np.maximum(text // TEXT_DIVISOR, 4)
    return SampleLengths(drawn.vision_units, tokens)


def make_sample(tiles: int, tokens: int, seed: int) -> dict[str, torch.Tensor | None]:
    """A sample of random pixels and tokens; every token but the first carries loss."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(IMAGE_TOKEN + 1, VOCABULARY, (tokens,), generator=generator)
    labels = ids.clone()
    ids[: TOKENS_PER_TILE * tiles] = IMAGE_TOKEN
    pixels = torch.randn(tiles, 3, TILE, TILE, generator=generator) if tiles else None
    return {"input_ids": ids, "labels": labels, "pixel_values": pixels}
