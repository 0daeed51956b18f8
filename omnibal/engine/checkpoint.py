"""A checkpoint's files: whether all are whole, which checkpoint goes on, and the way to a Hugging Face folder."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, Final, NamedTuple
from zlib import crc32

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from omnibal.config.section import RunFiles
from omnibal.engine.resolve import ResolvedRun
from omnibal.errors import ConfigError, said
from omnibal.records import load_json
from omnibal.vlm import load_model
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.vlm.lora import ADAPTER_CONFIG, StateOf, add_adapters, base_of, load_adapters, merged_states, save_adapters
from omnibal.vlm.weights import has_weights, other_names, save_model, spare_weights, whole_state

LOG: Final = logging.getLogger(__name__)
MANIFEST: Final = "omnibal.json"  # written last: a folder without it is no checkpoint
BASE_WEIGHTS: Final = "base_weights"  # key of the manifest: the fingerprint of what adapters are trained beside
# What may lie beside checkpoints: scripts that DeepSpeed writes with each save, and a file of before 2026-11-28.
_BESIDE: Final = ("zero_to_fp32.py", "zero_to_torch.py", "latest")
UNFINISHED: Final = ".unfinished"  # endings of folders that a save writes into, or that another one takes the place of
REPLACED: Final = ".replaced"
READERS: Final = 4  # threads of a process that read files to check them
_MANIFEST_VERSION: Final = 2
_BLOCK_BYTES: Final = 2**20
_PARTS: Final = 256  # of a file of weights, for its fingerprint: 1 MiB in all
_PART_BYTES: Final = 2**12
MODEL_FOLDER: Final = "model"  # within a checkpoint
SPARE_FILE: Final = "spare.safetensors"  # in the model's folder: weights that no layer has
# In the model's folder: names of weights in the folder that the run began with, where they are not the published ones.
NAMES_FILE: Final = "weight_names.json"
# What a checkpoint takes from the model's folder, where anything may lie: other weights, checkpoints themselves.
MODEL_FILES: Final = (
    "*config.json",  # of the model, its tokenizer and processors, generation
    "tokenizer.json",
    "tokenizer.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "tokenization_*.py",
    "*processing_*.py",
    "configuration_*.py",  # tokenizers and processors with their own code
)


class SavedFile(NamedTuple):
    size_bytes: int
    # CRC-32 of every byte. Any flipped bit changes it, any other damage but one in four billion, and zlib computes it
    # faster than disks read.
    checksum: int
    rank: int

    @classmethod
    def of(cls, path: Path, rank: int) -> "SavedFile":
        size, checksum, block = 0, 0, memoryview(bytearray(_BLOCK_BYTES))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                size, checksum = size + count, crc32(block[:count], checksum)
        return cls(size, checksum, rank)


def layer_files(checkpoint: Path, index: int) -> list[Path]:
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
    for name, saved in files.items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != saved.size_bytes:
            raise ConfigError(
                f"save_dir must be a folder that all ranks share, got {checkpoint.parent}, where rank 0 does not find "
                f"what rank {saved.rank} wrote to {checkpoint.name}/{name}"
            )
    # Counted, since clocks and file times may go back: the greatest number is the newest checkpoint.
    number = 1 + max((each for each in map(_number, newest_first(checkpoint.parent)) if each < inf), default=0)
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
        if manifest.pop("checksum", None) != _checksum(manifest):
            raise ValueError(f"{MANIFEST} is damaged, or of an omnibal of before 2026-11-23: it has no such checksum")
        files = {name: SavedFile(*saved) for name, saved in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"checkpoint must be a folder that omnibal wrote completely, got {checkpoint}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return {"num_tensor": 1, **manifest, "files": files}  # before 2026-11-24 there were no tensor ranks


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
        files = [file for file in read_manifest(checkpoint)["files"].items() if wanted(*file)]
    except ConfigError as error:
        return str(error)
    with ThreadPoolExecutor(READERS) as pool:  # reading and zlib both leave Python's lock
        problems = [*pool.map(check, files)]
    for (name, saved), problem in zip(files, problems, strict=True):
        if problem is not None:
            return f"checkpoint must be whole, got {checkpoint}, where {name} (written by rank {saved.rank}) {problem}"
    return None


def has_all_files(checkpoint: Path) -> str | None:
    """As ``problem_of``, but look at no more than the files' sizes."""
    return problem_of(checkpoint, every_byte=False)


def newest_first(folder: Path) -> list[Path]:
    """Checkpoints of a folder, whole or not, in the order in which they were saved; first what does not say when."""
    found = [path.parent for path in folder.glob(f"*/{MANIFEST}") if path.parent.suffix != UNFINISHED]
    return sorted(found, key=_number, reverse=True)


def _number(checkpoint: Path) -> float:
    """What grows from save to save, whatever clocks say and whichever step a run goes back to."""
    try:
        number = load_json(checkpoint / MANIFEST)["number"]
    except (OSError, ValueError, KeyError, TypeError):
        return inf
    return number if type(number) is int else inf


def latest_checkpoint(folder: Path) -> Path:
    """The checkpoint that was saved last, whole or not."""
    found = newest_first(folder)
    if not found:
        raise ConfigError(f"folder must hold checkpoints that omnibal wrote completely, got {folder} without any")
    return found[0]


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
    """The name of the checkpoint to go on from: ``tag``, else the newest; and a remark for the user, or "".

    If the newest one is not whole, ``fall_back`` takes the newest that is.
    """
    name = tag or latest_checkpoint(folder).name
    problem = check(folder / name)
    if problem is None:
        return name, ""
    other = _newest_whole(folder, name, check) if fall_back and tag is None else None
    if other is None:
        raise ConfigError(problem + (offer(folder, name, check) if folder.is_dir() else ""))
    return other, f"going on from {other}, the newest whole checkpoint: {problem}"


def begin(folder: Path, tag: str) -> Path:
    """An empty folder for the files of a new checkpoint; what unfinished saves and deletions left is deleted."""
    if Path(tag).name != tag or tag in ("", "..") or tag.endswith((UNFINISHED, REPLACED)) or not tag.isprintable():
        raise ConfigError(f"tag must be a name for a folder, not '…{UNFINISHED}' or '…{REPLACED}', got {tag!r}")
    for left in folder.glob(f"*{UNFINISHED}"):
        _remove(left)
    unfinished = folder / f"{tag}{UNFINISHED}"
    unfinished.mkdir(parents=True)
    return unfinished


def finish(unfinished: Path) -> None:
    """Give a complete checkpoint its name, in the place of an older one of that name."""
    # Whenever a kill comes, a whole checkpoint stays: 1. the older one gets another name, 2. the new one gets its own,
    # 3. that is on the disk, 4. the older one is deleted. What has the name and is no checkpoint stays, too, under
    # another name.
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
    delete(replaced)


def delete(checkpoint: Path) -> None:
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
    found = newest_first(folder)
    kept = [path for path in found if _number(path) < inf][:count]
    for path in found:
        if path not in kept:
            delete(path)


def delete_all(folder: Path) -> list[Path]:
    """Delete what omnibal wrote into a folder of checkpoints, which may be a link; the folder, too, if that is all.

    What is left, and returned, is somebody else's.
    """
    for name in _BESIDE:
        (folder / name).unlink(missing_ok=True)
    for path in newest_first(folder):
        delete(path)
    for path in folder.glob(f"*{UNFINISHED}"):
        _remove(path)
    left = sorted(folder.iterdir()) if folder.exists() else []
    if not left and folder.is_dir() and not folder.is_symlink():
        folder.rmdir()
    return left


def write_model_files(checkpoint: Path, resolved: ResolvedRun, spare: Mapping[str, Tensor]) -> list[Path]:
    """Lay into a checkpoint what an export needs beside layers: MODEL_FILES, ``spare`` weights, how adapters lie."""
    folder = checkpoint / MODEL_FOLDER
    folder.mkdir(exist_ok=True)
    if resolved.folder is not None:
        found = {path for pattern in MODEL_FILES for path in resolved.folder.glob(pattern) if path.is_file()}
        for path in found - {resolved.folder / ADAPTER_CONFIG}:
            target = folder / path.relative_to(resolved.folder)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
        if has_weights(resolved.folder):
            names = other_names(load_model(resolved.vlm.config), resolved.folder)
            (folder / NAMES_FILE).write_text(json.dumps(names))
    resolved.vlm.config.save_pretrained(folder)
    if resolved.vlm.adapters is not None:
        # peft reads the base model by this name. Of random weights there is none.
        in_folder = resolved.base and resolved.base.absolute()
        base = resolved.vlm.config.name_or_path if resolved.folder is None else in_folder
        replace(resolved.vlm.adapters, base_model_name_or_path=str(base) if base else None).save_pretrained(folder)
    if spare and resolved.base is None:
        save_file(dict(spare), folder / SPARE_FILE)
    return [path for path in folder.rglob("*") if path.is_file()]


def export(checkpoint: Path, folder: Path, *, merged: bool = False) -> None:
    """Write a checkpoint as an ordinary Hugging Face model folder; of adapters, as peft's.

    ``merged`` adds adapters to the weights that they were trained beside, and writes the whole model.
    """
    problem = problem_of(checkpoint, lambda name, saved: name.startswith(("layer_", f"{MODEL_FOLDER}/")))
    if problem is not None:
        raise ConfigError(problem + offer(checkpoint.parent, without=checkpoint.name))
    source = checkpoint / MODEL_FOLDER
    if merged and not (source / ADAPTER_CONFIG).is_file():
        raise ConfigError(f"checkpoint must hold adapters to be merged, got {checkpoint} without any")
    saved, base = read_manifest(checkpoint), base_of(load_adapters(source)) if merged else None
    if BASE_WEIGHTS in saved and base is not None and has_weights(base) and fingerprint(base) != saved[BASE_WEIGHTS]:
        raise ConfigError(
            f"{base} must hold the weights that the adapters of {checkpoint} were trained beside, got others"
        )
    # Layers are read one at a time, when save_model asks for their state. Of adapters: either peft's files alone, or
    # each layer's weights from the base model with what the adapters add.
    model, adapters = load_model(source), load_adapters(source)
    state_of: StateOf = partial(_layer_state, checkpoint, model)
    own = shutil.ignore_patterns(SPARE_FILE, NAMES_FILE, ADAPTER_CONFIG)
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=own)
    spare = load_file(source / SPARE_FILE) if (source / SPARE_FILE).is_file() else {}
    if adapters is not None:
        adapted, base = load_model(source), base_of(adapters)
        add_adapters(adapted, adapters)
        state_of = partial(_layer_state, checkpoint, adapted)
        if not merged:
            save_adapters(adapted, state_of, folder)
            return
        state_of, spare = merged_states(adapted, state_of, base), spare or spare_weights(model, base)
    names = load_json(source / NAMES_FILE) if (source / NAMES_FILE).is_file() else {}
    save_model(model, state_of, folder, spare=spare, names=names)


def export_newest(files: RunFiles) -> Path:
    """Write a run's newest checkpoint as a Hugging Face folder, unless it is there already; the folder."""
    checkpoint = latest_checkpoint(files.checkpoints)
    manifest = checkpoint / MANIFEST
    # The time tells it from a checkpoint of the same name that a run which began anew has written since.
    source = {"checkpoint": checkpoint.name, "written": manifest.stat().st_mtime_ns if manifest.is_file() else None}
    kept: Any = None
    with suppress(OSError, ValueError):
        kept = load_json(files.exported)
    if not files.model.is_dir() or kept != source:
        files.exported.unlink(missing_ok=True)
        export(checkpoint, files.model)
        files.exported.write_text(json.dumps(source) + "\n")
    return files.model


def _layer_state(checkpoint: Path, model: VisionLanguageModel, index: int) -> dict[str, Tensor]:
    return whole_state(model, index, [_read_layer(path) for path in layer_files(checkpoint, index)])


def _read_layer(path: Path) -> dict[str, Tensor]:
    try:
        state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise what they trip over
        raise ConfigError(f"{path} must be a whole file of a layer's weights, got {said(error)}") from error
    if not isinstance(state, dict):
        raise ConfigError(f"{path} must hold a layer's weights by name, got {type(state).__name__}")
    return state
