"""What a run measures of itself: times of a stage's passes, to correct counted costs by, and the memory of a step."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from omnibal.cost import Load
from omnibal.errors import reporting
from omnibal.passes import DevicePeak, Mark, mark, overhead_bytes, seconds_between
from omnibal.profile.calibration import MOST_PASSES, TimedPass, sizes_of
from omnibal.ranks import gather, rank_and_size

_DOING: Final = "timing of the first steps"
_Pass = tuple[bool, int]  # whether it is a backward pass, and its micro-batch


class StageTimes:
    """Times of this stage's passes; nothing waits for the device before ``calibrate``."""

    def __init__(self, device: torch.device, layers: range) -> None:
        self._device, self._layers = device, (layers.start, layers.stop)
        self._now = dict[_Pass, list[tuple[Mark, Mark]]]()
        self._steps = list[tuple[dict[_Pass, list[tuple[Mark, Mark]]], Load]]()

    @contextmanager
    def time(self, is_backward: bool, micro_batch: int) -> Iterator[None]:
        """Time a pass, or a part of it: the backward pass to the weights may run apart."""
        begin: Mark | None = None
        with reporting(_DOING):
            begin = mark(self._device)
        yield
        with reporting(_DOING):
            if begin is not None:
                self._now.setdefault((is_backward, micro_batch), []).append((begin, mark(self._device)))

    def end_step(self, load: Callable[[], Load]) -> None:
        """End a step, whose micro-batches on this replica had this load."""
        with reporting(_DOING):
            self._steps.append((self._now, load()))
        self._now = {}

    @property
    def passes(self) -> list[TimedPass]:
        """Of every micro-batch a forward pass, and a backward pass where the stage has one."""
        return [
            TimedPass(self._layers, is_backward, sizes[number], sum(seconds_between(*part) for part in parts))
            for passes, load in self._steps
            for sizes in [sizes_of(load)]
            for (is_backward, number), parts in sorted(passes.items())
        ]

    def gathered(self) -> list[TimedPass]:
        """Passes of all ranks, none of one where timing failed; all ranks together."""
        own = list[TimedPass]()
        with reporting(_DOING):
            passes, most = self.passes, max(MOST_PASSES // rank_and_size()[1], 2)
            own = passes[:: -(-len(passes) // most) or 1]
        return [each for of_rank in gather(own) for each in of_rank]


@dataclass(frozen=True)
class StagePeaks:
    """The most bytes that a device of each stage held at one time, by stage."""

    step: tuple[int, ...]  # of tensors, in a whole step
    # Beside torch's allocator: contexts, libraries, communicators, other processes' memory on the same device; zeros
    # without a CUDA device.
    overhead: tuple[int, ...]


def measure_step(engine: Any, train: Callable[[AbstractContextManager[object]], Tensor]) -> tuple[Tensor, StagePeaks]:
    """The loss of a step that ``train`` runs under a meter, and what the stages' devices held; all ranks together."""
    meter: DevicePeak | None = None
    with reporting("measuring of memory"):
        meter = DevicePeak(engine.device, held_tensors(engine))
    loss, own = train(meter or nullcontext()), (0, 0)
    with reporting("measuring of memory"):
        own = (0 if meter is None else meter.peak_bytes, overhead_bytes(engine.device))
    found = gather((engine.stage_id, own))
    by_stage = ([peaks for stage, peaks in found if stage == s] for s in range(engine.num_stages))
    return loss, StagePeaks(*zip(*(map(max, zip(*peaks, strict=True)) for peaks in by_stage), strict=True))


def held_tensors(engine: Any) -> list[Tensor]:
    """What stays from step to step: parameters, buffers, gradients, and what the optimizer keeps."""
    parameters = list(engine.module.parameters())
    groups = engine.basic_optimizer.param_groups
    owned = [parameter for group in groups for parameter in group["params"]]
    state = [value for values in engine.basic_optimizer.state.values() for value in values.values()]
    tensors = [*parameters, *engine.module.buffers(), *owned, *state]
    gradients = [parameter.grad for parameter in (*parameters, *owned)]
    # Sums of 16-bit gradients in float32: ZeRO 1 lets parameters have them, BF16_Optimizer one flat buffer a group.
    gradients += [getattr(parameter, "grad_accum", None) for parameter in parameters]
    gradients += getattr(engine.optimizer, "fp32_groups_gradients_flat", [])
    return [tensor for tensor in (*tensors, *gradients) if isinstance(tensor, Tensor)]
