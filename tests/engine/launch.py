"""Starts processes that train together, and brings back what a function returned on each of them."""

import functools
import importlib
import inspect
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed import distributed_c10d

from omnibal.engine.distributed import SHARED_MEMORY, meet
from omnibal.engine.launch import free_port

COLLECTIVES = (
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("all_gather", "all_gather_into_tensor", "all_reduce", "barrier", "broadcast", "gather", "reduce", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "send", "recv", "isend", "irecv", "new_group"),
)

ROOT = Path(__file__).parents[2]


def launch(num_processes, function, *arguments, timeout_seconds=600, accelerator="cpu"):
    """Run ``function`` ("module:name", importable from the repository) on each process; its results, by rank.

    The function gets the arguments, with torch.distributed ready (gloo on a CPU, else NCCL). A failure of one process
    ends them all and is raised with its output.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(arguments, folder / "arguments.pt")
        port = free_port()
        processes = [_start(function, folder, rank, num_processes, port, accelerator) for rank in range(num_processes)]
        _wait(processes, folder, timeout_seconds)
        assert not [*SHARED_MEMORY.glob(f"deepspeed_*_{port}_*")], "a launch leaves memory taken"
        return [torch.load(folder / f"result{rank}.pt", weights_only=False) for rank in range(num_processes)]


def _start(function, folder, rank, num_processes, port, accelerator):
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": accelerator,
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


def check_order():
    """Let whatever communicates before the device is set fail, and objects by the default group: it would be NCCL's."""
    accelerator, device = get_accelerator(), []
    set_device = accelerator.set_device
    accelerator.set_device = lambda index: (device.append(index), set_device(index))
    for name in COLLECTIVES:
        collective = getattr(distributed_c10d, name)
        checked = _checked(collective, device, is_of_objects="object" in name)
        setattr(dist, name, checked)
        setattr(distributed_c10d, name, checked)


def _checked(collective, device, *, is_of_objects):
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def checked(*args, **kwargs):
        assert device == [int(os.environ["LOCAL_RANK"])] * len(device) != [], "the device must be set before"
        if is_of_objects:
            group = signature.bind(*args, **kwargs).arguments.get("group")
            assert group not in (None, dist.group.WORLD), f"{collective.__name__} must not use the default group"
        return collective(*args, **kwargs)

    return checked


def _work():
    function, folder = sys.argv[1], Path(sys.argv[2])
    check_order()
    meet("gloo" if os.environ["DS_ACCELERATOR"] == "cpu" else "nccl")
    module, name = function.split(":")
    arguments = torch.load(folder / "arguments.pt", weights_only=False)
    result = getattr(importlib.import_module(module), name)(*arguments)
    torch.save(result, folder / f"result{os.environ['RANK']}.pt")
    sys.stdout.flush()
    os._exit(0)  # all is saved; gloo's threads now and then abort an interpreter that is being taken down


if __name__ == "__main__":
    _work()
