"""Pure facts of each model family: its pipeline layers as records, and what an image brings to it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from omnibal.errors import ConfigError
from omnibal.families import internvl
from omnibal.families.base import LayerRecord

FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], tuple[LayerRecord, ...]]] = MappingProxyType(
    {"internvl": internvl.layer_records}
)
"""From ``model_type`` to the function that lists the family's pipeline layers."""


def layer_records(config: Mapping[str, Any]) -> tuple[LayerRecord, ...]:
    """The pipeline layers of any known model, first to last.

    Args:
        config: The model's whole configuration as a dict (``config.to_dict()``).

    Raises:
        ConfigError: If no family knows ``config["model_type"]``, or the family refuses the configuration.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"model_type must be one of {', '.join(FAMILIES)}, got {model_type!r}")
    return FAMILIES[model_type](config)
