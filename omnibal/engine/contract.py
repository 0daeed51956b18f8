"""What a dataset promises to training, checked as samples and steps are read: a broken promise names the sample."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from omnibal.cluster import Layout
from omnibal.data.lengths import SampleLengths
from omnibal.engine.loader import Batch, Loader, Steps, VlmDataset
from omnibal.errors import ConfigError, DataError, OmnibalError
from omnibal.feeds.feed import EpochFeed, Step
from omnibal.formats.collate import IGNORED, Positions
from omnibal.ranks import gather
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.vlm.measure import image_tokens_per_tile


def checked_lengths(dataset: VlmDataset) -> SampleLengths:
    """The dataset's ``lengths()``, refused unless they are SampleLengths, one for each sample."""
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
    """What the model asks of a sample."""

    vocabulary: int
    image_token: int  # the id in whose place an image's features come
    tokens_per_tile: int  # where every tile brings as many (image_tokens is None)
    pixel_shape: tuple[int, ...]  # (channels, height, width) of a tile, (values,) of a patch
    image_integers: Mapping[str, tuple[int, ...]]  # these three as of VisionLanguageModel
    image_tokens: Callable[[Mapping[str, Tensor]], int] | None
    positions: Positions | None
    video_token: int  # the id in whose place a video's features would come; -1 if there is none

    @classmethod
    def of(cls, model: VisionLanguageModel) -> "SampleRules":
        config: Any = model.config
        video_token = getattr(config, "video_token_id", None)
        return cls(
            vocabulary=int(config.text_config.vocab_size),
            image_token=int(config.image_token_id),
            tokens_per_tile=image_tokens_per_tile(model) if model.image_tokens is None else 0,
            pixel_shape=model.pixel_shape,
            image_integers=model.image_integers,
            image_tokens=model.image_tokens,
            positions=model.positions,
            video_token=-1 if video_token is None else int(video_token),
        )

    def problem(self, sample: Any, *, tiles: int, tokens: int, decoded: bool) -> str | None:
        """The first rule that a sample breaks, and what it has instead; ``lengths()`` give it ``tiles`` and ``tokens``.

        Without ``decoded`` images are not wanted, as in ``text()``.
        """
        return next(self._problems(sample, tiles, tokens, decoded), None)

    def _problems(self, sample: Any, tiles: int, tokens: int, decoded: bool) -> Iterator[str]:
        # Only the first problem is taken: each rule may count on those before it.
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
        if (ids == self.video_token).any():
            yield f"have images and text only, got a video (token id {self.video_token})"
        image_tokens = int((ids == self.image_token).sum())
        yield from self._pixel_problems(sample.get("pixel_values"), tiles, decoded)
        if self.image_tokens is None:
            each = self.tokens_per_tile
            if image_tokens != tiles * each:
                yield f"have {each} image tokens (id {self.image_token}) for each of {tiles} tiles, got {image_tokens}"
        elif decoded:
            yield from self._integer_problems(sample, image_tokens, bool(tiles))
            yield from self._position_problems(sample)

    def _integer_problems(self, sample: Mapping[str, Any], image_tokens: int, has_images: bool) -> Iterator[str]:
        for name, shape in self.image_integers.items():
            value: Any = sample.get(name)
            is_integer = isinstance(value, Tensor) and value.dtype == torch.int64
            if has_images and (not is_integer or value.dim() == 0 or value.shape[1:] != shape):
                sides = "".join(f", {side}" for side in shape)
                yield f"have {name} that are a tensor of int64 of shape (entries{sides}), got {_kind(value)}"
        try:
            wanted = self.image_tokens(sample) if has_images and self.image_tokens is not None else 0
        except DataError as error:
            yield f"have images that fit one another: {error}"
        if image_tokens != wanted:
            yield f"have {wanted} image tokens (id {self.image_token}) for its images, got {image_tokens}"

    def _position_problems(self, sample: Mapping[str, Any]) -> Iterator[str]:
        try:
            if self.positions is not None:
                self.positions(sample["input_ids"], sample)
        except DataError as error:
            yield f"have images that fit its tokens: {error}"

    def _pixel_problems(self, pixels: Any, tiles: int, decoded: bool) -> Iterator[str]:
        if not decoded and pixels is not None:
            yield f"have no pixel_values in text(), got {_kind(pixels)}"
        is_image = isinstance(pixels, Tensor) and pixels.is_floating_point() and pixels.shape[1:] == self.pixel_shape
        unit = "patches" if len(self.pixel_shape) == 1 else "tiles"
        if pixels is not None and not is_image:
            yield f"have pixel_values of shape ({unit}, {', '.join(map(str, self.pixel_shape))}), got {_kind(pixels)}"
        found = 0 if pixels is None else len(pixels)
        if decoded and found != tiles:
            yield f"have as many {unit} as its lengths() say, {tiles}, got {found}"


class CheckedSamples(Dataset[dict[str, Any]]):
    """A dataset whose samples are checked as they are read."""

    def __init__(self, dataset: VlmDataset, lengths: SampleLengths, rules: SampleRules) -> None:
        self._dataset, self._lengths, self._rules = dataset, lengths, rules

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._checked(self._dataset.__getitem__, index, decoded=True)

    def text(self, index: int) -> dict[str, Any]:
        return self._checked(self._dataset.text, index, decoded=False)

    def lengths(self) -> SampleLengths:
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
    """The lowest and the highest id, if they are outside of the vocabulary."""
    if len(ids):
        yield from (end for end in map(int, ids.aminmax()) if not 0 <= end < vocabulary)


def read_step(
    loader: Loader, steps: Steps | None, *, layout: Layout, rank: int, device: torch.device, where: str
) -> tuple[Step, list[Batch], int]:
    """Read a step whole before it starts: the step, this rank's packs of it, and the target tokens of all ranks' packs.

    All ranks call this together. ``steps`` is ``iter(loader)``, where the step is to come from that.
    """
    # A collective between the schedule's sends and receives would deadlock, and a rank that cannot read its samples
    # must stop the others before they wait for it. So all ranks add up, in one all-reduce before the step: target
    # tokens, failures, and a number per replica that tells whether its first and last stage have read the same labels.
    failure: Exception | None = None
    batches: list[Batch] = []
    try:
        step, batches = loader.next_step() if steps is None else _next_of(steps)
    except StopIteration:
        failure = ConfigError("data_iter must have a step left, got its end; take iter(loader) for another epoch")
    except Exception as error:  # any failure must reach the other ranks
        failure = error
    place = layout.place(rank)
    is_first, is_last = place.stage == 0, place.stage == layout.num_stages - 1
    counts = torch.zeros(2 + layout.num_replicas, dtype=torch.int64)
    if is_last:
        counts[0] = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
    counts[1] = failure is not None
    # The first stage adds what the last one takes away: a replica whose stages read the same is left with zero.
    sign = is_first - is_last
    counts[2 + place.replica] = sign * _digest_of(batches) if sign else 0
    counts = counts.to(device)
    dist.all_reduce(counts)
    targets, failures, *differences = counts.tolist()
    if failures:
        gather(failure, where=where)  # raises the first one on all ranks
    if any(differences):
        raise _disagreement(loader, step, batches)
    return step, batches, targets


def _next_of(steps: Steps) -> tuple[Step, list[Batch]]:
    found: Any = next(steps)
    # DeepSpeed's own engine takes any iterator over batches.
    if not isinstance(found, tuple) or not isinstance(found[0], Step):
        raise ConfigError(f"data_iter must be iter(loader) of the loader, got an iterator over {type(found).__name__}")
    return found


def _disagreement(loader: Loader, step: Step, batches: list[Batch]) -> DataError:
    """Name the sample that two stages read differently, all ranks together."""
    assert isinstance(loader.feed, EpochFeed), "the samples of a stream are read once"
    packs = loader.feed.sampler.step(step.index)
    own = [packs.pack(loader.feed.rank, number).tolist() for number in range(len(batches))]
    seen: dict[int, int] = {}
    read = [entry for found in gather(_digests(own, batches)) for entry in found.items()]
    sample = next(sample for sample, number in read if seen.setdefault(sample, number) != number)
    return DataError(
        f"text({sample}) of the dataset must have the labels of [{sample}], got others; "
        "the last stage would train on another sample than the first one reads"
    )


def _digest_of(batches: Sequence[Batch]) -> int:
    """A number that tells the labels of packs from others: they are what the last stage trains on."""
    number = 0
    for batch in batches:
        number = _digest(batch["labels"], number)
    return number


def _digests(packs: Sequence[Sequence[int]], batches: Sequence[Batch]) -> dict[int, int]:
    """As ``_digest_of``, for each sample; ``packs`` are the sample indices of the batches."""
    found = {}
    for samples, batch in zip(packs, batches, strict=True):
        for sample, (start, stop) in zip(samples, pairwise(batch["cu_seq_lens"].tolist()), strict=False):
            found[sample] = _digest(batch["labels"][0, start:stop])
    return found


def _digest(labels: Tensor, before: int = 0) -> int:
    return crc32(labels.numpy().data, before)
