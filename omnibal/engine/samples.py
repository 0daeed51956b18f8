"""Samples with an index: what a dataset promises to training, and a rank's plan and loader made from it.

Samples are checked as they are read: a broken promise names the sample.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from omnibal.cluster import PipelinePosition
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packing_spec import PackingOptions
from omnibal.data.source_draws import typical_lengths
from omnibal.engine.loader import LEFT_OUT, Loader, PackReader, VlmDataset
from omnibal.engine.resolve import ResolvedRun
from omnibal.errors import ConfigError, DataError, OmnibalError, said
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.formats.collate import IGNORED, MropeRule, Positions
from omnibal.formats.conversations import ConversationDataset
from omnibal.formats.measured import Broken
from omnibal.plan import Plan
from omnibal.ranks import check_shared, gather, rank_zero_first, run_on_all_ranks
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.vlm.measure import image_tokens_per_tile
from omnibal.workspace import Workspace

LOG: Final = logging.getLogger(__name__)
MEASURES: Final = "measures the samples"  # what rank 0 does while the others wait


def checked_lengths(dataset: VlmDataset, name: str = "dataset") -> SampleLengths:
    """The dataset's ``lengths()``, refused unless they are SampleLengths, one for each of one or more samples."""
    lengths = dataset.lengths()
    if not isinstance(lengths, SampleLengths):
        raise DataError(f"lengths() of the dataset must be SampleLengths, got {type(lengths).__name__}")
    if len(lengths) != len(dataset):
        raise DataError(
            f"lengths() must have an entry for each of the dataset's {len(dataset)} samples, got {len(lengths)}"
        )
    if not len(lengths):
        raise DataError(f"{name} must hold at least one sample, got none")
    return lengths


@dataclass(frozen=True)
class SampleRules:
    """What the model asks of a sample."""

    vocabulary: int
    image_token: int  # the id in whose place an image's features come
    tokens_per_tile: int  # where every tile brings as many (image_tokens is None)
    pixel_shape: tuple[int, ...]  # (channels, height, width) of a tile, (values,) of a patch
    image_integers: Mapping[str, tuple[int, ...]]  # this and the next two are the fields of VisionLanguageModel
    image_tokens: Callable[[Mapping[str, Tensor]], int] | None
    positions: Positions | None
    video_token: int  # the id in whose place a video's features would come; -1 if there is none

    @classmethod
    def of(cls, model: VisionLanguageModel) -> "SampleRules":
        config: Any = model.config
        video_token = getattr(config, "video_token_id", None)
        if isinstance(model.positions, MropeRule) and model.positions.video_token_id is not None:
            video_token = None  # videos are taken
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
        yield from self._image_problems(sample, tiles, decoded)

    def _image_problems(self, sample: Mapping[str, Any], tiles: int, decoded: bool) -> Iterator[str]:
        if decoded and isinstance(self.positions, MropeRule):
            try:
                sample = self.positions.joined(sample)
            except DataError as error:
                yield f"have videos that fit its tokens: {error}"
        image_tokens = int((sample["input_ids"] == self.image_token).sum())
        yield from self._pixel_problems(sample.get("pixel_values"), tiles, decoded)
        if self.image_tokens is None:
            each = self.tokens_per_tile
            if image_tokens != tiles * each:
                yield f"have {each} image tokens (id {self.image_token}) for each of {tiles} tiles, got {image_tokens}"
        elif decoded:
            yield from self._integer_problems(sample, image_tokens, bool(tiles))
            if "positions" not in sample:  # of a sample with videos they are counted
                try:
                    if self.positions is not None:
                        self.positions(sample["input_ids"], sample)
                except DataError as error:
                    yield f"have images that fit its tokens: {error}"

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
    """A dataset whose samples are checked as they are read.

    With ``broken="skip"`` one that cannot be read comes as a note under `LEFT_OUT`, and its pack goes on without it.
    """

    def __init__(
        self, dataset: VlmDataset, lengths: SampleLengths, rules: SampleRules, broken: Broken = "error"
    ) -> None:
        self._dataset, self._lengths, self._rules, self._broken = dataset, lengths, rules, broken

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
        except (ConfigError, MemoryError):
            raise
        except Exception as error:
            if self._broken == "skip":
                return {LEFT_OUT: (index, said(error))}
            if isinstance(error, OmnibalError):
                raise  # names its file and line
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


def open_together(workspace: Workspace, part: Literal["train", "held_out"]) -> ConversationDataset:
    """The section's ``data.train`` or ``data.held_out``, its samples measured; all ranks together.

    Rank 0 alone indexes the annotations and measures the samples, or finds that those of an earlier run are as they
    were. The others read what it has kept in ``run.output``, which all hosts must share.
    """

    def open_and_measure() -> ConversationDataset:
        dataset = workspace.dataset(part, measured=dist.get_rank() != 0)
        # rank 0 measures and keeps them; the others read what is kept
        checked_lengths(dataset, f"omnibal.data.{part} ({getattr(workspace.section.data, part)})")
        return dataset

    check_shared(Path(workspace.section.run.output), name="run.output")
    return rank_zero_first(open_and_measure, doing=MEASURES)


def sample_loader(
    workspace: Workspace, resolved: ResolvedRun, samples: VlmDataset, place: PipelinePosition, reader: PackReader
) -> tuple[Plan, Loader]:
    """The plan of a run on samples with lengths, and this rank's loader; all ranks together."""
    # Rank 0 asks for the lengths first: a dataset may measure them when asked, and keep them for the others. Then each
    # rank arranges the same epoch by itself, and all compare what they arranged it from: no pack is sent.
    lengths = rank_zero_first(lambda: checked_lengths(samples), doing=MEASURES)
    layout = resolved.layout
    replica = place.replica % layout.num_replicas  # an encoder with more replicas reads by its share alone
    plan, sampler = run_on_all_ranks(lambda: _arrange(workspace, resolved, samples, lengths, replica))
    sampler.verify(gather)
    broken = workspace.section.data.broken
    checked = CheckedSamples(samples, lengths, SampleRules.of(resolved.vlm), broken)
    return plan, run_on_all_ranks(lambda: reader.loader(checked, sampler))


def _arrange(
    workspace: Workspace, resolved: ResolvedRun, samples: VlmDataset, lengths: SampleLengths, replica: int
) -> tuple[Plan, BalancedBatchSampler]:
    packing, mixture = workspace.section.packing, workspace.section.data.mixture
    if mixture == "repeat_time":
        if not isinstance(samples, ConversationDataset):
            raise ConfigError(
                f"omnibal.data.mixture must be shares by source for a dataset of your own, got {mixture!r}"
            )
        mixture = samples.repeat_time()
    typical = typical_lengths(lengths, mixture)
    plan = workspace.resolve_plan(resolved.vlm.records, resolved.layout, typical, resolved.partition)
    if dist.get_rank() == 0:
        warn_of_other_data(plan, typical)
        if packing.oversized != "drop":
            warn_of_long_samples(resolved.vlm.config, lengths, plan.limits)
    options: PackingOptions = {**packing.options, "mixture": mixture}
    sampler = BalancedBatchSampler(
        lengths, plan.limits, num_replicas=resolved.layout.num_replicas, rank=replica,
        micro_batches=plan.micro_batches, **options,
    )  # fmt: skip
    return plan, sampler


def warn_of_other_data(plan: Plan, lengths: SampleLengths) -> None:
    """Say that a plan was made for other samples, if it was."""
    if plan.made_from.get("lengths", lengths.content_hash) != lengths.content_hash:
        LOG.warning(
            "omnibal.pipeline.plan should be made for this run's data, got one made for other data; its packs and "
            "times may not suit these: `omnibal plan --write` makes another"
        )


def warn_of_long_samples(config: Any, lengths: SampleLengths, limits: PackLimits) -> None:
    """Say that samples are longer than what the model has learned positions for, if some are."""
    positions, longest = getattr(config.text_config, "max_position_embeddings", None), lengths.summary.max_llm_tokens
    if positions is not None and longest > positions:
        LOG.warning(
            "samples should have at most the model's %d positions, got one of %d tokens, which is trained whole; a "
            "smaller omnibal.data.max_tiles makes samples shorter, omnibal.packing.oversized 'drop' leaves out those "
            "beyond omnibal.packing.llm_tokens (%d)",
            positions,
            longest,
            limits.llm_tokens,
        )
