"""The processes of an emulated cluster: DeepSpeed's engine with layers that sleep, and packs that carry a number only.

python -m tools.emulator.engine FOLDER, where the folder holds the task; forks a process per device.
"""

import os
import pickle
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from omnibal.config import layout_of
from omnibal.config.section import ModelSection, OmnibalSection
from omnibal.cost import Load
from omnibal.data.epoch import Step
from omnibal.engine.engine import OmnibalEngine
from omnibal.engine.initialize import build_engine, meet
from omnibal.engine.module import VlmPipelineModule
from omnibal.engine.reading import Batch
from omnibal.engine.resolve import ResolvedRun
from omnibal.errors import OmnibalError
from omnibal.families.base import LayerRecord
from omnibal.pipeline.schedule import Operation
from omnibal.pipeline.times import IMAGES
from omnibal.vlm.payload import Payload, SentTensors, WeightGradients
from tools.emulator.device import DOWN, UP, Clocks, EmulatedDevice
from tools.emulator.run import FAILURE_FILE, SIZE_SCALE, TASK_FILE, DeviceReport, EmulationTask, StepLog, report_file

ELEMENT_BYTES: Final = 2  # layers run in bfloat16


class _Inputs(torch.autograd.Function):
    """Sleeps for a layer's forward and backward pass, and puts out as many bytes as a cut behind the layer sends."""

    # The weight is an input, so that a trained layer runs backward even if no layer before it is trained.

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
    """Sleeps for the backward pass to a layer's weights, which a schedule may run later than that to the inputs."""

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
    """Sleeps as long as a layer is predicted to take for the micro-batch whose number in the step is ``input_ids``."""

    def __init__(self, device: EmulatedDevice, place: int, *, trainable: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.device, self.place = device, place
        self.weight_gradients = WeightGradients(budget_bytes=0)  # under DeepSpeed's 1F1B none waits
        self.weight = nn.Parameter(torch.zeros(1, dtype=dtype), requires_grad=trainable)

    def forward(self, payload: Payload) -> Payload:
        number = int(payload.input_ids)
        micro_batch = number if number == IMAGES else self.device.numbers.index(number)
        output = _Inputs.apply(payload.hidden, self.weight, self, micro_batch)  # type: ignore[no-untyped-call]
        if self.weight.requires_grad:
            output = output + _Weights.apply(self.weight, self, micro_batch)  # type: ignore[no-untyped-call]
        return payload.replace(hidden=output)


class EmulatedModel:
    """The part of a `VisionLanguageModel` that the pipeline module calls."""

    spare_names = ()
    image_integers = ()

    def __init__(self, task: EmulationTask, device: EmulatedDevice) -> None:
        self._device, self._layers = device, task.profile.layers
        self._spread, self._first = task.num_spread, task.partition.boundaries[device.stage]
        self.records = [LayerRecord(layer.name, layer.kind, {}, module=layer.module) for layer in self._layers]

    def sent_tensors(self, boundary: int) -> SentTensors:
        return SentTensors()  # hidden states alone

    def layer_class(self, index: int) -> type[nn.Module]:
        return EmulatedLayer

    def weight_names(self, index: int) -> dict[str, str]:
        return {"weight": f"{index}"}  # the layer's number stands for a name on disk

    def build_layer(self, index: int, *, seed: int | None, dtype: torch.dtype) -> nn.Module:
        place = index if index < self._spread else index - self._first
        return EmulatedLayer(self._device, place, trainable=self._layers[index].trainable, dtype=dtype)


class EmulatedModule(VlmPipelineModule):
    """The pipeline module without recomputation, whose time is part of what layers sleep."""

    def encode(self, payload: Payload) -> Payload:
        return self._run_each(self.encoder, payload, first=0)

    def _run_layers(self, payload: Payload) -> Payload:
        return self._run_each(self.forward_funcs, payload, first=len(self.encoder))

    def _run_each(self, layers: Iterable[nn.Module], payload: Payload, first: int) -> Payload:
        for place, layer in enumerate(layers, start=first):
            self._announce(place, payload)
            payload = layer(payload)
        return payload

    def count(self, batch: Mapping[str, Tensor]) -> None:
        """Count nothing: there are no tokens."""

    def _loss(self, outputs: tuple[Tensor, ...], targets: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        hidden: Tensor = self.vlm.sent_tensors(self._local_stop).build(outputs).hidden
        return hidden.float().sum()


class EmulatedLoader:
    """Yields the task's steps, the first one twice, since its first run warms up and is not logged."""

    def __init__(self, task: EmulationTask, device: EmulatedDevice) -> None:
        self._task, self._device = task, device
        self._next = -1
        self.micro_batches = len(device.numbers)

    def next_step(self) -> tuple[Step, list[Batch]]:
        step = max(self._next, 0)
        self._next += 1
        self._device.begin_step(step)
        empty = torch.zeros(0, dtype=torch.int64)
        batches = [
            {
                "pixel_values": torch.zeros(1),
                "input_ids": torch.tensor([[number]]),  # by which layers know how long to sleep
                "position_ids": empty,
                "cu_seq_lens": empty,
                "labels": torch.ones(1, 1, dtype=torch.int64),
            }
            for number in self._device.numbers
        ]
        return Step(0, step, self.micro_batches, Load.stack(self._task.steps[step])), batches


class EmulatedSpread:
    """In place of a `SpreadEncoder`: all devices meet for each all-to-all, and sleep for what it takes."""

    def __init__(self, engine: "EmulatedEngine") -> None:
        self._engine, self._device = engine, engine.emulated
        self._encoded: Tensor | None = None

    def encode(self, packs: Sequence[Payload]) -> Sequence[Payload]:
        self._exchange("pixels")
        empty = torch.zeros(0, dtype=torch.int64)
        number = {"input_ids": torch.tensor([[IMAGES]]), "position_ids": empty, "cu_seq_lens": empty}
        with self._engine.logged(Operation.F, IMAGES):
            images = Payload(torch.zeros(1, dtype=self._engine.module.dtype), number)
            self._encoded = self._engine.module.encode(images).hidden
        self._exchange("features")
        if self._encoded.requires_grad:
            for pack in packs:
                pack.hidden.requires_grad_()
        return packs

    def backward(self) -> None:
        encoded, self._encoded = self._encoded, None
        assert encoded is not None, "images are encoded before the passes"
        if encoded.requires_grad:
            self._exchange("gradients")
            with self._engine.logged(Operation.BW, IMAGES):
                encoded.sum().backward()

    def _exchange(self, name: str) -> None:
        dist.barrier()
        self._device.log.exchange = min(self._device.log.exchange, perf_counter())
        self._device.rest(getattr(self._device.work.exchanges, name))


class EmulatedEngine(OmnibalEngine):
    """The engine, whose instructions a device logs."""

    def __init__(self, *, device: EmulatedDevice, **others: Any) -> None:
        super().__init__(**others)
        self.emulated = device
        self._backward_kind = Operation.BW
        if self.spread is not None:
            own: Any = EmulatedSpread(self)
            self.spread = own
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
        # All who hold a layer of this stage, or the spread encoder, have said when their gradients were complete.
        dist.barrier(None if self.spread is not None else self.grid.get_data_parallel_group())
        self.emulated.add_up()
        self.emulated.log.reduced = perf_counter()

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        super()._exec_optimizer_step(lr_kwargs)
        self.emulated.rest(self.emulated.work.optimizer)
        self.emulated.spread_weights()
        self.emulated.log.updated = perf_counter()

    @contextmanager
    def logged(self, operation: Operation, micro_batch: int | None = None) -> Iterator[None]:
        """Log an instruction that runs inside; ``micro_batch`` is by default the operation's next one."""
        start = self.emulated.begin(operation, micro_batch)
        yield
        self.emulated.end(operation, start, micro_batch)

    # DeepSpeed's blocking transfers are instructions that take the time of their link. Under a table transfers run
    # beside the computations: a pass waits until what it needs would have arrived, and then says when it has sent.

    def _exec_send_activations(self, buffer_id: int) -> None:
        with self.logged(Operation.SEND_ACTIVATION):
            super()._exec_send_activations(buffer_id)

    def _exec_recv_activations(self, buffer_id: int) -> None:
        with self.logged(Operation.RECEIVE_ACTIVATION):
            super()._exec_recv_activations(buffer_id)

    def _exec_send_grads(self, buffer_id: int) -> None:
        with self.logged(Operation.SEND_GRADIENT):
            super()._exec_send_grads(buffer_id)

    def _exec_recv_grads(self, buffer_id: int) -> None:
        with self.logged(Operation.RECEIVE_GRADIENT):
            super()._exec_recv_grads(buffer_id)

    def _run_entry(self, operation: Operation, micro_batch: int) -> None:
        self._backward_kind = Operation.B if operation == Operation.B else Operation.BW
        with self.logged(operation) if operation == Operation.W else nullcontext():
            super()._run_entry(operation, micro_batch)

    def _exec_forward_pass(self, buffer_id: int) -> None:
        received, sent = not self.is_first_stage(), not self.is_last_stage()
        with self._pass(Operation.F, buffer_id, DOWN, is_received=received, is_sent=sent):
            super()._exec_forward_pass(buffer_id)

    def _exec_backward_pass(self, buffer_id: int) -> None:
        received, sent = not self.is_last_stage(), self._sends_gradients
        with self._pass(self._backward_kind, buffer_id, UP, is_received=received, is_sent=sent):
            super()._exec_backward_pass(buffer_id)

    @contextmanager
    def _pass(
        self, operation: Operation, micro_batch: int, direction: int, *, is_received: bool, is_sent: bool
    ) -> Iterator[None]:
        if self.table is not None and is_received:
            self.emulated.receive(direction, micro_batch)
        with self.logged(operation):
            yield
        if self.table is not None and is_sent:
            self.emulated.send(direction, micro_batch)


def _build(task: EmulationTask, device: EmulatedDevice) -> EmulatedEngine:
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
    layout = layout_of(config, task.plan.num_stages, task.plan.layout.num_replicas)
    resolved = ResolvedRun(config, section, None, model, replace(layout, encoder=task.ranks.encoder))
    classes: Any = {"module_class": EmulatedModule, "engine_class": EmulatedEngine}
    engine: EmulatedEngine = build_engine(resolved, task.plan, loader, len(task.steps), **classes, device=device)
    return engine


def _emulate(task: EmulationTask, rank: int, started: float, clocks: Clocks) -> DeviceReport:
    stage, replica, _ = task.ranks.position(rank)
    device = EmulatedDevice(task, stage, replica, f"rank {rank}, stage {stage}", clocks)
    engine = _build(task, device)
    engine.train_batch()  # warms up, and is not logged
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
        # A rank that lost another one in an exchange (gloo's RuntimeError) leaves the word to the one that failed.
        if not isinstance(error.__cause__, RuntimeError):
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
    """Wait for the end of whoever asked for the run, by whatever signal; then end all, and remove the folder."""
    sys.stdin.read()  # the caller's end of the pipe closes with the caller
    for process in active_children():
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
