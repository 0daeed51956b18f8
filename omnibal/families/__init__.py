"""Pure facts of each model family: its pipeline layers as records, what images bring to it, its names and its text."""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Final

from omnibal.errors import ConfigError, said
from omnibal.families import qwen_vl, sounds, tiled
from omnibal.families.base import Config, Family, LayerRecord

_FAMILIES: dict[str, Family] = {}
FAMILIES: Mapping[str, Family] = MappingProxyType(_FAMILIES)
"""By ``model_type``."""
# Why other models that people ask for are none that ``register`` could add as it is.
REFUSED: Final = {
    "gemma3": "all tokens of an image see each other, later ones too, where packs know causal attention alone",
    **dict.fromkeys(
        ("idefics3", "smolvlm"),
        "marks of rows and columns stand between an image's tiles, where an image's tokens must be one run",
    ),
}


def register(family: Family) -> None:
    """Add a family, in this process; all processes import the module that ``omnibal.model.family`` names.

    Raises:
        ConfigError: Another family has one of its ``model_types``.
    """
    for model_type in family.model_types:
        if model_type in _FAMILIES:
            raise ConfigError(f"model_types of a family must be its own, got {model_type!r}, which is registered")
    _FAMILIES.update(dict.fromkeys(family.model_types, family))


for _family in (
    tiled.INTERNVL,
    tiled.LLAVA,
    tiled.OF_CANVASES,
    qwen_vl.SECOND,
    qwen_vl.THIRD,
    qwen_vl.THIRD_WITH_EXPERTS,
    sounds.AUDIO,
    sounds.OMNI,
):
    register(_family)


def load(module: str) -> None:
    try:
        import_module(module)
    except ConfigError:
        raise
    except Exception as error:  # a user's own code may raise anything
        raise ConfigError(
            f"omnibal.model.family must be a module that can be imported, got {module!r}: {said(error)}; "
            "install it, or add its folder to PYTHONPATH"
        ) from error


def family_of(config: Config) -> Family:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        reason = REFUSED.get(str(model_type), "omnibal.model.family names a module that registers another")
        raise ConfigError(f"model_type must be one of {', '.join(FAMILIES)}, got {model_type!r}; {reason}")
    return FAMILIES[model_type]


def layer_records(config: Config) -> tuple[LayerRecord, ...]:
    """The pipeline layers of any known model, first to last, from its whole configuration (``config.to_dict()``)."""
    return family_of(config).layer_records(config)
