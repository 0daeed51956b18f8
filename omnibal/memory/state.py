"""What a stage holds with any micro-batches: weights, gradients, optimizer state; and what an update needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from omnibal.cluster import Layout
from omnibal.cost import IntArray
from omnibal.errors import ConfigError
from omnibal.profile.records import LayerCost, ModelProfile

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}  # by the dtype of the forward pass
_FLOAT32 = 4
# Float32 numbers per parameter within torch's AdamW: the root of the second moment, and the quotient with it.
_ADAM_TEMPORARIES = 2
# The most gradients that DeepSpeed copies into one buffer to reduce them over the replicas (reduce_bucket_size). An
# upper bound where our engine sends gradients layer by layer.
_REDUCED_AT_ONCE = 500_000_000


@dataclass(frozen=True, eq=False)
class TrainingState:
    """Bytes of every possible stage of a model, as one replica holds them.

    Matrices over possible stages have the shape (layers + 1, layers + 1): entry ``[a, b]`` belongs to layers ``a`` to
    ``b - 1``.

    Args:
        profile: What the layers hold.
        layout: Replicas, ZeRO stage and precision.

    Raises:
        ConfigError: The layout's precision is not the profile's.
    """

    profile: ModelProfile
    layout: Layout

    def __post_init__(self) -> None:
        if self.profile.dtype != self.layout.precision:
            raise ConfigError(
                f"precision of the layout must be the profile's {self.profile.dtype}, got {self.layout.precision}"
            )

    @property
    def whole(self) -> IntArray:
        """Bytes that stay from step to step."""
        return self.parameters + self.gradients + self.optimizer

    @cached_property
    def parameters(self) -> IntArray:
        """Parameters in the dtype of the forward pass."""
        return self._between(lambda layer: layer.parameter_bytes)

    @property
    def _is_float32(self) -> bool:
        return ELEMENT_BYTES[self.profile.dtype] == _FLOAT32

    @cached_property
    def _trained(self) -> IntArray:
        """Bytes of one gradient of each trained parameter, in the dtype of the forward pass."""
        return self._between(lambda layer: layer.gradient_bytes)

    @property
    def _trained_float32(self) -> IntArray:
        """Bytes of one float32 gradient of each trained parameter."""
        return self._trained * _FLOAT32 // ELEMENT_BYTES[self.profile.dtype]

    @cached_property
    def gradients(self) -> IntArray:
        """Gradients, whole on every replica, with the second buffer in which DeepSpeed sums 16-bit ones."""
        if self.layout.sums_float32:
            return self._trained + self._trained_float32
        return self._trained * (1 if self._is_float32 or self.layout.zero_stage else 2)

    @cached_property
    def optimizer(self) -> IntArray:
        """Optimizer state and master weights."""
        # A profile counts the master weights of 16-bit parameters as optimizer state. ZeRO clones float32 weights, too.
        state = self._between(lambda layer: layer.optimizer_bytes)
        if self._is_float32 and self.layout.zero_stage == 0:
            return state
        return self._share(state + self._trained if self._is_float32 else state)

    @cached_property
    def update(self) -> IntArray:
        """Bytes of the optimizer's step beyond `whole`: gradients being reduced, or the optimizer's temporaries.

        The optimizer runs on one flat float32 gradient, a copy unless gradients are summed in float32. ZeRO frees the
        parameters' own gradients once it has the copy.
        """
        if self._is_float32 and self.layout.zero_stage == 0:
            return self._trained
        copies = _ADAM_TEMPORARIES + (0 if self.layout.sums_float32 else 1)
        computed = self._share(copies * self._trained_float32)
        if self.layout.zero_stage and not self.layout.sums_float32:
            computed = computed - self._trained
        return np.maximum(computed, np.minimum(self._trained, _REDUCED_AT_ONCE * ELEMENT_BYTES[self.profile.dtype]))

    def _share(self, sizes: IntArray) -> IntArray:
        """One replica's share, rounded up."""
        return -(-sizes // self.layout.num_replicas)

    def _between(self, bytes_of: Callable[[LayerCost], int]) -> IntArray:
        """Sums over the layers of every possible stage; a tied weight counts once in a stage."""
        layers = self.profile.layers
        sums = np.concatenate([[0], np.cumsum([bytes_of(layer) for layer in layers])]).astype(np.int64)
        between: IntArray = sums[None, :] - sums[:, None]
        newest: dict[str, int] = {}  # by tied weight, the last layer so far that holds it
        for index, layer in enumerate(layers):
            if layer.tied_key is not None:
                # Stages [a, b] with a at or before the last holder and b behind this one hold the weight twice.
                if layer.tied_key in newest:
                    between[: newest[layer.tied_key] + 1, index + 1 :] -= bytes_of(layer)
                newest[layer.tied_key] = index
        return between
