"""What keeps the samples of a pack apart where transformers' own layers do not, or only by a mask.

Three kinds of layers let something across, whatever positions and masks say:

- Gated delta nets and short convolutions (Qwen3.5, LFM2) carry a state along a row. The kernels of
  `flash-linear-attention` and `causal-conv1d` take bounds of samples, and get them where these packages are; elsewhere
  a layer runs once for each sample of a pack, and all other layers on the whole pack.
- Gemma 3 and 4 see images whole, in both directions. transformers 5.23 looks for an image by its place in its sample
  where it should look by its place in the row, in layers with a window: such models get masks that are made here.
- "dynamic" and "longrope" rotary embeddings follow the longest sample of a row: they run once for each long sample.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from inspect import signature
from itertools import pairwise
from operator import getitem
from typing import Any, Final

import torch
from packaging.version import Version
from torch import Tensor, nn

from omnibal.packs.leaks import Leak, mapped
from omnibal.packs.row_lengths import follows_length, transformers_model

KINDS: Final = frozenset({"recurrent state", "convolution"})
"""Kinds of leaks that `StatefulLayers` stops."""
TYPES: Final = ("token_type_ids", "mm_token_type_ids")
"""Fields that tell a model which tokens are of images."""
VARLEN_FLOOR: Final = Version("2.11")
"""The first torch whose kernel for packs takes a scale and a window."""
IMAGE_BLOCKS: Final = "get_block_sequence_ids_for_mask"
"""What modules of transformers have whose models see images whole: the number of the image that each token is of."""


def attend_by_bounds(model: nn.Module) -> Callable[[], None] | None:
    """Let the LLM of a model of transformers attend by the bounds of samples, where it would make a mask.

    Returns:
        What undoes that; None if attention is not "sdpa", images are seen whole, or torch has no kernel for packs yet.
    """
    base = transformers_model(model)
    is_known = "transformers" in sys.modules and isinstance(base, sys.modules["transformers"].PreTrainedModel)
    if not is_known or Version(torch.__version__) < VARLEN_FLOOR or any(map(_sees_images_whole, base.modules())):
        return None
    config, text = base.config, base.config.get_text_config()
    named = {"": config} | {name: getattr(config, name) for name in config.sub_configs}
    name = next((name for name, each in named.items() if each is text), None)
    if name is None or text._attn_implementation != "sdpa":
        return None
    from omnibal.vlm.attention import PACKED_ATTENTION

    base.set_attn_implementation({name: PACKED_ATTENTION})
    return partial(base.set_attn_implementation, {name: "sdpa"})


def mask_images(model: nn.Module) -> None:
    """Give models that see images whole masks that hold in packs; others stay as they are."""
    for module in model.modules():
        if _sees_images_whole(module):
            module.register_forward_pre_hook(partial(_give_masks, _seeing_whole(module)), with_kwargs=True)


def _sees_images_whole(module: nn.Module) -> bool:
    return hasattr(module, "language_model") and hasattr(sys.modules[type(module).__module__], IMAGE_BLOCKS)


def _seeing_whole(module: Any) -> dict[str, bool]:
    """Kinds of layers, and whether they see images whole: Gemma 3 everywhere, Gemma 4 in layers with a window alone."""
    config = copy.deepcopy(module.config.get_text_config())
    config._attn_implementation = "eager"
    inputs = {"inputs_embeds": torch.zeros(1, 2, 0), "attention_mask": None, "past_key_values": None}
    make_masks = sys.modules[type(module).__module__].create_masks_for_vision_model
    masks = make_masks(config, **inputs, position_ids=None, block_sequence_ids=torch.zeros(1, 2, dtype=torch.long))
    return {kind: bool(mask[0, 0, 0, 1] == 0) for kind, mask in masks.items()}


def _give_masks(
    whole: Mapping[str, bool], module: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    from transformers import masking_utils  # loops of models from elsewhere need no transformers

    config, positions = module.config.get_text_config(), kwargs.get("position_ids")
    types = next((kwargs[name] for name in TYPES if kwargs.get(name) is not None), None)
    given = any(kwargs.get(name) is not None for name in ("attention_mask", "past_key_values"))
    if positions is None or types is None or given or config.use_bidirectional_attention is None:
        return None
    blocks = getattr(sys.modules[type(module).__module__], IMAGE_BLOCKS)(types, device=positions.device)
    of_image = masking_utils.blockwise_overlay(blocks)
    of_sample = masking_utils.packed_sequence_mask_function((positions == 0).cumsum(-1))
    of_window = masking_utils.sliding_window_overlay(config.sliding_window)
    # Of what is embedded only shape, precision and device count. Without positions, places are those in the row.
    embedded = module.get_input_embeddings().weight.new_empty((*positions.shape, 0), device=positions.device)
    masks = {}
    for kind, is_whole in whole.items():
        within = masking_utils.and_masks(of_sample, *([of_window] if "sliding" in kind else []))
        beside = of_image if is_whole else None
        masks[kind] = masking_utils.create_causal_mask(
            config, embedded, None, None, or_mask_function=beside, and_mask_function=within
        )
    return args, {**kwargs, "attention_mask": masks}


def rotate_by_sample(model: nn.Module) -> None:
    """Give each sample of a pack the rotary embeddings of its own length: those that it gets alone in a new model."""
    bounds: dict[str, SampleBounds] = {}
    for name, module in [*model.named_modules()]:
        if follows_length(module):
            decoder = name.rpartition(".")[0]
            if decoder not in bounds:
                bounds[decoder] = SampleBounds(model.get_submodule(decoder))
            rotary: Any = module
            rotary.forward = partial(_rotate, rotary, rotary.forward, bounds[decoder])


def is_rotated_by_sample(model: nn.Module) -> bool:
    """Whether `rotate_by_sample` has equipped a model."""
    return any(follows_length(module) and "forward" in vars(module) for module in model.modules())


def _rotate(
    rotary: Any, forward: Any, bounds: SampleBounds, hidden: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> Any:
    found = bounds.of_pack
    if found is None or found[-1] != position_ids.shape[-1]:
        return forward(hidden, position_ids, *args, **kwargs)
    from omnibal.vlm.attention import tables_by_sample

    lengths = [stop - start for start, stop in pairwise(found)]
    return tables_by_sample(rotary, forward, hidden, position_ids, lengths, *args, **kwargs)


class StatefulLayers:
    """Modules that carry a state from sample to sample, made to keep samples apart in packs alone.

    A pack is one row whose position_ids restart, without a cache.
    """

    def __init__(self, model: nn.Module, leaks: Iterable[Leak]) -> None:
        from transformers.utils.import_utils import is_causal_conv1d_available, is_flash_linear_attention_available

        self.by_kernels = is_flash_linear_attention_available() and is_causal_conv1d_available()
        """Whether the kernels are given the samples' bounds; else layers run sample by sample."""
        decoders: dict[str, SampleBounds] = {}
        for leak in leaks:
            # Layers are numbered parts of the decoder, whose position_ids say where samples begin.
            parts = leak.module.split(".")
            number = next((place for place, part in enumerate(parts) if part.isdecimal()), 1)
            name = ".".join(parts[: number - 1])
            if name not in decoders:
                decoders[name] = SampleBounds(model.get_submodule(name))
            module: Any = model.get_submodule(leak.module)
            self.by_kernels &= "kwargs" in signature(module.forward).parameters
            module.forward = partial(self._run, module.forward, decoders[name])

    def _run(self, forward: Callable[..., Any], bounds: SampleBounds, *args: Any, **kwargs: Any) -> Any:
        found = bounds.of_pack
        if found is None or len(found) < 3:
            return forward(*args, **kwargs)
        if self.by_kernels:
            return forward(*args, **kwargs | bounds.for_kernels)
        outputs = []
        for start, stop in pairwise(found):
            own_args, own_kwargs = mapped((args, kwargs), partial(_cut, found[-1], start, stop))
            outputs.append(forward(*own_args, **own_kwargs))
        return mapped(outputs[0], partial(_joined, outputs, found[1] - found[0]))


class SampleBounds:
    """Where the samples of the pack begin that a decoder runs, and where the last one ends; None for other rows."""

    def __init__(self, decoder: nn.Module) -> None:
        self.of_pack: list[int] | None = None
        self.for_kernels: dict[str, Tensor] = {}
        """The bounds as transformers' layers hand them to `flash-linear-attention` and `causal-conv1d`."""
        decoder.register_forward_pre_hook(self._note, with_kwargs=True, prepend=True)

    def _note(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("position_ids")
        self.of_pack = None
        if positions is None or kwargs.get("use_cache", True) or positions.shape[-2] != 1:
            return
        row = positions.flatten(0, -2)[0]  # of several rows the first is the text's
        starts = (row == 0).nonzero().flatten().tolist()
        if starts[:1] == [0]:
            self.of_pack = [*starts, len(row)]
            bounds = torch.tensor(self.of_pack, dtype=torch.int32, device=row.device)
            numbers = torch.arange(len(starts), dtype=torch.int32, device=row.device)
            self.for_kernels = {"cu_seq_lens_q": bounds, "seq_idx": numbers.repeat_interleave(bounds.diff())[None]}


def _cut(total: int, start: int, stop: int, path: tuple[Any, ...], tensor: Tensor) -> Tensor:
    """A sample's rows of a tensor that has one for each token of the pack."""
    dim = next((dim for dim, size in enumerate(tensor.shape) if size == total), None)
    return tensor if dim is None else tensor.narrow(dim, start, stop - start)


def _joined(outputs: Sequence[Any], rows: int, path: tuple[Any, ...], first: Tensor) -> Tensor:
    """The rows of all samples, of an output that stands at ``path`` in each sample's outputs."""
    parts = [reduce(getitem, path, output) for output in outputs]
    return torch.cat(parts, next(dim for dim, size in enumerate(first.shape) if dim and size == rows))
