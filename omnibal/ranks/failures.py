"""Ranks that fail, or leave a loop, between two exchanges: the ranks that would wait for them hear of it, and end.

A `Watch` looks at the store by which the ranks met, whose keys are the whole protocol:

- ``failed`` counts failures. Whoever is the first to add one writes ``said``, the reason.
- ``said`` is what every watch looks for. It adds one to ``heard``, and ends its process unless that fails by itself.
- ``heard`` counts the ranks that know: the failed rank stays for them, since the store may end with its process.
- ``left`` names a rank that has left a loop, and the last place of the loop that the rank can come to.

Beside them lie the beats of `omnibal.ranks.watchdog`.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from math import inf
from threading import Event, Thread
from types import TracebackType
from typing import Any, Final

import torch
import torch.distributed as dist

from omnibal.errors import ConfigError, said
from omnibal.ranks.agreement import new_gloo_group, store
from omnibal.ranks.watchdog import Watchdog

POLL_SECONDS: Final = 1.0
# How long a failed rank stays until the others have heard of it, and how long a rank that has heard of a failure may
# take to fail by itself: gloo's collectives raise when a peer has gone, NCCL's do not.
GRACE_SECONDS: Final = 3.0
PATIENCE_SECONDS: Final = 120.0  # a rank that has left a loop may still run the last micro-batch that it received
LONGEST_WAIT: Final = timedelta(minutes=30)  # torch's own for gloo: rank 0 may save a checkpoint meanwhile
FAILED, SAID, HEARD, LEFT = "omnibal/failed", "omnibal/said", "omnibal/heard", "omnibal/left"


@contextmanager
def failures_reach_all_ranks(*, where: str | None = None) -> Iterator[None]:
    """Tell all ranks about an exception inside the block, and from the first call on about any that ends this process.

    A rank that hears of a failure and has not failed by itself some seconds later ends with status 1: an exchange on a
    GPU that waits for the failed rank can neither be finished nor interrupted.

    Args:
        where: The place of this rank in messages, such as ``"rank 3, stage 1"``; by default ``"rank 3"``.
    """
    watching = watch()
    try:
        yield
    except Exception as error:
        watching.tell(error, where)
        raise


def watch() -> "Watch":
    """The watch of this process, which starts with the first call."""
    return _watch(id(dist.group.WORLD))


def keep_watchdog(dog: Watchdog | None) -> None:
    """Let the watch of this process carry a watchdog's beats to the store, in place of an earlier one's."""
    if dog is not None or _watch.cache_info().currsize:
        watch().keep(dog)


@lru_cache(maxsize=1)
def _watch(world: int) -> "Watch":
    # The id is the cache's key only: a new process group of all ranks gets a new watch.
    return Watch()


class Watch:
    """A thread that looks now and then at the store, which works while collectives wait."""

    def __init__(self) -> None:
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        shared: Any = store()
        while hasattr(shared, "underlying_store"):  # torch wraps the store to put prefixes before its keys
            shared = shared.underlying_store
        self._store = shared.clone()  # a connection of its own: the other one may be waiting for a peer
        self._has_failed = Event()
        self._waits: tuple[tuple[int, ...], float] | None = None  # the place that this rank waits at, and since when
        self._dog: Watchdog | None = None
        self._show = sys.excepthook
        sys.excepthook = self._at_the_end
        Thread(target=self._look, daemon=True, name="omnibal-watches-ranks").start()

    def keep(self, dog: Watchdog | None) -> None:
        """Take this watchdog along to the store, in place of an earlier one."""
        if self._dog is not None:
            self._dog.is_closed = True
        if dog is not None:
            dog.visit(self._store)  # at once: a rank that stops in its first second was seen
        self._dog = dog

    def tell(self, error: BaseException, where: str | None = None) -> None:
        """Say once why this rank fails, and stay until all have heard it: the store may end with this process."""
        if self._has_failed.is_set():
            return
        self._has_failed.set()
        text = f"{where or f'rank {self._rank}'} failed: {said(error)}"  # type: ignore[arg-type]
        with suppress(Exception):  # the store has ended with its rank: this is not the first failure
            print(f"omnibal: {text}", file=sys.stderr, flush=True)  # before what other ranks say of it
            self._say(text)
            ends = time.monotonic() + GRACE_SECONDS
            while self._store.add(HEARD, 0) < self._num_ranks and time.monotonic() < ends:
                time.sleep(POLL_SECONDS / 10)

    def _say(self, text: str) -> None:
        if self._store.add(FAILED, 1) == 1:  # the first failure is the cause of the others
            self._store.set(SAID, text)

    @contextmanager
    def waiting_at(self, place: tuple[int, ...]) -> Iterator[None]:
        """End this process if a rank that it waits for within has left behind an earlier place of the same loop."""
        self._waits = place, time.monotonic()
        try:
            yield
        finally:
            self._waits = None

    def leave(self, met: tuple[int, ...], received: tuple[int, ...]) -> None:
        """Tell the others that this rank, which last ``met`` them at a place, may still come to ``received``."""
        self._store.set(LEFT, json.dumps([self._rank, met, received]))

    def left_before(self, place: tuple[int, ...], waited_seconds: float) -> str | None:
        """Which rank has left the loop of this place, whose number comes first, and will not come to the place."""
        with suppress(Exception):  # the store has ended with its rank
            if self._store.check([LEFT]):
                rank, met, received = json.loads(self._store.get(LEFT))
                last = met if waited_seconds > PATIENCE_SECONDS else received
                if last[0] == place[0] and tuple(last) < place:
                    return f"rank {rank} left the loop while rank {self._rank} went on"
        return None

    def _at_the_end(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Replace ``sys.excepthook``, which sees failures of backward passes, of optimizers and of the user's code."""
        self._show(kind, error, traceback)
        if not isinstance(error, KeyboardInterrupt):
            self.tell(error)

    def _look(self) -> None:
        with suppress(Exception):  # the store has ended with its rank, as at the end of training
            while not self._store.check([SAID]):
                dog = self._dog
                time.sleep(POLL_SECONDS if dog is None else min(POLL_SECONDS, dog.beat_seconds))
                if dog is not None:
                    dog.visit(self._store)
                if (waits := self._waits) is not None:
                    place, since = waits
                    if (left := self.left_before(place, time.monotonic() - since)) is not None:
                        self._say(f"all ranks must take part in each step, got {left}")
            text = self._store.get(SAID).decode()
            if not self._has_failed.is_set():
                print(f"omnibal: rank {self._rank} ends, for {text}", file=sys.stderr, flush=True)
            self._store.add(HEARD, 1)
            if not self._has_failed.wait(GRACE_SECONDS):
                os._exit(1)


class Meeting:
    """Where the ranks of a group compare what each is about to do; all of them create it together.

    They exchange data afterwards, which would fail or hang if they differed. Each rank learns the least and the
    greatest record of all ranks in ⌈log₂ ranks⌉ small messages over gloo: 12 for 2560 ranks, where an all-gather in a
    ring takes 2559 one after another.
    """

    def __init__(self, among: dist.ProcessGroup | None = None) -> None:
        self._group = new_gloo_group(among, timeout=LONGEST_WAIT)
        self._ranks = dist.get_process_group_ranks(self._group)
        self._own = self._ranks.index(dist.get_rank())
        self._last: tuple[int, ...] = ()

    def extremes(self, place: Sequence[int], details: Sequence[int] = ()) -> tuple[list[int], list[int]]:
        """The least and the greatest record of all ranks, in the order of their numbers: place, details, rank.

        Args:
            place: Where this rank stands; later places are greater. Once a rank has left behind an earlier place
                (`leave`), those that wait at this one end.
            details: What is compared beside it; as many numbers on all ranks.
        """
        self._last = tuple(place)
        least = greatest = [*place, *details, self._ranks[self._own]]
        distance, num_ranks = 1, len(self._ranks)
        while distance < num_ranks:
            # Each rank sends what it knows to the rank at this distance behind it, and receives from the rank at this
            # distance before it. After the round it knows of the 2 · distance ranks up to itself.
            to, source = self._ranks[(self._own + distance) % num_ranks], self._ranks[self._own - distance]
            received = torch.empty(2, len(least), dtype=torch.int64)
            with watch().waiting_at(self._last):
                try:
                    sending = dist.isend(torch.tensor([least, greatest]), to, group=self._group)
                    dist.recv(received, source, group=self._group)
                    assert sending is not None, "this rank is a member of the group"
                    sending.wait()
                except RuntimeError as error:
                    left = watch().left_before(self._last, inf) or f"rank {source} takes no part any more"
                    raise ConfigError(f"all ranks must take part in each step, got {left} ({said(error)})") from error
            least, greatest = min(least, received[0].tolist()), max(greatest, received[1].tolist())
            distance *= 2
        return least, greatest

    def leave(self, beginning: tuple[int, ...], received: tuple[int, ...]) -> None:
        """Tell the ranks that will wait at a later place of this loop that this rank will not come.

        Args:
            beginning: A place before all others of the loop: where this rank stands if it has met nobody there.
            received: The last place of the loop that this rank can come to.
        """
        with suppress(Exception):  # at the end of the process the store may be gone
            watch().leave(max(self._last, beginning), max(self._last, received))
