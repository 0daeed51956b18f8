"""Samples drawn at random are rearranged over ranks, once for the vision encoder and once for the LLM (OrchMLLM)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from transformers import models
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from omnibal.cost import IntArray
from omnibal.dispatch.exchange import exchange
from omnibal.dispatch.step_plan import StepPlan
from omnibal.errors import ConfigError
from omnibal.formats.collate import IGNORED
from omnibal.integrations.apart import TYPES, mask_images
from omnibal.integrations.losses import loss_per_target
from omnibal.integrations.packing import STATEFUL, as_one_row, check_packed, two_texts
from omnibal.ranks import Meeting, failures_reach_all_ranks

Sample = Mapping[str, Tensor]


@dataclass(frozen=True)
class StepCheck:
    """The place of a micro-batch and the hash of its plan, which all ranks compare before they exchange its samples."""

    meeting: Meeting
    place: tuple[int, int, int]
    """Iteration of the loader, step, micro-batch; all from 0."""
    digest: int
    """Hash of the plan."""

    def compare(self, *, backward: bool) -> None:
        """Meet the other ranks before a pass, which costs log₂(ranks) small messages."""
        least, greatest = self.meeting.extremes(self.place, (int(backward), self.digest))
        *first, first_digest, first_rank = least
        *last, last_digest, last_rank = greatest
        if first != last:
            raise ConfigError(
                "all ranks must run the same pass, got "
                f"{_pass(*first)} on rank {first_rank} and {_pass(*last)} on rank {last_rank}; "
                "a rank that skips a step or catches an error, such as being out of memory, must not go on alone"
            )
        if first_digest != last_digest:
            raise ConfigError(
                f"all ranks must plan alike, got another plan of {_pass(*first)} on rank {last_rank} than on rank "
                f"{first_rank}; install the same versions of numpy, scipy and numba on all hosts"
            )

    def __str__(self) -> str:
        return _micro_batch(*self.place)


def _micro_batch(iteration: int, step: int, micro_batch: int) -> str:
    return f"step {step}, micro-batch {micro_batch}" + (f", iteration {iteration}" if iteration else "")


def _pass(iteration: int, step: int, micro_batch: int, backward: int) -> str:
    return f"the {'backward' if backward else 'forward'} pass of {_micro_batch(iteration, step, micro_batch)}"


@dataclass(frozen=True)
class Drawn:
    """A rank's samples of a micro-batch, as ``RearrangingLoader`` hands them to ``RearrangedModel``."""

    tokens: Tensor
    """Columns of ids, labels, types and positions of all tokens, sample after sample, (tokens, 3 + rows of
    positions)."""
    images: Mapping[str, Tensor]
    """Tensors of images, sample after sample, under the same names on all ranks: with no rows on a rank without images;
    empty where no rank has any. ``plan.sizes`` has each sample's rows by the same names."""
    plan: StepPlan
    check: StepCheck
    """Compares this micro-batch with those of the other ranks."""


class RearrangedModel(nn.Module):
    """A vision-language model of transformers whose ranks work on each other's samples.

    Give it to DistributedDataParallel, ``fully_shard`` or ``deepspeed.initialize`` in place of the model, and call it
    with what a ``RearrangingLoader`` yields. Pixels go to where the vision encoder is even, features from there to
    where the LLM is even, and text there too; gradients take the way back. Weights get the gradients that they get
    without it, but for the order of sums. A rank without an image encodes a blank one whose features count for
    nothing, so that all ranks run the same layers. If the encoder and what follows it are frozen, nothing goes back.

    A rank that fails tells the others: each says so and ends within seconds, where it would wait for the failed one.
    Before the forward and the backward pass of a micro-batch ranks compare its number and its plan: a rank that has
    skipped a step ends all with a message.

    Args:
        model: Takes ``mm_encoder_outputs``, as about eighty of transformers' models do, and packs by positions that
            restart; with ``get_image_features``.
        group: Of the ranks that share samples, as of the loader; by default all.
        blank: What ``model.model.get_image_features`` takes of a small image, for ranks without one; by default made
            from the model's configuration. Its pixels must not be zeros, which some models take for padding.

    Raises:
        ConfigError: The model does not take encoded images; the message names those that do. Or its configuration does
            not tell what an image is like.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup | None = None, *, blank: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self._phases = Phases(model, model, group, blank)
        config: Any = model.config
        if config.model_type in STATEFUL:
            check_packed(model, *two_texts(config))  # makes layers keep samples apart
        mask_images(model)

    def forward(self, drawn: Drawn) -> Tensor:
        """This rank's part of the loss, () times the number of ranks: frameworks average gradients over ranks.

        Its mean over ranks, summed over a step's micro-batches, is the mean over all target tokens of the step.
        """
        return self._phases(drawn)


class Phases:
    """The forward pass of ``RearrangedModel``; ``forward`` computes the model's outputs once images are encoded."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        group: dist.ProcessGroup | None = None,
        blank: Mapping[str, Tensor] | None = None,
    ) -> None:
        takes = "mm_encoder_outputs" in signature(model.forward).parameters
        if not takes or not hasattr(getattr(model, "model", None), "get_image_features"):
            raise ConfigError(
                "model must take mm_encoder_outputs and have model.get_image_features, as those of "
                f"{', '.join(taking_encoded_images())} do, got {type(model).__name__}"
            )
        self.model, self._forward, self._group = model, forward, group
        self._passes = Passes(model)
        self._takes = [*_taken_of_images(model)]
        self._blank = dict(blank or blank_image(model))
        self._listed = False

    def __call__(self, drawn: Drawn) -> Tensor:
        if (planned := drawn.plan.to_llm.num_ranks) != (num_ranks := dist.get_world_size(self._group)):
            raise ConfigError(f"group must be that of the loader, of {planned} ranks, got one of {num_ranks}")
        self._passes.begin_forward(drawn.check)  # raises on all ranks alike
        with failures_reach_all_ranks():
            loss = self._loss(drawn) * num_ranks
        self._passes.compare_backward(loss, drawn.check)
        return loss

    def _loss(self, drawn: Drawn) -> Tensor:
        # Three all-to-alls at most: pixels with text, features, and in the backward pass the features' gradients.
        plan, sizes = drawn.plan, drawn.plan.sizes
        tensors = {name: self._placed(tensor) for name, tensor in drawn.images.items()}  # none where no rank has any
        moves = dict.fromkeys(tensors, plan.to_vision) | {"tokens": plan.to_llm}
        tensors["tokens"] = self._placed(drawn.tokens)
        images = exchange(tensors, {**sizes, "tokens": sizes["llm_tokens"]}, moves, self._group)
        tokens = images.pop("tokens")
        features = self._encode(images)
        features = exchange(features, dict.fromkeys(features, sizes["image_tokens"]), plan.features, self._group)
        return self._language(tokens, features, plan)

    def _placed(self, tensor: Tensor) -> Tensor:
        """Bring a tensor to the model's device, and floats to its precision, which is less to send than 32 bits."""
        device, dtype = _place(self.model)
        # A copy from pinned memory that converts would convert on the processor, into memory that is not pinned.
        tensor = tensor.to(device, non_blocking=True)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def _encode(self, images: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Features of the images at hand, (image tokens, hidden); deep-stack features beside them."""
        blank = not len(images.get("pixel_values", ()))
        inner: Any = self.model.model
        if unknown := images.keys() - {*self._takes}:
            takes = f"{', '.join(self._takes)}, as {type(self.model).__name__} encodes them"
            raise ConfigError(f"images must come as {takes}, got {', '.join(sorted(unknown))} too")
        given = {name: self._placed(tensor) for name, tensor in self._blank.items()} if blank else images
        encoded = inner.get_image_features(**as_one_row(given))
        # Some models give features as a list with a tensor for each image, and want them back like this.
        self._listed = not isinstance(encoded.pooler_output, Tensor)
        features = {"features": _joined(encoded.pooler_output)}
        for number, layer in enumerate(getattr(encoded, "deepstack_features", None) or ()):
            features[f"deepstack_{number}"] = _joined(layer)
        return {name: value[:0] + 0 * value.sum() for name, value in features.items()} if blank else features

    def _language(self, tokens: Tensor, features: Mapping[str, Tensor], plan: StepPlan) -> Tensor:
        sizes = plan.sizes["llm_tokens"][plan.to_llm.brought_to(dist.get_rank(self._group))]
        if len(tokens) == 0:  # no sample came here: one token that predicts nothing
            tokens, sizes = tokens.new_zeros((1, tokens.shape[1])), np.ones(1, dtype=np.int64)
            tokens[:, 1] = IGNORED
        arguments, labels = self._rows(tokens, sizes) if plan.costs.padded else self._pack(tokens)
        if len(features["features"]):
            encoded: list[Any] = [[value] if self._listed else value for value in features.values()]
            whole, *deep = encoded
            arguments["mm_encoder_outputs"] = {
                "image": BaseModelOutputWithDeepstackFeatures(pooler_output=whole, deepstack_features=deep)
                if deep
                else BaseModelOutputWithPooling(pooler_output=whole)
            }
        outputs = self._forward(**arguments)
        loss = loss_per_target(outputs, labels, plan.total_targets)
        # All ranks must call the backward all-to-all, also a rank that uses none of its features.
        return loss + sum(0 * value.sum() for value in features.values())

    def _rows(self, tokens: Tensor, sizes: IntArray) -> tuple[dict[str, Any], Tensor]:
        """Samples as rows, padded behind to the longest, and the labels of the rows."""
        rows = pad_sequence([*torch.split(tokens, sizes.tolist())], batch_first=True)  # (samples, longest, columns)
        mask = torch.arange(rows.shape[1], device=rows.device) < torch.tensor(sizes, device=rows.device)[:, None]
        ids, labels, types, *positions = rows.unbind(dim=-1)
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask.long(), "use_cache": False}
        arguments |= self._named(types)
        if positions:
            arguments["position_ids"] = torch.stack(positions)
        return arguments, labels.masked_fill(~mask, IGNORED)

    def _pack(self, tokens: Tensor) -> tuple[dict[str, Any], Tensor]:
        """Samples one after another in one row, and the labels of the row."""
        ids, labels, types, *positions = tokens.T
        arguments: dict[str, Any] = {"input_ids": ids[None], "use_cache": False}
        if len(positions) > 1:  # these say all that types do
            return arguments | {"position_ids": torch.stack(positions)[:, None]}, labels[None]
        return arguments | {"position_ids": positions[0][None]} | self._named(types[None]), labels[None]

    def _named(self, types: Tensor) -> dict[str, Tensor]:
        """Types of tokens under the name that the model takes, if it takes any."""
        takes = signature(self.model.forward).parameters
        return {name: types for name in TYPES if name in takes}


def blank_image(model: Any) -> dict[str, Tensor]:
    """A small image as a model's encoder takes it, in the precision of its weights."""
    takes = _taken_of_images(model)
    try:
        kinds = {"image_grid_thw": _blank_patches, "image_position_ids": _blank_places}
        blank = next((kinds[name] for name in kinds if name in takes), _blank_tiles)(model)
    except AttributeError:
        blank = {}
    needed = [name for name, parameter in takes.items() if parameter.default is parameter.empty]
    if not blank.keys() >= {*needed}:
        raise ConfigError(
            f"blank must be a small image of {', '.join(needed)}, as {type(model).__name__} encodes it, got none, and "
            "the model's configuration does not tell one; pass RearrangedModel(model, blank={...})"
        )
    return blank


def image_tokens(model: Any, images: Mapping[str, Tensor]) -> int:
    """How many tokens of the language model stand for some images."""
    if not images:
        return 0
    with torch.no_grad():
        encoded = model.model.get_image_features(**as_one_row(images))
    return len(_joined(encoded.pooler_output))


def _taken_of_images(model: Any) -> dict[str, Parameter]:
    """Arguments of a model's encoder, tensors and settings."""
    parameters = signature(model.model.get_image_features).parameters
    gathering = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind not in gathering}


def _blank_patches(model: Any) -> dict[str, Tensor]:
    """A blank image for encoders of native resolution: as many patches as make one token."""
    vision = model.config.vision_config
    side = vision.spatial_merge_size
    values = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.ones((side**2, values), dtype=_place(model)[1])
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}


def _blank_places(model: Any) -> dict[str, Tensor]:
    """A blank image for encoders that are told where each patch is: as many patches as make two by two tokens."""
    vision = model.config.vision_config
    places = torch.cartesian_prod(*2 * [torch.arange(2 * vision.pooling_kernel_size)])[None]
    pixels = torch.ones((1, places.shape[1], 3 * vision.patch_size**2), dtype=_place(model)[1])
    return {"pixel_values": pixels, "image_position_ids": places}


def _blank_tiles(model: Any) -> dict[str, Tensor]:
    """A blank image of one tile; for models that see a grid of tiles beside the whole, the smallest grid."""
    takes = _taken_of_images(model)
    config, vision, tiles = model.config, model.config.vision_config, 1
    # Pixtral takes images of any size: two by two tokens, for Mistral3 cannot encode a single one.
    native = hasattr(config, "spatial_merge_size")
    size = 2 * vision.patch_size * config.spatial_merge_size if native else vision.image_size
    height, width = image = (size, size) if isinstance(size, int) else size
    if pinpoints := getattr(config, "image_grid_pinpoints", None):
        image = min(pinpoints, key=prod)
        tiles += prod(image) // (height * width)
    blank = {"pixel_values": torch.ones((tiles, vision.num_channels, height, width), dtype=_place(model)[1])}
    if "image_sizes" in takes and takes["image_sizes"].default is Parameter.empty:
        blank["image_sizes"] = torch.tensor([image])
    if "pixel_attention_mask" in takes:
        blank["pixel_attention_mask"] = torch.ones((tiles, height, width), dtype=torch.long)
    return blank


def _place(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and precision of a model: those of its first weight that is not quantized to integers."""
    weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    return weight.device, weight.dtype


def taking_encoded_images() -> list[str]:
    """Names of transformers' model types that take ``mm_encoder_outputs``, as their source files say."""
    files = sorted(Path(str(models.__file__)).parent.glob("*/modeling_*.py"))
    return sorted({file.parent.name for file in files if "mm_encoder_outputs" in file.read_text(encoding="utf-8")})


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Features of all images, (image tokens, hidden)."""
    if isinstance(features, Tensor):
        return features.reshape(-1, features.shape[-1])
    return torch.cat([*features])


class Passes:
    """Follows the passes of a model on this rank, and compares each with those of the other ranks before it begins."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._unfinished: StepCheck | None = None
        self._looks_for_unused = True

    def begin_forward(self, check: StepCheck) -> None:
        """Compare the forward pass that begins, before anything is sent."""
        if self._unfinished is not None:
            with failures_reach_all_ranks():
                raise ConfigError(
                    f"each backward pass must end, got an error in that of {self._unfinished} which was caught; the "
                    "other ranks wait for the rest of it: let the error end the run"
                )
        check.compare(backward=False)

    def compare_backward(self, loss: Tensor, check: StepCheck) -> None:
        """Compare the backward pass of a loss when it begins."""
        if not loss.requires_grad:
            return
        # DDP names itself here for the time of a forward pass. It waits for the gradients of all parameters, unless it
        # looks for unused ones.
        host = DistributedDataParallel._active_ddp_module
        waits_for_all = (
            host is not None
            and host.require_backward_grad_sync
            and not (host.find_unused_parameters or host.static_graph)
        )

        def begin(_: Tensor) -> None:
            check.compare(backward=True)
            self._unfinished = check
            # Autograd calls this at the end of the whole backward pass, and not if the pass fails.
            Variable._execution_engine.queue_callback(lambda: self._end_backward(waits_for_all))

        # A tensor's hook runs before the backward pass goes on to what the tensor was computed from.
        loss.register_hook(begin)  # type: ignore[no-untyped-call]

    def _end_backward(self, waits_for_all: bool) -> None:
        self._unfinished = None
        if waits_for_all and self._looks_for_unused:
            unused = [name for name, p in self._model.named_parameters() if p.requires_grad and p.grad is None]
            if unused:
                raise ConfigError(
                    f"DistributedDataParallel must have find_unused_parameters=True for {type(self._model).__name__}, "
                    f"got False: {len(unused)} of its parameters take no part in the loss, such as {unused[0]}; pass "
                    "it, or freeze them"
                )
            self._looks_for_unused = False
