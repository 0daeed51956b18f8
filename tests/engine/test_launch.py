"""Training processes end with the launcher that started them, and keep what they compile to themselves."""

import os
import signal
import subprocess
import sys
from threading import Event

import pytest

from omnibal.engine.distributed import _command, _parent, _watch, end_with_launcher
from omnibal.engine.launch import keep_extensions_apart

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
    monkeypatch.setattr("omnibal.engine.distributed._watch", lambda process, then: watched.append(process))
    end_with_launcher()
    monkeypatch.setattr(
        "omnibal.engine.distributed._command", lambda process: ["python", "-m", "deepspeed.launcher.launch"]
    )
    assert not watched
    end_with_launcher()
    assert watched == [os.getppid(), _parent(os.getppid())]


def test_a_launcher_that_is_killed_takes_its_processes_along():
    """The chain of a real launch in small: a launcher by its command line, and a process below it."""
    child = "from omnibal.engine.distributed import end_with_launcher as e; e(); print('watches', flush=True); input()"
    launch = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    command = [sys.executable, "-c", launch, "deepspeed.launcher.launch"]
    options = {"env": os.environ | {"DS_ACCELERATOR": "cpu"}}  # or DeepSpeed says in its output what it found
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options) as process:
        assert process.stdout.readline() == "watches\n"
        process.send_signal(signal.SIGKILL)
        assert process.stdout.read() == "", "the pipe closes when the process below has ended"


WITHOUT_TORCH = """
import importlib.abc, importlib.machinery, os, sys

class Torch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "torch" else None
    def exec_module(self, module):
        print(os.environ.get("PYTORCH_ALLOC_CONF"))
        sys.exit()

sys.meta_path.insert(0, Torch())
import omnibal.{}
"""


@pytest.mark.parametrize("module", ["train", "trials; omnibal.trials.main()"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "None"),
    ],
)
def test_when_torch_is_imported_its_segments_may_grow(module, given, expected):
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name} | given
    command = [sys.executable, "-c", WITHOUT_TORCH.format(module)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{expected}\n"


@pytest.mark.parametrize("given", [None, "elsewhere"])
def test_extensions_are_kept_in_the_virtual_environment(given, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", given or "")
    if given is None:
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    keep_extensions_apart()
    assert os.environ.get("TORCH_EXTENSIONS_DIR") == given
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    keep_extensions_apart()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == (given or str(tmp_path / "torch_extensions"))
