"""What the measurements run: public models by their sizes, with random weights, and samples as long as real ones."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    InternVLConfig,
    InternVLVisionConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
)

from omnibal.data.lengths import SampleLengths
from omnibal.vlm import load_model
from omnibal.vlm.layers import VisionLanguageModel
from tools.synthetic import tiled_lengths

IMAGE_TOKEN, PADDING = 3, 0
_VIT_300M = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_VIT_6B = {"hidden_size": 3200, "num_hidden_layers": 45, "num_attention_heads": 25, "intermediate_size": 12800}
_NORMS_6B = {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": False}
_VIT_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
TINY = "tiny"
TEXT_SHARE, LARGE_SHARE, LARGE_TILES, TILES = 0.11, 0.16, (7, 13), (0.12, 0.06, 0.2, 0.05, 0.57)
"""Shares of samples without an image and with 7 to 13 tiles; of the others, the shares of 1 to 5 tiles."""


def qwen2(width: int, layers: int, heads: int, kv_heads: int, intermediate: int, **others: Any) -> Qwen2Config:
    """A Qwen2 language model."""
    sizes = {"vocab_size": 151674, "max_position_embeddings": 32768} | others
    return Qwen2Config(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=intermediate, **sizes,
    )  # fmt: skip


def config_of(name: str) -> InternVLConfig:
    """The configuration of a model by its short name: ``"1B"``, ``"2B"``, ``"8B"``, ``"26B"`` or ``"tiny"``."""
    vision: dict[str, Any] = _VIT_300M
    text: PretrainedConfig
    if name == TINY:
        vision, text = _VIT_TINY, qwen2(64, 2, 2, 2, 128, vocab_size=512, tie_word_embeddings=False)
    elif name == "26B":
        vision = {**_VIT_6B, **_NORMS_6B}
        text = LlamaConfig(
            hidden_size=6144, num_hidden_layers=48, num_attention_heads=48, num_key_value_heads=8,
            intermediate_size=16384, vocab_size=92553, max_position_embeddings=32768, tie_word_embeddings=False,
        )  # fmt: skip
    else:
        text = {
            "1B": qwen2(896, 24, 14, 2, 4864, tie_word_embeddings=True),
            "2B": qwen2(1536, 28, 12, 2, 8960, tie_word_embeddings=True),
            "8B": qwen2(3584, 28, 28, 4, 18944, tie_word_embeddings=False),
        }[name]
    tile, tokens = (56, 4) if name == TINY else (448, 256)
    return InternVLConfig(
        vision_config=InternVLVisionConfig(image_size=tile, patch_size=14, **vision),
        text_config=text,
        image_token_id=IMAGE_TOKEN,
        image_seq_length=tokens,
        downsample_ratio=0.5,
        tie_word_embeddings=text.tie_word_embeddings,
    )


def models(*, small: bool) -> dict[str, VisionLanguageModel]:
    """The models whose layers are measured, by name; a small one to try the measurements without a GPU."""
    names = {
        "1B (InternViT-300M, Qwen2.5-0.5B)": "1B",
        "8B (InternViT-300M, Qwen2.5-7B)": "8B",
        "26B (InternViT-6B, InternLM2-20B)": "26B",
    }
    return {title: load_model(config_of(name)) for title, name in ({TINY: TINY} if small else names).items()}


def random_model(name: str, device: torch.device) -> Any:
    """The model of transformers of a name, made on its device without a file: in bfloat16 on a GPU, else in float32."""
    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with device:
        return AutoModelForImageTextToText.from_config(config_of(name), attn_implementation="sdpa", dtype=dtype)


def made_lengths(name: str, count: int) -> SampleLengths:
    """Lengths of samples for a model: charts, diagrams, documents, synthetic text; mean 4.4 tiles, 1,340 tokens.

    The tiny model has 4 tokens a tile and a sixteenth of the text.
    """
    generator = np.random.default_rng(3)
    drawn = tiled_lengths(count, seed=3)
    text = (0.83 * (drawn.llm_tokens - 256 * drawn.vision_units.astype(int))).astype(int)
    tiles = generator.choice(np.arange(1, 1 + len(TILES)), size=count, p=TILES)
    kind = generator.random(count)
    large = generator.integers(LARGE_TILES[0], LARGE_TILES[1] + 1, size=count)
    tiles = np.where(kind < LARGE_SHARE, large, np.where(kind > 1 - TEXT_SHARE, 0, tiles))
    own = np.maximum(text // 16 if name == TINY else text, 2)
    per_tile = config_of(name).image_seq_length
    # The first token of a sample has none before it that predicts it.
    return SampleLengths(tiles, tiles * per_tile + own, target_tokens=own - (tiles == 0))


@dataclass
class TiledDataset(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Samples of given lengths, whose pixels are shared noise: reading them takes little time."""

    lengths: SampleLengths
    noise: Tensor  # (tiles, 3, height, width)
    tokens_per_tile: int

    @classmethod
    def of(cls, name: str, count: int) -> "TiledDataset":
        """Samples for a model."""
        lengths, config = made_lengths(name, count), config_of(name)
        size = config.vision_config.image_size[0]
        noise = torch.randn(int(lengths.vision_units.max()), 3, size, size)
        return cls(lengths, noise, config.image_seq_length)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.lengths)

    def __getitem__(self, sample: int) -> dict[str, Any]:
        """Tokens, labels and tiles of a sample."""
        tiles, tokens = int(self.lengths.vision_units[sample]), int(self.lengths.llm_tokens[sample])
        generator = torch.Generator().manual_seed(int(sample))
        ids = torch.randint(4, 500, (tokens,), generator=generator)
        ids[: tiles * self.tokens_per_tile] = IMAGE_TOKEN
        labels = torch.where(ids == IMAGE_TOKEN, -100, ids)
        return {"input_ids": ids, "labels": labels, "pixel_values": self.noise[:tiles] if tiles else None}
