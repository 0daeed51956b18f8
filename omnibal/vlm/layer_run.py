"""One pipeline layer on one made-up pack: what it costs there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.formats.collate import pack_samples
from omnibal.profile.levels import LEVELS, Level
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.vlm.passes import Timing, kept_bytes, time_passes, time_split_backward
from omnibal.vlm.payload import Layout, Payload
from omnibal.vlm.recompute import run_layer
from omnibal.vlm.weight_gradients import DeferringLinear, WeightGradients, defer_linears

_SHARES = (0.25, 0.5, 1.0)
_MANY = 4


@dataclass(frozen=True)
class LayerOnPack:
    """What a layer costs on one pack."""

    forward: Timing
    backward: Timing
    """To the inputs and the weights."""
    backward_split: Timing
    """To the inputs, and to weights whose gradients cannot wait."""
    weights: Timing
    """To the weights whose gradients can wait."""
    backward_by_level: Mapping[Level, Timing]
    """With recomputation."""
    kept_bytes: Mapping[Level, int]
    """From forward to backward."""
    pending_bytes: int
    """From ``backward_split`` to ``weights``."""
    sent_bytes: int
    """Of the floating tensors that a cut behind the layer sends."""


@dataclass(frozen=True)
class LayerRun:
    """A layer and a pack to run it on.

    Args:
        layer: As it is trained; frozen parameters do not require gradients.
        payload: Its input; the last layer's has targets, and its times contain the loss.
        sent: What a cut behind it sends.
        from_pixels: Whether the input is pixels, which need no gradient.
    """

    layer: nn.Module
    payload: Payload
    sent: Layout
    from_pixels: bool

    def measure(self) -> LayerOnPack:
        """Measure passes at every level, and what they keep."""
        forward, backward = self.time_passes()
        backward_split, weights, pending_bytes = self._split()
        free = [*self.layer.parameters(), *self.layer.buffers(), *self.payload.integers.values()]
        return LayerOnPack(
            forward=forward,
            backward=backward,
            backward_split=backward_split if pending_bytes else backward,
            weights=weights if pending_bytes else Timing(0.0, 0.0),
            backward_by_level={level: self.time_passes(level)[1] for level in LEVELS if level != "none"},
            kept_bytes={level: kept_bytes(partial(self._outputs, level), free=free) for level in LEVELS},
            pending_bytes=pending_bytes,
            sent_bytes=sum(tensor.nbytes for tensor in self.sent.floats(self._run("none"))),
        )

    def time_passes(self, level: Level = "none") -> tuple[Timing, Timing]:
        """Seconds of a forward and a backward pass."""
        return time_passes(partial(self._outputs, level), self.payload.hidden.device)

    def _split(self) -> tuple[Timing, Timing, int]:
        """Seconds of both parts of a split backward pass, and what the first one leaves for the second one."""
        with _deferring(self.layer) as queue:
            passes = partial(self._outputs, "none"), partial(queue.run, queue.micro_batch), self.payload.hidden.device
            backward, weights = time_split_backward(*passes)
            return backward, weights, queue.peak_bytes

    def _run(self, level: Level) -> Payload:
        given = self.payload.with_floats(lambda tensor: tensor.detach().requires_grad_(not self.from_pixels))
        return run_layer(self.layer, given, level)

    def _outputs(self, level: Level) -> list[Tensor]:
        """The floats that the layer makes; a feature that it hands on is not its work, and no node of a graph."""
        result = self._run(level)
        return [result.hidden, *(feature for feature in result.features.values() if not feature.is_leaf)]


@contextmanager
def _deferring(layer: nn.Module) -> Iterator[WeightGradients]:
    """Let a layer leave its weight gradients for later."""
    queue = WeightGradients()
    defer_linears(layer, queue)
    try:
        yield queue
    finally:
        for module in layer.modules():
            if isinstance(module, DeferringLinear):
                module.__class__ = nn.Linear  # type: ignore[assignment]


@dataclass(frozen=True)
class MadePack:
    """The sizes of a pack.

    Args:
        units: Vision units of its images, whose tokens are part of the samples; as many as images can have.
        lengths: Tokens of each sample, at least one sample.
        samples_with_images: The first so many samples share the units evenly.
    """

    units: int
    lengths: tuple[int, ...]
    samples_with_images: int = 1

    @property
    def tokens(self) -> int:
        """Of all samples."""
        return sum(self.lengths)

    @property
    def load(self) -> Load:
        """What it holds: all tokens but the first are targets; a native-resolution ViT sees a square image a sample."""
        squared = self.units**2 // self.samples_with_images
        return Load(self.units, self.tokens, sum(length**2 for length in self.lengths), squared, self.tokens - 1)

    def payload(
        self, model: VisionLanguageModel, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> Payload:
        """The input of a model's first layer, with random pixels and tokens."""
        generator = torch.Generator().manual_seed(seed)
        share = self.units // self.samples_with_images
        items = [
            made_sample(model, share if number < self.samples_with_images else 0, length, generator)
            for number, length in enumerate(self.lengths)
        ]
        pack = pack_samples(
            items,
            pad_token_id=0,
            pixel_shape=model.pixel_shape,
            pixel_dtype=dtype,
            image_integers=model.image_integers,
            positions=model.positions,
        )
        return Payload.of_pack({name: tensor.to(device) for name, tensor in pack.items()}, dtype)


def made_sample(model: VisionLanguageModel, units: int, length: int, generator: torch.Generator) -> dict[str, Any]:
    """A sample with so many vision units: its images' tokens come first, and random ones behind them.

    Args:
        model: Its layers are what the sample is for.
        units: Vision units of its images; as many as images can have.
        length: Tokens, those of images among them.
        generator: Of tokens and pixels.
    """
    ids = torch.randint(model.config.text_config.vocab_size, (length,), generator=generator)
    image = int(model.config.image_token_id)
    ids[ids == image] = 0 if image else 1
    images = _images(model, units)
    assert images.units == units, "images can have so many units"
    ids[: images.tokens] = image
    pixels = torch.randn(units, *model.pixel_shape, generator=generator) if units else None
    return {"input_ids": ids, "labels": ids, "pixel_values": pixels, **images.integers}


class _Images(NamedTuple):
    """Made-up images of a sample: their vision units, their tokens, and what vision layers read beside pixels."""

    units: int
    tokens: int
    integers: Mapping[str, Tensor]


def _images(model: VisionLanguageModel, most_units: int) -> _Images:
    """Images with as many vision units as they can have up to so many."""
    if model.image_tokens is None or model.made_images is None:
        return _Images(most_units, most_units * image_tokens_per_tile(model), {})
    units, integers = model.made_images(most_units)
    return _Images(units, model.image_tokens(integers), integers)


def image_tokens_per_tile(model: VisionLanguageModel) -> int:
    """Tokens that a tile brings to the language model."""
    return next(
        record.sizes["image_tokens_per_tile"] for record in model.records if "image_tokens_per_tile" in record.sizes
    )


def made_packs(model: VisionLanguageModel, limits: PackLimits) -> list[MadePack]:
    """Packs of a quarter, a half and all of the limits, each as one sample with images and as four without.

    So what grows with vision units, with tokens and with their squares can be told apart; where images have any size,
    a pack of four samples with images tells more units from larger images. A pack has no more units than its tokens
    can hold, and no sample is longer than the model's positions. The last pack is the largest.
    """
    longest = int(model.config.text_config.max_position_embeddings)
    packs = []
    for share in _SHARES:
        tokens = max(1, round(limits.llm_tokens * share))
        units, many, one = (
            limits.vision_units * share,
            _split(tokens, min(_MANY, tokens), longest),
            _split(tokens, 1, longest),
        )
        packs.append(MadePack(0, many))
        if len(model.pixel_shape) == 1:  # patches
            packs.append(MadePack(len(many) * _units(model, units / len(many), many[-1]), many, len(many)))
        packs.append(MadePack(_units(model, units, one[0]), one))
    return packs


def _units(model: VisionLanguageModel, most: float, tokens: int) -> int:
    """As many vision units as images can have up to so many, and a sample of so many tokens can hold."""
    images = _images(model, round(most))
    while images.tokens > tokens:
        images = _images(model, images.units - 1)
    return images.units


def _split(tokens: int, samples: int, longest: int) -> tuple[int, ...]:
    samples = max(samples, -(-tokens // longest))
    size, larger = divmod(tokens, samples)
    return (size + 1,) * larger + (size,) * (samples - larger)
