"""A small InternVL model and samples for it, in the proportions of 6B + 20B on InternVL's mix, a sixteenth as long."""

from functools import cache

import torch
from transformers import InternVLConfig, InternVLVisionConfig, Qwen2Config

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from tools.synthetic import TOKENS_PER_TILE, tiled_lengths

SHORTER = 16
"""So many times fewer patches in a tile and tokens in a text than the paper's model has."""
LIMITS = PackLimits(9, 4096 // SHORTER)
TILE, PATCH, IMAGE_TOKEN, PAD_TOKEN, VOCABULARY = 56, 7, 3, 0, 512
WORDS = 32
"""That texts are made of; each follows from the one before."""
VISION_WIDTH, VISION_LAYERS, WIDTH, LAYERS = 192, 14, 384, 12
"""Weights of the ViT's blocks to those of the LLM's are as 5.5 to 18.7, as in InternViT-6B and InternLM2-20B."""


def model_config() -> InternVLConfig:
    """Heads of 64, an untied head."""
    vision = InternVLVisionConfig(
        hidden_size=VISION_WIDTH,
        intermediate_size=4 * VISION_WIDTH,
        num_hidden_layers=VISION_LAYERS,
        num_attention_heads=VISION_WIDTH // 64,
        image_size=TILE,
        patch_size=PATCH,
    )
    text = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=8 * WIDTH // 3,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // 64,
        num_key_value_heads=WIDTH // 64,
        max_position_embeddings=4096 // SHORTER,
        tie_word_embeddings=False,
    )
    return InternVLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE_TOKEN,
        image_seq_length=TOKENS_PER_TILE // SHORTER,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )


@cache
def sample_lengths(count: int = 20_000) -> SampleLengths:
    """InternVL's mix, shorter."""
    drawn = tiled_lengths(count, seed=2)
    return SampleLengths(drawn.vision_units, (drawn.llm_tokens // SHORTER).clip(min=4))


def make_sample(index: int, *, padded_to: int = 0) -> dict[str, torch.Tensor | None]:
    """A sample of random pixels and a text in which every token follows from the one before.

    Args:
        index: Which.
        padded_to: With so many tokens at least; padding carries no loss.
    """
    lengths = sample_lengths()
    tiles, tokens = int(lengths.vision_units[index]), int(lengths.llm_tokens[index])
    generator = torch.Generator().manual_seed(index)
    image_tokens = min(tiles * TOKENS_PER_TILE // SHORTER, tokens - 1)
    first = int(torch.randint(WORDS, (1,), generator=generator))
    words = IMAGE_TOKEN + 1 + (first + torch.arange(tokens - image_tokens)) % WORDS
    ids = torch.cat([torch.full((image_tokens,), IMAGE_TOKEN), words])
    labels = torch.where(ids == IMAGE_TOKEN, -100, ids)
    labels[0] = -100
    padding = max(padded_to - tokens, 0)
    ids = torch.nn.functional.pad(ids, (0, padding), value=PAD_TOKEN)
    labels = torch.nn.functional.pad(labels, (0, padding), value=-100)
    pixels = torch.randn(tiles, 3, TILE, TILE, generator=generator) if tiles else None
    return {"input_ids": ids, "labels": labels, "pixel_values": pixels}
