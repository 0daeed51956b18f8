"""A rank that fails between two exchanges tells the others, which would wait for it: all say why, and end."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from threading import Event, Thread
from types import TracebackType
from typing import Any, Final

import torch.distributed as dist

from omnibal.errors import said
from omnibal.ranks.hosts import store

POLL_SECONDS: Final = 1.0
# How long a failed rank stays until the others have heard of it, and how long a rank that has heard of a failure may
# take to fail by itself: gloo's collectives raise when a peer has gone, NCCL's do not.
GRACE_SECONDS: Final = 3.0
PATIENCE_SECONDS: Final = 120.0  # a rank that has left a loop may still run the last micro-batch that it received
FAILED, SAID, HEARD, LEFT = "omnibal/failed", "omnibal/said", "omnibal/heard", "omnibal/left"


@contextmanager
def failures_reach_all_ranks() -> Iterator[None]:
    """Tell all ranks about an exception inside the block, and from the first call on about any that ends this process.

    A rank that hears of a failure and has not failed by itself some seconds later ends with status 1: an exchange on a
    GPU that waits for the failed rank can neither be finished nor interrupted.
    """
    watching = watch()
    try:
        yield
    except Exception as error:
        watching.tell(error)
        raise


def watch() -> "Watch":
    """The watch of this process, which starts with the first call."""
    return _watch(id(dist.group.WORLD))


@lru_cache(maxsize=1)
def _watch(world: int) -> "Watch":
    # The id is the cache's key only: a new process group of all ranks gets a new watch.
    return Watch()


class Watch:
    """Looks now and then at the store by which the ranks met, which works while collectives wait."""

    def __init__(self) -> None:
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        shared: Any = store()
        while hasattr(shared, "underlying_store"):  # torch wraps the store to put prefixes before its keys
            shared = shared.underlying_store
        self._store = shared.clone()  # a connection of its own: the other one may be waiting for a peer
        self._has_failed = Event()
        self._waits: tuple[tuple[int, ...], float] | None = None
        self._show = sys.excepthook
        sys.excepthook = self._at_the_end
        Thread(target=self._look, daemon=True, name="omnibal-watches-ranks").start()

    def tell(self, error: BaseException) -> None:
        """Say once why this rank fails, and stay until all have heard it: the store may end with this process."""
        if self._has_failed.is_set():
            return
        self._has_failed.set()
        with suppress(Exception):  # the store has ended with its rank: this is not the first failure
            self._say(f"rank {self._rank} failed: {said(error)}")  # type: ignore[arg-type]
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
        """Tell the others that this rank has left a loop, the first number of a place.

        Args:
            met: The last place where this rank took part.
            received: The last place that it may still come to, with what it has received in the loop.
        """
        self._store.set(LEFT, json.dumps([self._rank, met, received]))

    def left_before(self, place: tuple[int, ...], waited_seconds: float) -> str | None:
        """Which rank has left the loop and will not come to a place; None where no rank has."""
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
                time.sleep(POLL_SECONDS)
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
