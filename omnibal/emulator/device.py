"""The device that a process of an emulated cluster plays: it sleeps, accounts memory and keeps a log."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from mmap import mmap
from time import perf_counter, sleep
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omnibal.cost import FloatArray, Load
from omnibal.errors import InfeasibleError, bytes_in_words
from omnibal.pipeline.schedule import Operation
from omnibal.pipeline.times import step_times
from omnibal.profile.levels import Level, every_layer

if TYPE_CHECKING:
    from omnibal.emulator.run import EmulationTask

COMPUTATIONS = (Operation.F, Operation.BW, Operation.B, Operation.W)
DOWN, UP = 0, 1
"""Directions in which tensors are sent beside the computations."""
DOWNSTREAM = (Operation.SEND_ACTIVATION, Operation.RECEIVE_GRADIENT)


class Entry(NamedTuple):
    """One instruction as it ran, in the wall's seconds."""

    operation: Operation
    start: float
    end: float


@dataclass
class StepLog:
    """What a device did in a step.

    Attributes:
        entries: Instructions of the pipeline.
        reduced: When its gradients were reduced.
        updated: When its parameters were updated.
    """

    entries: list[Entry] = field(default_factory=list)
    reduced: float = 0.0
    updated: float = 0.0

    @property
    def start(self) -> float:
        """When the first instruction began."""
        return self.entries[0].start


@dataclass(frozen=True)
class DeviceReport:
    """All that a device has to tell.

    Attributes:
        steps: Behind the one to warm up.
        peak_bytes: The most that it held.
        start_seconds: Until the first step began.
    """

    steps: list[StepLog]
    peak_bytes: int
    start_seconds: float


@dataclass(frozen=True)
class StageWork:
    """What a device does in one step, by micro-batch; seconds are the cluster's.

    Attributes:
        forward: Seconds of each layer, shape (micro-batches, layers).
        backward: To the inputs, recomputation included; the same shape.
        weight: To the weights; the same shape.
        split: What the backward pass to the inputs takes longer where that to the weights waits; the same shape.
        sent_bytes: Of each layer's output, the same shape; the pixels' before the first.
        upstream: Seconds of the transfer from and to the stage before, shape (micro-batches,); 0 in the first stage.
        downstream: The same with the stage behind; 0 in the last stage.
        reduce: Seconds in which the replicas add up each layer's gradients, shape (layers,).
        gather: Seconds in which each layer's updated weights come from the replicas that own them, shape (layers,).
        optimizer: Seconds of the optimizer step.
        fixed_bytes: Held throughout the step.
        kept_bytes: Of each micro-batch from its forward to its backward.
        transient_bytes: Beside those, while its backward runs.
        pending_bytes: Of each micro-batch from its split backward to its weight gradients.
    """

    forward: FloatArray
    backward: FloatArray
    weight: FloatArray
    split: FloatArray
    sent_bytes: FloatArray
    upstream: FloatArray
    downstream: FloatArray
    reduce: FloatArray
    gather: FloatArray
    optimizer: float
    fixed_bytes: int
    kept_bytes: tuple[int, ...]
    transient_bytes: tuple[int, ...]
    pending_bytes: tuple[int, ...]


class Clocks(NamedTuple):
    """Times of the wall that all devices of a cluster share.

    Attributes:
        arrivals: When what is sent beside the computations arrives, shape (directions, stages, replicas, micro-batches)
            by who receives it.
        complete: When the last gradient of each layer is there, shape (replicas, layers).
    """

    arrivals: FloatArray
    complete: FloatArray

    @classmethod
    def of(cls, task: EmulationTask) -> Clocks:
        """In memory that forked processes share."""
        stages, replicas, micro_batches = task.plan.num_stages, task.plan.layout.num_replicas, task.plan.micro_batches
        shapes = (2, stages, replicas, micro_batches), (replicas, len(task.profile.layers))
        return cls(*(np.frombuffer(mmap(-1, 8 * prod(shape)), dtype=np.float64).reshape(shape) for shape in shapes))


def stage_work(task: EmulationTask, step: int, stage: int, replica: int) -> StageWork:
    """What the device of a stage and replica does in a step.

    As in the real engine, a micro-batch above the plan's limits recomputes everything.
    """
    loads, layers = task.steps[step], task.plan.partition.layers(stage)
    own, first, last = loads[replica], layers.start, layers.stop
    exceeds = _exceeds(task, own)
    planned, full = (
        step_times(task.profile, loads, task.plan.links, zero_stage=task.plan.layout.zero_stage, recompute=levels)
        for levels in _levels(task)
    )

    def between(name: str) -> FloatArray:
        by_plan, by_full = (np.diff(getattr(times, name)[replica][:, first : last + 1]) for times in (planned, full))
        seconds: FloatArray = np.where(exceeds[:, None], by_full, by_plan)
        return seconds

    levels = [tuple(_levels(task)[int(above)][first:last]) for above in exceeds]
    footprints = [task.footprint(load) for load in own]
    memory = [footprint.stage(stage, layers, of) for footprint, of in zip(footprints, levels, strict=True)]
    held, waiting = max(task.schedule.in_flight[stage], 1), max(task.schedule.pending_weights[stage], 1)
    return StageWork(
        forward=between("forward"),
        backward=between("backward"),
        weight=between("weight"),
        split=between("split"),
        sent_bytes=np.stack([layer.output_bytes(own) for layer in task.profile.layers[first:last]], axis=1),
        upstream=planned.crossing[replica][:, first],
        downstream=planned.crossing[replica][:, last],
        reduce=np.diff(planned.reduce[first : last + 1]),
        gather=np.diff(planned.gather[first : last + 1]),
        optimizer=float(planned.optimizer[last] - planned.optimizer[first]),
        fixed_bytes=max(entry.total - entry.activations - entry.pending - entry.transient for entry in memory),
        kept_bytes=tuple(entry.activations // held for entry in memory),
        transient_bytes=tuple(entry.transient for entry in memory),
        pending_bytes=tuple(int(each.pending_bytes(stage)[first, last]) // waiting for each in footprints),
    )


def _levels(task: EmulationTask) -> tuple[tuple[Level, ...], tuple[Level, ...]]:
    """Those of the plan, and those of a micro-batch above its limits."""
    return task.plan.recompute, every_layer("full", len(task.profile.layers))


def _exceeds(task: EmulationTask, load: Load) -> NDArray[np.bool_]:
    limits = task.plan.limits
    above: NDArray[np.bool_] = (load.vision_units > max(limits.vision_units, 1)) | (load.llm_tokens > limits.llm_tokens)
    return above


class Device:
    """The device of a stage and replica.

    Args:
        task: The run.
        stage: Its pipeline stage.
        replica: Its data-parallel rank.
        where: Its place in error messages.
        clocks: Of the cluster.
    """

    def __init__(self, task: EmulationTask, stage: int, replica: int, where: str, clocks: Clocks) -> None:
        self.task, self.stage, self.replica = task, stage, replica
        self.peak_bytes = 0
        self.log = StepLog()
        self._where = where
        self._held_bytes = 0
        self._splits = False
        self._due = 0.0
        self._arrivals = clocks.arrivals[:, :, replica]
        layers = task.plan.partition.layers(stage)
        self._complete = clocks.complete[:, layers.start : layers.stop]
        self._weights_arrive = np.zeros(len(layers))
        self._link_is_free = [0.0, 0.0]
        in_front = stage < task.schedule.frozen_stages  # it runs forward only
        self._with_transient = (Operation.F,) if in_front else (Operation.BW, Operation.B)

    def begin_step(self, step: int) -> None:
        """Look up what the step brings; before it begins, as it takes time of its own."""
        self.work = stage_work(self.task, step, self.stage, self.replica)
        self.log = StepLog()
        self._ran: Counter[Operation] = Counter()
        self._step = step
        self._held_bytes = self.work.fixed_bytes  # the first forward pass tells whether it fits

    def begin(self, operation: Operation) -> float:
        """An instruction begins: the time, from which its sleeps are counted."""
        micro_batch = self._ran[operation]
        self._splits = operation == Operation.B
        if operation == Operation.F:
            self._hold(self.work.kept_bytes[micro_batch], micro_batch)
        if operation in self._with_transient:
            transient = self.work.transient_bytes[micro_batch]
            self._hold(transient, micro_batch)
            self._held_bytes -= transient
        self._due = perf_counter()
        return self._due

    def end(self, operation: Operation, start: float) -> None:
        """An instruction has run; a transfer takes the link's time from here on."""
        micro_batch = self._ran[operation]
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
        self._ran[operation] += 1
        self.log.entries.append(Entry(operation, start, perf_counter()))

    def backward_seconds(self, micro_batch: int, place: int) -> float:
        """Of a layer to its inputs, in the instruction that has begun."""
        seconds = self.work.backward[micro_batch, place]
        return float(seconds + self.work.split[micro_batch, place] if self._splits else seconds)

    def send(self, direction: int, micro_batch: int) -> None:
        """A tensor leaves while the device goes on; a link carries one at a time."""
        link = self.work.downstream if direction == DOWN else self.work.upstream
        start = max(perf_counter(), self._link_is_free[direction])
        arrival = self._link_is_free[direction] = start + float(link[micro_batch]) * self.task.scale
        peer = self.stage + 1 if direction == DOWN else self.stage - 1
        self._arrivals[direction, peer, micro_batch] = arrival

    def receive(self, direction: int, micro_batch: int) -> None:
        """Wait for a tensor whose bytes are there already until it would have arrived."""
        _sleep_until(float(self._arrivals[direction, self.stage, micro_batch]))

    def complete(self, layer: int) -> None:
        """The last gradient of a layer of the stage is there, and may leave."""
        self._complete[self.replica, layer] = perf_counter()

    def add_up(self) -> None:
        """Wait until gradients that are complete in all replicas would be added up, one layer after the other."""
        due = 0.0
        for complete, seconds in zip(self._complete.max(axis=0)[::-1], self.work.reduce[::-1], strict=True):
            due = max(due, float(complete)) + float(seconds) * self.task.scale
        _sleep_until(due)

    def spread_weights(self) -> None:
        """Updated weights of the layers leave for the other replicas, one layer after the other."""
        self._weights_arrive = perf_counter() + np.cumsum(self.work.gather) * self.task.scale

    def await_weights(self, layer: int) -> None:
        """In the instruction that has begun, wait for those of a layer."""
        due = float(self._weights_arrive[layer])
        if due > self._due:
            _sleep_until(due)
            self._due = due

    def compute(self, seconds: float) -> None:
        """Be busy for so long behind what the instruction has done so far; what Python takes is not added."""
        self._due += seconds * self.task.scale
        _sleep_until(self._due)

    def rest(self, seconds: float) -> None:
        """Be busy for so long from now on."""
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
