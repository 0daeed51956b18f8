"""Tensors of samples go to the ranks that a rearrangement names, and their gradients come back."""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from omnibal.cost import IntArray
from omnibal.dispatch.rearrangement import Rearrangement
from omnibal.errors import ConfigError


def exchange(
    tensors: Mapping[str, Tensor],
    rows: Mapping[str, IntArray],
    rearrangement: Rearrangement,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Bring what belongs to each sample to its new rank: one all-to-all for each dtype, however many tensors.

    Nothing is sent where no sample moves. All ranks call it with the same names, dtypes, rows and rearrangement.
    Gradients of what arrives go back by the inverse exchange, again one for each dtype; so all ranks must want
    gradients of the same tensors.

    Args:
        tensors: Of each name, what this rank's samples hold, sample after sample in the order of ``held_by(rank)``:
            (rows of all of them, ...); an empty tensor with the same trailing shape where they have no rows.
        rows: Of each name, how many rows every sample has, (samples,), over all ranks.
        rearrangement: Over the group's ranks.
        group: The default group by default.

    Returns:
        Of each name, what belongs to the samples brought to this rank, in the order of ``brought_to(rank)``.

    Raises:
        ConfigError: A tensor has not as many rows as its samples are said to have. On this rank alone: check what comes
            from outside on all ranks before.
    """
    held = rearrangement.held_by(dist.get_rank(group))
    for name, tensor in tensors.items():
        if len(tensor) != rows[name][held].sum():
            raise ConfigError(f"{name} must have the {rows[name][held].sum()} rows of its samples, got {len(tensor)}")
    if rearrangement.is_still:
        return dict(tensors)
    arrived: dict[str, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors.values()):
        of_dtype = {name: tensor for name, tensor in tensors.items() if tensor.dtype == dtype}
        arrived |= _exchange(of_dtype, rows, rearrangement, group)
    return {name: arrived[name] for name in tensors}


def _exchange(
    tensors: Mapping[str, Tensor],
    rows: Mapping[str, IntArray],
    rearrangement: Rearrangement,
    group: dist.ProcessGroup | None,
) -> dict[str, Tensor]:
    """Of one dtype: a rank gets the parts of all tensors in one piece, tensor after tensor."""
    rank, num_ranks = dist.get_rank(group), rearrangement.num_ranks
    held, sent = rearrangement.held_by(rank), rearrangement.sent_by(rank)
    received, brought = rearrangement.received_by(rank), rearrangement.brought_to(rank)
    parts, out_sizes = [], []
    for name, tensor in tensors.items():
        count = rows[name]
        by_rank = _per_rank(count[sent], rearrangement.destination[sent], num_ranks)
        ordered = tensor.index_select(0, _places(count, held, sent).to(tensor.device))
        parts.append(torch.split(ordered, by_rank.tolist()))
        row_size = prod(tensor.shape[1:])
        out_sizes.append(row_size * _per_rank(count[received], rearrangement.source[received], num_ranks))
    flat = torch.cat([part.reshape(-1) for of_rank in zip(*parts, strict=True) for part in of_rank])
    in_splits = [sum(part.numel() for part in of_rank) for of_rank in zip(*parts, strict=True)]
    sizes = np.stack(out_sizes, axis=1)  # (ranks, tensors)
    together: Tensor = _AllToAll.apply(flat, sizes.sum(axis=1).tolist(), in_splits, group)  # type: ignore[no-untyped-call]
    pieces = torch.split(together, sizes.ravel().tolist())
    arrived = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        by_source = torch.cat(pieces[number :: len(tensors)]).reshape(-1, *tensor.shape[1:])
        arrived[name] = by_source.index_select(0, _places(rows[name], received, brought).to(tensor.device))
    return arrived


def _per_rank(counts: IntArray, ranks: IntArray, num_ranks: int) -> IntArray:
    return np.bincount(ranks, counts, num_ranks).astype(np.int64)


def _places(count: IntArray, before: IntArray, after: IntArray) -> Tensor:
    """Which rows to take so that what lay in the order of ``before`` lies in that of ``after``.

    Args:
        count: Rows of every sample, (samples,).
        before: The samples at hand.
        after: The same ones, in another order.
    """
    starts = np.zeros(len(count), dtype=np.int64)
    starts[before] = np.cumsum(count[before]) - count[before]
    counts = count[after]
    ends = np.cumsum(counts)
    places = np.repeat(starts[after] - (ends - counts), counts) + np.arange(counts.sum())
    return torch.from_numpy(places)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, flat: Tensor, out_splits: list[int], in_splits: list[int], group: dist.ProcessGroup | None
    ) -> Tensor:
        context.splits, context.group = (in_splits, out_splits), group
        arrived = flat.new_empty(sum(out_splits))
        dist.all_to_all_single(arrived, flat.contiguous(), out_splits, in_splits, group=group)
        return arrived

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        out_splits, in_splits = context.splits
        back = gradient.new_empty(sum(out_splits))
        dist.all_to_all_single(back, gradient.contiguous(), out_splits, in_splits, group=context.group)
        return back, None, None, None
