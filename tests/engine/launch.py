"""Starts processes that train together, and brings back what a function returned on each of them."""

import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from omnibal.engine.distributed import SHARED_MEMORY, free_port, meet

ROOT = Path(__file__).parents[2]


def launch(num_processes, function, *arguments, timeout_seconds=600):
    """Run ``function`` ("module:name", importable from the repository) on each process; its results, by rank.

    The function gets the arguments, with torch.distributed ready (gloo). A failure of one process ends them all and
    is raised with its output.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(arguments, folder / "arguments.pt")
        port = free_port()
        processes = [_start(function, folder, rank, num_processes, port) for rank in range(num_processes)]
        _wait(processes, folder, timeout_seconds)
        assert not [*SHARED_MEMORY.glob(f"deepspeed_*_{port}_*")], "a launch leaves memory taken"
        return [torch.load(folder / f"result{rank}.pt", weights_only=False) for rank in range(num_processes)]


def _start(function, folder, rank, num_processes, port):
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with (folder / f"log{rank}.txt").open("w") as log:
        command = [sys.executable, "-m", "tests.engine.launch", function, str(folder)]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _wait(processes, folder, timeout_seconds):
    deadline = time.monotonic() + timeout_seconds
    try:
        # The first one that fails matters: the others then wait for it or complain about it.
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
            assert not failed, _output(folder, failed[0])
            assert time.monotonic() < deadline, "processes hang:\n" + "\n".join(
                _output(folder, rank) for rank in range(len(processes))
            )
            time.sleep(0.05)
        for rank, process in enumerate(processes):
            assert process.returncode == 0, _output(folder, rank)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _output(folder, rank):
    return f"rank {rank}:\n{(folder / f'log{rank}.txt').read_text()[-6000:]}"


def _work():
    function, folder = sys.argv[1], Path(sys.argv[2])

    meet("gloo")
    module, name = function.split(":")
    arguments = torch.load(folder / "arguments.pt", weights_only=False)
    result = getattr(importlib.import_module(module), name)(*arguments)
    torch.save(result, folder / f"result{os.environ['RANK']}.pt")
    sys.stdout.flush()
    os._exit(0)  # all is saved; gloo's threads now and then abort an interpreter that is being taken down


if __name__ == "__main__":
    _work()
