"""Annotation files that are read line by line, as they are needed: nothing of them is known beforehand."""

import codecs
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from omnibal.errors import ConfigError, DataError, said, shortened
from omnibal.formats.images import MOST_PIXELS
from omnibal.formats.model_format import ModelFormat
from omnibal.formats.records import parse_entry
from omnibal.formats.samples import pixels_of, prepare, text_of
from omnibal.formats.shards import AnnotationFile, named_files, names_of
from omnibal.formats.survey import Broken, Problem

LOG = logging.getLogger(__name__)


class _Place(NamedTuple):
    """Where a file goes on: lines before it, and bytes."""

    lines: int
    offset: int


_START = _Place(0, 0)


class ConversationStream:
    """The samples of an annotation file (JSON lines) in their order; it goes on where it stood without reading again.

    Args:
        file: What is read.
        model_format: Turns conversations and images into what the model reads.
        broken: What happens to items that cannot be used: an error, or a warning for each.
        workers: Processes that read; 0 for none beside this one.
        share: (rank, ranks): of n ranks each reads every n-th line.
    """

    def __init__(
        self, file: AnnotationFile, model_format: ModelFormat, *, broken: Broken, workers: int, share: tuple[int, int]
    ) -> None:
        self._file, self._format, self._broken, self._workers, self._share = file, model_format, broken, workers, share
        self._begins = self._place = _START

    @property
    def added_end(self) -> str:
        """What ends each answer where the model's chat template writes nothing; empty where it does."""
        return self._format.added_end

    def part(self, rank: int, num_ranks: int) -> "ConversationStream":
        """Every ``num_ranks``-th line; the others are not parsed."""
        return ConversationStream(
            self._file, self._format, broken=self._broken, workers=self._workers, share=(rank, num_ranks)
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        lines = _Samples(self._file, self._format, self._share, self._begins)
        self._begins = _START
        # A generator of its own, since this is drawn in a thread beside the model's.
        loader = DataLoader(
            lines, batch_size=None, collate_fn=_as_it_is, num_workers=self._workers, generator=torch.Generator()
        )
        for place, found in loader:
            self._place = place
            if isinstance(found, Problem) and self._broken == "error":
                raise DataError(str(found))
            if isinstance(found, Problem):
                LOG.warning("A sample is left out: %s", found)
            elif found is not None:  # copied, since what another process has sent keeps a file open for each tensor
                yield {name: None if value is None else value.clone() for name, value in found.items()}

    def state_dict(self) -> dict[str, int]:
        """The place behind the item that was yielded last."""
        return self._place._asdict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next iteration begin at a place."""
        self._begins = self._place = _Place(**state)


class _Samples(IterableDataset[tuple[_Place, Any]]):
    """Samples of a share of a file's lines, or what is wrong with one; None for a blank line.

    Workers take turns, line by line: so what they bring comes in the lines' order.
    """

    def __init__(self, file: AnnotationFile, model_format: ModelFormat, share: tuple[int, int], begun: _Place) -> None:
        self._file, self._format, self._share, self._begun = file, model_format, share, begun

    def __iter__(self) -> Iterator[tuple[_Place, Any]]:
        worker = get_worker_info()
        turn, turns = (0, 1) if worker is None else (worker.id, worker.num_workers)
        rank, num_ranks = self._share
        mine = -1
        with self._file.path.open("rb") as file:
            file.seek(self._begun.offset)
            for number, line in enumerate(file, start=self._begun.lines):
                if number % num_ranks == rank:
                    mine += 1
                    if mine % turns == turn:
                        yield _Place(number + 1, file.tell()), self._sample(number, line)

    def _sample(self, number: int, line: bytes) -> dict[str, Any] | Problem | None:
        if not line.strip():
            return None
        try:
            prepared = prepare(parse_entry(line), self._file.root, self._file.max_tiles, self._format)
            return {**text_of(prepared, self._format), **pixels_of(prepared, self._format)}
        except ConfigError:
            raise
        except ValueError as error:
            return Problem(self._file.path, number + 1, shortened(str(error)))


def open_streams(
    paths: str | Path | Sequence[str | Path],
    model_folder: str | Path,
    *,
    image_folder: str | Path | None = None,
    max_tiles: int | None = None,
    max_image_pixels: int = MOST_PIXELS,
    broken: Broken = "error",
    workers: int = 0,
) -> dict[str, ConversationStream]:
    """Opens annotation files as streams, by their names.

    Args:
        paths: As of ``open_dataset``, but of annotation files only JSON lines; so the others.
        model_folder: See there.
        image_folder: See there.
        max_tiles: See there.
        max_image_pixels: See there.
        broken: As of ``ConversationStream``.
        workers: Processes that read, about; each file has its own.

    Raises:
        DataError: A file cannot be read, is empty, or is a JSON array.
        ConfigError: As of ``open_dataset``.
    """
    model_format = ModelFormat(model_folder, max_tiles=max_tiles, max_image_pixels=max_image_pixels)
    files = named_files(paths, image_folder=image_folder)
    for file in files:
        _check_lines(file.path)
    each = -(-workers // len(files))
    streams = (ConversationStream(file, model_format, broken=broken, workers=each, share=(0, 1)) for file in files)
    return dict(zip(names_of(files), streams, strict=True))


def _check_lines(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    except OSError as error:
        raise DataError(f"annotation must be a readable file, got {path} ({said(error)})") from error
    if start in (b"", b"["):
        found = "a JSON array" if start else "nothing"
        raise DataError(f"annotation must be JSON lines to be read as a stream, got {found} in {path}")


def _as_it_is(item: Any) -> Any:
    return item
