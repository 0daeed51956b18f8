"""Bytes that a device holds: of all storages that operators have made, those alive now and the most at one time."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, on any device, the storages that operators make within the context, without keeping them alive.

    Parts of one storage count once, as the whole storage. Backward passes count if they run in this thread, as they do
    on a CPU.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        # An upper bound of the bytes alive: dead storages are subtracted only when the bound exceeds the peak, since
        # looking at every storage after every operator would be slow.
        self._most_alive = 0
        self._peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {address_of(tensor) for tensor in tensors_in((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            if address_of(tensor) not in given and not tensor.is_meta:
                self._add(tensor)
        return result

    @property
    def alive(self) -> dict[int, int]:
        """Address and bytes of every storage that was made and is still there."""
        self._made = {
            address: entry
            for address, entry in self._made.items()
            if not entry[0].expired()  # type: ignore[no-untyped-call]
        }
        return {address: size for address, (_, size) in self._made.items()}

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at one time."""
        return self._peak

    def _add(self, tensor: Tensor) -> None:
        storage, address = tensor.untyped_storage(), address_of(tensor)
        _, replaced = self._made.get(address, (None, 0))  # a dead storage may have had the same address
        self._made[address] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self._most_alive += storage.nbytes() - replaced
        if self._most_alive > self._peak:
            self._most_alive = sum(self.alive.values())
            self._peak = max(self._peak, self._most_alive)


def tensors_in(values: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def address_of(tensor: Tensor) -> int:
    """The address of a tensor's storage, unique among storages that are alive."""
    address: int = tensor.untyped_storage()._cdata
    return address


def storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the storages of tensors; a shared storage counts once."""
    return sum({address_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


class DevicePeak:
    """A context that measures the peak of a device: by its allocator, on a CPU by a `StorageMeter`.

    Args:
        device: The device of this process.
        held: Tensors that exist before (parameters, gradients, optimizer state), which a CPU's meter does not see.
    """

    def __init__(self, device: torch.device, held: list[Tensor]) -> None:
        self._held = storage_bytes(held)
        self._meter = StorageMeter() if device.type == "cpu" else None
        self._device = device

    def __enter__(self) -> DevicePeak:
        if self._meter is None:
            torch.get_device_module(self._device).reset_peak_memory_stats()
        else:
            self._meter.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._meter is not None:
            self._meter.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the device has held within the context."""
        if self._meter is None:
            return int(torch.get_device_module(self._device).max_memory_allocated())
        return self._held + self._meter.peak_bytes


def overhead_bytes(device: torch.device) -> int:
    """Bytes in use on a CUDA device beside those of torch's allocator; 0 on any other device."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
