"""What a process of an emulated cluster trains: layers that sleep, and packs that are nothing but numbers."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from omnibal.cost import Load
from omnibal.emulator.device import Device
from omnibal.emulator.run import SIZE_SCALE, EmulationTask
from omnibal.engine.loader import Batch, Step
from omnibal.engine.module import VlmPipelineModule
from omnibal.families.base import LayerRecord
from omnibal.vlm.payload import Layout, Payload
from omnibal.vlm.weight_gradients import WeightGradients

ELEMENT_BYTES: Final = 2


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

    spare_names = ()
    """Every weight is in a layer."""

    def __init__(self, task: EmulationTask, device: Device) -> None:
        self._device, self._layers = device, task.profile.layers
        self._first = task.plan.partition.boundaries[device.stage]
        self.records = [LayerRecord(layer.name, layer.kind, {}, module=layer.module) for layer in self._layers]

    def layout(self, boundary: int) -> Layout:
        """The same at all cuts."""
        return Layout()

    def layer_class(self, index: int) -> type[nn.Module]:
        """The same for all."""
        return EmulatedLayer

    def weight_names(self, index: int) -> dict[str, str]:
        """From names in layer ``index`` to names of all."""
        return {"weight": f"{index}"}

    def build_layer(self, index: int, *, seed: int | None, dtype: torch.dtype) -> nn.Module:
        """A layer of this process's stage."""
        return EmulatedLayer(self._device, index - self._first, trainable=self._layers[index].trainable, dtype=dtype)


class EmulatedModule(VlmPipelineModule):
    """The pipeline module; recompute levels are in the layers' times."""

    def _run_layers(self, payload: Payload) -> Payload:
        for place, layer in enumerate(self.forward_funcs):
            self._announce(place, payload)
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
