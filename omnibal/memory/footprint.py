"""What a pipeline stage holds at its peak, in bytes, term by term."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from omnibal.cluster import OVERHEAD_BYTES, Layout
from omnibal.cost import CostModel, FloatArray, IntArray, Load
from omnibal.errors import ConfigError
from omnibal.memory.frontier import NOT_OFFERED
from omnibal.memory.state import TrainingState
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import Schedule
from omnibal.profile.levels import LEVELS, Level
from omnibal.profile.records import LayerCost, ModelProfile

LOSS_ROWS = 1024
"""Rows whose logits are there at one time. The head's gradient is read and written for so many rows: far fewer would
keep a GPU waiting for memory, and their products no less busy; see tools/head."""
_LOGIT_BYTES = 10
"""Of such a logit: itself in 16 bits, in float32 itself and its logarithmic softmax; those of float32 take 8."""
_GRADIENT_SHARE = 1 / 3
"""Of what a block keeps, so much is alive in gradients at one time; ViT and decoder blocks measure 0.15 to 0.37."""
_SPLIT_GRADIENT_SHARE = 0.6
"""The same where inputs of products stay for weight gradients that wait; the blocks measure 0.44 and 0.55."""


def loss_bytes(head: LayerCost, target_tokens: FloatArray, tensor_parallel: int = 1) -> FloatArray:
    """What the loss of micro-batches needs at its peak: logits of some rows, and their part of the head's gradient.

    Args:
        head: The last layer.
        target_tokens: Of each micro-batch, in any shape.
        tensor_parallel: Ranks that share the vocabulary.
    """
    logits = _LOGIT_BYTES * np.minimum(target_tokens, LOSS_ROWS) * head.sizes.get("vocab", 0) / tensor_parallel
    found: FloatArray = logits + head.gradient_bytes * (target_tokens > LOSS_ROWS)
    return found


@dataclass(frozen=True)
class StageMemory:
    """Bytes that one device of a stage holds at its peak."""

    parameters: int
    """In the dtype of the forward pass."""
    gradients: int
    """Whole on every replica: a pipeline runs under ZeRO stage 0 or 1."""
    optimizer: int
    """Optimizer state and master weights; a replica's share, but for ZeRO stage 0 in float32."""
    activations: int
    """Kept from forward to backward, for all micro-batches in flight."""
    pending: int
    """Kept from one backward pass to the next for weight gradients that wait; nothing under 1F1B."""
    buffers: int
    """What comes from and goes to the neighbouring stages."""
    transient: int
    """What a layer's backward pass or the optimizer's step needs beyond what has been freed by then, at the most."""
    logits: int
    """What the loss needs beyond that, on the last stage."""
    overhead: int
    """Whatever the model is: contexts, libraries, communication buffers."""

    @property
    def total(self) -> int:
        """The peak."""
        return sum(asdict(self).values())


@dataclass(frozen=True, eq=False)
class Footprint:
    """The memory of every possible stage of a model, for micro-batches of one size.

    Arrays have one row per layer and one column per level, in the order of ``LEVELS``; a level that a layer does not
    offer has ``NOT_OFFERED`` bytes. Matrices over possible stages have the shape (layers + 1, layers + 1): entry
    ``[a, b]`` belongs to layers ``a`` to ``b - 1``.

    Args:
        profile: What the layers hold.
        load: One micro-batch, the largest there can be.
        schedule: Decides how many micro-batches a stage holds at a time; without a frozen front, which follows from
            what a stage holds.
        layout: Replicas, ZeRO stage and precision.
        overhead_bytes: What a device holds beside the model.

    Raises:
        ConfigError: The load is not of a single micro-batch, or the layout's precision is not the profile's.
    """

    profile: ModelProfile
    load: Load
    schedule: Schedule
    layout: Layout
    overhead_bytes: int = OVERHEAD_BYTES
    state: TrainingState = field(init=False)
    """What does not depend on micro-batches."""

    def __post_init__(self) -> None:
        if self.load.shape != ():
            raise ConfigError(f"load must be of a single micro-batch, got shape {self.load.shape}")
        object.__setattr__(self, "state", TrainingState(self.profile, self.layout))

    @cached_property
    def kept_bytes(self) -> IntArray:
        """What a layer keeps of one micro-batch at each level, shape (layers, levels).

        No gradient passes the layers before the first trained one: they keep nothing.
        """
        kept = self._saved.copy()
        frozen = kept[: self.profile.frozen_front]
        frozen[frozen != NOT_OFFERED] = 0
        return kept

    def transient_bytes(self, stage: int, stop: int) -> IntArray:
        """What running a layer backward needs beside what is kept, shape (layers before stop, levels).

        That is what recomputing it brings back, and gradients: of its output and its input (pixels have none), or
        within it. Where weight gradients wait, what this micro-batch keeps for those of the layers behind it is there
        too, and its own take the place of the gradients within it if they are more.

        Args:
            stage: The layer's place in the pipeline.
            stop: Where the stage ends.
        """
        if not self.schedule.pending_weights[stage]:
            return self._transient[:stop]
        own = self._pending[np.arange(stop), np.arange(1, stop + 1)]  # each layer by itself
        behind = self._pending[1 : stop + 1, stop]
        beyond_kept = own[:, None] - self.kept_bytes[:stop]
        transient: IntArray = np.maximum(self._split_transient[:stop], beyond_kept) + behind[:, None]
        return transient

    def pending_bytes(self, stage: int) -> IntArray:
        """The most that weight gradients of every possible stage in this place keep while they wait."""
        pending: IntArray = self.schedule.pending_weights[stage] * self._pending
        return pending

    @property
    def loss_bytes(self) -> int:
        """What the loss needs at its peak, on the last stage: logits of some rows, and their part of the gradient."""
        head = self.profile.layers[-1]
        if head.kind != "head":
            return 0
        return math.ceil(loss_bytes(head, self.load.target_tokens, self.profile.tensor_parallel))

    def least_transient(self, stage: int) -> int:
        """Transient bytes of a stage whatever its layers and levels: on the last stage, those of the loss."""
        return self.loss_bytes if stage == self.schedule.num_stages - 1 else 0

    def fixed_bytes(self, stage: int) -> IntArray:
        """What every possible stage in this place holds whatever its levels: all but activations and transient."""
        return self.state.whole + self._waiting(stage) + self._buffers(stage) + self.overhead_bytes

    def update_bytes(self, stage: int) -> IntArray:
        """What the end of a step needs beyond the fixed bytes of every possible stage: at least so much its peak is.

        Activations, what waited and buffers are gone by then, so it may be negative.
        """
        beyond: IntArray = self.state.update - self._waiting(stage) - self._buffers(stage)
        return beyond

    def stage(self, stage: int, layers: range, levels: Sequence[Level]) -> StageMemory:
        """The memory of one stage.

        Args:
            stage: Its place in the pipeline.
            layers: The layers it holds.
            levels: One for each of them.

        Raises:
            ConfigError: A layer does not offer its level.
        """
        a, b = layers.start, layers.stop
        rows, columns = np.arange(a, b), np.array([LEVELS.index(level) for level in levels])
        kept, transient = self.kept_bytes[rows, columns], self.transient_bytes(stage, b)[rows, columns]
        if (kept == NOT_OFFERED).any():
            layer = int(np.argmax(kept == NOT_OFFERED))
            raise ConfigError(
                f"recompute must be a level that the profile has for {self.profile.layers[a + layer].name}, "
                f"got {levels[layer]!r}"
            )
        freed = kept[::-1].cumsum()[::-1] - kept  # by the time a layer runs backward, by those behind it
        activations = self.schedule.in_flight[stage] * int(kept.sum())
        update = int(self.update_bytes(stage)[a, b]) - activations
        needed = max(int((transient - freed).max()), update)
        return StageMemory(
            parameters=int(self.state.parameters[a, b]),
            gradients=int(self.state.gradients[a, b]),
            optimizer=int(self.state.optimizer[a, b]),
            activations=activations,
            pending=int(self._waiting(stage)[a, b]),
            buffers=int(self._buffers(stage)[a, b]),
            transient=needed,
            logits=max(self.least_transient(stage) - needed, 0),
            overhead=self.overhead_bytes,
        )

    def stages(self, partition: Partition, levels: Sequence[Level]) -> tuple[StageMemory, ...]:
        """The memory of every stage of a partition, with a level for each layer of the model."""
        return tuple(
            self.stage(stage, range(a, b), levels[a:b]) for stage, (a, b) in enumerate(pairwise(partition.boundaries))
        )

    @cached_property
    def _saved(self) -> IntArray:
        """What a layer would keep if a gradient passed it."""
        return np.array([[self._saved_at(layer, level) for level in LEVELS] for layer in self.profile.layers])

    @cached_property
    def _transient(self) -> IntArray:
        """Where no weight gradient waits. A forward pass that keeps nothing needs no more than a backward pass."""
        return self._brought(_GRADIENT_SHARE)

    @cached_property
    def _split_transient(self) -> IntArray:
        """Without what waits of the layers behind."""
        return self._brought(_SPLIT_GRADIENT_SHARE)

    def _brought(self, gradient_share: float) -> IntArray:
        """What recomputation brings back, and gradients."""
        everything = self._saved[:, :1]
        # Recomputing a layer brings back what it did not keep, and its backward pass begins after that.
        recomputed = np.maximum(everything - self._saved, 0)
        around = self._sent[1:] + np.concatenate([[0], self._sent[1:-1]])
        within = (gradient_share * everything).astype(np.int64)
        within[[layer.kind == "head" for layer in self.profile.layers]] = 0  # its gradients are what it keeps
        gradients = np.maximum(around[:, None], within)
        return np.where(self._saved == NOT_OFFERED, NOT_OFFERED, recomputed + gradients)

    @cached_property
    def _pending(self) -> IntArray:
        """What one micro-batch's weight gradients of every possible stage keep."""
        sums = np.concatenate([[0], np.cumsum([self._bytes(layer.pending_bytes) for layer in self.profile.layers])])
        pending: IntArray = sums[None, :] - sums[:, None]
        return pending

    def _waiting(self, stage: int) -> IntArray:
        """What those of the micro-batches before the one that runs backward keep."""
        waiting: IntArray = max(self.schedule.pending_weights[stage] - 1, 0) * self._pending
        return waiting

    def _saved_at(self, layer: LayerCost, level: Level) -> int:
        return self._bytes(layer.saved_bytes[level]) if level in layer.saved_bytes else NOT_OFFERED

    def _bytes(self, model: CostModel) -> int:
        return int(np.ceil(model(self.load)))

    @cached_property
    def _sent(self) -> IntArray:
        """What passes each boundary, shape (layers + 1,): the pixels at first, the loss at last."""
        layers = self.profile.layers
        pixels = self._bytes(layers[0].saved_bytes["full"])
        return np.array([pixels, *(self._bytes(layer.output_bytes) for layer in layers)])

    def _buffers(self, stage: int) -> IntArray:
        """DeepSpeed's pipe buffers: input and output of every micro-batch held; then what is on its way.

        Under 1F1B an input goes back as a gradient, and an output comes back as one. Where weight gradients wait so do
        transfers: gradients of inputs until as many micro-batches later as the
        stage before has in flight; and the next gradient of an output comes before the last one is used up. No
        gradient goes back to a frozen front, whose stages hold one micro-batch and, where transfers wait, outputs that
        have not been fetched.
        """
        is_first, is_last = stage == 0, stage == self.schedule.num_stages - 1
        splits, held = any(self.schedule.pending_weights), self.schedule.in_flight[stage]
        gradients_back = self.schedule.in_flight[stage - 1] if splits else 1
        trained_before = np.arange(len(self._sent)) > self.profile.frozen_front
        inputs = self._sent * (held + (0 if is_first else np.where(trained_before, gradients_back, 1)))
        outputs = self._sent * (0 if is_last else held + (2 if splits else 1))
        buffers: IntArray = inputs[:, None] + outputs[None, :]
        if not is_last:
            front = 2 * self._sent[:, None] + self._sent[None, :] * (held if splits else 1)
            buffers = np.where(trained_before[None, :], buffers, front)
        return buffers
