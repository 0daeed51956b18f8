"""Whether a model's head is its embedding, where the configuration and the folder's weights may differ.

transformers ties two weights whose configuration says so, unless the folder holds both with different values. Files are
compared byte by byte: no torch is needed, and nothing is read where only one of the two is there.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from omnibal.records import load_json

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_ENDS: Final = ("lm_head.weight", "embed_tokens.weight")  # of the names of head and embedding, in every family
_TIE: Final = "tie_word_embeddings"
_CHUNK: Final = 2**20  # bytes that are compared at a time


class _Entry(NamedTuple):
    file: Path
    dtype: str
    shape: list[int]
    start: int
    stop: int

    def content(self) -> Any:
        return np.memmap(self.file, np.uint8, "r", self.start, (self.stop - self.start,))

    def equals(self, other: "_Entry") -> bool:
        """Whether two tensors are of one kind and have the same bytes, which are read up to a difference."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        one, two = self.content(), other.content()
        return all(
            np.array_equal(one[start : start + _CHUNK], two[start : start + _CHUNK])
            for start in range(0, len(one), _CHUNK)
        )


def with_own_ties(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """The content of a ``config.json``; if the folder holds another head than its embedding, one that ties nothing."""
    return as_tied(config, tied=False) if has_own_head(folder) else config


def as_tied(config: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """A configuration that says whether head and embedding are tied, wherever a family looks for it.

    >>> as_tied({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}}, tied=False)
    {'tie_word_embeddings': False, 'text_config': {'tie_word_embeddings': False}}
    """
    parts = {name: as_tied(value, tied=tied) for name, value in config.items() if name.endswith("_config") and value}
    return {**config, **parts, _TIE: tied}


def is_tied(model: Any) -> bool:
    """Whether the head of a transformers model in memory is its embedding, which its configuration need not know."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and getattr(head, "weight", head) is getattr(embedding, "weight", embedding)


def has_own_head(folder: Path) -> bool:
    """Whether a folder of weights holds a head and an embedding with different values; a broken file holds none."""
    try:
        head, embedding = (_entry(folder, end) for end in _ENDS)
        return head is not None and embedding is not None and not head.equals(embedding)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # whoever loads the weights says what is wrong
        return False


def _entry(folder: Path, end: str) -> _Entry | None:
    """Where the tensor lies whose name has an end."""
    files = [folder / SINGLE_FILE]  # which transformers takes before shards, too
    if not files[0].is_file():
        index = folder / INDEX_FILE
        named = load_json(index)["weight_map"] if index.is_file() else {}
        files = [folder / file for name, file in named.items() if name.endswith(end)]
    for file in files:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, file.stat().st_size)))
        for name, tensor in header.items():
            if name.endswith(end):
                start, stop = (8 + length + offset for offset in tensor["data_offsets"])
                return _Entry(file, tensor["dtype"], tensor["shape"], start, stop)
    return None
