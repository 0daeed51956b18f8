"""The processes of a launch: how they are started, what they wait for, why they end, and that they end together."""

import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread, Timer

LAUNCHER = (sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "warning")
ERROR_MARKS = ("Error:", "OutOfMemory")
RUNNER, LAUNCH = "deepspeed", "deepspeed.launcher.launch"
PATIENCE_SECONDS = 10.0
"""How long a start may take before it is explained."""


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


@contextmanager
def explained_wait(seconds: float = PATIENCE_SECONDS) -> Iterator[Timer]:
    """Say on standard error what is waited for, if it takes long and an extension is the reason.

    The first process of each node speaks. torch lets one process compile and all others wait for the file ``lock`` to
    go away, for ever and without a word; a process that is killed while it compiles leaves that file behind.
    """
    timer = Timer(seconds, _explain)
    timer.daemon = True
    if os.environ.get("LOCAL_RANK", "0") == "0":
        timer.start()
    try:
        yield timer
    finally:
        timer.cancel()


def _explain() -> None:
    from torch.utils.cpp_extension import _get_build_directory

    for lock in Path(_get_build_directory("", verbose=False)).glob("*/lock"):
        name = lock.parent.name
        spared = '; with "torch_adam": true among the optimizer\'s params it is not needed' if "adam" in name else ""
        print(
            f"Waiting for DeepSpeed's extension {name} to be compiled, which happens once and takes minutes{spared}. "
            f"If no process compiles it, one was killed meanwhile: delete {lock}",
            file=sys.stderr,
            flush=True,
        )
