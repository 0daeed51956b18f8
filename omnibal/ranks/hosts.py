"""The network between the hosts of a run, tested when the processes meet, and the gloo groups of all ranks."""

import atexit
import ipaddress
import json
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Final, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store, _set_pg_timeout

from omnibal.errors import ConfigError

CONNECT_TIMEOUT: Final = timedelta(minutes=1)  # gloo tries for a few times as long
WORK_TIMEOUT: Final = timedelta(hours=2)  # a process may read tens of gigabytes of weights meanwhile
INTERFACE: Final = "GLOO_SOCKET_IFNAME"
_REMEDY: Final = f"set {INTERFACE} on every host to the network interface that leads to the others"


class Host(NamedTuple):
    """Where a process runs: the host's name, and the address at which gloo lets others reach the process."""

    name: str
    address: str


def store() -> Store:
    """The store by which the processes met: it works without collectives, devices, and gloo."""
    return _get_default_store()


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
    """A gloo group of all ranks (or of those of ``among``, which call this together); the processes connect at once.

    Without a process group there is nobody to connect to, and the result is None. A thread that communicates needs a
    group of its own, since the members of a group must enter its collectives in the same order.
    """
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
        if peer is not None and _is_loopback(address):
            raise ConfigError(
                f"rank {rank}: the name of host {name} must lead to an address that {peer} can reach, got {address}; "
                + _REMEDY
            )


@cache
def hosts_of(world: dist.ProcessGroup) -> list[Host]:
    """The hosts of all processes, by rank."""
    # By the store, since no connection between the hosts is tested yet: every rank writes its own host, rank 0 collects
    # them under one key, and everybody reads that (a get waits until the key is set).
    own = f"omnibal/host/{dist.get_rank()}"
    store().set(own, json.dumps(_this_host()))
    if dist.get_rank() == 0:
        records = [json.loads(store().get(f"omnibal/host/{rank}")) for rank in range(dist.get_world_size())]
        store().set("omnibal/hosts", json.dumps(records))
    hosts = [Host(*record) for record in json.loads(store().get("omnibal/hosts"))]
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


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # an interface that is not there: gloo will say so
        return False
