"""The model and data of an emulated cluster: layers that sleep, and packs that only carry their number."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from omnibal.cost import Load
from omnibal.emulator.device import Device
from omnibal.emulator.run import SIZE_SCALE, EmulationTask
from omnibal.engine.loader import Batch
from omnibal.engine.module import VlmPipelineModule
from omnibal.families.base import LayerRecord
from omnibal.feeds.feed import Step
from omnibal.vlm.backward import WeightGradients
from omnibal.vlm.payload import Payload, SentTensors

ELEMENT_BYTES: Final = 2


class _Inputs(torch.autograd.Function):
    """Sleeps for a layer's forward and backward pass, and puts out as many bytes as a cut behind the layer sends.

    The weight is an input, so that a trained layer runs backward even if no layer before it is trained.
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
    """Sleeps as long as a layer is predicted to take for the micro-batch whose number stands in ``input_ids``.

    Args:
        device: The device of this process.
        place: Index of the layer in its stage.
        trainable: Whether the layer's only weight is trained.
        dtype: The dtype of the weight.
    """

    def __init__(self, device: Device, place: int, *, trainable: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.device, self.place = device, place
        self.weight_gradients = WeightGradients(budget_bytes=0)  # under DeepSpeed's 1F1B none waits
        self.weight = nn.Parameter(torch.zeros(1, dtype=dtype), requires_grad=trainable)

    def forward(self, payload: Payload) -> Payload:
        """Sleep, and return an output of the predicted size."""
        micro_batch = int(payload.input_ids)
        output = _Inputs.apply(payload.hidden, self.weight, self, micro_batch)  # type: ignore[no-untyped-call]
        if self.weight.requires_grad:
            output = output + _Weights.apply(self.weight, self, micro_batch)  # type: ignore[no-untyped-call]
        return payload.replace(hidden=output)


class EmulatedModel:
    """The part of a `VisionLanguageModel` that the pipeline module calls."""

    spare_names = ()

    def __init__(self, task: EmulationTask, device: Device) -> None:
        self._device, self._layers = device, task.profile.layers
        self._first = task.plan.partition.boundaries[device.stage]
        self.records = [LayerRecord(layer.name, layer.kind, {}, module=layer.module) for layer in self._layers]

    def sent_tensors(self, boundary: int) -> SentTensors:
        """Hidden states alone at every cut."""
        return SentTensors()

    def layer_class(self, index: int) -> type[nn.Module]:
        """`EmulatedLayer`, whichever layer."""
        return EmulatedLayer

    def weight_names(self, index: int) -> dict[str, str]:
        """The layer's only weight has the layer's number as its name."""
        return {"weight": f"{index}"}

    def build_layer(self, index: int, *, seed: int | None, dtype: torch.dtype) -> nn.Module:
        """A layer of this process's stage."""
        return EmulatedLayer(self._device, index - self._first, trainable=self._layers[index].trainable, dtype=dtype)


class EmulatedModule(VlmPipelineModule):
    """The pipeline module without recomputation, whose time is part of what layers sleep."""

    def _run_layers(self, payload: Payload) -> Payload:
        for place, layer in enumerate(self.forward_funcs):
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

    def __init__(self, task: EmulationTask, device: Device) -> None:
        self._task, self._device = task, device
        self._next = -1
        self.micro_batches = task.plan.micro_batches

    def next_step(self) -> tuple[Step, list[Batch]]:
        """The next step, whose batches have their number in place of tokens."""
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
