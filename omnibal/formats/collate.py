"""Packed collation: the samples of a pack, one after another in a single sequence, without padding.

Attention must not cross a sample: `cu_seq_lens` says where each one begins, and positions restart there.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from omnibal.errors import DataError

IGNORED = -100
"""Label of a token that carries no loss, as in transformers."""

Positions = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""From a sample's token ids (tokens,) and integers by their names to positions (rows, tokens), int64; a DataError says
why the two do not fit one another."""

GRIDS = "image_grid_thw"
"""Name of the integers of each image: its frames (one), and the rows and columns of its patches."""


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


def mrope_positions(ids: Tensor, sample: Mapping[str, Any], *, image_token_id: int, merge_size: int) -> Tensor:
    """Positions of a sample's tokens in time, height and width.

    Text counts up in all three. An image's tokens share one time and count its rows and columns from there; the text
    behind it goes on above the largest of them.

    Returns:
        Int64 of shape (3, tokens).

    >>> ids, grid = torch.tensor([7, 3, 3, 8]), torch.tensor([[1, 2, 4]])
    >>> mrope_positions(ids, {"image_grid_thw": grid}, image_token_id=3, merge_size=2).tolist()
    [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]
    """
    # Tokens are walked run by run, a run being text or one image; ``begin`` is the position of the next run.
    is_image, grids = ids == image_token_id, [] if sample.get(GRIDS) is None else sample[GRIDS].tolist()
    changes = [] if len(ids) == 0 else (torch.where(is_image.diff())[0] + 1).tolist()
    runs = [(bool(is_image[start]), stop - start) for start, stop in pairwise([0, *changes, len(ids)]) if start < stop]
    _check_grids(grids, [length for image, length in runs if image], merge_size, sample.get("pixel_values"))
    parts, begin, remaining = [torch.empty(3, 0, dtype=torch.int64)], 0, iter(grids)
    for image, length in runs:
        if image:
            _, rows, columns = (side // merge_size for side in next(remaining))
            place = torch.arange(length)
            parts.append(begin + torch.stack([torch.zeros_like(place), place // columns, place % columns]))
            begin += max(rows, columns)
        else:
            parts.append(torch.arange(begin, begin + length).expand(3, -1))
            begin += length
    return torch.cat(parts, dim=1)


def _check_grids(grids: Sequence[Sequence[int]], runs: Sequence[int], merge_size: int, pixels: Tensor | None) -> None:
    for frames, _, _ in grids:
        if frames != 1:
            raise DataError(f"{GRIDS} must be of images, got one of {frames} frames: a video")
    patches = [rows * columns for _, rows, columns in grids]
    wanted = [number // merge_size**2 for number in patches]
    if list(runs) != wanted:
        raise DataError(
            f"image tokens must stand in runs of {wanted}, one for each grid of {GRIDS}, got runs of {list(runs)}"
        )
    if pixels is not None and len(pixels) != sum(patches):
        raise DataError(f"pixel_values must be the {sum(patches)} patches of {GRIDS}, got {len(pixels)}")
