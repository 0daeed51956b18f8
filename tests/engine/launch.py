"""Starts processes that train together, and brings back what a function returned on each of them."""

import atexit
import contextlib
import functools
import gc
import importlib
import inspect
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import memory
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer
from deepspeed.utils import groups
from torch.distributed import distributed_c10d
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from omnibal import PackLimits, SampleLengths, train
from omnibal.data.epoch import arrange_epoch
from omnibal.dispatch.divide import divide
from omnibal.dispatch.one_cost import longest_first
from omnibal.engine.initialize import meet
from omnibal.processes import free_port
from tests.families.outside import EXAMPLES
from tools.gpu.one_device import rank_environment

COLLECTIVES = (
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("all_gather", "all_gather_into_tensor", "all_reduce", "barrier", "broadcast", "gather", "reduce", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "send", "recv", "isend", "irecv", "new_group"),
)

ROOT = Path(__file__).parents[2]
PRELOADED = (
    *("tests.engine.cases", "omnibal.vlm.tiled", "omnibal.vlm.qwen_vl"),
    *("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject.auto_ep_layer"),
)
"""What ranks inherit: imports take seconds. DeepSpeed's engine imports the last two, and with one torch.compile.

None of it may start a thread, as ``datasets`` does: ranks would then begin as new processes.
"""
WITHOUT_GRADIENT = "an autograd kernel was not registered"
"""What torch says once in a process that runs backward through a collective's tensor."""
RANKS_ON = os.environ.get("OMNIBAL_RANKS_ON", "cpu")
"""The accelerator of launches that name none: with ``cuda``, tests marked ``cluster`` run over NCCL."""
PARENTS = 2
"""Of a group's ranks: each imports torch, transformers and DeepSpeed for ten seconds."""
KEPT_GROUPS = {"cpu": 3, "cuda": 2}
"""Each process holds some hundred megabytes, on a device too."""
MOST_THREADS = {"cpu": 60, "cuda": 1000}
"""Of a process that waits: gloo's stay, some fifteen an engine, and each wakes up a hundred times a second."""
IDLE_SECONDS = {"cpu": 60, "cuda": 600}
"""Behind which processes that wait end: each takes a hundredth of a core, and the next ones are forked at once."""
MOST_SECONDS = {"cpu": 600, "cuda": 180}
"""Of a function: time on a GPU is short, and a run that hangs would take all of it."""


def launch(num_processes, function, *arguments, timeout_seconds=None, accelerator=RANKS_ON, ends=False):
    """Run ``function`` ("module:name", importable from the repository) on each process; its results, by rank.

    The function gets the arguments, with torch.distributed ready (gloo on a CPU, else NCCL, where ranks share a device
    if there are too few). Tensors of results lie on the CPU. Processes with few threads wait for the next launch of as
    many. A failure of one process ends them all and is raised with its output.

    Args:
        ends: Whether processes must end with the function, as where a stage leaves another one waiting.
    """
    key = num_processes, accelerator
    group = _taken(key) or _Group(*key)
    try:
        results = group.run(function, arguments, timeout_seconds or MOST_SECONDS[accelerator], ends=ends)
    except BaseException:
        group.end()
        raise
    if ends or group.num_threads > MOST_THREADS[accelerator]:
        group.end()
        return results
    _groups[key] = group, next(_turns)  # behind those that were used before
    for older in [*_groups][: -KEPT_GROUPS[accelerator]]:
        if left := _taken(older):
            left.end()
    _end_when_idle(key, IDLE_SECONDS[accelerator])
    return results


def _taken(key, turn=None):
    """A group that waits, of this turn if one is named, for whoever asks first: a timer may be the other one."""
    with _lock:
        group, own = _groups.get(key, (None, None))
        return _groups.pop(key)[0] if group and turn in (None, own) else None


def _end_when_idle(key, seconds):
    turn = _groups[key][1]

    def end():
        group = _taken(key, turn)
        if group is not None:
            group.end()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def all_end(num_processes, function, *arguments, timeout_seconds=60):
    """Run a function in which one process ends too early; whether all others end by themselves in time."""
    return bool(how_all_end(num_processes, function, *arguments, timeout_seconds=timeout_seconds))


def how_all_end(num_processes, function, *arguments, timeout_seconds=MOST_SECONDS[RANKS_ON], but=None):
    """What each process says of a function in which one fails, and all but one end by themselves in time; else None."""
    group = _Group(num_processes, RANKS_ON)
    try:
        with pytest.raises(AssertionError, match="rank"):
            group.run(function, arguments, timeout_seconds, ends=True)
        ending = [process for rank, process in enumerate(group.processes) if rank != but]
        if psutil.wait_procs(ending, timeout_seconds)[1]:
            return None
        return [(group._folder / f"log{rank}.txt").read_text() for rank in range(num_processes)]
    finally:
        group.end()


class _Group:
    """Processes that have met, and run one function after the other."""

    def __init__(self, num_processes, accelerator):
        self._name = tempfile.TemporaryDirectory()
        self._folder, self._jobs = Path(self._name.name), itertools.count()
        environment = _environment(accelerator) | {
            "WORLD_SIZE": str(num_processes),
            "LOCAL_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        parents = [_parent(rank % PARENTS, accelerator) for rank in range(num_processes)]  # which import side by side
        self._pipes, self.processes = [], []
        for rank, parent in enumerate(parents):
            pipe = self._folder / f"jobs{rank}"
            os.mkfifo(pipe)
            self._pipes.append(os.open(pipe, os.O_RDWR))
            of_rank = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if accelerator == "cuda":
                of_rank |= rank_environment(rank, num_processes)
            parent.stdin.write(json.dumps([str(self._folder), of_rank]) + "\n")
            parent.stdin.flush()
            found = next(int(line) for line in parent.stdout if line.strip().isdecimal())  # DeepSpeed logs there, too
            self.processes.append(psutil.Process(found))

    def start(self, function, arguments, *, ends):
        job = next(self._jobs)
        torch.save((function, arguments, ends), self._folder / f"job{job}.pt")
        for pipe in self._pipes:
            os.write(pipe, f"{job}\n".encode())
        return [self._folder / f"result{job}.{rank}.pt" for rank in range(len(self.processes))]

    def run(self, function, arguments, timeout_seconds, *, ends):
        results = self.start(function, arguments, ends=ends)
        deadline = time.monotonic() + timeout_seconds
        while not all(path.exists() for path in results):
            # The first one that fails matters: the others then wait for it or complain about it.
            ended = [rank for rank, process in enumerate(self.processes) if not process.is_running()]
            failed = [rank for rank in ended if not results[rank].exists()]
            others = [rank for rank in range(len(results)) if rank not in failed[:1]]
            assert not failed, "\n".join(map(self._output, failed[:1] + others))
            assert time.monotonic() < deadline, "processes hang:\n" + "\n".join(map(self._output, range(len(results))))
            time.sleep(0.05)
        for log in self._folder.glob("log*.txt"):
            assert WITHOUT_GRADIENT not in log.read_text(), "a collective takes a tensor that requires a gradient"
        return [torch.load(path, map_location="cpu", weights_only=False) for path in results]

    @property
    def num_threads(self):
        """Of the process that has most."""
        return max(process.num_threads() for process in self.processes)

    def _output(self, rank):
        return f"rank {rank}:\n{(self._folder / f'log{rank}.txt').read_text()[-6000:]}"

    def end(self):
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self.processes)
        for pipe in self._pipes:
            os.close(pipe)
        self._name.cleanup()


_groups, _turns, _lock = {}, itertools.count(), threading.Lock()
"""Those that wait, each with its turn, the one that was used last at the end."""


_at_exit = contextlib.ExitStack()
atexit.register(_at_exit.close)


@_at_exit.callback
def _end_all():
    for key in [*_groups]:
        if group := _taken(key):
            group.end()


def _environment(accelerator):
    # Products are as exact as a CPU's, and a resumed run can have every bit.
    exact = {"NVIDIA_TF32_OVERRIDE": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if accelerator == "cuda" else {}
    return (
        os.environ
        | exact
        | {
            "DS_ACCELERATOR": accelerator,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
    )


@functools.cache
def _parent(number, accelerator):
    """A process that has imported ``PRELOADED`` and forks every ``PARENTS``-th rank of each group.

    Ranks beside each other have parents of their own: on real ranks strings hash differently, and sets have different
    orders.
    """
    command, options = [sys.executable, "-m", "tests.engine.launch"], {"cwd": ROOT, "env": _environment(accelerator)}
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)
    _at_exit.enter_context(parent)
    _at_exit.callback(parent.kill)
    return parent


def share_gloo_device():
    """Let all gloo groups of the process have one device.

    By itself each group gets one, whose thread wakes up a hundred times a second and outlives the group: some hundred
    of them took a third of the processors.
    """
    init, device = dist.ProcessGroupGloo.__init__, dist.ProcessGroupGloo.create_default_device()

    def init_on_device(group, store, rank, size, timeout):
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [device], timeout
        init(group, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = init_on_device


def check_order():
    """Let whatever communicates before the device is set fail, and objects by the default group: it would be NCCL's."""
    accelerator, device = get_accelerator(), []
    set_device = accelerator.set_device
    # ZeRO 3 sets it once more, as a torch.device.
    accelerator.set_device = lambda index: (isinstance(index, int) and device.append(index), set_device(index))
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


def run_loops():
    """Arrange an epoch and divide samples over ranks: most tests need these loops compiled, or loaded."""
    lengths = SampleLengths([1, 2] * 8, [9, 5] * 8)
    for method in ("balanced", "isf"):
        arrange_epoch(lengths, PackLimits(4, 36), num_replicas=2, method=method).packs  # noqa: B018
    longest_first(np.array([1.0, 2.0, 3.0]), 2)
    divide([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0], [4.0, 8.0]], 2)


def _fork_ranks():
    """Start a rank for each line of standard input, which has its group's folder and its environment; print its id."""
    if os.environ["DS_ACCELERATOR"] == "cpu":
        gc.disable()
        for name in PRELOADED:
            importlib.import_module(name)
        run_loops()
        gc.enable()
        gc.collect()
        gc.freeze()  # ranks, which collect after each job, need not look at what they inherit
    # Threads do not outlive a fork, and CUDA may not be inherited.
    begins_anew = os.environ["DS_ACCELERATOR"] != "cpu" or psutil.Process().num_threads() > 1
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a rank
    for line in sys.stdin:
        rank = os.fork()
        if rank:
            print(rank, flush=True)
            continue
        try:
            _become_rank(*json.loads(line), begins_anew)
        except BaseException:
            sys.excepthook(*sys.exc_info())  # which a rank may have replaced
        finally:
            sys.stdout.flush()
            os._exit(1)


def _become_rank(folder, environment, begins_anew):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(Path(folder) / f"log{environment['RANK']}.txt", os.O_WRONLY | os.O_CREAT)
    for output in (1, 2):
        os.dup2(log, output)
    if begins_anew:
        os.execve(sys.executable, [sys.executable, "-m", "tests.engine.launch", folder], environment)
    os.environ.clear()
    os.environ.update(environment)
    _work(Path(folder))


def _work(folder):
    """Run what the other end of the group's pipe asks for, until it closes."""
    bf16_optimizer.see_memory_usage = lambda *given, **options: None  # collects garbage: a second for each engine
    train.plot_training = lambda *given: None  # tests/report and tests/launch draw what a run draws at its end
    if os.environ["DS_ACCELERATOR"] == "cpu":
        memory.clear_device_cache = lambda garbage_collection=False: None  # of Trainers: garbage is collected below
    check_order()
    share_gloo_device()
    if os.environ["DS_ACCELERATOR"] != "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # whoever reads it must not find the same each time
    meet("gloo" if os.environ["DS_ACCELERATOR"] == "cpu" else "nccl")
    linear, environment = torch.nn.functional.linear, dict(os.environ)
    for line in (folder / f"jobs{os.environ['RANK']}").open():
        job = int(line)
        function, arguments, ends = torch.load(folder / f"job{job}.pt", weights_only=False)
        module, name = function.split(":")
        result = getattr(importlib.import_module(module), name)(*arguments)
        unfinished = folder / f"unfinished{os.environ['RANK']}.pt"
        torch.save(result, unfinished)
        unfinished.rename(folder / f"result{job}.{os.environ['RANK']}.pt")
        del arguments, result
        torch.nn.functional.linear = linear  # ZeRO 3 puts one of its own there, which rounds otherwise, for good
        groups.mpu = None  # a pipeline's grid, which a later engine without a pipeline would take for its own
        forget_trainers(environment)
        gc.collect()
        gc.freeze()  # what was imported meanwhile, too
        get_accelerator().empty_cache()  # which ranks of other launches need
        sys.stdout.flush()
        if ends:
            break
    os._exit(0)  # gloo's threads now and then abort an interpreter that is being taken down


def forget_trainers(environment):
    """Undo what Trainers leave in the process: with DeepSpeed in one of them, a later one would take DeepSpeed, too."""
    os.environ.clear()
    os.environ.update(environment)
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _work(Path(sys.argv[1]))
    else:
        _fork_ranks()
