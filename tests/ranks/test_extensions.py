"""Nobody waits for the lock of a process that is dead, nor without a word for another one."""

import os
import subprocess
import sys
import threading
from contextlib import closing
from threading import Thread

import pytest
from torch.utils.file_baton import FileBaton

from omnibal.ranks import extensions
from omnibal.ranks.extensions import ExplainedWait, holders, remove_dead_locks

HOLDS = "import sys; from torch.utils.file_baton import FileBaton as B; print(B(sys.argv[1]).try_acquire()); input()"
NEVER = 3600


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(extensions, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(extensions, "_is_local", lambda path: True)
    for name in ("compiled", "fused_adam", "some_op"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def lock(folder):
    """That of a process which is dead."""
    lock = folder / "some_op" / "lock"
    lock.touch()
    return lock


def holding(lock):
    """A process that holds a lock as torch does while it compiles."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "True\n"
    return process


def test_a_lock_stays_as_long_as_its_holder_lives(folder, capsys):
    lock = folder / "some_op" / "lock"
    with holding(lock) as process:
        assert holders(lock) == [process.pid]
        remove_dead_locks()
        assert lock.exists()
        process.kill()
    remove_dead_locks()
    assert not lock.exists()
    assert (
        "some_op/lock was left by a process that was killed while it compiled, and is removed"
        in capsys.readouterr().err
    )


def test_a_lock_that_somebody_unseen_may_hold_stays(lock, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: -1)
        remove_dead_locks()
    with monkeypatch.context() as patch:
        patch.setattr(extensions, "PROCESSES", lock.parent)  # a system without /proc
        remove_dead_locks()
    monkeypatch.setattr(extensions, "_is_local", lambda path: False)
    remove_dead_locks()
    assert lock.exists()
    for path in (lock, lock.parent):
        os.utime(path, (0, 0))
    remove_dead_locks()
    assert not lock.exists()


def test_which_file_systems_are_one_machines(tmp_path, monkeypatch):
    (tmp_path / "self").mkdir()
    mounts = {"/": "overlay", str(tmp_path): "nfs4", str(tmp_path / "own"): "ext4"}
    lines = [f"36 35 98:0 / {mount} rw master:1 - {kind} /dev/x rw" for mount, kind in mounts.items()]
    (tmp_path / "self" / "mountinfo").write_text("\n".join(lines))
    monkeypatch.setattr(extensions, "PROCESSES", tmp_path)
    paths = (tmp_path.parent / "lock", tmp_path / "some_op" / "lock", tmp_path / "own" / "some_op" / "lock")
    assert [extensions._is_local(path) for path in paths] == [True, False, True]


def test_what_waits_for_a_dead_lock_ends(folder, capsys):
    lock = folder / "some_op" / "lock"
    with holding(lock) as process:
        wait = ExplainedWait(NEVER)
        waiting = Thread(target=FileBaton(lock).wait)
        waiting.start()
        wait.look()
        wait.look()
        assert waiting.is_alive()
        process.kill()
    wait.look()
    waiting.join()
    wait.close()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert (
        f"Waiting for DeepSpeed's extension some_op to be compiled by process {process.pid}, which happens" in said[0]
    )
    assert "is removed; start again if the extension is missed now" in said[1]


def test_a_wait_for_another_machine_is_explained(lock, capsys, monkeypatch):
    monkeypatch.setattr(extensions, "_is_local", lambda path: False)
    lock.rename(lock.parents[1] / "fused_adam" / "lock")
    wait = ExplainedWait(NEVER)
    wait.look()
    wait.close()
    said = capsys.readouterr().err
    assert "extension fused_adam, which no process of this machine compiles" in said
    assert '"torch_adam": true' in said
    assert said.endswith(
        f"one was killed meanwhile: delete {lock.parents[1] / 'fused_adam' / 'lock'} and start again\n"
    )


def test_one_process_of_a_machine_speaks_until_the_start_is_over(folder, capsys, monkeypatch):
    looked = []
    monkeypatch.setattr(ExplainedWait, "look", lambda self: (looked.append(None), self.close()))
    for local_rank, times in (("1", 0), ("0", 1)):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        wait = ExplainedWait(0)
        for thread in explaining():
            thread.join()
        assert len(looked) == times
        assert wait._has_started.is_set() == (times > 0)
    with closing(ExplainedWait(NEVER)):
        assert [thread.is_alive() for thread in explaining()] == [True]
    for thread in explaining():
        thread.join()
    assert len(looked) == 1


def explaining():
    """Threads that explain a start."""
    return [thread for thread in threading.enumerate() if thread.name == extensions.THREAD]
