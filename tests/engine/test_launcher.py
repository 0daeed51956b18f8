"""Training processes end with the launcher that started them."""

import os
import signal
import subprocess
import sys
from threading import Event

from omnibal.engine.launcher import _command, _parent, _watch, end_with_launcher

WAITS = [sys.executable, "-c", "input()"]


def test_the_end_of_a_process_is_noticed():
    ended = Event()
    with subprocess.Popen(WAITS, stdin=subprocess.PIPE) as process:
        _watch(process.pid, ended.set)
        assert not ended.is_set()
        process.kill()
        assert ended.wait(60)
    again = Event()
    _watch(process.pid, again.set)  # it has ended before
    assert again.is_set()


def test_processes_are_known_by_their_command_and_parent():
    with subprocess.Popen(WAITS, stdin=subprocess.PIPE) as process:
        assert _parent(process.pid) == os.getpid()
        process.kill()
    assert _command(os.getpid())[1 : len(sys.orig_argv)] == sys.orig_argv[1:]
    assert _command(process.pid) == []
    assert _parent(process.pid) == 0


def test_only_a_deepspeed_launcher_is_watched(monkeypatch):
    watched = []
    monkeypatch.setattr("omnibal.engine.launcher._watch", lambda process, then: watched.append(process))
    end_with_launcher()
    monkeypatch.setattr(
        "omnibal.engine.launcher._command", lambda process: ["python", "-m", "deepspeed.launcher.launch"]
    )
    assert not watched
    end_with_launcher()
    assert watched == [os.getppid(), _parent(os.getppid())]


def test_a_launcher_that_is_killed_takes_its_processes_along():
    """The chain of a real launch in small: a launcher by its command line, and a process below it."""
    child = "from omnibal.engine.launcher import end_with_launcher as e; e(); print('watches', flush=True); input()"
    launch = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    command = [sys.executable, "-c", launch, "deepspeed.launcher.launch"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "watches\n"
        process.send_signal(signal.SIGKILL)
        assert process.stdout.read() == "", "the pipe closes when the process below has ended"
