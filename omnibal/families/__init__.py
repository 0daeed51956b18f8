"""Pure facts of each model family: its pipeline layers as records, what images bring to it, its names and its text.

One file has the facts of a family, and a record of them is all that the rest of the package knows. ``register`` adds a
family from outside.
"""

from collections.abc import Mapping
from types import MappingProxyType

from omnibal.errors import ConfigError
from omnibal.families import internvl, llava, llava_next, qwen_vl
from omnibal.families.base import Config, Family, LayerRecord

_FAMILIES: dict[str, Family] = {}
FAMILIES: Mapping[str, Family] = MappingProxyType(_FAMILIES)
"""By ``model_type``."""


def register(family: Family) -> None:
    """Adds a family, in this process: every process of a run must.

    Raises:
        ConfigError: A ``model_type`` of it is another family's.
    """
    for model_type in family.model_types:
        if model_type in _FAMILIES:
            raise ConfigError(f"model_types of a family must be its own, got {model_type!r}, which is registered")
    _FAMILIES.update(dict.fromkeys(family.model_types, family))


for _family in (internvl.FAMILY, llava.FAMILY, llava_next.NEXT, llava_next.ONEVISION, qwen_vl.SECOND, qwen_vl.THIRD):
    register(_family)


def family_of(config: Config) -> Family:
    """The family of a model.

    Raises:
        ConfigError: If no family knows ``config["model_type"]``.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"model_type must be one of {', '.join(FAMILIES)}, got {model_type!r}; "
            "omnibal.families.register adds another"
        )
    return FAMILIES[model_type]


def layer_records(config: Config) -> tuple[LayerRecord, ...]:
    """The pipeline layers of any known model, first to last.

    Args:
        config: The model's whole configuration as a dict (``config.to_dict()``).

    Raises:
        ConfigError: If no family knows ``config["model_type"]``, or the family refuses the configuration.
    """
    return family_of(config).layer_records(config)
