"""Lost peers: an exchange that fails since a rank has ended becomes one line that says which ranks are still there.

Whoever loses a peer calls the roll: the key ``roll`` in the store by which the ranks met. Every rank answers once, by
its watch (`omnibal.ranks.failures`) while it waits in an exchange itself; a rank that does not answer is lost.
"""

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from time import monotonic, sleep
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from omnibal.errors import shortened
from omnibal.ranks.watchdog import BEAT, Note

ROLL: Final = "omnibal/roll"
_HERE, _COUNT = "omnibal/here/{}", "omnibal/here"
# What gloo and NCCL say where the process at the other end of a connection has gone; of the store torch has a class.
LOST_MARKS: Final = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "Connection refused"),
    *("Timed out waiting", "remote process exited", "communicator was aborted"),
)
LOOK_SECONDS: Final = 0.1  # how often watches look whether the roll is called; less often of many ranks
RANKS_A_SECOND: Final = 1280  # that look at one store
QUIET_SECONDS: Final = 0.5  # without a further answer, on top of some looks, the roll is over
MOST_SECONDS: Final = 5.0  # a store whose host is gone may not answer at all
MOST_NAMED: Final = 8


def is_lost(error: Exception) -> bool:
    """Whether an error is that of an exchange, or of the store, with a process that has gone."""
    return isinstance(error, dist.DistNetworkError) or any(mark in str(error) for mark in LOST_MARKS)


def lost(error: Exception) -> str:
    """What to say where an exchange has failed, since a rank has ended."""
    # gloo puts the place in its code before what it has to say, and advice behind; torch adds its stack.
    reason = re.sub(r"^\[\S+:\d+\] ", "", (str(error).splitlines() or [""])[0])
    reason = re.split(r"\. (?:This|Did|Connection was) ", reason)[0].rstrip(".")
    return f"all ranks must take part, got {shortened(reason)}; {_roll_in_words()}"


def own_store() -> Store:
    """A connection to the store of this process's own: another one may be waiting for a peer."""
    shared: Any = _get_default_store()
    while hasattr(shared, "underlying_store"):  # torch wraps the store to put prefixes before its keys
        shared = shared.underlying_store
    connection: Store = shared.clone()
    return connection


def look_seconds(num_ranks: int) -> float:
    """Seconds between two looks of a watch."""
    return min(max(LOOK_SECONDS, num_ranks / RANKS_A_SECOND), 1.0)


def answer(store: Store, rank: int) -> None:
    """Say that a rank is there."""
    if store.add(_HERE.format(rank), 1) == 1:
        store.add(_COUNT, 1)


class _Roll(Thread):
    """Calls the roll; a thread, since nobody knows whether the store answers."""

    there: list[int] | None = None  # None: the store has gone

    def __init__(self) -> None:
        super().__init__(daemon=True, name="omnibal-calls-the-roll")
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self.seen = dict[int, str]()  # of ranks that do not answer, what they did last

    def run(self) -> None:
        with suppress(Exception):  # the store has ended with its process
            store = own_store()
            store.set(ROLL, "")
            answer(store, self._rank)
            self._wait(store)
            there = [rank for rank in range(self._num_ranks) if store.check([_HERE.format(rank)])]
            for rank in sorted({*range(self._num_ranks)} - {*there})[:MOST_NAMED]:
                if store.check([BEAT.format(rank)]):
                    _, note = json.loads(store.get(BEAT.format(rank)))
                    self.seen[rank] = "" if note is None else f", last seen in {Note(*note).text()}"
            self.there = there

    def _wait(self, store: Store) -> None:
        """Wait for the answers, no longer than further ones come."""
        count, latest = 0, monotonic()
        while monotonic() - latest < QUIET_SECONDS + 3 * look_seconds(self._num_ranks):
            before, count = count, store.add(_COUNT, 0)
            if count >= self._num_ranks:
                return
            latest = monotonic() if count > before else latest
            sleep(LOOK_SECONDS / 5)


def _roll_in_words() -> str:
    roll = _Roll()
    roll.start()
    roll.join(MOST_SECONDS)
    remedy = "last lines say why, or the kernel's log if memory did not suffice"
    if roll.there is None:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return "the launcher has ended, or its host is gone, and with it the store by which the ranks met"
        return f"rank 0, which keeps the store by which the ranks met, has ended: its {remedy}"
    missing = sorted({*range(dist.get_world_size())} - {*roll.there})
    if not missing:
        return "all ranks answer, so that the network between them has failed"
    named = "; ".join(f"rank {rank}{roll.seen[rank]}" for rank in missing if roll.seen.get(rank))
    was, does, its = "was" if len(roll.there) == 1 else "were", "does", "its"
    if len(missing) > 1:
        does, its = "do", "their"
    return (
        f"{ranks_in_words(roll.there)} {was} there last, {ranks_in_words(missing)} {does} not answer"
        f"{f' ({named})' if named else ''}: {its} {remedy}"
    )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks for a message.

    >>> ranks_in_words([1]), ranks_in_words([0, 2, 3]), ranks_in_words(range(10))
    ('rank 1', 'ranks 0, 2 and 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named, more = list(map(str, ranks[:MOST_NAMED])), len(ranks) - MOST_NAMED
    last = f"{more} more" if more > 0 else named.pop()
    return f"ranks {', '.join(named)} and {last}"
