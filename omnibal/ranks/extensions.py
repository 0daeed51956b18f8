"""Extensions that DeepSpeed compiles when it starts: which lock a process waits for, and whether its holder lives.

torch lets one process compile an extension and all others wait for the file ``lock`` beside it to go away, for ever and
without a word. A process that is killed while it compiles leaves that file behind.
"""

import os
import sys
from contextlib import suppress
from fcntl import LOCK_EX, flock
from pathlib import Path
from threading import Event, Thread
from time import sleep, time
from typing import Final

PATIENCE_SECONDS: Final = 10.0  # between two looks at what a start waits for
IDLE_SECONDS: Final = 600.0  # no compiler writes nothing for so long: DeepSpeed's largest file takes some minutes
# A process that takes a lock has made the file a moment before the system shows that it has the file open.
SETTLE_SECONDS: Final = 0.1
# File systems of one machine: on others the holder of a lock may run on another machine.
LOCAL_SYSTEMS: Final = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
PROCESSES: Final = Path("/proc")
THREAD: Final = "omnibal-explains-waits"


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
