"""What the training processes of a deepspeed launch do when the launcher is gone."""

import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Thread

RUNNER, LAUNCH = "deepspeed", "deepspeed.launcher.launch"


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
