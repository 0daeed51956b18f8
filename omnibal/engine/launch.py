"""The processes of a launch: how they are started, why they end, and that they end together."""

import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread

LAUNCHER = (sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "warning")
ERROR_MARKS = ("Error:", "OutOfMemory")
RUNNER, LAUNCH = "deepspeed", "deepspeed.launcher.launch"


def free_port() -> int:
    """A port that a launch can take for its processes to meet: launches side by side must not share one."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def reason_of(output: str) -> str:
    """The line of a failed launch that says most: its last error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if any(mark in line for mark in ERROR_MARKS) and "ChildFailedError" not in line]
    return (errors or lines or ["the launcher gave no output"])[-1]


def let_segments_grow() -> None:
    """Keep a GPU's memory in one piece, though packs differ in size from step to step; before torch is imported.

    What the user says about torch's allocator stays.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name, which torch reads too
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def keep_extensions_apart() -> None:
    """Let this process and those that it starts keep compiled extensions within their virtual environment.

    By default all environments of a user share a folder, and compile for each other whenever their torch or DeepSpeed
    differ. What the user says in ``TORCH_EXTENSIONS_DIR`` stays; outside virtual environments nothing changes.
    """
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))


def end_with_launcher() -> None:
    """Let this process end when the deepspeed launcher does.

    ``deepspeed`` starts a runner, it starts one launcher a node, and that the training processes. The launcher ends
    them when it gets a signal, but the runner passes none on: a SIGTERM or SIGINT to it alone would leave all of them
    training. Here the first process of a node watches the runner, and hands its end to the launcher; every process
    watches the launcher. Without a deepspeed launcher, or on a system without pidfd_open, nothing is watched.
    """
    launch = os.getppid()
    if not hasattr(os, "pidfd_open") or LAUNCH not in _command(launch):
        return
    _watch(launch, lambda: os.kill(os.getpid(), signal.SIGTERM))
    runner = _parent(launch)
    if os.environ.get("LOCAL_RANK", "0") == "0" and any(RUNNER in Path(word).name for word in _command(runner)[:3]):
        _watch(runner, lambda: os.kill(launch, signal.SIGTERM))


def _watch(process: int, then: Callable[[], None]) -> None:
    """Run ``then`` when a process has ended, from a thread that sleeps until the kernel wakes it."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:  # ended meanwhile
        then()
        return

    def wait() -> None:
        select.select([descriptor], [], [])
        then()

    Thread(target=wait, name=f"watches {process}", daemon=True).start()


def _command(process: int) -> list[str]:
    """The words of a process's command line; none where it cannot be seen."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def _parent(process: int) -> int:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rsplit(")", 1)[1].split()[1])  # the name before it may hold anything
