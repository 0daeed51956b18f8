"""Ask a Hugging Face model about images: what a person tries first with a model that they have trained."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omnibal.errors import ConfigError, DataError, said
from omnibal.formats.chat import IMAGE_MARK, Conversation, Picture, Turn
from omnibal.formats.media import load_image
from omnibal.formats.model_format import ModelFormat, load_part
from omnibal.formats.text import Rendered, encode
from omnibal.vlm.lora import base_of, load_adapters


class Answerer:
    """A model's folder as transformers itself loads it: nothing of the pipeline is involved."""

    def __init__(self, folder: str | Path, *, device: str = "cpu") -> None:
        from transformers import AutoModelForImageTextToText

        self._format = ModelFormat(folder)
        self._model = _whole(AutoModelForImageTextToText, Path(folder)).to(_usable(device)).eval()

    def answer(self, question: str, images: Sequence[Picture] = (), *, max_new_tokens: int = 64) -> str:
        """The likeliest answer, token by token.

        Args:
            question: May hold one ``<image>`` for each image; without any, images come before the question.
        """
        if IMAGE_MARK not in question:
            question = f"{IMAGE_MARK}\n" * len(images) + question
        marks = question.count(IMAGE_MARK)
        if marks != len(images):
            raise DataError(f"question must hold one {IMAGE_MARK} per image, got {marks} for {len(images)} images")
        try:
            prompt, pixels = self._prompt(question, tuple(images))
        except ValueError as error:
            raise DataError(str(error)) from error
        device = self._model.device
        answered = self._model.generate(
            input_ids=prompt.to(device),
            attention_mask=torch.ones_like(prompt, device=device),
            max_new_tokens=max_new_tokens,
            **{name: _as_model_takes(value, self._model) for name, value in pixels.items()},
            do_sample=False,
        )
        return str(self._format.tokenizer.decode(answered[0, prompt.shape[1] :], skip_special_tokens=True)).strip()

    def _prompt(self, question: str, images: tuple[Picture, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Token ids (1, tokens) up to where the answer begins, and the tensors of images by their argument's name."""
        # The prompt is rendered with an answer and cut where the answer begins, as it is in training.
        conversation = Conversation((Turn("user", question), Turn("assistant", "an answer")), images)
        self._format.refuse_image_tokens(conversation)
        asked = self._format.render(conversation)
        answer_begins = asked.targets[0][0]
        (encoded,) = encode(self._format.tokenizer, [Rendered(asked.text[:answer_begins], ())])
        pictures = [load_image(image) for image in images]
        loads = self._format.image_loads([picture.size for picture in pictures])
        ids = encoded.expanded(self._format.image_token_id, [load.llm_tokens for load in loads]).ids
        prompt, pixels = torch.from_numpy(ids)[None], self._format.pixels(pictures) if pictures else {}
        if "image_grid_thw" in pixels:  # without these, positions would be those of a text
            pixels["mm_token_type_ids"] = (prompt == self._format.image_token_id).long()
        return prompt, pixels


def _as_model_takes(value: Tensor, model: Any) -> Tensor:
    return value.to(model.device, model.dtype) if value.is_floating_point() else value.to(model.device)


def _whole(model_class: Any, folder: Path) -> Any:
    """The model of a folder, all its weights from there: transformers would draw what is missing at random.

    A folder of adapters names that of the weights that they were trained beside.
    """
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


def _usable(device: str) -> torch.device:
    """A device that tensors can be on, and read from."""
    try:
        torch.empty(1, device=device).cpu()  # "meta" exists and holds nothing
        return torch.device(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch raises all of them
        raise ConfigError(f"device must be one that torch can use here, got {device!r}: {said(error)}") from error
