"""What tensor ranks tell each other; of a block's tokens each of them has a part outside attention and MLP.

There norms, residuals and dropout work on the rank's own tokens. Attention and MLP gather the tokens of all ranks, and
scatter the sum of their products, in place of the all-reduces of whole hidden states.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.2.2.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

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
    """The tensor, whose gradients of all tensor ranks are added up in the backward pass."""
    return _exchanged(tensor, lambda same: same.view_as(same), _summing(ranks))


def summed(tensor: Tensor, ranks: TensorGroup, *, is_partial: bool = False) -> Tensor:
    """The sum of all tensor ranks' tensors.

    Args:
        is_partial: Whether each rank uses the sum for some heads only, so that it gets a part of the gradient.
    """
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
        """The whole tensor, of all ranks' parts."""
        count = torch.Size(self.shape).numel()
        return self.ranks.gather(part.flatten(0, -2))[:count].view(*self.shape, part.shape[-1])

    def scattered(self, whole: Tensor) -> Tensor:
        """This rank's part of the sum of all ranks' whole tensors."""
        rows = whole.reshape(-1, whole.shape[-1])
        return self._as_part(self.ranks.scatter_sum(functional.pad(rows, (0, 0, 0, -len(rows) % self.ranks.size))))

    def _as_part(self, rows: Tensor) -> Tensor:
        return rows.view(*(1,) * (len(self.shape) - 1), *rows.shape)


class SharedTokens:
    """The hidden states of one transformer block, of whose tokens each tensor rank has a part.

    ``own`` and ``whole`` stand at the block's ends, ``gathered`` in front of column layers, ``scattered`` behind row
    layers.
    """

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
