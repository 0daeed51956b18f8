"""Refuses steps that ranks do not run alike, before their exchanges fail or hang."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from omnibal.errors import ConfigError
from omnibal.ranks import Meeting, failures_reach_all_ranks


@dataclass(frozen=True)
class StepCheck:
    """The place of a micro-batch and the hash of its plan, which all ranks compare before they exchange its samples."""

    meeting: Meeting
    place: tuple[int, int, int]
    """Iteration of a loader, step, micro-batch; all from 0."""
    digest: int
    """Of the plan."""

    def compare(self, *, backward: bool) -> None:
        """Meet the other ranks before a pass.

        Raises:
            ConfigError: On all ranks alike: they are about to run other passes, or hold other plans of the same one.
        """
        least, greatest = self.meeting.extremes(self.place, (int(backward), self.digest))
        *first, first_digest, first_rank = least
        *last, last_digest, last_rank = greatest
        if first != last:
            raise ConfigError(
                "all ranks must run the same pass, got "
                f"{_words(*first)} on rank {first_rank} and {_words(*last)} on rank {last_rank}; "
                "a rank that skips a step or catches an error, such as being out of memory, must not go on alone"
            )
        if first_digest != last_digest:
            raise ConfigError(
                f"all ranks must plan alike, got another plan of {_words(*first)} on rank {last_rank} than on rank "
                f"{first_rank}; install the same versions of numpy, scipy and numba on all hosts"
            )

    def __str__(self) -> str:
        iteration, step, micro_batch = self.place
        return f"step {step}, micro-batch {micro_batch}" + (f", iteration {iteration}" if iteration else "")


def _words(iteration: int, step: int, micro_batch: int, backward: int) -> str:
    at = f"step {step}, micro-batch {micro_batch}" + (f", iteration {iteration}" if iteration else "")
    return f"the {'backward' if backward else 'forward'} pass of {at}"


class Passes:
    """Follows the passes of a model on this rank, and compares each with those of the other ranks before it begins."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._unfinished: StepCheck | None = None
        self._looks_for_unused = True

    def begin_forward(self, check: StepCheck) -> None:
        """Compare a forward pass, in which nothing was sent yet."""
        if self._unfinished is not None:
            with failures_reach_all_ranks():
                raise ConfigError(
                    f"each backward pass must end, got an error in that of {self._unfinished} which was caught; the "
                    "other ranks wait for the rest of it: let the error end the run"
                )
        check.compare(backward=False)

    def begin_backward(self, loss: Tensor, check: StepCheck) -> Tensor:
        """The same loss, whose backward pass is compared when it begins."""
        if not loss.requires_grad:
            return loss
        # DDP sets it for the time of a forward pass; where unused parameters are looked for, there is nothing to say.
        host = DistributedDataParallel._active_ddp_module
        waits_for_all = (
            host is not None
            and host.require_backward_grad_sync
            and not (host.find_unused_parameters or host.static_graph)
        )

        def begin() -> None:
            check.compare(backward=True)
            self._unfinished = check
            # Called at the end of the whole backward pass, and not if it fails.
            Variable._execution_engine.queue_callback(lambda: self._end_backward(waits_for_all))

        began: Tensor = _Begin.apply(loss, begin)  # type: ignore[no-untyped-call]
        return began

    def _end_backward(self, waits_for_all: bool) -> None:
        self._unfinished = None
        if waits_for_all and self._looks_for_unused:
            unused = [name for name, p in self._model.named_parameters() if p.requires_grad and p.grad is None]
            if unused:
                raise ConfigError(
                    f"DistributedDataParallel must have find_unused_parameters=True for {type(self._model).__name__}, "
                    f"got False: {len(unused)} of its parameters take no part in the loss, such as {unused[0]}; pass "
                    "it, or freeze them"
                )
            self._looks_for_unused = False


class _Begin(torch.autograd.Function):
    """Passes a value on, and calls a function when its gradient comes."""

    @staticmethod
    def forward(context: Any, value: Tensor, begin: Callable[[], None]) -> Tensor:
        context.begin = begin
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        context.begin()
        return gradient, None
