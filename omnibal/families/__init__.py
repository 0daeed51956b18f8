"""Pure facts of each model family: its pipeline layers as records, and what images bring to it."""

from collections.abc import Mapping
from types import MappingProxyType

from omnibal.errors import ConfigError
from omnibal.families import internvl, llava, llava_next, qwen2_vl
from omnibal.families.base import Config, Family, LayerRecord

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        model_type: family
        for family in (internvl.FAMILY, llava.FAMILY, llava_next.FAMILY, qwen2_vl.FAMILY)
        for model_type in family.model_types
    }
)
"""By ``model_type``."""


def trainable_types() -> tuple[str, ...]:
    """Values of ``model_type`` whose models can be trained."""
    return tuple(model_type for model_type, family in FAMILIES.items() if family.layer_records is not None)


def family_of(config: Config) -> Family:
    """The family of a model.

    Raises:
        ConfigError: If no family knows ``config["model_type"]``.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"model_type must be one of {', '.join(FAMILIES)}, got {model_type!r}")
    return FAMILIES[model_type]


def layer_records(config: Config) -> tuple[LayerRecord, ...]:
    """The pipeline layers of any model that can be trained, first to last.

    Args:
        config: The model's whole configuration as a dict (``config.to_dict()``).

    Raises:
        ConfigError: If no family knows how to train ``config["model_type"]``, or the family refuses the configuration.
    """
    model_type = config.get("model_type")
    records = FAMILIES[model_type].layer_records if model_type in trainable_types() else None
    if records is None:
        raise ConfigError(f"model_type must be one of {', '.join(trainable_types())}, got {model_type!r}")
    return records(config)
