"""How a model's folder turns conversations and images into what the model reads.

InternVL's tokens are those of transformers' ``InternVLProcessor`` (``replace_image_token``: ``<img>``,
``<IMG_CONTEXT>`` times tokens per tile times tiles, ``</img>``). That class itself needs torchvision for its video
half, so its image half is used directly: the processor class that ``preprocessor_config.json`` names.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from omnibal.data.sources.chat import IMAGE_MARK, Conversation, Rendered, render_chatml
from omnibal.data.sources.folder import load_part
from omnibal.data.sources.template import ChatTemplate, text_start
from omnibal.errors import ConfigError
from omnibal.families import family_of, image_rule, trainable_types
from omnibal.families.base import ImageLoad, ImageRule

SETTINGS = (".json", ".jinja", ".txt", ".model")
"""Endings of the files of a model's folder that are not weights."""


class ModelFormat(ABC):
    """What every family has: a tokenizer, a token that stands for a piece of an image, and a rule for image sizes.

    Args:
        folder: Hugging Face folder with ``config.json``, ``preprocessor_config.json`` and a tokenizer.
        max_tiles: Most tiles of an image, the thumbnail not counted; what the folder says by default.
        min_tiles: Fewest tiles of an image; what the folder says by default.

    Attributes:
        tokenizer: The folder's tokenizer.
        image_token: What a rendered conversation holds once for each image.
        image_token_id: Its id.

    Raises:
        ConfigError: If the folder's parts do not fit one another, or the family has no such limits.
    """

    def __init__(self, folder: Path, *, max_tiles: int | None = None, min_tiles: int | None = None) -> None:
        from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

        config = load_part(AutoConfig, folder)
        self.tokenizer: Any = load_part(AutoTokenizer, folder)
        self._processor: Any = load_part(AutoImageProcessor, folder, backend="pil")
        self._config: dict[str, Any] = config.to_dict()
        self._folder, self._limits = folder, (max_tiles, min_tiles)
        self._rules: dict[int | None, ImageRule] = {None: self._rule(None)}
        self.image_token_id: int = config.image_token_id
        known = self.image_token_id >= 0  # tokenizers raise below 0, and have no token above
        token = self.tokenizer.convert_ids_to_tokens(self.image_token_id) if known else None
        if token is None:
            raise ConfigError(f"image_token_id in {folder}/config.json must be a token, got {self.image_token_id}")
        self.image_token: str = token

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the folder's configuration and tokenizer and of the limits (hexadecimal)."""
        digest = hashlib.blake2b(repr(self._limits).encode(), digest_size=16)
        for file in sorted(self._folder.iterdir()):
            if file.suffix in SETTINGS:
                digest.update(f"{file.name}:{file.stat().st_size}:".encode())
                digest.update(file.read_bytes())
        return digest.hexdigest()

    @abstractmethod
    def render(self, conversation: Conversation) -> Rendered:
        """The conversation as one text that holds `image_token` once for each image."""

    @abstractmethod
    def pixel_values(self, images: Sequence[Image.Image], max_tiles: int | None = None) -> Tensor:
        """The pixels of some images one after another, as the model takes them."""

    def image_load(self, size: tuple[int, int], max_tiles: int | None = None) -> ImageLoad:
        """What an image of ``size`` (width, height) brings; ``max_tiles`` goes before the one given at first."""
        if max_tiles not in self._rules:
            self._rules[max_tiles] = self._rule(max_tiles)
        return self._rules[max_tiles](*size)

    def refuse_image_tokens(self, conversation: Conversation) -> None:
        """Refuses texts that hold by themselves what is to stand for images.

        Raises:
            ValueError: With the reason.
        """
        for turn in conversation.turns:
            text = turn.text.replace(IMAGE_MARK, "") if turn.role == "user" else turn.text
            if self.image_token in text:
                raise ValueError(f"conversations must not hold {self.image_token}, which stands for parts of images")

    def _rule(self, max_tiles: int | None) -> ImageRule:
        most, fewest = self._limits
        return image_rule(self._config, self._processor.to_dict(), max_tiles=max_tiles or most, min_tiles=fewest)


class TaggedFormat(ModelFormat):
    """ChatML with named tokens around an image, and images as tiles, as InternVL has them."""

    def __init__(self, folder: Path, *, max_tiles: int | None = None, min_tiles: int | None = None) -> None:
        super().__init__(folder, max_tiles=max_tiles, min_tiles=min_tiles)
        tokens = family_of(self._config).image_tokens
        start, patch, end = (_named_token(self.tokenizer, *names) for names in tokens.items())
        if patch != self.image_token:
            raise ConfigError(
                f"image_token_id in {folder}/config.json must be the id of {patch}, got {self.image_token}'s"
            )
        self._image = f"{start}{patch}{end}"
        self._start = text_start(self.tokenizer)

    def render(self, conversation: Conversation) -> Rendered:
        """ChatML, with what the tokenizer puts before a text."""
        return render_chatml(conversation, self._image, start=self._start)

    def pixel_values(self, images: Sequence[Image.Image], max_tiles: int | None = None) -> Tensor:
        """The tiles of some images one after another, (tiles, 3, tile_size, tile_size) float32, normalised."""
        most = max_tiles or self._limits[0] or self._processor.max_patches
        processed = self._processor(
            list(images),
            crop_to_patches=True,
            min_patches=min(self._limits[1] or self._processor.min_patches, most),
            max_patches=most,
            return_tensors="np",
        )
        return torch.from_numpy(np.asarray(processed["pixel_values"], dtype=np.float32))


class TemplateFormat(ModelFormat):
    """Any other known family, by its tokenizer's chat template: lengths and token ids, no pixels."""

    def __init__(self, folder: Path, *, max_tiles: int | None = None, min_tiles: int | None = None) -> None:
        super().__init__(folder, max_tiles=max_tiles, min_tiles=min_tiles)
        self._template = ChatTemplate.of(self.tokenizer, self.image_token)

    def render(self, conversation: Conversation) -> Rendered:
        """What the chat template writes."""
        return self._template.render(conversation)

    def pixel_values(self, images: Sequence[Image.Image], max_tiles: int | None = None) -> Tensor:
        """Refused.

        Raises:
            ConfigError: Always.
        """
        trainable, model_type = ", ".join(trainable_types()), self._config["model_type"]
        raise ConfigError(f"model_type must be {trainable} to train on images, got {model_type}")


def open_format(folder: str | Path, *, max_tiles: int | None = None, min_tiles: int | None = None) -> ModelFormat:
    """The format of a model's folder, by its ``model_type``.

    Raises:
        ConfigError: As `ModelFormat` says, and for unknown families.
    """
    from transformers import AutoConfig

    family = family_of(load_part(AutoConfig, Path(folder)).to_dict())
    format_class = TaggedFormat if family.image_tokens else TemplateFormat
    return format_class(Path(folder), max_tiles=max_tiles, min_tiles=min_tiles)


def _named_token(tokenizer: Any, attribute: str, usual: str) -> str:
    name = getattr(tokenizer, attribute, None) or usual
    if tokenizer.convert_tokens_to_ids(name) in (None, tokenizer.unk_token_id):
        raise ConfigError(f"tokenizer must know the token {name}, got a vocabulary of {len(tokenizer)} without it")
    return str(name)
