"""Ranks that fail, or leave a loop, between two exchanges: the ranks that would wait for them hear of it, and end.

A `Watch` looks at the store by which the ranks met, whose keys are the whole protocol:

- ``failed`` counts failures. Whoever is the first to add one writes ``said``, the reason.
- ``said`` is what every watch looks for. It adds one to ``heard``, and ends its process unless that fails by itself.
- ``heard`` counts the ranks that know: the failed rank stays for them, since the store may end with its process.
- ``roll`` asks who is there, where an exchange has lost a peer: every rank answers once, by its watch while it waits in
  an exchange itself; a rank that does not answer is lost.
- ``left`` names a rank that has left a loop, and the last position of the loop that the rank can come to.

Beside them lie the beats of `omnibal.ranks.watchdog`.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, wraps
from threading import Event, Lock, Thread
from time import monotonic, sleep
from types import TracebackType
from typing import Any, Final, TypeVar, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from omnibal.errors import OmnibalError, said, shortened
from omnibal.processes import start_until_exit
from omnibal.ranks.watchdog import Watchdog

F = TypeVar("F", bound=Callable[..., Any])
POLL_SECONDS: Final = 1.0
# How long a failed rank stays until the others have heard of it, and how long a rank that has heard of a failure may
# take to fail by itself: gloo's collectives raise when a peer has gone, NCCL's do not.
GRACE_SECONDS: Final = 3.0
FAILED, SAID, HEARD, LEFT = "omnibal/failed", "omnibal/said", "omnibal/heard", "omnibal/left"
PATIENCE_SECONDS: Final = 120.0  # a rank that has left a loop may still run the last micro-batch that it received
ROLL, _HERE, _COUNT = "omnibal/roll", "omnibal/here/{}", "omnibal/here"
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


@contextmanager
def failures_reach_all_ranks(*, where: str | None = None) -> Iterator[None]:
    """Tell all ranks of an exception inside the block, and from the first call on of any that ends this process."""
    # A rank that hears of a failure and has not failed by itself some seconds later ends with status 1: an exchange on
    # a GPU that waits for the failed rank can neither be finished nor interrupted.
    watching = watch()
    watching.hear_the_end()
    try:
        yield
    except Exception as error:
        watching.tell(error, where)
        raise


@contextmanager
def lost_ranks_named(where: str | None = None) -> Iterator[None]:
    """Turn what an exchange raises inside, where a rank has ended, into one line that says which ranks are there."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistNetworkError) and not any(mark in str(error) for mark in LOST_MARKS):
            raise
        # gloo puts the place in its code before what it has to say, and advice behind; torch adds its stack.
        reason = re.sub(r"^\[\S+:\d+\] ", "", (str(error).splitlines() or [""])[0])
        reason = re.split(r"\. (?:This|Did|Connection was) ", reason)[0].rstrip(".")
        text, watching = f"all ranks must take part, got {shortened(reason)}; {_roll_in_words()}", watch()
        watching.tell(OmnibalError(text), where)  # those that have not lost a peer themselves wait for this rank
        # Not from the error, whose text is a stack of C++.
        raise OmnibalError(f"{where or f'rank {dist.get_rank()}'}: {text}") from None


def naming_lost_ranks(method: F) -> F:
    """Run a method under `lost_ranks_named`, with the name that its object has as ``where``."""

    @wraps(method)
    def named(self: Any, *args: Any, **options: Any) -> Any:
        with lost_ranks_named(self.where):
            return method(self, *args, **options)

    return cast(F, named)


def watch() -> "Watch":
    """The watch of this process, which starts with the first call."""
    return _watch(id(dist.group.WORLD))


def keep_watchdog(dog: Watchdog | None) -> None:
    """Let the watch of this process carry a watchdog's beats to the store, in place of an earlier one's."""
    if dog is not None:
        watch().hear_the_end()
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
        self._store, self._has_answered = _own_store(), False
        self._has_failed = Event()
        self._word = Lock()  # who takes it says why this process ends: its main thread, or the watch that heard of it
        self._waits: tuple[tuple[int, ...], float] | None = None  # the position this rank waits at, and since when
        self._dog: Watchdog | None = None
        self._show: Any = None
        thread, self._ends = Thread(target=self._look, daemon=True, name="omnibal-watches-ranks"), Event()
        start_until_exit(thread, self._ends.set)

    def hear_the_end(self) -> None:
        if self._show is None:
            self._show, sys.excepthook = sys.excepthook, self._at_the_end

    def keep(self, dog: Watchdog | None) -> None:
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
            self._print(text)  # before what other ranks say of it
            self._say(text)
            ends = monotonic() + GRACE_SECONDS
            while self._store.add(HEARD, 0) < self._num_ranks and monotonic() < ends:
                sleep(POLL_SECONDS / 10)

    def _say(self, text: str) -> None:
        if self._store.add(FAILED, 1) == 1:  # the first failure is the cause of the others
            self._store.set(SAID, text)

    @contextmanager
    def waiting_at(self, position: tuple[int, ...]) -> Iterator[None]:
        """End this process if a rank that it waits for within has left the same loop before this position."""
        self._waits = position, monotonic()
        try:
            yield
        finally:
            self._waits = None

    def leave(self, met: tuple[int, ...], received: tuple[int, ...]) -> None:
        """Tell the others that this rank, which last ``met`` them at a position, may still come to ``received``."""
        self._store.set(LEFT, json.dumps([self._rank, met, received]))

    def left_before(self, position: tuple[int, ...], waited_seconds: float) -> str | None:
        """Which rank has left the loop of this position, whose number comes first, and will not come to it."""
        if not self._store.check([LEFT]):
            return None
        rank, met, received = json.loads(self._store.get(LEFT))
        last = met if waited_seconds > PATIENCE_SECONDS else received
        is_behind = last[0] == position[0] and tuple(last) < position
        return f"rank {rank} left the loop while rank {self._rank} went on" if is_behind else None

    def _print(self, text: str) -> None:
        if self._word.acquire(blocking=False):
            print(f"omnibal: {text}", file=sys.stderr, flush=True)

    def _at_the_end(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Replace ``sys.excepthook``, which sees failures of backward passes, of optimizers and of the user's code."""
        self._show(kind, error, traceback)
        if not isinstance(error, KeyboardInterrupt):
            self.tell(error)

    def _look(self) -> None:
        with suppress(Exception):  # the store has ended with its rank, as at the end of training
            while not self._store.check([SAID]):
                dog = self._dog
                if self._ends.wait(_look_seconds(self._num_ranks)):
                    return
                if not self._has_answered and self._store.check([ROLL]):
                    _answer(self._store, self._rank)
                    self._has_answered = True
                if dog is not None:
                    dog.visit(self._store)
                waits = self._waits
                left = None if waits is None else self.left_before(waits[0], monotonic() - waits[1])
                if left is not None:
                    self._say(f"all ranks must take part in each step, got {left}")
            text = self._store.get(SAID).decode()
            if not self._has_failed.is_set():
                self._print(f"rank {self._rank} ends, for {text}")
            self._store.add(HEARD, 1)
            if not self._has_failed.wait(GRACE_SECONDS):
                os._exit(1)


def _own_store() -> Store:
    """A connection to the store of this process's own: another one may be waiting for a peer."""
    shared: Any = _get_default_store()
    while hasattr(shared, "underlying_store"):  # torch wraps the store to put prefixes before its keys
        shared = shared.underlying_store
    connection: Store = shared.clone()
    return connection


def _look_seconds(num_ranks: int) -> float:
    return min(max(LOOK_SECONDS, num_ranks / RANKS_A_SECOND), 1.0)


def _answer(store: Store, rank: int) -> None:
    if store.add(_HERE.format(rank), 1) == 1:
        store.add(_COUNT, 1)


def _roll_in_words() -> str:
    """Call the roll, and say who answers."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    there: list[int] = []

    def call() -> None:
        with suppress(Exception):  # the store has ended with its process
            store = _own_store()
            store.set(ROLL, "")
            _answer(store, rank)
            # Wait for the answers, no longer than further ones come.
            count, latest = 0, monotonic()
            while count < num_ranks and monotonic() - latest < QUIET_SECONDS + 3 * _look_seconds(num_ranks):
                before, count = count, store.add(_COUNT, 0)
                latest = monotonic() if count > before else latest
                sleep(LOOK_SECONDS / 5)
            there[:] = [other for other in range(num_ranks) if store.check([_HERE.format(other)])]

    caller = Thread(target=call, daemon=True, name="omnibal-calls-the-roll")  # nobody knows whether the store answers
    caller.start()
    caller.join(MOST_SECONDS)
    remedy = "last lines say why, or the kernel's log if memory did not suffice"
    if not there:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return "the launcher has ended, or its host is gone, and with it the store by which the ranks met"
        return f"rank 0, which keeps the store by which the ranks met, has ended: its {remedy}"
    missing = sorted({*range(num_ranks)} - {*there})
    if not missing:
        return "all ranks answer, so that the network between them has failed"
    was = "was" if len(there) == 1 else "were"
    does, its = ("does", "its") if len(missing) == 1 else ("do", "their")
    return f"{ranks_in_words(there)} {was} there last, {ranks_in_words(missing)} {does} not answer: {its} {remedy}"


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
