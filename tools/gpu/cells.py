"""Tests as rows: those marked gpu, and those of a cluster whose ranks share one device."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from time import monotonic
from typing import Any

from tools.gpu.report import FAILED, Report, Row

ROOT = Path(__file__).parents[2]
WORKERS, CAUSE, ENDING = 5, 600, 10
"""Processes of pytest-xdist on a GPU; characters of a failure that are kept; seconds in which pytest may end."""
TOGETHER = ("--dist", "loadgroup", "--no-loadscope-reorder", "--max-worker-restart", "50")
SMALL = "test_all_end_when_one_is_killed or exact-internvl-fsdp"
"""The tests of a cluster that a try on a CPU runs."""
CLUSTER = (
    "Tests whose ranks share one device over NCCL, compared with plain transformers on a CPU; what no GPU has seen "
    "comes first. Times say nothing about a cluster."
)


def add_tests(report: Report, *, small: bool) -> None:
    """A row of each test marked gpu."""
    report.add("Tests", "Tests marked gpu.", partial(cells, report, "gpu", small=small))


def add_cluster(report: Report, *, small: bool) -> None:
    """A row of each test of a cluster."""
    report.add("Cluster", CLUSTER, partial(cells, report, "cluster", small=small))


def cells(report: Report, marker: str, *, small: bool) -> Iterator[Row]:
    """A row of each test as it ends, then how many passed; what did not end in time is not among them."""
    files = [str(path) for path in sorted(ROOT.glob("tests/**/test_*.py")) if f"mark.{marker}" in path.read_text()]
    options = ["-m", f"{marker} and not slow", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    if find_spec("xdist") is not None and not small:
        options += ["-n", str(WORKERS), *TOGETHER]
    if small:
        options += ["-k", SMALL]
    environment = {"OMNIBAL_RANKS_ON": "cpu" if small else "cuda"} if marker == "cluster" else {}
    counted = {"passed": 0, "failed": 0, "skipped": 0}
    for row in rows_of([*options, *files], report.seconds_left - 2 * ENDING, environment):
        counted[row["outcome"]] += 1
        yield row
    yield {"test": "all", "outcome": ", ".join(f"{number} {outcome}" for outcome, number in counted.items())}


def rows_of(arguments: Sequence[str], seconds: float, environment: dict[str, str]) -> Iterator[Row]:
    """Run pytest in processes of its own, all of which end with it, or when its time is up."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "pytest", "-p", "tools.gpu.cells", *arguments]
    # A worker of pytest-xdist that calls this one would pass as the worker of the pytest that is started.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    process = subprocess.Popen(
        command, cwd=ROOT, env=outside | environment | {"OMNIBAL_ROWS": str(writing)}, pass_fds=[writing],
        start_new_session=True,
    )  # fmt: skip
    os.close(writing)
    try:
        yield from _lines(reading, monotonic() + seconds)
    finally:
        os.close(reading)
        _end(process)


def _lines(reading: int, end: float) -> Iterator[Row]:
    kept = b""
    with DefaultSelector() as selector:
        selector.register(reading, EVENT_READ)
        while selector.select(max(end - monotonic(), 0)):
            found = os.read(reading, 1 << 16)
            if not found:  # pytest has ended
                return
            *lines, kept = (kept + found).split(b"\n")
            yield from map(json.loads, lines)
            if monotonic() > end:
                return


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
        try:
            process.wait(ENDING)
        except subprocess.TimeoutExpired:
            continue
        break
    try:  # ranks that it has left
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def pytest_runtest_logreport(report: Any) -> None:
    """Write the row of a test; pytest calls it in each worker, too, where another process writes the row."""
    over = report.when == "call" or report.outcome != "passed"
    if "OMNIBAL_ROWS" not in os.environ or "PYTEST_XDIST_WORKER" in os.environ or not over:
        return
    row: dict[str, Any] = {"test": report.nodeid.removeprefix("tests/"), "outcome": report.outcome}
    row["s"] = round(report.duration, 1)
    if report.outcome == FAILED:
        row[FAILED] = cause_of(report)
    os.write(int(os.environ["OMNIBAL_ROWS"]), (json.dumps(row) + "\n").encode())


def cause_of(report: Any) -> str:
    """The end of what is said first: of several ranks, the first one that failed is named before the others."""
    crash = getattr(report.longrepr, "reprcrash", None)
    said = report.longreprtext if crash is None else crash.message
    return re.split(r"\nrank \d+:\n", said)[0][-CAUSE:]


def pytest_collectreport(report: Any) -> None:
    """Write a row of a file that cannot be collected."""
    if report.outcome == FAILED and "OMNIBAL_ROWS" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        row = {"test": report.nodeid, "outcome": FAILED, FAILED: cause_of(report)}
        os.write(int(os.environ["OMNIBAL_ROWS"]), (json.dumps(row) + "\n").encode())
