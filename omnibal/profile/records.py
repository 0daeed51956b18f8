"""What each layer of a model costs: the records that measuring writes and solving reads."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal, get_type_hints

from pydantic import create_model

from omnibal.cost import CostModel
from omnibal.device import Device
from omnibal.errors import ConfigError
from omnibal.families.base import LayerRecord, Module, TrainedCount, kinds_of, spelled_out, trained_by_module
from omnibal.records import Record, read_record

Level = Literal["none", "selective", "full"]
LEVELS: Final[tuple[Level, ...]] = ("none", "selective", "full")
"""From the one that keeps most to the one that keeps least."""
FLOAT32, FLOAT16 = 4, 2  # bytes of a number
ELEMENT_BYTES: Final = {"bfloat16": FLOAT16, "float32": FLOAT32}  # of a parameter, by the dtype of the forward pass
MOST_LAYERS: Final = 10**6  # no model has more: a number beyond it is a slip


def every_layer(level: Level, num_layers: int) -> tuple[Level, ...]:
    return (level,) * num_layers


def check_levels(levels: Sequence[str], num_layers: int) -> None:
    if len(levels) != num_layers:
        raise ConfigError(f"recompute must have a level for each of {num_layers} layers, got {len(levels)}")
    unknown = sorted(set(levels) - set(LEVELS))
    if unknown:
        raise ConfigError(f"recompute must be one of {', '.join(LEVELS)} for each layer, got {unknown[0]!r}")


def levels_in_words(levels: Iterable[Level]) -> str:
    """Levels of consecutive layers as people read them.

    >>> levels_in_words(("full", "full", "none"))
    '2 full, 1 none'
    """
    return ", ".join(f"{len(list(group))} {level}" for level, group in groupby(levels))


def levels_from_words(words: str) -> tuple[Level, ...]:
    """The inverse of `levels_in_words`; an entry that is not understood is left out, so that the count is wrong.

    >>> levels_from_words("2 full, none")
    ('full', 'full')
    """
    levels: list[Level] = []
    for entry in words.split(","):
        count, _, word = entry.strip().partition(" ")
        repeated = min(int(count), MOST_LAYERS) if count.isdecimal() else 0
        levels += [level for level in LEVELS if level == word] * repeated
    return tuple(levels)


VERSION = 7  # of the file; profiles of other versions are refused
DEGREES: Final = ("vision", "language")
"""What has a degree of tensor parallelism of its own; the projector goes with the ViT."""


def degrees_of(tensor_parallel: int | Mapping[str, int]) -> dict[str, int]:
    """Devices that share a layer of each module, where one number stands for both."""
    given = dict.fromkeys(DEGREES, tensor_parallel) if isinstance(tensor_parallel, int) else dict(tensor_parallel)
    if set(given) != set(DEGREES):
        raise ConfigError(
            f"tensor_parallel must be one number, or one each of {' and '.join(DEGREES)}, got {tensor_parallel!r}"
        )
    if min(given.values()) < 1:
        raise ConfigError(f"tensor_parallel must be positive, got {tensor_parallel!r}")
    return {name: given[name] for name in DEGREES}


def degree_of(degrees: Mapping[str, int], module: Module) -> int:
    return degrees["language" if module == "language" else "vision"]


def _one_or_all(degrees: Mapping[str, int]) -> int | dict[str, int]:
    return degrees["language"] if len(set(degrees.values())) == 1 else dict(degrees)


_OF_RECORDS = ("kind", "module", "sizes", "tied_key")  # what layers' records and costs both say
_NUMBERS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "optimizer_seconds", "spread")


@dataclass(frozen=True)
class LayerCost:
    """What one pipeline layer costs.

    Raises:
        ConfigError: A cost is negative or not finite, or a recompute level lacks its bytes.
    """

    name: str
    """Unique in the model, such as ``"vision_block.3"``."""
    kind: str
    """What the layer computes, such as ``"window_block"``."""
    _: KW_ONLY
    module: Module
    """The part of the model that the layer belongs to."""
    forward_seconds: CostModel
    """Forward pass of a micro-batch."""
    backward_seconds: CostModel
    """Backward pass to the inputs, and to weights whose gradient cannot wait; beside the next, a part of the whole."""
    weight_seconds: CostModel = field(default_factory=CostModel)
    """Backward pass to the weights, as far as it can wait; 1F1B runs it together with the one to the inputs. Nothing if
    frozen."""
    split_seconds: CostModel = field(default_factory=CostModel)
    """What both parts of the backward pass take longer apart than together."""
    pending_bytes: CostModel = field(default_factory=CostModel)
    """What waiting for the backward pass to the weights keeps once the one to the inputs is done, at every level."""
    output_bytes: CostModel
    """What a cut after this layer sends, and receives as its gradient."""
    saved_bytes: Mapping[str, CostModel]
    """What autograd keeps from forward to backward, for each recompute level, ``"none"`` and ``"full"`` at least."""
    recompute_seconds: Mapping[str, CostModel] = field(default_factory=dict)
    """What a level adds to the backward pass; if not given, nothing for ``"none"`` and a forward pass for others."""
    parameter_bytes: int = 0
    """Parameters in the dtype of the forward pass."""
    gradient_bytes: int = 0
    """Gradients before any sharding; nothing if frozen."""
    optimizer_bytes: int = 0
    """Optimizer state and master weights before any sharding; nothing if frozen."""
    optimizer_seconds: float = 0.0
    """One optimizer step of these parameters, unsharded."""
    trainable: bool = True
    """Whether any parameter of this layer is trained."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Widths and counts that decide the costs, ``"parameters"`` among them."""
    tied_key: str | None = None
    """Layers with the same key share their parameters."""
    spread: float = 0.0
    """Largest relative spread among the measurements behind these costs; 0 for analytic costs."""

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} of layer {self.name} must be finite and not negative, got {value!r}")
        for name in ("optimizer_seconds", "spread"):
            object.__setattr__(self, name, float(getattr(self, name)))
        missing = {"none", "full"} - set(self.saved_bytes)
        if missing:
            raise ConfigError(f"saved_bytes of layer {self.name} must have the level {min(missing)!r}, got none")
        seconds = {level: CostModel() if level == "none" else self.forward_seconds for level in self.saved_bytes}
        unknown = set(self.recompute_seconds) - set(seconds)
        if unknown:
            raise ConfigError(
                f"recompute_seconds of layer {self.name} must have levels of saved_bytes, got {min(unknown)!r}"
            )
        object.__setattr__(self, "recompute_seconds", seconds | dict(self.recompute_seconds))

    @property
    def part(self) -> Module:
        """The part of a model whose phases run this layer; the projector belongs to vision."""
        return "vision" if self.module == "projector" else self.module

    @property
    def trained(self) -> TrainedCount:
        """Parameters that get a gradient, and all; nothing where the profile does not say how many there are."""
        parameters = self.sizes.get("parameters", 0)
        return TrainedCount(round(parameters * self.gradient_bytes / max(self.parameter_bytes, 1)), parameters)


@dataclass(frozen=True)
class ModelProfile:
    """The costs of every layer of a model, and what they hold for.

    Args:
        layers: One cost per pipeline layer, in order.
        device: What the costs hold for, such as ``"A100-80GB"``.
        dtype: Of the forward pass, such as ``"bfloat16"``.
        tensor_parallel: How many such devices share each layer: one number each of ``"vision"`` (the projector with it)
            and ``"language"``, or one for both.
        versions: Versions of the software behind measured costs; empty for analytic ones.
        frozen: What is not trained: kinds of layers and patterns of weights' names, as ``check_frozen`` gives them; by
            default the kinds of layers that are not.

    Raises:
        ConfigError: There is no layer, two have one name, the whole model costs no time, or no device has a layer.
    """

    layers: tuple[LayerCost, ...]
    _: KW_ONLY
    device: str
    dtype: str
    tensor_parallel: Mapping[str, int] = 1  # type: ignore[assignment]  # one number becomes two
    versions: Mapping[str, str] = field(default_factory=dict)
    frozen: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ConfigError("a profile must have a layer, got none")
        names = [layer.name for layer in self.layers]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"layers of a profile must have different names, got {twice!r} twice")
        if all(layer.forward_seconds + layer.backward_seconds == CostModel() for layer in self.layers):
            raise ConfigError("a model must cost some time, got a profile of zeros")
        object.__setattr__(self, "tensor_parallel", degrees_of(self.tensor_parallel))
        if self.frozen == self._frozen_kinds():
            object.__setattr__(self, "frozen", None)

    @property
    def devices(self) -> str:
        """What has a layer, for people: ``"A100-80GB"``, or ``"2 x A100-80GB"`` where two share it."""
        degrees = _one_or_all(self.tensor_parallel)
        if isinstance(degrees, int):
            return self.device if degrees == 1 else f"{degrees} x {self.device}"
        return ", ".join(f"{count} x {self.device} ({module})" for module, count in degrees.items())

    @property
    def num_tensor(self) -> int:
        """Devices that share a layer, where the whole model has one such number."""
        degrees = _one_or_all(self.tensor_parallel)
        if isinstance(degrees, dict):
            raise ConfigError(f"tensor_parallel must be one number for vision and language here, got {degrees}")
        return degrees

    @property
    def content_hash(self) -> str:
        return _hash(self._content())

    @property
    def frozen_parts(self) -> tuple[str, ...]:
        return self._frozen_kinds() if self.frozen is None else self.frozen

    @property
    def trained(self) -> dict[str, TrainedCount]:
        return trained_by_module((layer, layer.trained) for layer in self.layers)

    @property
    def adapter_parameters(self) -> int:
        return sum(layer.sizes.get("adapters", 0) for layer in self.layers)

    def is_of(self, device: Device) -> bool:
        """Whether the costs hold for a device, whose name may be torch's; one named ``cpu`` is any CPU."""
        if self.device == device.name or device.name.lower() in self.device.lower().replace(",", " ").split():
            return True
        try:
            return Device.named(self.device).name == device.name
        except ConfigError:
            return False

    def _frozen_kinds(self) -> tuple[str, ...]:
        weighty = [layer for layer in self.layers if layer.parameter_bytes]
        return tuple(sorted(kinds_of([layer for layer in weighty if not layer.trainable], weighty)))

    @property
    def frozen_front(self) -> int:
        # No gradient passes the layers before the first trained one.
        trained = (index for index, layer in enumerate(self.layers) if layer.trainable)
        return next(trained, len(self.layers))

    @property
    def reached(self) -> list[bool]:
        """Whether the backward pass runs each layer: it ends at the first trained one of each encoder."""
        reached, begun, encoder = list[bool](), set[Module](), "vision"
        for layer in self.layers:
            # Gradients of the projector's input go to the encoder before it, those of the LLM's to both encoders.
            passes = encoder in begun if layer.module == "projector" else layer.module == "language" and bool(begun)
            if layer.trainable or passes:
                begun.add(layer.part)
            encoder = layer.module if layer.module in ("sound", "vision") else encoder
            reached.append(layer.part in begun)
        return reached

    def levels_like(self, recompute: Sequence[Level]) -> tuple[Level, ...]:
        """A recompute level for each layer, ``"none"`` in place of one that its costs do not have."""
        # Counted costs have no "selective" for layers outside blocks: what it would drop there is hardly anything.
        return tuple(
            level if level in layer.saved_bytes else "none" for level, layer in zip(recompute, self.layers, strict=True)
        )

    def check_matches(
        self,
        *,
        records: Sequence[LayerRecord] | None = None,
        device: str | None = None,
        dtype: str | None = None,
        tensor_parallel: int | Mapping[str, int] | None = None,
        versions: Mapping[str, str] | None = None,
        frozen: Collection[str] | None = None,
    ) -> None:
        """Refuse to use the profile for another model, device, dtype, frozen parts or software than it is of.

        Only what is given is compared; of ``versions`` only what the profile states too.
        """
        pairs: dict[str, tuple[object, object]] = {
            "device": (self.device, device or self.device),
            "dtype": (self.dtype, dtype or self.dtype),
            "tensor_parallel": (
                _one_or_all(self.tensor_parallel),
                _one_or_all(degrees_of(tensor_parallel or self.tensor_parallel)),
            ),
        }
        for name, version in (versions or {}).items():
            pairs[f"version of {name}"] = (self.versions.get(name, version), version)
        if frozen is not None:
            pairs["frozen parts"] = (list(self.frozen_parts), list(spelled_out(self.layers, frozen)))
        differences = _differences(pairs)
        if records is not None:
            differences += _layer_differences(self.layers, records)
        if differences:
            raise ConfigError(f"profile must fit this run, got {'; '.join(differences)}; make the profile again")

    def save(self, path: str | Path) -> None:
        content = self._content()
        Path(path).write_text(json.dumps({**content, "hash": _hash(content)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> ModelProfile:
        """Read a profile; a ConfigError names the file and the key that is wrong."""
        content = read_record(path, _ProfileFile, "profile", version=VERSION)
        try:
            layers = tuple(
                LayerCost(name, **{field: getattr(group, field) for field in _FIELDS})
                for group in content.layers
                for name in group.names
            )
            profile = cls(
                layers,
                device=content.device,
                dtype=content.dtype,
                tensor_parallel=degrees_of(content.tensor_parallel),
                versions=content.versions,
                frozen=content.frozen,
            )
            if _hash(profile._content()) != content.hash:
                raise ConfigError(f"profile must have the hash {content.hash} it was saved with, got changed content")
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        return profile

    def _content(self) -> dict[str, Any]:
        # Most layers of a model cost the same: equal neighbours are one entry with several names.
        groups = [list(group) for _, group in groupby(self.layers, key=lambda layer: replace(layer, name=""))]
        names = [known.name for known in fields(LayerCost) if known.name != "name"]
        return {
            "version": VERSION,
            "device": self.device,
            "dtype": self.dtype,
            "tensor_parallel": dict(self.tensor_parallel),
            "versions": dict(self.versions),
            **({} if self.frozen is None else {"frozen": list(self.frozen)}),
            "layers": [
                {"names": [layer.name for layer in group]}
                | {name: _json_value(getattr(group[0], name)) for name in names}
                for group in groups
            ],
        }


_FIELDS = {name: kind for name, kind in get_type_hints(LayerCost).items() if name not in ("_", "name")}
_LayersRecord: Any = create_model(
    "_LayersRecord",
    __base__=Record,
    __doc__="Neighbours that cost the same.",
    names=(tuple[str, ...], ...),
    **{name: (kind, ...) for name, kind in _FIELDS.items()},  # type: ignore[call-overload]
)


class _ProfileFile(Record):
    version: int
    device: str
    dtype: str
    tensor_parallel: dict[str, int]
    versions: dict[str, str]
    frozen: tuple[str, ...] | None = None
    layers: tuple[_LayersRecord, ...]
    hash: str


def _json_value(value: Any) -> Any:
    if isinstance(value, CostModel):
        value = {known.name: getattr(value, known.name) for known in fields(value)}
        # floats even where they were given as integers: the hash is that of the content as it is read again
        return {name: float(number) for name, number in value.items() if number}
    if isinstance(value, Mapping):
        return {key: _json_value(entry) for key, entry in sorted(value.items())}
    return value


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _differences(pairs: Mapping[str, tuple[object, object]]) -> list[str]:
    return [f"{name} {own!r} where the run has {other!r}" for name, (own, other) in pairs.items() if own != other]


def _layer_differences(layers: Sequence[LayerCost], records: Sequence[LayerRecord]) -> list[str]:
    if len(layers) != len(records):
        return [f"{len(layers)} layers where the model has {len(records)}"]
    for layer, record in zip(layers, records, strict=True):
        found = {f"{name} of {layer.name}": (getattr(layer, name), getattr(record, name)) for name in _OF_RECORDS}
        if difference := _differences({"layer": (layer.name, record.name)} | found):
            return difference[:1]
    return []
