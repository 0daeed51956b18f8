"""Pure facts of each model family: its pipeline layers as records, and what an image brings to it."""

from collections.abc import Mapping
from types import MappingProxyType

from omnibal.errors import ConfigError
from omnibal.families import internvl, llava, llava_next, qwen2_vl
from omnibal.families.base import Config, Family, ImageRule, LayerRecord

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


def image_rule(
    config: Config, preprocessor: Config, *, max_tiles: int | None = None, min_tiles: int | None = None
) -> ImageRule:
    """What an image brings to a model, by its size.

    Args:
        config: The model's configuration as a dict (``config.to_dict()``).
        preprocessor: The image processor's (``processor.to_dict()``).
        max_tiles: Most tiles of an image where the family has such a limit; what the preprocessor says by default.
        min_tiles: Fewest tiles, likewise.

    Raises:
        ConfigError: If the family is unknown or has no tile limits, or the two configurations do not fit one another.
    """
    family = family_of(config)
    if family.has_tile_limits:
        return family.image_rule(config, preprocessor, max_tiles=max_tiles, min_tiles=min_tiles)
    if max_tiles is not None or min_tiles is not None:
        raise ConfigError(
            f"max_tiles and min_tiles must be left out for {config['model_type']}, got {max_tiles}, {min_tiles}"
        )
    return family.image_rule(config, preprocessor)
