"""Measure a model's layers, one of each kind at several pack sizes, and fit a profile of costs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from omnibal.cost import CostModel, Load
from omnibal.data.limits import PackLimits
from omnibal.families.base import LayerRecord, check_frozen
from omnibal.formats.collate import IGNORED, pack_samples
from omnibal.loss import targets_of
from omnibal.passes import (
    MeasurementWarning,
    Timing,
    device_name,
    kept_bytes,
    time_optimizer,
    time_passes,
)
from omnibal.profile.records import LEVELS, LayerCost, Level, ModelProfile, degrees_of
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.vlm.payload import DeferringLinear, Payload, SentTensors, WeightGradients, defer_linears, run_layer
from omnibal.vlm.tensor import TensorGroup, share_layer

# Differences between repetitions, as a share of the median, above which a profile comes with a warning.
MAX_SPREAD = 0.1
_MOMENTS_BYTES, _MASTER_BYTES = 8, 4
_SHARES = (0.25, 0.5, 1.0)  # of the limits, which packs are measured
_MANY = 4  # samples of a pack of many


def measure_profile(
    model: VisionLanguageModel,
    limits: PackLimits,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    frozen: Collection[str] = (),
    num_tensor: int = 1,
    seed: int = 0,
    report: Callable[[str], object] = lambda name: None,
) -> ModelProfile:
    """Measure on this machine what the layers of a model cost, for packs of up to ``limits``."""
    # Repetitions that differ by more than a tenth over all layers give a MeasurementWarning; ``report`` is called with
    # the name of each layer before it is measured. Of ``num_tensor`` ranks that share layers the first one's part is
    # measured, without what it waits for the others.
    # Of layers of one kind and size the first is measured. A time is the median of 5 passes after 2 warm-up passes;
    # costs are fitted to the times. The backward passes to the inputs and to the weights are measured apart, as a
    # zero-bubble schedule runs them. The last layer's times contain the loss.
    parts = check_frozen(model.records, frozen)
    bench = _Bench(model, made_packs(model, limits), dtype, torch.device(device), frozen, seed, num_tensor)
    measured = bench.measure_all(report)
    total = Timing(0.0, 0.0)
    for record in model.records:
        total += measured[bench.group(record)][1]
    if total.spread > MAX_SPREAD:
        warnings.warn(
            f"repeated passes should differ by at most {MAX_SPREAD:.0%}, got {total.spread:.0%} over all layers; "
            f"stop other programs and measure again",
            MeasurementWarning,
            stacklevel=2,
        )
    costs = [replace(measured[bench.group(r)][0], name=r.name, tied_key=r.tied_key) for r in model.records]
    return ModelProfile(
        tuple(costs),
        device=device_name(bench.device),
        dtype=str(dtype).removeprefix("torch."),
        tensor_parallel=degrees_of(num_tensor),
        versions=measured_versions(),
        frozen=parts,
    )


def measured_versions() -> dict[str, str]:
    """The software that measured times depend on, for ``ModelProfile.check_matches``."""
    return {"torch": torch.__version__, "transformers": transformers.__version__}


class _FirstRank(TensorGroup):
    """The first of some tensor ranks by itself: sums are its own part, and others' rows are its own again."""

    def sum_in_place(self, tensor: Tensor) -> Tensor:
        return tensor

    def max_in_place(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, rows: Tensor) -> Tensor:
        return torch.cat([rows] * self.size)

    def scatter_sum(self, rows: Tensor) -> Tensor:
        return rows[: len(rows) // self.size].clone()


@dataclass(frozen=True)
class _Bench:
    model: VisionLanguageModel
    packs: list[MadePack]
    dtype: torch.dtype
    device: torch.device
    frozen: Collection[str]
    seed: int
    num_tensor: int

    def measure_all(self, report: Callable[[str], object]) -> dict[str, tuple[LayerCost, Timing]]:
        """Costs of the first layer of each group, and its passes of the largest pack, on what layers before put out."""
        measured: dict[str, tuple[LayerCost, Timing]] = {}
        payloads = [self._payload(pack) for pack in self.packs]
        for index, record in enumerate(self.model.records):
            group = self.group(record)
            if group in measured:
                continue
            report(record.name)
            layer = self._build(index)
            # Packs that are alike to this layer (vision layers see no tokens) are measured once.
            loads = [self._load(index, pack) for pack in self.packs]
            distinct = {repr(load): (load, payload) for load, payload in zip(loads, payloads, strict=True)}
            sent = self.model.sent_tensors(index + 1)
            rows = [
                (load, LayerRun(layer, payload, sent, from_pixels=index == 0).measure())
                for load, payload in distinct.values()
            ]
            _, largest = rows[-1]
            cost = _fit(record, layer, rows, trainable=record.trainable_parameters(self.frozen) > 0)
            measured[group] = cost, largest.forward + largest.backward
            # Layers of one group have inputs of one shape: the first layer's outputs serve the next group.
            with torch.no_grad():
                payloads = [layer(payload) for payload in payloads]
        return measured

    def _build(self, index: int) -> nn.Module:
        # As the engine freezes it: parameters without a gradient cost no pass to the weights.
        layer = self.model.build_layer(index, seed=self.seed, dtype=self.dtype, device=self.device)
        share_layer(self.model, index, layer, _FirstRank(0, self.num_tensor))
        record, names = self.model.records[index], self.model.weight_names(index)
        for name, parameter in layer.named_parameters():
            if record.freezes(names[name], self.frozen):
                parameter.requires_grad_(False)
        return layer

    def group(self, record: LayerRecord) -> str:
        """A text that is equal for layers of equal cost."""
        frozen = [record.freezes(name, self.frozen) for name in record.weights]
        return f"{record.kind} {sorted(record.sizes.items())} {frozen}"

    def _payload(self, pack: MadePack) -> Payload:
        payload = pack.payload(self.model, dtype=self.dtype, device=self.device, seed=self.seed)
        labels = payload.input_ids.clone()
        labels[:, : -_targets(pack)] = IGNORED
        return payload.with_integers(targets_of(labels))

    def _load(self, index: int, pack: MadePack) -> Load:
        # Of the head tokens and targets. Before the text embedding vision units, and their squares where attention
        # covers an image of any size; tokens after it; both where features of the images are handed on.
        record, load = self.model.records[index], pack.load
        if index == len(self.model.records) - 1:
            return Load(0, load.llm_tokens, target_tokens=_targets(pack))
        merge = [other.module for other in self.model.records].index("language")
        if index < merge:
            return Load(load.vision_units, 0, 0, 0 if record.sizes.get("attended", 1) else load.vision_squared)
        has_images = index == merge or (record.kind == "decoder_block" and "carried" in record.sizes)
        squared = load.llm_tokens_squared if "heads" in record.sizes else 0
        return Load(load.vision_units if has_images else 0, load.llm_tokens, squared)


def _targets(pack: MadePack) -> int:
    """Tokens of a made pack that are predicted: all but the first, or a quarter, to tell them from tokens."""
    return max(1, (pack.tokens - 1) // (4 if pack.units else 1))


def _fit(
    record: LayerRecord, layer: nn.Module, measured: Sequence[tuple[Load, LayerOnPack]], *, trainable: bool
) -> LayerCost:
    loads, rows = Load.stack(load for load, _ in measured), [row for _, row in measured]
    # Attention has no weights: their gradients do not grow with its squares.
    without_attention = Load(loads.vision_units, loads.llm_tokens, target_tokens=loads.target_tokens)

    def seconds(of: Callable[[LayerOnPack], float], loads: Load = loads) -> CostModel:
        return CostModel.fit(loads, [max(of(row), 0.0) for row in rows])

    def byte_count(of: Callable[[LayerOnPack], int]) -> CostModel:
        fitted = CostModel.fit(loads, [of(row) for row in rows])
        # Bytes are whole numbers; rounding takes away what the fit adds to their coefficients.
        return CostModel(**{name: round(coefficient, 6) for name, coefficient in vars(fitted).items()})

    # AdamW keeps two float32 moments of each trained number, and a master copy of those in 16 bits.
    parameters = list(layer.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    numbers = sum(parameter.numel() for parameter in trained)
    master_bytes = _MASTER_BYTES if parameters[0].itemsize < _MASTER_BYTES else 0
    return LayerCost(
        record.name,
        record.kind,
        module=record.module,
        forward_seconds=seconds(lambda row: row.forward.seconds),
        backward_seconds=seconds(lambda row: row.backward.seconds - row.weights.seconds),
        weight_seconds=seconds(lambda row: row.weights.seconds, without_attention),
        split_seconds=seconds(lambda row: (row.backward_split + row.weights).seconds - row.backward.seconds),
        pending_bytes=byte_count(lambda row: row.pending_bytes),
        output_bytes=byte_count(lambda row: row.sent_bytes) + CostModel(llm_tokens=record.token_bytes),
        saved_bytes={level: byte_count(lambda row: row.kept_bytes[level]) for level in LEVELS},  # noqa: B023  # at once
        recompute_seconds={
            level: seconds(lambda row: row.backward_by_level[level].seconds - row.backward.seconds)  # noqa: B023
            for level in LEVELS
            if level != "none"
        },
        parameter_bytes=sum(parameter.nbytes for parameter in parameters),
        gradient_bytes=sum(parameter.nbytes for parameter in trained),
        optimizer_bytes=numbers * (_MOMENTS_BYTES + master_bytes),
        optimizer_seconds=time_optimizer(trained).seconds,
        trainable=trainable,
        sizes=dict(record.sizes),
        spread=max((row.forward + row.backward).spread for row in rows),
    )


@dataclass(frozen=True)
class LayerOnPack:
    forward: Timing
    backward: Timing  # to the inputs and the weights
    backward_split: Timing  # to the inputs, and to weights whose gradients cannot wait
    weights: Timing  # to the weights whose gradients can wait
    backward_by_level: Mapping[Level, Timing]  # with recomputation
    kept_bytes: Mapping[Level, int]  # from forward to backward
    pending_bytes: int  # from ``backward_split`` to ``weights``
    sent_bytes: int  # of the floating tensors that a cut behind the layer sends


@dataclass(frozen=True)
class LayerRun:
    """A layer as it is trained, a pack to run it on (for the last layer with targets), and what a cut behind sends."""

    layer: nn.Module
    payload: Payload
    sent: SentTensors
    from_pixels: bool  # pixels need no gradient

    def measure(self) -> LayerOnPack:
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
        forward, backward, _ = time_passes(partial(self._outputs, level), self.payload.hidden.device)
        return forward, backward

    def _split(self) -> tuple[Timing, Timing, int]:
        """Seconds of both parts of a split backward pass, and what the first one leaves for the second one."""
        # What waits is computed after the backward pass, as a zero-bubble schedule's W does.
        queue = WeightGradients()
        defer_linears(self.layer, queue)
        run, run_rest = partial(self._outputs, "none"), partial(queue.run, queue.micro_batch)
        _, backward, weights = time_passes(run, self.payload.hidden.device, run_rest)
        for module in self.layer.modules():
            if isinstance(module, DeferringLinear):
                module.weight_gradients = None
        return backward, weights, queue.peak_bytes

    def _run(self, level: Level) -> Payload:
        given = self.payload.with_floats(lambda tensor: tensor.detach().requires_grad_(not self.from_pixels))
        return run_layer(self.layer, given, level)

    def _outputs(self, level: Level) -> list[Tensor]:
        # A feature that the layer only hands on is not its work, and no node of a graph.
        result = self._run(level)
        return [result.hidden, *(feature for feature in result.features.values() if not feature.is_leaf)]


@dataclass(frozen=True)
class MadePack:
    """The sizes of a pack; its first ``samples_with_images`` samples share the vision units evenly."""

    units: int
    lengths: tuple[int, ...]
    samples_with_images: int = 1

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def load(self) -> Load:
        # All tokens but the first are targets; a native-resolution ViT sees a square image a sample.
        squared = self.units**2 // self.samples_with_images
        return Load(self.units, self.tokens, sum(length**2 for length in self.lengths), squared, self.tokens - 1)

    def payload(
        self, model: VisionLanguageModel, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> Payload:
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
    """A sample with so many vision units: its images' tokens come first, and random ones behind them."""
    # Random tokens are never the image token, which stands for features.
    ids = torch.randint(model.config.text_config.vocab_size, (length,), generator=generator)
    image = int(model.config.image_token_id)
    ids[ids == image] = 0 if image else 1
    images = _images(model, units)
    assert images.units == units, "images can have this number of units"
    ids[: images.tokens] = image
    pixels = torch.randn(units, *model.pixel_shape, generator=generator) if units else None
    return {"input_ids": ids, "labels": ids, "pixel_values": pixels, **images.integers}


class _Images(NamedTuple):
    units: int
    tokens: int
    integers: Mapping[str, Tensor]  # what vision layers read beside pixels


def _images(model: VisionLanguageModel, most_units: int) -> _Images:
    """Images with as many vision units as they can have up to so many."""
    if model.image_tokens is None or model.made_images is None:
        return _Images(most_units, most_units * image_tokens_per_tile(model), {})
    units, integers = model.made_images(most_units)
    return _Images(units, model.image_tokens(integers), integers)


def image_tokens_per_tile(model: VisionLanguageModel) -> int:
    return next(
        record.sizes["image_tokens_per_tile"] for record in model.records if "image_tokens_per_tile" in record.sizes
    )


def made_packs(model: VisionLanguageModel, limits: PackLimits) -> list[MadePack]:
    """Packs of a quarter, a half and all of the limits, each as one sample with images and as four without."""
    # So what grows with vision units, with tokens and with their squares can be told apart; where images have any size,
    # a pack of four samples with images tells more units from larger images. A pack has no more units than its tokens
    # can hold, and no sample is longer than the model's positions.
    longest = int(model.config.text_config.max_position_embeddings)
    packs = []
    for share in _SHARES:
        tokens = max(1, round(limits.llm_tokens * share))
        units = limits.vision_units * share
        many, one = (_split(tokens, samples, longest) for samples in (min(_MANY, tokens), 1))
        packs.append(MadePack(0, many))
        if len(model.pixel_shape) == 1:  # patches
            packs.append(MadePack(len(many) * _units(model, units / len(many), many[-1]), many, len(many)))
        packs.append(MadePack(_units(model, units, one[0]), one))
    return packs


def _units(model: VisionLanguageModel, most: float, tokens: int) -> int:
    """The most vision units up to a number that images can have and that a sample of so many tokens can hold."""
    # Images of native resolution have fewer units than asked for: step down until the tokens fit.
    images = _images(model, round(most))
    while images.tokens > tokens:
        images = _images(model, images.units - 1)
    return images.units


def _split(tokens: int, samples: int, longest: int) -> tuple[int, ...]:
    samples = max(samples, -(-tokens // longest))
    size, larger = divmod(tokens, samples)
    return (size + 1,) * larger + (size,) * (samples - larger)
