"""An emulated device: it sleeps for the predicted seconds of each layer, counts predicted bytes, and keeps a log.

Sleeps are computed from due times and not from durations, so that the time that Python and DeepSpeed take does not add
to them. Transfers beside the computations take no time of a process: the sender writes the arrival time into memory
that all processes share, and the receiver sleeps until then.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from mmap import mmap
from time import perf_counter, sleep
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from omnibal.cost import FloatArray, Load
from omnibal.errors import InfeasibleError, bytes_in_words
from omnibal.memory.footprint import SpreadFootprint, StageMemory
from omnibal.pipeline.schedule import Operation
from omnibal.pipeline.times import IMAGES, EncoderWork, Exchanges, StepTimes, Unit, numbered, step_times
from omnibal.profile.records import Level, every_layer
from tools.emulator.run import EmulationTask, Entry, StepLog

# A device's bytes: fixed ones through the step; kept ones of a micro-batch from its forward to its backward pass;
# transient ones within its backward pass; pending ones from a split backward pass to the weight gradients.
COMPUTATIONS = (Operation.F, Operation.BW, Operation.B, Operation.W)
DOWN, UP = 0, 1  # directions in which tensors are sent beside the computations
DOWNSTREAM = (Operation.SEND_ACTIVATION, Operation.RECEIVE_GRADIENT)


@dataclass(frozen=True)
class StageWork:
    """What a device does in one step, in seconds of the cluster and bytes."""

    # By micro-batch and layer, shape (micro-batches, layers of the stage). With a spread encoder its layers come first,
    # and a device's share of the images is one more micro-batch, the last one: index IMAGES.
    forward: FloatArray
    backward: FloatArray  # to the inputs, with recomputation
    weight: FloatArray  # backward to the weights
    split: FloatArray  # what the backward to the inputs takes longer if that to the weights waits
    sent_bytes: FloatArray  # of the layer's output
    # By micro-batch: transfer from and to the stage before (0 in the first stage) and behind (0 in the last one).
    upstream: FloatArray
    downstream: FloatArray
    # By layer: adding up its gradients over the replicas, sending its updated weights to replicas that do not own them.
    reduce: FloatArray
    gather: FloatArray
    optimizer: float
    fixed_bytes: int
    # By micro-batch:
    kept_bytes: tuple[int, ...]
    transient_bytes: tuple[int, ...]
    pending_bytes: tuple[int, ...]
    exchanges: Exchanges | None = None  # of a spread encoder


class Clocks(NamedTuple):
    """Times of the wall clock that all devices of a cluster read and write."""

    # When a tensor that is sent beside the computations arrives, by receiver: (directions, stages, micro-batches of the
    # step by their numbers). Its sender writes it before the tensor itself, so that a receiver always finds it.
    arrivals: FloatArray
    complete: FloatArray  # when the last gradient of each layer is complete: (copies of the layer, layers)

    @classmethod
    def of(cls, task: EmulationTask) -> "Clocks":
        """Zeros in memory that forked processes share."""
        stages, layout = task.plan.num_stages, task.plan.layout
        copies = max(part.num_replicas for part in (layout, layout.encoder) if part is not None)
        numbers = task.plan.micro_batches * layout.num_replicas
        shapes = (2, stages, numbers), (copies, len(task.profile.layers))
        return cls(*(np.frombuffer(mmap(-1, 8 * prod(shape)), dtype=np.float64).reshape(shape) for shape in shapes))


def _times(task: EmulationTask, whole: Load, levels: Sequence[Level]) -> StepTimes:
    """Seconds of every layer that is pipelined for all micro-batches of a step, as the plan is simulated."""
    plan, layout, (links, encoder_links) = task.plan, task.plan.layout, task.plan.links_of_parts
    border = plan.partition.boundaries[layout.encoder_stages]
    unit = Unit(border, layout.shape(0)[0], encoder_links) if layout.has_units else None
    return step_times(
        task.pipelined, [whole], links, zero_stage=layout.zero_stage, recompute=levels,
        num_replicas=layout.num_replicas, unit=unit,
    )  # fmt: skip


def stage_work(task: EmulationTask, step: int, stage: int, replica: int) -> StageWork:
    """The work of one device in a step; as in the engine, a micro-batch above the plan's limits recomputes all."""
    loads, layers, spread = task.steps[step], task.partition.layers(stage), task.num_spread
    first, last = layers.start, layers.stop
    # Replicas of the stage take the step's micro-batches in turns, by their numbers.
    own = slice(replica, None, task.plan.layout.shape(stage)[0])
    whole = numbered(Load.stack(loads))
    load = whole[own]
    exceeds = _exceeds(task, load)
    planned, full = (_times(task, whole, levels[spread:]) for levels in _levels(task))

    def between(name: str) -> FloatArray:
        by_plan, by_full = (np.diff(getattr(times, name)[0, own, first : last + 1]) for times in (planned, full))
        seconds: FloatArray = np.where(exceeds[:, None], by_full, by_plan)
        return seconds

    levels = [_levels(task)[int(above)][spread:][first:last] for above in exceeds]
    footprints = [task.footprint(one) for one in load]
    piped = [each.language if isinstance(each, SpreadFootprint) else each for each in footprints]
    memory = [footprint.stage(stage, layers, of) for footprint, of in zip(piped, levels, strict=True)]
    # A Footprint counts all micro-batches in flight: divide, to hold and free the bytes micro-batch by micro-batch.
    held, waiting = max(task.schedule.in_flight[stage], 1), max(task.schedule.pending_weights[stage], 1)
    work = StageWork(
        forward=between("forward"),
        backward=between("backward"),
        weight=between("weight"),
        split=between("split"),
        sent_bytes=np.stack([layer.output_bytes(load) for layer in task.pipelined.layers[first:last]], axis=1),
        upstream=planned.crossing[0, own, first],
        downstream=planned.crossing[0, own, last],
        reduce=np.diff(planned.reduce[first : last + 1]),
        gather=np.diff(planned.gather[first : last + 1]),
        optimizer=float(planned.optimizer[last] - planned.optimizer[first]),
        fixed_bytes=max(map(_fixed, memory)),
        kept_bytes=tuple(entry.activations // held for entry in memory),
        transient_bytes=tuple(entry.transient for entry in memory),
        pending_bytes=tuple(int(each.pending_bytes(stage)[first, last]) // waiting for each in piped),
    )
    if not spread:
        return work
    of_spread = [each for each in footprints if isinstance(each, SpreadFootprint)]
    return _with_images(work, task.encoder_work(step), of_spread, task.plan.recompute, stage, layers)


def _with_images(
    work: StageWork,
    images: EncoderWork,
    footprints: Sequence[SpreadFootprint],
    levels: Sequence[Level],
    stage: int,
    layers: range,
) -> StageWork:
    """The work of a stage of these layers of the LLM on a device with a spread encoder."""
    times, footprint = images.times, footprints[0]  # all are of the same images
    border = footprint.border

    def beside(name: str) -> FloatArray:
        own = np.diff(getattr(times, name)[0, 0]) if hasattr(times, name) else np.zeros(border)
        ends = [(0, 1), (len(own), 0)]
        seconds: FloatArray = np.pad(getattr(work, name), ends)
        seconds[IMAGES, : len(own)] = own
        return seconds

    alone = footprint.encoder.stage(0, range(border), levels[:border])
    language = footprint.language.stage(stage, layers, levels[border:][layers.start : layers.stop])
    # The encoder runs backward when the LLM has freed what it holds during its passes.
    beyond = max(alone.transient - language.buffers, 0)
    return replace(
        work,
        **{name: beside(name) for name in ("forward", "backward", "weight", "split", "sent_bytes")},
        reduce=np.concatenate([np.diff(times.reduce), work.reduce]),
        gather=np.concatenate([np.diff(times.gather), work.gather]),
        optimizer=work.optimizer + float(times.optimizer[-1]),
        fixed_bytes=max(_fixed(each.stage(stage, layers, levels)) for each in footprints),
        kept_bytes=(*work.kept_bytes, alone.activations),
        transient_bytes=(*work.transient_bytes, beyond),
        pending_bytes=(*work.pending_bytes, 0),
        exchanges=images.exchanges,
    )


def _fixed(memory: StageMemory) -> int:
    return memory.total - memory.activations - memory.pending - memory.transient


def _levels(task: EmulationTask) -> tuple[tuple[Level, ...], tuple[Level, ...]]:
    """The plan's recompute levels, and those of a micro-batch above its limits."""
    return task.plan.recompute, every_layer("full", len(task.profile.layers))


def _exceeds(task: EmulationTask, load: Load) -> NDArray[np.bool_]:
    limits = task.plan.limits
    above: NDArray[np.bool_] = (load.vision_units > max(limits.vision_units, 1)) | (load.llm_tokens > limits.llm_tokens)
    return above


class EmulatedDevice:
    """The device of one stage and replica; ``where`` is its place in error messages."""

    def __init__(self, task: EmulationTask, stage: int, replica: int, where: str, clocks: Clocks) -> None:
        self.task, self.stage, self.replica = task, stage, replica
        self._rank = task.ranks.rank(stage, replica)
        self.peak_bytes = 0
        self.log = StepLog()
        self._where = where
        self._held_bytes = 0
        self._splits = False
        self._due = 0.0
        # The numbers in the step of the device's own micro-batches.
        self.numbers = range(replica, clocks.arrivals.shape[2], task.plan.layout.shape(stage)[0])
        self._arrivals = clocks.arrivals
        layers = task.plan.partition.layers(stage)
        self._layers = [*range(task.num_spread), *range(max(layers.start, task.num_spread), layers.stop)]
        self._complete = clocks.complete
        self._weights_arrive = np.zeros(len(self._layers))
        self._link_is_free = [0.0, 0.0]
        in_front = stage < task.schedule.frozen_stages  # a frozen stage runs forward only
        self._with_transient = (Operation.F,) if in_front else (Operation.BW, Operation.B)

    def begin_step(self, step: int) -> None:
        """Compute the work of a step; called before the step begins, since it takes time itself."""
        self.work = stage_work(self.task, step, self.stage, self.replica)
        self.log = StepLog()
        self._ran: Counter[Operation] = Counter()
        self._step = step
        self._held_bytes = self.work.fixed_bytes  # compared with the budget in the first forward pass

    def begin(self, operation: Operation, micro_batch: int | None = None) -> float:
        """Begin an instruction: hold its bytes, and return the time from which its sleeps are counted.

        ``micro_batch`` is by default the operation's next one.
        """
        micro_batch = self._ran[operation] if micro_batch is None else micro_batch
        self._splits = operation == Operation.B
        if operation == Operation.F:
            self._hold(self.work.kept_bytes[micro_batch], micro_batch)
        if operation in self._with_transient:
            transient = self.work.transient_bytes[micro_batch]
            self._hold(transient, micro_batch)
            self._held_bytes -= transient
        self._due = perf_counter()
        return self._due

    def end(self, operation: Operation, start: float, micro_batch: int | None = None) -> None:
        """End an instruction: free its bytes; a blocking transfer sleeps for the time of its link."""
        self._ran[operation] += micro_batch is None
        micro_batch = self._ran[operation] - 1 if micro_batch is None else micro_batch
        if operation in COMPUTATIONS:
            if operation in (Operation.BW, Operation.B):
                self._held_bytes -= self.work.kept_bytes[micro_batch]
            if operation == Operation.B:
                self._hold(self.work.pending_bytes[micro_batch], micro_batch)
            if operation == Operation.W:
                self._held_bytes -= self.work.pending_bytes[micro_batch]
        else:
            link = self.work.downstream if operation in DOWNSTREAM else self.work.upstream
            self.rest(float(link[micro_batch]))
        self.log.entries.append(Entry(operation, start, perf_counter()))

    def backward_seconds(self, micro_batch: int, place: int) -> float:
        """Backward of a layer to its inputs, as part of the instruction that has begun."""
        seconds = self.work.backward[micro_batch, place]
        return float(seconds + self.work.split[micro_batch, place] if self._splits else seconds)

    def send(self, direction: int, micro_batch: int) -> None:
        """Send a tensor beside the computations; a link carries one tensor at a time."""
        link = self.work.downstream if direction == DOWN else self.work.upstream
        start = max(perf_counter(), self._link_is_free[direction])
        arrival = self._link_is_free[direction] = start + float(link[micro_batch]) * self.task.scale
        peer = self.stage + 1 if direction == DOWN else self.stage - 1
        self._arrivals[direction, peer, self.numbers[micro_batch]] = arrival

    def receive(self, direction: int, micro_batch: int) -> None:
        """Sleep until a tensor, whose bytes have come already, would have arrived."""
        _sleep_until(float(self._arrivals[direction, self.stage, self.numbers[micro_batch]]))

    def complete(self, layer: int) -> None:
        """Note that the last gradient of a layer is complete."""
        copy = self._rank if layer < self.task.num_spread else self.replica
        self._complete[copy, self._layers[layer]] = perf_counter()

    def add_up(self) -> None:
        """Sleep until the gradients would be added up over the replicas."""
        due = 0.0  # each layer starts when it is complete in all replicas and the layer behind it is done
        last = self._complete[:, self._layers].max(axis=0)
        for complete, seconds in zip(last[::-1], self.work.reduce[::-1], strict=True):
            due = max(due, float(complete)) + float(seconds) * self.task.scale
        _sleep_until(due)

    def spread_weights(self) -> None:
        """Note when the updated weights of each layer arrive, one layer after another."""
        self._weights_arrive = perf_counter() + np.cumsum(self.work.gather) * self.task.scale

    def await_weights(self, layer: int) -> None:
        """Sleep until the updated weights of a layer have arrived, as part of the instruction that has begun."""
        due = float(self._weights_arrive[layer])
        if due > self._due:
            _sleep_until(due)
            self._due = due

    def compute(self, seconds: float) -> None:
        """Sleep for the seconds of a computation, counted from the end of the instruction's earlier ones."""
        self._due += seconds * self.task.scale
        _sleep_until(self._due)

    def rest(self, seconds: float) -> None:
        """Sleep for some seconds from now on."""
        sleep(seconds * self.task.scale)

    def _hold(self, size: int, micro_batch: int) -> None:
        self._held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        budget = self.task.budget_bytes[self.stage]
        if self._held_bytes > budget:
            raise InfeasibleError(
                f"{self._where}: out of emulated memory in step {self._step}, micro-batch {micro_batch}: "
                f"{bytes_in_words(self._held_bytes)} are needed, {bytes_in_words(budget)} are there; "
                "recompute more layers, cut elsewhere, or make packs smaller"
            )


def _sleep_until(due: float) -> None:
    left = due - perf_counter()
    if left > 0:
        sleep(left)
