"""Gradients and weights of a stage's layers move between its replicas while other layers are computed.

A layer's gradients leave when the last micro-batch's backward pass through the layer has ended, from the last layer to
the first. Updated weights come back from the first layer to the last, while the next step's forward pass begins; the
forward pass waits for a layer's weights right before it runs the layer.
"""

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


_ALONE = 2**18  # rows of at least so many numbers are sent from their own memory; shorter ones are copied together


class Exchange:
    """What a stage's replicas send each other in a step, layer by layer.

    All replicas start the same layers in the same order, whatever their packs hold: collectives of one group must
    start in one order.

    Args:
        sums: The optimizer's sums of gradients.
        layers: Trained parameters of each layer; a parameter is in one layer only.
        others: Trained parameters of the stage that are in no layer.
        group: The replicas of the stage.
        dtype: The dtype in which gradients are sent.

    Attributes:
        gradients: Averages gradients.
        weights: Sends and receives updated weights.
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
    """The tensor that the collective sums in place."""
    rows: list[Tensor]
    """The rows that the sum is copied to; empty if ``sent`` is the row itself."""


class Reduction:
    """Averages gradients over the replicas, from the last layer on.

    Each part of a gradient goes to the replica that owns it, or to all if every replica updates it. Arguments are those
    of ``Exchange``.

    Attributes:
        left: Number of layers, the first ones, that have not started.
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
        """Start a layer whose gradients are complete; a layer whose successor has not started is skipped."""
        if layer == self.left - 1:
            self.left = layer
            self._start(self._layers[layer])

    def finish(self) -> None:
        """Start the parameters that are in no layer, and wait for all reductions."""
        assert self.left == 0, "layers go before"
        self._start(self._others)
        while self._under_way:
            self._finish(self._under_way.popleft())
        self.left = len(self._layers)
        self._sums.hand_over()

    @torch.no_grad()
    def _start(self, parameters: Sequence[nn.Parameter]) -> None:
        # Finish what is complete already, so that its copies do not all wait for the end of the step.
        while self._under_way and self._under_way[0].work.is_completed():
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

    With an optimizer that gathers weights itself, `start` is never called and there is nothing to wait for. Arguments
    are those of ``Exchange``.
    """

    def __init__(self, sums: Sums, layers: Layers, others: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._sums, self._group = sums, group
        self._layers = [others, *layers]
        self._coming: deque[list[Any]] = deque()
        """Running broadcasts of ``others``, then of each layer, up to those that have been awaited."""
        sums.leave_weights(self.start)
        atexit.register(_flush_at_exit, ref(self))  # other replicas may still receive what this one sends

    def start(self) -> None:
        """Start to send and receive the weights of all layers."""
        self.settle()
        for parameters in self._layers:
            rows = _by_owner(self._sums, parameters, lambda parameter: parameter.data.view(-1))
            self._coming.append([self._send(owner, row) for owner, owned in rows for row in owned])

    def settle(self, layer: int | None = None) -> None:
        """Wait for the weights of the layers up to ``layer``; by default of all layers."""
        # ``others`` and layers 0 to ``layer`` are awaited, so len(layers) - layer - 1 lists of broadcasts stay.
        left = 0 if layer is None else len(self._layers) - layer - 2
        while len(self._coming) > left:
            for work in self._coming.popleft():
                work.wait()

    def _send(self, owner: int | None, row: Tensor) -> Any:
        assert owner is not None, "weights that every replica updates need not be sent"
        return dist.broadcast(row, dist.get_global_rank(self._group, owner), group=self._group, async_op=True)


def _flush_at_exit(of: ref[Spread]) -> None:
    spread = of()
    if spread is not None and spread._coming:
        spread.settle()
        get_accelerator().synchronize()


def _by_owner(
    sums: Sums, parameters: Sequence[nn.Parameter], row_of: Callable[[nn.Parameter], Tensor]
) -> Iterator[tuple[int | None, list[Tensor]]]:
    """By owner, the rows of some parameters (or of their gradients); rows adjacent in memory are joined."""
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
    """Whether the second row begins where the first one ends, in the same storage."""
    return (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.dtype == other.dtype
        and one.data_ptr() + one.nbytes == other.data_ptr()
    )


def exchange_of(engine: Any, sums: Sums) -> Exchange | None:
    """The exchange of an engine's stage; None with one replica, or if DeepSpeed has to reduce gradients itself.

    DeepSpeed reduces them if ZeRO copies gradients to buffers of its own (contiguous gradients, an optimizer on the
    host), or if they are to be scaled in another way than by the number of replicas.
    """
    of_its_own = (
        getattr(engine.optimizer, "cpu_offload", False)
        or getattr(engine.optimizer, "contiguous_gradients", False)
        or not engine.postscale_gradients()
        or engine.gradient_predivide_factor() != 1
    )
    if engine.dp_world_size == 1 or of_its_own:
        return None
    # Gradients of tied weights are first added up between their stages, so they can only leave last.
    others = [weight for weight, _ in engine.module.get_tied_weights_and_groups()] + list(engine.module.placeholders)
    seen, layers = set(others), []
    # A weight that two layers share belongs to the first of them: its gradient is complete when that one has run.
    for layer in engine.module.forward_funcs:
        layers.append([p for p in layer.parameters() if p.requires_grad and p.numel() and p not in seen])
        seen.update(layers[-1])
    group = engine.grid.get_data_parallel_group()
    return Exchange(sums, layers, others, group, engine.communication_data_type)
