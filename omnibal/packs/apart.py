"""What keeps the samples of a pack apart where transformers' own layers do not, and which rows are too long for that.

Three kinds of layers let something across, whatever positions and masks say:

- Gated delta nets and short convolutions (Qwen3.5, LFM2) carry a state along a row. The kernels of
  `flash-linear-attention` and `causal-conv1d` take bounds of samples, and get them where these packages are; elsewhere
  a layer runs once for each sample of a pack, and all other layers on the whole pack.
- Gemma 3 and 4 see images whole, in both directions. transformers 5.23 looks for an image by its place in its sample
  where it should look by its place in the row, in layers with a window: such models get masks that are made here.
- "dynamic" and "longrope" rotary embeddings follow the longest sample of a row: they run once for each long sample.

| in the configuration | depends on | packs |
|---|---|---|
| rope type `dynamic` or `longrope`, transformers' modules | the longest sample of a row | get tables by sample |
| the same in other code | the row's length | have a longest row |
| `attn_temperature_tuning`, `use_logn_attn`, `use_dynamic_ntk` | a place in the row | the same |
| windows, chunks, `llama_4_scaling_beta` | distances and positions in a sample | are exact if the code heeds them |

Frequencies of "linear", "yarn", "llama3" and "proportional" are the same for all lengths.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from inspect import signature
from itertools import pairwise
from operator import getitem
from typing import Any, Final, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor, nn

from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError
from omnibal.packs.blocks import let_encoders_be_traced

KINDS: Final = frozenset({"recurrent state", "convolution"})
"""Kinds of leaks that `StatefulLayers` stops."""
TYPES: Final = ("token_type_ids", "mm_token_type_ids")
"""Fields that tell a model which tokens are of images."""
VARLEN_FLOOR: Final = Version("2.11")
"""The first torch whose kernel for packs takes a scale and a window."""
IMAGE_BLOCKS: Final = "get_block_sequence_ids_for_mask"
"""What modules of transformers have whose models see images whole: the number of the image that each token is of."""
BY_PLACE: Final = {
    "attn_temperature_tuning": ("floor_scale", 1),
    "use_logn_attn": ("seq_length", 0),
    "use_dynamic_ntk": ("seq_length", 0),
}
"""By a field that switches on what depends on a token's place in its row: the field with the longest row that does not
show it, and how many tokens that row lies below the number."""
LONGROPE: Final = "longrope"
STATE: Final = "linear"
"""What transformers calls a kind of layer that carries a state, and takes bounds only if its kernels are installed."""
WINDOWS: Final = "attention in windows"
CHUNKS: Final = "attention in chunks"
HEEDED: Final = (WINDOWS, CHUNKS)
"""What masks of transformers apply within samples."""
ROPE_FIELDS: Final = ("rope_parameters", "rope_scaling")
FOLLOWING: Final = ("dynamic", LONGROPE)
NOT_PACKED: Final = ("audio", "speech", "sound")
"""Parts of names of sub-models whose rows are single sounds."""


def attend_by_bounds(model: nn.Module) -> Callable[[], None] | None:
    """Let the LLM of a model of transformers attend by bounds of samples, not by a mask; return what undoes that."""
    # None if attention is not "sdpa", images are seen whole, or torch has no kernel for packs yet.
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

    decoder: Any = base.get_decoder()
    let_encoders_be_traced(base, decoder)
    hooks = []
    if not any(STATE in kind or "attention" not in kind for kind in getattr(text, "layer_types", None) or ()):
        bounds = SampleBounds(decoder)
        hooks = [bounds.hook, decoder.register_forward_pre_hook(partial(_give_bounds, bounds), with_kwargs=True)]
    base.set_attn_implementation({name: PACKED_ATTENTION})

    def undo() -> None:
        base.set_attn_implementation({name: "sdpa"})
        for hook in hooks:
            hook.remove()

    return undo


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _give_bounds(bounds: SampleBounds, decoder: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Hand a pack's bounds, and its longest sample, to the layers: compiled ones cannot read them off its positions."""
    from omnibal.vlm.attention import PACKED_ATTENTION, attention_kwargs
    from omnibal.vlm.payload import PackCounts, note_counts

    if decoder.config._attn_implementation != PACKED_ATTENTION:  # changed since, as by Ulysses: its rows are shares
        return None
    # Three rows are time, height and width, without the text's that tells where samples begin.
    if bounds.of_pack is None or kwargs.get("attention_mask") is not None or len(kwargs["position_ids"]) == 3:
        return None
    # Not the tensor that the module keeps: a copy of the model would copy what is noted on it.
    given = bounds.for_kernels["cu_seq_lens_q"].detach()
    note_counts([given], PackCounts(None, tuple(stop - start for start, stop in pairwise(bounds.of_pack))))
    return args, kwargs | attention_kwargs(given)


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
    """Modules that carry a state from sample to sample, made to keep samples apart in packs alone."""

    # A pack is one row whose position_ids restart, without a cache.

    def __init__(self, model: nn.Module, modules: Iterable[str]) -> None:
        from transformers.utils.import_utils import is_causal_conv1d_available, is_flash_linear_attention_available

        self.by_kernels = is_flash_linear_attention_available() and is_causal_conv1d_available()
        """Whether the kernels are given the samples' bounds; else layers run sample by sample."""
        decoders: dict[str, SampleBounds] = {}
        for leaking in modules:
            # Layers are numbered parts of the decoder, whose position_ids say where samples begin.
            parts = leaking.split(".")
            number = next((place for place, part in enumerate(parts) if part.isdecimal()), 1)
            name = ".".join(parts[: number - 1])
            if name not in decoders:
                decoders[name] = SampleBounds(model.get_submodule(name))
            module: Any = model.get_submodule(leaking)
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
        self.hook = decoder.register_forward_pre_hook(self._note, with_kwargs=True, prepend=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
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
            of_tokens = numbers.repeat_interleave(bounds.diff(), output_size=len(row))  # told, the device is not asked
            self.for_kernels = {"cu_seq_lens_q": bounds, "seq_idx": of_tokens[None]}


def _cut(total: int, start: int, stop: int, path: tuple[Any, ...], tensor: Tensor) -> Tensor:
    """A sample's rows of a tensor that has one for each token of the pack."""
    dim = next((dim for dim, size in enumerate(tensor.shape) if size == total), None)
    return tensor if dim is None else tensor.narrow(dim, start, stop - start)


def _joined(outputs: Sequence[Any], rows: int, path: tuple[Any, ...], first: Tensor) -> Tensor:
    """The rows of all samples, of an output that stands at ``path`` in each sample's outputs."""
    parts = [reduce(getitem, path, output) for output in outputs]
    return torch.cat(parts, next(dim for dim, size in enumerate(first.shape) if dim and size == rows))


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Without dropout, and with the rotary embeddings of a new model: transformers keeps those of longer rows."""
    were_training = [module for module in model.modules() if module.training]
    following = [module for module in model.modules() if follows_length(module)]
    hooks = [module.register_forward_pre_hook(_renewed) for module in following]
    model.eval()
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in were_training:  # one by one: a frozen ViT may not have been training
            module.training = True


def _renewed(rotary: nn.Module, args: Any) -> None:
    from omnibal.vlm.attention import renew  # loops of models from elsewhere need no transformers

    renew(rotary)


def mapped(value: Any, change: Callable[[tuple[Any, ...], Tensor], Tensor], path: tuple[Any, ...] = ()) -> Any:
    """Arguments or outputs with their tensors changed; what holds no other tensor stays the same object."""
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, Mapping):
        items = {key: mapped(each, change, (*path, key)) for key, each in value.items()}
        if all(items[key] is value[key] for key in items):
            return value
        changed = copy.copy(value)  # transformers' ModelOutput among them
        for key, each in items.items():
            changed[key] = each  # type: ignore[index]
        return changed
    if type(value) in (tuple, list):
        found = [mapped(each, change, (*path, place)) for place, each in enumerate(value)]
        same = all(one is other for one, other in zip(found, value, strict=True))
        return value if same else type(value)(found)
    return value


class Threshold(NamedTuple):
    """A number in a configuration: rows or samples of more tokens are computed otherwise than shorter ones."""

    part: tuple[str, ...]
    """Where in the configuration ``field`` stands: attributes, or keys of dictionaries."""
    field: str
    tokens: int
    word: str
    """What depends on the length, as the configuration calls it."""
    by_place: bool
    """Whether a token's place in its row counts, where otherwise positions and distances in its sample do."""
    below: int = 0
    """The number in the configuration less ``tokens``."""

    def __str__(self) -> str:
        number = f"{self.tokens} tokens of a {'row' if self.by_place else 'sample'}"
        return f"{number} ({'.'.join((*self.part, self.field))}: {self.word})"


def thresholds(config: Any) -> list[Threshold]:
    """What depends on length in a configuration of transformers, in all of its sub-models."""
    return [*_of_part(config.to_dict(), ())]


def _of_part(part: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[Threshold]:
    for name, value in part.items():
        if isinstance(value, Mapping) and not any(word in name for word in NOT_PACKED):
            if name not in ROPE_FIELDS:
                yield from _of_part(value, (*path, name))
                continue
            # Gemma's models have parameters for each kind of layer.
            by_layer = {(): value} | {(key,): each for key, each in value.items() if isinstance(each, Mapping)}
            for key, parameters in by_layer.items():
                yield from _of_rope(part, path, (*path, name, *key), parameters)
    for name, (field, below) in BY_PLACE.items():
        if part.get(name) and isinstance(part.get(field), int):
            yield Threshold(path, field, int(part[field]) - below, name, True, below)
    for name, word in (("sliding_window", WINDOWS), ("attention_chunk_size", CHUNKS)):
        if isinstance(part.get(name), int) and part.get(f"use_{name}", True):
            yield Threshold(path, name, part[name], word, False)


def _of_rope(
    part: Mapping[str, Any], path: tuple[str, ...], own: tuple[str, ...], parameters: Mapping[str, Any]
) -> Iterator[Threshold]:
    kind = str(parameters.get("rope_type", parameters.get("type", "")))
    original, fields = "original_max_position_embeddings", ((own, parameters), (path, part))
    if "dynamic" in kind and isinstance(part.get("max_position_embeddings"), int):
        yield Threshold(path, "max_position_embeddings", part["max_position_embeddings"], "dynamic", False)
    elif kind in (LONGROPE, "su") or parameters.get("llama_4_scaling_beta"):
        word = LONGROPE if kind in (LONGROPE, "su") else "llama_4_scaling_beta"
        for where, numbers in fields:  # Phi-3 has the number in both
            if isinstance(numbers.get(original), int):
                yield Threshold(where, original, numbers[original], word, False)


def longest_row(model: Any) -> Threshold | None:
    """What limits the rows of a model: packs of several samples that hold more tokens are not exact."""
    return min(_of_rows(transformers_model(model)), key=lambda each: each.tokens, default=None)


def shown_by_samples(base: Any) -> list[Threshold]:
    """What depends on a sample's own length alone, if packs keep samples apart: samples that are longer show it."""
    of_rows = _of_rows(base)
    return [each for each in _in_text(base) if each not in of_rows]


def _of_rows(base: Any) -> list[Threshold]:
    by_sample = any(follows_length(module) for module in base.modules())
    return [each for each in _in_text(base) if each.by_place or (each.word in FOLLOWING and not by_sample)]


def _in_text(base: Any) -> list[Threshold]:
    config: Any = getattr(base, "config", None)
    if not hasattr(config, "get_text_config"):
        return []
    text = config.get_text_config()
    names = [name for name in config.sub_configs if getattr(config, name, None) is not text]
    return [each for each in thresholds(config) if each.part[:1] not in [(name,) for name in names]]


def refuse_other_parts(base: Any) -> None:
    """Refuse encoders whose rotary embeddings follow the largest image of a row, which no limit of tokens prevents."""
    of_text = _in_text(base)
    for each in thresholds(base.config) if hasattr(base, "config") else ():
        if each.word in FOLLOWING and each not in of_text:
            raise ConfigError(
                f"rope_type of {each.part[0]} must not follow the other images of a row to train packs, got "
                f"{each.word!r}; balance(..., padded=True) trains on padded batches"
            )


def follows_length(module: nn.Module) -> bool:
    """Whether a module has rotary embeddings of transformers that follow the length of a row."""
    if not any(name.endswith("original_inv_freq") for name, _ in module.named_buffers(recurse=False)):
        return False
    from omnibal.vlm.attention import length_types  # loops of models from elsewhere need no transformers

    return bool(length_types(module))


def refuse_long_rows(model: Any, limits: PackLimits | None) -> None:
    """Refuse limits whose packs may be longer than the longest row that computes samples as alone."""
    row = longest_row(model)
    if row is not None and (limits is None or limits.llm_tokens > row.tokens):
        raise ConfigError(
            f"limits.llm_tokens must be at most {row.tokens} for packs of this model, which computes longer rows "
            f"otherwise ({'.'.join((*row.part, row.field))}), got {'none' if limits is None else limits.llm_tokens}"
        )


def transformers_model(model: Any) -> Any:
    """The model of transformers in wrappers, or the model itself."""
    return next((part for part in model.modules() if hasattr(type(part), "config_class")), model)


def plain_words(config: Any) -> Tensor:
    """Token ids of a model that stand for no image, mark or end, in order."""
    special = {value for name, value in config.to_dict().items() if name.endswith(("token_id", "token_index"))}
    special |= {value for name, value in config.get_text_config().to_dict().items() if name.endswith("token_id")}
    return torch.tensor([word for word in range(config.get_text_config().vocab_size) if word not in special])
