"""Making things in a thread before they are wanted."""

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

Made = TypeVar("Made")
_END: Final = object()


def ahead(make: Callable[[], Iterator[Made]], count: int) -> Iterator[Made]:
    """What ``make`` yields, made in a thread, ``count`` of them before they are wanted; its error where it fails.

    One is made when it is asked for, so that a run that stops early on all ranks has left none of them waiting for
    another in what is made together.
    """
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
    made: queue.SimpleQueue[Made | Exception | object] = queue.SimpleQueue()

    def work() -> None:
        try:
            things = make()
            while asked.get():
                thing = next(things, _END)
                made.put(thing)
                if thing is _END:
                    return
        except Exception as error:
            made.put(error)

    thread = threading.Thread(target=work, daemon=True, name="omnibal-ahead")
    thread.start()
    for _ in range(count):
        asked.put(True)
    try:
        while (thing := made.get()) is not _END:
            if isinstance(thing, Exception):
                raise thing
            asked.put(True)
            yield thing  # type: ignore[misc]
    finally:
        asked.put(False)
        if not sys.is_finalizing():  # no thread runs any more when Python ends
            thread.join()
