"""Hugging Face vision-language models as lists of pipeline layers: from a folder or configuration to its layers."""

from omnibal.errors import require

require("torch", "transformers", "safetensors")

from collections.abc import Collection
from copy import deepcopy
from pathlib import Path
from pkgutil import resolve_name

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from omnibal.config import LoraSection
from omnibal.errors import ConfigError
from omnibal.families import family_of
from omnibal.families.base import Family, LayerRecord
from omnibal.families.parts import TEXT_MODELS, WITH_EXPERTS
from omnibal.formats.model_format import load_part
from omnibal.formats.ties import has_own_head, is_tied, with_own_ties
from omnibal.records import read_json
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.vlm.lora import adapters_of, add_adapters
from omnibal.vlm.payload import Payload

__all__ = ["Payload", "VisionLanguageModel", "load_model"]


def load_model(
    model: str | Path | PreTrainedConfig | PreTrainedModel,
    lora: LoraSection | None = None,
    frozen: Collection[str] = (),
) -> VisionLanguageModel:
    """The pipeline layers of a Hugging Face folder, configuration or model; frozen ones get no adapters.

    No weight is kept. Head and embedding are tied as transformers ties them, or as they are in a model in memory.
    """
    loaded = _loaded(model)
    if lora is not None:
        add_adapters(loaded, adapters_of(loaded, lora, frozen))
    return loaded


def _loaded(model: str | Path | PreTrainedConfig | PreTrainedModel) -> VisionLanguageModel:
    if isinstance(model, PreTrainedModel):
        return _from_config(_as_tied(model.config, tied=is_tied(model)))
    if isinstance(model, PreTrainedConfig):
        return _from_config(deepcopy(model))  # layers keep it
    folder = Path(model)
    _family_in(folder)
    config = load_part(AutoConfig, folder)
    try:
        return _from_config(_as_tied(config, tied=False) if has_own_head(folder) else config)
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from error


def _as_tied(config: PreTrainedConfig, *, tied: bool) -> PreTrainedConfig:
    """A copy of a configuration that says whether head and embedding are tied, wherever a family looks for it."""
    changed = deepcopy(config)
    for part in (changed, changed.get_text_config()):
        part.tie_word_embeddings = tied
    return changed


def _from_config(config: PreTrainedConfig) -> VisionLanguageModel:
    family = family_of({"model_type": config.model_type})
    if family.layers is None:
        raise ConfigError(f"model_type must be of a family with layers to be trained, got {config.model_type!r}")
    if _has_experts(config):
        trained = ", ".join(kind for kind in TEXT_MODELS if kind not in WITH_EXPERTS)
        raise ConfigError(
            f"text_config.model_type must be one of {trained} to be trained in a pipeline, "
            f"got {config.get_text_config().model_type!r}"
        )
    # Families name their function as text, so that their facts load no torch.
    return resolve_name(family.layers)(config)  # type: ignore[no-any-return]


def load_records(
    folder: str | Path, lora: LoraSection | None = None, frozen: Collection[str] = ()
) -> tuple[LayerRecord, ...]:
    """The pipeline layers of a Hugging Face folder as records, of models that cannot be trained as well."""
    family, config = _family_in(Path(folder)), load_part(AutoConfig, Path(folder))
    if lora is not None or not (family.layers is None or _has_experts(config)):
        return load_model(folder, lora, frozen).records
    return family.layer_records(with_own_ties(config.to_dict(), Path(folder)))


def _has_experts(config: PreTrainedConfig) -> bool:
    return config.get_text_config().model_type in WITH_EXPERTS


def _family_in(folder: Path) -> Family:
    # Read here, since transformers would ask whether to run code that comes with a model it does not know.
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"model must be a Hugging Face folder or a configuration, got {folder.absolute()} without config.json; "
            "`hf download NAME --local-dir FOLDER` fetches one"
        )
    content = read_json(path, "model's config.json")
    if not isinstance(content, dict) or "model_type" not in content:
        raise ConfigError(f"model must have a config.json that is an object with a model_type, got {path}")
    try:
        return family_of(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
