"""A host's own collator, wrapped so that it makes packs: one sequence in which no sample sees another.

transformers' attention tells samples apart by positions that restart, if it is given no mask and no cache: with a mask,
even of ones, or with the cache that is the default, samples see each other without a word.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from types import MappingProxyType
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from omnibal.data.lengths import SampleLengths
from omnibal.data.packs import Loads, loads_of
from omnibal.errors import DataError
from omnibal.families.base import WINDOWS
from omnibal.formats.collate import IGNORED, MropeRule, Positions, mrope_positions
from omnibal.packs.apart import TYPES
from omnibal.packs.loading import PackItems, PlannedLoads

Collator = Callable[[list[Any]], Mapping[str, Any]]

ONE_ROW: Final = (
    *("internvl", "llava", "llava_next", "llava_onevision", "idefics3", "smolvlm", "aya_vision", "gemma3", "gemma4"),
    *("lfm2_vl", "mistral3", "qwen2_audio"),
)
FOUR_ROWS: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "qwen2_5_omni_thinker")
STATEFUL: Final = ("qwen3_5", "lfm2_vl")
"""Families with layers that carry a state along a row: `check_packed` lets them keep samples apart."""
FAMILIES: Final[Mapping[str, bool]] = MappingProxyType(dict.fromkeys(ONE_ROW, False) | dict.fromkeys(FOUR_ROWS, True))
"""Model types whose packs are tested, and whether their positions have three rows (time, height, width) beside the
text's; other types pack if they prove to at the start."""
PER_TOKEN: Final = ("input_ids", "labels", *TYPES)
PER_VIDEO: Final = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
PER_SOUND: Final = ("input_features", "feature_attention_mask")
PER_IMAGE: Final = (
    *("pixel_values", "image_grid_thw", "image_sizes", "batch_num_images", "pixel_attention_mask"),
    *("spatial_shapes", "image_position_ids", *PER_VIDEO, *PER_SOUND),
)
SIZED: Final = frozenset({"image_sizes", "pixel_attention_mask", "feature_attention_mask"})
"""Tensors that tell how much of an image or a sound is real: beside them smaller ones may be padded to the largest."""

RowKind = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one row of an image's tensor: a tile, a patch, an image."""
RowKinds = dict[str, RowKind]
WHY_LEFT_OUT: Final = MappingProxyType(
    {"position_ids": "packs count positions themselves"}
    | dict.fromkeys(PER_VIDEO, "packs hold videos of Qwen's models alone")
)
"""Fields that packs cannot have, whether the model names them or not, and why."""
LEAST_FRAMES: Final = 7
"""Fewer are one token, which Qwen2-Audio's code in transformers takes for a sound whose tokens are yet to come."""


def positions_of(config: Any) -> Positions | None:
    """How a model of transformers counts positions of a sample's tokens; None for one row that counts up."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if not FAMILIES.get(config.model_type, "mrope_section" in rope):
        return None
    return partial(_four_rows, MropeRule.of(config))


def videos_of(positions: Positions | None) -> int | None:
    """The id of what stands for a piece of a video, where its positions are known."""
    rule = positions.args[0] if isinstance(positions, partial) else None
    return rule.video_token_id if isinstance(rule, MropeRule) else None


def arguments_of(model: Any) -> frozenset[str] | None:
    """Names that a model's forward pass takes; None where it does not name them."""
    # An instance's own forward may be a host's wrapper.
    names = frozenset(signature(type(without_adapters(model)).forward).parameters)
    return names if "input_ids" in names else None


def without_adapters(model: Any) -> Any:
    """The model within peft's, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def language_of(model: Any) -> Any:
    """The LLM within a model of transformers; None where none has that name."""
    names = ("language_model", "text_model")
    found = (module for name, module in without_adapters(model).named_modules() if name.rpartition(".")[2] in names)
    return next(found, None)


def refuse_missing(fields: Mapping[str, Any], arguments: frozenset[str] | None) -> None:
    """Refuse a sample or batch without fields that the model needs to learn, or to learn what is right."""
    for name, remedy in (("input_ids", ""), ("labels", "; labels are input_ids, with -100 where nothing is learned")):
        if name not in fields:
            raise DataError(f"data_collator must give {name}, got only {', '.join(map(str, fields))}{remedy}")
    # Without token types, transformers 5.23 counts the positions of images as those of text, for Qwen2.5-VL silently,
    # and Gemma sees an image's tokens one after another.
    types = next((name for name in TYPES if name in (arguments or ())), None)
    sees = bool({"pixel_values", *PER_VIDEO[:1]} & fields.keys())
    if types is not None and sees and not {types, "position_ids"} & fields.keys():
        raise DataError(
            f"data_collator must give {types} beside images, got only {', '.join(map(str, fields))}; without "
            "it transformers takes image tokens for text, in plain training too: take what the processor "
            f'returns, or batch["{types}"] = (batch["input_ids"] == model.config.image_token_id).long()'
        )


def vary_lengths(batch: Mapping[str, Any]) -> None:
    """Tell torch.compile which sizes differ from pack to pack, so that it compiles once for all of them."""
    for name in (*PER_TOKEN, "position_ids"):
        if name in batch:
            torch._dynamo.maybe_mark_dynamic(batch[name], batch[name].dim() - 1)
    # Models with a grid of patches read its numbers in Python, and are compiled again for each anyway.
    if "pixel_values" in batch and "image_grid_thw" not in batch:
        torch._dynamo.maybe_mark_dynamic(batch["pixel_values"], 0)


def _four_rows(rule: MropeRule, ids: Tensor, sample: Mapping[str, Any]) -> Tensor:
    """The text's positions, which tell samples apart, above those in time, height and width."""
    return torch.cat([torch.arange(len(ids))[None], mrope_positions(ids, sample, rule)])


class SampleCollator(ABC):
    """Makes packs of samples that are read one by one: subclasses say how an item becomes a sample, and samples a pack.

    Args:
        collate: The host's, of a list of items.
        lengths: Those that the packs were planned with, to refuse other samples; None to take any.
        absorb: Whether samples of other lengths are trained all the same, as far as ranks stay alike.
        arguments: Names that the model takes, where they are known.
    """

    def __init__(
        self,
        collate: Collator,
        lengths: SampleLengths | None = None,
        *,
        absorb: bool = False,
        arguments: frozenset[str] | None = None,
    ) -> None:
        self._collate, self._arguments = collate, arguments
        self._planned = None if lengths is None else PlannedLoads(lengths, absorb=absorb)

    @abstractmethod
    def sample(self, item: Any) -> Any:
        """An item of the dataset as ``pack`` takes it."""

    @abstractmethod
    def loads(self, sample: Any) -> Loads: ...

    @abstractmethod
    def pack(self, samples: Sequence[Any]) -> Any:
        """A batch of samples, as the model or the host takes it."""

    def without_targets(self, sample: Any) -> dict[str, Any]:
        return {**sample, "labels": torch.full_like(torch.as_tensor(sample["labels"]), IGNORED)}

    @property
    def unit_name(self) -> str | None:
        """What the first encoder counts, where it is not a ViT."""
        return WINDOWS if hears_alone(self._arguments) else None

    def measure(self, dataset: Any, numbers: Sequence[int]) -> list[Loads]:
        return [self.loads(self.sample(dataset[number])) for number in numbers]

    def __call__(self, drawn: PackItems) -> Any:
        """The batch of a pack; DataError for samples that are not as planned."""
        samples = [self.sample(item) for item in drawn.items]
        if self._planned is not None:
            self._planned.check(drawn.samples, [self.loads(sample) for sample in samples])
        first_filler = len(samples) - drawn.num_fillers
        return self.pack(samples[:first_filler] + [self.without_targets(filler) for filler in samples[first_filler:]])


class PackCollator(SampleCollator):
    """Collates each sample alone by the host's collator, and lays samples one after another.

    Args:
        collate: From a list of items to tensors, ``input_ids`` and ``labels`` (1, tokens) among them; what
            ``attention_mask`` marks as padding is cut off.
        lengths: See `SampleCollator`, as for ``absorb``.
        arguments: Names that the model takes: tensors under other names are dropped, as the model would ignore them.
        further: Names of tensors that samples have beside those of images, for encoders of a ``RearrangedModel``.
    """

    def __init__(
        self,
        collate: Collator,
        positions: Positions | None,
        lengths: SampleLengths | None = None,
        *,
        absorb: bool = False,
        arguments: frozenset[str] | None = None,
        further: Iterable[str] = (),
    ) -> None:
        super().__init__(collate, lengths, absorb=absorb, arguments=arguments)
        self._positions, self._further = positions, {*further}
        self._takes_videos = videos_of(positions) is not None

    @classmethod
    def of(cls, model: Any, collate: Collator, **options: Any) -> Self:
        return cls(collate, positions_of(model.config), arguments=arguments_of(model), **options)

    def sample(self, item: Any) -> dict[str, Tensor]:
        """The fields of one item: per token (tokens,), per image as the model takes it."""
        fields = {name: value for name, value in self._collate([item]).items() if value is not None}
        mask = fields.pop("attention_mask", None)
        # Qwen2.5-VL's processor gives a list, which only a data collator may have made a tensor.
        fields |= {name: torch.as_tensor(fields[name]) for name in PER_VIDEO[2:] if name in fields}
        fields = {name: value for name, value in fields.items() if not self._is_idle(name, value)}
        refuse_missing(fields, self._arguments)
        known = {*PER_TOKEN, *PER_IMAGE} - (set() if self._takes_videos else {*PER_VIDEO})
        surplus = sorted(set(fields) - known - self._further)
        if surplus:
            why = "; ".join(f"{name}: {WHY_LEFT_OUT[name]}" for name in surplus if name in WHY_LEFT_OUT)
            raise DataError(
                f"data_collator must leave out {', '.join(surplus)} to train on packs{f' ({why})' if why else ''}, got "
                f"{', '.join(map(str, fields))}; padded=True trains on its own batches"
            )
        for name in PER_TOKEN:
            if name in fields:
                fields[name] = fields[name][0] if mask is None else fields[name][0][mask[0].bool()]
        fields |= unpadded_images(fields)
        fields["labels"] = fields["labels"].clone()
        fields["labels"][:1] = IGNORED  # or the last token of the sample before would predict the first of this one
        return fields

    def _is_idle(self, name: str, value: Any) -> bool:
        """Whether the model ignores a field: a note of the dataset, such as the name or index of a sample."""
        if name not in TYPES and name in {*PER_TOKEN, *PER_IMAGE, *WHY_LEFT_OUT, *self._further}:
            return False
        return not isinstance(value, Tensor) or (self._arguments is not None and name not in self._arguments)

    @property
    def num_positions(self) -> int:
        """Rows of a token's positions."""
        return 1 if self._positions is None else 4

    def positions(self, sample: Mapping[str, Tensor]) -> Tensor:
        """Where a sample's tokens stand in it, (num_positions, tokens)."""
        ids = sample["input_ids"]
        return torch.arange(len(ids))[None] if self._positions is None else self._positions(ids, sample)

    def pack(self, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        """The arguments of the model's forward pass: tokens one after another, (1, tokens), and so images."""
        # Where positions have several rows, they say all that types do.
        names = ["input_ids", "labels", *(name for name in TYPES if self.num_positions == 1 and name in samples[0])]
        tokens = {name: torch.cat([sample[name] for sample in samples])[None] for name in names}
        positions = torch.cat([self.positions(sample) for sample in samples], dim=-1)
        if self.num_positions > 1:
            positions = positions[:, None]
        # No mask and no cache: with one of them transformers' attention ignores that positions restart.
        return tokens | joined_images(samples) | {"position_ids": positions, "use_cache": False}

    def loads(self, sample: Mapping[str, Tensor]) -> Loads:
        videos, units = (len(sample.get(name, ())) for name in ("pixel_values_videos", "pixel_values"))
        targets, sounds = int((sample["labels"] != IGNORED).sum()), sounds_of(sample, self._arguments)
        return loads_of(units + sounds[0], videos, len(sample["input_ids"]), targets, sounds[1])


class PaddedCollator(SampleCollator):
    """The host's own batches of the samples that a sampler draws, whatever fields they have."""

    # ``collate`` gives ``input_ids`` and ``labels`` (samples, tokens), an ``attention_mask`` where samples are padded,
    # and images as rows of ``pixel_values``.

    def __call__(self, drawn: PackItems) -> dict[str, Any]:
        """The arguments of the model's forward pass; DataError for samples that are not as planned."""
        batch = self.pack(drawn.items)
        if self._planned is not None:  # a row tells its tokens, pixel_values only the images of all rows
            rows = [(None, *row) for row in _rows(batch)]
            self._planned.check(drawn.samples, rows, self._units(batch))
        batch["labels"][len(drawn.samples) - drawn.num_fillers :] = IGNORED
        return batch

    def sample(self, item: Any) -> dict[str, Any]:
        return self.pack([item])

    def loads(self, sample: Mapping[str, Tensor]) -> Loads:
        units, videos, sounds = self._units(sample)
        return loads_of(units - videos, videos, *_rows(sample)[0], sounds)

    def pack(self, samples: Sequence[Any]) -> dict[str, Any]:
        batch = {name: value for name, value in self._collate(list(samples)).items() if value is not None}
        refuse_missing(batch, self._arguments)
        batch["labels"] = batch["labels"].clone()
        batch["labels"][:, :1] = IGNORED  # nothing predicts a first token, but some hosts count it as a target
        return batch

    def _units(self, batch: Mapping[str, Tensor]) -> tuple[int, int, int]:
        """Vision units (or windows of sound), those of videos, and sound units."""
        pixels, videos = batch.get("pixel_values"), len(batch.get("pixel_values_videos", ()))
        images = 0 if pixels is None else len(unpadded_images(batch).get("pixel_values", pixels))
        windows, positions = sounds_of(batch, self._arguments)
        return images + videos + windows, videos, positions


class RowCollator(PackCollator):
    """Samples one by one, to become rows of a batch that is padded behind: for models that cannot pack."""

    # ``positions`` is what ``positions_of(config)`` gives.

    @property
    def num_positions(self) -> int:
        """Rows of a token's positions; none where the model counts them by itself."""
        return 0 if self._positions is None else 3

    def positions(self, sample: Mapping[str, Tensor]) -> Tensor:
        """Positions in time, height and width, without the text's row, which would tell samples apart."""
        ids = sample["input_ids"]
        return ids.new_empty((0, len(ids))) if self._positions is None else self._positions(ids, sample)[1:]


def _rows(batch: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    """Tokens and target tokens of each row of a padded batch."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    tokens = (torch.ones_like(ids) if mask is None else mask != 0).sum(dim=1).tolist()
    return list(zip(tokens, (batch["labels"] != IGNORED).sum(dim=1).tolist(), strict=True))


def hears_alone(arguments: frozenset[str] | None) -> bool:
    """Whether a model takes sounds and no images: its only encoder is then the first."""
    return arguments is not None and PER_SOUND[0] in arguments and "pixel_values" not in arguments


def sounds_of(fields: Mapping[str, Tensor], arguments: frozenset[str] | None) -> tuple[int, int]:
    """Windows of sound where a model hears alone, positions of the encoder where it sees, too; 0 for the other one."""
    # Qwen2-Audio's encoder sees whole windows, whatever is real of them; Qwen2.5-Omni's only what is real, and a
    # convolution halves the frames.
    features, mask = (fields.get(name) for name in PER_SOUND)
    if features is None:
        return 0, 0
    if mask is not None and hears_alone(arguments) and (shortest := int(mask.sum(dim=1).min())) < LEAST_FRAMES:
        raise DataError(f"sounds must have at least {LEAST_FRAMES} frames (0.07 s) for Qwen2-Audio, got {shortest}")
    if hears_alone(arguments):
        return len(features), 0
    if mask is None:
        raise DataError("data_collator must give feature_attention_mask beside input_features, got none")
    return 0, int(((mask.sum(dim=1) - 1) // 2 + 1).sum())


def unpadded_images(fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Pixels of one sample without the padding of its batch, tile by tile."""
    # LLaVA-NeXT's collators give (images, most tiles of an image, …), the unused tiles being zeros; those of Idefics3
    # (1, images, …), with a mask of real pixels. All of them take what is left as well.
    pixels = fields.get("pixel_values")
    if pixels is None or pixels.dim() != 5:
        return {}
    tiles = pixels.flatten(0, 1)
    real = tiles.flatten(1).any(dim=1)
    if "image_sizes" in fields:
        return {"pixel_values": tiles[real]}
    mask = fields.get("pixel_attention_mask")
    mask = torch.ones_like(tiles[:, 0], dtype=torch.bool) if mask is None else mask.flatten(0, 1)
    return {"pixel_values": tiles[real], "pixel_attention_mask": mask[real]}


def joined_images(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return as_one_row(images_of(samples, rows_of_images(samples)))


def images_of(samples: Sequence[Mapping[str, Tensor]], shapes: RowKinds) -> dict[str, Tensor]:
    """The images of samples, one after another; ``shapes`` names the tensors and their largest rows."""
    images = {}
    for name, (shape, dtype) in shapes.items():
        rows = [_padded(sample[name], shape) for sample in samples if name in sample]
        images[name] = torch.cat([torch.empty((0, *shape), dtype=dtype), *rows])
    return images


def _padded(rows: Tensor, shape: Sequence[int]) -> Tensor:
    behind = [most - size for most, size in zip(shape, rows.shape[1:], strict=True)]
    return pad(rows, [amount for size in reversed(behind) for amount in (0, size)])


def rows_of_images(samples: Iterable[Mapping[str, Tensor]], names: Sequence[str] = PER_IMAGE) -> RowKinds:
    """The largest row of each tensor of a rank's images; DataError where rows are unlike each other."""
    named = ((name, of[name]) for of in samples for name in names if name in of)
    return largest_rows(("", name, (tuple(rows.shape[1:]), rows.dtype)) for name, rows in named)


def largest_rows(rows: Iterable[tuple[str, str, RowKind]]) -> RowKinds:
    """The largest row of each tensor, of rows that are (beginning of a message, name of the tensor, shape)."""
    # Images may differ where ``SIZED`` tells how much of an image is real; a DataError names others.
    rows, found = [*rows], dict[str, RowKind]()
    may_differ = any(name in SIZED for _, name, _ in rows)
    for where, name, (shape, dtype) in rows:
        most, kind = found.setdefault(name, (shape, dtype))
        if (len(most), kind) != (len(shape), dtype) or (most != shape and not may_differ):
            got = f"{most} of {kind}, got {shape} of {dtype}"
            raise DataError(f"{where}rows of {name} must be alike in all samples, {got}")
        found[name] = tuple(map(max, most, shape)), kind
    return found


def as_one_row(images: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Images as the model takes them, from tensors whose rows are images or their tiles."""
    # Idefics2, Idefics3 and SmolVLM want the tiles of each row of a batch, (rows, tiles, ...): here there is one row.
    if "pixel_attention_mask" not in images or images["pixel_values"].dim() != 4:
        return dict(images)
    return {**images, **{name: images[name][None] for name in ("pixel_values", "pixel_attention_mask")}}


def as_alone(sample: Mapping[str, Tensor]) -> dict[str, Any]:
    """A sample as the model takes it without any packing."""
    rows = {name: value[None] for name, value in sample.items() if name not in PER_IMAGE}
    return rows | joined_images([sample]) | {"attention_mask": torch.ones_like(rows["input_ids"])}
