"""Tensors of samples go to the ranks that a rearrangement names, and their gradients come back."""

from collections.abc import Mapping, Sequence
from math import gcd, prod
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from omnibal.cost import IntArray
from omnibal.dispatch.rearrangement import Rearrangement
from omnibal.errors import ConfigError

CARRIERS: Final = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})  # by bytes


def exchange(
    tensors: Mapping[str, Tensor],
    rows: Mapping[str, IntArray],
    rearrangement: Rearrangement | Mapping[str, Rearrangement],
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Bring what belongs to each sample to its new rank.

    Tensors that need no gradients travel as bytes in one all-to-all, however many and of whatever dtypes; those that
    need gradients travel in one all-to-all for each dtype, and their gradients come back in another one. A tensor whose
    samples all stay is not sent. All ranks call it with the same names, dtypes, rows and rearrangements, and want
    gradients of the same tensors.

    Args:
        tensors: Of each name, what this rank's samples hold, sample after sample in the order of ``held_by(rank)``:
            (rows of all of them, ...); an empty tensor with the same trailing shape where they have no rows.
        rows: Of each name, how many rows every sample has, (samples,), over all ranks.
        rearrangement: Over the group's ranks, for all tensors; or one for each name.
        group: The default group by default.

    Returns:
        Of each name, what belongs to the samples brought to this rank, in the order of ``brought_to(rank)``.

    Raises:
        ConfigError: A tensor has not as many rows as its samples are said to have. On this rank alone: check what comes
            from outside on all ranks before.
    """
    moves = dict.fromkeys(tensors, rearrangement) if isinstance(rearrangement, Rearrangement) else rearrangement
    rank = dist.get_rank(group)
    for name, tensor in tensors.items():
        expected = rows[name][moves[name].held_by(rank)].sum()
        if len(tensor) != expected:
            raise ConfigError(f"{name} must have the {expected} rows of its samples, got {len(tensor)}")
    # Names of the tensors that travel in one all-to-all, by the dtype of their gradients; None: without any, as bytes.
    parcels: dict[torch.dtype | None, list[str]] = {}
    for name, tensor in tensors.items():
        if not moves[name].is_still:
            parcels.setdefault(tensor.dtype if tensor.requires_grad else None, []).append(name)
    # Parcels follow the order of the names, the same on all ranks: so all ranks come to the same all-to-alls in turn.
    arrived = dict(tensors)
    for names in parcels.values():
        sent = [tensors[name] for name in names]
        found = _exchange(sent, [rows[name] for name in names], [moves[name] for name in names], group)
        arrived |= dict(zip(names, found, strict=True))
    return arrived


def _exchange(
    tensors: Sequence[Tensor],
    rows: Sequence[IntArray],
    moves: Sequence[Rearrangement],
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    # A message to a rank holds tensor after tensor, and of each tensor its samples in ascending order. What is sent is
    # copied once, into that order, and what arrives once, out of it; a single tensor in that order is not copied.
    rank, num_ranks = dist.get_rank(group), moves[0].num_ranks
    widths, dtype = [prod(tensor.shape[1:]) for tensor in tensors], tensors[0].dtype
    if not tensors[0].requires_grad:  # as bytes: as the widest integers that rows of all tensors consist of
        widths = [width * tensor.element_size() for width, tensor in zip(widths, tensors, strict=True)]
        unit = gcd(8, *widths)
        widths, dtype = [width // unit for width in widths], CARRIERS[unit]
    # Rows of unlike widths travel together flat, split by elements.
    flats = [_flat(tensor, dtype) for tensor in tensors]
    sizes = [count * width for count, width in zip(rows, widths, strict=True)]  # elements of each sample
    # Pieces are samples of tensors, tensor after tensor: those of this rank, and those that come to it.
    held, brought = [move.held_by(rank) for move in moves], [move.brought_to(rank) for move in moves]
    to = np.concatenate([move.destination[samples] for move, samples in zip(moves, held, strict=True)])
    source = np.concatenate([move.source[samples] for move, samples in zip(moves, brought, strict=True)])
    sent, received = (
        np.concatenate([size[samples] for size, samples in zip(sizes, of, strict=True)]) for of in (held, brought)
    )
    # The all-to-all sends and brings pieces rank after rank.
    send_order, receive_order = np.argsort(to, kind="stable"), np.argsort(source, kind="stable")

    message = flats[0]
    if len(flats) > 1 or (send_order[1:] < send_order[:-1]).any():
        parts = [torch.split(flat, size[of].tolist()) for flat, size, of in zip(flats, sizes, held, strict=True)]
        pieces = [piece for of_tensor in parts for piece in of_tensor]
        # No tensor is left out, even without samples here: gradients of all that made them are waited for.
        message = torch.cat([*(pieces[number] for number in send_order), *(flat[:0] for flat in flats)])
    # Every rank knows the sizes of all samples, so nobody needs to tell how much it sends.
    splits = _per_rank(received, source, num_ranks), _per_rank(sent, to, num_ranks)
    arrived: Tensor = _AllToAll.apply(message, *splits, group)  # type: ignore[no-untyped-call]
    # Pieces arrive rank after rank; they go back into the order of `brought_to`, tensor after tensor.
    if len(flats) == 1 and (receive_order[1:] > receive_order[:-1]).all():
        whole = [arrived]
    else:
        by_source = torch.split(arrived, received[receive_order].tolist())
        pieces = [by_source[number] for number in np.argsort(receive_order)]
        ends = np.cumsum([len(samples) for samples in brought])  # of each tensor, behind its last piece
        groups = [pieces[end - len(of) : end] for end, of in zip(ends, brought, strict=True)]
        whole = [torch.cat(of_tensor or [arrived[:0]]) for of_tensor in groups]
    return [
        _viewed(flat, tensor.dtype).reshape(-1, *tensor.shape[1:]) for flat, tensor in zip(whole, tensors, strict=True)
    ]


def _flat(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    flat = tensor.reshape(-1)
    if flat.storage_offset() * flat.element_size() % dtype.itemsize:  # a slice whose place no view of dtype may have
        flat = flat.clone()
    return _viewed(flat, dtype)


def _viewed(flat: Tensor, dtype: torch.dtype) -> Tensor:
    # view() cuts gradients off, even a view as the type that a tensor has.
    return flat if flat.dtype == dtype else flat.view(dtype)


def _per_rank(sizes: IntArray, ranks: IntArray, num_ranks: int) -> list[int]:
    totals: list[int] = np.bincount(ranks, sizes, num_ranks).astype(np.int64).tolist()
    return totals


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, flat: Tensor, out_splits: list[int], in_splits: list[int], group: dist.ProcessGroup | None
    ) -> Tensor:
        # Gradients take the way back: what arrived from a rank returns to it.
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
