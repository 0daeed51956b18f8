"""How a model's folder turns conversations and images into what the model reads, and whether its head is tied.

What is particular to a family is in ``omnibal.families``. Image tokens are those of transformers' processors; these
classes themselves need torchvision for their video halves, so that their image halves are used directly: the image
processor that the folder names. Of a video processor the sampling and the patches are used, and pixels are those of
Pillow, as images' are.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from PIL import Image

from omnibal.errors import ConfigError, said
from omnibal.families import family_of
from omnibal.families.base import ImageRule, Size
from omnibal.formats.chat import IMAGE_MARK, Conversation, Picture, Turn
from omnibal.formats.measured import Loads, summed
from omnibal.formats.media import (
    MOST_PIXELS,
    SoundFormat,
    VideoFormat,
    image_size,
    load_image,
    named,
    sound_header,
    video_header,
)
from omnibal.formats.text import PROBE, ChatTemplate, Encoded, Render, Rendered, encode, render_chatml, text_start
from omnibal.records import load_json

if TYPE_CHECKING:
    from torch import Tensor

# endings of the files of a model's folder that are not weights
SETTINGS = (".json", ".jinja", ".txt", ".model")
# dimensions of pixels where a processor pads every image to as many tiles
PADDED_TILES = 5
# Conversations by which a chat template is compared with ChatML.
PROBES: Final = (
    Conversation((Turn("user", "question"), Turn("assistant", PROBE)), ()),
    Conversation(
        (
            *(Turn("system", "rule"), Turn("user", f"{IMAGE_MARK}\nquestion")),
            *(Turn("assistant", PROBE), Turn("user", "question"), Turn("assistant", PROBE)),
        ),
        (b"",),
    ),
)


def load_part(auto_class: Any, folder: Path, **options: Any) -> Any:
    """Read a folder by one of transformers' Auto classes; a ``ConfigError`` where the class cannot read it."""
    if not folder.is_dir():  # transformers would look for it on the hub
        raise ConfigError(f"model's folder must be one with configuration and tokenizer, got {folder}")
    try:
        return auto_class.from_pretrained(folder, trust_remote_code=False, **options)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # files are checked by nobody: what they trip varies with what they hold
        kind = auto_class.__name__
        raise ConfigError(f"model's folder must hold what {kind} reads, got {folder}: {said(error)}") from error


class Media(NamedTuple):
    """The images, videos or sounds of a sample: files, what their headers say, and what each brings."""

    files: tuple[Any, ...] = ()
    headers: tuple[Any, ...] = ()
    loads: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """A sample whose text is not yet tokenised and whose files are not decoded."""

    rendered: Rendered
    images: Media
    videos: Media
    sounds: Media
    max_tiles: int | None

    def loads(self, encoded: Encoded) -> Loads:
        """What the sample brings; in ``encoded`` each image, each sound and each run of a video is still one token."""
        images, videos, sounds = self.images.loads, self.videos.loads, self.sounds.loads
        units, tokens, _, *further = summed(images, videos, sounds)
        text = len(encoded.ids) - len(images) - len(sounds) - sum(len(load.runs) for load in videos)
        return units, text + tokens, int(encoded.is_target[1:].sum()), *further


class ModelFormat:
    """A model folder's tokenizer, its way to write conversations, the token of a piece of an image, and its image rule.

    Of a model that hears alone ``image_token`` is the token of a piece of a sound.

    Tiles are counted without the thumbnail, and limited by what the folder says by default; an image file with more
    than ``max_image_pixels`` counts as broken.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_tiles: int | None = None,
        min_tiles: int | None = None,
        max_image_pixels: int = MOST_PIXELS,
    ) -> None:
        from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

        self._folder, self._limits, self.max_image_pixels = Path(folder), (max_tiles, min_tiles), max_image_pixels
        config = load_part(AutoConfig, self._folder)
        config = getattr(config, "thinker_config", config)  # of Qwen2.5-Omni's folder, whose thinker is trained
        self._config: dict[str, Any] = config.to_dict()
        self.family = family_of(self._config)
        self.tokenizer: Any = load_part(AutoTokenizer, self._folder)
        self._processor: Any = None
        if self.family.sees:
            self._processor = load_part(AutoImageProcessor, self._folder, backend="pil")
        self._rules: dict[int | None, tuple[dict[str, Any], ImageRule]] = {}
        self._rule(None)
        self._kind = "image" if self.family.sees else "audio"
        self.image_token_id: int = getattr(config, f"{self._kind}_token_id")
        known = self.image_token_id >= 0  # tokenizers raise below 0, and have no token above
        token = self.tokenizer.convert_ids_to_tokens(self.image_token_id) if known else None
        if token is None:
            raise ConfigError(
                f"{self._kind}_token_id in {folder}/config.json must be a token, got {self.image_token_id}"
            )
        self.image_token: str = token  # a rendered conversation holds it once for each image
        self.video_token_id: int = getattr(config, "video_token_id", None) or -1
        self.sound_token_id: int = getattr(config, "audio_token_id", None) or -1
        self._template = _chat_template_of(self._folder, self.tokenizer)
        template = self._own_template() if self.family.image_tokens else self._chat_template()
        self.render: Render = self._chatml() if template is None else template.render
        if self.family.image_tokens and template is not None:
            self.render = partial(self._wrapped, template.render)
        # What ends each answer where the folder's chat template writes nothing; empty where it does.
        self.added_end: str = "" if template is None else template.end

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the folder's configuration and tokenizer and of the limits (hexadecimal)."""
        kept = repr(self._limits) + (f", {self.max_image_pixels}" if self.max_image_pixels != MOST_PIXELS else "")
        digest = hashlib.blake2b(f"{kept}, {self._template}".encode(), digest_size=16)
        for file in sorted(self._folder.iterdir()):
            if file.suffix in SETTINGS:
                digest.update(f"{file.name}:{file.stat().st_size}:".encode())
                digest.update(file.read_bytes())
        return digest.hexdigest()

    def pixels(self, images: Sequence[Image.Image], max_tiles: int | None = None) -> "dict[str, Tensor]":
        """The images of a sample as the model takes them, by the names of its arguments.

        ``pixel_values`` are float32, those of all images one after another: tiles, (tiles, 3, height, width), or
        patches, (patches, values).
        """
        options, rule = self._rule(max_tiles)
        processed = self._processor([list(images)], return_tensors="pt", **options)
        found = {name: processed[name] for name in self._processor.model_input_names if name in processed}
        if found["pixel_values"].ndim == PADDED_TILES:
            import torch

            loads = rule([image.size for image in images])
            tiles = [padded[: load.vision_units] for padded, load in zip(found["pixel_values"], loads, strict=True)]
            found["pixel_values"] = torch.cat(tiles)
        return found

    @cached_property
    def sounds(self) -> SoundFormat:
        from transformers import AutoFeatureExtractor

        if self.family.sound_rule is None:
            raise ConfigError(f"model_type must be one whose sounds are known, got {self._config['model_type']!r}")
        extractor = load_part(AutoFeatureExtractor, self._folder)
        rule = self.family.sound_rule(self._config, extractor.to_dict())
        return SoundFormat(extractor, rule, self.tokenizer.convert_ids_to_tokens(self.sound_token_id))

    @cached_property
    def videos(self) -> VideoFormat:
        return VideoFormat(self._folder, self.family, self._config, self.tokenizer)

    def prepare(self, conversation: Conversation, max_tiles: int | None = None) -> Prepared:
        """Read the headers of a conversation's files, and render its text, or raise a ``ValueError``."""
        self._refuse_image_tokens(conversation)
        sizes = tuple(image_size(image, self.max_image_pixels) for image in conversation.images)
        _, rule = self._rule(max_tiles)
        images, videos, sounds = Media(conversation.images, sizes, rule(sizes)), Media(), Media()
        rendered = self.render(conversation)
        if conversation.sounds:
            heard = tuple(map(sound_header, conversation.sounds))
            sounds = Media(conversation.sounds, heard, tuple(map(self.sounds.rule, heard)))
        if conversation.videos:
            headers = tuple(video_header(video, self.max_image_pixels) for video in conversation.videos)
            videos = Media(conversation.videos, headers, tuple(map(self.videos.rule, headers)))
            rendered = rendered.replaced(self.videos.token, [self.videos.text(load) for load in videos.loads])
        return Prepared(rendered, images, videos, sounds, max_tiles)

    def sample(self, prepared: Prepared, *, with_pixels: bool) -> dict[str, Any]:
        """A sample for training: ``input_ids`` and ``labels`` (tokens,) int64, each file as many tokens as it brings.

        Beside them stands what `pixels`, `VideoFormat.pixels` and `SoundFormat.features` return; ``pixel_values`` is
        None where there are none or they are not wanted.
        """
        import torch

        (encoded,) = encode(self.tokenizer, [prepared.rendered])
        runs = {self.image_token_id: [load.llm_tokens for load in prepared.images.loads]} if self.family.sees else {}
        runs |= {self.video_token_id: [run for load in prepared.videos.loads for run in load.runs]}
        runs |= {self.sound_token_id: [load.llm_tokens for load in prepared.sounds.loads]}
        for token, lengths in runs.items():
            encoded = encoded.expanded(token, lengths) if lengths else encoded
        text = {"input_ids": torch.from_numpy(encoded.ids), "labels": torch.from_numpy(encoded.labels)}
        if prepared.videos.files and with_pixels:
            text |= self.videos.pixels(*prepared.videos)
        if prepared.sounds.files and with_pixels:
            text |= self.sounds.features(prepared.sounds.files, prepared.sounds.headers)
        if not prepared.images.files or not with_pixels:
            return {**text, "pixel_values": None}
        images = [self._decoded(*facts) for facts in zip(*prepared.images[:2], strict=True)]
        return {**text, **self.pixels(images, prepared.max_tiles)}

    def check_decodes(self, prepared: Prepared) -> None:
        """Decode all that `sample` would; a ``ValueError`` where a file is not as its header says."""
        for image, size in zip(*prepared.images[:2], strict=True):
            self._decoded(image, size)
        for video, header, load in zip(*prepared.videos, strict=True):
            self.videos.decoded(video, header, load)
        for sound, header in zip(*prepared.sounds[:2], strict=True):
            self.sounds.decoded(sound, header)

    def _decoded(self, image: Picture, size: Size) -> Image.Image:
        decoded = load_image(image, self.max_image_pixels)
        if decoded.size != size:
            raise ValueError(f"image must decode to the size that its header says, got another: {named(image)}")
        return decoded

    def _refuse_image_tokens(self, conversation: Conversation) -> None:
        tokens = [self.image_token, *([self.videos.token] if conversation.videos else [])]
        tokens += [self.sounds.token] if conversation.sounds else []
        for turn in conversation.turns:
            text = turn.text
            for mark in conversation.marks if turn.role == "user" else ():
                text = text.replace(mark, "")
            for token in tokens:
                if token in text:
                    what = "parts of images, videos or sounds"
                    raise ValueError(f"conversations must not hold {token}, which stands for {what}")

    def _rule(self, max_tiles: int | None) -> tuple[dict[str, Any], ImageRule]:
        if max_tiles not in self._rules:
            most, fewest = self._limits
            processor = self._processor.to_dict() if self.family.sees else {}
            self._rules[max_tiles] = self.family.images(
                self._config, processor, max_tiles=max_tiles or most, min_tiles=fewest
            )
        return self._rules[max_tiles]

    @cached_property
    def _image_text(self) -> str:
        """What stands for an image where conversations are ChatML: a piece of one between its brackets."""
        start, piece, end = (_named_token(self.tokenizer, *names) for names in self.family.image_tokens.items())
        if piece != self.image_token:
            raise ConfigError(
                f"image_token_id in {self._folder}/config.json must be the id of {piece}, got {self.image_token}'s"
            )
        return f"{start}{piece}{end}"

    def _chatml(self, image: str | None = None) -> Render:
        return partial(render_chatml, image=image or self._image_text, start=text_start(self.tokenizer))

    def _chat_template(self) -> ChatTemplate:
        return ChatTemplate.of(self.tokenizer, self._template, self.image_token, self._kind)

    def _own_template(self) -> ChatTemplate | None:
        """The folder's chat template where conversations are ChatML otherwise; None if it writes ChatML, or is none."""
        if not (self._image_text and self._template):  # tokens that do not fit are refused first
            return None
        chatml, written = self._chatml(self.image_token), ChatTemplate(self.tokenizer, self._template)
        if all(written.writes(conversation, chatml) for conversation in PROBES):
            return None
        return self._chat_template()

    def _wrapped(self, render: Render, conversation: Conversation) -> Rendered:
        """A conversation with the brackets of an image around each piece that a chat template writes alone."""
        return render(conversation).replaced(self.image_token, [self._image_text] * len(conversation.images))


def _chat_template_of(folder: Path, tokenizer: Any) -> str | None:
    """The chat template that a folder's processor takes, wherever it stands; its tokenizer's if it has no other."""
    from transformers.processing_utils import ProcessorMixin

    try:
        made, _ = ProcessorMixin.get_processor_dict(folder)
    except Exception as error:  # files are checked by nobody: what they trip varies with what they hold
        raise ConfigError(f"chat template must be one that transformers reads, got {folder}: {said(error)}") from error
    found = made.get("chat_template") or tokenizer.chat_template
    template = found.get("default") if isinstance(found, dict) else found
    if found and not isinstance(template, str):
        kinds = f"named ones without a default ({', '.join(map(str, found))})" if isinstance(found, dict) else found
        raise ConfigError(f"chat template must be a text, or have one that is named default, got {kinds} in {folder}")
    return template or None


def _named_token(tokenizer: Any, attribute: str, usual: str) -> str:
    name = getattr(tokenizer, attribute, None) or usual
    if tokenizer.convert_tokens_to_ids(name) in (None, tokenizer.unk_token_id):
        raise ConfigError(f"tokenizer must know the token {name}, got a vocabulary of {len(tokenizer)} without it")
    return str(name)


# Ties --------------------------------------------------------------------------------------------------------------
# transformers ties head and embedding if the configuration says so, unless the folder holds both with different values.

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_ENDS: Final = ("lm_head.weight", "embed_tokens.weight")  # of the names of head and embedding, in every family
_TIE: Final = "tie_word_embeddings"
_CHUNK: Final = 2**20  # bytes that are compared at a time


def with_own_ties(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """The content of a ``config.json``; if the folder holds another head than its embedding, one that ties nothing."""
    return as_tied(config, tied=False) if has_own_head(folder) else config


def as_tied(config: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """A configuration that says whether head and embedding are tied, wherever a family looks for it.

    >>> as_tied({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}}, tied=False)
    {'tie_word_embeddings': False, 'text_config': {'tie_word_embeddings': False}}
    """
    parts = {name: as_tied(value, tied=tied) for name, value in config.items() if name.endswith("_config") and value}
    return {**config, **parts, _TIE: tied}


def is_tied(model: Any) -> bool:
    """Whether the head of a transformers model in memory is its embedding, which its configuration need not know."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and getattr(head, "weight", head) is getattr(embedding, "weight", embedding)


def has_own_head(folder: Path) -> bool:
    """Whether a folder of weights holds a head and an embedding with different values; a broken file holds none.

    Files are compared byte by byte: no torch is needed, and nothing is read if one of the two is missing.
    """
    try:
        head, embedding = (_tensor(folder, end) for end in _ENDS)
        if head is None or embedding is None:
            return False
        one, two = head.content, embedding.content
        chunks = (slice(start, start + _CHUNK) for start in range(0, len(one), _CHUNK))
        return head.kind != embedding.kind or not all(np.array_equal(one[chunk], two[chunk]) for chunk in chunks)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # whoever loads the weights says what is wrong
        return False


class _Tensor(NamedTuple):
    kind: tuple[str, list[int]]  # its dtype and its shape
    content: Any  # its bytes, memory-mapped


def _tensor(folder: Path, end: str) -> _Tensor | None:
    files = [folder / SINGLE_FILE]  # which transformers takes before shards, too
    if not files[0].is_file():
        index = folder / INDEX_FILE
        named = load_json(index)["weight_map"] if index.is_file() else {}
        files = [folder / file for name, file in named.items() if name.endswith(end)]
    for file in files:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, file.stat().st_size)))
        for name, tensor in header.items():
            if name.endswith(end):
                start, stop = tensor["data_offsets"]
                content = np.memmap(file, np.uint8, "r", 8 + length + start, (stop - start,))
                return _Tensor((tensor["dtype"], tensor["shape"]), content)
    return None
