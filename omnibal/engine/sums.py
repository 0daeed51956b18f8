"""Where DeepSpeed's optimizers keep the sums of a step's gradients, and which replica needs which part of them."""

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

from omnibal.vlm.weight_gradients import add_gradient


class Part(NamedTuple):
    """A part of a parameter's gradient.

    Attributes:
        owner: The replica that updates it; None where each one does.
        start: First element, of the gradient as one row.
        stop: Behind the last one.
    """

    owner: int | None
    start: int
    stop: int


class Sums:
    """Those of an optimizer that every replica runs on all parameters: in ``parameter.grad``, where autograd adds."""

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a micro-batch's gradient, as its backward pass would."""
        add_gradient(parameter, gradient)

    def take(self, parameter: nn.Parameter) -> Tensor:
        """The sum as one row, to be changed in place; what the running backward pass has found is in it.

        Zeros where no micro-batch had a gradient: another replica's may have.
        """
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad.view(-1)

    def parts(self, parameter: nn.Parameter) -> tuple[Part, ...]:
        """All of it, in order."""
        return (Part(None, 0, parameter.numel()),)

    def in_order(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those that lie one behind the other one behind the other; the same order on all replicas."""
        return list(parameters)

    def end_passes(self) -> None:
        """The last backward pass of a step is done, and ``take`` finds nothing new."""

    def take_over(self) -> None:
        """From now on sums are added up over replicas here and not by DeepSpeed."""

    def leave_weights(self, then: Callable[[], None]) -> None:
        """Where replicas own parts, let ``then`` send updated weights to the others, if the optimizer permits it."""

    def hand_over(self) -> None:
        """All sums are those of all replicas: let the optimizer know them."""


class _OwnedSums(Sums):
    """Each replica updates an equal share of every group of parameters, laid one behind the other.

    Args:
        flats: Each group's parameters as one row, of which they are views.
        groups: The parameters.
        replicas: How many there are.
    """

    def __init__(self, flats: list[Tensor], groups: list[list[nn.Parameter]], replicas: int) -> None:
        self._parts = {
            parameter: tuple(_parts(parameter, flat, flat.numel() // replicas))
            for flat, group in zip(flats, groups, strict=True)
            for parameter in group
        }
        self._order = {parameter: place for place, parameter in enumerate(self._parts)}

    def parts(self, parameter: nn.Parameter) -> tuple[Part, ...]:
        """Of each replica whose share it touches."""
        return self._parts[parameter]

    def in_order(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """As the groups hold them."""
        return sorted(parameters, key=self._order.__getitem__)


def _parts(parameter: nn.Parameter, flat: Tensor, share: int) -> Iterator[Part]:
    first = (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
    last = first + parameter.numel()
    for owner in range(first // share, (last - 1) // share + 1):
        yield Part(owner, max(first, owner * share) - first, min(last, (owner + 1) * share) - first)


class ZeroSums(_OwnedSums):
    """Those of ZeRO 1: in ``parameter.grad``, or in ``parameter.grad_accum`` where they have a dtype of their own."""

    def __init__(self, optimizer: Any, replicas: int) -> None:
        super().__init__(optimizer.bit16_groups_flat, optimizer.bit16_groups, replicas)
        self._optimizer = optimizer
        self._name = "grad_accum" if optimizer.use_grad_accum_attribute else "grad"

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """As ZeRO's hook does with gradients of backward passes."""
        if self._name == "grad":
            add_gradient(parameter, gradient)
        else:
            parameter.grad = gradient
            self._optimizer._fill_param_grad_accum_attribute(parameter)

    def take(self, parameter: nn.Parameter) -> Tensor:
        """In the sums' own dtype."""
        if getattr(parameter, self._name) is None:
            dtype = self._optimizer.gradient_accumulation_dtype if self._name == "grad_accum" else parameter.dtype
            setattr(parameter, self._name, torch.zeros_like(parameter, dtype=dtype))
        gradient: Tensor = getattr(parameter, self._name)
        return gradient.view(-1)

    def hand_over(self) -> None:
        """What its own reduction ends with; its buckets are empty."""
        self._optimizer.set_gradient_accumulation_boundary(True)
        self._optimizer.overlapping_partition_gradients_reduce_epilogue()


class Bfloat16Sums(_OwnedSums):
    """Those of bfloat16 parameters: in rows beside them, where each pass's gradients are added when it is done."""

    def __init__(self, optimizer: Any, replicas: int) -> None:
        super().__init__(optimizer.bf16_groups_flat, optimizer.bf16_groups, replicas)
        self._optimizer = optimizer
        self._places = {
            parameter: (group, index)
            for group, parameters in enumerate(optimizer.bf16_groups)
            for index, parameter in enumerate(parameters)
        }

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """And clear it, or the next pass would add it again."""
        parameter.grad = gradient
        self._optimizer._update_hp_grad(parameter, *self._places[parameter], clear_lp_grads=False)
        parameter.grad = None

    def take(self, parameter: nn.Parameter) -> Tensor:
        """With what the running pass has found."""
        if parameter.grad is not None:
            self.add(parameter, parameter.grad)
        return self._row(parameter)

    def end_passes(self) -> None:
        """DeepSpeed has added what the pass has found."""
        for parameter in self._places:
            parameter.grad = None

    def take_over(self) -> None:
        """The norm that clips is taken of owned parts, over all processes: it differs in its last bits."""
        self._optimizer.mpu = SimpleNamespace(get_model_parallel_group=lambda: dist.group.WORLD)
        self._optimizer.get_grads_for_norm = self._owned

    def leave_weights(self, then: Callable[[], None]) -> None:
        """Its last work in a step."""
        self._optimizer.update_lp_params = partial(self._update, then)

    @torch.no_grad()
    def _update(self, then: Callable[[], None]) -> None:
        """In place of DeepSpeed's, which then gathers the weights of all, and waits for them."""
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
        """In place of DeepSpeed's, which has every replica take the norm of all gradients, and so needs them there."""
        rank, device = self._optimizer.dp_rank, self._optimizer.bf16_groups_flat[0].device
        owned = [torch.zeros(1, device=device)]  # a replica may own nothing else
        for parameter in self._places:
            # A tied weight counts once, on the first of its stages.
            if for_clipping or not getattr(parameter, PIPE_REPLICATED, False):
                row = self._row(parameter)
                owned += [row[start:stop] for owner, start, stop in self.parts(parameter) if owner == rank]
        return owned if for_clipping else (owned, {})


def sums_of(optimizer: Any, replicas: int) -> Sums:
    """Those of a stage's optimizer."""
    if isinstance(optimizer, BF16_Optimizer):
        return Bfloat16Sums(optimizer, replicas)
    return ZeroSums(optimizer, replicas) if isinstance(optimizer, DeepSpeedZeroOptimizer) else Sums()
