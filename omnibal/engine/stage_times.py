"""Times the passes of a pipeline's stage in a run's first steps, to correct counted costs by them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from omnibal.cost import Load
from omnibal.errors import reporting
from omnibal.profile.calibration import MOST_PASSES, TimedPass, sizes_of
from omnibal.ranks import gather, place
from omnibal.vlm.passes import Mark, mark, seconds_between

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
            passes, most = self.passes, max(MOST_PASSES // place()[1], 2)
            own = passes[:: -(-len(passes) // most) or 1]
        return [each for of_rank in gather(own) for each in of_rank]
