"""What ranks tell each other about a step before they plan it: integers, in one all-gather."""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from omnibal.cost import IntArray
from omnibal.dispatch.step_plan import COLUMNS
from omnibal.errors import ConfigError, DataError
from omnibal.integrations.packing import PER_IMAGE
from omnibal.ranks import gather

TOLD: Final = (*COLUMNS, *PER_IMAGE)
"""Of each sample: what a plan needs, and the rows of each tensor of its images (tiles, patches, images)."""
SIZED: Final = frozenset({"image_sizes", "pixel_attention_mask"})
"""Tensors that tell how much of an image is real: beside them smaller images may be padded to the largest."""
DTYPES: Final = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
MOST_DIMENSIONS: Final = 4
"""Of a row of an image's tensor."""

Shape = tuple[tuple[int, ...], torch.dtype]
"""Of one row: a tile, a patch, an image."""
Shapes = dict[str, Shape]


class LengthsExchange:
    """Gathers the lengths of a step's samples from all ranks.

    A record of a rank has as many integers on all ranks: where this rank stands, how rows of its images are shaped, and
    lengths of as many samples as any rank has ever drawn in a step. It is gathered a second time where a rank has more.
    Only what has gone wrong travels as objects.

    Args:
        group: Over gloo.
        settings: What ranks must have alike to make the same plans.
    """

    def __init__(self, group: dist.ProcessGroup | None, settings: str) -> None:
        self._group, self._settings = group, settings
        self._ranks, self._room = dist.get_process_group_ranks(group), 0

    def gather(
        self, drawn: tuple[Sequence[IntArray], Shapes] | DataError, iteration: int, step: int
    ) -> tuple[list[list[IntArray]], Shapes]:
        """Lengths of all ranks and their micro-batches, each (len(TOLD), samples), and the largest rows of images.

        Args:
            drawn: Lengths of this rank's micro-batches, and rows of its images; or why there are none.
            iteration: Of the loader, the same on all ranks.
            step: Of the iteration, the same on all ranks.

        Raises:
            DataError: On all ranks alike: one has failed, or its images are unlike those of another rank.
            ConfigError: On all ranks alike: one has other settings, or stands elsewhere.
        """
        batches, shapes = ((), {}) if isinstance(drawn, DataError) else drawn
        numbers = np.repeat(np.arange(len(batches)), [lengths.shape[1] for lengths in batches])
        samples = np.concatenate([numbers[None], np.concatenate([np.zeros((len(TOLD), 0)), *batches], axis=1)]).T
        settings = int.from_bytes(sha256(self._settings.encode()).digest()[:8], "little") >> 1
        agreed = [isinstance(drawn, DataError), settings, iteration, step]
        head = np.array([*agreed, len(batches), len(samples), *_encoded(shapes)], dtype=np.int64)
        while True:
            records = self._gathered(head, samples.astype(np.int64))
            if records[:, 0].any() or (records[:, : len(agreed)] != records[0, : len(agreed)]).any():
                self._explain(drawn, iteration, step)
            counts = records[:, len(agreed) + 1]
            if counts.max() <= self._room:
                break
            self._room = 1 << int(counts.max() - 1).bit_length()
        of_ranks = []
        for record, count, batches_there in zip(records, counts, records[:, len(agreed)], strict=True):
            number, *lengths = record[len(head) :].reshape(-1, 1 + len(TOLD))[:count].T
            of_ranks.append([np.stack(lengths)[:, number == batch] for batch in range(batches_there)])
        rows = [
            (f"rank {rank}: ", name, shape)
            for rank, record in zip(self._ranks, records, strict=True)
            for name, shape in _decoded(record[len(agreed) + 2 : len(head)]).items()
        ]
        return of_ranks, largest_rows(rows)

    def _gathered(self, head: IntArray, samples: IntArray) -> IntArray:
        """Records of all ranks, (ranks, integers): head, and as many samples as there is room for."""
        own = np.zeros((self._room, 1 + len(TOLD)), dtype=np.int64)
        own[: len(samples)] = samples[: self._room]
        record = torch.from_numpy(np.concatenate([head, own.ravel()]))
        records = record.new_empty((len(self._ranks), len(record)))
        dist.all_gather([*records], record, group=self._group)
        found: IntArray = records.numpy()
        return found

    def _explain(self, drawn: object, iteration: int, step: int) -> None:
        """Raise what differs between ranks, on all of them."""
        told = gather(drawn if isinstance(drawn, DataError) else (self._settings, iteration, step), group=self._group)
        for rank, (settings, *place) in zip(self._ranks, told, strict=True):
            if settings != told[0][0]:
                expected = f"those of rank {self._ranks[0]}, {told[0][0]}"
                raise ConfigError(f"rank {rank}: settings must be {expected}, got {settings}")
            if place != [*told[0][1:]]:
                here, there = (f"step {step} of iteration {iteration}" for iteration, step in (place, told[0][1:]))
                expected = f"stand at {there}, as on rank {self._ranks[0]}"
                raise ConfigError(f"rank {rank}: the loader must {expected}, got {here}")


def rows_of_images(samples: Iterable[Mapping[str, Tensor]]) -> Shapes:
    """The largest row of each tensor of a rank's images.

    Raises:
        DataError: Rows are unlike each other, or such as no model takes.
    """
    rows = [
        ("", name, (tuple(of[name].shape[1:]), of[name].dtype)) for of in samples for name in PER_IMAGE if name in of
    ]
    for _, name, (shape, dtype) in rows:
        if len(shape) > MOST_DIMENSIONS or dtype not in DTYPES:
            got = f"{shape} of {dtype}"
            raise DataError(f"rows of {name} must have at most {MOST_DIMENSIONS} dimensions of numbers, got {got}")
    return largest_rows(rows)


def largest_rows(rows: Iterable[tuple[str, str, Shape]]) -> Shapes:
    """Of each name the largest row: images may differ where tensors beside them tell how much of an image is real.

    Args:
        rows: Where each was found, the tensor's name, and the shape.

    Raises:
        DataError: Rows of a tensor are unlike each other.
    """
    rows, found = [*rows], dict[str, Shape]()
    may_differ = any(name in SIZED for _, name, _ in rows)
    for where, name, (shape, dtype) in rows:
        most, kind = found.setdefault(name, (shape, dtype))
        if (len(most), kind) != (len(shape), dtype) or (most != shape and not may_differ):
            got = f"{most} of {kind}, got {shape} of {dtype}"
            raise DataError(f"{where}rows of {name} must be alike in all samples, {got}")
        found[name] = tuple(map(max, most, shape)), kind
    return found


def _encoded(shapes: Shapes) -> list[int]:
    """Of each of ``PER_IMAGE``: 1 + the number of its type, or 0 where there is none; dimensions; sizes."""
    numbers = []
    for name in PER_IMAGE:
        shape, dtype = shapes.get(name, ((), None))
        padding = [0] * (MOST_DIMENSIONS - len(shape))
        numbers += [0 if dtype is None else 1 + DTYPES.index(dtype), len(shape), *shape, *padding]
    return numbers


def _decoded(numbers: IntArray) -> Shapes:
    rows = zip(PER_IMAGE, numbers.reshape(len(PER_IMAGE), -1).tolist(), strict=True)
    return {name: (tuple(sizes[:count]), DTYPES[kind - 1]) for name, (kind, count, *sizes) in rows if kind}
