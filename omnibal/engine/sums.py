"""Where DeepSpeed's optimizers keep the sums of a step's gradients, and which replica owns which part of them.

DeepSpeed has three optimizers for a pipeline. They sum the gradients of micro-batches in different places (`add`,
`take`), and split the update of parameters differently over the replicas (`parts`).
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from omnibal.vlm.backward import add_gradient


class Part(NamedTuple):
    """A part of a parameter's gradient.

    Attributes:
        owner: The replica that updates this part; None if every replica updates it.
        start: First element of the part, in the flattened gradient.
        stop: One behind its last element.
    """

    owner: int | None
    start: int
    stop: int


class Sums:
    """Sums in ``parameter.grad``, of an optimizer that every replica runs on all parameters."""

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a micro-batch's gradient to the sum, as a backward pass does."""
        add_gradient(parameter, gradient)

    def take(self, parameter: nn.Parameter) -> Tensor:
        """The flattened sum, to be changed in place, with the gradients of the running backward pass.

        It is zero if no micro-batch had a gradient: micro-batches of another replica may have had one.
        """
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad.view(-1)

    def parts(self, parameter: nn.Parameter) -> tuple[Part, ...]:
        """The parts of the gradient, in order."""
        return (Part(None, 0, parameter.numel()),)

    def in_order(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Parameters sorted by position in the flat buffer: the same order on every replica."""
        return list(parameters)

    def end_passes(self) -> None:
        """Called when the last backward pass of a step has ended: ``take`` finds no new gradient from then on."""

    def take_over(self) -> None:
        """Called once: from then on `omnibal.engine.reduction` reduces the sums over replicas, not DeepSpeed."""

    def leave_weights(self, then: Callable[[], None]) -> None:
        """If replicas own parts: let ``then`` send updated weights, in place of DeepSpeed's own gathering."""

    def hand_over(self) -> None:
        """Called when the sums have been reduced over replicas: the optimizer takes them from there."""


class _OwnedSums(Sums):
    """Sums of optimizers under which each replica updates an equal share of every group's flat buffer.

    Args:
        flats: The flat buffer of each group, of which its parameters are views.
        groups: The parameters of each group.
        replicas: Number of replicas.
    """

    def __init__(self, flats: list[Tensor], groups: list[list[nn.Parameter]], replicas: int) -> None:
        self._parts = {
            parameter: tuple(_parts(parameter, flat, flat.numel() // replicas))
            for flat, group in zip(flats, groups, strict=True)
            for parameter in group
        }
        self._order = {parameter: place for place, parameter in enumerate(self._parts)}

    def parts(self, parameter: nn.Parameter) -> tuple[Part, ...]:
        """One part for each replica whose share the parameter overlaps."""
        return self._parts[parameter]

    def in_order(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Parameters sorted by position in the flat buffers."""
        return sorted(parameters, key=self._order.__getitem__)


def _parts(parameter: nn.Parameter, flat: Tensor, share: int) -> Iterator[Part]:
    # Replica r owns elements r·share to (r + 1)·share of the buffer; the parameter's position follows from its address.
    first = (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
    last = first + parameter.numel()
    for owner in range(first // share, (last - 1) // share + 1):
        yield Part(owner, max(first, owner * share) - first, min(last, (owner + 1) * share) - first)


class ZeroSums(_OwnedSums):
    """Sums of ZeRO 1: in ``parameter.grad``, or in ``parameter.grad_accum`` if they have a dtype of their own."""

    def __init__(self, optimizer: Any, replicas: int) -> None:
        super().__init__(optimizer.bit16_groups_flat, optimizer.bit16_groups, replicas)
        self._optimizer = optimizer
        self._name = "grad_accum" if optimizer.use_grad_accum_attribute else "grad"

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a micro-batch's gradient as ZeRO's hook does in a backward pass."""
        if self._name == "grad":
            add_gradient(parameter, gradient)
        else:
            parameter.grad = gradient
            self._optimizer._fill_param_grad_accum_attribute(parameter)

    def take(self, parameter: nn.Parameter) -> Tensor:
        """The flattened sum, in the dtype in which gradients are summed."""
        if getattr(parameter, self._name) is None:
            dtype = self._optimizer.gradient_accumulation_dtype if self._name == "grad_accum" else parameter.dtype
            setattr(parameter, self._name, torch.zeros_like(parameter, dtype=dtype))
        gradient: Tensor = getattr(parameter, self._name)
        return gradient.view(-1)

    def hand_over(self) -> None:
        """End the step's gradients as ZeRO's own reduction does; its buckets are empty."""
        self._optimizer.set_gradient_accumulation_boundary(True)
        self._optimizer.overlapping_partition_gradients_reduce_epilogue()


class Bfloat16Sums(_OwnedSums):
    """Sums of BF16_Optimizer: in float32 rows beside the parameters, added to after every backward pass."""

    def __init__(self, optimizer: Any, replicas: int) -> None:
        super().__init__(optimizer.bf16_groups_flat, optimizer.bf16_groups, replicas)
        self._optimizer = optimizer
        self._places = {
            parameter: (group, index)
            for group, parameters in enumerate(optimizer.bf16_groups)
            for index, parameter in enumerate(parameters)
        }

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a micro-batch's gradient to the parameter's row."""
        parameter.grad = gradient
        self._optimizer._update_hp_grad(parameter, *self._places[parameter], clear_lp_grads=False)
        parameter.grad = None  # or the end of the next pass would add it again

    def take(self, parameter: nn.Parameter) -> Tensor:
        """The parameter's row, with the gradient of the running pass."""
        if parameter.grad is not None:
            self.add(parameter, parameter.grad)
        return self._row(parameter)

    def end_passes(self) -> None:
        """Clear the gradients, which DeepSpeed has added to the rows by now."""
        for parameter in self._places:
            parameter.grad = None

    def take_over(self) -> None:
        """Let DeepSpeed take the norm of owned parts over all processes; it differs in its last bits."""
        self._optimizer.mpu = SimpleNamespace(get_model_parallel_group=lambda: dist.group.WORLD)
        self._optimizer.get_grads_for_norm = self._owned

    def leave_weights(self, then: Callable[[], None]) -> None:
        """Replace the last work of the optimizer's step, the gathering of weights."""
        self._optimizer.update_lp_params = partial(self._update, then)

    @torch.no_grad()
    def _update(self, then: Callable[[], None]) -> None:
        """Copy this replica's updated share into the parameters, then start to send it."""
        # DeepSpeed's own update_lp_params gathers the shares of all replicas here, and waits for them.
        optimizer = self._optimizer
        for shares, updated in zip(
            optimizer.bf16_partitioned_groups, optimizer.fp32_groups_flat_partition, strict=True
        ):
            shares[optimizer.dp_rank].copy_(updated)
        then()

    def _row(self, parameter: nn.Parameter) -> Tensor:
        group, index = self._places[parameter]
        gradient: Tensor = self._optimizer.fp32_groups_gradients[group][index]
        return gradient.view(-1)

    def _owned(self, for_clipping: bool = False) -> Any:
        """Gradients of this rank's own shards, for the norm.

        DeepSpeed's ``get_grads_for_norm`` needs all gradients on every replica, and here each has only its own.
        """
        rank, device = self._optimizer.dp_rank, self._optimizer.bf16_groups_flat[0].device
        owned = [torch.zeros(1, device=device)]  # a replica may own no part, and the norm needs a tensor
        for parameter in self._places:
            # A tied weight counts once, on the first of its stages.
            if for_clipping or not getattr(parameter, PIPE_REPLICATED, False):
                row = self._row(parameter)
                owned += [row[start:stop] for owner, start, stop in self.parts(parameter) if owner == rank]
        return owned if for_clipping else (owned, {})


def sums_of(optimizer: Any, replicas: int) -> Sums:
    """The sums of a stage's optimizer."""
    if isinstance(optimizer, BF16_Optimizer):
        return Bfloat16Sums(optimizer, replicas)
    return ZeroSums(optimizer, replicas) if isinstance(optimizer, DeepSpeedZeroOptimizer) else Sums()
