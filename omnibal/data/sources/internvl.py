"""Datasets as InternVL's own trainer takes them: a meta file that names files of conversations.

    {"shapes": {"root": "images/", "annotation": "train.jsonl", "repeat_time": 1, "length": 1000}, …}

Format: https://internvl.readthedocs.io, "Chat Data Format". ``repeat_time`` may be any positive number: 0.5 takes the
first half of the file and 2.5 the file twice and its first half once more, as InternVL does for fractions below one and
for whole numbers.
"""

from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from omnibal.data.sources.conversations import ConversationDataset, index_folder
from omnibal.data.sources.formats import open_format
from omnibal.data.sources.problems import Broken
from omnibal.data.sources.records import Records
from omnibal.data.sources.shards import Shard
from omnibal.errors import DataError
from omnibal.records import load_json

KEYS: Final = ("root", "annotation", "repeat_time", "length", "max_dynamic_patch", "data_augment")
MOST_REPEATED: Final = 10_000


class InternVLDataset(ConversationDataset):
    """InternVL's meta file as samples.

    Args:
        meta: The meta file. Relative paths in it start at its own folder or, where nothing is there, at the working
            directory, as in InternVL's examples.
        processor_folder: Hugging Face folder of the model: ``config.json``, ``preprocessor_config.json``, tokenizer.
            Samples can be trained on with an InternVL model; any other known family has lengths and token ids.
        max_tiles: Most tiles of an image, its thumbnail not counted; the folder's ``max_patches`` by default. A
            dataset's own ``max_dynamic_patch`` in the meta file goes first.
        min_tiles: Fewest tiles of an image; the folder's ``min_patches`` by default.
        broken: ``"error"`` or ``"skip"``, see `ConversationDataset`.
        processes: See `ConversationDataset`.
        cache: See `ConversationDataset`.
        measured: See `ConversationDataset`.

    Raises:
        DataError: If the meta file or an annotation file cannot be used.
        ConfigError: If the folder does not hold a known model.
    """

    def __init__(
        self,
        meta: str | Path,
        processor_folder: str | Path,
        *,
        max_tiles: int | None = None,
        min_tiles: int | None = None,
        broken: Broken = "error",
        processes: int | None = None,
        cache: str | Path | None = None,
        measured: bool = False,
    ) -> None:
        model_format = open_format(processor_folder, max_tiles=max_tiles, min_tiles=min_tiles)
        shards = read_meta(Path(meta), index=index_folder(cache))
        super().__init__(shards, model_format, broken=broken, processes=processes, cache=cache, measured=measured)


def read_meta(meta: Path, max_tiles: int | None = None, index: Path | None = None) -> list[Shard]:
    """The annotation files that a meta file names.

    Args:
        meta: The meta file.
        max_tiles: For datasets that do not say ``max_dynamic_patch``.
        index: As of `Records`.

    Raises:
        DataError: Names the meta file, the dataset and the key.
    """
    try:
        datasets = load_json(meta, object_pairs_hook=_without_repetition)
    except (OSError, ValueError) as error:
        raise DataError(f"meta must be a readable JSON file, got {meta} ({error})") from error
    if not isinstance(datasets, dict) or not datasets:
        raise DataError(f"meta must be an object of datasets, got {datasets!r:.80} in {meta}")
    return [_read_entry(meta, name, entry, max_tiles, index) for name, entry in datasets.items()]


def _read_entry(meta: Path, name: str, entry: Any, max_tiles: int | None, index: Path | None) -> Shard:
    def refuse(key: str, rule: str, got: object) -> DataError:
        return DataError(f"{meta}: {name}.{key} must {rule}, got {got}")

    if not isinstance(entry, Mapping):
        raise DataError(f"{meta}: {name} must be an object, got {entry!r:.80}")
    for key in entry:
        known = get_close_matches(key, KEYS, 1, cutoff=0.8)
        if known and key not in KEYS:
            raise refuse(key, f"be spelt {known[0]}", repr(key))
    for key in ("root", "annotation"):
        if not isinstance(entry.get(key), str) or "\0" in entry[key]:
            raise refuse(key, "be a path", repr(entry.get(key, "nothing")))
    repeat = entry.get("repeat_time", 1)
    if isinstance(repeat, bool) or not isinstance(repeat, int | float) or not 0 < repeat <= MOST_REPEATED:
        raise refuse("repeat_time", f"be a number above 0 and at most {MOST_REPEATED}", repr(repeat))
    own_max_tiles = entry.get("max_dynamic_patch", max_tiles)
    if own_max_tiles is not None and (type(own_max_tiles) is not int or own_max_tiles < 1):
        raise refuse("max_dynamic_patch", "be an integer of at least 1", repr(own_max_tiles))
    if entry.get("data_augment"):
        raise refuse("data_augment", "be false: images are not augmented", "true")
    records = Records(_resolve(meta, entry["annotation"]), index)
    if entry.get("length", len(records)) != len(records):
        raise refuse("length", f"be the {len(records)} entries of {records.path}", repr(entry["length"]))
    num_samples = int(len(records) * repeat)
    if not num_samples:
        raise refuse("repeat_time", f"draw at least one of {len(records)} items", repr(repeat))
    return Shard(name, records, _resolve(meta, entry["root"]), num_samples, own_max_tiles)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; of equal keys all but the last would be lost."""
    times = Counter(key for key, _ in pairs)
    repeated = [key for key, number in times.items() if number > 1]
    if repeated:
        raise ValueError(f"{repeated[0]!r} occurs {times[repeated[0]]} times; give each its own name")
    return dict(pairs)


def _resolve(meta: Path, path: str) -> Path:
    beside = meta.parent / path
    return Path(path) if Path(path).exists() and not beside.exists() else beside
