"""A rank that fails between two exchanges tells the others, which would wait for it: all say why, and end."""

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
GRACE_SECONDS: Final = 3.0
"""For a failed rank to be heard, and for a rank that has heard of it to fail by itself, as gloo lets it."""
FAILED, SAID, HEARD = "omnibal/failed", "omnibal/said", "omnibal/heard"


@contextmanager
def failures_reach_all_ranks() -> Iterator[None]:
    """What fails within is told to all ranks; so is, from the first time on, what ends this process otherwise.

    A rank that hears of it and has not failed by itself some seconds later ends with status 1: what it waits for, such
    as an exchange that takes place on a GPU, can neither be finished nor interrupted.
    """
    watch = _watch(id(dist.group.WORLD))
    try:
        yield
    except Exception as error:
        watch.tell(error)
        raise


@lru_cache(maxsize=1)
def _watch(world: int) -> "_Watch":
    """This process's, of the group of all ranks that has this ``id``."""
    return _Watch()


class _Watch:
    """Looks now and then at the store by which the ranks met, which works while collectives wait."""

    def __init__(self) -> None:
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        shared: Any = store()
        while hasattr(shared, "underlying_store"):  # prefixes before it
            shared = shared.underlying_store
        self._store = shared.clone()  # a connection of its own: the other one may be waiting for a peer
        self._has_failed = Event()
        self._show = sys.excepthook
        sys.excepthook = self._at_the_end
        Thread(target=self._look, daemon=True, name="omnibal-watches-ranks").start()

    def tell(self, error: BaseException) -> None:
        """Say once why this rank fails, and stay until all have heard it: the store may end with this process."""
        if self._has_failed.is_set():
            return
        self._has_failed.set()
        with suppress(Exception):  # the store has ended with its rank: this is not the first failure
            if self._store.add(FAILED, 1) == 1:
                self._store.set(SAID, f"rank {self._rank} failed: {said(error)}")  # type: ignore[arg-type]
            ends = time.monotonic() + GRACE_SECONDS
            while self._store.add(HEARD, 0) < self._num_ranks and time.monotonic() < ends:
                time.sleep(POLL_SECONDS / 10)

    def _at_the_end(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """In place of ``sys.excepthook``: failures of backward passes, of optimizers, of whatever the user does."""
        self._show(kind, error, traceback)
        if not isinstance(error, KeyboardInterrupt):
            self.tell(error)

    def _look(self) -> None:
        with suppress(Exception):  # the store has ended with its rank, as at the end of training
            while not self._store.check([SAID]):
                time.sleep(POLL_SECONDS)
            text = self._store.get(SAID).decode()
            if not self._has_failed.is_set():
                print(f"omnibal: rank {self._rank} ends, for {text}", file=sys.stderr, flush=True)
            self._store.add(HEARD, 1)
            if not self._has_failed.wait(GRACE_SECONDS):
                os._exit(1)
