"""Conversations about images as samples for training: a dataset that is read by number, and streams."""

# ruff: noqa: E402
from omnibal.errors import require
from omnibal.processes import leave_ends_to_parent

require("torch")  # what is missing is said before it is missed

import codecs
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from omnibal.data.lengths import SampleLengths
from omnibal.data.packing_spec import Mixture
from omnibal.errors import ConfigError, DataError, said
from omnibal.families.base import WINDOWS
from omnibal.formats.chat import read_conversation
from omnibal.formats.collate import uncollated
from omnibal.formats.files import RowPosition, files_of, is_table, stream_rows
from omnibal.formats.measured import (
    COLUMNS,
    Broken,
    Found,
    LengthsCache,
    Measured,
    lengths_of,
    settle_problems,
    survey,
)
from omnibal.formats.media import MOST_PIXELS
from omnibal.formats.model_format import ModelFormat, Prepared
from omnibal.formats.rows import Problem, Row, is_tar
from omnibal.formats.shards import AnnotationFile, Ids, Shard, Shards, among_all, named_files, names_of, open_shards
from omnibal.formats.text import encode

CHECKED_SAMPLES: Final = 64  # that are measured again before kept lengths are believed
DECODED_ITEMS: Final = 5000  # most items whose files are decoded unasked when lengths are measured

T = TypeVar("T")

LOG = logging.getLogger(__name__)


class ConversationDataset:
    """Samples from several annotation files: each file's items in order, then again as often as it repeats.

    With ``broken="error"`` `lengths` refuses all items that cannot be used in one report, and ``[i]`` each by itself;
    with ``"skip"`` they are left out with a warning, and every file is read at once to find them: all of it if it is
    decoded, else its header.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        model_format: ModelFormat,
        *,
        broken: Broken = "error",
        decode: bool | None = None,
        processes: int | None = None,
        cache: str | Path | None = None,
        measured: bool = False,
    ) -> None:
        self.shards = tuple(shards)
        self.skipped: tuple[Problem, ...] = ()  # what was left out, and why
        self._all = Shards(self.shards)
        self._format = model_format
        self._broken = broken
        self._decodes = self._all.num_used_items <= DECODED_ITEMS if decode is None else decode
        self._processes = processes
        # Lengths are found again where annotations, model folder and settings are the same; images are taken to be
        # unchanged if a few of them are.
        self._cache = None if cache is None else LengthsCache(Path(cache), self._made_from())
        # Another process of the run has just measured these samples: take its lengths, and do not report again.
        self._is_measured = measured
        self._left_out: Ids = np.empty(0, dtype=np.int64)
        if broken == "skip":
            self.skipped = self._measured.problems
            if not measured:
                settle_problems(self.skipped, self._all.num_used_items, "skip")
            self._left_out = self._all.samples_of(self._measured.broken_items)

    @property
    def tokenizer(self) -> Any:
        return self._format.tokenizer

    @property
    def added_end(self) -> str:
        """What ends each answer where the model's chat template writes nothing; empty where it does."""
        return self._format.added_end

    def __len__(self) -> int:
        return self._all.num_samples - len(self._left_out)

    def __getstate__(self) -> dict[str, Any]:
        """Processes that load samples need no lengths."""
        return {name: value for name, value in self.__dict__.items() if name != "_measured"}

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample for training: ``input_ids`` and ``labels`` (tokens,) int64, ``pixel_values`` float32 or None.

        InternVL's pixels are tiles, (tiles, 3, H, W). What else the model takes comes by the names of its arguments.
        """
        return self._sample(index, with_pixels=True)

    def text(self, index: int) -> dict[str, Any]:
        """What ``[index]`` returns, but ``pixel_values`` is None: headers are read, no image is decoded."""
        return self._sample(index, with_pixels=False)

    def lengths(self) -> SampleLengths:
        """The loads of all samples, ``source`` being the number of the shard; every file's header is read once.

        If files are decoded, those that cannot be are found now.
        """
        if self._broken == "error":
            settle_problems(self._measured.problems, self._all.num_used_items, "error")
        return self._measured.lengths

    def repeat_time(self) -> Mixture:
        """The mixture that gives each source what its meta file repeats of it, each epoch other items of it."""
        repeats = [shard.num_samples if shard.repeated is None else shard.repeated for shard in self.shards]
        return Mixture(dict(zip(names_of(self.shards), repeats, strict=True)), epoch_samples=sum(repeats))

    @cached_property
    def _measured(self) -> Measured:
        kept = self._cache.load() if self._cache else None
        if kept is None and self._is_measured:
            folder = self._cache.path if self._cache else "no cache"
            raise DataError(f"lengths must be kept where another process has measured the samples, got none: {folder}")
        if kept is not None and (self._is_measured or self._still_true(kept)):
            return kept
        measured = self._measure_all()
        if not self._cache:
            return measured
        self._cache.save(measured)
        return self._cache.load() or measured  # memory-mapped

    def _measure_all(self) -> Measured:
        items = self._all.used_items()
        name = "decoding" if self._decodes else "lengths"
        found = survey(self._measure, items, len(COLUMNS), processes=self._processes, decodes=self._decodes, name=name)
        samples = np.arange(self._all.num_samples)
        rows = np.searchsorted(items, self._all.item_of(samples))
        usable = found.usable[rows]
        lengths = lengths_of(
            found.loads[rows[usable]],
            source=self._all.source_of(samples[usable]),
            source_names=names_of(self.shards),
            unit_name=None if self._format.family.sees else WINDOWS,
        )
        return Measured(lengths, found.problems, items[~found.usable])

    def _still_true(self, kept: Measured) -> bool:
        """Whether the broken items and a few others, spread over the data, are found as they were."""
        left_out = self._all.samples_of(kept.broken_items)
        num_usable = self._all.num_samples - len(left_out)
        if not num_usable:
            return False
        some = np.unique(np.linspace(0, num_usable - 1, CHECKED_SAMPLES, dtype=np.int64))
        usable = self._all.item_of(among_all(some, left_out))
        again = self._measure(np.concatenate([kept.broken_items, usable]))
        columns = kept.lengths.take(some).columns()
        loads = zip(*(columns.get(name, np.zeros_like(some)).tolist() for name in COLUMNS), strict=True)
        return again == [*kept.problems, *loads]

    def _made_from(self) -> Any:
        # Absolute paths, unresolved: hosts may differ in where a link leads.
        shards = [
            (s.rows.content_hash, s.rows.path.absolute(), s.root.absolute(), s.num_samples, s.max_tiles, s.name)
            for s in self.shards
        ]
        return shards, self._format.fingerprint, self._decodes

    def _measure(self, items: Ids) -> Found:
        # Texts are tokenised together.
        found = [self._prepared(item) for item in items.tolist()]
        encoded = iter(encode(self.tokenizer, [entry.rendered for entry in found if isinstance(entry, Prepared)]))
        return [entry if isinstance(entry, Problem) else entry.loads(next(encoded)) for entry in found]

    def _prepared(self, item: int) -> Prepared | Problem:
        shard, number = self._all.locate(item)
        row = shard.rows[number]

        def prepare() -> Prepared:
            prepared = _prepare(row, shard, self._format)
            if self._decodes:
                self._format.check_decodes(prepared)
            return prepared

        return _or_problem(row, prepare)

    def row_of(self, index: int) -> Row:
        return self._located(index)[0]

    def _located(self, index: int) -> tuple[Row, Shard]:
        sample = range(len(self))[index]
        item = self._all.item_of(among_all(np.asarray(sample), self._left_out))
        shard, number = self._all.locate(int(item))
        return shard.rows[number], shard

    def _sample(self, index: int, *, with_pixels: bool) -> dict[str, Any]:
        row, shard = self._located(index)
        found = _or_problem(
            row, lambda: self._format.sample(_prepare(row, shard, self._format), with_pixels=with_pixels)
        )
        if isinstance(found, Problem):
            raise DataError(str(found))
        return found


def _prepare(row: Row, file: Shard | AnnotationFile, model_format: ModelFormat) -> Prepared:
    return model_format.prepare(read_conversation(row.read(), file.root), file.max_tiles)


def _or_problem(row: Row, work: Callable[[], T]) -> T | Problem:
    """What work on a row returns, or what is wrong with the row; what is wrong with the model's folder is raised."""
    try:
        return work()
    except ConfigError:
        raise
    except ValueError as error:
        return row.problem(error)


def open_dataset(
    paths: Any,
    model_folder: str | Path,
    *,
    image_folder: str | Path | None = None,
    max_tiles: int | None = None,
    min_tiles: int | None = None,
    max_image_pixels: int = MOST_PIXELS,
    broken: Broken = "error",
    decode: bool | None = None,
    processes: int | None = None,
    cache: str | Path | None = None,
    measured: bool = False,
    each_once: bool = False,
) -> ConversationDataset:
    """Open a dataset, whatever its format.

    Args:
        paths: A path or several: of InternVL meta files, of JSON lines or a JSON array, of tar shards, Parquet files,
            folders of such files of one kind, or folders that Hugging Face ``datasets`` saved; or a ``Dataset`` of
            theirs. Records may be any that `omnibal.formats.chat` reads.
        image_folder: What the images of annotation files are relative to, by default each file's own folder; a meta
            file names its own.
        max_tiles: Most tiles of an image, its thumbnail not counted, where the family has such a limit; what the
            model's folder says by default. A dataset's own ``max_dynamic_patch`` in a meta file goes first.
        min_tiles: Fewest tiles of an image; what the model's folder says by default.
        max_image_pixels: The most pixels of an image file; one that has more counts as broken.
        decode: Whether images, videos and sounds are decoded when lengths are measured, so that all broken ones are
            known before training; by default if there are at most 5,000 items.
        processes: Most processes that read files and count tokens; by default one per core, at most 32.
        cache: Folder that keeps lengths for the next run.
        measured: Whether another process of the run has just written the lengths into ``cache``.
        each_once: Whether every item is one sample, whatever a meta file repeats: mixtures draw it as often as they
            want.
    """
    model_format = ModelFormat(
        model_folder, max_tiles=max_tiles, min_tiles=min_tiles, max_image_pixels=max_image_pixels
    )
    index = None if cache is None else Path(cache) / "annotations"
    shards = open_shards(paths, image_folder=image_folder, index=index)
    if each_once:
        shards = [replace(shard, num_samples=len(shard.rows), repeated=shard.num_samples) for shard in shards]
    return ConversationDataset(
        shards, model_format, broken=broken, decode=decode, processes=processes, cache=cache, measured=measured
    )


class LeftOut:
    """How many samples of a stream, all its parts and copies, this process has left out."""

    count = 0

    def __deepcopy__(self, _memo: Any) -> "LeftOut":
        return self


class ConversationStream:
    """The samples of a file or folder in their order; a resumed stream begins at its saved position."""

    def __init__(self, file: AnnotationFile, model_format: ModelFormat, *, broken: Broken, workers: int) -> None:
        self._file, self._format, self._broken, self._workers = file, model_format, broken, workers
        self._share = 0, 1  # (rank, ranks): of n ranks each reads every n-th row
        self.left_out = LeftOut()
        self._begins = self._position = RowPosition()

    @property
    def added_end(self) -> str:
        return self._format.added_end

    def part(self, rank: int, num_ranks: int) -> "ConversationStream":
        """Every ``num_ranks``-th row; the others are not parsed."""
        part = copy(self)  # counts what it leaves out with the whole
        part._share = rank, num_ranks
        return part

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = _Samples(self._file, self._format, self._share, self._begins)
        self._begins = RowPosition()
        # A generator of its own, since this is drawn in a thread beside the model's.
        loader = DataLoader(
            rows,
            batch_size=None,
            collate_fn=uncollated,
            num_workers=self._workers,
            generator=torch.Generator(),
            worker_init_fn=leave_ends_to_parent,
        )
        for position, found in loader:
            self._position = position
            if isinstance(found, Problem) and self._broken == "error":
                raise DataError(str(found))
            if isinstance(found, Problem):
                self.left_out.count += 1
                LOG.warning("A sample is left out: %s", found)
            else:  # copied, since what another process has sent keeps a file open for each tensor
                yield {name: None if value is None else value.clone() for name, value in found.items()}

    def state_dict(self) -> dict[str, int]:
        return self._position._asdict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._begins = self._position = RowPosition(**state)


class _Samples(IterableDataset[tuple[RowPosition, dict[str, Any] | Problem]]):
    """Samples of a share of a file's rows, or what is wrong with one.

    DataLoader asks its workers in turn, one item of each. Worker w of n reads every n-th row of the share from the w-th
    on, so what the workers bring comes in the order of the rows.
    """

    def __init__(
        self, file: AnnotationFile, model_format: ModelFormat, share: tuple[int, int], begin: RowPosition
    ) -> None:
        self._file, self._format, self._share, self._begin = file, model_format, share, begin

    def __iter__(self) -> Iterator[tuple[RowPosition, dict[str, Any] | Problem]]:
        worker = get_worker_info()
        turn, turns = (0, 1) if worker is None else (worker.id, worker.num_workers)
        rank, num_ranks = self._share
        rows = stream_rows(self._file.path, self._begin)
        share = (found for found in rows if (found[1].number - 1) % num_ranks == rank)
        for position, row in islice(share, turn, None, turns):
            yield position, _or_problem(row, partial(self._read, row))

    def _read(self, row: Row) -> dict[str, Any]:
        return self._format.sample(_prepare(row, self._file, self._format), with_pixels=True)


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
    """Open annotation files (no JSON arrays) as streams, by their names; about ``workers`` processes read them."""
    model_format = ModelFormat(model_folder, max_tiles=max_tiles, max_image_pixels=max_image_pixels)
    files = named_files(paths, image_folder=image_folder)
    for file in files:
        try:
            for path in files_of(file.path):
                _check_lines(path)
        except OSError as error:
            raise DataError(f"annotation must be a readable file, got {file.path} ({said(error)})") from error
    each = -(-workers // len(files))
    streams = (ConversationStream(file, model_format, broken=broken, workers=each) for file in files)
    return dict(zip(names_of(files), streams, strict=True))


def _check_lines(path: Path) -> None:
    if path.is_dir() or is_tar(path) or is_table(path):
        return
    with path.open("rb") as file:
        start = file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if start in (b"", b"["):
        found = "a JSON array" if start else "nothing"
        raise DataError(f"annotation must be JSON lines to be read as a stream, got {found} in {path}")
