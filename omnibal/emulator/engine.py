"""The processes of an emulated cluster: DeepSpeed's engine with layers that sleep.

python -m omnibal.emulator.engine FOLDER, where the folder holds the task; forks a process per device.
"""

import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from mmap import mmap
from multiprocessing import active_children
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any, ClassVar, Final

import numpy as np
import torch
from deepspeed.runtime.pipe import schedule as pipe
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from omnibal.config import complete_deepspeed_config
from omnibal.cost import FloatArray, Load
from omnibal.emulator.device import DOWN, UP, Device, DeviceReport, StepLog
from omnibal.emulator.run import FAILURE_FILE, SIZE_SCALE, TASK_FILE, EmulationTask, report_file
from omnibal.engine.distributed import meet
from omnibal.engine.engine import OmnibalEngine
from omnibal.engine.initialize import make_engine
from omnibal.engine.loader import Batch, Step
from omnibal.engine.module import VlmPipelineModule
from omnibal.engine.table import RunEntry
from omnibal.errors import OmnibalError
from omnibal.pipeline.schedule import Operation
from omnibal.vlm.payload import Layout, Payload
from omnibal.vlm.weight_gradients import WeightGradients

ELEMENT_BYTES: Final = 2
TRANSFERS: Final = {
    pipe.SendActivation: Operation.SEND_ACTIVATION,
    pipe.RecvActivation: Operation.RECEIVE_ACTIVATION,
    pipe.SendGrad: Operation.SEND_GRADIENT,
    pipe.RecvGrad: Operation.RECEIVE_GRADIENT,
}
"""Our operations by DeepSpeed's blocking instructions."""


class _Inputs(torch.autograd.Function):
    """A layer's way from input to output: sleeps, and puts out what a cut behind the layer would send.

    It takes the weight too: a layer that is trained runs backward also where nothing before it is.
    """

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, layer: "EmulatedLayer", micro_batch: int) -> Tensor:
        context.layer, context.micro_batch, context.shape = layer, micro_batch, hidden.shape
        work, place = layer.device.work, layer.place
        layer.device.compute(float(work.forward[micro_batch, place]))
        elements = int(work.sent_bytes[micro_batch, place] * SIZE_SCALE / ELEMENT_BYTES)
        return hidden.new_zeros(max(elements, 1))

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        layer = context.layer
        layer.device.compute(layer.device.backward_seconds(context.micro_batch, layer.place))
        return gradient.new_zeros(context.shape), None, None, None


class _Weights(torch.autograd.Function):
    """A layer's weights, apart from its input: a schedule may run their backward pass at another time."""

    @staticmethod
    def forward(context: Any, weight: Tensor, layer: "EmulatedLayer", micro_batch: int) -> Tensor:
        context.layer, context.micro_batch = layer, micro_batch
        return torch.zeros_like(weight)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        layer = context.layer
        seconds = float(layer.device.work.weight[context.micro_batch, layer.place])
        layer.weight_gradients.defer(partial(layer.device.compute, seconds), keeps=[gradient])
        return gradient, None, None


class EmulatedLayer(nn.Module):
    """Takes as long as the layer is predicted to, for the micro-batch whose number the payload's tokens are.

    Args:
        device: This process's.
        place: Of the layer in its stage.
        trainable: Whether it has a weight that is trained; frozen layers get a frozen one.
    """

    def __init__(self, device: Device, place: int, *, trainable: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.device, self.place = device, place
        self.weight_gradients = WeightGradients(budget_bytes=0)  # none waits
        self.weight = nn.Parameter(torch.zeros(1, dtype=dtype), requires_grad=trainable)

    def forward(self, payload: Payload) -> Payload:
        """The output's bytes and time."""
        micro_batch = int(payload.input_ids)
        output = _Inputs.apply(payload.hidden, self.weight, self, micro_batch)  # type: ignore[no-untyped-call]
        if self.weight.requires_grad:
            output = output + _Weights.apply(self.weight, self, micro_batch)  # type: ignore[no-untyped-call]
        return payload.replace(hidden=output)


class EmulatedModel:
    """The model as the pipeline module asks for it: records, and a layer by its index."""

    def __init__(self, task: EmulationTask, device: Device) -> None:
        self._device, self._layers = device, task.profile.layers
        self._first = task.plan.partition.boundaries[device.stage]
        self.records = [_Untied()] * len(self._layers)

    def layout(self, boundary: int) -> Layout:
        """The same at all cuts."""
        return Layout()

    def layer_class(self, index: int) -> type[nn.Module]:
        """The same for all."""
        return EmulatedLayer

    def build_layer(self, index: int, *, seed: int | None, dtype: torch.dtype) -> nn.Module:
        """A layer of this process's stage."""
        return EmulatedLayer(self._device, index - self._first, trainable=self._layers[index].trainable, dtype=dtype)


class _Untied:
    kind, tied_key = "emulated", None


class EmulatedModule(VlmPipelineModule):
    """The pipeline module; recompute levels are in the layers' times."""

    def _run_layers(self, payload: Payload) -> Payload:
        for layer in self.forward_funcs:
            payload = layer(payload)
        return payload

    def count(self, batch: Mapping[str, Tensor]) -> None:
        """Nothing: there are no tokens."""

    def _loss(self, outputs: tuple[Tensor, ...], targets: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        hidden: Tensor = self.vlm.layout(self._local_stop).build(outputs).hidden
        return hidden.float().sum()


class EmulatedLoader:
    """Yields the task's steps, the first one twice: to warm up, and to count."""

    def __init__(self, task: EmulationTask, device: Device) -> None:
        self._task, self._device = task, device
        self._next = -1
        self.micro_batches = task.plan.micro_batches

    def next_step(self) -> tuple[Step, list[Batch]]:
        """The next step; a micro-batch's number in the place of its tokens."""
        number = max(self._next, 0)
        self._next += 1
        self._device.begin_step(number)
        empty = torch.zeros(0, dtype=torch.int64)
        batches = [
            {
                "pixel_values": torch.zeros(1),
                "input_ids": torch.tensor([[micro_batch]]),
                "position_ids": empty,
                "cu_seq_lens": empty,
                "labels": torch.ones(1, 1, dtype=torch.int64),
            }
            for micro_batch in range(self.micro_batches)
        ]
        return Step(0, number, self.micro_batches, Load.stack(self._task.steps[number])), batches


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

    def _exec_reduce_grads(self) -> None:
        super()._exec_reduce_grads()
        self.emulated.rest(self.emulated.work.reduce)
        self.emulated.log.reduced = perf_counter()

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        super()._exec_optimizer_step(lr_kwargs)
        self.emulated.rest(self.emulated.work.optimizer)
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
        with self._links(buffer_id, UP, is_received=not self.is_last_stage(), is_sent=not self.is_first_stage()):
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
    config = complete_deepspeed_config(
        config, num_stages=task.plan.num_stages, num_replicas=task.plan.layout.num_replicas,
        total_steps=len(task.steps),
        schedule=task.plan.schedule,
    )  # fmt: skip
    model: Any = EmulatedModel(task, device)
    module = EmulatedModule(model, task.plan, num_replicas=task.plan.layout.num_replicas, dtype=torch.bfloat16)
    return make_engine(
        EmulatedEngine, module, config,
        device=device, plan=task.plan, loader=EmulatedLoader(task, device), seed=0, model_source=None,
    )  # fmt: skip


def _emulate(task: EmulationTask, rank: int, started: float, arrivals: FloatArray) -> DeviceReport:
    """One device: build the engine, run the steps."""
    stage, replica = divmod(rank, task.plan.layout.num_replicas)
    device = Device(task, stage, replica, f"rank {rank}, stage {stage}", arrivals)
    engine = _build(task, device)
    engine.train_batch()
    ready = perf_counter() - started
    logs: list[StepLog] = []
    for _ in task.steps:
        engine.train_batch()
        logs.append(device.log)
    return DeviceReport(logs, device.peak_bytes, ready)


def _process(rank: int, folder: Path, task: EmulationTask, started: float, arrivals: FloatArray) -> None:
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{task.num_processes}"}
    meet(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=task.num_processes,
        auto_mpi_discovery=False,
    )
    try:
        report = _emulate(task, rank, started, arrivals)
    except OmnibalError as error:
        (folder / FAILURE_FILE).write_bytes(pickle.dumps(error))
        raise
    report_file(folder, rank).write_bytes(pickle.dumps(report))


def main() -> None:
    """Fork the processes; if one fails, all end."""
    started, folder = perf_counter(), Path(sys.argv[1])
    task = pickle.loads((folder / TASK_FILE).read_bytes())
    shape = (2, task.plan.num_stages, task.plan.layout.num_replicas, task.plan.micro_batches)
    shared = mmap(-1, 8 * prod(shape))
    arrivals = np.frombuffer(shared, dtype=np.float64).reshape(shape)
    processes = start_processes(
        _process, (folder, task, started, arrivals), nprocs=task.num_processes, join=False, start_method="fork"
    )
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
