"""The processes of an emulated cluster: DeepSpeed's engine with layers that sleep.

python -m omnibal.emulator.engine FOLDER, where the folder holds the task; forks a process per device.
"""

import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import active_children
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any, ClassVar, Final

import torch.distributed as dist
from deepspeed.runtime.pipe import schedule as pipe
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from omnibal.config import ModelSection, OmnibalSection, layout_of
from omnibal.emulator.device import DOWN, UP, Clocks, Device, DeviceReport, StepLog
from omnibal.emulator.layers import EmulatedLoader, EmulatedModel, EmulatedModule
from omnibal.emulator.run import FAILURE_FILE, TASK_FILE, EmulationTask, report_file
from omnibal.engine.distributed import meet
from omnibal.engine.engine import OmnibalEngine
from omnibal.engine.initialize import build_engine
from omnibal.engine.resolve import ResolvedRun
from omnibal.engine.table import RunEntry
from omnibal.errors import OmnibalError
from omnibal.pipeline.schedule import Operation

TRANSFERS: Final = {
    pipe.SendActivation: Operation.SEND_ACTIVATION,
    pipe.RecvActivation: Operation.RECEIVE_ACTIVATION,
    pipe.SendGrad: Operation.SEND_GRADIENT,
    pipe.RecvGrad: Operation.RECEIVE_GRADIENT,
}
"""Our operations by DeepSpeed's blocking instructions."""


def _timed(operation: Operation, run: Callable[..., None]) -> Callable[..., None]:
    def execute(engine: "EmulatedEngine", **arguments: Any) -> None:
        start = engine.emulated.begin(operation)
        run(engine, **arguments)
        engine.emulated.end(operation, start)

    return execute


class EmulatedEngine(OmnibalEngine):
    """The engine, whose instructions a device logs.

    Args:
        device: This process's.
        **others: As for OmnibalEngine.
    """

    def __init__(self, *, device: Device, **others: Any) -> None:
        super().__init__(**others)
        self.emulated = device
        self._operation = Operation.BW
        if self.table is not None:
            for layer in self.module.forward_funcs:
                layer.weight_gradients = self.weight_gradients

    def _start_reduction(self, layer: int) -> None:
        self.emulated.complete(layer)
        super()._start_reduction(layer)

    def _before_layer(self, layer: int, hidden: Tensor) -> None:
        super()._before_layer(layer, hidden)
        self.emulated.await_weights(layer)

    def _exec_reduce_grads(self) -> None:
        super()._exec_reduce_grads()
        dist.barrier(self.grid.get_data_parallel_group())  # all replicas have said when theirs were complete
        self.emulated.add_up()
        self.emulated.log.reduced = perf_counter()

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        super()._exec_optimizer_step(lr_kwargs)
        self.emulated.rest(self.emulated.work.optimizer)
        self.emulated.spread_weights()
        self.emulated.log.updated = perf_counter()

    def _run_entry(self, operation: Operation, micro_batch: int) -> None:
        self._operation = operation
        if operation == Operation.W:
            start = self.emulated.begin(operation)
            super()._run_entry(operation, micro_batch)
            self.emulated.end(operation, start)
        else:
            super()._run_entry(operation, micro_batch)

    def _exec_forward_pass(self, buffer_id: int) -> None:
        with self._links(buffer_id, DOWN, is_received=not self.is_first_stage(), is_sent=not self.is_last_stage()):
            start = self.emulated.begin(Operation.F)
            super()._exec_forward_pass(buffer_id)
            self.emulated.end(Operation.F, start)

    def _exec_backward_pass(self, buffer_id: int) -> None:
        operation = Operation.B if self._operation == Operation.B else Operation.BW
        with self._links(buffer_id, UP, is_received=not self.is_last_stage(), is_sent=self._sends_gradients):
            start = self.emulated.begin(operation)
            super()._exec_backward_pass(buffer_id)
            self.emulated.end(operation, start)

    @contextmanager
    def _links(self, micro_batch: int, direction: int, *, is_received: bool, is_sent: bool) -> Iterator[None]:
        """Around a pass of a table: its transfers run beside the computations; DeepSpeed's own are instructions."""
        if self.table is not None and is_received:
            self.emulated.receive(direction, micro_batch)
        yield
        if self.table is not None and is_sent:
            self.emulated.send(direction, micro_batch)

    _INSTRUCTION_MAP: ClassVar[dict[type, Callable[..., None]]] = {
        **OmnibalEngine._INSTRUCTION_MAP,
        **{
            instruction: _timed(operation, OmnibalEngine._INSTRUCTION_MAP[instruction])
            for instruction, operation in TRANSFERS.items()
        },
        RunEntry: _run_entry,
        pipe.ForwardPass: _exec_forward_pass,
        pipe.BackwardPass: _exec_backward_pass,
        pipe.ReduceGrads: _exec_reduce_grads,
        pipe.OptimizerStep: _exec_optimizer_step,
    }


def _build(task: EmulationTask, device: Device) -> EmulatedEngine:
    config = {
        "gradient_accumulation_steps": task.plan.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": task.plan.layout.zero_stage},
        "gradient_clipping": 1.0,
    }
    model: Any = EmulatedModel(task, device)
    loader: Any = EmulatedLoader(task, device)
    section = OmnibalSection(model=ModelSection(weights="random"))
    resolved = ResolvedRun(
        config, section, None, model, layout_of(config, task.plan.num_stages, task.plan.layout.num_replicas)
    )
    classes: Any = {"module_class": EmulatedModule, "engine_class": EmulatedEngine}
    engine: EmulatedEngine = build_engine(resolved, task.plan, loader, len(task.steps), **classes, device=device)
    return engine


def _emulate(task: EmulationTask, rank: int, started: float, clocks: Clocks) -> DeviceReport:
    """One device: build the engine, run the steps."""
    stage, replica, _ = task.ranks.place(rank)
    device = Device(task, stage, replica, f"rank {rank}, stage {stage}", clocks)
    engine = _build(task, device)
    engine.train_batch()
    ready = perf_counter() - started
    logs: list[StepLog] = []
    for _ in task.steps:
        engine.train_batch()
        logs.append(device.log)
    return DeviceReport(logs, device.peak_bytes, ready)


def _process(rank: int, folder: Path, task: EmulationTask, started: float, clocks: Clocks) -> None:
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{task.num_processes}"}
    meet(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=task.num_processes,
        auto_mpi_discovery=False,
    )
    try:
        report = _emulate(task, rank, started, clocks)
    except OmnibalError as error:
        (folder / FAILURE_FILE).write_bytes(pickle.dumps(error))
        raise
    report_file(folder, rank).write_bytes(pickle.dumps(report))


def main() -> None:
    """Fork the processes; if one fails, all end."""
    started, folder = perf_counter(), Path(sys.argv[1])
    task = pickle.loads((folder / TASK_FILE).read_bytes())
    arguments = folder, task, started, Clocks.of(task)
    processes = start_processes(_process, arguments, nprocs=task.num_processes, join=False, start_method="fork")
    Thread(target=_end_with_caller, args=[folder], daemon=True).start()
    while not processes.join():
        pass


def _end_with_caller(folder: Path) -> None:
    """Wait for the end of whoever asked for the run, by whatever signal; then end all, and remove the folder for it."""
    sys.stdin.read()  # the caller's end of the pipe closes with the caller
    for process in active_children():
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
