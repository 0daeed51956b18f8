"""The processes of a launch: what stands in their environment, what they wait for, and that they end with it.

Needs neither torch nor DeepSpeed to be imported: whoever starts processes has neither, and what must stand in the
environment before torch is imported is set from here.

DeepSpeed compiles extensions when it starts. torch lets one process compile an extension and all others wait for the
file ``lock`` beside it to go away, for ever and without a word. A process that is killed while it compiles leaves that
file behind: `ExplainedWait` says what a start waits for, and removes locks whose holders are dead.
"""

import os
import random
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from fcntl import LOCK_EX, flock
from multiprocessing import parent_process
from pathlib import Path
from threading import Event, Thread, current_thread, main_thread
from time import monotonic, sleep, time
from typing import Any, Final

ENDS: Final = (signal.SIGTERM, signal.SIGINT)
AGAIN_SECONDS: Final = 2.0
LAUNCHER: Final = (sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "warning")
ERROR_MARKS: Final = ("Error:", "OutOfMemory")
RUNNER, LAUNCH = "deepspeed", "deepspeed.launcher.launch"  # in the command lines of what starts a launch's processes
PATIENCE_SECONDS: Final = 10.0  # between two looks at what a start waits for
IDLE_SECONDS: Final = 600.0  # no compiler writes nothing for so long: DeepSpeed's largest file takes some minutes
# A process that takes a lock has made the file a moment before the system shows that it has the file open.
SETTLE_SECONDS: Final = 0.1
# File systems of one machine: on others the holder of a lock may run on another machine.
LOCAL_SYSTEMS: Final = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
PROCESSES: Final = Path("/proc")
THREAD: Final = "omnibal-explains-waits"


def free_port() -> int:
    """A port that a launch can take for its processes to meet: launches side by side must not share one.

    It lies below the ports that Linux gives to connections (from 32768): of these, another process may take one before
    the launch does, seconds later.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with socket.socket() as found, suppress(OSError):  # somebody listens there
            found.bind(("127.0.0.1", port))
            return port


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


def locks() -> list[Path]:
    """Locks of extensions in this process's folder."""
    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    if folder is None:
        from torch.utils.cpp_extension import _get_build_directory

        folder = _get_build_directory("", verbose=False)
    return sorted(Path(folder).glob("*/lock"))


def holders(lock: Path) -> list[int]:
    """Processes of this machine that hold a lock: torch's FileBaton keeps the file open as long as it compiles."""
    found = []
    for process in PROCESSES.glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if any(_opened(file) == lock.resolve() for file in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


def _opened(descriptor: Path) -> Path | None:
    with suppress(OSError):  # closed meanwhile
        return descriptor.readlink()
    return None


def is_dead(lock: Path) -> bool:
    """Whether a lock has no holder any more: then it stops everybody for ever."""
    # No process of this machine holds it; and no process of another machine can, or nothing has been written beside
    # the lock for ten minutes. Locks of other users, whose processes cannot be seen, count as held.
    with suppress(OSError):  # gone meanwhile
        found = lock.stat()
        if found.st_uid != os.getuid() or not (PROCESSES / "self/fd").is_dir() or holders(lock):
            return False
        sleep(SETTLE_SECONDS)
        is_same = lock.stat().st_ino == found.st_ino
        return is_same and not holders(lock) and (_is_local(lock) or _idle_seconds(lock.parent) > IDLE_SECONDS)
    return False


def _is_local(path: Path) -> bool:
    """Whether a file lies on a file system of this machine alone, by the mount that it is on."""
    kinds = {}
    # A line of mountinfo: id, parent, device, root, mount point, options, "-", file system, source, options.
    for line in (PROCESSES / "self/mountinfo").read_text().splitlines():
        mount, _, filesystem = line.partition(" - ")
        kinds[mount.split()[4]] = filesystem.split()[0]
    mounts = (str(folder) for folder in path.resolve().parents)
    return next((kinds[mount] for mount in mounts if mount in kinds), "") in LOCAL_SYSTEMS


def _idle_seconds(folder: Path) -> float:
    return time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir()))


def remove_dead_locks() -> None:
    """Remove locks whose holders have died, and say so: every process calls this before it loads extensions."""
    # Whoever starts from now on compiles what is missing. A process that waits already takes the end of a lock for the
    # end of compiling, and ends with torch's error if there is nothing to load: so the line says to start again.
    for lock in locks():
        with suppress(OSError):  # gone meanwhile
            folder = os.open(lock.parent, os.O_RDONLY)
            try:
                flock(folder, LOCK_EX)  # or two processes could see a dead lock, and the later one remove its successor
                if is_dead(lock):
                    lock.unlink()
                    _say(
                        f"{lock} was left by a process that was killed while it compiled, and is removed; start again "
                        "if the extension is missed now"
                    )
            finally:
                os.close(folder)


class ExplainedWait:
    """Until it is closed, a thread of each node's first process says which extension a start waits for."""

    def __init__(self, seconds: float = PATIENCE_SECONDS) -> None:
        self._seconds = seconds
        self._has_started = Event()
        self._seen: dict[Path, str] = {}
        remove_dead_locks()
        if os.environ.get("LOCAL_RANK", "0") == "0":
            Thread(target=self._look_again, daemon=True, name=THREAD).start()

    def close(self) -> None:
        self._has_started.set()

    def _look_again(self) -> None:
        while not self._has_started.wait(self._seconds):
            self.look()

    def look(self) -> None:
        """End waits for dead locks; say of every other lock what holds it, once and whenever that changes."""
        remove_dead_locks()
        for lock in locks():
            name, compilers = lock.parent.name, holders(lock)
            hint = '; with "torch_adam": true among the optimizer\'s params it is not needed' if "adam" in name else ""
            line = f"Waiting for DeepSpeed's extension {name}"
            if compilers:
                line += f" to be compiled by process {compilers[0]}, which happens once and takes minutes{hint}"
            else:
                line += f", which no process of this machine compiles{hint}. If none of another machine does, one was "
                line += f"killed meanwhile: delete {lock} and start again"
            if self._seen.get(lock) != line:
                self._seen[lock] = line
                _say(line)


def _say(text: str) -> None:
    print(f"omnibal: {text}", file=sys.stderr, flush=True)


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
        # A launcher kills what has not ended 30 s behind its SIGTERM: a process that saves first is asked itself.
        _watch(runner, lambda: os.kill(os.getpid() if _saves_first() else launch, signal.SIGTERM))


class EndRequest:
    """SIGTERM and Ctrl-C ask this process to end while the block runs, and do not end it at once.

    A second Ctrl-C, ``AGAIN_SECONDS`` or more behind the first, ends it as ever: a launcher may pass one on twice.
    """

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
            _say(f"{self.signal.name}: the step that runs is finished and saved, then all ranks end")


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
