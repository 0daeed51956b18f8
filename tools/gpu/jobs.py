"""Jobs that run one after another in a process of their own: one that fails, hangs or ends the process is a row."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

from tools.gpu.report import FAILED, Row

START_SECONDS = 90  # imports, and a device that begins to answer


class Jobs:
    """A process that runs jobs, and is started anew behind one that left it in doubt.

    Args:
        function: ``"module:name"`` of a generator function of rows.
    """

    def __init__(self, function: str) -> None:
        self._function, self._process, self._link = function, None, None

    def rows(self, job: Any, seconds: float, **names: Any) -> Iterator[Row]:
        """The rows of one job, each with ``names`` in front; a row that says so if it failed.

        Args:
            job: The argument of the function.
            seconds: The time of this job, the start of a process aside.
        """
        if self._process is None:
            self._start()
        link = self._link
        link.send(job)
        end = monotonic() + seconds
        while True:
            try:
                if not link.poll(max(end - monotonic(), 0)):
                    self.end()
                    yield {**names, FAILED: f"its {seconds:.0f} s were up"}
                    return
                kind, value = link.recv()
            except (EOFError, OSError):
                self._process.join()
                code = self._process.exitcode
                self.end()
                yield {**names, FAILED: f"its process ended with {code}"}
                return
            if kind == "end":
                return
            if kind == "row":
                yield {**names, **value}
                continue
            yield {**names, FAILED: value}
            if kind == "broken":
                self.end()
            return

    def _start(self) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._link, other = spawning.Pipe()
        self._process = spawning.Process(target=_work, args=(self._function, other))
        self._process.start()
        other.close()
        if not self._link.poll(START_SECONDS) or self._link.recv() != "ready":
            self.end()
            raise RuntimeError(f"{self._function} must start within {START_SECONDS} s, got no answer")

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._link = None


def _work(function: str, link: Connection) -> None:
    import torch

    module, name = function.split(":")
    run = getattr(importlib.import_module(module), name)
    link.send("ready")
    while True:
        try:
            job = link.recv()
        except EOFError:  # the other end is gone
            return
        try:
            for row in run(job):
                link.send(("row", row))
            answer: tuple[str, Any] = "end", None
        except torch.OutOfMemoryError as error:  # the device is as good as before
            answer = "failed", f"out of memory: {str(error).splitlines()[0]}"
        except Exception as error:  # behind an error of a kernel each call of the process fails
            traceback.print_exc()
            answer = "broken", f"{type(error).__name__}: {error}"[:400]
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        link.send(answer)
