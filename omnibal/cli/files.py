"""What a path on the command line holds, told by its content; and whether a path can be written, told at once."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from omnibal.errors import ConfigError
from omnibal.formats.files import KINDS, is_dataset
from omnibal.records import parse_json, parse_relaxed, read_json

Kind = Literal[
    "ds_config", "plan", "profile", "token lengths", "saved lengths", "dataset", "model", "checkpoint", "checkpoints",
    "run", "something else",
]  # fmt: skip

NAMES: Final[Mapping[Kind, str]] = {
    "ds_config": "a ds_config",
    "plan": "a plan",
    "profile": "a profile",
    "token lengths": 'a JSON list of {"vit_num", "token_num"}',
    "saved lengths": "a folder of lengths",
    "dataset": f"a dataset (an InternVL meta file, or conversations in {KINDS})",
    "model": "a Hugging Face model folder",
    "checkpoint": "a checkpoint",
    "checkpoints": "a folder of checkpoints",
    "run": "a run's folder",
    "something else": "something else",
}
HEAD_CHARACTERS: Final = 1 << 16
DEEPSPEED_KEYS: Final = frozenset({
    "omnibal", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer",
    "scheduler", "bf16", "fp16", "zero_optimization", "gradient_clipping", "data_types", "torch_autocast",
})  # fmt: skip
"""An object with one of these is a ds_config."""
FOLDERS: Final[tuple[tuple[str, Kind], ...]] = (
    ("config.json", "model"),
    ("omnibal.json", "checkpoint"),
    ("latest", "checkpoints"),
    ("metrics.jsonl", "run"),
    ("checkpoints", "run"),
    ("lengths.json", "saved lengths"),
)
"""What a folder is, by what lies in it."""


def expect(name: str, path: Path, kinds: Collection[Kind], *, remedy: str = "") -> Kind:
    """What a path holds.

    Args:
        name: What the command line calls it.
        path: A file or folder.
        kinds: What it may hold.
        remedy: What else to do, for the message.

    Raises:
        ConfigError: It holds something else, cannot be read, or is no JSON where it should be.
    """
    kind = kind_of(name, path)
    if kind not in kinds:
        expected = " or ".join(NAMES[possible] for possible in kinds)
        hint = f"; {remedy}" if remedy else ""
        raise ConfigError(f"{name} must be {expected}, got {path}, {_described(kind, path)}{hint}")
    return kind


def kind_of(name: str, path: Path) -> Kind:
    """What a path holds, by its content.

    Raises:
        ConfigError: It cannot be read, or is neither JSON nor JSON lines.
    """
    if path.is_dir():
        found = next((kind for file, kind in FOLDERS if (path / file).exists()), None)
        return found or ("dataset" if is_dataset(path) else "something else")
    try:
        if is_dataset(path):
            return "dataset"
    except OSError as error:
        raise ConfigError(f"{name} must be a readable file or folder, got {path} ({error.strerror})") from error
    start = _head(name, path)
    if start.startswith("[") and ('"vit_num"' in start or start.rstrip() == "[]"):
        return "token lengths"
    if _first_line(start) is not None:
        return "something else"
    content = read_json(path, name, parse_relaxed)
    return kind_of_object(content) if isinstance(content, dict) else "something else"


def kind_of_object(content: Mapping[str, Any]) -> Kind:
    """What a JSON object is, by its keys."""
    keys = content.keys()
    if {"limits", "partition"} <= keys:
        return "plan"
    if {"layers", "device"} <= keys:
        return "profile"
    if keys & DEEPSPEED_KEYS or not keys:
        return "ds_config"
    return "dataset" if all(isinstance(shard, dict) for shard in content.values()) else "something else"


def _head(name: str, path: Path) -> str:
    """The first characters of a text file."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            start = file.read(HEAD_CHARACTERS).lstrip()
    except OSError as error:
        raise ConfigError(f"{name} must be a readable file or folder, got {path} ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} must be text in UTF-8, got {path} ({error})") from error
    if start[:1] not in ("[", "{", "/", "#"):  # a ds_config may begin with a comment
        raise ConfigError(f"{name} must be a folder, JSON or JSON lines, got {start[:20]!r} in {path}")
    return start


def _first_line(start: str) -> dict[str, Any] | None:
    """The first object of JSON lines; None of other files."""
    line, *others = start.splitlines()
    if not others or not line.startswith("{"):
        return None
    try:
        found: dict[str, Any] = parse_json(line)
    except ValueError:
        return None
    return found


def _described(kind: Kind, path: Path) -> str:
    if kind != "something else":
        return f"which is {NAMES[kind]}"
    if path.is_dir():
        return "a folder of something else"
    content = _first_line(_head("file", path)) or parse_relaxed(path.read_bytes())
    entry = content[0] if isinstance(content, list) else content
    return f"which has the keys {', '.join(entry)}" if isinstance(entry, dict) else f"a list with {entry!r:.80}"


def refuse(options: Mapping[str, object], reason: str) -> None:
    """Refuse options that say what something else says.

    Raises:
        ConfigError: One of them is given.
    """
    for name, value in options.items():
        if value:
            raise ConfigError(f"--{name} must be left out here, got {value}: {reason}")


def check_folder(name: str, folder: Path | None) -> None:
    """Refuse a folder that cannot be made or written into; makes nothing.

    Raises:
        ConfigError: Names what is in the way.
    """
    if folder is None:
        return
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"{name} must be a folder, got {folder}: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{name} must be a folder that can be written to, got {folder}: {there} is read-only")


def check_file(name: str, path: Path | None) -> None:
    """Refuse a file that cannot be written; makes nothing.

    Raises:
        ConfigError: Names what is in the way.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{name} must be a file, got the folder {path}")
    check_folder(f"the folder of {name}", path.parent)


def check_new_folder(name: str, folder: Path) -> None:
    """Refuse a folder that cannot be made, or that holds something already.

    Raises:
        ConfigError: Names what is in the way.
    """
    check_folder(name, folder)
    held = next(folder.iterdir(), None) if folder.exists() else None
    if held is not None:
        raise ConfigError(f"{name} must be empty or not exist yet, got {folder} with {held.name} in it")


def check_picture(name: str, path: Path | None) -> None:
    """Refuse a file that no picture can be written to; makes nothing.

    Raises:
        ConfigError: Names what is in the way, or the ending that it must have.
    """
    check_file(name, path)
    if path is not None and path.suffix.lower() != ".png":
        raise ConfigError(f"{name} must be a PNG, whose name ends in .png, got {path}")
