"""Read and write Hugging Face folders of weights, layer by layer; files that torch writes are read as data."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from pickle import UnpicklingError
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from omnibal.errors import ConfigError, OmnibalError
from omnibal.families.parts import Slice
from omnibal.formats.model_format import INDEX_FILE, SINGLE_FILE
from omnibal.records import load_json
from omnibal.vlm.layers import VisionLanguageModel, is_adapter
from omnibal.vlm.tensor import TensorGroup, part_of

# What weights may be stored as: a cast gives the model's dtype. Quantised ones would need their scales.
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# Ends of names in older files that are no weights: the model makes them itself.
BUFFERS = ("rotary_emb.inv_freq", "embeddings.position_ids")


class Stored(NamedTuple):
    """A weight: a safetensors file and its name there, or a tensor of a model in memory."""

    file: Path
    name: str
    held: Tensor | None = None

    def read(self, own: Slice | None = None) -> Tensor:
        """The tensor, or a tensor rank's slice, without reading the rest; one from a file is on the CPU."""
        if self.held is not None:
            return self.held if own is None else part_of(self.held, own)
        with _opened(self.file) as file:
            if own is None:
                return file.get_tensor(self.name)  # type: ignore[no-any-return]
            weight, before = file.get_slice(self.name), (slice(None),) * own.dim
            parts: list[Tensor] = [weight[*before, start:stop] for start, stop in own.ranges]
            return parts[0] if len(parts) == 1 else torch.cat(parts, own.dim)

    def shape(self) -> tuple[int, ...]:
        if self.held is not None:
            return tuple(self.held.shape)
        with _opened(self.file) as file:  # the file's header says it
            return tuple(file.get_slice(self.name).get_shape())


def has_weights(folder: str | Path) -> bool:
    return (Path(folder) / INDEX_FILE).is_file() or (Path(folder) / SINGLE_FILE).is_file()


def load_layer(
    model: VisionLanguageModel,
    index: int,
    module: nn.Module,
    source: str | Path | Mapping[str, Tensor],
    slices: Mapping[str, Slice] = MappingProxyType({}),
) -> None:
    """Fill one layer with its weights from a Hugging Face folder or a ``state_dict()``, reading no other tensor."""
    # ``module`` is what ``model.build_layer(index, …)`` gave; its dtype and device stay, and so do adapters. ``slices``
    # are those of a tensor rank, whose layer has them only.
    # The names of all tensors are checked against the whole model, so that a wrong folder fails alike on every rank.
    stored, shapes = _stored_weights(model, source), model.shapes()
    targets = module.state_dict()
    for name, disk_name in _own_names(model, index).items():
        with torch.no_grad():  # nothing holds on to what has been read while the next tensor is
            targets[name].copy_(_checked(disk_name, stored, shapes, slices.get(name)))


def spare_weights(model: VisionLanguageModel, source: str | Path | Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """The weights that no layer has, by their names on disk: those that ``source`` has, else zeros."""
    # Such as a ViT's last block, which LLaVA does not read: exported as it came, so that the folder is whole.
    names = model.spare_names
    if not names:
        return {}
    shapes = model.shapes()
    stored = {} if source is None else _stored_weights(model, source)
    # Copies: a model in memory may change its tensors later.
    return {
        name: _checked(name, stored, shapes).to("cpu", copy=True) if name in stored else torch.zeros(shapes[name])
        for name in names
    }


def other_names(model: VisionLanguageModel, folder: str | Path) -> dict[str, str]:
    """How a folder calls the weights that it does not call as published folders do, by their names there."""
    # transformers saves a model under the names that it was loaded from; so does ``save_model`` with these.
    return {name: stored.name for name, stored in _read_names(model, Path(folder)).items() if stored.name != name}


def save_model(
    model: VisionLanguageModel,
    state_of: Callable[[int], Mapping[str, Tensor]],
    folder: str | Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    spare: Mapping[str, Tensor] | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a Hugging Face folder: ``config.json`` and safetensors, in shards with an index if more than one."""
    # ``state_of`` goes from a layer's index to its ``state_dict()``, and is called once per layer, in order. ``spare``
    # is what ``spare_weights`` gave, ``names`` what ``other_names`` gave. Weights of an earlier save in the folder go.
    # At most one shard and one layer are in memory at a time. A tied head is not written twice.
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    writer = _ShardWriter(folder, max_shard_bytes)
    for index in range(len(model.records)):
        if model.first_tied(index) == index:
            state, disk_names = state_of(index), model.weight_names(index)
            if state.keys() != disk_names.keys():
                raise ConfigError(
                    f"the state of {model.records[index].name} must hold {sorted(disk_names)}, got {sorted(state)}"
                )
            for name, tensor in state.items():
                disk_name = disk_names[name]
                writer.add(names.get(disk_name, disk_name), tensor.detach().cpu().contiguous())
    for name, tensor in (spare_weights(model, None) if spare is None else spare).items():
        writer.add(names.get(name, name), tensor)
    writer.close()
    # transformers writes both into config.json, and reads weights in this dtype.
    config = deepcopy(model.config)
    config.architectures, config.dtype = [type(model.skeleton).__name__], writer.dtype
    config.save_pretrained(folder)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OmnibalError(f"{path} must be written completely, got {error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} must be a whole safetensors file, got {error}") from error


def _read_names(model: VisionLanguageModel, folder: Path) -> dict[str, Stored]:
    """All tensors of a folder, by their names on disk; files that use the names in memory are understood too."""
    # transformers takes a single file before shards, too.
    if (folder / SINGLE_FILE).is_file():
        with _opened(folder / SINGLE_FILE) as single:
            files = dict.fromkeys(single.keys(), SINGLE_FILE)
    elif (folder / INDEX_FILE).is_file():
        files = _read_index(folder / INDEX_FILE)
        for file in sorted(set(files.values())):
            if not (folder / file).is_file():
                raise ConfigError(f"{folder / INDEX_FILE} must name files that exist, got {file}")
    else:
        raise ConfigError(f"{folder} must hold {SINGLE_FILE} or {INDEX_FILE}, got neither; {_remedy(folder)}")
    return {model.disk_name(name): Stored(folder / file, name) for name, file in files.items()}


def _remedy(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return "these are adapters: `omnibal export --merged` adds them to their model"
    if any(folder.glob("*.bin")):
        return "save it anew with transformers, which writes safetensors"
    return "ask for random weights to train a model from scratch"


def _read_index(path: Path) -> dict[str, str]:
    try:
        files = dict(load_json(path)["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} must be JSON with a weight_map, got {type(error).__name__}: {error}") from error
    for file in files.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise ConfigError(f"{path} must name files beside it, got {file!r:.80}")
    return files


def _stored_weights(model: VisionLanguageModel, source: str | Path | Mapping[str, Tensor]) -> Mapping[str, Stored]:
    if isinstance(source, str | Path):
        where, stored = str(source), _read_names(model, Path(source))
    else:
        where = "the model given"
        stored = {model.disk_name(name): Stored(Path(where), name, tensor) for name, tensor in source.items()}
    # Folders may hold a tied weight twice, or under the head's name alone.
    for name, first in model.tied_names.items():
        head = stored.pop(name, None)
        if head is not None:
            stored.setdefault(first, head)
    expected = {name for index in range(len(model.records)) for name in _own_names(model, index).values()}
    missing = sorted(expected - stored.keys())
    surplus = stored.keys() - expected - set(model.spare_names)
    unexpected = sorted(name for name in surplus if not name.endswith(BUFFERS))
    files = sorted({Path(stored[name].file).name for name in unexpected})
    problems = [f"no {_some(missing)}"] if missing else []
    problems += [f"{_some(unexpected)} in {_some(files)}"] if unexpected else []
    if problems:
        raise ConfigError(f"{where} must hold the model's weights, all and no other, got {' but '.join(problems)}")
    return stored


def _own_names(model: VisionLanguageModel, index: int) -> dict[str, str]:
    return {name: disk_name for name, disk_name in model.weight_names(index).items() if not is_adapter(disk_name)}


def _checked(
    name: str, stored: Mapping[str, Stored], shapes: Mapping[str, torch.Size], own: Slice | None = None
) -> Tensor:
    entry = stored[name]
    if entry.shape() != tuple(shapes[name]):
        raise ConfigError(
            f"{entry.name} must have shape {tuple(shapes[name])}, got {entry.shape()} in {entry.file}; "
            "config.json must be the weights' own"
        )
    tensor, problem = entry.read(own), None
    if tensor.is_meta:
        problem = "have values, got a tensor on the meta device"
    elif tensor.dtype not in FLOATS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        problem = f"be of {names} (not quantised), got {str(tensor.dtype).removeprefix('torch.')}"
    # One pass, without a tensor of the weight's size; NaN becomes both ends.
    elif tensor.numel() and not all(math.isfinite(end) for end in tensor.aminmax()):
        problem = "hold finite numbers, got NaN or infinity"
    if problem is not None:
        raise ConfigError(f"{entry.name} must {problem} in {entry.file}")
    return tensor


def whole_state(model: VisionLanguageModel, index: int, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The whole weights of layer ``index``, from those of all tensor ranks in their order."""
    slices = [model.slices(index, len(states), rank) for rank in range(len(states))]
    found = dict(states[0])
    for name in slices[0].keys() & found.keys():
        parts = [(state[name], own[name]) for state, own in zip(states, slices, strict=True)]
        shape = list(found[name].shape)
        dim = parts[0][1].dim
        shape[dim] = max(stop for _, own in parts for _, stop in own.ranges)
        found[name] = found[name].new_empty(shape)
        for part, own in parts:
            if part.shape[dim] != own.width:
                raise ConfigError(
                    f"{name} of layer {index} must be {own.width} wide on each of {len(states)} tensor ranks, got "
                    f"{part.shape[dim]}"
                )
            before = 0
            for start, stop in own.ranges:
                found[name].narrow(dim, start, stop - start).copy_(part.narrow(dim, before, stop - start))
                before += stop - start
    return found


def own_state(
    model: VisionLanguageModel, index: int, states: Sequence[Mapping[str, Tensor]], ranks: TensorGroup
) -> dict[str, Tensor]:
    """A tensor rank's weights of layer ``index``, from those of a group of any size in their order."""
    own = model.slices(index, ranks.size, ranks.rank)
    whole = whole_state(model, index, states)
    return {name: part_of(weight, own[name]) if name in own else weight for name, weight in whole.items()}


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class _ShardWriter:
    """Collects tensors, writes a file whenever it is full, and names the files once their number is known."""

    def __init__(self, folder: Path, max_shard_bytes: int) -> None:
        self.dtype: torch.dtype | None = None
        self._folder = folder
        self._max_bytes = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        # A tensor larger than a shard gets a file of its own.
        if self._pending and sum(held.nbytes for held in self._pending.values()) + tensor.nbytes > self._max_bytes:
            self._flush()
        self._pending[name] = tensor
        self._total_bytes += tensor.nbytes
        self.dtype = self.dtype or tensor.dtype

    def close(self) -> None:
        self._flush()
        # Shards have temporary names until their number is known; an earlier save stays whole until then.
        count = len(self._shards)
        for old in self._folder.glob("model*.safetensors*"):
            old.unlink()
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [SINGLE_FILE]
        for i, name in enumerate(names):
            self._temporary(i).rename(self._folder / name)
        if count > 1:
            weight_map = {tensor: name for name, shard in zip(names, self._shards, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _flush(self) -> None:
        save_tensors(self._pending, self._temporary(len(self._shards)))
        self._shards.append(list(self._pending))
        self._pending = {}

    def _temporary(self, shard: int) -> Path:
        return self._folder / f"shard{shard}.partial"


# Arrays and their numbers name these, beside what torch itself allows: tensors, containers, numbers and strings.
_NUMPY: Final[tuple[Any, ...]] = (
    np.ndarray(0).__reduce__()[0],
    np.float64(0).__reduce__()[0],
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["Float"] + "?US"},
)
_REMEDY: Final = "torch.serialization.add_safe_globals([...]) names a class that you trust"


def load_data(path: Path, *classes: Any, **options: Any) -> Any:
    """Load what ``torch.save`` wrote: tensors, containers, numbers, strings, arrays, and objects of these classes."""
    try:
        # torch's unpickler makes no object of a class that is not named here, so that no code of the file runs.
        with safe_globals([*_NUMPY, *classes]):
            return torch.load(path, weights_only=True, **options)
    except UnpicklingError as error:
        reason = str(error.__context__ or error)  # torch's own error explains its settings in many lines
        sentence = next(filter(None, re.split(r"\. |\n", reason.strip())), type(error).__name__)
        raise ConfigError(f"{path} must hold data only, got: {sentence.rstrip('.')}; {_REMEDY}") from error


def check_data(path: Path, *classes: Any) -> None:
    """Refuse a file that ``load_data`` would refuse, as far as its list of names tells."""
    with safe_globals([*_NUMPY, *classes]):
        others = get_unsafe_globals_in_checkpoint(str(path))
    if others:
        raise ConfigError(f"{path.name} must hold data only, got {', '.join(sorted(others))}; {_REMEDY}")
