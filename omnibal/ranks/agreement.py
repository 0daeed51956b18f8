"""Work that all ranks do together: if it fails on one, it fails on all.

Python objects travel over gloo: NCCL would copy them to a device. While rank 0 does what takes long, the others wait
on the store, since a collective would end at its time-out. Without a process group there is one rank, and nothing is
sent.
"""

import logging
import socket
import uuid
from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final, NamedTuple, TypeVar

import torch.distributed as dist

from omnibal.errors import ConfigError, OmnibalError
from omnibal.ranks.hosts import gloo_group, store

T = TypeVar("T")

LONGEST_WAIT_SECONDS: Final = 24 * 3600  # if rank 0 ends earlier, its launcher ends all
SILENT_SECONDS: Final = 5
LATEST_SIGHT_SECONDS: Final = 30  # a network file system may show other hosts a new file so much later

logger = logging.getLogger(__name__)
_turns = count()


class _Failure(NamedTuple):
    """What a rank sends in place of a value."""

    kind: type[OmnibalError]
    message: str


def place() -> tuple[int, int]:
    """This process's rank, and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(value: T | Exception, *, where: str | None = None, group: dist.ProcessGroup | None = None) -> list[T]:
    """Send a value to all ranks of a group and return the values of all of them, ordered by rank.

    A rank that has failed passes its exception in place of a value: then all ranks raise.

    Args:
        value: Anything that pickle can write.
        where: The place of this rank in messages, such as ``"rank 3, stage 1"``; by default ``"rank 3"``.
        group: A gloo group, by default of all ranks; a thread needs one of its own (`new_gloo_group`).

    Raises:
        OmnibalError: Some rank passed an exception. The first such rank's message follows its place; the class is that
            of the exception where it is one of omnibal's. The rank's own exception is the cause.
    """
    rank, num_ranks = place()[0], dist.get_world_size(group) if dist.is_initialized() else 1
    own: Any = value
    if isinstance(value, Exception):
        kind, message = OmnibalError, f"{type(value).__name__}: {value}"
        if isinstance(value, OmnibalError):
            kind, message = type(value), str(value)
        own = _Failure(kind, f"{where or f'rank {rank}'}: {message}")
    found: list[Any] = [own] * num_ranks
    if dist.is_initialized():
        dist.all_gather_object(found, own, group=group or gloo_group(dist.group.WORLD))
    for first in found:
        if isinstance(first, _Failure):
            raise first.kind(first.message) from (value if isinstance(value, Exception) else None)
    return found


def run_on_all_ranks(work: Callable[[], T], *, where: str | None = None) -> T:
    """Run ``work``, which must not communicate, on every rank; a failure on one is raised on all, as by `gather`."""
    try:
        result, failure = work(), None
    except Exception as error:  # any failure must reach the other ranks
        failure = error
    gather(failure, where=where)
    return result


def rank_zero_first(work: Callable[[], T], *, doing: str, where: str | None = None) -> T:
    """Run ``work`` on rank 0, then on the others, which find the files that rank 0 has written.

    Args:
        work: Must not communicate; may take hours on rank 0.
        doing: What rank 0 is doing, for the one line that the others print, such as ``"measures the samples"``.
        where: The place of this rank in messages, as for `gather`.
    """
    if not dist.is_initialized():
        return run_on_all_ranks(work, where=where)
    turn = f"omnibal/turn/{next(_turns)}"  # every rank counts the same turns
    if dist.get_rank() != 0:
        _await(turn, doing)
        gather(None, where=where)  # raises where rank 0 has failed
        return run_on_all_ranks(work, where=where)
    try:
        result, failure = work(), None
    except Exception as error:  # any failure must reach the other ranks
        failure = error
    store().set(turn, "")
    gather(failure, where=where)
    gather(None, where=where)  # the others have worked, too
    return result


def rank_zero_only(work: Callable[[], object], *, doing: str, where: str | None = None) -> None:
    """Run ``work`` on rank 0 alone while the others wait, and raise on all ranks if it fails."""
    rank_zero_first(lambda: work() if place()[0] == 0 else None, doing=doing, where=where)


def _await(turn: str, doing: str) -> None:
    """Wait for rank 0; only rank 1 says for what."""
    started, has_spoken = monotonic(), dist.get_rank() != 1
    while not store().check([turn]):
        waited = monotonic() - started
        if waited > LONGEST_WAIT_SECONDS:
            raise OmnibalError(f"rank 0, which {doing}, must be done in {LONGEST_WAIT_SECONDS} seconds, got no word")
        if waited > SILENT_SECONDS and not has_spoken:
            logger.warning("All ranks wait for rank 0, which %s", doing)
            has_spoken = True
        sleep(min(1.0, 0.02 + waited / 10))


def check_shared(folder: Path, *, name: str, where: str | None = None) -> None:
    """Make ``folder`` and refuse it, as the setting ``name``, unless all hosts see what rank 0 writes into it.

    Raises:
        ConfigError: The folder cannot be written, or some host has another folder of this name.
    """
    tokens = gather(uuid.uuid4().hex)
    token = folder / f".omnibal-{tokens[0]}"
    rank_zero_only(lambda: _touch(token), doing=f"writes to {folder}", where=where)
    seen = gather((socket.gethostname(), _is_seen(token)))
    if place()[0] == 0:
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
