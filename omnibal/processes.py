"""The processes of a launch: what stands in their environment, what they wait for, and that they end with it.

Needs neither torch nor DeepSpeed to be imported: whoever starts processes has neither, and what must stand in the
environment before torch is imported is set from here.
"""

import atexit
import os
import random
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread, current_thread, main_thread
from time import monotonic
from typing import Any, Final

ENDS: Final = (signal.SIGTERM, signal.SIGINT)
AGAIN_SECONDS: Final = 2.0
LAUNCHER: Final = (sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "warning")
ERROR_MARKS: Final = ("Error:", "OutOfMemory")
RUNNER, LAUNCH = "deepspeed", "deepspeed.launcher.launch"  # in the command lines of what starts a launch's processes
PROCESSES: Final = Path("/proc")
MOST_SECONDS: Final = 5.0  # that the end of a process waits for a thread


def free_port() -> int:
    """A port that a launch can take for its processes to meet: launches side by side must not share one."""
    # Linux gives ports from 32768 on to connections: another process may take one of these before the launch does.
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with socket.socket() as found, suppress(OSError):  # somebody listens there
            found.bind(("127.0.0.1", port))
            return port


def start_until_exit(thread: Thread, stop: Callable[[], None]) -> Callable[[], None]:
    """Start a daemon thread that stops before Python ends; call what this gives when it has stopped by itself."""
    # Python ends daemon threads where they next want its lock. Inside C++, as torch's operators and its store are, that
    # aborts the process: "terminate called without an active exception".

    def end() -> None:
        stop()
        thread.join(MOST_SECONDS)

    atexit.register(end)
    thread.start()
    return partial(atexit.unregister, end)


def reason_of(output: str) -> str:
    """The line of a failed launch that says most: its last error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if any(mark in line for mark in ERROR_MARKS) and "ChildFailedError" not in line]
    return (errors or lines or ["the launcher gave no output"])[-1]


def let_segments_grow() -> None:
    """Keep a GPU's memory in one piece, though packs differ in size from step to step; before torch is imported."""
    # What the user says about torch's allocator stays.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name, which torch reads too
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def end_with_launcher() -> None:
    """Let this process end when the deepspeed launcher does."""
    # `deepspeed` starts a runner, it starts one launcher a node, and that the training processes. The launcher ends
    # them when it gets a signal, but the runner passes none on: a SIGTERM or SIGINT to it alone would leave all of them
    # training. Here the first process of a node watches the runner, and hands its end to the launcher; every process
    # watches the launcher. Without a deepspeed launcher, or on a system without pidfd_open, nothing is watched.
    launch = os.getppid()
    if not hasattr(os, "pidfd_open") or LAUNCH not in _command(launch):
        return
    _watch(launch, lambda: os.kill(os.getpid(), signal.SIGTERM))
    runner = _parent(launch)
    if os.environ.get("LOCAL_RANK", "0") == "0" and any(RUNNER in Path(word).name for word in _command(runner)[:3]):
        # A launcher kills what has not ended 30 s behind its SIGTERM: a process that saves first is asked itself.
        _watch(runner, lambda: os.kill(os.getpid() if _saves_first() else launch, signal.SIGTERM))


class EndRequest:
    """SIGTERM and Ctrl-C ask this process to end while the block runs, and do not end it at once."""

    # A second Ctrl-C, `AGAIN_SECONDS` or more behind the first, ends it as ever: a launcher may pass one on twice.

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "EndRequest":
        if current_thread() is main_thread():  # no other thread can set what a signal does
            self._before = {each: signal.signal(each, self._note) for each in ENDS}
        return self

    def __exit__(self, *error: object) -> None:
        for each, before in self._before.items():
            signal.signal(each, before)

    def _note(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self.signal is not None and monotonic() - self._since > AGAIN_SECONDS:
            raise KeyboardInterrupt
        if self.signal is None:
            self.signal, self._since = signal.Signals(number), monotonic()
            text = f"omnibal: {self.signal.name}: the step that runs is finished and saved, then all ranks end"
            print(text, file=sys.stderr, flush=True)


def leave_ends_to_parent(worker: int) -> None:
    """Let a process that reads samples end with the process that it reads for: a DataLoader's ``worker_init_fn``."""
    # Launchers and terminals send SIGTERM and SIGINT to all processes below them, of which some save before they end.
    # A parent that ends sends SIGTERM to the readers that it has left, and waits for them: that one must be heard.
    creator = parent_process()  # the process above may be multiprocessing's fork server
    assert creator is not None, "a DataLoader's processes are multiprocessing's"
    parent = creator.pid
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A thread that is there already would get SIGTERM in place of the one that waits for it: torch's handler then
    # exits for its parent, and ends for others. Forked processes have one thread, others as many as their imports made.
    if len([*(PROCESSES / "self/task").iterdir()]) > 1:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    Thread(target=wait, daemon=True, name="omnibal-waits-for-end").start()


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


def _saves_first() -> bool:
    return isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), EndRequest)


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
