"""Packed collation: the samples of a pack, one after another in a single sequence, without padding.

Attention must not cross a sample: `cu_seq_lens` says where each one begins, and positions restart there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
"""Label of a token that carries no loss, as in transformers."""

Positions = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""From a sample's token ids (tokens,) and integers by their names to positions (rows, tokens), int64; a DataError says
why the two do not fit one another."""


def pack_samples(
    items: Sequence[Mapping[str, Any]],
    *,
    pad_token_id: int,
    pixel_shape: tuple[int, ...],
    pixel_dtype: torch.dtype = torch.float32,
    image_integers: Mapping[str, tuple[int, ...]] | None = None,
    positions: Positions | None = None,
) -> dict[str, Tensor]:
    """Lays samples one after another.

    Args:
        items: What a dataset's ``[i]`` or ``text(i)`` returns: ``input_ids`` and ``labels``, 1-D int64 of equal
            length; ``pixel_values`` (tiles, channels, height, width) or (patches, values), or None; integers of images.
            No items make one dummy token without a target, so that every rank can run the step.
        pad_token_id: Id of the dummy token.
        pixel_shape: (channels, height, width) of a tile or (values,) of a patch, for packs without an image.
        pixel_dtype: What the model computes in.
        image_integers: Names of further integers of the samples with images, and the shape of one entry of each.
        positions: Of each sample's tokens; None to count them in one row.

    Returns:
        ``input_ids``, ``labels``, ``position_ids`` (1, L) int64, positions of more rows (rows, 1, L); ``cu_seq_lens``
        (n + 1,) int32; ``pixel_values`` ``(tiles, *pixel_shape)``, tiles possibly 0; and the integers of all samples
        under each name of ``image_integers``. Labels are not shifted; each sample's first one is -100, so that no
        token is predicted from the sample before it.
    """
    ids = [item["input_ids"] for item in items] or [torch.tensor([pad_token_id])]
    labels = [item["labels"].clone() for item in items] or [torch.tensor([IGNORED])]
    for sample_labels in labels:
        sample_labels[:1] = IGNORED
    lengths = torch.tensor([len(sample_ids) for sample_ids in ids])
    with_images = [item for item in items if item.get("pixel_values") is not None]
    integers = {
        name: torch.cat([torch.empty(0, *shape, dtype=torch.int64), *(item[name] for item in with_images)])
        for name, shape in (image_integers or {}).items()
    }
    placed = [
        torch.arange(len(sample_ids)) if positions is None else positions(sample_ids, item)
        for sample_ids, item in zip(ids, items or [{}], strict=True)
    ]
    pixels = [item["pixel_values"].to(pixel_dtype) for item in with_images]
    return {
        "input_ids": torch.cat(ids).unsqueeze(0),
        "labels": torch.cat(labels).unsqueeze(0),
        "position_ids": torch.cat(placed, dim=-1).unsqueeze(-2),
        "cu_seq_lens": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        "pixel_values": torch.cat([torch.empty(0, *pixel_shape, dtype=pixel_dtype), *pixels]),
        **integers,
    }
