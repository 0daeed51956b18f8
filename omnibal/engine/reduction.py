"""Gradients and weights of a stage's layers on their way between its replicas, while other layers are computed."""

import atexit
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from omnibal.engine.sums import Sums

Layers = Sequence[Sequence[nn.Parameter]]


_ALONE = 2**18
"""Numbers of a row that is sent from where it is; shorter ones are copied together."""


class Exchange:
    """What a stage's replicas send each other in a step, layer by layer.

    All replicas start the same layers in the same order, whatever their packs hold, so that no two of them wait for
    each other.

    Args:
        sums: Where the gradients are.
        layers: What each layer trains; a parameter is in one of them.
        others: What else the stage trains.
        group: The replicas.
        dtype: In which gradients are sent.

    Attributes:
        gradients: Where they are averaged.
        weights: Where updated ones come from.
    """

    def __init__(
        self,
        sums: Sums,
        layers: Layers,
        others: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
    ) -> None:
        sums.take_over()
        layers, others = [sums.in_order(layer) for layer in layers], sums.in_order(others)
        self.gradients = Reduction(sums, layers, others, group, dtype)
        self.weights = Spread(sums, layers, others, group)


class _UnderWay(NamedTuple):
    work: Any
    owner: int | None
    sent: Tensor
    """What is added up, in place."""
    rows: list[Tensor]
    """Where the sum belongs, if ``sent`` is a copy."""


class Reduction:
    """Averages gradients over the replicas, from the last layer on.

    Each part of a gradient goes to the replica that updates it; to all of them where each one does. Arguments are those
    of ``Exchange``.

    Attributes:
        left: How many layers have not started: the first ones.
    """

    def __init__(
        self, sums: Sums, layers: Layers, others: Sequence[nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype
    ) -> None:
        self._sums, self._layers, self._others = sums, layers, others
        self._group, self._dtype = group, dtype
        self._rank, self._replicas = dist.get_rank(group), dist.get_world_size(group)
        self.left = len(layers)
        self._under_way: deque[_UnderWay] = deque()

    def start(self, layer: int) -> None:
        """Start with a layer whose gradients are complete; later, if one behind it has not started."""
        if layer == self.left - 1:
            self.left = layer
            self._start(self._layers[layer])

    def finish(self) -> None:
        """Start with what is in no layer, and wait for all."""
        assert self.left == 0, "layers go before"
        self._start(self._others)
        while self._under_way:
            self._finish(self._under_way.popleft())
        self.left = len(self._layers)
        self._sums.hand_over()

    @torch.no_grad()
    def _start(self, parameters: Sequence[nn.Parameter]) -> None:
        while self._under_way and self._under_way[0].work.is_completed():  # copies need not wait for the step's end
            self._finish(self._under_way.popleft())
        for owner, rows in _by_owner(self._sums, parameters, self._sums.take):
            small = [row for row in rows if row.numel() < _ALONE]
            for together in [[row] for row in rows if row.numel() >= _ALONE] + [small] * bool(small):
                self._send(owner, together)

    def _send(self, owner: int | None, rows: list[Tensor]) -> None:
        sent = rows[0].to(self._dtype) if len(rows) == 1 else torch.cat([row.to(self._dtype) for row in rows])
        if owner is None:
            work = dist.all_reduce(sent, group=self._group, async_op=True)
        else:
            work = dist.reduce(sent, dist.get_global_rank(self._group, owner), group=self._group, async_op=True)
        self._under_way.append(_UnderWay(work, owner, sent, [] if sent is rows[0] else rows))

    @torch.no_grad()
    def _finish(self, under_way: _UnderWay) -> None:
        work, owner, sent, rows = under_way
        work.wait()
        if owner in (None, self._rank):
            sent.mul_(1 / self._replicas)
            for row, values in zip(rows, sent.split([row.numel() for row in rows]) if rows else (), strict=True):
                row.copy_(values)


class Spread:
    """Sends updated weights to the replicas that do not own them, from the first layer on, while the next step begins.

    Where the optimizer does not let it, nothing is ever awaited. Arguments are those of ``Exchange``.
    """

    def __init__(self, sums: Sums, layers: Layers, others: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._sums, self._group = sums, group
        self._layers = [others, *layers]
        self._coming: deque[list[Any]] = deque()
        """For each layer that has not been awaited, the others before them."""
        sums.leave_weights(self.start)
        atexit.register(_take_leave, ref(self))  # replicas may still be in need of what this one sends

    def start(self) -> None:
        """Start to send those of all layers."""
        self.settle()
        for parameters in self._layers:
            rows = _by_owner(self._sums, parameters, lambda parameter: parameter.data.view(-1))
            self._coming.append([self._send(owner, row) for owner, owned in rows for row in owned])

    def settle(self, layer: int | None = None) -> None:
        """Wait for the weights of the layers up to one; by default of all."""
        left = 0 if layer is None else len(self._layers) - layer - 2
        while len(self._coming) > left:
            for work in self._coming.popleft():
                work.wait()

    def _send(self, owner: int | None, row: Tensor) -> Any:
        assert owner is not None, "weights that every replica updates need not be sent"
        return dist.broadcast(row, dist.get_global_rank(self._group, owner), group=self._group, async_op=True)


def _take_leave(of: ref[Spread]) -> None:
    spread = of()
    if spread is not None and spread._coming:
        spread.settle()
        get_accelerator().synchronize()


def _by_owner(
    sums: Sums, parameters: Sequence[nn.Parameter], row_of: Callable[[nn.Parameter], Tensor]
) -> Iterator[tuple[int | None, list[Tensor]]]:
    """What each replica owns of some parameters, or of their gradients, in as few rows as memory allows."""
    found: dict[int | None, list[Tensor]] = {}
    for parameter in parameters:
        whole = row_of(parameter)
        for owner, start, stop in sums.parts(parameter):
            rows, row = found.setdefault(owner, []), whole[start:stop]
            if rows and _adjoin(rows[-1], row):
                rows[-1] = rows[-1].as_strided((rows[-1].numel() + row.numel(),), (1,))
            else:
                rows.append(row)
    yield from found.items()


def _adjoin(one: Tensor, other: Tensor) -> bool:
    """Whether two rows lie one behind the other in the same memory."""
    return (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.dtype == other.dtype
        and one.data_ptr() + one.nbytes == other.data_ptr()
    )


def exchange_of(engine: Any, sums: Sums) -> Exchange | None:
    """That of an engine's stage; None for what DeepSpeed does itself.

    That is nothing where there is one replica, and everything where ZeRO copies gradients to where it wants them
    (contiguous ones, an optimizer on the host), or where they are to be scaled in another way.
    """
    of_its_own = (
        getattr(engine.optimizer, "cpu_offload", False)
        or getattr(engine.optimizer, "contiguous_gradients", False)
        or not engine.postscale_gradients()
        or engine.gradient_predivide_factor() != 1
    )
    if engine.dp_world_size == 1 or of_its_own:
        return None
    # Tied weights are added up between their stages first, and so come last.
    others = [weight for weight, _ in engine.module.get_tied_weights_and_groups()] + list(engine.module.placeholders)
    seen, layers = set(others), []
    for layer in engine.module.forward_funcs:  # a weight with two uses is complete when the first layer's pass is done
        layers.append([p for p in layer.parameters() if p.requires_grad and p.numel() and p not in seen])
        seen.update(layers[-1])
    group = engine.grid.get_data_parallel_group()
    return Exchange(sums, layers, others, group, engine.communication_data_type)
