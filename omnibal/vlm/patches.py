"""Where patches and tokens are in the images of native-resolution models: integers that all follow from the data."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from omnibal.data.collate import GRIDS
from omnibal.vlm.payload import PackCounts, Payload, note_counts


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
