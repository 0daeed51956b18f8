"""The files of a checkpoint: whether all are there and whole, and which checkpoint of a folder to go on from."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from zlib import crc32

from omnibal.errors import ConfigError
from omnibal.records import load_json

MANIFEST: Final = "omnibal.json"
BASE_WEIGHTS: Final = "base_weights"
"""Of the manifest: the ``fingerprint`` of what adapters are trained beside."""
LATEST: Final = "latest"
UNFINISHED: Final = ".unfinished"
REPLACED: Final = ".replaced"
_TAIL_BYTES: Final = 2**20
_PARTS: Final = 256
_PART_BYTES: Final = 2**12


class SavedFile(NamedTuple):
    """What a file was when it was written.

    Attributes:
        size_bytes: Its length.
        tail: CRC-32 of its last MiB. Torch's files end in the checksums of all they hold, so this tells a file from
            that of another save without reading it.
        rank: Who wrote it.
    """

    size_bytes: int
    tail: int
    rank: int

    @classmethod
    def of(cls, path: Path, rank: int) -> "SavedFile":
        """A file as it is now."""
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            return cls(size, crc32(file.read()), rank)


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on its disk: some disks say only then that they are full."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fingerprint(folder: Path) -> str:
    """What tells the weights in a Hugging Face folder from others, of some bytes of each file: all take minutes."""
    found = 0
    for path in sorted(folder.glob("model*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            for part in range(_PARTS):
                file.seek(part * size // _PARTS)
                found = crc32(file.read(_PART_BYTES), found)
    return f"{found:08x}"


def write_manifest(checkpoint: Path, layout: Mapping[str, Any], files: Mapping[str, SavedFile]) -> None:
    """Say that a checkpoint has these files; it is the last one.

    Raises:
        ConfigError: One is not there: the ranks do not share the folder.
    """
    for name, saved in files.items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != saved.size_bytes:
            raise ConfigError(
                f"save_dir must be a folder that all ranks share, got {checkpoint.parent}, where rank 0 does not find "
                f"what rank {saved.rank} wrote to {checkpoint.name}/{name}"
            )
    (checkpoint / MANIFEST).write_text(json.dumps({**layout, "files": files}) + "\n")
    flush(checkpoint / MANIFEST)
    flush(checkpoint)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """How a checkpoint's model was cut, and under ``files`` the files it must have.

    Raises:
        ConfigError: It has none, or none that can be read.
    """
    try:
        manifest: dict[str, Any] = load_json(checkpoint / MANIFEST)
        files = {name: SavedFile(*saved) for name, saved in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"checkpoint must be a folder that omnibal wrote completely, got {checkpoint}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return {**manifest, "files": files}


def problem_of(checkpoint: Path, wanted: Callable[[str], bool] = lambda name: True) -> str | None:
    """Why a checkpoint is not whole; None if it is.

    Args:
        checkpoint: Its folder.
        wanted: Which files matter, by their names in the folder.
    """
    try:
        files = read_manifest(checkpoint)["files"]
    except ConfigError as error:
        return str(error)
    for name, saved in files.items():
        if wanted(name) and (problem := _file_problem(checkpoint / name, saved)) is not None:
            return f"checkpoint must be whole, got {checkpoint}, where {name} (written by rank {saved.rank}) {problem}"
    return None


def _file_problem(path: Path, saved: SavedFile) -> str | None:
    try:
        found = SavedFile.of(path, saved.rank)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if found.size_bytes != saved.size_bytes:
        return f"has {found.size_bytes} bytes instead of {saved.size_bytes}"
    return None if found == saved else "is not what was saved: its content is that of another save, or damaged"


def newest_first(folder: Path) -> list[Path]:
    """Checkpoints of a folder, whole or not, by the time they were completed."""
    found = [path.parent for path in folder.glob(f"*/{MANIFEST}") if path.parent.suffix != UNFINISHED]
    return sorted(found, key=lambda path: (path / MANIFEST).stat().st_mtime_ns, reverse=True)


def latest_checkpoint(folder: Path) -> Path:
    """The checkpoint that was completed last.

    Raises:
        ConfigError: There is none.
    """
    try:
        return folder / (folder / LATEST).read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"checkpoints must hold a file '{LATEST}' that names the newest one, got none in {folder}"
        ) from error


def offer(folder: Path, without: str) -> str:
    """What else there is to go on from, as the end of an error message."""
    other = _newest_whole(folder, without)
    return (
        "; no other checkpoint is whole" if other is None else f"; the newest whole one is {other}: name it to use it"
    )


def _newest_whole(folder: Path, without: str) -> str | None:
    return next((path.name for path in newest_first(folder) if path.name != without and problem_of(path) is None), None)


def choose(folder: Path, tag: str | None, *, fall_back: bool = False) -> tuple[str, str]:
    """The checkpoint to go on from.

    Args:
        folder: Of checkpoints.
        tag: Which one; None for the one that ``latest`` names.
        fall_back: Take the newest whole one where that one, not chosen by its name, is not whole.

    Returns:
        The name, and a remark for the user where it is not the one asked for.

    Raises:
        ConfigError: It is not whole; the message names a file of it, who wrote that, and the newest whole checkpoint.
    """
    name, problem = tag or "", None
    try:
        name = name or latest_checkpoint(folder).name
        problem = problem_of(folder / name)
    except ConfigError as error:
        problem = str(error)
    if problem is None:
        return name, ""
    other = _newest_whole(folder, without=name) if fall_back and tag is None else None
    if other is None:
        raise ConfigError(problem + (offer(folder, without=name) if folder.is_dir() else ""))
    return other, f"going on from {other}, the newest whole checkpoint: {problem}"


def begin(folder: Path, tag: str) -> Path:
    """An empty folder for the files of a new checkpoint; what unfinished saves left is deleted.

    Raises:
        ConfigError: The tag cannot be the name of a checkpoint.
    """
    if Path(tag).name != tag or tag in ("", "..", LATEST) or tag.endswith((UNFINISHED, REPLACED)):
        raise ConfigError(
            f"tag must be a name for a folder, not '{LATEST}', '…{UNFINISHED}' or '…{REPLACED}', got {tag!r}"
        )
    for left in folder.glob(f"*{UNFINISHED}"):
        shutil.rmtree(left)
    unfinished = folder / f"{tag}{UNFINISHED}"
    unfinished.mkdir(parents=True)
    return unfinished


def finish(unfinished: Path, *, is_latest: bool) -> None:
    """Give a complete checkpoint its name, in the place of an older one of that name.

    Whenever a kill comes, a whole checkpoint stays: the older one under another name until the new one has its own.
    """
    checkpoint = unfinished.with_suffix("")
    replaced = checkpoint.parent / f"{checkpoint.name}{REPLACED}"
    if checkpoint.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        checkpoint.rename(replaced)
    unfinished.rename(checkpoint)
    flush(checkpoint.parent)
    if is_latest:
        named = checkpoint.parent / f".{LATEST}"
        named.write_text(checkpoint.name)
        flush(named)
        named.replace(checkpoint.parent / LATEST)
        flush(checkpoint.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def keep_newest(folder: Path, count: int) -> None:
    """Delete all but the newest ``count`` checkpoints of a folder; never the one that ``latest`` names."""
    named = latest_checkpoint(folder) if (folder / LATEST).is_file() else None
    for path in newest_first(folder)[count:]:
        if path != named:
            shutil.rmtree(path)
