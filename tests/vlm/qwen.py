"""Tiny Qwen-VL models and samples with images of any grid, and plain transformers as the oracle for both."""

from typing import Any

import torch
from transformers import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)

from tests.families.models import small_config

IMAGE_TOKEN, VIDEO_TOKEN, PAD_TOKEN, VOCAB = 3, 2, 0, 61
PATCH, VALUES = 2, 3 * 2 * 2 * 2
LANGUAGE = {
    "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 512, "initializer_range": 0.1,
    "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}  # fmt: skip
NATIVE = {"depth": 4, "num_heads": 2, "patch_size": PATCH, "initializer_range": 0.1}
VISION = {
    "qwen2_vl": NATIVE | {"embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": NATIVE
    | {"hidden_size": 24, "out_hidden_size": 32, "intermediate_size": 40}
    | {"window_size": 8, "fullatt_block_indexes": [1, 3]},
    "qwen3_vl": NATIVE
    | {"hidden_size": 24, "out_hidden_size": 32, "intermediate_size": 40}
    | {"num_position_embeddings": 25, "deepstack_visual_indexes": [2, 0, 1]},
}
CLASSES: dict[str, Any] = {
    "qwen2_vl": Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
}


def tiny_qwen(family: str, *, tied: bool = False, vision: dict[str, Any] | None = None, **text: Any) -> Any:
    return small_config(
        family,
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision=VISION[family] | (vision or {}),
        text=LANGUAGE | {"tie_word_embeddings": tied} | text,
        tie_word_embeddings=tied,
    )


def make_sample(
    seed: int,
    *,
    grids: tuple[tuple[int, int], ...] = (),
    question: int = 4,
    answer: int = 3,
    videos: tuple[tuple[int, int, int], ...] = (),
    family: str = "",
) -> dict[str, Any]:
    """A question, after each word of which stands one of the images (rows and columns of patches), and an answer.

    Videos (slices, rows and columns) stand between the images; those of Qwen3-VL slice by slice.
    """
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(4, VOCAB, (question + answer,), generator=generator).tolist()
    ids: list[int] = words[:1]
    for number, (rows, columns) in enumerate(grids):
        ids += [IMAGE_TOKEN] * (rows * columns // 4) + words[1:2] + video_ids(videos[number : number + 1], family)
    ids += video_ids(videos[len(grids) :], family)
    ids += words[1:]
    labels = [-100] * (len(ids) - answer) + ids[len(ids) - answer :]
    patches = sum(rows * columns for rows, columns in grids)
    return (
        {
            "input_ids": torch.tensor(ids),
            "labels": torch.tensor(labels),
            "pixel_values": torch.randn(patches, VALUES, generator=generator) if grids else None,
        }
        | ({"image_grid_thw": torch.tensor([[1, *grid] for grid in grids])} if grids else {})
        | (video_fields(videos, family, generator) if videos else {})
    )


def video_ids(videos: tuple[tuple[int, int, int], ...], family: str) -> list[int]:
    """The tokens of videos, with words between and behind them."""
    ids: list[int] = []
    for slices, rows, columns in videos:
        tokens = [VIDEO_TOKEN] * (rows * columns // 4)
        ids += [*tokens, 7, 8] * slices if family == "qwen3_vl" else [*tokens * slices, 7]
    return ids


def video_fields(videos: tuple[tuple[int, int, int], ...], family: str, generator: Any) -> dict[str, Any]:
    """What the model takes of random videos."""
    patches = sum(slices * rows * columns for slices, rows, columns in videos)
    fields = {
        "pixel_values_videos": torch.randn(patches, VALUES, generator=generator),
        "video_grid_thw": torch.tensor(videos),
    }
    seconds = torch.rand(len(videos), generator=generator) + 0.2
    return fields | ({"second_per_grid_ts": seconds} if family == "qwen2_5_vl" else {})
