"""A small InternVL model whose layers keep a CPU core busy for milliseconds, and a pack for it."""

import torch
from torch import Tensor
from transformers import InternVLConfig, InternVLVisionConfig, Qwen2Config

from omnibal.cost import Load
from omnibal.data.collate import pack_samples
from omnibal.data.limits import PackLimits
from omnibal.vlm import load_model
from omnibal.vlm.layers import VisionLanguageModel

TILE, TOKENS_PER_TILE, IMAGE_TOKEN, VOCABULARY = 112, 16, 3, 512
SAMPLES, TILES, TOKENS = 4, 2, 128
LIMITS = PackLimits(SAMPLES * TILES, SAMPLES * TOKENS)
LOAD = Load(SAMPLES * TILES, SAMPLES * TOKENS, SAMPLES * TOKENS**2)
"""Of the pack."""


def model() -> VisionLanguageModel:
    """Eight ViT blocks of width 256 and six decoder blocks of width 384."""
    vision = InternVLVisionConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=4, image_size=TILE,
        patch_size=14,
    )  # fmt: skip
    text = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1152, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=6, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    return load_model(
        InternVLConfig(
            vision_config=vision,
            text_config=text,
            image_token_id=IMAGE_TOKEN,
            image_seq_length=TOKENS_PER_TILE,
            downsample_ratio=0.5,
            tie_word_embeddings=False,
        )
    )


def pack(seed: int) -> dict[str, Tensor]:
    """As large as the limits allow; every token of text carries loss."""
    generator = torch.Generator().manual_seed(seed)
    return pack_samples([_sample(generator) for _ in range(SAMPLES)], pad_token_id=0, pixel_shape=(3, TILE, TILE))


def _sample(generator: torch.Generator) -> dict[str, Tensor | None]:
    ids = torch.randint(IMAGE_TOKEN + 1, VOCABULARY, (TOKENS,), generator=generator)
    ids[: TILES * TOKENS_PER_TILE] = IMAGE_TOKEN
    labels = torch.where(ids == IMAGE_TOKEN, -100, ids)
    return {"input_ids": ids, "labels": labels, "pixel_values": torch.randn(TILES, 3, TILE, TILE, generator=generator)}
