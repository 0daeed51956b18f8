"""Hugging Face vision-language models: as lists of pipeline layers to train, and whole, to ask them about images."""

from omnibal.errors import require

require("torch", "transformers", "safetensors")

from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from omnibal.config.section import LoraSection
from omnibal.errors import ConfigError, DataError, said
from omnibal.families import family_of
from omnibal.families.base import Family, LayerRecord
from omnibal.families.parts import TEXT_MODELS, WITH_EXPERTS
from omnibal.formats.chat import IMAGE_MARK, Conversation, Picture, Turn
from omnibal.formats.model_format import ModelFormat, has_own_head, is_tied, load_part, with_own_ties
from omnibal.formats.text import Rendered
from omnibal.records import read_json
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.vlm.lora import adapters_of, add_adapters, base_of, load_adapters
from omnibal.vlm.payload import Payload

__all__ = ["Answerer", "Payload", "VisionLanguageModel", "load_model"]


def load_model(
    model: str | Path | PreTrainedConfig | PreTrainedModel,
    lora: LoraSection | None = None,
    frozen: Collection[str] = (),
) -> VisionLanguageModel:
    """The pipeline layers of a Hugging Face folder, configuration or model; frozen ones get no adapters."""
    # No weight is kept. Head and embedding are tied as transformers ties them, or as they are in a model in memory.
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


class Answerer:
    """A model's folder as transformers itself loads it: nothing of the pipeline is involved."""

    def __init__(self, folder: str | Path, *, device: str = "cpu") -> None:
        from transformers import AutoModelForImageTextToText

        self._format = ModelFormat(folder)
        self._model = _whole(AutoModelForImageTextToText, Path(folder)).to(usable_device(device)).eval()

    def answer(self, question: str, images: Sequence[Picture] = (), *, max_new_tokens: int = 64) -> str:
        """The likeliest answer, token by token; a question without ``<image>`` has its images before it."""
        if IMAGE_MARK not in question:
            question = f"{IMAGE_MARK}\n" * len(images) + question
        marks = question.count(IMAGE_MARK)
        if marks != len(images):
            raise DataError(f"question must hold one {IMAGE_MARK} per image, got {marks} for {len(images)} images")
        try:
            prompt, pixels = self._prompt(question, tuple(images))
        except ValueError as error:
            raise DataError(str(error)) from error
        device, dtype = self._model.device, self._model.dtype
        answered = self._model.generate(
            input_ids=prompt.to(device),
            attention_mask=torch.ones_like(prompt, device=device),
            max_new_tokens=max_new_tokens,
            **{name: value.to(device, dtype if value.is_floating_point() else None) for name, value in pixels.items()},
            do_sample=False,
        )
        return str(self._format.tokenizer.decode(answered[0, prompt.shape[1] :], skip_special_tokens=True)).strip()

    def _prompt(self, question: str, images: tuple[Picture, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Token ids (1, tokens) up to where the answer begins, and the tensors of images by their argument's name."""
        # The prompt is rendered with an answer and cut where the answer begins, as it is in training.
        prepared = self._format.prepare(Conversation((Turn("user", question), Turn("assistant", "an answer")), images))
        text = prepared.rendered.text[: prepared.rendered.targets[0][0]]
        sample = self._format.sample(replace(prepared, rendered=Rendered(text, ())), with_pixels=True)
        prompt = sample["input_ids"][None]
        pixels = {name: sample[name] for name in sample.keys() - {"input_ids", "labels"} if sample[name] is not None}
        if "image_grid_thw" in pixels:  # without these, positions would be those of a text
            pixels["mm_token_type_ids"] = (prompt == self._format.image_token_id).long()
        return prompt, pixels


def _whole(model_class: Any, folder: Path) -> Any:
    """The model of a folder, all its weights from there: transformers would draw what is missing at random."""
    # A folder of adapters names that of the weights that they were trained beside.
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    adapters = load_adapters(folder)
    if adapters is not None:
        from peft import PeftModel

        base = base_of(adapters)
        if base is None:
            raise ConfigError(f"{folder} must name the folder of the model beside its adapters, got none; merge them")
        return PeftModel.from_pretrained(_whole(model_class, base), folder)
    model, found = load_part(model_class, folder, **options)
    for problem, names in (("missing", found["missing_keys"]), ("of another shape", found["mismatched_keys"])):
        if names:
            named = ", ".join(sorted(map(str, names))[:3])
            raise ConfigError(f"{folder} must hold every weight of the model, got {len(names)} {problem}: {named}")
    return model


def usable_device(device: str) -> torch.device:
    try:
        torch.empty(1, device=device).cpu()  # "meta" exists and holds nothing
        return torch.device(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch raises all of them
        raise ConfigError(f"device must be one that torch can use here, got {device!r}: {said(error)}") from error
