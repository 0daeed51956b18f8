"""Where patches and tokens are in the images of native-resolution models: integers that all follow from the data."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from omnibal.errors import DataError
from omnibal.vlm.payload import PackCounts, Payload, note_counts

GRIDS = "image_grid_thw"
"""Name of the integers of each image: its frames (one), and the rows and columns of its patches."""


def mrope_positions(ids: Tensor, sample: Mapping[str, Any], *, image_token_id: int, merge_size: int) -> Tensor:
    """Positions of a sample's tokens in time, height and width.

    Text counts up in all three. An image's tokens share one time and count its rows and columns from there; the text
    behind it goes on above the largest of them.

    Args:
        ids: Int64 of shape (tokens,).
        sample: Holds ``image_grid_thw`` if there are images.
        image_token_id: Stands for a piece of an image.
        merge_size: Patches, in each direction, that become one token.

    Returns:
        Int64 of shape (3, tokens).

    Raises:
        DataError: The image tokens, run by run, are not those of the grids, ``pixel_values`` are other patches, or a
            grid is a video's.

    >>> ids, grid = torch.tensor([7, 3, 3, 8]), torch.tensor([[1, 2, 4]])
    >>> mrope_positions(ids, {"image_grid_thw": grid}, image_token_id=3, merge_size=2).tolist()
    [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]
    """
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


class PatchPlaces(NamedTuple):
    """Where the patches of a pack are, in the order in which the ViT's blocks have them.

    Attributes:
        grids: As ``image_grid_thw``, on the host.
        rows_columns: Of each patch, of shape (patches, 2).
        images: Bounds of the images, int32 of shape (images + 1,).
        windows: Bounds of the windows; of the images where there are no windows.
        window_order: Which merged patch stands at each place, of shape (image tokens,); None where they are in order.
    """

    grids: Tensor
    rows_columns: Tensor
    images: Tensor
    windows: Tensor
    window_order: Tensor | None


def patch_places(payload: Payload, vision: Any) -> PatchPlaces:
    """The places of a pack's patches; made once for all layers of a stage, and kept with the pack's grids."""
    on_device = payload.integers[GRIDS]
    places: PatchPlaces | None = getattr(on_device, "_omnibal_places", None)
    if places is None:
        grids = torch.tensor(payload.on_host(GRIDS), dtype=torch.int64)
        places = _places(grids.view(-1, 3), vision, on_device.device)
        on_device._omnibal_places = places  # type: ignore[attr-defined]
    return places


def _places(grids: Tensor, vision: Any, device: torch.device) -> PatchPlaces:
    merge, order = vision.spatial_merge_size, None
    lengths = (grids[:, 1] * grids[:, 2]).tolist()
    window_lengths, rows_columns = lengths, torch.empty(0, 2, dtype=torch.int64)
    if lengths:
        rows_columns = get_vision_position_ids(grids, merge)
        if hasattr(vision, "window_size"):
            order, bounds = get_vision_window_index(grids, merge, vision.window_size, vision.patch_size)
            rows_columns, window_lengths = reordered(rows_columns, order), bounds.diff().tolist()
    return PatchPlaces(
        grids,
        sent_to(rows_columns, device),
        bounds_of(lengths, device),
        bounds_of(window_lengths, device),
        None if order is None else sent_to(order, device),
    )


def bounds_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Bounds of segments, int32 of shape (segments + 1,), for ``attention_kwargs``; the host knows them."""
    bounds = sent_to(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)
    note_counts([bounds], PackCounts(None, tuple(lengths)))
    return bounds


def sent_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device; from pinned memory, since the host would wait for a GPU otherwise."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def reordered(patches: Tensor, order: Tensor) -> Tensor:
    """Patches (patches, …) in another order of the squares that are merged."""
    squares = patches.view(len(order), -1, *patches.shape[1:])
    return squares[order].flatten(0, 1)
