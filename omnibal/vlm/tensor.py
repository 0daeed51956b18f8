"""Tensor ranks: several devices that share each layer, whose outputs are whole on all of them.

A layer is built whole and cut: column layers keep some outputs, row layers the inputs that come of these, and the
ranks' products of a row layer are added up. In between a rank computes some heads, or some of an MLP's units. What goes
into a column layer passes `copy_of`: its gradients are added up on the way back (Shoeybi et al., "Megatron-LM", 2019,
section 3).

In a transformer block ranks share the tokens as well, and `SharedTokens` takes the place of both: norms, residuals and
dropout work on the rank's own tokens; attention and MLP gather the tokens of all ranks, and scatter the sum of their
products (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2.2).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from omnibal.families.parts import Cut, Slice, units_of
from omnibal.loss import Vocabulary
from omnibal.vlm.payload import DeferringLinear

if TYPE_CHECKING:
    from omnibal.vlm.layers import VisionLanguageModel

# torch 2.13 renames them.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TensorGroup(NamedTuple):
    """The ranks that share layers with this one, and its place among them."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def sum_in_place(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def max_in_place(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, as many of each, one rank's behind the other's."""
        found = rows.new_empty(self.size * len(rows), *rows.shape[1:])
        _all_gather(found, rows.contiguous(), group=self.group)
        return found

    def scatter_sum(self, rows: Tensor) -> Tensor:
        """This rank's share of the rows of the sum over all ranks."""
        found = rows.new_empty(len(rows) // self.size, *rows.shape[1:])
        _reduce_scatter(found, rows.contiguous(), group=self.group)
        return found


_Map = Callable[[Tensor], Tensor]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, forth: _Map, back: _Map) -> Tensor:
        context.back = back
        return forth(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return context.back(gradient), None, None


def _exchanged(tensor: Tensor, forth: _Map, back: _Map) -> Tensor:
    """What ``forth`` makes of a tensor; ``back`` makes the tensor's gradient of the result's."""
    found: Tensor = _Exchange.apply(tensor, forth, back)  # type: ignore[no-untyped-call]
    return found


def _summing(ranks: TensorGroup) -> _Map:
    # A clone: autograd may hand the same tensor to others.
    return lambda tensor: ranks.sum_in_place(tensor.clone(memory_format=torch.contiguous_format))


def copy_of(tensor: Tensor, ranks: TensorGroup) -> Tensor:
    return _exchanged(tensor, lambda same: same.view_as(same), _summing(ranks))


def summed(tensor: Tensor, ranks: TensorGroup, *, is_partial: bool = False) -> Tensor:
    """The sum of all tensor ranks' tensors; ``is_partial``: each rank gets the gradient of some heads only."""
    return _exchanged(tensor, _summing(ranks), _summing(ranks) if is_partial else lambda gradient: gradient)


@contextmanager
def own_stream(ranks: TensorGroup | None) -> Iterator[None]:
    """Let random numbers inside be a tensor rank's own; outside all ranks of a group draw the same."""
    if ranks is None:
        yield
        return
    # The seed is drawn from the common stream, so that a recomputed layer, which gets that stream's state, draws again
    # what it has drawn.
    seed = int(torch.randint(2**62, (), device="cpu"))
    with torch.random.fork_rng():
        torch.manual_seed(seed + ranks.rank)
        yield


class TokenParts(NamedTuple):
    """How tensor ranks share hidden states (…, width): as many rows on each, zeros behind the last token."""

    ranks: TensorGroup
    shape: tuple[int, ...]  # of the tokens, without the width

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part (1, …, rows, width) of a tensor (…, width), copied: a view would keep the whole one."""
        rows = whole.reshape(-1, whole.shape[-1])
        each = -(-len(rows) // self.ranks.size)
        part = rows[self.ranks.rank * each : (self.ranks.rank + 1) * each]
        return self._as_part(functional.pad(part, (0, 0, 0, each - len(part))))

    def gathered(self, part: Tensor) -> Tensor:
        count = torch.Size(self.shape).numel()
        return self.ranks.gather(part.flatten(0, -2))[:count].view(*self.shape, part.shape[-1])

    def scattered(self, whole: Tensor) -> Tensor:
        rows = whole.reshape(-1, whole.shape[-1])
        return self._as_part(self.ranks.scatter_sum(functional.pad(rows, (0, 0, 0, -len(rows) % self.ranks.size))))

    def _as_part(self, rows: Tensor) -> Tensor:
        return rows.view(*(1,) * (len(self.shape) - 1), *rows.shape)


class SharedTokens:
    """The hidden states of one transformer block, of whose tokens each tensor rank has a part."""

    # ``own`` and ``whole`` stand at the block's ends, ``gathered`` in front of column layers, ``scattered`` behind row
    # layers.

    def __init__(self, ranks: TensorGroup) -> None:
        self.ranks = ranks
        self.parts = TokenParts(ranks, ())  # of the pass that runs

    def own(self, whole: Tensor) -> Tensor:
        self.parts = TokenParts(self.ranks, tuple(whole.shape[:-1]))
        return _exchanged(whole, self.parts.own, self.parts.gathered)

    def whole(self, part: Tensor) -> Tensor:
        return _exchanged(part, self.parts.gathered, self.parts.own)

    def gathered(self, part: Tensor) -> Tensor:
        return _exchanged(part, self.parts.gathered, self.parts.scattered)

    def scattered(self, product: Tensor) -> Tensor:
        return _exchanged(product, self.parts.scattered, self.parts.gathered)

    def kept_part(self, whole: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What a recomputed block keeps of its input, and what gives the input: at first itself, later gathered."""
        parts, first, needs_gradient = TokenParts(self.ranks, tuple(whole.shape[:-1])), [whole], whole.requires_grad

        def restored(own: Tensor) -> Tensor:
            if first:
                return first.pop()
            with _disable_current_modes():  # selective recomputation must meet the operators of the first pass alone
                return parts.gathered(own).requires_grad_(needs_gradient)

        return parts.own(whole.detach()), restored


class TokenDropout(nn.Dropout):
    """Dropout of a rank's tokens, which drops what one rank that has all tokens would drop."""

    tokens: SharedTokens

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and self.p):
            return input
        parts = self.tokens.parts
        return input * parts.own(functional.dropout(input.new_ones(*parts.shape, input.shape[-1]), self.p))


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


def share_layer(model: "VisionLanguageModel", index: int, layer: nn.Module, ranks: TensorGroup) -> None:
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
        path = parent if shared or len(children) > 1 else children[0]
        _before(modules[path], shared.gathered if shared else partial(copy_of, ranks=ranks))
        _mark_partial(modules[path], path, slices, rows)
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


def _mark_partial(module: nn.Module, path: str, slices: Mapping[str, Slice], rows: list[str]) -> None:
    """Mark what is whole behind `copy_of` and before the sum of a row layer: norms of heads, A of an adapter."""
    for name, parameter in module.named_parameters():
        weight = f"{path}.{name}"
        if weight not in slices and not any(weight.startswith(f"{row}.") for row in rows):
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
    first, count = words[0], words[1] - words[0]
    if isinstance(module, nn.Embedding):
        _become(module, SharedEmbedding, num_embeddings=count, ranks=ranks, first=first)
    if hasattr(layer, "vocabulary"):
        cast(Any, layer).vocabulary = VocabularyPart(first, count, ranks)


def _share_attention(module: nn.Module, model: "VisionLanguageModel", index: int, ranks: TensorGroup) -> None:
    """Tell an attention module how many heads it has, where transformers' counts them itself."""
    if not hasattr(module, "head_dim"):
        return
    sizes = model.records[index].sizes
    heads, _ = units_of(sizes, "heads", ranks.size, ranks.rank)
    attention = cast(Any, module)
    attention.num_heads, attention.embed_dim = len(heads), len(heads) * sizes["head_dim"]
    attention.tensor_ranks = ranks  # `packed_attention` draws dropout from a stream of its own


def _before(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:

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
    for parameter, gradient in gradients.items():
        own: Slice | None = getattr(parameter, PARTIAL)
        if own is None:
            ranks.sum_in_place(gradient)
            continue
        # Heads of keys and values that several ranks have a copy of: each group of copies has a row of its own in one
        # message, which is short.
        rows = gradient.new_zeros(ranks.size // own.copies, gradient.numel())
        row = ranks.rank // own.copies
        rows[row] = gradient
        gradient.copy_(ranks.sum_in_place(rows)[row])
