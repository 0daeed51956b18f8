"""Files of lengths as InternVL's packed training uses them: JSON lists of tiles and tokens."""

from pathlib import Path
from typing import Final

from omnibal.errors import DataError
from omnibal.records import load_json

MOST: Final = 2**31 - 1


def read_token_lengths(path: Path) -> tuple[list[int], list[int]]:
    """Read a JSON list of ``{"vit_num": tiles, "token_num": tokens}``.

    Returns:
        Tiles and tokens of every entry.

    Raises:
        DataError: The file is not such a list; the message names the file and the entry.
    """
    try:
        entries = load_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} must be a readable JSON file, got {error}") from error
    if not isinstance(entries, list):
        raise DataError(f"{path} must hold a JSON list, got {type(entries).__name__}")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not _is_count(entry.get("vit_num")) or not _is_count(entry.get("token_num")):
            raise DataError(
                f"{path}, entry {number}: vit_num and token_num must be integers from 0 to {MOST}, got {entry!r}"
            )
    return [entry["vit_num"] for entry in entries], [entry["token_num"] for entry in entries]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST
