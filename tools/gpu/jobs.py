"""Jobs that run one after another in a process of their own: one that fails, hangs or ends the process is a row."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

from omnibal.integrations.trainer.memory import FULL, is_full
from tools.gpu.report import FAILED, Row

START_SECONDS = 90  # imports, and a device that begins to answer
MOST_LEFT = 2**30  # bytes of a device that a job may leave taken


class Jobs:
    """A process that runs jobs, and is started anew behind one that left it in doubt.

    Args:
        function: ``"module:name"`` of a generator function of rows.
        keeps: Whether jobs leave a model on the device for the next one; else a process that leaves one is ended.
    """

    def __init__(self, function: str, *, keeps: bool = False) -> None:
        self._function, self._keeps = function, keeps
        self._process: Any = None
        self._link: Any = None

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
            if kind == "row":
                yield {**names, **value}
                continue
            error, is_sound = value
            if error is not None:
                yield {**names, FAILED: error}
            if not is_sound:
                self.end()
            return

    def _start(self) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._link, other = spawning.Pipe()
        self._process = spawning.Process(target=_work, args=(self._function, self._keeps, other))
        self._process.start()
        other.close()
        if not self._link.poll(START_SECONDS) or self._link.recv()[0] != "ready":
            self.end()
            raise RuntimeError(f"{self._function} must start within {START_SECONDS} s, got no answer")

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._link = None


def _work(function: str, keeps: bool, link: Connection) -> None:
    # One device: with several, Trainer would split batches over all of them.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    import torch

    module, name = function.split(":")
    run = getattr(importlib.import_module(module), name)
    link.send(("ready", None))
    while True:
        try:
            job = link.recv()
        except EOFError:  # the other end is gone
            return
        error, is_sound = None, True
        try:
            for row in run(job):
                link.send(("row", row))
        except Exception as raised:
            traceback.print_exc()
            error, is_sound = said(raised)
        gc.collect()
        if torch.cuda.is_available() and is_sound:
            torch.cuda.empty_cache()
            is_sound = keeps or torch.cuda.memory_allocated() < MOST_LEFT
        link.send(("end", (error, is_sound)))


def said(error: Exception) -> tuple[str, bool]:
    """What a row says of an error, and whether the process may go on: behind an error of a kernel each call fails."""
    text = f"{type(error).__name__}: {error}"[:400]
    return (f"{FULL}: {str(error).splitlines()[0][:150]}", True) if is_full(error) else (text, False)
