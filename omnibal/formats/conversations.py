"""A dataset of conversations about images, read from annotation files; formats differ only in where those stand."""

# ruff: noqa: E402
from omnibal.errors import require

require("torch")  # what is missing is said before it is missed

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from omnibal.data.lengths import SampleLengths
from omnibal.data.mixture import Mixture
from omnibal.errors import ConfigError, DataError
from omnibal.formats.cache import LengthsCache, survey_in_blocks
from omnibal.formats.images import MOST_PIXELS
from omnibal.formats.model_format import ModelFormat
from omnibal.formats.samples import Prepared, pixels_of, prepare, text_of
from omnibal.formats.shards import Ids, Shard, Shards, names_of, open_shards
from omnibal.formats.survey import Broken, Found, Loads, Measured, Problem, settle_problems
from omnibal.formats.text import Encoded, encode

COLUMNS = ("vision_units", "llm_tokens", "target_tokens", "vision_squared")
CHECKED_SAMPLES = 64
"""Samples that are measured again before kept lengths are believed."""


class ConversationDataset:
    """Samples from several annotation files: each file's items in order, then again as often as it repeats.

    Args:
        shards: The annotation files.
        model_format: Turns conversations and images into what the model reads.
        broken: What happens to items that cannot be used. ``"error"``: `lengths` refuses them all in one report, and
            ``[i]`` each by itself. ``"skip"``: they are left out with a warning; to know them, every image's header is
            read at once.
        processes: Most processes that read headers and count tokens; by default as many as there are cores, at most 32.
        cache: Folder that keeps lengths for the next run, None for none. They are found again where annotations, model
            folder and settings are the same; images are taken to be unchanged if a few of them are. A pass that is
            interrupted goes on, next time, after the last 131,072 items that were complete.
        measured: Whether another process of the run has just measured these samples, or found kept lengths to be true:
            they are then taken from ``cache``, nothing is measured, and what is left out is not reported once more.

    Attributes:
        shards: The annotation files.
        skipped: What was left out, and why.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        model_format: ModelFormat,
        *,
        broken: Broken = "error",
        processes: int | None = None,
        cache: str | Path | None = None,
        measured: bool = False,
    ) -> None:
        self.shards = tuple(shards)
        self.skipped: tuple[Problem, ...] = ()
        self._all = Shards(self.shards)
        self._format = model_format
        self._broken = broken
        self._processes = processes
        self._cache = None if cache is None else LengthsCache(Path(cache), self._made_from())
        self._is_measured = measured
        self._left_out: Ids = np.empty(0, dtype=np.int64)
        if broken == "skip":
            self._skip_problems()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
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
        """One sample for training.

        Returns:
            ``input_ids`` and ``labels`` (tokens,) int64, ``pixel_values`` float32 or None: InternVL's are tiles,
            (tiles, 3, H, W). What else the model takes of images comes by the names of its arguments.

        Raises:
            DataError: If the sample cannot be used; names the file and the line.
        """
        return self._sample(index, with_pixels=True)

    def text(self, index: int) -> dict[str, Any]:
        """What ``[index]`` returns, but ``pixel_values`` is None: headers are read, no image is decoded."""
        return self._sample(index, with_pixels=False)

    def lengths(self) -> SampleLengths:
        """The loads of all samples, ``source`` being the number of the shard; every image's header is read once.

        Raises:
            DataError: If there are items that cannot be used and are not skipped; lists the first few and how many.
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
            place = self._cache.path if self._cache else "no cache"
            raise DataError(f"lengths must be kept where another process has measured the samples, got none: {place}")
        if kept is not None and (self._is_measured or self._still_true(kept)):
            return kept
        measured = self._measure_all()
        if not self._cache:
            return measured
        self._cache.save(measured)
        return self._cache.load() or measured  # memory-mapped

    def _measure_all(self) -> Measured:
        items = self._all.used_items()
        folder = self._cache.unfinished if self._cache else None
        found = survey_in_blocks(self._measure, items, len(COLUMNS), processes=self._processes, folder=folder)
        samples = np.arange(self._all.num_samples)
        rows = np.searchsorted(items, self._all.item_of(samples))
        usable = found.usable[rows]
        columns = dict(zip(COLUMNS, found.loads[rows[usable]].T, strict=True))
        if not columns["vision_squared"].any():
            del columns["vision_squared"]
        source = self._all.source_of(samples[usable])
        lengths = SampleLengths(**columns, source=source, source_names=names_of(self.shards))
        return Measured(lengths, found.problems, items[~found.usable])

    def _still_true(self, kept: Measured) -> bool:
        """Whether the broken items and a few others, spread over the data, are found as they were."""
        left_out = self._all.samples_of(kept.broken_items)
        num_usable = self._all.num_samples - len(left_out)
        if not num_usable:
            return False
        some = np.unique(np.linspace(0, num_usable - 1, CHECKED_SAMPLES, dtype=np.int64))
        usable = self._all.item_of(_place_among_all(some, left_out))
        again = self._measure(np.concatenate([kept.broken_items, usable]))
        columns = kept.lengths.take(some).columns()
        loads = zip(*(columns.get(name, np.zeros_like(some)).tolist() for name in COLUMNS), strict=True)
        return again == [*kept.problems, *loads]

    def _skip_problems(self) -> None:
        self.skipped = self._measured.problems
        if not self._is_measured:
            settle_problems(self.skipped, self._all.num_used_items, "skip")
        self._left_out = self._all.samples_of(self._measured.broken_items)

    def _made_from(self) -> Any:
        shards = [
            (
                shard.records.content_hash,
                shard.records.path.absolute(),  # hosts may differ in where a link leads
                shard.root.absolute(),
                shard.num_samples,
                shard.max_tiles,
                shard.name,
            )
            for shard in self.shards
        ]
        return shards, self._format.fingerprint

    def _measure(self, items: Ids) -> Found:
        """Loads of some items; their texts are tokenised together."""
        found = [self._prepare_or_report(item) for item in items.tolist()]
        encoded = iter(encode(self.tokenizer, [entry.rendered for entry in found if isinstance(entry, Prepared)]))
        return [entry if isinstance(entry, Problem) else _loads(entry, next(encoded)) for entry in found]

    def _sample(self, index: int, *, with_pixels: bool) -> dict[str, Any]:
        sample = range(len(self))[index]
        item = self._all.item_of(_place_among_all(np.asarray(sample), self._left_out))
        shard, place = self._all.locate(int(item))
        try:
            prepared = self._prepare(shard, place)
            pixels = pixels_of(prepared, self._format) if with_pixels else {"pixel_values": None}
        except ConfigError:
            raise
        except ValueError as error:
            raise DataError(str(shard.problem(place, error))) from error
        return {**text_of(prepared, self._format), **pixels}

    def _prepare_or_report(self, item: int) -> Prepared | Problem:
        shard, place = self._all.locate(item)
        try:
            return self._prepare(shard, place)
        except ConfigError:
            raise
        except ValueError as error:
            return shard.problem(place, error)

    def _prepare(self, shard: Shard, place: int) -> Prepared:
        return prepare(shard.records[place], shard.root, shard.max_tiles, self._format)


def open_dataset(
    paths: str | Path | Sequence[str | Path],
    model_folder: str | Path,
    *,
    image_folder: str | Path | None = None,
    max_tiles: int | None = None,
    min_tiles: int | None = None,
    max_image_pixels: int = MOST_PIXELS,
    broken: Broken = "error",
    processes: int | None = None,
    cache: str | Path | None = None,
    measured: bool = False,
    each_once: bool = False,
) -> ConversationDataset:
    """Opens a dataset, whatever its format.

    Args:
        paths: InternVL meta file or annotations as LLaVA has them (a JSON array or JSON lines), or several.
        model_folder: Hugging Face folder of the model: ``config.json``, ``preprocessor_config.json``, tokenizer.
        image_folder: What the images of annotation files are relative to, by default each file's own folder; a meta
            file names its own.
        max_tiles: Most tiles of an image, its thumbnail not counted, where the family has such a limit; what the
            model's folder says by default. A dataset's own ``max_dynamic_patch`` in a meta file goes first.
        min_tiles: Fewest tiles of an image; what the model's folder says by default.
        max_image_pixels: The most pixels of an image file; one that has more counts as broken.
        broken: See `ConversationDataset`; so ``processes``, ``cache`` and ``measured``.
        processes: See there.
        cache: See there.
        measured: See there.
        each_once: Whether every item is one sample, whatever a meta file repeats: for mixtures, which draw it as often
            as they want it.

    Raises:
        DataError: If a file cannot be used.
        ConfigError: If the model's folder cannot be used, or an image folder is given for a meta file.
    """
    model_format = ModelFormat(
        model_folder, max_tiles=max_tiles, min_tiles=min_tiles, max_image_pixels=max_image_pixels
    )
    index = None if cache is None else Path(cache) / "annotations"
    shards = open_shards(paths, image_folder=image_folder, index=index)
    if each_once:
        shards = [replace(shard, num_samples=len(shard.records), repeated=shard.num_samples) for shard in shards]
    return ConversationDataset(shards, model_format, broken=broken, processes=processes, cache=cache, measured=measured)


def _place_among_all(usable: Ids, left_out: Ids) -> Ids:
    """From numbers that count usable samples to those that count all; ``left_out`` is ascending."""
    usable_before = left_out - np.arange(len(left_out))
    return usable + np.searchsorted(usable_before, usable, side="right")


def _loads(sample: Prepared, encoded: Encoded) -> Loads:
    """Loads in the order of the columns; in ``encoded`` every image is still one token."""
    image_tokens = sum(load.llm_tokens - 1 for load in sample.loads)
    return (
        sum(load.vision_units for load in sample.loads),
        len(encoded.ids) + image_tokens,
        int(encoded.is_target[1:].sum()),
        sum(load.vision_squared for load in sample.loads),
    )
