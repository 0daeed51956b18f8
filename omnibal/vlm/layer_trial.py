"""Run one pipeline layer on one pack and measure it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from omnibal.memory.footprint import LEVELS, Level
from omnibal.vlm.loss import token_losses
from omnibal.vlm.passes import Timing, kept_bytes, time_passes, time_split_backward
from omnibal.vlm.payload import Payload
from omnibal.vlm.recompute import run_layer
from omnibal.vlm.weight_gradients import DeferringLinear, WeightGradients, defer_linears


@dataclass(frozen=True)
class LayerOnPack:
    """What a layer costs on one pack."""

    forward: Timing
    backward: Timing
    """To the inputs and the weights."""
    backward_split: Timing
    """To the inputs, and to weights whose gradients cannot wait."""
    weights: Timing
    """To the weights whose gradients can wait."""
    backward_by_level: Mapping[Level, Timing]
    """With recomputation."""
    kept_bytes: Mapping[Level, int]
    """From forward to backward."""
    pending_bytes: int
    """From ``backward_split`` to ``weights``."""
    sent_bytes: int
    """Of the floating tensor that the layer puts out."""


@dataclass(frozen=True)
class LayerTrial:
    """A layer and a pack to run it on.

    Args:
        layer: As it is trained; frozen parameters do not require gradients.
        payload: Its input.
        from_pixels: Whether the input is pixels, which need no gradient.
        labels: Of shape (1, tokens), for the last layer, whose times contain the loss; None for others.
    """

    layer: nn.Module
    payload: Payload
    from_pixels: bool
    labels: Tensor | None

    def measure(self) -> LayerOnPack:
        """Measure passes at every level, and what they keep; the loss keeps nothing on the layer's account."""
        forward, backward = self.time_passes()
        backward_split, weights, pending_bytes = self._split()
        free = [*self.layer.parameters(), *self.layer.buffers(), *self.payload.integers.values()]
        return LayerOnPack(
            forward=forward,
            backward=backward,
            backward_split=backward_split if pending_bytes else backward,
            weights=weights if pending_bytes else Timing(0.0, 0.0),
            backward_by_level={level: self.time_passes(level)[1] for level in LEVELS if level != "none"},
            kept_bytes={level: kept_bytes(partial(self._output, level), free=free) for level in LEVELS},
            pending_bytes=pending_bytes,
            sent_bytes=self._output("none").nbytes,
        )

    def time_passes(self, level: Level = "none") -> tuple[Timing, Timing]:
        """Seconds of a forward and a backward pass."""
        return time_passes(partial(self._objective, level), self.payload.hidden.device)

    def _split(self) -> tuple[Timing, Timing, int]:
        """Seconds of both parts of a split backward pass, and what the first one leaves for the second one."""
        with _deferring(self.layer) as queue:
            passes = partial(self._objective, "none"), partial(queue.run, queue.micro_batch), self.payload.hidden.device
            backward, weights = time_split_backward(*passes)
            return backward, weights, queue.peak_bytes

    def _output(self, level: Level) -> Tensor:
        hidden = self.payload.hidden.detach().requires_grad_(not self.from_pixels)
        return run_layer(self.layer, self.payload.replace(hidden=hidden), level).hidden

    def _objective(self, level: Level) -> Tensor:
        output = self._output(level)
        return output if self.labels is None else token_losses(output, self.labels).sum()


@contextmanager
def _deferring(layer: nn.Module) -> Iterator[WeightGradients]:
    """Let a layer leave its weight gradients for later."""
    queue = WeightGradients()
    defer_linears(layer, queue)
    try:
        yield queue
    finally:
        for module in layer.modules():
            if isinstance(module, DeferringLinear):
                module.__class__ = nn.Linear  # type: ignore[assignment]
