"""The most bytes that this process's device holds at one time during a step."""

from dataclasses import dataclass
from types import TracebackType

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from omnibal.vlm.storages import StorageMeter, storage_bytes


@dataclass(frozen=True)
class StagePeaks:
    """The most bytes that a device of each stage held at one time."""

    step: tuple[int, ...]
    """In a whole step."""
    passes: tuple[int, ...]
    """In its forward and backward passes: what layers keep shows here, even where the optimizer takes more."""
    overhead: tuple[int, ...]
    """Beside what torch's allocator holds: contexts, libraries, communicators, and whatever other processes hold on
    the same device; zeros where there is no CUDA device."""


class DevicePeak:
    """A context: what the accelerator's allocator counts, or on a CPU what operators make beside what is there.

    Args:
        held: Parameters, gradients and optimizer state as they are before.

    Attributes:
        passes_bytes: The peak until ``end_passes``.
    """

    def __init__(self, held: list[Tensor]) -> None:
        self.passes_bytes = 0
        self._held = storage_bytes(held)
        self._meter = None if get_accelerator().device_name() != "cpu" else StorageMeter()

    def __enter__(self) -> "DevicePeak":
        if self._meter is None:
            get_accelerator().reset_peak_memory_stats()
        else:
            self._meter.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._meter is not None:
            self._meter.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def end_passes(self) -> None:
        """Say that the step's forward and backward passes are done."""
        self.passes_bytes = self.peak_bytes

    @property
    def peak_bytes(self) -> int:
        """The peak."""
        if self._meter is None:
            return int(get_accelerator().max_memory_allocated())
        return self._held + self._meter.peak_bytes


def overhead_bytes() -> int:
    """What this process's CUDA device holds beside what torch's allocator took of it; 0 on anything else."""
    if get_accelerator().device_name() != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
