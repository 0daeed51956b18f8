"""How the processes of a run agree: a failure on one rank is raised on all, and none is left waiting.

Here are failures that a rank can report when all ranks meet, and the network that they meet by; `failures` is for those
between two meetings, and ranks that have ended; `watchdog` for ranks at which nothing moves any more.

Python objects travel over gloo: NCCL would copy them to a device. While rank 0 does what takes long, the others wait
on the store, since a collective would end at its time-out. Without a process group there is one rank, and nothing is
sent.
"""

import atexit
import ipaddress
import json
import logging
import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final, NamedTuple, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

from omnibal.errors import ConfigError, OmnibalError
from omnibal.feeds.sampler import check_agreement
from omnibal.ranks.failures import lost_ranks_named, watch

T = TypeVar("T")
LOG: Final = logging.getLogger(__name__)
LONGEST_WAIT_SECONDS: Final = 24 * 3600  # if rank 0 ends earlier, its launcher ends all
SILENT_SECONDS: Final = 5  # work that takes less is not worth a line
LATEST_SIGHT_SECONDS: Final = 30  # a network file system may show other hosts a new file so much later
CONNECT_TIMEOUT: Final = timedelta(minutes=1)  # gloo tries for a few times as long
WORK_TIMEOUT: Final = timedelta(hours=2)  # a process may read tens of gigabytes of weights meanwhile
MEETING_TIMEOUT: Final = timedelta(minutes=30)  # torch's own for gloo: rank 0 may save a checkpoint meanwhile
INTERFACE: Final = "GLOO_SOCKET_IFNAME"
_REMEDY: Final = f"set {INTERFACE} on every host to the network interface that leads to the others"

_turns = count()
_loops = count(1)  # over all meetings of this process: ranks begin them in the same order


class _Failure(NamedTuple):
    kind: type[OmnibalError]
    message: str


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(value: T | Exception, *, where: str | None = None, group: dist.ProcessGroup | None = None) -> list[T]:
    """Send a value to all ranks of a group and return the values of all of them, ordered by rank.

    A rank that has failed passes its exception in place of a value. Then all ranks raise the failure of the first such
    rank: its message follows the rank's name, and its class is kept if it is one of omnibal's.

    ``where`` is the name of this rank in messages, such as ``"rank 3, stage 1"``. ``group`` is a gloo group, by default
    of all ranks; a thread needs one of its own (`new_gloo_group`).
    """
    rank, num_ranks = rank_and_size()[0], dist.get_world_size(group) if dist.is_initialized() else 1
    own: Any = value
    if isinstance(value, Exception):
        kind, message = OmnibalError, f"{type(value).__name__}: {value}"
        if isinstance(value, OmnibalError):
            kind, message = type(value), str(value)
        own = _Failure(kind, f"{where or f'rank {rank}'}: {message}")
    gathered: list[Any] = [own] * num_ranks
    if dist.is_initialized():
        with lost_ranks_named(where):
            dist.all_gather_object(gathered, own, group=group or gloo_group(dist.group.WORLD))
    for first in gathered:
        if isinstance(first, _Failure):
            raise first.kind(first.message) from (value if isinstance(value, Exception) else None)
    return gathered


def check_same(record: Mapping[str, Any]) -> None:
    """Refuse, on all ranks alike, a run whose ranks hold different values; the message names rank and key."""
    digest = crc32(json.dumps(record, sort_keys=True, default=str).encode())
    if len(set(gather(digest))) > 1:  # only now what may be long is sent
        found = gather(record)
        names = sorted({name for each in found for name in each})
        records = [{"rank": rank, **{name: each.get(name) for name in names}} for rank, each in enumerate(found)]
        check_agreement(records, num_replicas=len(found))


def any_rank(is_so: bool, device: torch.device) -> bool:
    """Whether something is so on any rank, in one small all-reduce; all ranks together."""
    if not dist.is_initialized():
        return is_so
    told = torch.tensor(int(is_so), dtype=torch.int32, device=device)
    with lost_ranks_named():
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return bool(told)


def run_on_all_ranks(work: Callable[[], T], *, where: str | None = None) -> T:
    """Run ``work``, which must not communicate, on every rank; a failure on one is raised on all, as by `gather`."""
    result = _attempt(work)
    gather(result if isinstance(result, Exception) else None, where=where)
    return result  # type: ignore[return-value]  # gather has raised an exception


def rank_zero_only(work: Callable[[], T], *, doing: str, where: str | None = None) -> T:
    """Run ``work`` on rank 0 alone; all ranks return its result, or raise its failure.

    It must not communicate, and may take hours; pickle must be able to write its result. ``doing`` is for the one line
    that the others print, such as ``"measures the samples"``.
    """
    if not dist.is_initialized():  # a turn that one process counts before all meet would be missing on the others
        return run_on_all_ranks(work, where=where)
    # 1. Rank 0 works; the others look at the store now and then. 2. Rank 0 sets this turn's key in the store: every
    # rank counts the same turns. 3. All meet in a collective, which rank 0 enters with its result or its failure.
    result: T | Exception = None  # type: ignore[assignment]  # a rank that only waits has nothing to send
    turn = f"omnibal/turn/{next(_turns)}"
    if dist.get_rank() == 0:
        result = _attempt(work)
    with lost_ranks_named(where):
        if dist.get_rank() == 0:
            _get_default_store().set(turn, "")
        else:
            _await(turn, doing)
    return gather(result, where=where)[0]


def rank_zero_first(work: Callable[[], T], *, doing: str, where: str | None = None) -> T:
    """Run ``work`` on rank 0, then on the others, which find the files that rank 0 has written.

    The arguments are those of `rank_zero_only`, but pickle need not write the result: it stays on its rank.
    """
    kept: list[T] = []
    rank_zero_only(lambda: kept.append(work()), doing=doing, where=where)
    return run_on_all_ranks(lambda: kept[0] if kept else work(), where=where)


def _attempt(work: Callable[[], T]) -> T | Exception:
    try:
        return work()
    except Exception as error:  # any failure must reach the other ranks
        return error


def _await(turn: str, doing: str) -> None:
    started, has_spoken = monotonic(), dist.get_rank() != 1
    while not _get_default_store().check([turn]):
        waited = monotonic() - started
        if waited > LONGEST_WAIT_SECONDS:
            raise OmnibalError(f"rank 0, which {doing}, must be done in {LONGEST_WAIT_SECONDS} seconds, got no word")
        if waited > SILENT_SECONDS and not has_spoken:
            LOG.warning("All ranks wait for rank 0, which %s", doing)
            has_spoken = True
        sleep(min(1.0, 0.02 + waited / 10))


def check_shared(folder: Path, *, name: str, where: str | None = None) -> None:
    """Make ``folder`` and refuse it, as the setting ``name``, unless all hosts see what rank 0 writes into it."""
    # Rank 0 writes a file whose name nobody else can have; every rank says whether it sees the file; rank 0 removes it.
    token = folder / f".omnibal-{gather(uuid.uuid4().hex)[0]}"

    def touch() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            token.touch()
        except OSError as error:
            raise ConfigError(f"{folder} must be a folder that can be written, got {error}") from error

    rank_zero_only(touch, doing=f"writes to {folder}", where=where)
    started = monotonic()
    while not (is_seen := token.exists()) and monotonic() - started <= LATEST_SIGHT_SECONDS:
        sleep(0.5)
    seen = gather((socket.gethostname(), is_seen))
    if rank_and_size()[0] == 0:
        token.unlink()
    blind = sorted({host for host, sees in seen if not sees})
    if blind:
        raise ConfigError(
            f"{name} must be a folder that all hosts share, got {folder}: what {seen[0][0]} writes there is not seen "
            f"by {', '.join(blind[:3])}{f' and {len(blind) - 3} more' if len(blind) > 3 else ''}; "
            "put it on a file system that they share"
        )


class Meeting:
    """Where the ranks of a group compare what each is about to do; all of them create it together."""

    # They exchange data afterwards, which would fail or hang if they differed. Each rank learns the least and the
    # greatest record of all ranks in ⌈log₂ ranks⌉ small messages over gloo: 12 for 2560 ranks, where an all-gather in a
    # ring takes 2559 one after another.

    def __init__(self, among: dist.ProcessGroup | None = None) -> None:
        self._group = new_gloo_group(among, timeout=MEETING_TIMEOUT)
        self._ranks = dist.get_process_group_ranks(self._group)
        self._own = self._ranks.index(dist.get_rank())
        self._loop, self._last = 0, tuple[int, ...]()

    def begin(self) -> None:
        """A new loop, whose positions are behind all those of the loops before."""
        self._loop = next(_loops)
        self._last = (self._loop, -1)

    def leave(self, received: Sequence[int]) -> None:
        """Tell ranks that wait at later positions of this loop that this rank comes no further than ``received``."""
        with suppress(Exception):  # at the end of the process the store may be gone
            watch().leave(self._last, max(self._last, (self._loop, *received)))

    def extremes(self, position: Sequence[int], details: Sequence[int]) -> tuple[list[int], list[int]]:
        """The least and the greatest of all ranks' records, in the order of their numbers: position, details, rank.

        Later positions in this rank's loop are greater; once a rank has left before one (`leave`), those that wait
        there end. ``details``, as many numbers on all ranks, are compared beside it.
        """
        self._last = self._loop, *position
        least = greatest = [*position, *details, self._ranks[self._own]]
        distance, num_ranks = 1, len(self._ranks)
        while distance < num_ranks:
            # Each rank sends what it knows to the rank at this distance behind it, and receives from the rank at this
            # distance before it. After the round it knows of the 2 · distance ranks up to itself.
            to, source = self._ranks[(self._own + distance) % num_ranks], self._ranks[self._own - distance]
            received = torch.empty(2, len(least), dtype=torch.int64)
            with lost_ranks_named(), watch().waiting_at(self._last):
                sending = dist.isend(torch.tensor([least, greatest]), to, group=self._group)
                dist.recv(received, source, group=self._group)
                assert sending is not None, "this rank is a member of the group"
                sending.wait()
            least, greatest = min(least, received[0].tolist()), max(greatest, received[1].tolist())
            distance *= 2
        return least, greatest


class Host(NamedTuple):
    name: str
    address: str  # at which gloo lets others reach the process


@cache
def gloo_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """The gloo group of a world that all who exchange objects from the main thread share."""
    # A process whose gloo threads outlive the interpreter aborts, and this cache would keep them.
    atexit.register(gloo_group.cache_clear)
    group = new_gloo_group()
    assert group is not None, "a world is a process group"
    return group


def new_gloo_group(
    among: dist.ProcessGroup | None = None, *, timeout: timedelta = WORK_TIMEOUT
) -> dist.ProcessGroup | None:
    """A gloo group of all ranks (or of those of ``among``, which call this together); the processes connect at once."""
    # Without a process group there is nobody to connect to, and the result is None. A thread that communicates needs a
    # group of its own, since the members of a group must enter its collectives in the same order.
    if not dist.is_initialized():
        return None
    if among not in (None, dist.group.WORLD):  # hosts_of would wait for all ranks, of which some need not come here
        ranks = dist.get_process_group_ranks(among)
        group: dist.ProcessGroup = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
        return group
    hosts = hosts_of(dist.group.WORLD)
    # gloo connects all pairs when the group is made, and tries for the group's timeout: a short one while it connects.
    try:
        group = dist.new_group(backend="gloo", timeout=CONNECT_TIMEOUT)
    except RuntimeError as error:
        raise ConfigError(unreachable(dist.get_rank(), range(len(hosts)), hosts, str(error))) from error
    _set_pg_timeout(timeout, group)
    return group


def unreachable(rank: int, members: Sequence[int], hosts: Sequence[Host], reason: str) -> str:
    """The message that ``rank`` does not reach other members; ``reason`` is gloo's error, often with an address."""
    others = [other for other in members if other != rank]
    named = [other for other in others if f"[{hosts[other].address}]" in reason] or others
    peers = ", ".join(sorted({hosts[other].name for other in named})[:3])
    host, error = hosts[rank].name, reason.splitlines()[0]
    return f"rank {rank}: host {host} must reach the processes on {peers}, got {error}; {_REMEDY}"


def check_addresses(hosts: Sequence[Host]) -> None:
    """Refuse, in a run on several hosts, one whose name leads to itself only, as ``127.0.1.1`` in ``/etc/hosts``."""
    for rank, (name, address) in enumerate(hosts):
        peer = next((host.name for host in hosts if host.name != name), None)
        is_loopback = False
        with suppress(ValueError):  # an interface that is not there: gloo will say so
            is_loopback = ipaddress.ip_address(address).is_loopback
        if peer is not None and is_loopback:
            raise ConfigError(
                f"rank {rank}: the name of host {name} must lead to an address that {peer} can reach, got {address}; "
                + _REMEDY
            )


@cache
def hosts_of(world: dist.ProcessGroup) -> list[Host]:
    # By the store, since no connection between the hosts is tested yet: every rank writes its own host, rank 0 collects
    # them under one key, and everybody reads that (a get waits until the key is set).
    store = _get_default_store()
    store.set(f"omnibal/host/{dist.get_rank()}", json.dumps(_this_host()))
    if dist.get_rank() == 0:
        records = [json.loads(store.get(f"omnibal/host/{rank}")) for rank in range(dist.get_world_size())]
        store.set("omnibal/hosts", json.dumps(records))
    hosts = [Host(*record) for record in json.loads(store.get("omnibal/hosts"))]
    check_addresses(hosts)
    return hosts


def _this_host() -> Host:
    """This host; gloo takes the address of the interface it was told, or the one that the host's name leads to."""
    name, interface = socket.gethostname(), os.environ.get(INTERFACE, "").partition(",")[0]
    if interface:
        import psutil

        families = (socket.AF_INET, socket.AF_INET6)
        found = [entry.address for entry in psutil.net_if_addrs().get(interface, []) if entry.family in families]
        return Host(name, found[0] if found else interface)
    try:
        return Host(name, socket.gethostbyname(name))
    except OSError:  # gloo then takes the loopback address
        return Host(name, "127.0.0.1")
