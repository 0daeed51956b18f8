"""Packed collation: the samples of a pack, one after another in a single sequence, without padding.

Attention must not cross a sample: `cu_seq_lens` says where each one begins, and positions restart there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from omnibal.errors import DataError
from omnibal.formats.text import IGNORED as IGNORED  # noqa: PLC0414  (handed on)

Positions = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""From a sample's token ids (tokens,) and integers by their names to positions (rows, tokens), int64; a DataError says
why the two do not fit one another."""

GRIDS = "image_grid_thw"
"""Name of the integers of each image: its frames (one), and the rows and columns of its patches."""
VIDEO_GRIDS = "video_grid_thw"
"""Name of those of each video: its temporal slices, and the rows and columns of patches of each."""
VIDEO_TYPES: Final = ("qwen2_vl", "qwen2_5_vl")
SLICED_TYPES: Final = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5")
"""Models of which positions of videos are known; in the latter each temporal slice stands by itself."""


def uncollated(drawn: Any) -> Any:
    """A DataLoader's collation that changes nothing; a lambda could not be sent to its processes."""
    return drawn


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
        positions: Counts the positions of a sample's tokens; None to count them up in one row.

    Returns:
        ``input_ids``, ``labels``, ``position_ids`` (1, L) int64, positions of more rows (rows, 1, L); ``cu_seq_lens``
        (n + 1,) int32; ``pixel_values`` ``(tiles, *pixel_shape)``, tiles possibly 0; and the integers of all samples
        under each name of ``image_integers``. Labels are not shifted; each sample's first one is -100, so that no
        token is predicted from the sample before it.
    """
    if isinstance(positions, MropeRule):
        items = [positions.joined(item) for item in items]
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
        item["positions"]
        if "positions" in item
        else torch.arange(len(sample_ids))
        if positions is None
        else positions(sample_ids, item)
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


@dataclass(frozen=True)
class MropeRule:
    """How a model counts positions in time, height and width."""

    image_token_id: int
    merge_size: int
    video_token_id: int | None = None  # None where positions of the model's videos are not known here
    # Of Qwen2.5-VL, whose times are seconds; elsewhere temporal slices count by one.
    tokens_per_second: float | None = None
    # Whether each temporal slice of a video stands by itself, as in Qwen3-VL, where its time is written before it.
    separate_slices: bool = False

    @classmethod
    def of(cls, config: Any) -> "MropeRule":
        vision, kind = config.vision_config, config.model_type
        return cls(
            config.image_token_id,
            vision.spatial_merge_size,
            config.video_token_id if kind in (*VIDEO_TYPES, *SLICED_TYPES) else None,
            getattr(vision, "tokens_per_second", None) if kind == "qwen2_5_vl" else None,
            kind in SLICED_TYPES,
        )

    def __call__(self, ids: Tensor, sample: Mapping[str, Any]) -> Tensor:
        return mrope_positions(ids, sample, self)

    def joined(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        """A sample with its videos as if each temporal slice were an image, in the order of its text.

        The ViT's attention stays within a slice, and features take the place of tokens in their order: one pass of the
        ViT, and one kind of tokens, are all that layers need to know. ``positions`` are those of the sample as it was.
        """
        if item.get(VIDEO_GRIDS) is None:
            return item
        ids = item["input_ids"]
        rest = {1: item.get("pixel_values"), 2: item["pixel_values_videos"]}
        pixels, grids = list[Tensor](), list[list[int]]()
        for run in _runs(ids, item, self):
            if run.grid is not None:
                slices, rows, columns = run.grid
                count, of_kind = slices * rows * columns, rest[run.kind]
                assert of_kind is not None, "grids have pixels"
                pixels.append(of_kind[:count])
                rest[run.kind] = of_kind[count:]
                grids += [[1, rows, columns]] * slices
        return {
            "input_ids": torch.where(ids == self.video_token_id, self.image_token_id, ids),
            "labels": item["labels"],
            "pixel_values": torch.cat(pixels),
            GRIDS: torch.tensor(grids),
            "positions": self(ids, item),
        }


class _Run(NamedTuple):
    """Tokens that stand together: text, an image, a video or a slice of one."""

    length: int
    kind: int = 0  # 0 for text, 1 for images, 2 for videos
    grid: tuple[int, int, int] | None = None  # of patches
    seconds: Tensor | None = None  # of a temporal slice


def mrope_positions(ids: Tensor, sample: Mapping[str, Any], rule: MropeRule) -> Tensor:
    """Positions of a sample's tokens in time, height and width.

    Text counts up in all three. Tokens of an image or video count its slices, rows and columns from where it begins;
    the text behind goes on above the larger one of rows and columns, as transformers counts, whatever the slices.

    Returns:
        Int64 of shape (3, tokens).

    >>> ids, grid = torch.tensor([7, 3, 3, 8]), torch.tensor([[1, 2, 4]])
    >>> mrope_positions(ids, {"image_grid_thw": grid}, MropeRule(3, 2)).tolist()
    [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]
    """
    # Tokens are walked run by run; ``begin`` is the position of the next run.
    parts, begin = [torch.empty(3, 0, dtype=torch.int64)], 0
    for run in _runs(ids, sample, rule):
        if run.grid is None:
            parts.append(torch.arange(begin, begin + run.length).expand(3, -1))
            begin += run.length
            continue
        slices, rows, columns = run.grid[0], run.grid[1] // rule.merge_size, run.grid[2] // rule.merge_size
        times = torch.arange(slices)
        if (
            run.seconds is not None and rule.tokens_per_second is not None
        ):  # multiplied as transformers does, in the precision of the given seconds
            times = (times * (rule.tokens_per_second * run.seconds)).long()
        axes = torch.meshgrid(times, torch.arange(rows), torch.arange(columns), indexing="ij")
        parts.append(begin + torch.stack(axes).flatten(1))
        begin += max(rows, columns)
    return torch.cat(parts, dim=1)


def _runs(ids: Tensor, sample: Mapping[str, Any], rule: MropeRule) -> list[_Run]:
    """The runs of a sample's tokens, each with the grid that belongs to it; a DataError where the two do not fit."""
    is_video = torch.zeros_like(ids) if rule.video_token_id is None else (ids == rule.video_token_id).long()
    kinds = (ids == rule.image_token_id).long() + 2 * is_video
    found = list(zip(*(part.tolist() for part in torch.unique_consecutive(kinds, return_counts=True)), strict=True))
    grids = {1: _grids_of_images(sample), 2: _grids_of_videos(sample, rule)}
    for kind, name, pixels in ((1, GRIDS, "pixel_values"), (2, VIDEO_GRIDS, "pixel_values_videos")):
        given, got = sample.get(pixels), [length for other, length in found if other == kind]
        wanted = [prod(run.grid) // rule.merge_size**2 for run in grids[kind] if run.grid is not None]
        if got != wanted:
            raise DataError(
                f"{name[:5]} tokens must stand in runs of {wanted}, one for each grid of {name}, got runs of {got}"
            )
        patches = sum(prod(run.grid) for run in grids[kind] if run.grid is not None)
        if given is not None and len(given) != patches:
            raise DataError(f"{pixels} must be the {patches} patches of {name}, got {len(given)}")
    rest = {kind: iter(runs) for kind, runs in grids.items()}
    return [next(rest[kind])._replace(length=length) if kind else _Run(length) for kind, length in found]


def _grids_of_images(sample: Mapping[str, Any]) -> list[_Run]:
    grids = [] if sample.get(GRIDS) is None else sample[GRIDS].tolist()
    for frames, _, _ in grids:
        if frames != 1:
            raise DataError(f"{GRIDS} must be of images, got one of {frames} frames: a video")
    return [_Run(0, 1, tuple(grid)) for grid in grids]


def _grids_of_videos(sample: Mapping[str, Any], rule: MropeRule) -> list[_Run]:
    if sample.get(VIDEO_GRIDS) is None:
        return []
    grids: list[list[int]] = sample[VIDEO_GRIDS].tolist()
    if rule.separate_slices:
        return [_Run(0, 2, (1, rows, columns)) for slices, rows, columns in grids for _ in range(slices)]
    seconds: Any = [None] * len(grids)
    if rule.tokens_per_second is not None:
        given = sample.get("second_per_grid_ts")
        seconds = torch.ones(len(grids)) if given is None else torch.as_tensor(given)
    return [_Run(0, 2, (grid[0], grid[1], grid[2]), each) for grid, each in zip(grids, seconds, strict=True)]
