"""Tensors on their way between neighbouring stages while these compute: sends and receives that do not block."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from omnibal.engine.hosts import gloo_group
from omnibal.vlm.payload import PackCounts, counts_of, note_counts

Shape = tuple[torch.dtype, tuple[int, ...]]

_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32)
DESCRIPTION: Shape = (torch.int64, (1024,))
"""What tells a receiver of a pack to come: its tensors (how many, and of each its dtype, dimensions and sizes), and its
counts (how many numbers, image tokens, how many samples, tokens of each; then the further integers, of each the length
and letters of its name, its rows, the numbers in a row, 0 where rows are numbers, and these), none of them where they
would not fit in."""


class Link(NamedTuple):
    """One direction between two processes.

    Attributes:
        on_device: Sends a device's tensors, by the device's backend. Each direction has a group of its own: what goes
            one way then never waits for what comes the other way.
        on_host: Sends the CPU's tensors by gloo, so that to read a description no device is waited for.
    """

    on_device: dist.ProcessGroup
    on_host: dist.ProcessGroup

    def group(self, tensor: Tensor) -> dist.ProcessGroup:
        """Which of them a tensor goes by."""
        return self.on_host if tensor.device.type == "cpu" else self.on_device


def new_link(pairs: Sequence[tuple[int, int]], device: torch.device) -> Link | None:
    """This process's link among those of some pairs; all processes of the run call this together.

    Args:
        pairs: Ranks of the processes that a link joins; no process is in two pairs.
        device: Where tensors are.

    Returns:
        None for a process that is in no pair.
    """
    on_host = gloo_group(dist.group.WORLD)
    on_device = on_host if device.type == "cpu" else _device_group(pairs, device)
    return None if on_device is None else Link(on_device, on_host)


def _device_group(pairs: Sequence[tuple[int, int]], device: torch.device) -> dist.ProcessGroup | None:
    world = dist.group.WORLD
    assert world is not None, "the processes have met"
    # NCCL makes groups of a world that is bound to its devices by splitting it, which all processes do together: all
    # pairs in one split, not one after another. Otherwise only a pair's own processes make its group.
    if world.bound_device_id is not None and world._get_backend(device).supports_splitting:
        return dist.split_group(split_ranks=[[*pair] for pair in pairs])
    backend = dist.get_default_backend_for_device(device)
    groups = [dist.new_group([*pair], backend=backend) for pair in pairs]
    return next((group for pair, group in zip(pairs, groups, strict=True) if dist.get_rank() in pair), None)


class Sender:
    """The end of a link that sends.

    Args:
        link: Of the two processes.
        peer: Rank of the other one.

    Attributes:
        peer: As given.
    """

    def __init__(self, link: Link, peer: int) -> None:
        self._link, self.peer = link, peer
        self._under_way: dict[int, list[tuple[Any, Tensor]]] = {}

    def send(self, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        """Start to send contiguous tensors, which must not change until ``settle``."""
        under_way = self._under_way.setdefault(micro_batch, [])
        for tensor in tensors:
            if tensor.numel():  # the receiver knows the shape, so nothing is to be sent otherwise
                under_way.append((dist.isend(tensor, self.peer, group=self._link.group(tensor)), tensor))

    def send_described(self, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        """The same to a receiver that does not know dtypes and shapes."""
        self.send(micro_batch, [describe(tensors)])
        self.send(micro_batch, tensors)

    def settle(self, micro_batch: int) -> None:
        """Wait until everything up to this micro-batch has been received, and let go of it."""
        for done in [number for number in self._under_way if number <= micro_batch]:
            for work, _ in self._under_way.pop(done):
                work.wait()


class Receiver:
    """The end that receives, in the order of the sends.

    Args:
        link: Of the two processes.
        peer: Rank of the other one.
        device: Where tensors are put.
    """

    def __init__(self, link: Link, peer: int, device: torch.device) -> None:
        self._link, self._peer, self._device = link, peer, device
        self._coming: list[tuple[Any, Tensor]] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is expected."""
        return self._coming is None

    def expect(self, shapes: Iterable[Shape]) -> None:
        """Start to receive tensors, into fresh memory: what came before may still be in use."""
        self._coming = self._start(shapes, self._device)

    def take(self) -> tuple[Tensor, ...]:
        """Wait for what is expected."""
        assert self._coming is not None, "nothing is expected"
        coming, self._coming = self._coming, None
        return _finish(coming)

    def take_described(self) -> tuple[Tensor, ...]:
        """Wait for tensors of unknown dtypes and shapes."""
        (description,) = _finish(self._start([DESCRIPTION], torch.device("cpu")))
        shapes, counts = read_description(description)
        tensors = _finish(self._start(shapes, self._device))
        note_counts(tensors, counts)
        return tensors

    def _start(self, shapes: Iterable[Shape], device: torch.device) -> list[tuple[Any, Tensor]]:
        buffers = [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in shapes]
        return [
            (dist.irecv(buffer, self._peer, group=self._link.group(buffer)) if buffer.numel() else None, buffer)
            for buffer in buffers
        ]


def _finish(coming: Iterable[tuple[Any, Tensor]]) -> tuple[Tensor, ...]:
    tensors = []
    for work, tensor in coming:
        if work is not None:
            work.wait()
        tensors.append(tensor)
    return tuple(tensors)


def describe(tensors: Sequence[Tensor]) -> Tensor:
    """The DESCRIPTION of a pack's tensors and of what is noted of it."""
    words = [len(tensors)]
    for tensor in tensors:
        words += [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    dtype, (size,) = DESCRIPTION
    counts = counts_of(tensors)
    numbers = list(_numbers_of(counts))
    if numbers and len(words) + 1 + len(numbers) <= size:
        words += [len(numbers), *numbers]
    return torch.tensor(words + [0] * (size - len(words)), dtype=dtype)


def read_description(description: Tensor) -> tuple[list[Shape], PackCounts | None]:
    """Dtypes and shapes of the tensors, and the counts; the host waits for a device's description."""
    words = iter(description.tolist())
    shapes = [(_DTYPES[next(words)], tuple(next(words) for _ in range(next(words)))) for _ in range(next(words))]
    return shapes, _counts_of(_take(words))


def _numbers_of(counts: PackCounts | None) -> Iterator[int]:
    if counts is None or counts.image_tokens is None:
        return
    yield from (counts.image_tokens, len(counts.sample_lengths), *counts.sample_lengths)
    for name, rows in counts.integers.items():
        width = len(rows[0]) if rows and isinstance(rows[0], list) else 0
        yield from (len(name), *map(ord, name), len(rows), width, *(chain(*rows) if width else rows))


def _counts_of(numbers: Sequence[int]) -> PackCounts | None:
    if not numbers:
        return None
    words = iter(numbers)
    image_tokens, lengths, integers = next(words), tuple(_take(words)), {}
    for length in words:
        name = "".join(chr(next(words)) for _ in range(length))
        count, width = next(words), next(words)
        integers[name] = [[next(words) for _ in range(width)] if width else next(words) for _ in range(count)]
    return PackCounts(image_tokens, lengths, integers)


def _take(words: Iterator[int]) -> list[int]:
    """As many numbers as the first one says."""
    return [next(words) for _ in range(next(words))]
