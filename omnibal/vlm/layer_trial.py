"""Run one pipeline layer on one pack and measure it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from omnibal.memory.footprint import LEVELS, Level
from omnibal.pipeline.measure import Timing, kept_bytes, time_passes
from omnibal.vlm.layers import Payload
from omnibal.vlm.loss import token_losses
from omnibal.vlm.recompute import run_layer


@dataclass(frozen=True)
class LayerOnPack:
    """What a layer costs on one pack."""

    forward: Timing
    backward: Timing
    """To the inputs and the weights."""
    backward_frozen: Timing
    """With frozen weights."""
    backward_by_level: Mapping[Level, Timing]
    """With recomputation."""
    kept_bytes: Mapping[Level, int]
    """From forward to backward."""
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
        backward_frozen = backward
        if any(parameter.requires_grad for parameter in self.layer.parameters()):
            with _frozen(self.layer):
                _, backward_frozen = self.time_passes()
        free = [*self.layer.parameters(), *self.layer.buffers(), *self.payload[1:]]
        return LayerOnPack(
            forward=forward,
            backward=backward,
            backward_frozen=backward_frozen,
            backward_by_level={level: self.time_passes(level)[1] for level in LEVELS if level != "none"},
            kept_bytes={level: kept_bytes(partial(self._output, level), free=free) for level in LEVELS},
            sent_bytes=self._output("none").nbytes,
        )

    def time_passes(self, level: Level = "none") -> tuple[Timing, Timing]:
        """Seconds of a forward and a backward pass."""
        return time_passes(partial(self._objective, level), self.payload[0].device)

    def _output(self, level: Level) -> Tensor:
        hidden = self.payload[0].detach().requires_grad_(not self.from_pixels)
        return run_layer(self.layer, (hidden, *self.payload[1:]), level)[0]

    def _objective(self, level: Level) -> Tensor:
        output = self._output(level)
        return output if self.labels is None else token_losses(output, self.labels).sum()


@contextmanager
def _frozen(layer: nn.Module) -> Iterator[None]:
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
