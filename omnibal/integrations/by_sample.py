"""Layers whose state goes on from sample to sample in a pack, run sample by sample.

Gated delta nets and short convolutions (Qwen3.5, LFM2) carry a state along a row. transformers' own implementations of
them have no bounds of samples: those of `flash-linear-attention` and `causal-conv1d` do, on GPUs that have them. Here a
layer runs once for each sample of a pack, whatever computes it, so that no state can cross; all other layers run on the
whole pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from itertools import pairwise
from operator import getitem
from typing import Any, Final

import torch
from torch import Tensor, nn

from omnibal.integrations.leaks import Leak, mapped

KINDS: Final = frozenset({"recurrent state", "convolution"})
"""Kinds of leaks that running a layer by sample stops."""


def run_by_sample(model: nn.Module, leaks: Iterable[Leak]) -> None:
    """Let the modules that leak run once for each sample of a pack; rows of other batches run as before.

    A pack is one row whose position_ids restart, without a cache.
    """
    decoders: dict[str, SampleBounds] = {}
    for leak in leaks:
        # Layers are numbered parts of the decoder, whose position_ids say where samples begin.
        parts = leak.module.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdecimal()), 1)
        name = ".".join(parts[: number - 1])
        if name not in decoders:
            decoders[name] = SampleBounds(model.get_submodule(name))
        module: Any = model.get_submodule(leak.module)
        module.forward = partial(_run, module.forward, decoders[name])


class SampleBounds:
    """Where the samples of the pack begin that a decoder runs, and where the last one ends; None for other rows."""

    def __init__(self, decoder: nn.Module) -> None:
        self.of_pack: list[int] | None = None
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


def _run(forward: Callable[..., Any], bounds: SampleBounds, *args: Any, **kwargs: Any) -> Any:
    found = bounds.of_pack
    if found is None or len(found) < 3:
        return forward(*args, **kwargs)
    outputs = []
    for start, stop in pairwise(found):
        own_args, own_kwargs = mapped((args, kwargs), partial(_cut, found[-1], start, stop))
        outputs.append(forward(*own_args, **own_kwargs))
    return mapped(outputs[0], partial(_joined, outputs, found[1] - found[0]))


def _cut(total: int, start: int, stop: int, path: tuple[Any, ...], tensor: Tensor) -> Tensor:
    """A sample's rows of a tensor that has one for each token of the pack."""
    dim = next((dim for dim, size in enumerate(tensor.shape) if size == total), None)
    return tensor if dim is None else tensor.narrow(dim, start, stop - start)


def _joined(outputs: Sequence[Any], rows: int, path: tuple[Any, ...], first: Tensor) -> Tensor:
    """The rows of all samples, of an output that stands at ``path`` in each sample's outputs."""
    parts = [reduce(getitem, path, output) for output in outputs]
    return torch.cat(parts, next(dim for dim, size in enumerate(first.shape) if dim and size == rows))
