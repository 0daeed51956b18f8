"""The files of a checkpoint: whether all are there and whole, and which checkpoint of a folder to go on from."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple
from zlib import crc32

from omnibal.errors import ConfigError, said
from omnibal.records import load_json

LOG: Final = logging.getLogger(__name__)
MANIFEST: Final = "omnibal.json"  # written last: a folder without it is no checkpoint
BASE_WEIGHTS: Final = "base_weights"  # key of the manifest: the fingerprint of what adapters are trained beside
LATEST: Final = "latest"  # names the newest checkpoint, as DeepSpeed's file does
# Beside checkpoints lie also the scripts that DeepSpeed writes with each save.
_BESIDE: Final = (LATEST, f".{LATEST}", "zero_to_fp32.py", "zero_to_torch.py")
UNFINISHED: Final = ".unfinished"  # endings of folders that a save writes into, or that another one takes the place of
REPLACED: Final = ".replaced"
READERS: Final = 4  # threads of a process that read files to check them
_MANIFEST_VERSION: Final = 2
_BLOCK_BYTES: Final = 2**20
_PARTS: Final = 256  # of a file of weights, for its fingerprint: 1 MiB in all
_PART_BYTES: Final = 2**12


class SavedFile(NamedTuple):
    """A file as it was when a rank wrote it."""

    size_bytes: int
    # CRC-32 of every byte. Any flipped bit changes it, any other damage but one in four billion, and zlib computes it
    # faster than disks read.
    checksum: int
    rank: int

    @classmethod
    def of(cls, path: Path, rank: int) -> "SavedFile":
        """A file as it is now."""
        size, checksum, block = 0, 0, memoryview(bytearray(_BLOCK_BYTES))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                size, checksum = size + count, crc32(block[:count], checksum)
        return cls(size, checksum, rank)


def layer_files(checkpoint: Path, index: int) -> list[Path]:
    """The files with the weights of a layer: one, or one of each tensor rank."""
    files = sorted(checkpoint.glob(f"layer_{index:02d}-*model_states.pt"))
    # DeepSpeed's names for them (PipelineModule.ckpt_layer_path).
    names = [f"layer_{index:02d}-model_{rank:02d}-model_states.pt" for rank in range(len(files))]
    if len(files) != 1 and ([path.name for path in files] != names or not files):
        raise ConfigError(
            f"checkpoint must hold one file for layer {index}, or one of each tensor rank, got {len(files)} in "
            f"{checkpoint}"
        )
    return files


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on its disk: some disks say only then that they are full."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fingerprint(folder: Path) -> str:
    """What tells the weights in a Hugging Face folder from others."""
    found = 0  # of some bytes of each file: to read all of them takes minutes
    for path in sorted(folder.glob("model*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            for part in range(_PARTS):
                file.seek(part * size // _PARTS)
                found = crc32(file.read(_PART_BYTES), found)
    return f"{found:08x}"


def write_manifest(checkpoint: Path, layout: Mapping[str, Any], files: Mapping[str, SavedFile]) -> None:
    """Write a checkpoint's last file, which says what the others are."""
    for name, saved in files.items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != saved.size_bytes:
            raise ConfigError(
                f"save_dir must be a folder that all ranks share, got {checkpoint.parent}, where rank 0 does not find "
                f"what rank {saved.rank} wrote to {checkpoint.name}/{name}"
            )
    # Counted, since clocks and file times may go back: the greatest number is the newest checkpoint.
    number = 1 + max(map(_number, newest_first(checkpoint.parent)), default=0)
    content = {**layout, "files": files, "version": _MANIFEST_VERSION, "number": number}
    content = json.loads(json.dumps(content))  # the checksum is of what will be read
    (checkpoint / MANIFEST).write_text(json.dumps({**content, "checksum": _checksum(content)}) + "\n")
    flush(checkpoint / MANIFEST)
    flush(checkpoint)


def _checksum(manifest: Mapping[str, Any]) -> int:
    return crc32(json.dumps(manifest, sort_keys=True).encode())


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """How a checkpoint's model was cut, and under ``files`` the files it must have."""
    try:
        manifest: dict[str, Any] = load_json(checkpoint / MANIFEST)
        checksum, version = manifest.pop("checksum", None), manifest.get("version", 1)
        if (checksum, version) == (None, 1):
            raise ValueError("an omnibal of before 2026-11-23 saved it, which noted less")
        # a flipped bit may hit the version, too
        if checksum != _checksum(manifest):
            raise ValueError(f"{MANIFEST} is damaged: its checksum is another one")
        files = {name: SavedFile(*saved) for name, saved in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"checkpoint must be a folder that omnibal wrote completely, got {checkpoint}: "
            f"{type(error).__name__}: {error}"
        ) from error
    # Those of before tensor ranks do not name them.
    return {"num_tensor": 1, **manifest, "files": files}


def problem_of(
    checkpoint: Path, wanted: Callable[[str, SavedFile], bool] = lambda name, saved: True, *, every_byte: bool = True
) -> str | None:
    """Why a checkpoint is not whole; None if it is.

    ``wanted`` chooses the files that matter, by name; ``every_byte`` reads them, and does not only look at their sizes.
    """

    def check(file: tuple[str, SavedFile]) -> str | None:
        name, saved = file
        try:
            size = (checkpoint / name).stat().st_size
            if size != saved.size_bytes:
                return f"has {size} bytes instead of {saved.size_bytes}"
            if every_byte and SavedFile.of(checkpoint / name, saved.rank) != saved:
                return "is not what was saved: its content is that of another save, or damaged"
        except FileNotFoundError:
            return "is missing"
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return None

    try:
        manifest = read_manifest(checkpoint)
    except ConfigError as error:
        return str(error)
    files = [(name, saved) for name, saved in manifest["files"].items() if wanted(name, saved)]
    with ThreadPoolExecutor(READERS) as pool:  # reading and zlib both leave Python's lock
        for (name, saved), problem in zip(files, pool.map(check, files), strict=True):
            if problem is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                return (
                    f"checkpoint must be whole, got {checkpoint}, where {name} (written by rank {saved.rank}) {problem}"
                )
    return None


def has_all_files(checkpoint: Path) -> str | None:
    """As ``problem_of``, but look at no more than the files' sizes."""
    return problem_of(checkpoint, every_byte=False)


def newest_first(folder: Path) -> list[Path]:
    """Checkpoints of a folder, whole or not, in the order in which they were saved."""
    found = [path.parent for path in folder.glob(f"*/{MANIFEST}") if path.parent.suffix != UNFINISHED]
    return sorted(found, key=_number, reverse=True)


def _number(checkpoint: Path) -> int:
    """What grows from save to save, whatever clocks say and whichever step a run goes back to."""
    try:
        number = load_json(checkpoint / MANIFEST).get("number", 0)
    except (OSError, ValueError, AttributeError):
        return 0
    return number if type(number) is int else 0


def latest_checkpoint(folder: Path) -> Path:
    try:
        return folder / _latest(folder)
    except ConfigError as error:
        raise ConfigError(str(error) + offer(folder, without="")) from error


def _latest(folder: Path) -> str:
    try:
        name = (folder / LATEST).read_text().strip()
    except (OSError, ValueError) as error:
        found = "none" if isinstance(error, FileNotFoundError) else f"one that cannot be read ({said(error)})"
        raise ConfigError(
            f"checkpoints must hold a file '{LATEST}' that names the newest one, got {found} in {folder}"
        ) from error
    if not _can_be_tag(name):
        raise ConfigError(f"{folder / LATEST} must name a folder beside it, got {name!r:.80}")
    return name


def _can_be_tag(name: str) -> bool:
    return (
        Path(name).name == name
        and name.isprintable()
        and name not in ("", "..", LATEST)
        and not name.endswith((UNFINISHED, REPLACED))
    )


Check = Callable[[Path], str | None]  # why a checkpoint is not whole; None if it is


def offer(folder: Path, without: str, check: Check = problem_of) -> str:
    """What else there is to go on from, as the end of an error message."""
    other = _newest_whole(folder, without, check)
    return (
        "; no other checkpoint is whole" if other is None else f"; the newest whole one is {other}: name it to use it"
    )


def _newest_whole(folder: Path, without: str, check: Check) -> str | None:
    return next((path.name for path in newest_first(folder) if path.name != without and check(path) is None), None)


def choose(folder: Path, tag: str | None, *, fall_back: bool = False, check: Check = problem_of) -> tuple[str, str]:
    """The name of the checkpoint to go on from: ``tag``, else what ``latest`` names; and a remark for the user, or "".

    If ``latest`` names one that is not whole, or none, ``fall_back`` takes the newest whole one.
    """
    name, problem = tag or "", None
    try:
        name = name or _latest(folder)
        problem = check(folder / name)
    except ConfigError as error:
        problem = str(error)
    if problem is None:
        return name, ""
    other = _newest_whole(folder, name, check) if fall_back and tag is None else None
    if other is None:
        raise ConfigError(problem + (offer(folder, name, check) if folder.is_dir() else ""))
    return other, f"going on from {other}, the newest whole checkpoint: {problem}"


def begin(folder: Path, tag: str) -> Path:
    """An empty folder for the files of a new checkpoint; what unfinished saves and deletions left is deleted."""
    if not _can_be_tag(tag):
        raise ConfigError(
            f"tag must be a name for a folder, not '{LATEST}', '…{UNFINISHED}' or '…{REPLACED}', got {tag!r}"
        )
    for left in folder.glob(f"*{UNFINISHED}"):
        _remove(left)
    unfinished = folder / f"{tag}{UNFINISHED}"
    unfinished.mkdir(parents=True)
    return unfinished


def finish(unfinished: Path, *, is_latest: bool) -> None:
    """Give a complete checkpoint its name, in the place of an older one of that name."""
    # Whenever a kill comes, a whole checkpoint stays: 1. the older one gets another name, 2. the new one gets its own,
    # 3. "latest" names it, by a file that is written beside and renamed, 4. the older one is deleted. Each is on the
    # disk before the next begins. What has the name and is no checkpoint stays, too, under another name.
    checkpoint = unfinished.with_suffix("")
    replaced = checkpoint.parent / f"{checkpoint.name}{REPLACED}"
    if (checkpoint / MANIFEST).is_file():
        delete(replaced)
        checkpoint.rename(replaced)
    elif os.path.lexists(checkpoint):
        names = (checkpoint.with_name(f"{checkpoint.name}.aside{number}") for number in count(1))
        aside = next(name for name in names if not os.path.lexists(name))
        checkpoint.rename(aside)
        LOG.warning("%s had no %s: it is %s now", checkpoint, MANIFEST, aside.name)
    unfinished.rename(checkpoint)
    flush(checkpoint.parent)
    if is_latest:
        named = checkpoint.parent / f".{LATEST}"
        named.write_text(checkpoint.name)
        flush(named)
        named.replace(checkpoint.parent / LATEST)
        flush(checkpoint.parent)
    delete(replaced)


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint, if it is there, or the link to it."""
    # It loses its name first: what a kill leaves of it has that of an unfinished save, which the next one deletes.
    if os.path.lexists(checkpoint):
        nameless = checkpoint.with_name(checkpoint.name + UNFINISHED)
        _remove(nameless)
        checkpoint.rename(nameless)
        _remove(nameless)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def keep_newest(folder: Path, count: int) -> None:
    """Delete all but the newest ``count`` checkpoints of a folder; never the one that ``latest`` names."""
    try:
        named = _latest(folder)
    except ConfigError:  # whatever the file holds, it names none of them
        named = ""
    for path in newest_first(folder)[count:]:
        if path.name != named:
            delete(path)


def delete_all(folder: Path) -> list[Path]:
    """Delete what omnibal wrote into a folder of checkpoints, which may be a link; the folder, too, if that is all.

    What is left, and returned, is somebody else's.
    """
    for name in _BESIDE:  # first: what `latest` names is about to go
        (folder / name).unlink(missing_ok=True)
    for path in newest_first(folder):
        delete(path)
    for path in folder.glob(f"*{UNFINISHED}"):
        _remove(path)
    left = sorted(folder.iterdir()) if folder.exists() else []
    if not left and folder.is_dir() and not folder.is_symlink():
        folder.rmdir()
    return left
