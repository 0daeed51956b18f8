"""From an entry of an annotation file to a sample for training: first what images bring, then text and pixels."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from omnibal.families.base import ImageLoad
from omnibal.formats.chat import parse_conversation
from omnibal.formats.images import image_size, load_image
from omnibal.formats.model_format import ModelFormat
from omnibal.formats.text import Rendered, encode


@dataclass(frozen=True)
class Prepared:
    """A sample whose text is not yet tokenised and whose images are not decoded; ``loads`` are each image's."""

    rendered: Rendered
    images: tuple[Path, ...]
    loads: tuple[ImageLoad, ...]
    max_tiles: int | None


def prepare(record: Mapping[str, Any], root: Path, max_tiles: int | None, model_format: ModelFormat) -> Prepared:
    """Read the headers of an entry's images, and render its text.

    Raises:
        ValueError: With the reason, if the entry cannot be used.
    """
    conversation = parse_conversation(record, root)
    model_format.refuse_image_tokens(conversation)
    loads = model_format.image_loads(
        [image_size(path, model_format.max_image_pixels) for path in conversation.images], max_tiles
    )
    return Prepared(model_format.render(conversation), conversation.images, loads, max_tiles)


def pixels_of(sample: Prepared, model_format: ModelFormat) -> dict[str, Any]:
    """Its images as the model takes them; ``pixel_values`` is None where there is none.

    Raises:
        ValueError: With the reason, if an image cannot be used.
    """
    if not sample.images:
        return {"pixel_values": None}
    images = [load_image(path, model_format.max_image_pixels) for path in sample.images]
    if model_format.image_loads([image.size for image in images], sample.max_tiles) != sample.loads:
        raise ValueError(f"images must decode to the sizes of their headers, got others: {sample.images}")
    return model_format.pixels(images, sample.max_tiles)


def text_of(sample: Prepared, model_format: ModelFormat) -> dict[str, torch.Tensor]:
    """``input_ids`` and ``labels`` (tokens,) int64, each image as many tokens as it brings."""
    (encoded,) = encode(model_format.tokenizer, [sample.rendered])
    expanded = encoded.expanded(model_format.image_token_id, [load.llm_tokens for load in sample.loads])
    return {"input_ids": torch.from_numpy(expanded.ids), "labels": torch.from_numpy(expanded.labels)}
