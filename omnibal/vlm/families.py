"""From a Hugging Face folder or configuration to its pipeline layers."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from omnibal.data.sources.formats import load_part
from omnibal.errors import ConfigError
from omnibal.families import layer_records
from omnibal.families.base import LayerRecord
from omnibal.records import read_json
from omnibal.vlm.internvl import internvl
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.vlm.llava import llava, llava_next, llava_onevision
from omnibal.vlm.qwen_vl import qwen_vl
from omnibal.vlm.weights import has_weights, ties_are_broken

LAYERS: Mapping[str, Callable[[Any], VisionLanguageModel]] = MappingProxyType(
    {
        "internvl": internvl,
        "llava": llava,
        "llava_next": llava_next,
        "llava_onevision": llava_onevision,
        "qwen2_vl": qwen_vl,
        "qwen2_5_vl": qwen_vl,
        "qwen3_vl": qwen_vl,
    }
)
"""From ``model_type``, as in ``omnibal.families``, to what makes a model's layers from its configuration."""


def load_model(model: str | Path | PreTrainedConfig) -> VisionLanguageModel:
    """The pipeline layers of a Hugging Face model; no weight is read or made yet.

    Args:
        model: A folder with ``config.json``, or a configuration (which is copied).

    Raises:
        ConfigError: If there is no configuration, no family knows it, or the family refuses it.
    """
    if isinstance(model, PreTrainedConfig):
        return _from_config(deepcopy(model))
    folder = Path(model)
    _check_family(_model_type(folder), f" in {folder / 'config.json'}")
    config = load_part(AutoConfig, folder)
    try:
        loaded = _from_config(config)
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from error
    if has_weights(folder) and ties_are_broken(loaded, folder):
        config.tie_word_embeddings = False
        return _from_config(config)
    return loaded


def _from_config(config: PreTrainedConfig) -> VisionLanguageModel:
    return LAYERS[_check_family(config.model_type)](config)


def load_records(folder: str | Path) -> tuple[LayerRecord, ...]:
    """The pipeline layers of a Hugging Face folder as records, of families that cannot be trained yet as well.

    Raises:
        ConfigError: As of ``load_model``.
    """
    if _model_type(Path(folder)) in LAYERS:
        return load_model(folder).records  # weights may tell more of ties than the configuration
    return layer_records(load_part(AutoConfig, Path(folder)).to_dict())


def _check_family(model_type: str, where: str = "") -> str:
    if model_type not in LAYERS:
        raise ConfigError(f"model_type must be one of {', '.join(LAYERS)}, got {model_type!r}{where}")
    return model_type


def _model_type(folder: Path) -> str:
    """Read here, since transformers would ask whether to run code that comes with a model it does not know."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"model must be a Hugging Face folder or a configuration, got {folder} without config.json")
    try:
        return str(read_json(path, "model's config.json")["model_type"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"model must have a config.json that is an object with a model_type, got {path}") from error
