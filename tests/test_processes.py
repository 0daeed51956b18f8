"""Processes end with their launcher, and let a GPU's memory grow in one piece."""

import os
import signal
import subprocess
import sys
from threading import Event

import pytest

from omnibal import processes
from omnibal.processes import _command, _parent, _watch, end_with_launcher

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
    monkeypatch.setattr("omnibal.processes._watch", lambda process, then: watched.append(process))
    end_with_launcher()
    monkeypatch.setattr("omnibal.processes._command", lambda process: ["python", "-m", "deepspeed.launcher.launch"])
    assert not watched
    end_with_launcher()
    assert watched == [os.getppid(), _parent(os.getppid())]


def test_a_launcher_that_is_killed_takes_its_processes_along():
    """The chain of a real launch in small: a launcher by its command line, and a process below it."""
    child = "from omnibal.processes import end_with_launcher as e; e(); print('watches', flush=True); input()"
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


def test_a_process_is_asked_to_end_once_and_a_second_interrupt_ends_it(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGTERM)
    with processes.EndRequest() as request:
        assert processes._saves_first() and request.signal is None
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # launchers send it behind an interrupt
        os.kill(os.getpid(), signal.SIGINT)  # and some pass the interrupt on a second time
        assert request.signal == signal.SIGINT
        assert capsys.readouterr().err.count("is finished and saved, then all ranks end") == 1
        monkeypatch.setattr(processes, "AGAIN_SECONDS", 0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before
    assert not processes._saves_first()


def test_the_end_of_the_runner_asks_a_process_that_saves_and_else_the_launcher(monkeypatch):
    watched, sent = {}, []
    monkeypatch.setattr(processes, "_watch", watched.__setitem__)
    monkeypatch.setattr(processes, "_command", lambda process: ["python", "-m", "deepspeed.launcher.launch"])
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append((process, number)))
    end_with_launcher()
    runner = watched[_parent(os.getppid())]
    runner()
    with processes.EndRequest():
        runner()
    assert sent == [(os.getppid(), signal.SIGTERM), (os.getpid(), signal.SIGTERM)]


READS = """
import sys
from torch.utils.data import DataLoader
from omnibal.processes import EndRequest, leave_ends_to_parent

with EndRequest():
    options = {"num_workers": 2, "multiprocessing_context": sys.argv[1], "worker_init_fn": leave_ends_to_parent}
    packs = iter(DataLoader(range(100), **options))
    next(packs), next(packs)  # one of each reader: both have begun
    print(*(worker.pid for worker in packs._workers), flush=True)
    for line in sys.stdin:
        print(next(packs).item(), flush=True)
sys.modules["kept"] = packs  # as a run does that leaves while its loader has samples
"""


@pytest.mark.parametrize("start", ["fork", "forkserver", "spawn"])
def test_readers_outlive_signals_of_others_and_end_with_the_process_that_they_read_for(start):
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, "-c", READS, start], env=os.environ | {"OMP_NUM_THREADS": "1"}, **options
    ) as process:
        readers = [int(reader) for reader in process.stdout.readline().split()]
        for reader in readers:
            for each in processes.ENDS:
                os.kill(reader, each)
        read = []
        for _ in range(20):  # many more than are read ahead
            process.stdin.write("\n")
            process.stdin.flush()
            read.append(int(process.stdout.readline()))
        assert read == list(range(2, 22))
        process.stdin.close()
        assert process.wait(60) == 0
    assert [_command(reader) for reader in readers] == [[], []]
