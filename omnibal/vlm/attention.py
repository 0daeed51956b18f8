"""Attention and rotary tables over packs, in which no sample depends on another one.

Attention is registered with transformers as ``"omnibal_packed"``. A pack is one sequence of samples laid one after
another; ``cu_seq_lens`` (int32, samples + 1) holds where each starts and the last ends. On CUDA torch's variable-length
kernel sees these bounds; elsewhere, and for what the kernel lacks (float32, dropout), each sample goes through
``scaled_dot_product_attention`` on its own. Neither ever builds a mask of the pack's size squared.

torch.compile takes either as one operator, which reads the bounds as it runs: a graph serves packs of any number of
samples, if it is told the longest one (``max_length_q``).

Any transformers model can use it: ``attn_implementation="omnibal_packed"`` and ``attention_kwargs(cu_seq_lens)`` as
keyword arguments of its forward. Without them, bounds are read off position ids that restart, as transformers' flash
attention does; batches, masks and caches take transformers' own "sdpa" path.

"dynamic" and "longrope" rotary frequencies follow the largest position of a forward pass. transformers asks the device
for it, stretches the frequencies of all samples in the row, and with "dynamic" keeps them for shorter rows that come
later. Here each sample gets the frequencies that a new model of transformers gives it alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from omnibal.errors import ConfigError, DataError
from omnibal.vlm.payload import PackCounts, counts_of, note_counts
from omnibal.vlm.tensor import own_stream

PACKED_ATTENTION = "omnibal_packed"

# All kernels but cuDNN's, which builds and keeps a graph for every exact shape: nearly every pack has a new shape.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Newer kernels want to be told of fewer heads of keys than of queries; torch 2.11 takes them as they are.
_ASKS_ABOUT_GROUPS = "enable_gqa" in signature(varlen_attn).parameters


def attention_kwargs(cu_seq_lens: Tensor) -> dict[str, Any]:
    """The keyword arguments by which transformers' layers hand a pack's bounds to their attention function.

    >>> attention_kwargs(torch.tensor([0, 3, 5], dtype=torch.int32))["max_length_q"]
    3
    """
    longest = max(sample_lengths(cu_seq_lens))
    return {
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def sample_lengths(cu_seq_lens: Tensor) -> tuple[int, ...]:
    """Tokens of each sample of a pack, on the host.

    >>> sample_lengths(torch.tensor([0, 3, 5], dtype=torch.int32))
    (3, 2)
    """
    # Counts attached to the tensor are taken. Otherwise a GPU is asked once per tensor, not once per layer.
    counts = counts_of([cu_seq_lens])
    if counts is None:
        counts = PackCounts(None, tuple(cu_seq_lens.diff().tolist()))
        note_counts([cu_seq_lens], counts)
    return counts.sample_lengths


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention within each sample of a pack, in the form that transformers' attention modules call.

    Query is (1, heads, tokens, head_dim), key and value (1, kv_heads, tokens, head_dim). ``sliding_window`` is how many
    tokens a token sees, itself included; ``kwargs`` may hold ``position_ids``, the rest is for transformers' "sdpa".

    Returns:
        The mixed values, contiguous, of shape (1, tokens, heads, head_dim), and None in place of weights.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ConfigError(f"attention must be plain scaled dot products for {PACKED_ATTENTION}, got {name}")
    # transformers' attention modules say by themselves whether they are causal; the argument overrules them.
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if query.numel() == 0:  # transformers' "sdpa" fails on no tokens; the sums give key and value gradients of zeros
        return (query + key.sum() + value.sum()).transpose(1, 2), None
    if cu_seq_lens_q is not None and key.shape[2] != query.shape[2]:
        cu_seq_lens_q = None  # bounds that all layers were given, in one that attends to something else
    # Without bounds they are read off positions that restart; what is no pack takes transformers' own path.
    elif cu_seq_lens_q is None and causal:
        cu_seq_lens_q = _bounds_from_positions(query, key, attention_mask, kwargs.get("position_ids"))
    elif cu_seq_lens_q is not None and attention_mask is not None:
        raise ConfigError("attention_mask must be None beside cu_seq_lens_q, got a tensor; packs have no padding")
    # Each tensor rank drops weights of heads that the others do not have.
    ranks = getattr(module, "tensor_ranks", None) if dropout else None
    if cu_seq_lens_q is None:
        with own_stream(ranks):
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=causal, **kwargs
            )
    if sliding_window is not None and not causal:
        raise ConfigError(f"sliding_window must be None where attention is not causal, got {sliding_window}")
    terms = _Terms(dropout, scaling, causal, sliding_window)
    query, key, value = (_as_autocast(tensor) for tensor in (query, key, value))
    with own_stream(ranks):
        return _attend(query, key, value, cu_seq_lens_q, max_length_q, terms), None


def _as_autocast(tensor: Tensor) -> Tensor:
    # Under autocast rotary tables make float32 of queries and keys. Autocast rounds what goes into torch's "sdpa", but
    # nothing that goes into the kernel for packs.
    device = tensor.device.type
    if tensor.is_meta or not torch.is_autocast_enabled(device) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _bounds_from_positions(
    query: Tensor, key: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> Tensor | None:
    num_tokens = query.shape[2]
    if attention_mask is not None or query.shape[0] != 1 or key.shape[2] != num_tokens:
        return None
    if position_ids is None or position_ids.ndim != 2:  # the whole sequence is one sample
        return torch.tensor([0, num_tokens], dtype=torch.int32, device=query.device)
    return cast(Tensor, _bounds_of(position_ids))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _bounds_of(position_ids: Tensor) -> Tensor:
    # All layers of a forward pass get the same tensor: a GPU is asked once, not once per layer.
    num_tokens = position_ids.shape[1]
    version = None if position_ids.is_inference() else position_ids._version
    known, bounds = getattr(position_ids, "_omnibal_bounds", (None, None))
    if bounds is None or version is None or version != known:
        (breaks,) = torch.where(position_ids[0].diff() != 1)  # a sample starts where positions do not go on by one
        ends = breaks.new_tensor([num_tokens])
        bounds = torch.cat((ends - num_tokens, breaks + 1, ends)).to(torch.int32)
        position_ids._omnibal_bounds = version, bounds  # type: ignore[attr-defined]
    return bounds


class _Terms(NamedTuple):
    dropout: float
    scaling: float | None
    causal: bool
    window: int | None

    def within(self, longest: int) -> "_Terms":
        """Without a window that no sample exceeds: a mask would change nothing."""
        return self if self.window is None or self.window < longest else self._replace(window=None)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, longest: int | None, terms: _Terms
) -> Tensor:
    if not torch.compiler.is_compiling():
        return _attend_eagerly(query, key, value, cu_seq_lens, terms)
    if longest is None or terms.dropout:
        eagerly: Any = torch.compiler.disable(_attend_eagerly)  # type: ignore[no-untyped-call]
        return cast(Tensor, eagerly(query, key, value, cu_seq_lens, terms))
    # No number is read off the pack, nor compared with another one: each would be a constant of the graph, or a reason
    # for one more. A window that no sample exceeds stays.
    if _kernel_serves(query, terms.dropout):
        return _varlen(query, key, value, cu_seq_lens, longest, terms)
    mixed: Tensor = each_sample(query, key, value, cu_seq_lens, terms.scaling, terms.causal, terms.window)
    return mixed


def _attend_eagerly(query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, terms: _Terms) -> Tensor:
    lengths = sample_lengths(cu_seq_lens)
    if query.shape[0] != 1 or sum(lengths) != query.shape[2]:
        raise DataError(
            f"cu_seq_lens must end with the number of tokens of one sequence, got {sum(lengths)} "
            f"for {query.shape[0]} x {query.shape[2]} tokens"
        )
    terms = terms.within(max(lengths))
    with sdpa_kernel(_KERNELS):  # varlen_attn follows it, too
        if _kernel_serves(query, terms.dropout):
            return _varlen(query, key, value, cu_seq_lens, max(lengths), terms)
        return _per_sample(query, key, value, lengths, terms)


@torch.library.custom_op("omnibal::each_sample", mutates_args=())
def each_sample(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scaling: float | None, causal: bool, window: int | None
) -> Tensor:
    """Attention of each sample on its own, as one operator of a compiled graph."""
    return _attend_eagerly(query, key, value, bounds, _Terms(0.0, scaling, causal, window))


@each_sample.register_fake
def _(query: Tensor, *others: Any) -> Tensor:
    _, heads, tokens, head_dim = query.shape
    return query.new_empty((1, tokens, heads, head_dim))


@torch.library.custom_op("omnibal::each_sample_backward", mutates_args=())
def each_sample_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    scaling: float | None,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; attention is computed once more."""
    terms = _Terms(0.0, scaling, causal, window)
    # Within an operator nothing is recorded for a backward pass, but functorch records for itself.
    found: Any = torch.func.vjp(lambda q, k, v: _attend_eagerly(q, k, v, bounds, terms), query, key, value)
    of_query, of_key, of_value = found[1](gradient)
    return of_query.contiguous(), of_key.contiguous(), of_value.contiguous()


@each_sample_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scaling, ctx.causal, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return *each_sample_backward(gradient, *ctx.saved_tensors, ctx.scaling, ctx.causal, ctx.window), *[None] * 4


each_sample.register_autograd(_backward, setup_context=_keep)


def _kernel_serves(query: Tensor, dropout: float) -> bool:
    # What torch's variable-length kernel is built for.
    head_dim, half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and half and dropout == 0 and head_dim <= 256 and head_dim % 8 == 0


def _varlen(query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, longest: int, terms: _Terms) -> Tensor:
    groups: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if _ASKS_ABOUT_GROUPS else {}
    mixed = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seq_lens,
        cu_seq_lens,
        longest,
        longest,
        scale=terms.scaling,
        window_size=(-1 if terms.window is None else terms.window - 1, 0 if terms.causal else -1),
        **groups,
    )
    assert isinstance(mixed, Tensor)
    return mixed.contiguous()[None]


def _per_sample(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], terms: _Terms) -> Tensor:
    # One product per sample: no mask of the pack's size squared is ever built.
    queries, keys, values = (torch.split(tensor, list(lengths), dim=2) for tensor in (query, key, value))
    mixed = [
        functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if terms.window is None else _band(q.shape[2], terms.window, q.device),
            dropout_p=terms.dropout,
            is_causal=terms.causal and terms.window is None,
            scale=terms.scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(mixed, dim=2).transpose(1, 2).contiguous()


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """Mask of a sliding window, shape (length, length): token i sees tokens i - window + 1 to i."""
    position = torch.arange(length, device=device)
    behind = position[:, None] - position
    return (behind >= 0) & (behind < window)


def packed_mask(*, batch_size: int, q_length: int, kv_length: int, attention_mask: Tensor | None, **kwargs: Any) -> Any:
    """No mask for one sequence without padding, which may be a pack; else transformers' mask for "sdpa"."""
    if batch_size == 1 and q_length == kv_length and attention_mask is None:
        return None
    return sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs
    )


# transformers looks up both by the name in ``attn_implementation``.
AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, packed_mask)


LONGROPE = "longrope"


def length_types(rotary: Any) -> dict[str | None, str]:
    """Rope types that follow the length of a row, by kind of layer; by None where a module serves all layers alike."""
    found = getattr(rotary, "rope_type", None)
    by_layer = found if isinstance(found, Mapping) else {None: found}
    return {layer: kind for layer, kind in by_layer.items() if kind and ("dynamic" in kind or kind == LONGROPE)}


def renew(rotary: Any) -> None:
    """Give a rotary module of transformers the frequencies of a new one: it keeps those of the longest row so far."""
    for layer_type in length_types(rotary):
        prefix = "" if layer_type is None else f"{layer_type}_"
        setattr(rotary, f"{prefix}inv_freq", getattr(rotary, f"{prefix}original_inv_freq").clone())
        setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)


def tables_by_sample(
    rotary: Any,
    forward: Callable[..., Any],
    hidden: Tensor,
    position_ids: Tensor,
    lengths: Sequence[int],
    layer_type: str | None = None,
) -> Any:
    """What ``forward``, of a rotary module of transformers, gives for a pack whose samples have these lengths."""
    # ``position_ids`` is (1, tokens), or (rows, 1, tokens) with rows of time, height and width. Tokens are the last
    # dimension but one of the tables.
    options = {} if layer_type is None else {"layer_type": layer_type}
    kind = length_types(rotary).get(layer_type)
    if kind is None:
        return forward(hidden, position_ids, **options)
    prefix = "" if layer_type is None else f"{layer_type}_"
    original = getattr(rotary, f"{prefix}original_inv_freq")
    threshold = _threshold(rotary.config, kind, layer_type)
    parts, start = [], 0
    with _without_updates(rotary, layer_type, f"{prefix}inv_freq"):
        for tokens, longest in _stretches(lengths, _longest_positions(position_ids, lengths), threshold):
            frequencies = original
            if longest > threshold:
                # A tensor, as transformers gives: in Python's numbers the powers are rounded otherwise.
                seq_len = torch.full((), longest, device=hidden.device)
                frequencies, _ = ROPE_INIT_FUNCTIONS[kind](rotary.config, hidden.device, seq_len=seq_len, **options)
                if kind == LONGROPE:  # transformers copies them into the buffer
                    frequencies = frequencies.to(original.dtype)
            setattr(rotary, f"{prefix}inv_freq", frequencies)
            parts.append(forward(hidden, position_ids[..., start : start + tokens], **options))
            start += tokens
    if isinstance(parts[0], Tensor):  # complex ones
        return torch.cat(parts, dim=-2)
    return tuple(torch.cat(tables, dim=-2) for tables in zip(*parts, strict=True))


def _threshold(config: Any, kind: str, layer_type: str | None) -> int:
    """The longest sample whose frequencies are the original ones."""
    if kind != LONGROPE:
        return int(config.max_position_embeddings)
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    return int(parameters["original_max_position_embeddings"])


def _longest_positions(position_ids: Tensor, lengths: Sequence[int]) -> Sequence[int]:
    """The largest position of each sample, and one: what transformers calls the length of a row."""
    if position_ids.dim() == 2:  # counts up
        return lengths
    largest = [part.amax() + 1 for part in torch.split(position_ids, [*lengths], dim=-1)]
    found: list[int] = torch.stack(largest).tolist()
    return found


def _stretches(lengths: Sequence[int], longest: Sequence[int], threshold: int) -> Iterator[tuple[int, int]]:
    """(tokens, longest sample): neighbours that all keep the original frequencies together, each other sample alone."""
    bounds = [0, *(number + 1 for number, size in enumerate(longest) if size > threshold), len(lengths)]
    for start, stop in pairwise(bounds):
        short = stop - (stop > start and longest[stop - 1] > threshold)
        if short > start:
            yield sum(lengths[start:short]), threshold
        if stop > short:
            yield lengths[short], longest[short]


@contextmanager
def _without_updates(rotary: Any, layer_type: str | None, name: str) -> Iterator[None]:
    """Let the module take its frequencies as they are; ``name`` is their buffer, which is put back."""
    kept, frequencies = rotary.rope_type, getattr(rotary, name)
    rotary.rope_type = "default" if layer_type is None else {**kept, layer_type: "default"}
    try:
        yield
    finally:
        rotary.rope_type = kept
        setattr(rotary, name, frequencies)


class ExactRotary(nn.Module):
    """Rotary tables from frequencies that stay float32 and do not depend on what else is in the pack."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, hidden: Tensor, position_ids: Tensor, lengths: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each (1, tokens, head_dim), in the type of ``hidden``; of samples of these lengths."""
        if lengths and length_types(self.rotary):
            cosines, sines = tables_by_sample(self.rotary, self.rotary, hidden, position_ids, lengths)
        else:
            cosines, sines = self.rotary(hidden, position_ids)
        return cosines, sines

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ExactRotary":
        """Follow the model to its device, but not to bfloat16, in which far positions become indistinguishable."""
        before = dict(self.rotary.named_buffers())
        # nn.Module's to(), half() and cuda() all end here; frequencies get back their old type on the new device.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, now in list(self.rotary.named_buffers()):
            if now.dtype != before[name].dtype:
                setattr(self.rotary, name, before[name].to(now.device))
        return self
