"""What a checkpoint holds for a rank: the weights of its layers, and the optimizer's state by the names of weights.

Every replica of a stage writes what it updates: whole weights without ZeRO; under ZeRO 1 and in bfloat16 equal shares
of flat buffers, where a weight may lie on several replicas. Files say which names lie where. So each rank maps the
files of the stages that had its layers, and reads the numbers of its own weights and its own share only; of another
number of tensor ranks those of whole weights, one at a time, which it cuts anew.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain, pairwise
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from omnibal.engine.checkpoint import has_all_files, offer
from omnibal.engine.module import ON_ALL_RANKS, PLACEHOLDER
from omnibal.errors import ConfigError
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.vlm.weights import load_data, own_state

# DeepSpeed's classes, of which its optimizers save objects beside tensors and numbers.
CLASSES: Final = (LossScaler, ZeroStageEnum, fragment_address)
# DeepSpeed's names of files: of the replicas' shares and, where there are none, of each stage's engine.
_SHARE: Final = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_ENGINE: Final = re.compile(r"mp_rank_(\d+)_model_states\.pt")


def opened(path: Path) -> Any:
    """What a file holds; tensors are mapped, not read."""
    try:
        return load_data(path, *CLASSES, map_location="cpu", mmap=True)
    except Exception as error:
        others = offer(path.parent.parent, path.parent.name, has_all_files)
        raise ConfigError(
            f"checkpoint must be readable, got {path}: {type(error).__name__}: {error}{others}"
        ) from error


def check_layers(engine: Any, checkpoint: Path) -> None:
    """Open the files of an engine's layers on this rank, which must have their weights."""
    for index, layer in engine.module.numbered_layers():
        expected = {name: tensor.shape for name, tensor in layer.state_dict().items()}
        in_folder = set()  # weights beside adapters, which a checkpoint leaves to the model's folder
        if engine.resolved.base is not None:
            in_folder = {name for name, parameter in layer.named_parameters() if not parameter.requires_grad}
        saved = engine.module.saved_state(
            checkpoint, index, lambda path: {name: each.to("meta") for name, each in opened(path).items()}
        )
        found = {name: tensor.shape for name, tensor in saved.items()}
        differing = {name for name, _ in found.items() ^ expected.items()} - (in_folder - found.keys())
        if differing:
            raise ConfigError(
                f"checkpoint must be of a model with the same weights, got layer {index} of {checkpoint} with "
                f"other {', '.join(sorted(differing)[:3])}"
            )


class SavedPart(NamedTuple):
    """A part of a flattened weight in a file, and the optimizer's state of it."""

    length: int | None  # numbers of the part; None for a whole weight
    weights: Tensor | None  # float32 ones; None where the optimizer steps the model's own
    state: Mapping[str, Any]  # rows of ``length`` numbers, and what the optimizer counts, by its names for them
    group: Mapping[str, Any]  # settings of the parameter group
    path: Path


class OwnPart(NamedTuple):
    """The elements from ``start`` on of a flattened weight, which lie from ``offset`` on in the optimizer's tensor."""

    name: str
    num_weights: int
    start: int
    offset: int
    length: int


class SavedStates:
    """The optimizer's state of the weights that an engine updates."""

    def __init__(self, engine: Any, checkpoint: Path, manifest: Mapping[str, Any]) -> None:
        """Map the files of the stages that had this rank's layers."""
        # A ConfigError names a weight without state, or with state of another kind than a number for each weight.
        self._engine, vlm, ranks = engine, engine.module.vlm, engine.module.ranks
        layers = [index for index, _ in engine.module.numbered_layers()]
        self._vlm, self._ranks, self._size = vlm, ranks, manifest["num_tensor"]
        # By name on disk the parts of each tensor rank's weight that this rank reads.
        self._parts: dict[str, list[list[SavedPart]]] = {}
        bounds = enumerate(pairwise(manifest["partition"]))
        # A spread encoder has shares on all ranks.
        spread = manifest.get("encoder") == "spread"
        stages = [stage for stage, (first, stop) in bounds if spread or any(first <= each < stop for each in layers)]
        # PipelineParallelGrid numbers the ranks of a column stage by stage, and in a stage by tensor rank.
        tensor_ranks = [ranks.rank] if self._size == ranks.size else range(self._size)
        wanted = {stage * self._size + rank: number for stage in stages for number, rank in enumerate(tensor_ranks)}
        # Files with state: those of shares, or where there are none of engines; by number, then by replica.
        names = manifest["files"]
        shares = [(int(found[2]), int(found[1]), found[0]) for found in map(_SHARE.fullmatch, names) if found]
        engines = [(int(found[1]), 0, found[0]) for found in map(_ENGINE.fullmatch, names) if found]
        for number, _, file in sorted(shares or engines):
            if number in wanted:
                for name, part in _parts_of(checkpoint / file, opened(checkpoint / file), vlm):
                    self._parts.setdefault(name, [[] for _ in tensor_ranks])[wanted[number]].append(part)
        self._layers = {name: (index, own) for index in layers for own, name in vlm.weight_names(index).items()}
        for _, owned in chain.from_iterable(_owned(engine)):
            for own in owned:
                self._of(own)

    def load(self) -> None:
        """Let the engine's optimizer go on from the state, where the weights of layers are loaded already."""
        basic, state, groups = self._engine.basic_optimizer, dict[int, dict[str, Any]](), list[dict[str, Any]]()
        has_copies = self._engine.optimizer is not basic
        for group, owned in zip(basic.param_groups, _owned(self._engine), strict=True):
            first = len(state)
            for tensor, parts in owned:
                state[len(state)] = self._state_of(tensor, parts)
                for own in parts if has_copies else ():
                    _copy(self._rows(own), own, tensor.detach())
            names = [own.name for _, parts in owned for own in parts]
            groups.append({**self._settings_of(group, names), "params": [*range(first, len(state))]})
        basic.load_state_dict({"state": state, "param_groups": groups})
        if has_copies:  # as DeepSpeed's own loading ends: the optimizer's state lies in other tensors now
            self._engine.optimizer._link_all_hp_params()

    def _of(self, own: OwnPart) -> list[list[SavedPart]]:
        """Of each tensor rank the parts of its weight, one behind the other; none of a placeholder."""
        if own.name == PLACEHOLDER:  # its state is zero
            return []
        found = list[list[SavedPart]]()
        for rank, saved in enumerate(self._parts.get(own.name, [[]])):
            expected = prod(self._shape(own, rank))
            parts, length = list[SavedPart](), 0
            for part in saved:
                if length < expected:  # a tied weight follows once more, from its other stage
                    numbers = expected if part.length is None else part.length
                    parts.append(part._replace(length=numbers))
                    length += numbers
                    for key, value in part.state.items():
                        if _is_row(value) and value.numel() != numbers:
                            raise ConfigError(
                                f"the optimizer's {key} must have a number for each weight to be cut otherwise, got "
                                f"{value.numel()} numbers for {numbers} weights of {own.name} in {part.path}; resume "
                                "with the stages, replicas, tensor ranks and ZeRO of the checkpoint"
                            )
            if length != expected:
                raise ConfigError(
                    f"checkpoint must hold the optimizer's state of {expected} weights of {own.name}, got {length} "
                    f"in {', '.join(str(part.path) for part in parts) or 'none of its files'}"
                )
            found.append(parts)
        return found

    def _shape(self, own: OwnPart, rank: int) -> tuple[int, ...]:
        """The weight's shape on one of the tensor ranks that are read."""
        if self._size == self._ranks.size:
            return (own.num_weights,)
        index, name = self._layers[own.name]
        shape = list(self._vlm.shape(self._vlm.paths(index)[name]))
        if (cut := self._vlm.slices(index, self._size, rank).get(name)) is not None:
            shape[cut.dim] = cut.width
        return tuple(shape)

    def _rows(self, own: OwnPart, key: str | None = None) -> list[Tensor]:
        """Float32 weights, or the numbers that the optimizer has under a key: those of this rank's weight, in parts."""
        by_rank = [
            [row for part in parts if (row := part.weights if key is None else part.state[key]) is not None]
            for parts in self._of(own)
        ]
        if self._size == self._ranks.size or not any(by_rank):
            return [*chain.from_iterable(by_rank)]
        index, name = self._layers[own.name]
        states = [
            {name: torch.cat([row.flatten() for row in rows]).view(self._shape(own, rank))}
            for rank, rows in enumerate(by_rank)
        ]
        return [own_state(self._vlm, index, states, self._ranks)[name]]

    def _state_of(self, tensor: Tensor, parts: Sequence[OwnPart]) -> dict[str, Any]:
        # Padding between weights has zeros; what is counted (steps) is alike for all weights.
        parts_of_all = chain.from_iterable(chain.from_iterable(self._parts.values()))
        like = next((part.state for part in parts_of_all), {})
        state = {
            key: value.new_zeros(tensor.shape, device=tensor.device) if _is_row(value) else deepcopy(value)
            for key, value in like.items()
        }
        for own in parts:
            saved = self._of(own)
            for key, value in saved[0][0].state.items() if saved else ():
                if _is_row(value):
                    _copy(self._rows(own, key), own, state[key])
                else:
                    state[key] = deepcopy(value)
        return state

    def _settings_of(self, group: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """The settings that a group was saved with, by its weights; where it has placeholders alone, by its name."""
        parts = chain.from_iterable(chain.from_iterable(self._parts.values()))
        of_name = (part.group for part in parts if part.group.get("name") == group.get("name"))
        saved = next((self._parts[name][0][0].group for name in names if name != PLACEHOLDER), next(of_name, group))
        own = {key: group[key] for key in ("name", "names", ON_ALL_RANKS) if key in group}
        return {key: value for key, value in saved.items() if key != ON_ALL_RANKS} | own


def _parts_of(path: Path, content: Any, vlm: VisionLanguageModel) -> Iterator[tuple[str, SavedPart]]:
    shares = content.get("optimizer_state_dict")
    base = content["optimizer"] if shares is None else shares["base_optimizer_state"]
    for index, group in enumerate(base["param_groups"]):
        states = [base["state"].get(number, {}) for number in group["params"]]
        if shares is None:
            for name, state in zip(group["names"], states, strict=True):
                yield name, SavedPart(None, None, state, group, path)
            continue
        # One flat tensor for the group; DeepSpeed's universal checkpoints cut it by the same addresses.
        flat = shares["single_partition_of_fp32_groups"][index].detach()
        for name, address in shares["param_slice_mappings"][index].items():
            cut = slice(address.start, address.start + address.numel)
            state = {key: value[cut] if _is_row(value) else value for key, value in states[0].items()}
            yield _disk_name(name, vlm), SavedPart(address.numel, flat[cut], state, group, path)


def _disk_name(name: str, vlm: VisionLanguageModel) -> str:
    """The name on disk of a parameter of a VlmPipelineModule, whose layers are named by their numbers."""
    first, _, rest = name.partition(".")
    if first == "placeholders":
        return PLACEHOLDER
    if first == "tied_modules":
        keys = [record.tied_key for record in vlm.records]
        index = next(index for index, key in enumerate(keys) if key is not None and rest.startswith(f"{key}."))
        return vlm.weight_names(index)[rest.removeprefix(f"{keys[index]}.")]
    if first == "encoder":
        first, _, rest = rest.partition(".")
    return vlm.weight_names(int(first))[rest]


def _owned(engine: Any) -> Iterator[list[tuple[Tensor, list[OwnPart]]]]:
    """The optimizer's tensors of each parameter group, and the parts of weights that each holds."""
    optimizer, basic, names = engine.optimizer, engine.basic_optimizer, engine.module.disk_names()
    if optimizer is basic:
        for group in basic.param_groups:
            named = [(parameter, names.get(parameter, (PLACEHOLDER,))[0]) for parameter in group["params"]]
            yield [(each, [OwnPart(name, each.numel(), 0, 0, each.numel())]) for each, name in named]
        return
    lists = optimizer.bf16_groups if hasattr(optimizer, "bf16_groups") else optimizer.bit16_groups
    for group, parameters in zip(basic.param_groups, lists, strict=True):
        parts = list[OwnPart]()
        for parameter in parameters:
            mapping = parameter._hp_mapping  # None where other replicas update all of the parameter
            if mapping is not None:
                own, offset = mapping.lp_fragment_address, mapping.hp_fragment_address.start
                name = names.get(parameter, (PLACEHOLDER,))[0]
                parts.append(OwnPart(name, parameter.numel(), own.start, offset, own.numel))
        yield [(group["params"][0], parts)]


def _is_row(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _copy(rows: Iterable[Tensor], own: OwnPart, into: Tensor) -> None:
    """Copy an own part out of the rows of a whole weight, one behind the other, into the optimizer's tensor."""
    start, target = own.start, into.view(-1)[own.offset : own.offset + own.length]
    for row in rows:
        first, stop = max(start, 0), min(start + own.length, row.numel())
        if first < stop:
            target[first - start : stop - start].copy_(row.reshape(-1)[first:stop])
        start -= row.numel()
