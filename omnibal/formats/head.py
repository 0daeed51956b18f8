"""The head of a stream: its first items, from webdataset shards or from standard input, without torch."""

import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, groupby, zip_longest
from pathlib import Path
from typing import Any, Final

from omnibal.errors import DataError, said
from omnibal.formats.drawn import Drawn, Item, parse_item
from omnibal.records import parse_json

STANDARD_INPUT: Final = Path("-")
SHARDS: Final = (".tar", ".tar.gz", ".tgz")
MOST_OPEN: Final = 64
"""Shards that are read at the same time; of more, so many are taken, evenly spaced."""
PICTURES: Final = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")
TEXTS: Final = ("txt", "caption", "text")


def is_stream(path: Path) -> bool:
    """Whether a path stands for a stream: a shard of webdataset's, or standard input."""
    return path == STANDARD_INPUT or path.name.endswith(SHARDS)


def stream_items(paths: Sequence[Path], image_folder: Path | None = None) -> Iterator[Drawn]:
    """The items of a stream, in its order; of several shards one of each in turn, as ranks and workers read them.

    Args:
        paths: Shards (tar files whose members belong together up to the first dot of their names), or ``-`` for
            standard input with one JSON object a line.
        image_folder: What the paths of images are relative to; by default the shard's folder, or the working one.

    Raises:
        DataError: While iterating: a shard cannot be read.
    """
    streams = [
        _lines(image_folder or Path()) if path == STANDARD_INPUT else _shard(path, image_folder or path.parent)
        for path in paths[:: -(-len(paths) // MOST_OPEN)]
    ]
    return (item for item in chain.from_iterable(zip_longest(*streams)) if item is not None)


def _lines(root: Path) -> Iterator[Drawn]:
    for number, line in enumerate(sys.stdin, start=1):
        if line.strip():
            yield f"standard input, line {number}", partial(_parsed, line, root)


def _shard(path: Path, root: Path) -> Iterator[Drawn]:
    try:
        with tarfile.open(path) as shard:
            files = (member for member in shard if member.isfile())
            for key, members in groupby(files, key=lambda member: _key_and_kind(member.name)[0]):
                held = {_key_and_kind(member.name)[1]: shard.extractfile(member).read() for member in members}  # type: ignore[union-attr]
                yield f"{path}, {key}", partial(_assembled, held, root)
        if path.suffix == ".tar" and path.stat().st_size % tarfile.BLOCKSIZE:  # which tarfile takes for the end
            raise tarfile.ReadError("unexpected end of data")
    except Exception as error:  # decompressors of damaged bytes fail in many ways
        raise DataError(f"data must be shards that can be read, got {path}: {said(error)}") from error


def _key_and_kind(name: str) -> tuple[str, str]:
    """Of ``folder/000.left.jpg``: ``folder/000`` and ``left.jpg``."""
    folder, slash, base = name.rpartition("/")
    stem, _, kind = base.partition(".")
    return folder + slash + stem, kind.lower()


def _assembled(held: Mapping[str, bytes], root: Path) -> Item:
    """The item that a shard's members make: what the record says, and the pictures beside it."""
    texts = [content.decode() for kind, content in held.items() if kind in TEXTS]
    record = _record(held["json"].decode()) if "json" in held else {"response": "\n".join(texts)}
    item = parse_item(record, root)
    pictures = tuple({"bytes": content} for kind, content in held.items() if kind.rpartition(".")[2] in PICTURES)
    return replace(item, images=pictures, sizes=None) if pictures else item


def _parsed(line: str, root: Path) -> Item:
    return parse_item(_record(line), root)


def _record(text: str) -> Mapping[str, Any]:
    record = parse_json(text)
    if not isinstance(record, Mapping):
        raise DataError(f"an item must be a JSON object, got {text:.80}")
    return record
