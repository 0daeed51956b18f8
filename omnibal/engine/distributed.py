"""Work that all ranks do together: if it fails on one, it fails on all, and none is left waiting.

Tensors travel by the default group, which is NCCL's where there are GPUs. Python objects travel by a gloo group of
their own: NCCL would lay them on a device. While rank 0 does what takes long, the others wait outside of collectives.
"""

import atexit
import logging
import os
import socket
import uuid
from collections.abc import Callable
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final, TypeVar, cast

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed.distributed_c10d import Store

from omnibal.engine.hosts import gloo_group, store
from omnibal.engine.launch import end_with_launcher, explained_wait
from omnibal.errors import ConfigError, OmnibalError

T = TypeVar("T")

SHARED_MEMORY = Path("/dev/shm")
LONGEST_WAIT_SECONDS: Final = 24 * 3600
"""For what rank 0 does before the others. If it ends earlier than that, its launcher ends all."""
SILENT_SECONDS: Final = 5
LATEST_SIGHT_SECONDS: Final = 30
"""A network file system may show other hosts a new file so much later."""

logger = logging.getLogger(__name__)
_turns = count()


def meet(backend: str, **rendezvous: Any) -> None:
    """Let this process communicate with the others of its launch, and leave nothing behind; all ranks together.

    Its device is set before anything communicates: what NCCL sends lies on the current device, and that would be the
    first one of the host for all its processes. The processes may have met before.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        **rendezvous: Where they meet, as for ``deepspeed.init_distributed``; by default as the launcher says.

    Raises:
        ConfigError: No launcher has started this process, or a host cannot be reached by gloo.
    """
    have_met = dist.is_initialized()
    if not have_met:
        end_with_launcher()
    if "LOCAL_RANK" in os.environ:  # processes that MPI started learn theirs when they meet
        set_device()
    elif find_spec("mpi4py") is None:
        raise ConfigError(
            "processes must be started by a launcher, got no LOCAL_RANK; start them with `deepspeed` or `torchrun`"
        )
    with explained_wait():
        deepspeed.init_distributed(dist_backend=backend, verbose=False, **rendezvous)
    set_device()
    gloo_group(dist.group.WORLD)
    if backend == "gloo" and not have_met:
        _release_shared_memory()
        atexit.register(_leave)  # gloo's threads abort a process that ends without having taken leave


def set_device() -> None:
    """Let the calling thread compute on this process's device."""
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))


def _leave() -> None:
    gloo_group.cache_clear()  # or its threads would outlive what follows
    if dist.is_initialized():
        dist.destroy_process_group()


def _release_shared_memory() -> None:
    """Let DeepSpeed's buffers in shared memory end with the launch's processes.

    On a CPU it opens a file of 66 MiB for each process and never removes it: that memory would stay taken until the
    machine restarts. A file that has lost its name lives as long as somebody has it open.
    """
    dist.barrier(gloo_group(dist.group.WORLD))
    for path in SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{os.environ.get('MASTER_PORT')}_*"):
        path.unlink(missing_ok=True)


def run_on_all_ranks(work: Callable[[], T], *, where: str) -> T:
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


def rank_zero_first(work: Callable[[], T], *, doing: str, where: str) -> T:
    """As ``together``, but rank 0 runs before the others, which then find the files that it has kept.

    Rank 0 may take hours: the others wait on the store, since a collective would end at its time-out.

    Args:
        work: As of ``together``.
        doing: What rank 0 is doing, for those who wait, such as ``"measures the samples"``.
        where: As of ``together``.
    """
    turn = f"omnibal/turn/{next(_turns)}"  # every rank counts the same turns
    if dist.get_rank() != 0:
        _await(store(), turn, doing)
        raise_on_all(None, where=where)
        return run_on_all_ranks(work, where=where)
    try:
        result, failure = work(), None
    except Exception as error:  # any failure must reach the other ranks
        failure = error
    store().set(turn, "")
    raise_on_all(failure, where=where)
    raise_on_all(None, where=where)
    return result


def rank_zero_only(work: Callable[[], object], *, doing: str, where: str) -> None:
    """Run ``work`` on rank 0 alone, as ``rank_zero_first`` does, and raise on all ranks if it fails."""
    rank_zero_first(lambda: work() if dist.get_rank() == 0 else None, doing=doing, where=where)


def _await(store: Store, turn: str, doing: str) -> None:
    """Wait for rank 0; rank 1 says for what, so that hundreds of ranks do not."""
    started, said = monotonic(), dist.get_rank() != 1
    while not store.check([turn]):
        waited = monotonic() - started
        if waited > LONGEST_WAIT_SECONDS:
            raise OmnibalError(f"rank 0, which {doing}, must be done in {LONGEST_WAIT_SECONDS} seconds, got no word")
        if waited > SILENT_SECONDS and not said:
            logger.warning("All ranks wait for rank 0, which %s", doing)
            said = True
        sleep(min(1.0, 0.02 + waited / 10))


def check_shared(folder: Path, *, name: str, where: str) -> None:
    """Make sure that what rank 0 writes to a folder is seen by all ranks.

    Args:
        folder: Is made if need be.
        name: The setting that names it.
        where: As of ``together``.

    Raises:
        ConfigError: Some host has another folder of this name.
    """
    tokens = gather(uuid.uuid4().hex)
    token = folder / f".omnibal-{tokens[0]}"
    rank_zero_only(lambda: _touch(token), doing=f"writes to {folder}", where=where)
    seen = gather((socket.gethostname(), _is_seen(token)))
    if dist.get_rank() == 0:
        token.unlink()
    blind = sorted({host for host, sees in seen if not sees})
    if blind:
        raise ConfigError(
            f"{name} must be a folder that all hosts share, got {folder}: what {seen[0][0]} writes there is not seen "
            f"by {', '.join(blind[:3])}{f' and {len(blind) - 3} more' if len(blind) > 3 else ''}; "
            "put it on a file system that they share"
        )


def _touch(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise ConfigError(f"{path.parent} must be a folder that can be written, got {error}") from error


def _is_seen(path: Path) -> bool:
    started = monotonic()
    while not path.exists():
        if monotonic() - started > LATEST_SIGHT_SECONDS:
            return False
        sleep(0.5)
    return True


def gather(value: T) -> list[T]:
    """What every rank passed, by rank, on every rank."""
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=gloo_group(dist.group.WORLD))
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
