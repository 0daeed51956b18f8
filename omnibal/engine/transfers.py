"""Sends and receives between neighbouring stages that run while the stages compute.

Each pair of neighbours has a link for activations (down) and one for gradients (up). An activation goes as a
description, then its tensors; a gradient goes without one, since its receiver has sent tensors of these shapes.
A process whose neighbouring stage has more replicas than its own has a `Fan` of links to them.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from omnibal.cluster import Layout
from omnibal.engine.grid import pairs_below
from omnibal.errors import ConfigError
from omnibal.ranks import gloo_group, hosts_of, unreachable
from omnibal.vlm.payload import PackCounts, counts_of, note_counts

DtypeAndSize = tuple[torch.dtype, tuple[int, ...]]

_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32)
# A message of fixed size before the tensors of a pack, since a receiver must know the size of what it receives: JSON,
# padded with spaces, of the dtype (an index of _DTYPES) and shape of each tensor, and of the pack's counts (null if
# they are unknown or too long for the message). 8 KiB hold the counts of a pack of about 4000 samples.
DESCRIPTION: DtypeAndSize = (torch.uint8, (8192,))


class StageLink(NamedTuple):
    # Each direction has a group of its own on the device, since NCCL runs the operations of one group in order: a send
    # would wait for a receive of the other direction. Tensors of the CPU go by gloo: descriptions are read without
    # waiting for a device.
    on_device: dist.ProcessGroup
    on_host: dist.ProcessGroup

    def group(self, tensor: Tensor) -> dist.ProcessGroup:
        return self.on_host if tensor.device.type == "cpu" else self.on_device


def new_link(pairs: Sequence[tuple[int, int]], device: torch.device) -> StageLink | None:
    """The link of this process's pair of ranks, on a GPU None without one; all together, no rank in two ``pairs``."""
    world = dist.group.WORLD
    assert world is not None, "the processes have met"
    on_host = gloo_group(world)
    if device.type == "cpu":
        return StageLink(on_host, on_host)
    # NCCL makes groups of a world that is bound to its devices by splitting it, which all processes do together: all
    # pairs in one split, not one after another. Otherwise only a pair's own processes make its group.
    if world.bound_device_id is not None and world._get_backend(device).supports_splitting:
        on_device = dist.split_group(split_ranks=[[*pair] for pair in pairs])
    else:
        backend = dist.get_default_backend_for_device(device)
        groups = [dist.new_group([*pair], backend=backend) for pair in pairs]
        on_device = next((group for pair, group in zip(pairs, groups, strict=True) if dist.get_rank() in pair), None)
    return None if on_device is None else StageLink(on_device, on_host)


class Sender:
    """The end of a link that sends to the rank ``peer``."""

    def __init__(self, link: StageLink, peer: int) -> None:
        self._link, self.peer = link, peer
        # By micro-batch: a tensor must neither change nor be freed until its send is done.
        self._under_way: dict[int, list[tuple[Any, Tensor]]] = {}

    def send(self, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        under_way = self._under_way.setdefault(micro_batch, [])
        for tensor in tensors:
            if tensor.numel():  # the receiver makes an empty tensor from its shape alone
                under_way.append((dist.isend(tensor, self.peer, group=self._link.group(tensor)), tensor))

    def send_described(self, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        self.send(micro_batch, [describe(tensors)])
        self.send(micro_batch, tensors)

    def settle(self, micro_batch: int) -> None:
        """Wait until all tensors up to this micro-batch have been sent, and drop the references to them."""
        for done in [number for number in self._under_way if number <= micro_batch]:
            for work, _ in self._under_way.pop(done):
                work.wait()


class Receiver:
    """The end of a link that receives from the rank ``peer``, in the order of the sends."""

    def __init__(self, link: StageLink, peer: int, device: torch.device) -> None:
        self._link, self._peer, self._device = link, peer, device
        self._coming: list[tuple[Any, Tensor]] | None = None

    @property
    def is_idle(self) -> bool:
        return self._coming is None

    def expect(self, shapes: Iterable[DtypeAndSize]) -> None:
        """Start to receive tensors into new memory: earlier tensors may still be in use."""
        self._coming = self._start(shapes, self._device)

    def take(self) -> tuple[Tensor, ...]:
        assert self._coming is not None, "nothing is expected"
        coming, self._coming = self._coming, None
        return _finish(coming)

    def take_described(self) -> tuple[Tensor, ...]:
        (description,) = _finish(self._start([DESCRIPTION], torch.device("cpu")))
        shapes, counts = read_description(description)
        tensors = _finish(self._start(shapes, self._device))
        note_counts(tensors, counts)
        return tensors

    def _start(self, shapes: Iterable[DtypeAndSize], device: torch.device) -> list[tuple[Any, Tensor]]:
        buffers = [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in shapes]
        return [
            (dist.irecv(buffer, self._peer, group=self._link.group(buffer)) if buffer.numel() else None, buffer)
            for buffer in buffers
        ]


End = TypeVar("End", bound=Sender | Receiver)


class Fan(Generic[End]):
    """The ends of one direction, one for each neighbour that shares this process's micro-batches, in their order."""

    def __init__(self, ends: list[End]) -> None:
        self.ends = ends

    def __getitem__(self, micro_batch: int) -> End:
        """The end of a micro-batch: neighbours take them in turns."""
        return self.ends[micro_batch % len(self.ends)]


class StageLinks:
    """The ends of this process's links to the stages before and behind it; all ranks create it together."""

    def __init__(self, layout: Layout, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self.activations_out, self.activations_in = Fan[Sender]([]), Fan[Receiver]([])
        self.gradients_out, self.gradients_in = Fan[Sender]([]), Fan[Receiver]([])
        # Links below even stages, then below odd ones, and of either in rounds where replicas differ: no process is in
        # two pairs of a round, as new_link demands.
        for kind in range(min(2, layout.num_stages - 1)):
            of_stages = [pairs_below(layout, stage) for stage in range(kind, layout.num_stages - 1, 2)]
            for of_round in zip_longest(*of_stages, fillvalue=[]):
                pairs = [pair for of_stage in of_round for pair in of_stage]
                down, up = new_link(pairs, device), new_link(pairs, device)
                own = next((pair for pair in pairs if rank in pair), None)
                if own is None:
                    continue
                assert down and up, "this process is in a pair"
                upper, lower = own
                if rank == upper:
                    self.activations_out.ends.append(Sender(down, lower))
                    self.gradients_in.ends.append(Receiver(up, lower, device))
                else:
                    self.activations_in.ends.append(Receiver(down, upper, device))
                    self.gradients_out.ends.append(Sender(up, upper))

    @property
    def senders(self) -> list[Sender]:
        return [*self.gradients_out.ends, *self.activations_out.ends]

    def settle(self, micro_batch: int) -> None:
        settle(self.senders, micro_batch)

    def try_out(self) -> None:
        """Send a token down the stages and one up, so that a pair that cannot communicate fails here, not in a step."""
        # NCCL also connects a pair when it first sends, and its host waits meanwhile.
        token = torch.ones(1, device=self._device)
        try:
            for receiver in self.activations_in.ends:
                receiver.take_described()
            for sender in self.activations_out.ends:
                sender.send_described(0, [token])
            for receiver in self.gradients_in.ends:
                receiver.expect([(token.dtype, tuple(token.shape))])
                receiver.take()
            for sender in self.gradients_out.ends:
                sender.send(0, [token])
            self.settle(0)
            get_accelerator().synchronize()
        except RuntimeError as error:
            neighbours, hosts = [sender.peer for sender in self.senders], hosts_of(dist.group.WORLD)
            raise ConfigError(unreachable(self._rank, neighbours, hosts, str(error))) from error


def settle(senders: Iterable[Sender], micro_batch: int) -> None:
    """Wait until senders have sent all tensors up to a micro-batch."""
    for sender in senders:
        sender.settle(micro_batch)


def _finish(coming: Iterable[tuple[Any, Tensor]]) -> tuple[Tensor, ...]:
    tensors = []
    for work, tensor in coming:
        if work is not None:
            work.wait()
        tensors.append(tensor)
    return tuple(tensors)


def describe(tensors: Sequence[Tensor]) -> Tensor:
    shapes = [[_DTYPES.index(tensor.dtype), tensor.shape] for tensor in tensors]
    counts = counts_of(tensors)
    known = None if counts is None or counts.image_tokens is None else counts._replace(integers=dict(counts.integers))
    dtype, (size,) = DESCRIPTION
    # The first text that fits: with the counts, or without.
    texts = (json.dumps([shapes, told], separators=(",", ":")).encode() for told in (known, None))
    text = next(text for text in texts if len(text) <= size)
    return torch.frombuffer(bytearray(text.ljust(size)), dtype=dtype)


def read_description(description: Tensor) -> tuple[list[DtypeAndSize], PackCounts | None]:
    shapes, counts = json.loads(bytes(description.tolist()))
    told = None if counts is None else PackCounts(counts[0], tuple(counts[1]), counts[2])
    return [(_DTYPES[dtype], tuple(shape)) for dtype, shape in shapes], told
