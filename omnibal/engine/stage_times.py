"""Times the passes of a pipeline's stage in a run's first steps, to correct counted costs by them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from omnibal.cost import Load
from omnibal.profile.calibration import MOST_PASSES, Calibration, TimedPass, calibrate, sizes_of
from omnibal.profile.records import Level, ModelProfile
from omnibal.ranks import gather, place
from omnibal.vlm.passes import Mark, device_name, mark, seconds_between

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
        begin = mark(self._device)
        yield
        self._now.setdefault((is_backward, micro_batch), []).append((begin, mark(self._device)))

    def end_step(self, load: Load) -> None:
        """End a step, whose micro-batches on this replica had this load."""
        self._steps.append((self._now, load))
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

    def calibrate(self, counted: ModelProfile, recompute: Sequence[Level]) -> Calibration | None:
        """What the passes of all ranks make of counted costs, alike on all of them; all ranks together."""
        passes, most = self.passes, max(MOST_PASSES // place()[1], 2)
        gathered = gather(passes[:: -(-len(passes) // most) or 1])
        return calibrate(
            counted, [each for of_rank in gathered for each in of_rank], recompute, device=device_name(self._device)
        )
