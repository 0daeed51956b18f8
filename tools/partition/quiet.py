"""How much of the machine's CPU time goes to others: a timing made beside them is not to be trusted."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

MOST_FOREIGN = 0.04
"""Share of all cores' time that others may take in a measurement that counts."""


@dataclass(frozen=True)
class Instant:
    """Clocks at one time, in seconds."""

    wall: float
    own: float
    """CPU time of all ranks, which share the machine."""
    busy: float
    """CPU time of everything on the machine."""

    @classmethod
    def now(cls) -> "Instant":
        """Read the clocks; all ranks together."""
        own = [0.0] * dist.get_world_size()
        dist.all_gather_object(own, time.process_time())
        return cls(time.perf_counter(), sum(own), _busy_seconds())


def foreign_share(before: Instant, after: Instant) -> float:
    """Share of all cores' time between two instants that went to other processes."""
    foreign = (after.busy - before.busy) - (after.own - before.own)
    return max(0.0, foreign / (after.wall - before.wall) / (os.cpu_count() or 1))


def wait_until_quiet(most_seconds: float) -> bool:
    """Wait until others leave the machine alone for a second, all ranks together; whether they did in time."""
    ends = time.perf_counter() + most_seconds
    while True:
        before = Instant.now()
        time.sleep(1)
        share: list[object] = [foreign_share(before, Instant.now()), time.perf_counter() > ends]
        dist.broadcast_object_list(share)  # rank 0 decides for all
        quiet, late = share[0] <= MOST_FOREIGN, bool(share[1])  # type: ignore[operator]
        if quiet or late:
            return quiet


def _busy_seconds() -> float:
    """All but idle time and waiting for disks, of all cores since the start of the machine."""
    user, nice, system, _, _, interrupts, soft_interrupts, stolen, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")
