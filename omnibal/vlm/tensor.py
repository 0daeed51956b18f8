"""Tensor ranks: several devices that share each layer, whose outputs are whole on all of them.

A layer is built whole and cut: column layers keep some outputs, row layers the inputs that come of these, and the
ranks' products of a row layer are added up. In between a rank computes some heads, or some of an MLP's units. What goes
into a column layer passes `copy_of`: its gradients are added up on the way back. In a transformer block ranks share the
tokens as well, and `SharedTokens` takes the place of both.

Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from omnibal.errors import ConfigError
from omnibal.families.cuts import Cut, Slice, units_of
from omnibal.loss import Vocabulary
from omnibal.vlm.backward import DeferringLinear
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.vlm.tensor_group import SharedTokens, TensorGroup, TokenDropout, copy_of, own_stream, summed

# DeepSpeed's norms count a parameter with this mark on every tensor rank, and any other on the first one only.
COUNTED: Final = "tensor_model_parallel"
# The mark of a parameter of which each tensor rank computes a part of the gradient only; its value is the Slice, or
# None where the parameter is whole.
PARTIAL: Final = "omnibal_partial_gradient"
BLOCK: Final = "block"  # The part of a layer that is a transformer block.


class RowLinear(DeferringLinear):
    """A linear layer that has some of the inputs; the bias, which is whole, comes behind the sum over the ranks."""

    total: Callable[[Tensor], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        product = self.total(self.product(input, None))
        return product if self.bias is None else product + self.bias


class SharedRMSNorm(nn.Module):
    """An RMS norm over a width of which each tensor rank has a part (InternViT-6B's queries and keys)."""

    ranks: TensorGroup
    width: int
    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden: Tensor) -> Tensor:
        """From (…, part of the width) to the same; computed in float32, as transformers does."""
        exact = hidden.to(torch.float32)
        variance = summed(exact.pow(2).sum(-1, keepdim=True), self.ranks, is_partial=True) / self.width
        return self.weight * (exact * torch.rsqrt(variance + self.variance_epsilon)).to(hidden.dtype)


class SharedEmbedding(nn.Embedding):
    """The rows of an embedding that a tensor rank has; the ranks' outputs, zeros for others' words, are added up."""

    ranks: TensorGroup
    first: int

    def forward(self, input: Tensor) -> Tensor:
        own, places = _own_words(input, self.first, len(self.weight))
        # Plain embeddings give the row of a padding token no gradient.
        padding = None if self.padding_idx is None else self.padding_idx - self.first
        padding = padding if padding is not None and 0 <= padding < len(self.weight) else None
        found = functional.embedding(places, self.weight, padding)
        return summed(found.masked_fill(~own[..., None], 0), self.ranks)


class VocabularyPart(Vocabulary):
    """The words that a tensor rank's head has logits of: ``count`` from ``first`` on."""

    def __init__(self, first: int, count: int, ranks: TensorGroup) -> None:
        self.first, self.count, self.ranks = first, count, ranks

    @torch.no_grad()
    def log_probabilities(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        exact = logits.to(torch.float32)
        exact = exact - self.ranks.max_in_place(exact.amax(-1))[:, None]
        own, places = _own_words(targets, self.first, self.count)
        of_targets = exact.gather(1, places[:, None])[:, 0].masked_fill(~own, 0)
        total, chosen = self.ranks.sum_in_place(torch.stack([exact.exp().sum(-1), of_targets]))
        return exact.sub_(total.log()[:, None]), (chosen - total.log())[:, None]

    def gradient(self, logs: Tensor, targets: Tensor, chosen: Tensor) -> Tensor:
        own, places = _own_words(targets, self.first, self.count)
        probabilities, places = logs.exp_(), places[:, None]
        values = torch.where(own[:, None], chosen.expm1(), probabilities.gather(1, places))
        return probabilities.scatter_(1, places, values)

    def likeliest(self, logits: Tensor) -> Tensor:
        largest, word = logits.to(torch.float32).max(-1)
        # Of equal ones the first word.
        is_largest = largest == self.ranks.max_in_place(largest.clone())
        return -self.ranks.max_in_place(torch.where(is_largest, -(word + self.first), torch.iinfo(word.dtype).min))


def _own_words(words: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Which words are among ``count`` from ``first`` on, and their places there; 0 for others."""
    places = words - first
    own = (places >= 0) & (places < count)
    return own, places.masked_fill(~own, 0)


class SharedDropout(nn.Dropout):
    """Dropout of what a tensor rank has a part of: each rank draws a mask of its own."""

    ranks: TensorGroup

    def forward(self, input: Tensor) -> Tensor:
        with own_stream(self.ranks if self.training and self.p else None):
            return super().forward(input)


def share_layer(model: VisionLanguageModel, index: int, layer: nn.Module, ranks: TensorGroup) -> None:
    """Leave a tensor rank its part of layer ``index``, as `build_layer` gave it, in place."""
    if ranks.size == 1:
        return
    slices, cuts = model.slices(index, ranks.size, ranks.rank), model.cuts(index)
    modules = dict(layer.named_modules())
    for name, own in slices.items():
        owner, _, last = name.rpartition(".")
        setattr(modules[owner], last, _part_of(layer.get_parameter(name), own, ranks))
    for module in modules.values():
        if isinstance(module, nn.Linear):  # adapters, too
            module.out_features, module.in_features = module.weight.shape
    tokens = _share_tokens(layer, cuts, slices, ranks)
    columns: dict[str, list[str]] = {}
    for name, cut in cuts.items():
        module, shared = modules[name], tokens if name.startswith(f"{BLOCK}.") else None
        linear = cast(nn.Module, getattr(module, "base_layer", module))  # inside peft's, where it has adapters
        if cut.by == "vocab":
            own = next(own for weight, own in slices.items() if weight.startswith(f"{name}."))
            _share_words(layer, linear, own.ranges[0], ranks)
            _mark_partial(module, name, slices, [])
        elif not isinstance(linear, nn.Linear):
            assert hasattr(linear, "variance_epsilon"), "a norm of transformers over the width of all heads"
            sizes = model.records[index].sizes
            _become(linear, SharedRMSNorm, ranks=ranks, width=sizes["heads"] * sizes["head_dim"])
        elif cut.dim == 0:
            columns.setdefault(name.rpartition(".")[0], []).append(name)
        else:
            _share_rows(module, linear, shared.scattered if shared else partial(summed, ranks=ranks), ranks)
    rows = [name for name, cut in cuts.items() if cut.dim == 1]
    for parent, children in columns.items():
        shared = tokens if parent.startswith(f"{BLOCK}.") else None
        # Queries, keys and values read one input, which is gathered, or whose gradients are added up, once. Attention
        # asks its input how many tokens it has.
        place = parent if shared or len(children) > 1 else children[0]
        _before(modules[place], shared.gathered if shared else partial(copy_of, ranks=ranks))
        _mark_partial(modules[place], place, slices, rows)
        _share_attention(modules[parent], model, index, ranks)


def _share_tokens(
    layer: nn.Module, cuts: Mapping[str, Cut], slices: Mapping[str, Slice], ranks: TensorGroup
) -> SharedTokens | None:
    """Let tensor ranks share the tokens in a layer's transformer block, if it has one."""
    block = getattr(layer, BLOCK, None)
    if block is None:
        return None
    tokens = cast(Any, layer).shared_tokens = SharedTokens(ranks)  # `run_layer` asks for it
    _before(block, tokens.own)
    block.register_forward_hook(lambda block, args, output: tokens.whole(output))
    for name, module in block.named_modules(prefix=BLOCK):
        if type(module) is nn.Dropout and not any(name.startswith(f"{cut}.") for cut in cuts):  # no adapter's
            _become(module, TokenDropout, tokens=tokens)
    # Gradients of what is whole come of the own tokens only.
    _mark_partial(block, BLOCK, slices, [])
    return tokens


def _part_of(whole: nn.Parameter, own: Slice, ranks: TensorGroup) -> nn.Parameter:
    part = nn.Parameter(part_of(whole.detach(), own).clone(), requires_grad=whole.requires_grad)
    # Of several ranks that hold the same slice the first one's is counted.
    setattr(part, COUNTED, ranks.rank % own.copies == 0)
    if own.copies > 1:
        setattr(part, PARTIAL, own)
    return part


def part_of(whole: Tensor, own: Slice) -> Tensor:
    parts = [whole.narrow(own.dim, start, stop - start) for start, stop in own.ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, own.dim)


def whole_state(model: VisionLanguageModel, index: int, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The whole weights of layer ``index``, from those of all tensor ranks in their order."""
    slices = [model.slices(index, len(states), rank) for rank in range(len(states))]
    found = dict(states[0])
    for name in slices[0].keys() & found.keys():
        parts = [(state[name], own[name]) for state, own in zip(states, slices, strict=True)]
        shape = list(found[name].shape)
        dim = parts[0][1].dim
        shape[dim] = max(stop for _, own in parts for _, stop in own.ranges)
        found[name] = found[name].new_empty(shape)
        for part, own in parts:
            if part.shape[dim] != own.width:
                raise ConfigError(
                    f"{name} of layer {index} must be {own.width} wide on each of {len(states)} tensor ranks, got "
                    f"{part.shape[dim]}"
                )
            before = 0
            for start, stop in own.ranges:
                found[name].narrow(dim, start, stop - start).copy_(part.narrow(dim, before, stop - start))
                before += stop - start
    return found


def own_state(
    model: VisionLanguageModel, index: int, states: Sequence[Mapping[str, Tensor]], ranks: TensorGroup
) -> dict[str, Tensor]:
    """A tensor rank's weights of layer ``index``, from those of a group of any size in their order."""
    own = model.slices(index, ranks.size, ranks.rank)
    whole = whole_state(model, index, states)
    return {name: part_of(weight, own[name]) if name in own else weight for name, weight in whole.items()}


def _mark_partial(module: nn.Module, place: str, slices: Mapping[str, Slice], rows: list[str]) -> None:
    """Mark what is whole behind `copy_of` and before the sum of a row layer: norms of heads, A of an adapter."""
    for name, parameter in module.named_parameters():
        path = f"{place}.{name}"
        if path not in slices and not any(path.startswith(f"{row}.") for row in rows):
            setattr(parameter, PARTIAL, None)


def _become(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
    """Let a module compute as ``kind`` does, whose weights are the same, with these attributes."""
    module.__class__ = kind
    for name, value in attributes.items():
        setattr(module, name, value)


def _share_rows(module: nn.Module, linear: nn.Linear, total: Callable[[Tensor], Tensor], ranks: TensorGroup) -> None:
    # Of an adapter beside a row layer A is cut like the layer, and B, behind the sum over the ranks, is whole.
    for row in (linear, *getattr(module, "lora_A", {}).values()):
        _become(row, RowLinear, total=total)
    for dropout in getattr(module, "lora_dropout", {}).values():
        if isinstance(dropout, nn.Dropout):
            _become(dropout, SharedDropout, ranks=ranks)


def _share_words(layer: nn.Module, module: nn.Module, words: tuple[int, int], ranks: TensorGroup) -> None:
    """Tell an embedding or a head, and the layer around it, which words it has."""
    first, count = words[0], words[1] - words[0]
    if isinstance(module, nn.Embedding):
        _become(module, SharedEmbedding, num_embeddings=count, ranks=ranks, first=first)
    if hasattr(layer, "vocabulary"):
        cast(Any, layer).vocabulary = VocabularyPart(first, count, ranks)


def _share_attention(module: nn.Module, model: VisionLanguageModel, index: int, ranks: TensorGroup) -> None:
    """Tell an attention module how many heads it has, where transformers' counts them itself."""
    if not hasattr(module, "head_dim"):
        return
    sizes = model.records[index].sizes
    heads, _ = units_of(sizes, "heads", ranks.size, ranks.rank)
    attention = cast(Any, module)
    attention.num_heads, attention.embed_dim = len(heads), len(heads) * sizes["head_dim"]
    attention.tensor_ranks = ranks  # `packed_attention` draws dropout from a stream of its own


def _before(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Let a module get what ``change`` makes of its hidden states."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def partial_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The trained parameters of which each tensor rank computes a part of the gradient only."""
    found = [parameter for parameter in module.parameters() if hasattr(parameter, PARTIAL) and parameter.requires_grad]
    return list(dict.fromkeys(found))


@torch.no_grad()
def add_up(gradients: Mapping[nn.Parameter, Tensor], ranks: TensorGroup) -> None:
    """Add up flattened gradients of `partial_parameters` over the tensor ranks, in place."""
    for parameter, gradient in gradients.items():
        own: Slice | None = getattr(parameter, PARTIAL)
        if own is None:
            ranks.sum_in_place(gradient)
            continue
        # Heads of keys and values that several ranks have a copy of: each group of copies has a row of its own in one
        # message, which is short.
        rows = gradient.new_zeros(ranks.size // own.copies, gradient.numel())
        place = ranks.rank // own.copies
        rows[place] = gradient
        gradient.copy_(ranks.sum_in_place(rows)[place])
