"""Gradients and weights of a rank's layers move between the ranks that hold them while other layers are computed.

A layer's gradients leave when the last micro-batch's backward pass through the layer has ended, from the last layer to
the first. Updated weights come back from the first layer to the last, while the next step's forward pass begins; the
forward pass waits for a layer's weights right before it runs the layer. The replicas of a stage hold its layers; the
layers of an encoder that is spread are on all ranks, and are the first ones of each rank.

DeepSpeed has three optimizers for a pipeline. They sum the gradients of micro-batches in different places, and split
the update of parameters differently over the replicas: `Sums` and its two subclasses know where and how.
"""

import atexit
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from torch import Tensor, nn

from omnibal.vlm.payload import add_gradient
from omnibal.vlm.tensor import COUNTED, partial_parameters

# Rows of at least so many numbers are sent from their own memory; shorter ones are copied into one message.
_ALONE: Final = 2**18


class SharedLayer(NamedTuple):
    """The trained parameters of a layer, and the ranks that hold it: its replicas."""

    parameters: Sequence[nn.Parameter]
    group: dist.ProcessGroup


class Part(NamedTuple):
    """Elements start to stop of a flattened parameter, which replica ``owner`` updates; None if every replica does."""

    owner: int | None
    start: int
    stop: int


class Sums:
    """Sums in ``parameter.grad``, of an optimizer that every replica runs on all parameters."""

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a micro-batch's gradient to the sum, as a backward pass does."""
        add_gradient(parameter, gradient)

    def take(self, parameter: nn.Parameter) -> Tensor:
        """The flattened sum, to be changed in place, with the gradients of the running backward pass."""
        # Zeros if no micro-batch of this replica had a gradient: another replica's may have had one.
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad.view(-1)

    def parts(self, parameter: nn.Parameter) -> tuple[Part, ...]:
        return (Part(None, 0, parameter.numel()),)

    def in_order(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Parameters sorted by position in the flat buffer: the same order on every replica."""
        return list(parameters)

    # What happens to the sums in a step, in this order; the plain optimizer needs none of it.

    def take_over(self) -> None:
        """Called once: from then on `Reduction` reduces the sums over replicas, not DeepSpeed."""

    def leave_weights(self, then: Callable[[], None]) -> None:
        """Called once: if replicas own parts, ``then`` sends updated weights, in place of DeepSpeed's own gathering."""

    def end_passes(self) -> None:
        """Called when the last backward pass of a step has ended: ``take`` finds no new gradient from then on."""

    def hand_over(self) -> None:
        """Called when the sums have been reduced over replicas: the optimizer takes them from there."""


class _OwnedSums(Sums):
    """Sums of optimizers under which each replica updates an equal share of every group's flat buffer."""

    def __init__(self, optimizer: Any, flats: list[Tensor], groups: list[list[nn.Parameter]]) -> None:
        # The parameters of a group are views of its flat buffer, one behind the other; partition_count says for each
        # group how many ranks share it.
        self._optimizer = optimizer
        self._parts: dict[nn.Parameter, tuple[Part, ...]] = {}
        for flat, group, replicas in zip(flats, groups, optimizer.partition_count, strict=True):
            share = flat.numel() // replicas
            for parameter in group:
                # Replica r owns elements r·share to (r + 1)·share of the buffer; the parameter's position follows from
                # its address.
                first = (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
                last = first + parameter.numel()
                self._parts[parameter] = tuple(
                    Part(owner, max(first, owner * share) - first, min(last, (owner + 1) * share) - first)
                    for owner in range(first // share, (last - 1) // share + 1)
                )
        self._order = {parameter: number for number, parameter in enumerate(self._parts)}

    def parts(self, parameter: nn.Parameter) -> tuple[Part, ...]:
        return self._parts[parameter]

    def in_order(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return sorted(parameters, key=self._order.__getitem__)


class ZeroSums(_OwnedSums):
    """Sums of ZeRO 1: in ``parameter.grad``, or in ``parameter.grad_accum`` if they have a dtype of their own."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, optimizer.bit16_groups_flat, optimizer.bit16_groups)
        self._name = "grad_accum" if optimizer.use_grad_accum_attribute else "grad"

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        if self._name == "grad":
            add_gradient(parameter, gradient)
        else:  # what DeepSpeedZeroOptimizer's hook does in a backward pass; it casts, adds, and clears parameter.grad
            parameter.grad = gradient
            self._optimizer._fill_param_grad_accum_attribute(parameter)

    def take(self, parameter: nn.Parameter) -> Tensor:
        if getattr(parameter, self._name) is None:
            dtype = self._optimizer.gradient_accumulation_dtype if self._name == "grad_accum" else parameter.dtype
            setattr(parameter, self._name, torch.zeros_like(parameter, dtype=dtype))
        gradient: Tensor = getattr(parameter, self._name)
        return gradient.view(-1)

    def hand_over(self) -> None:
        # DeepSpeedZeroOptimizer's own end of a reduction: it finds its buckets empty, and moves this replica's share of
        # the sums to averaged_gradients, from which step() takes it.
        self._optimizer.set_gradient_accumulation_boundary(True)
        self._optimizer.overlapping_partition_gradients_reduce_epilogue()


class Bfloat16Sums(_OwnedSums):
    """Sums of BF16_Optimizer: in float32 rows beside the parameters, added to after every backward pass."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, optimizer.bf16_groups_flat, optimizer.bf16_groups)
        self._ranks = [dist.get_rank(group) for group in optimizer.real_dp_process_group]  # this process's, by group
        self._positions = {
            parameter: (group, index)
            for group, parameters in enumerate(optimizer.bf16_groups)
            for index, parameter in enumerate(parameters)
        }

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        parameter.grad = gradient
        self._optimizer._update_hp_grad(parameter, *self._positions[parameter], clear_lp_grads=False)
        parameter.grad = None  # or update_hp_grads, behind the next pass, would add it again

    def take(self, parameter: nn.Parameter) -> Tensor:
        if parameter.grad is not None:
            self.add(parameter, parameter.grad)
        # A view of the group's flat float32 buffer: what is summed into the row is in the buffer.
        group, index = self._positions[parameter]
        gradient: Tensor = self._optimizer.fp32_groups_gradients[group][index]
        return gradient.view(-1)

    def end_passes(self) -> None:
        # PipelineEngine has added these to the rows by now (update_hp_grads), and clears them before the next pass.
        for parameter in self._positions:
            parameter.grad = None

    def take_over(self) -> None:
        # BF16_Optimizer.step takes the norm of get_grads_for_norm over the model-parallel group. Its own needs all
        # gradients on every replica, and here each replica has only its shares: the norm is one over all processes,
        # and differs from DeepSpeed's in its last bits.
        self._mpu = self._optimizer.mpu
        self._optimizer.mpu = SimpleNamespace(get_model_parallel_group=lambda: dist.group.WORLD)
        self._optimizer.get_grads_for_norm = self._owned

    def leave_weights(self, then: Callable[[], None]) -> None:
        # update_lp_params is the last work of BF16_Optimizer.step: it gathers the shares of all replicas, and waits.
        self._optimizer.update_lp_params = partial(self._update, then)

    @torch.no_grad()
    def _update(self, then: Callable[[], None]) -> None:
        """Copy this replica's updated share into the parameters, then start to send it."""
        # For each group of parameters: views of the flat bfloat16 buffer, one a replica, and this replica's share in
        # float32, which the inner optimizer has stepped.
        optimizer = self._optimizer
        for shares, updated, rank in zip(
            optimizer.bf16_partitioned_groups, optimizer.fp32_groups_flat_partition, self._ranks, strict=True
        ):
            shares[rank].copy_(updated)
        then()

    def _owned(self, for_clipping: bool = False) -> Any:
        """Gradients of this rank's own shares, in the form of ``BF16_Optimizer.get_grads_for_norm``."""
        device = self._optimizer.bf16_groups_flat[0].device
        is_first = bwc_tensor_model_parallel_rank(self._mpu) == 0
        owned = [torch.zeros(1, device=device)]  # a replica may own no part, and the norm needs a tensor
        for parameter, (group, _) in self._positions.items():
            # A tied weight counts once, on the first of its stages; what all tensor ranks hold on the first of them.
            is_counted = is_first or getattr(parameter, COUNTED, False)
            if for_clipping or (is_counted and not getattr(parameter, PIPE_REPLICATED, False)):
                row, rank = self.take(parameter), self._ranks[group]  # end_passes has cleared parameter.grad
                owned += [row[start:stop] for owner, start, stop in self.parts(parameter) if owner == rank]
        return owned if for_clipping else (owned, {})


def sums_of(optimizer: Any) -> Sums:
    if isinstance(optimizer, BF16_Optimizer):
        return Bfloat16Sums(optimizer)
    return ZeroSums(optimizer) if isinstance(optimizer, DeepSpeedZeroOptimizer) else Sums()


class _UnderWay(NamedTuple):
    """A collective that sums ``sent`` in place, and the rows that get the sum; none if ``sent`` is the row itself."""

    work: Any
    owner: int | None
    group: dist.ProcessGroup
    sent: Tensor
    rows: list[Tensor]


class Reduction:
    """Averages gradients over the ranks that hold a layer, layer by layer from the last one on.

    Each part of a gradient goes to the replica that owns it, or to all if every replica updates it. ``others`` are in
    no layer; the first ``left`` layers have not started.
    """

    def __init__(self, sums: Sums, layers: Sequence[SharedLayer], others: SharedLayer, dtype: torch.dtype) -> None:
        self._sums, self._layers, self._others, self._dtype = sums, layers, others, dtype
        self.left = len(layers)
        self._under_way: deque[_UnderWay] = deque()

    def start(self, layer: int) -> None:
        """Start a layer whose gradients are complete; a layer whose successor has not started is skipped."""
        # All replicas start all layers in one order, whatever their packs hold: a group's collectives need one order.
        if layer == self.left - 1:
            self.left = layer
            self._start(self._layers[layer])

    def finish(self) -> None:
        """Start the parameters that are in no layer, and wait for all reductions."""
        assert self.left == 0, "layers go before"
        self._start(self._others)
        while self._under_way:
            self._finish()
        self.left = len(self._layers)
        self._sums.hand_over()

    @torch.no_grad()
    def _start(self, layer: SharedLayer) -> None:
        # Finish what is complete already, so that its copies do not all wait for the end of the step.
        while self._under_way and self._under_way[0].work.is_completed():
            self._finish()
        rows_by_owner = list(_by_owner(self._sums, layer.parameters, self._sums.take))  # also makes missing gradients
        if dist.get_world_size(layer.group) == 1:
            return
        for owner, rows in rows_by_owner:
            small = [row for row in rows if row.numel() < _ALONE]
            for together in [[row] for row in rows if row.numel() >= _ALONE] + [small] * bool(small):
                self._send(owner, together, layer.group)

    def _send(self, owner: int | None, rows: list[Tensor], group: dist.ProcessGroup) -> None:
        sent = rows[0].to(self._dtype) if len(rows) == 1 else torch.cat([row.to(self._dtype) for row in rows])
        # All replicas send; the owner alone gets the sum, or everybody does where everybody updates the parameter.
        if owner is None:
            work = dist.all_reduce(sent, group=group, async_op=True)
        else:
            work = dist.reduce(sent, dist.get_global_rank(group, owner), group=group, async_op=True)
        self._under_way.append(_UnderWay(work, owner, group, sent, [] if sent is rows[0] else rows))

    @torch.no_grad()
    def _finish(self) -> None:
        work, owner, group, sent, rows = self._under_way.popleft()
        work.wait()
        if owner in (None, dist.get_rank(group)):  # on the other replicas a reduce leaves numbers that mean nothing
            sent.mul_(1 / dist.get_world_size(group))
            for row, values in zip(rows, sent.split([row.numel() for row in rows]) if rows else (), strict=True):
                row.copy_(values)


class WeightBroadcast:
    """Sends updated weights to the ranks that do not own them, from the first layer on, while the next step begins."""

    # With an optimizer that gathers weights itself, `start` is never called and there is nothing to wait for.

    def __init__(self, sums: Sums, layers: Sequence[SharedLayer], others: SharedLayer) -> None:
        self._sums = sums
        self._layers = [others, *layers]
        # Running broadcasts of the others, then of each layer, without those that have been awaited.
        self._coming: deque[list[Any]] = deque()
        sums.leave_weights(self.start)
        atexit.register(_flush_at_exit, ref(self))  # other replicas may still receive what this one sends

    def start(self) -> None:
        # All replicas come here at the end of their optimizer step, and list the same rows in the same order: each row
        # is broadcast by its owner.
        self.settle()
        for parameters, group in self._layers:
            rows = list(_by_owner(self._sums, parameters, lambda parameter: parameter.data.view(-1)))
            is_shared = dist.get_world_size(group) > 1
            # With shared weights every row has an owner: weights that every replica updates are not sent.
            self._coming.append(
                [
                    dist.broadcast(row, dist.get_global_rank(group, owner), group=group, async_op=True)
                    for owner, owned in rows
                    for row in owned
                    if is_shared and owner is not None
                ]
            )

    def settle(self, layer: int | None = None) -> None:
        """Wait for the weights of the layers up to ``layer``; by default of all layers."""
        # The others and layers 0 to layer are awaited, so len(layers) - layer - 1 lists of broadcasts stay.
        left = 0 if layer is None else len(self._layers) - layer - 2
        while len(self._coming) > left:
            for work in self._coming.popleft():
                work.wait()


def _flush_at_exit(of: ref[WeightBroadcast]) -> None:
    broadcast = of()
    if broadcast is not None and broadcast._coming:
        broadcast.settle()
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
            last = rows[-1] if rows else None
            adjoins = (
                last is not None
                and last.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()
                and last.dtype == row.dtype
                and last.data_ptr() + last.nbytes == row.data_ptr()
            )
            if last is not None and adjoins:
                rows[-1] = last.as_strided((last.numel() + row.numel(),), (1,))
            else:
                rows.append(row)
    yield from found.items()


class ReplicaExchange(NamedTuple):
    """What ranks that hold the same layers send each other in a step: averaged gradients, then updated weights."""

    gradients: Reduction
    weights: WeightBroadcast


def exchange_of(engine: Any, sums: Sums) -> ReplicaExchange | None:
    """The exchange of an engine's layers; None with one replica, or if DeepSpeed has to reduce gradients itself."""
    encoder = engine.module.encoder
    if engine.dp_world_size == 1 and len(encoder) == 0:
        return None
    # DeepSpeed reduces them if ZeRO copies gradients to buffers of its own: contiguous ones, or for an optimizer on the
    # host. Layouts that cannot do so refuse both (resolve.check_run).
    if getattr(engine.optimizer, "cpu_offload", False) or getattr(engine.optimizer, "contiguous_gradients", False):
        return None
    # The replicas of this stage: ranks that hold the same layers.
    group = engine.grid.get_data_parallel_group()
    # Gradients of tied weights are first added up between their stages, and partial ones over the tensor ranks, so they
    # can only leave last.
    others = [weight for weight, _ in engine.module.get_tied_weights_and_groups()] + list(engine.module.placeholders)
    others += partial_parameters(engine.module)
    seen, layers = set(others), []
    # A weight that two layers share belongs to the first of them: its gradient is complete when that one has run.
    held = [(layer, dist.group.WORLD) for layer in encoder] + [(layer, group) for layer in engine.module.forward_funcs]
    for layer, holders in held:
        trained = [p for p in layer.parameters() if p.requires_grad and p.numel() and p not in seen]
        layers.append(SharedLayer(sums.in_order(trained), holders))
        seen.update(trained)
    apart = SharedLayer(sums.in_order(others), group)
    sums.take_over()
    reduction = Reduction(sums, layers, apart, engine.communication_data_type)
    return ReplicaExchange(reduction, WeightBroadcast(sums, layers, apart))
