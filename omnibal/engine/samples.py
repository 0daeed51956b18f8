"""What samples promise to training, which is checked as they are read, and streams of samples in the pipeline.

A broken promise names the sample. The first stage of a replica draws from a stream, and hands the labels of its packs
to the last one: so a source is read once, and need not be the same when it is read again. Of tensor ranks the first one
draws, and hands its packs to the others. All ranks hear what all packs hold, and what fails.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.utils.data import Dataset

from omnibal.cluster import Layout, PipelinePosition
from omnibal.data.epoch import Step
from omnibal.data.lengths import SampleLengths
from omnibal.engine.reading import LEFT_OUT, Batch, PackReader, VlmDataset
from omnibal.errors import ConfigError, DataError, OmnibalError, said
from omnibal.feeds.buffer import BufferedSample, StreamSettings
from omnibal.feeds.sources import part_of
from omnibal.feeds.stream import VERSION, PlannedWindow, Position, StreamFeed, of_other_ranks, refuse_other_version
from omnibal.formats.collate import IGNORED, MropeRule, Positions
from omnibal.formats.measured import Broken
from omnibal.ranks import gather, new_gloo_group
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.vlm.measure import image_tokens_per_tile

# Settings by which samples are dealt out, and that a resumed run may have otherwise
DEALT: Final = ("num_ranks", "micro_batches", "buffer")


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
    if len(ids):
        yield from (end for end in map(int, ids.aminmax()) if not 0 <= end < vocabulary)


def checked_sample(item: Any, rules: SampleRules, dtype: torch.dtype) -> BufferedSample:
    """A sample that keeps the model's rules, as the buffer holds it: pixels in the dtype that the model computes in."""
    fields = item if isinstance(item, Mapping) else {}
    tiles = sum(_entries(fields.get(name)) for name in ("pixel_values", "pixel_values_videos"))
    tokens = _entries(fields.get("input_ids"))
    problem = rules.problem(item, tiles=tiles, tokens=tokens, decoded=True)
    if problem is not None:
        raise DataError(f"a sample must {problem}")
    item = rules.positions.joined(item) if isinstance(rules.positions, MropeRule) else item
    names = ("input_ids", "labels", "positions", *rules.image_integers)
    held = {name: item[name] for name in names if item.get(name) is not None}
    held["pixel_values"] = item["pixel_values"].to(dtype) if tiles else None
    return BufferedSample(held, (tiles, tokens, int((item["labels"][1:] != IGNORED).sum())))


def _entries(value: Any) -> int:
    return len(value) if isinstance(value, Tensor) and value.dim() else 0


class PipelineStreamFeed(StreamFeed):
    """The steps of one rank of a pipeline: the first rank of a replica draws, those of the last stage get labels."""

    # Sources are the same on all ranks, and divided over the replicas of the first stage here.

    fills = False

    def __init__(
        self,
        sources: Mapping[str, Any],
        settings: StreamSettings,
        *,
        layout: Layout,
        place: PipelinePosition,
        reader: PackReader,
        rules: SampleRules,
    ) -> None:
        self._layout, self._place, self._reader, self._rules = layout, place, reader, rules
        self._group: dist.ProcessGroup | None = None
        self._counts, self._told_left_out = [*filter(None, (getattr(s, "left_out", None) for s in sources.values()))], 0
        self._device = get_accelerator().current_device()
        num_ranks, draws = layout.shape(0)[0], place.stage == 0 and place.tensor == 0
        super().__init__(sources, settings, rank=place.replica % num_ranks, num_ranks=num_ranks, draws=draws)

    def read(self, item: Any) -> BufferedSample:
        return checked_sample(item, self._rules, self._reader.pixel_dtype)

    def pack(self, samples: list[BufferedSample], *_: Any) -> Batch:
        return self._pinned(self._reader.collate([sample.held for sample in samples]))

    def gather(self, told: Any) -> list[Any]:
        return self._drawing_first(gather(told, group=self._group))

    def part(self, name: str, items: Any, rank: int, num_ranks: int) -> Any:
        return part_of(name, items, rank, num_ranks)

    def step(self) -> tuple[Step, list[Any]] | None:
        if not self.steps_left():
            raise ConfigError(f"omnibal.run.max_steps must be all steps of a run on streams, got {self.steps_done}")
        if self._group is None:  # of its own: it is used in a thread; made by all ranks at their first step
            self._group = new_gloo_group()
        found = super().step()
        if found is None or not self._counts:
            return found
        told, self._told_left_out = self._told_left_out, sum(each.count for each in self._counts)
        return replace(found[0], left_out=self._told_left_out - told), found[1]

    def state_dict(self) -> dict[str, Any]:
        """The positions of all replicas, the same on all ranks; all ranks together."""
        replicas = self._drawing_first(gather(vars(self.position)))[: self.num_replicas]
        done = self.steps_done
        return {"version": VERSION, "made_from": self.made_from, "steps_done": done, "replicas": replicas}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position; sources go on by their names, and a new one begins at its start."""
        refuse_other_version(state)
        before, positions = state["made_from"], [Position(**position) for position in state["replicas"]]
        if any(before.get(name) != self.made_from[name] for name in DEALT):
            position = of_other_ranks(positions, before, self.rank, self.num_replicas)
            before = before | {name: self.made_from[name] for name in DEALT}
        else:
            position = positions[self.rank]
        self.go_on(before, position, tells=dist.get_rank() == 0)
        self.steps_done = state["steps_done"]

    def _windows_of_run(self, begun: Position) -> Iterator[PlannedWindow]:
        # Memory is pinned for the current device, which each thread has its own of: a new one begins with the first.
        get_accelerator().set_device(self._device)
        return super()._windows_of_run(begun)

    def _pinned(self, batch: Batch) -> Batch:
        pins = self._reader.pin_memory
        return {name: tensor.pin_memory() for name, tensor in batch.items()} if pins else batch

    def _drawing_first(self, told: list[Any]) -> list[Any]:
        """What all ranks told, by rank, in the order that `StreamFeed` knows ranks in: those that draw come first."""
        return [told[rank] for rank in sorted(range(len(told)), key=lambda rank: self._layout.position(rank).tensor)]

    def received(self, window: PlannedWindow) -> list[Batch]:
        """The packs of this rank in a window, which the rank that draws sends; to the last stage their labels alone."""
        layout, (stage, replica, tensor) = self._layout, self._place
        last, drawing, training = layout.num_stages - 1, layout.shape(0)[0], layout.num_replicas
        if 0 < stage < last:
            return window.batches
        # All are in the thread that plans, and come to the same windows in the same order.
        others = range(1, layout.num_tensor)
        if stage == 0 and tensor > 0:
            packs: list[Any] = [None]
            dist.recv_object_list(packs, layout.rank(0, replica), self._group)
            return [self._pinned(batch) for batch in packs[0]]
        # Of all packs of a window pack n is drawn by replica n mod drawing, as its pack n // drawing, and trained by
        # replica n mod training. One message for each window and pair of ranks: all packs, or the labels of the packs
        # of both, one behind the other.
        own = range(replica, window.loads.shape[1] * drawing, layout.shape(stage)[0])
        peers: dict[int, list[int]] = {}
        for number in own:
            peers.setdefault(number % (training if stage == 0 else drawing), []).append(number)
        if stage == 0:
            for other in others:
                dist.send_object_list([window.batches], layout.rank(0, replica, other), self._group)
            for peer, numbers in peers.items() if last else ():
                labels = torch.cat([window.batches[number // drawing]["labels"][0] for number in numbers])
                for other in (0, *others):
                    dist.send(labels, layout.rank(last, peer, other), self._group)
            return window.batches
        found: dict[int, Tensor] = {}
        for peer, numbers in peers.items():
            # The loads that all ranks heard say how long each pack's labels are; an empty pack has one token.
            tokens = [max(int(window.loads[peer, number // drawing, 1]), 1) for number in numbers]
            labels = torch.empty(sum(tokens), dtype=torch.int64)
            dist.recv(labels, layout.rank(0, peer), self._group)
            found |= zip(numbers, labels.split(tokens), strict=True)
        return [self._pinned({"labels": found[number][None]}) for number in own]
