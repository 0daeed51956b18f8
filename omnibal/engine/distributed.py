"""Work that all ranks do together: if it fails on one, it fails on all, and none is left waiting."""

import atexit
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import deepspeed
import torch.distributed as dist

from omnibal.errors import OmnibalError

T = TypeVar("T")

SHARED_MEMORY = Path("/dev/shm")


def free_port() -> int:
    """A port that a launch can take for its processes to meet: launches side by side must not share one."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def meet(backend: str) -> None:
    """Let this process communicate with the others of its launch, and leave nothing behind; all ranks together.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
    """
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    _release_shared_memory()
    if backend == "gloo":  # its threads abort a process that ends without having taken leave
        atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _release_shared_memory() -> None:
    """Let DeepSpeed's buffers in shared memory end with the launch's processes.

    On a CPU it opens a file of 66 MiB for each process and never removes it: that memory would stay taken until the
    machine restarts. A file that has lost its name lives as long as somebody has it open.
    """
    dist.barrier()
    for path in SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_*"):
        path.unlink(missing_ok=True)


def together(work: Callable[[], T], *, where: str) -> T:
    """Run ``work`` on this rank, as every other rank does, and raise on all of them if it fails on one.

    Args:
        work: Must not communicate.
        where: This rank's place in error messages, such as ``"rank 3, stage 1"``.

    Returns:
        What ``work`` returned.

    Raises:
        OmnibalError: ``work`` failed on some rank: the first such rank's message, behind its place, of its class
            where that is one of omnibal's. The rank's own exception is the cause of its error.
    """
    try:
        result, failure = work(), None
    except Exception as error:  # any failure must reach the other ranks
        failure = error
    raise_on_all(failure, where=where)
    return result


def rank_zero_first(work: Callable[[], T], *, where: str) -> T:
    """As ``together``, but rank 0 runs before the others, which then find the files that it has cached."""
    if dist.get_rank() == 0:
        result = together(work, where=where)
        raise_on_all(None, where=where)
        return result
    raise_on_all(None, where=where)
    return together(work, where=where)


def gather(value: T) -> list[T]:
    """What every rank passed, by rank, on every rank."""
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return cast(list[T], values)


def raise_on_all(failure: Exception | None, *, where: str) -> None:
    """Tell all ranks about a failure on this one (or None), and raise the first of all failures."""
    found = None if failure is None else (_kind(failure), f"{where}: {_message(failure)}")
    for first in gather(found):
        if first is not None:
            kind, message = first
            raise kind(message) from failure


def _kind(failure: Exception) -> type[OmnibalError]:
    return type(failure) if isinstance(failure, OmnibalError) else OmnibalError


def _message(failure: Exception) -> str:
    return str(failure) if isinstance(failure, OmnibalError) else f"{type(failure).__name__}: {failure}"
