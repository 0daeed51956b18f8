"""What a dataset promises to training, checked as its samples are read: a broken promise names the sample."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import Dataset

from omnibal.data.collate import IGNORED
from omnibal.data.lengths import SampleLengths
from omnibal.engine.loader import Batch, VlmDataset
from omnibal.errors import DataError, OmnibalError
from omnibal.vlm.layer_run import image_tokens_per_tile
from omnibal.vlm.layers import VisionLanguageModel


def checked_lengths(dataset: VlmDataset) -> SampleLengths:
    """The dataset's ``lengths()``.

    Raises:
        DataError: They are no SampleLengths, or not as many as the samples.
    """
    lengths = dataset.lengths()
    if not isinstance(lengths, SampleLengths):
        raise DataError(f"lengths() of the dataset must be SampleLengths, got {type(lengths).__name__}")
    if len(lengths) != len(dataset):
        raise DataError(
            f"lengths() must have an entry for each of the dataset's {len(dataset)} samples, got {len(lengths)}"
        )
    return lengths


@dataclass(frozen=True)
class SampleRules:
    """What the model asks of a sample.

    Attributes:
        vocabulary: Token ids are below it.
        image_token: The id in whose place an image's features come.
        tokens_per_tile: How many of them a tile brings.
        pixel_shape: (channels, height, width) of a tile.
    """

    vocabulary: int
    image_token: int
    tokens_per_tile: int
    pixel_shape: tuple[int, int, int]

    @classmethod
    def of(cls, model: VisionLanguageModel) -> "SampleRules":
        """Those of a model."""
        config: Any = model.config
        vocabulary, image_token = int(config.text_config.vocab_size), int(config.image_token_id)
        return cls(vocabulary, image_token, image_tokens_per_tile(model), model.pixel_shape)

    def problem(self, sample: Any, *, tiles: int, tokens: int, decoded: bool) -> str | None:
        """The first rule that a sample breaks, and what it has instead.

        Args:
            sample: What the dataset gave.
            tiles: What its ``lengths()`` say.
            tokens: Likewise.
            decoded: Whether the images are wanted.
        """
        return next(self._problems(sample, tiles, tokens, decoded), None)

    def _problems(self, sample: Any, tiles: int, tokens: int, decoded: bool) -> Iterator[str]:
        """Each rule is looked at if those before it are kept."""
        if not isinstance(sample, Mapping):
            yield f"be a mapping of input_ids, labels and pixel_values, got {type(sample).__name__}"
        for key in ("input_ids", "labels"):
            value = sample.get(key)
            if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.dim() != 1:
                yield f"have {key} that are a 1-D tensor of int64, got {_kind(value)}"
        ids, labels = sample["input_ids"], sample["labels"]
        if len(labels) != len(ids):
            yield f"have as many labels as input_ids, {len(ids)}, got {len(labels)}"
        if len(ids) != tokens:
            yield f"have as many input_ids as its lengths() say, {tokens}, got {len(ids)}"
        for beyond in _beyond(ids, self.vocabulary):
            yield f"have input_ids from 0 to {self.vocabulary - 1}, the model's vocabulary, got {beyond}"
        for beyond in _beyond(labels[labels != IGNORED], self.vocabulary):
            yield f"have labels from 0 to {self.vocabulary - 1} or {IGNORED}, got {beyond}"
        if len(labels) and labels[0] != IGNORED:
            yield f"begin with the label {IGNORED}, since nothing comes before its first token, got {int(labels[0])}"
        yield from self._image_problems(sample.get("pixel_values"), ids, tiles, decoded)

    def _image_problems(self, pixels: Any, ids: Tensor, tiles: int, decoded: bool) -> Iterator[str]:
        if not decoded and pixels is not None:
            yield f"have no pixel_values in text(), got {_kind(pixels)}"
        is_image = isinstance(pixels, Tensor) and pixels.is_floating_point() and pixels.shape[1:] == self.pixel_shape
        if pixels is not None and not is_image:
            yield f"have pixel_values of shape (tiles, {', '.join(map(str, self.pixel_shape))}), got {_kind(pixels)}"
        found = 0 if pixels is None else len(pixels)
        if decoded and found != tiles:
            yield f"have as many tiles as its lengths() say, {tiles}, got {found}"
        wanted, image_tokens = self.tokens_per_tile, int((ids == self.image_token).sum())
        if image_tokens != tiles * wanted:
            yield f"have {wanted} image tokens (id {self.image_token}) for each of {tiles} tiles, got {image_tokens}"


class CheckedSamples(Dataset[dict[str, Any]]):
    """A dataset whose samples are checked as they are read.

    Args:
        dataset: The samples.
        lengths: Their loads.
        rules: What the model asks of them.
    """

    def __init__(self, dataset: VlmDataset, lengths: SampleLengths, rules: SampleRules) -> None:
        self._dataset, self._lengths, self._rules = dataset, lengths, rules

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._checked(self._dataset.__getitem__, index, decoded=True)

    def text(self, index: int) -> dict[str, Any]:
        """One sample without its images."""
        return self._checked(self._dataset.text, index, decoded=False)

    def lengths(self) -> SampleLengths:
        """The loads of all samples."""
        return self._lengths

    def _checked(self, read: Callable[[int], dict[str, Any]], index: int, *, decoded: bool) -> dict[str, Any]:
        try:
            sample = read(index)
        except OmnibalError:
            raise  # names its file and line
        except Exception as error:
            raise DataError(f"sample {index} must be readable, got {type(error).__name__}: {error}") from error
        tiles, tokens = int(self._lengths.vision_units[index]), int(self._lengths.llm_tokens[index])
        problem = self._rules.problem(sample, tiles=tiles, tokens=tokens, decoded=decoded)
        if problem is not None:
            raise DataError(f"sample {index} must {problem}")
        return sample


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return "none" if value is None else f"a {type(value).__name__}"


def _beyond(ids: Tensor, vocabulary: int) -> Iterator[int]:
    """Ids that are none: the lowest, the highest."""
    if len(ids):
        yield from (end for end in map(int, ids.aminmax()) if not 0 <= end < vocabulary)


def digest(batches: Sequence[Batch]) -> int:
    """A number that tells the token ids and labels of packs from others."""
    number = 0
    for batch in batches:
        number = _digest(batch["input_ids"], batch["labels"], number)
    return number


def digests(packs: Sequence[Sequence[int]], batches: Sequence[Batch]) -> dict[int, int]:
    """As ``digest``, for each sample.

    Args:
        packs: Sample indices of each pack.
        batches: The packs.
    """
    found = {}
    for samples, batch in zip(packs, batches, strict=True):
        for sample, (start, stop) in zip(samples, pairwise(batch["cu_seq_lens"].tolist()), strict=False):
            found[sample] = _digest(batch["input_ids"][0, start:stop], batch["labels"][0, start:stop])
    return found


def _digest(ids: Tensor, labels: Tensor, before: int = 0) -> int:
    return crc32(labels.numpy().data, crc32(ids.numpy().data, before))
