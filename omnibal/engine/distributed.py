"""How the processes of a launch meet, how they part, and that they end with their launcher."""

import atexit
import os
import select
import signal
from collections.abc import Callable
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from omnibal.errors import ConfigError
from omnibal.ranks.agreement import gloo_group
from omnibal.ranks.extensions import ExplainedWait

SHARED_MEMORY = Path("/dev/shm")
RUNNER, LAUNCH = "deepspeed", "deepspeed.launcher.launch"


def meet(backend: str, **rendezvous: Any) -> None:
    """Let this process communicate with the others of its launch, and leave nothing behind; all ranks together.

    The processes may have met before. The device is set before anything communicates: NCCL sends from the current
    device, which would be the first one of the host for every process.

    Args:
        **rendezvous: Where they meet, as for ``deepspeed.init_distributed``; by default as the launcher says.
    """
    have_met = dist.is_initialized()
    if not have_met:
        end_with_launcher()
    if "LOCAL_RANK" in os.environ:  # processes that MPI started learn theirs when they meet
        set_device()
    elif find_spec("mpi4py") is None:
        raise ConfigError(
            "processes must be started by a launcher, got no LOCAL_RANK; start them with `deepspeed` or `torchrun`"
        )
    with closing(ExplainedWait()):
        deepspeed.init_distributed(dist_backend=backend, verbose=False, **rendezvous)
    set_device()
    gloo_group(dist.group.WORLD)
    if backend == "gloo" and not have_met:
        _release_shared_memory()
        atexit.register(_leave)  # gloo's threads abort a process that ends without having taken leave


def set_device() -> None:
    """Let the calling thread compute on this process's device."""
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))


def _leave() -> None:
    gloo_group.cache_clear()  # or its threads would outlive what follows
    if dist.is_initialized():
        dist.destroy_process_group()


def _release_shared_memory() -> None:
    """Let DeepSpeed's buffers in shared memory end with the launch's processes.

    On a CPU it opens a file of 66 MiB for each process and never removes it: that memory would stay taken until the
    machine restarts. A file that has lost its name lives as long as somebody has it open.
    """
    dist.barrier(gloo_group(dist.group.WORLD))
    for path in SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{os.environ.get('MASTER_PORT')}_*"):
        path.unlink(missing_ok=True)


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
        _watch(runner, lambda: os.kill(launch, signal.SIGTERM))


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
