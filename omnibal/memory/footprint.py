"""What a pipeline stage holds at its peak, in bytes, term by term; an encoder on all devices beside it, too.

Matrices over possible stages have the shape (layers + 1, layers + 1): entry ``[a, b]`` belongs to layers ``a`` to
``b - 1``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np

from omnibal.cluster import OVERHEAD_BYTES, Layout
from omnibal.cost import CostModel, FloatArray, IntArray, Load
from omnibal.errors import ConfigError
from omnibal.pipeline.partition import Partition, language_partition
from omnibal.pipeline.schedule import Schedule, one_f_one_b
from omnibal.pipeline.times import share_of_step, split_profile
from omnibal.profile.records import ELEMENT_BYTES, FLOAT32, LEVELS, LayerCost, Level, ModelProfile

# Float32 numbers per parameter within torch's AdamW: the root of the second moment, and the quotient with it.
_ADAM_TEMPORARIES = 2
# The most gradients that DeepSpeed copies into one buffer to reduce them over the replicas (reduce_bucket_size). An
# upper bound where our engine sends gradients layer by layer.
REDUCED_AT_ONCE: Final = 500_000_000


@dataclass(frozen=True, eq=False)
class TrainingState:
    """Weights, gradients and optimizer state of every possible stage, as one replica holds them."""

    profile: ModelProfile
    layout: Layout

    def __post_init__(self) -> None:
        if self.profile.dtype != self.layout.precision:
            raise ConfigError(
                f"precision of the layout must be the profile's {self.profile.dtype}, got {self.layout.precision}"
            )

    @property
    def whole(self) -> IntArray:
        return self.parameters + self.gradients + self.optimizer

    @cached_property
    def parameters(self) -> IntArray:
        return self._between(lambda layer: layer.parameter_bytes)

    @property
    def _is_float32(self) -> bool:
        return ELEMENT_BYTES[self.profile.dtype] == FLOAT32

    @cached_property
    def _trained(self) -> IntArray:
        """Bytes of one gradient of each trained parameter, in the dtype of the forward pass."""
        return self._between(lambda layer: layer.gradient_bytes)

    @property
    def _trained_float32(self) -> IntArray:
        return self._trained * FLOAT32 // ELEMENT_BYTES[self.profile.dtype]

    @cached_property
    def gradients(self) -> IntArray:
        # Whole on every replica, with the second buffer in which DeepSpeed sums 16-bit ones.
        if self.layout.sums_float32:
            return self._trained + self._trained_float32
        return self._trained * (1 if self._is_float32 or self.layout.zero_stage else 2)

    @cached_property
    def optimizer(self) -> IntArray:
        # A profile counts the master weights of 16-bit parameters as optimizer state. ZeRO clones float32 weights, too.
        state = self._between(lambda layer: layer.optimizer_bytes)
        if self._is_float32 and self.layout.zero_stage == 0:
            return state
        return self._share(state + self._trained if self._is_float32 else state)

    @cached_property
    def update(self) -> IntArray:
        """Bytes of the optimizer's step beyond `whole`: gradients being reduced, or the optimizer's temporaries."""
        if self._is_float32 and self.layout.zero_stage == 0:
            return self._trained
        # The optimizer runs on one flat float32 gradient, a copy unless gradients are summed in float32. ZeRO frees the
        # parameters' own gradients once it has the copy.
        copies = _ADAM_TEMPORARIES + (0 if self.layout.sums_float32 else 1)
        computed = self._share(copies * self._trained_float32)
        if self.layout.zero_stage and not self.layout.sums_float32:
            computed = computed - self._trained
        return np.maximum(computed, np.minimum(self._trained, REDUCED_AT_ONCE * ELEMENT_BYTES[self.profile.dtype]))

    def _share(self, sizes: IntArray) -> IntArray:
        return -(-sizes // self.layout.num_replicas)  # rounded up

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


NOT_OFFERED = 2**62  # bytes of a recompute level that a layer does not have
# Rows whose logits exist at one time. Each chunk of rows reads and writes the head's whole gradient, so that far
# smaller chunks would keep a GPU waiting for memory (measured in tools/head).
LOSS_ROWS = 1024
# Bytes per logit: 2 in 16 bits, and 4 + 4 in float32 for the logit and its log-softmax. A float32 model needs 8.
_LOGIT_BYTES = 10
# Gradients alive at one time, as a share of what a block keeps. ViT and decoder blocks measure 0.15 to 0.37.
GRADIENT_SHARE = 1 / 3
# The share if inputs of products stay for weight gradients that wait. The blocks measure 0.44 and 0.55.
_SPLIT_GRADIENT_SHARE = 0.6


def loss_bytes(head: LayerCost, target_tokens: FloatArray, tensor_parallel: int = 1) -> FloatArray:
    """Peak bytes of the loss, by micro-batch: logits of some rows, and a chunk's part of the head's gradient."""
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
    """Inputs that weight gradients keep while they wait; nothing under 1F1B."""
    buffers: int
    """Tensors received from and sent to the neighbouring stages."""
    transient: int
    """The most that a layer's backward pass or the optimizer's step needs beyond what has been freed by then."""
    logits: int
    """What the loss needs beyond ``transient``, on the last stage."""
    overhead: int
    """Contexts, libraries and communication buffers, which do not depend on the model."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True, eq=False)
class Footprint:
    """The memory of every possible stage of a model, for micro-batches of one size, the largest there can be.

    The schedule is given without a frozen front, which follows from the layers of a stage. Arrays by level have a
    column for each of ``LEVELS``; a level that a layer does not offer has ``NOT_OFFERED`` bytes.
    """

    profile: ModelProfile
    load: Load
    schedule: Schedule
    layout: Layout
    overhead_bytes: int = OVERHEAD_BYTES
    _states: dict[Layout, TrainingState] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.load.shape != ():
            raise ConfigError(f"load must be of a single micro-batch, got shape {self.load.shape}")
        TrainingState(self.profile, self.layout)  # refuses a layout of another precision

    def state(self, stage: int) -> TrainingState:
        layout = self.layout.of_stage(stage)
        if layout not in self._states:
            self._states[layout] = TrainingState(self.profile, layout)
        return self._states[layout]

    @cached_property
    def kept_bytes(self) -> IntArray:
        """What a layer keeps of one micro-batch at each level, shape (layers, levels)."""
        kept = self._saved.copy()
        # No gradient passes the layers before the first trained one, so autograd keeps nothing for them.
        frozen = kept[: self.profile.frozen_front]
        frozen[frozen != NOT_OFFERED] = 0
        return kept

    def transient_bytes(self, stage: int, stop: int) -> IntArray:
        """Bytes that a layer's backward pass needs beside what is kept, shape (layers before ``stop``, levels)."""
        # transient = recomputed activations + max(gradients of output and input, gradients within the layer)
        # If weight gradients wait, the micro-batch also holds the inputs that those of the later layers of the stage
        # keep (up to layer ``stop``), and the layer's own waiting inputs replace its gradients where they are more.
        if not self.schedule.pending_weights[stage]:
            return self._transient[:stop]
        own = self._pending[np.arange(stop), np.arange(1, stop + 1)]  # each layer by itself
        behind = self._pending[1 : stop + 1, stop]
        beyond_kept = own[:, None] - self.kept_bytes[:stop]
        transient: IntArray = np.maximum(self._split_transient[:stop], beyond_kept) + behind[:, None]
        return transient

    def pending_bytes(self, stage: int) -> IntArray:
        """The most that waiting weight gradients keep, for every possible stage at this place of the pipeline."""
        pending: IntArray = self.schedule.pending_weights[stage] * self._pending
        return pending

    @property
    def loss_bytes(self) -> int:
        head = self.profile.layers[-1]
        if head.kind != "head":
            return 0
        return math.ceil(loss_bytes(head, self.load.target_tokens, self.profile.tensor_parallel["language"]))

    def least_transient(self, stage: int) -> int:
        """Transient bytes that a stage needs with any layers and levels: on the last stage, those of the loss."""
        return self.loss_bytes if stage == self.schedule.num_stages - 1 else 0

    def fixed_bytes(self, stage: int) -> IntArray:
        """What every possible stage at this place holds at any levels: all but activations and transient bytes."""
        return self.state(stage).whole + self._waiting(stage) + self._buffers(stage) + self.overhead_bytes

    def update_bytes(self, stage: int) -> IntArray:
        """Peak of the optimizer's step beyond the fixed bytes, for every possible stage; may be negative."""
        # Activations, waiting inputs and buffers have been freed by then.
        beyond: IntArray = self.state(stage).update - self._waiting(stage) - self._buffers(stage)
        return beyond

    def passing_bytes(self, stage: int, layers: range, levels: Sequence[Level]) -> tuple[int, int]:
        """What a stage keeps of all micro-batches in flight, and the most that a backward pass needs beside it."""
        a, b = layers.start, layers.stop
        rows, columns = np.arange(a, b), np.array([LEVELS.index(level) for level in levels])
        kept, transient = self.kept_bytes[rows, columns], self.transient_bytes(stage, b)[rows, columns]
        if (kept == NOT_OFFERED).any():
            layer = int(np.argmax(kept == NOT_OFFERED))
            raise ConfigError(
                f"recompute must be a level that the profile has for {self.profile.layers[a + layer].name}, "
                f"got {levels[layer]!r}"
            )
        # When a layer runs backward, the layers behind it have freed what they kept of this micro-batch.
        freed = kept[::-1].cumsum()[::-1] - kept
        return self.schedule.in_flight[stage] * int(kept.sum()), int((transient - freed).max())

    def stage(self, stage: int, layers: range, levels: Sequence[Level]) -> StageMemory:
        a, b = layers.start, layers.stop
        activations, passing = self.passing_bytes(stage, layers, levels)
        needed = max(passing, int(self.update_bytes(stage)[a, b]) - activations)
        state = self.state(stage)
        return StageMemory(
            parameters=int(state.parameters[a, b]),
            gradients=int(state.gradients[a, b]),
            optimizer=int(state.optimizer[a, b]),
            activations=activations,
            pending=int(self._waiting(stage)[a, b]),
            buffers=int(self._buffers(stage)[a, b]),
            transient=needed,
            logits=max(self.least_transient(stage) - needed, 0),
            overhead=self.overhead_bytes,
        )

    def stages(self, partition: Partition, levels: Sequence[Level]) -> tuple[StageMemory, ...]:
        return tuple(
            self.stage(stage, range(a, b), levels[a:b]) for stage, (a, b) in enumerate(pairwise(partition.boundaries))
        )

    @cached_property
    def _saved(self) -> IntArray:
        costs = [[layer.saved_bytes.get(level) for level in LEVELS] for layer in self.profile.layers]
        return np.array([[NOT_OFFERED if cost is None else self._bytes(cost) for cost in row] for row in costs])

    @cached_property
    def _transient(self) -> IntArray:
        return self._brought(GRADIENT_SHARE)

    @cached_property
    def _split_transient(self) -> IntArray:
        return self._brought(_SPLIT_GRADIENT_SHARE)

    def _brought(self, gradient_share: float) -> IntArray:
        """Recomputed activations and gradients of a backward pass, shape (layers, levels)."""
        everything = self._saved[:, :1]  # level "none" keeps all that a backward pass needs
        # Recomputing a layer brings back what it did not keep, and its backward pass begins after that.
        recomputed = np.maximum(everything - self._saved, 0)
        # The gradients of a layer's output and input; the pixels, input of the first layer, have none.
        around = self._sent[1:] + np.concatenate([[0], self._sent[1:-1]])
        within = (gradient_share * everything).astype(np.int64)
        within[[layer.kind == "head" for layer in self.profile.layers]] = 0  # its gradients are what it keeps
        gradients = np.maximum(around[:, None], within)
        return np.where(self._saved == NOT_OFFERED, NOT_OFFERED, recomputed + gradients)

    @cached_property
    def _pending(self) -> IntArray:
        # What one micro-batch's weight gradients keep while they wait, by possible stage.
        sums = np.concatenate([[0], np.cumsum([self._bytes(layer.pending_bytes) for layer in self.profile.layers])])
        pending: IntArray = sums[None, :] - sums[:, None]
        return pending

    def _waiting(self, stage: int) -> IntArray:
        # Of micro-batches before the one that runs backward.
        waiting: IntArray = max(self.schedule.pending_weights[stage] - 1, 0) * self._pending
        return waiting

    def _bytes(self, model: CostModel) -> int:
        return int(np.ceil(model(self.load)))

    @cached_property
    def _sent(self) -> IntArray:
        # Bytes that pass each boundary, (layers + 1,): first the pixels, last the loss.
        layers = self.profile.layers
        pixels = self._bytes(layers[0].saved_bytes["full"])
        return np.array([pixels, *(self._bytes(layer.output_bytes) for layer in layers)])

    def _buffers(self, stage: int) -> IntArray:
        """DeepSpeed's pipe buffers: input and output of every micro-batch held, and tensors on their way."""
        is_first, is_last = stage == 0, stage == self.schedule.num_stages - 1
        # Under DeepSpeed's 1F1B one gradient of an input and one of an output is on its way. Under our tables transfers
        # wait, too: a gradient of an input stays until the stage before has run as many micro-batches as it has in
        # flight, and the next gradient of an output arrives before the last one is used up. Stages of a frozen front
        # send no gradient back; they hold one micro-batch and, under our tables, outputs that nobody has fetched.
        # Where the encoder has devices of its own a table runs whatever the schedule, and a sender of gradients keeps
        # those of its own share of what the stage before has in flight.
        schedule = self.schedule
        splits, held = any(schedule.pending_weights) or bool(schedule.replicas), schedule.in_flight[stage]
        before = max(stage - 1, 0)
        in_flight = schedule.in_flight[before] * schedule.micro_batches_of(stage)
        gradients_back = -(-in_flight // schedule.micro_batches_of(before)) if splits else 1
        trained_before = np.arange(len(self._sent)) > self.profile.frozen_front
        inputs = self._sent * (held + (0 if is_first else np.where(trained_before, gradients_back, 1)))
        outputs = self._sent * (0 if is_last else held + (2 if splits else 1))
        buffers: IntArray = inputs[:, None] + outputs[None, :]
        if not is_last:
            front = 2 * self._sent[:, None] + self._sent[None, :] * (held if splits else 1)
            buffers = np.where(trained_before[None, :], buffers, front)
        return buffers


@dataclass(frozen=True, eq=False)
class SpreadFootprint:
    """The memory of every stage of the LLM with a spread encoder beside it.

    ``load`` is the largest micro-batch there can be, ``mean`` the mean one of the step that has most images: all images
    of a step are encoded before its pipeline, and kept until they are trained on behind it. ``schedule`` is the LLM's.
    """

    profile: ModelProfile
    load: Load
    mean: Load
    schedule: Schedule
    layout: Layout
    overhead_bytes: int = OVERHEAD_BYTES

    @cached_property
    def language(self) -> Footprint:
        return Footprint(
            split_profile(self.profile)[1], self.load, self.schedule, self.layout.parts[1], self.overhead_bytes
        )

    @cached_property
    def encoder(self) -> Footprint:
        """The encoder by itself, on a device's share of the images; nothing of a process."""
        share = share_of_step(self._of_replica, self.layout)
        return Footprint(split_profile(self.profile)[0], share, one_f_one_b(1, 1), self.layout.parts[0], 0)

    @property
    def border(self) -> int:
        return len(self.encoder.profile.layers)

    @property
    def _of_replica(self) -> Load:
        return self.mean * self.schedule.micro_batches

    def beside_bytes(self, levels: Sequence[Level]) -> tuple[int, ...]:
        """What a device of each stage holds during the LLM's passes beside what the LLM does."""
        own = self._alone(levels)
        held = own.total - own.transient - own.logits
        return tuple(held + self._features(stage) for stage in range(self.schedule.num_stages))

    def stages(self, partition: Partition, levels: Sequence[Level]) -> tuple[StageMemory, ...]:
        behind = language_partition(self.profile.layers, partition)
        return tuple(self.stage(stage, behind.layers(stage), levels) for stage in range(self.schedule.num_stages))

    def stage(self, stage: int, layers: range, levels: Sequence[Level]) -> StageMemory:
        border, own = self.border, self._alone(levels)
        levels_behind = levels[border + layers.start : border + layers.stop]
        language = self.language.stage(stage, layers, levels_behind)
        held = {
            name: getattr(own, name) + getattr(language, name)
            for name in ("parameters", "gradients", "optimizer", "activations", "pending", "buffers")
        }
        held["buffers"] += self._features(stage)
        kept = held["activations"] + held["pending"] + held["buffers"]
        # Beyond what is kept: a pass of the LLM; one of the encoder, when the LLM has freed all; the optimizer's step,
        # when the encoder has; and pixels on their way, when nobody keeps anything yet.
        _, passing = self.language.passing_bytes(stage, layers, levels_behind)
        _, encoding = self.encoder.passing_bytes(0, range(border), levels[:border])
        of_language = language.activations + language.pending + language.buffers
        states = self.language.state(stage), self.encoder.state(0)
        update = max(int(states[0].update[layers.start, layers.stop]), int(states[1].update[0, border]))
        needed = max(passing, encoding - of_language, update - kept, self._arriving(stage) - kept)
        return StageMemory(
            **held,
            transient=needed,
            logits=max(self.language.least_transient(stage) - needed, 0),
            overhead=self.overhead_bytes,
        )

    def pending_bytes(self, stage: int) -> IntArray:
        """As of ``Footprint``, in layers of the whole model; nothing of the encoder waits."""
        pending: IntArray = np.pad(self.language.pending_bytes(stage), (self.border, 0), mode="edge")
        return pending

    def _alone(self, levels: Sequence[Level]) -> StageMemory:
        return self.encoder.stage(0, range(self.border), levels[: self.border])

    def _features(self, stage: int) -> int:
        """Bytes of a replica's features, and of their gradients where the encoder is trained; on the first stage."""
        if stage:
            return 0
        layers = self.encoder.profile.layers
        ways = 1 + (self.encoder.profile.frozen_front < self.border)
        # The LLM's buffers count the features of micro-batches in flight, which are parts of these.
        counted = self.schedule.in_flight[0] * int(self.language.profile.layers[0].saved_bytes["full"](self.load))
        return max(ways * int(layers[-1].output_bytes(self._of_replica)) - counted, 0)

    def _arriving(self, stage: int) -> int:
        """Bytes of pixels in an all-to-all: what comes, and what the first stage sends, as read and in its order."""
        pixels = self.encoder.profile.layers[0].saved_bytes["full"]
        share = int(pixels(self.encoder.load))
        return 2 * share if stage else share + 2 * int(pixels(self._of_replica))
