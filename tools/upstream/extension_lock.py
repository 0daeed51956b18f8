"""torch: a process that is killed while it compiles an extension leaves a lock that everybody waits for without end.

Title: cpp_extension.load waits for ever for the lock of a process that was killed (FileBaton)

`torch.utils.file_baton.FileBaton` makes a file `lock` and removes it when the compilation is done. If the process is
killed meanwhile (a pre-empted job, the OOM killer), the file stays, and each later `cpp_extension.load` of the
extension waits in `FileBaton.wait()` without end and without a message. DeepSpeed's op builders load all their
extensions this way. Expected: a lock that ends with its process, as of `flock`, or an error behind a time-out.

Run: python extension_lock.py. A process takes the lock and is killed; another one then waits for it five seconds.
"""

import os
import signal
import subprocess
import sys
import tempfile

TAKE = "import sys, os, signal; from torch.utils.file_baton import FileBaton; FileBaton(sys.argv[1]).try_acquire(); "
TAKE += "os.kill(os.getpid(), signal.SIGKILL)"
WAIT = "import sys; from torch.utils.file_baton import FileBaton; b = FileBaton(sys.argv[1]); "
WAIT += "print('ready', flush=True); b.try_acquire() or b.wait()"


def main() -> int:
    """Whether a process waits for a lock whose owner is dead."""
    with tempfile.TemporaryDirectory() as folder:
        lock = os.path.join(folder, "lock")  # noqa: PTH118
        killed = subprocess.run([sys.executable, "-c", TAKE, lock], check=False)
        assert killed.returncode == -signal.SIGKILL
        with subprocess.Popen([sys.executable, "-c", WAIT, lock], stdout=subprocess.PIPE) as waiting:
            assert waiting.stdout is not None
            waiting.stdout.readline()
            try:
                waiting.wait(5)
                stuck = False
            except subprocess.TimeoutExpired:
                stuck = True
                waiting.kill()
    print(f"a process {'waits for' if stuck else 'does not wait for'} the lock of a dead one")
    return int(stuck)


if __name__ == "__main__":
    sys.exit(main())
