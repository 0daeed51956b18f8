"""Weight gradients of linear layers, computed some time after the backward pass that found what they are made of."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

Accumulate = Callable[[nn.Parameter, Tensor], None]
"""Adds a micro-batch's gradient to what a parameter has accumulated."""


def add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Accumulate in ``parameter.grad``, as autograd does."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


class WeightGradients:
    """Weight gradients that wait for their turn, in the order in which backward passes deferred them.

    They are computed by ``run``, or as soon as what waits holds more than the budget: the oldest first either way, so
    that sums of gradients are the same bits as without waiting.

    Args:
        budget_bytes: The most that may be kept for gradients that wait; None for no limit. With 0 none waits, not even
            those over no rows, which keep nothing.
        accumulate: Where computed gradients go.
    """

    def __init__(self, *, budget_bytes: int | None = None, accumulate: Accumulate = add_gradient) -> None:
        self.budget_bytes = budget_bytes
        self.accumulate = accumulate
        self.micro_batch = 0
        """Whose backward pass is running."""
        self.pending_bytes = 0
        """Kept for gradients that wait; a storage that several of them need counts once."""
        self.peak_bytes = 0
        """The most there has been."""
        self._jobs: deque[_Job] = deque()
        self._users: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._jobs)

    def defer(self, work: Callable[[], object], keeps: Sequence[Tensor] = ()) -> None:
        """Let ``work`` wait for ``run``, or for the budget to overflow.

        Args:
            work: Computes a gradient of ``micro_batch``.
            keeps: The tensors that it keeps alive.
        """
        storages = [(storage._cdata, storage.nbytes()) for storage in map(Tensor.untyped_storage, keeps)]
        for address, size in storages:
            self.pending_bytes += 0 if self._users[address] else size
            self._users[address] += 1
        self._jobs.append(_Job(self.micro_batch, work, storages))
        budget = self.budget_bytes
        while self._jobs and budget is not None and (budget == 0 or self.pending_bytes > budget):
            self._run_oldest()
        self.peak_bytes = max(self.peak_bytes, self.pending_bytes)

    def run(self, micro_batch: int) -> None:
        """Compute what waits of the micro-batches up to this one."""
        while self._jobs and self._jobs[0].micro_batch <= micro_batch:
            self._run_oldest()

    def _run_oldest(self) -> None:
        job = self._jobs.popleft()
        with torch.no_grad():
            job.work()
        for address, size in job.storages:
            self._users[address] -= 1
            if not self._users[address]:
                del self._users[address]
                self.pending_bytes -= size


class _Job(NamedTuple):
    micro_batch: int
    work: Callable[[], object]
    storages: list[tuple[int, int]]


class DeferringLinear(nn.Linear):
    """A linear layer whose weight gradient is deferred; outputs and all gradients are the same bits as without.

    The gradients of its input and its bias come from autograd, in the backward pass. Where neither is wanted, so is the
    weight's, since there is nothing to get done before it.
    """

    weight_gradients: WeightGradients

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Linear``."""
        # nn.Linear, too, makes rows of its input where its weight requires a gradient, and adds the bias to their
        # product in one go unless that means a copy.
        bias = self.bias if input.dim() == 2 or input.is_contiguous() else None
        others_wanted = input.requires_grad or (bias is not None and bias.requires_grad)
        if not (torch.is_grad_enabled() and self.weight.requires_grad and others_wanted):
            return super().forward(input)
        rows = input.reshape(-1, self.in_features)
        # The (empty) output, not only its node: before torch 2.13 what a node saved is gone with the node's output.
        kept = [_Keep.apply(rows, self.weight)]  # type: ignore[no-untyped-call]
        output = functional.linear(rows, self.weight.detach(), bias)
        output.register_hook(partial(_defer, self, kept))  # type: ignore[no-untyped-call]
        output = output.view(*input.shape[:-1], self.out_features)
        return output if bias is self.bias else output + self.bias


class _Keep(torch.autograd.Function):
    """Saves a tensor as autograd saves one, out of the way of backward passes; recomputation then works as ever.

    It is saved before the product is computed, as autograd's own linear does: a recomputed layer stops once it has
    everything that was saved, so that a product at its end is not computed again.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(rows)
        return rows.new_empty(0)


def _defer(layer: DeferringLinear, kept: list[Tensor], gradient: Tensor) -> None:
    # Popped, or what it saved would be kept as long as the graph.
    keep = kept.pop()
    (rows,) = cast(Any, keep.grad_fn).saved_tensors
    rows = rows.detach()  # without the graph before it, which holds the stage's input and its gradient
    layer.weight_gradients.defer(partial(_run, layer, rows, gradient), keeps=(rows, gradient))


def _run(layer: DeferringLinear, rows: Tensor, gradient: Tensor) -> None:
    # Not addmm onto what is there: in bfloat16 that rounds otherwise than autograd, which adds the product.
    # The layer's own parameter: one saved for the backward pass comes back from recomputation as another tensor.
    layer.weight_gradients.accumulate(cast(nn.Parameter, layer.weight), gradient.t().mm(rows))


def defer_linears(module: nn.Module, queue: WeightGradients) -> None:
    """Let every ``nn.Linear`` in a module defer its weight gradient; names of parameters stay as they are.

    Subclasses of ``nn.Linear`` may compute otherwise and are left alone, and so is what is in a module with
    ``at_once``, whose gradients are made of what is not kept. Each layer is to be called once in a
    micro-batch: autograd would add the gradients of several calls to each other first.

    Args:
        module: Is changed.
        queue: Where weight gradients wait.
    """
    at_once = {inner for part in module.modules() if getattr(part, "at_once", False) for inner in part.modules()}
    for layer in module.modules():
        if type(layer) is nn.Linear and layer not in at_once:
            layer.__class__ = DeferringLinear
        if isinstance(layer, DeferringLinear):
            layer.weight_gradients = queue
