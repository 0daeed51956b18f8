"""What every model family says about its pipeline layers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omnibal.errors import ConfigError


@dataclass(frozen=True)
class LayerRecord:
    """One pipeline layer: the smallest part of a model that a partition moves between stages.

    Attributes:
        name: Unique in the model, such as ``"vision_block.3"``.
        kind: What the layer computes, such as ``"vision_block"``; layers of one kind cost alike.
        sizes: Widths and counts that decide the layer's cost, ``"parameters"`` among them.
        tied_key: Layers with the same key share one weight; None for a layer on its own.
    """

    name: str
    kind: str
    sizes: Mapping[str, int] = field(hash=False)
    tied_key: str | None = None


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The nested configuration ``config[key]``.

    Raises:
        ConfigError: If it is missing or not a mapping.
    """
    value = config.get(key)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} must be a nested configuration, got {value!r}")
    return value


def size(config: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    """The positive integer ``config[key]``.

    >>> size({"hidden_size": 64}, "hidden_size")
    64
    >>> size({"num_key_value_heads": None}, "num_key_value_heads", default=8)
    8

    Raises:
        ConfigError: If it is no positive integer, or is missing and has no default.
    """
    value = config.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise ConfigError(
            f"{key} must be given, got nothing; pass the full configuration, as config.to_dict() gives it"
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} must be a positive integer, got {value!r}")
    return value


def size_pair(config: Mapping[str, Any], key: str) -> tuple[int, int]:
    """The (height, width) at ``config[key]``; one integer stands for both.

    >>> size_pair({"image_size": 448}, "image_size"), size_pair({"image_size": [448, 224]}, "image_size")
    ((448, 448), (448, 224))

    Raises:
        ConfigError: If it is neither a positive integer nor two of them.
    """
    value = config.get(key)
    if isinstance(value, list | tuple) and len(value) == 2:
        height, width = (size({key: side}, key) for side in value)
        return height, width
    side = size(config, key)
    return side, side
