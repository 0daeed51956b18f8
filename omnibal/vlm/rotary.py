"""Rotary tables that depend on a sample's own length, and on nothing else in its pack.

"dynamic" and "longrope" frequencies follow the largest position of a forward pass. transformers asks the device for it,
stretches the frequencies of all samples in the row, and with "dynamic" keeps them for shorter rows that come later.
Here each sample gets the frequencies that a new model of transformers gives it alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

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
    """What ``forward``, of a rotary module of transformers, gives for a pack whose samples have these lengths.

    ``position_ids`` is (1, tokens), or (rows, 1, tokens) with rows of time, height and width. Tokens are the last
    dimension but one of the tables.
    """
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
    bounds = [0, *(place + 1 for place, size in enumerate(longest) if size > threshold), len(lengths)]
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
