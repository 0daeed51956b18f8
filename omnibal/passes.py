"""Measure a piece of a model: seconds of its passes, bytes that stay for backward, and the most alive at a time."""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WARM_UP, STEPS = 2, 5  # passes before the measured ones, and measured ones (the number of the OmniBal paper)


class MeasurementWarning(UserWarning):
    """A measurement that is not to be trusted."""


@dataclass(frozen=True)
class Timing:
    """Seconds of a few repetitions: their median, and the distance between their quartiles."""

    seconds: float
    spread_seconds: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Timing:
        first, median, third = np.quantile(list(seconds), [0.25, 0.5, 0.75])
        return cls(float(median), float(third - first))

    def __add__(self, other: Timing) -> Timing:
        """One piece of work after the other; their spreads add up at worst."""
        return Timing(self.seconds + other.seconds, self.spread_seconds + other.spread_seconds)

    @property
    def spread(self) -> float:
        return self.spread_seconds / self.seconds if self.seconds else 0.0


Outputs = Tensor | Sequence[Tensor]
T = TypeVar("T")


def time_passes(
    forward: Callable[[], Outputs], device: torch.device, weights: Callable[[], object] = lambda: None
) -> tuple[Timing, Timing, Timing]:
    """Seconds of a forward pass, of the backward pass after it, and of ``weights``, which runs what that put off."""
    seconds = [_one_pass(forward, weights, device) for _ in range(WARM_UP + STEPS)][WARM_UP:]
    first, second, third = (Timing.of(column) for column in zip(*seconds, strict=True))
    return first, second, third


def _one_pass(
    forward: Callable[[], Outputs], weights: Callable[[], object], device: torch.device
) -> tuple[float, float, float]:
    # Gradients accumulate from pass to pass, as within a step.
    outputs, forward_seconds = _timed(forward, device)
    trained = [output for output in tensors_in(outputs) if output.requires_grad]
    if not trained:  # no backward pass
        return forward_seconds, 0.0, 0.0
    gradients = [torch.ones_like(output) for output in trained]
    _, backward_seconds = _timed(partial(torch.autograd.backward, trained, gradients), device)
    return forward_seconds, backward_seconds, _timed(weights, device)[1]


def _timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    # Before each clock is read the device has caught up.
    _wait(device)
    start = time.perf_counter()
    result = work()
    _wait(device)
    return result, time.perf_counter() - start


def time_optimizer(parameters: Iterable[nn.Parameter]) -> Timing:
    """Seconds of a step of AdamW on float32 copies of parameters, as a mixed-precision optimizer runs it."""
    # A mixed-precision optimizer runs on float32 master weights.
    copies = [torch.ones_like(parameter, dtype=torch.float32, requires_grad=True) for parameter in parameters]
    if not copies:
        return Timing(0.0, 0.0)
    for copy in copies:
        copy.grad = torch.ones_like(copy)
    optimizer, device = torch.optim.AdamW(copies), copies[0].device
    seconds = [_timed(optimizer.step, device)[1] for _ in range(WARM_UP + STEPS)]
    return Timing.of(seconds[WARM_UP:])


def kept_bytes(forward: Callable[[], Outputs], *, free: Iterable[Tensor] = ()) -> int:
    """Bytes that stay alive after a forward pass because a backward pass needs them; exact on any device."""
    # Outputs count only if they are saved, and storages of the tensors ``free``, such as parameters, never.
    # These are the storages that autograd saves, and all others that were made during the pass and are still alive,
    # such as caches of selective recomputation. Parts of one storage count once, as the whole storage.
    excluded = {address_of(tensor) for tensor in free}
    # Autograd holds what ``save`` returns instead of the tensor. Holders of graphs that end within the pass die with
    # them and leave the set.
    holders: WeakSet[_Saved] = WeakSet()

    def save(tensor: Tensor) -> _Saved:
        holder = _Saved(tensor)
        holders.add(holder)
        return holder

    with _collect_gen0(), StorageMeter() as meter, saved_tensors_hooks(save, lambda holder: holder.tensor):
        outputs = forward()
    saved = {address_of(holder.tensor): holder.tensor for holder in holders}
    sizes = meter.alive | {address: tensor.untyped_storage().nbytes() for address, tensor in saved.items()}
    for output in tensors_in(outputs):
        if address_of(output) not in saved:
            sizes.pop(address_of(output), None)
    return sum(size for address, size in sizes.items() if address not in excluded)


class _Saved:
    # An object of ours lives as long as autograd keeps it, where a tensor may have other owners.
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def _collect_gen0() -> Iterator[None]:
    """Disable the garbage collector inside the block; collect generation 0 at its end."""
    # Cycles of earlier work would be collected at any time within the block, and change what is alive.
    was_enabled = gc.isenabled()
    gc.collect(0)
    gc.disable()
    try:
        yield
        gc.collect(0)
    finally:
        if was_enabled:
            gc.enable()


def this_device() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def device_name(device: torch.device) -> str:
    """The name of a device in measured profiles: a GPU's model, or a CPU with the threads in use."""
    if device.type == "cpu":
        return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    named = getattr(getattr(torch, device.type), "get_device_name", None)
    return device.type if named is None else str(named(device))  # Apple's have no name


Mark: TypeAlias = "float | torch.Event"  # torch below 2.6 has no events: a host's loop needs none
"""A place in a device's work: an event that is read later, on a CPU the clock."""


def mark(device: torch.device) -> Mark:
    if device.type == "cpu":
        return time.perf_counter()
    event: torch.Event = torch.get_device_module(device).Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """Seconds from one mark to a later one; waits until a device has come there."""
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]  # both are clocks
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, on any device, the storages that operators make within the context, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        # An upper bound of the bytes alive: dead storages are subtracted only when the bound exceeds the peak, since
        # looking at every storage after every operator would be slow.
        self._most_alive = 0
        self._peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A result that shares storage with an argument (a view, an operation in place) is nothing new.
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
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def address_of(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def storage_bytes(tensors: list[Tensor]) -> int:
    return sum({address_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


class DevicePeak(ExitStack):
    """A context that measures the peak of a device: by its allocator, on a CPU by a `StorageMeter`."""

    # ``held`` are tensors that exist before, such as parameters, which a CPU's meter does not see.

    def __init__(self, device: torch.device, held: list[Tensor]) -> None:
        super().__init__()
        self._held = storage_bytes(held)
        self._meter = StorageMeter() if device.type == "cpu" else None
        self._device = device

    def __enter__(self) -> DevicePeak:
        if self._meter is None:
            torch.get_device_module(self._device).reset_peak_memory_stats()
        else:
            self.enter_context(self._meter)
        return self

    @property
    def peak_bytes(self) -> int:
        if self._meter is None:
            return int(torch.get_device_module(self._device).max_memory_allocated())
        return self._held + self._meter.peak_bytes


def overhead_bytes(device: torch.device) -> int:
    """Bytes in use on a CUDA device beside those of torch's allocator; 0 on any other device."""
    if device.type != "cuda":
        return 0
    # The context, libraries and communication buffers: all that the driver counts and torch's allocator does not.
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
