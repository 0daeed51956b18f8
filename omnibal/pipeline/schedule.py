"""Pipeline schedules as plain data: for each stage the list of what it runs, in order.

Letters: ``F`` forward; ``B`` backward to the inputs; ``W`` backward to the weights; ``BW`` both at once.

Units are encoder and LLM with devices, and numbers of replicas, of their own. Micro-batch m of the LLM's replica d has
the number ``n = m · replicas + d`` in the whole step. LLM replica ``n mod replicas`` runs it, and so does encoder
replica ``n mod encoder replicas``: as one number divides the other, either an encoder serves several LLMs, or several
encoders serve one in turns.

    encoder 0   F0 F1 F2 F3 …             encoder 0   F0 F2 …
    LLM 0          F0    F2 …             encoder 1   F1 F3 …
    LLM 1             F1    F3 …          LLM 0          F0 F1 F2 F3 …

Source of units: Zhang et al., DistTrain, SIGCOMM 2025, section 4, which brokers micro-batches between units; here they
follow from their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omnibal.cluster import Encoder, Layout
from omnibal.errors import ConfigError


class Operation(IntEnum):
    """What a stage does with one micro-batch: four computations, and four transfers that follow from them."""

    F = 0  # forward
    BW = 1  # backward to the inputs and the weights
    B = 2  # backward to the inputs alone; the gradient can be sent upstream when it is done
    W = 3  # backward to the weights, any time after B
    SEND_ACTIVATION = 4
    RECEIVE_ACTIVATION = 5
    SEND_GRADIENT = 6
    RECEIVE_GRADIENT = 7

    @property
    def is_transfer(self) -> bool:
        return self >= Operation.SEND_ACTIVATION


_NAMES = [operation.name for operation in Operation]


class Instruction(NamedTuple):
    operation: Operation
    micro_batch: int


class Table(NamedTuple):
    """The lists of a schedule as padded arrays, for compiled code; a row is a stage of one replica."""

    # Without units there is one row for each stage. With units all replicas meet, and every one has rows, the encoder's
    # first; micro-batches then have their numbers in the step.

    operations: NDArray[np.int8]  # (rows, longest list)
    micro_batches: NDArray[np.int32]  # (rows, longest list)
    lengths: NDArray[np.int32]  # (rows,): how much of each row is used
    stages: NDArray[np.int64]  # (rows,)
    # The rows that a micro-batch comes from and goes to, -1 where there is none, (micro-batches of the step, rows):
    before: NDArray[np.int64]
    behind: NDArray[np.int64]


@dataclass(frozen=True)
class Schedule:
    """What every stage of a pipeline runs in one step, computations only.

    Args:
        stages: For each stage its (operation, micro-batch) pairs in the order in which it runs them.
        micro_batches: Micro-batches per step; of a replica of the last stage where stages have replicas of their own.
        replicas: Of each stage with units; empty without. A stage numbers the micro-batches
            of its own replica: one with half as many replicas runs twice as many.
        encoder_stages: With units, how many of the first stages are the encoder's.

    Raises:
        ConfigError: A stage does not run each micro-batch's ``F``, then ``BW`` or ``B`` and ``W``, exactly once; the
            first stages may run ``F`` alone (:meth:`with_frozen_front`). Replicas do not share the step alike.

    Example:
        >>> print(one_f_one_b(num_stages=2, micro_batches=3))
        F0 F1 BW0 F2 BW1 BW2
        F0 BW0 F1 BW1 F2 BW2
    """

    stages: tuple[tuple[Instruction, ...], ...]
    micro_batches: int
    replicas: tuple[int, ...] = ()
    encoder_stages: int = 0

    def __post_init__(self) -> None:
        if not self.stages or self.micro_batches < 1:
            raise ConfigError(
                f"a schedule must have a stage and a micro-batch, got {len(self.stages)} and {self.micro_batches}"
            )
        if self.replicas:
            if len(self.replicas) != self.num_stages or min(self.replicas) < 1:
                raise ConfigError(
                    f"replicas must be a positive number for each of {self.num_stages} stages, got {self.replicas}"
                )
            step = self.micro_batches * self.replicas[-1]
            if any(step % replicas for replicas in self.replicas):
                raise ConfigError(
                    f"replicas of each stage must divide the step's {step} micro-batches, got {self.replicas}"
                )
        for stage in range(self.num_stages):
            self._check_stage(stage)

    def _check_stage(self, stage: int) -> None:
        micro_batches, runs = self.micro_batches_of(stage), dict[int, str]()
        for operation, micro_batch in self.stages[stage]:
            runs[micro_batch] = f"{runs[micro_batch]} {_NAMES[operation]}" if micro_batch in runs else _NAMES[operation]
        allowed = ("F",) if stage < self.frozen_stages else ("F BW", "F B W")
        for micro_batch in sorted({*runs, *range(micro_batches)}):
            found = runs.get(micro_batch, "nothing")
            if found not in allowed or not 0 <= micro_batch < micro_batches:
                raise ConfigError(
                    f"stage {stage} must run {' or '.join(allowed)} for each of micro-batches 0 to "
                    f"{micro_batches - 1}, got {found} for micro-batch {micro_batch}"
                )

    def micro_batches_of(self, stage: int) -> int:
        """Micro-batches per step of one replica of a stage."""
        return self.micro_batches * self.replicas[-1] // self.replicas[stage] if self.replicas else self.micro_batches

    def __str__(self) -> str:
        return "\n".join(" ".join(f"{i.operation.name}{i.micro_batch}" for i in stage) for stage in self.stages)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @cached_property
    def frozen_stages(self) -> int:
        """How many of the first stages train nothing: they run ``F`` alone, and no gradient is sent to them."""
        trains = [any(entry.operation != Operation.F for entry in stage) for stage in self.stages[:-1]]
        return [*trains, True].index(True)

    def with_frozen_front(self, num_stages: int) -> Schedule:
        """The schedule without the backward passes of the first stages, and without gradients sent to them.

        >>> print(one_f_one_b(3, 3).with_frozen_front(1))
        F0 F1 F2
        F0 F1 BW0 F2 BW1 BW2
        F0 BW0 F1 BW1 F2 BW2
        """
        if num_stages == 0:
            return self
        if num_stages not in self._frozen_fronts:
            forwards = (tuple(i for i in stage if i.operation == Operation.F) for stage in self.stages[:num_stages])
            self._frozen_fronts[num_stages] = replace(self, stages=(*forwards, *self.stages[num_stages:]))
        return self._frozen_fronts[num_stages]

    @cached_property
    def _frozen_fronts(self) -> dict[int, Schedule]:
        return {}

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage the most forward passes that await their backward at one time."""
        return tuple(int(self.occupancy(stage)[:, 0].max()) for stage in range(self.num_stages))

    @cached_property
    def pending_weights(self) -> tuple[int, ...]:
        """For each stage the most ``B`` that await their ``W`` at one time; zero where ``BW`` runs both."""
        return tuple(int(self.occupancy(stage)[:, 1].max()) for stage in range(self.num_stages))

    def occupancy(self, stage: int) -> NDArray[np.int64]:
        """Passes in flight and ``B`` that await their ``W`` after each of a stage's operations, (operations, 2)."""
        # What an operation adds to (passes in flight, pending W). A frozen stage keeps nothing for a backward pass.
        awaits = int(stage >= self.frozen_stages)
        change = {Operation.F: (awaits, 0), Operation.BW: (-1, 0), Operation.B: (-1, 1), Operation.W: (0, -1)}
        return np.cumsum([change[instruction.operation] for instruction in self.stages[stage]], axis=0, dtype=np.int64)

    @cached_property
    def blocking(self) -> tuple[tuple[Instruction, ...], ...]:
        """Each stage's computations with their sends and receives, in the order in which DeepSpeed runs them."""
        # Transfers block both sides, so their order matters. A stage first sends what it has just computed and then
        # receives what it needs next. Only between a forward and a backward, where both go to the next stage, that
        # stage's own order decides: if it runs the backward first, the gradient is received before the activation is
        # sent. For 1F1B this is DeepSpeed's TrainSchedule. Schedules that move a W in between may deadlock.
        return tuple(_with_transfers(self, stage) for stage in range(self.num_stages))

    @cached_property
    def table(self) -> Table:
        return self._as_table(self.stages)

    @cached_property
    def blocking_table(self) -> Table:
        return self._as_table(self.blocking)

    def _as_table(self, stages: Sequence[Sequence[Instruction]]) -> Table:
        longest = max(map(len, stages))
        cells = np.zeros((len(stages), longest, 2), dtype=np.int32)
        for row, stage in zip(cells, stages, strict=True):
            row[: len(stage)] = stage
        replicas_of = np.array(self.replicas or (1,) * len(stages))
        own, count = self.encoder_stages, self.micro_batches * int(replicas_of[-1])
        parts = [part for part in (range(own), range(own, len(stages))) if part]
        of_row, replica = np.array(
            [(stage, replica) for part in parts for replica in range(replicas_of[part[0]]) for stage in part]
        ).T
        row_of = np.zeros((len(stages), replicas_of.max()), dtype=np.int64)
        row_of[of_row, replica] = np.arange(len(of_row))
        # A replica's m-th micro-batch has the number m · replicas + replica in the step.
        numbers = cells[of_row, :, 1] * replicas_of[of_row, None] + replica[:, None]
        before, behind = np.full((2, count, len(of_row)), -1, dtype=np.int64)
        every = np.arange(count)
        paths = row_of[np.arange(len(stages))[:, None], every % replicas_of[:, None]]  # (stages, numbers)
        for above, below in pairwise(paths):
            before[every, below], behind[every, above] = above, below
        lengths = np.array([len(stages[stage]) for stage in of_row], dtype=np.int32)
        operations = cells[of_row, :, 0].astype(np.int8)
        return Table(operations, numbers.astype(np.int32), lengths, of_row.astype(np.int64), before, behind)


@lru_cache(maxsize=64)
def one_f_one_b(num_stages: int, micro_batches: int) -> Schedule:
    """One forward, one backward: DeepSpeed's ``TrainSchedule``.

    Stage ``s`` runs ``min(num_stages - s, micro_batches)`` forward passes, then a backward and a forward in turn,
    then the remaining backward passes. Backward passes run unsplit.

    Raises:
        ConfigError: ``num_stages`` or ``micro_batches`` is below 1.

    Source: Narayanan et al., PipeDream, SOSP 2019, in its synchronous form.
    """
    return Schedule(tuple(stage_order(num_stages - s, micro_batches) for s in range(num_stages)), micro_batches)


def stage_order(depth: int, micro_batches: int, lag: int | None = None) -> tuple[Instruction, ...]:
    """What one stage runs in the order of 1F1B, ``depth`` micro-batches in flight."""
    # In a pipeline the depth is how many stages there are from this one on, itself included.
    # With a ``lag`` backward passes are split, and a W waits for ``lag`` further B, so that it fills time in which 1F1B
    # would wait for a gradient; what still waits at the end runs last.
    warm_up = min(depth, micro_batches)
    forward, weights = _every(Operation.F, micro_batches), _every(Operation.W, micro_batches)
    instructions = list(forward[:warm_up])
    for m, backward in enumerate(_every(Operation.BW if lag is None else Operation.B, micro_batches)):
        instructions.append(backward)
        if lag is not None and m >= lag:
            instructions.append(weights[m - lag])
        if m + warm_up < micro_batches:
            instructions.append(forward[m + warm_up])
    if lag is not None:
        instructions += weights[max(micro_batches - lag, 0) :]
    return tuple(instructions)


@lru_cache(maxsize=16)
def _every(operation: Operation, micro_batches: int) -> tuple[Instruction, ...]:
    """An operation of every micro-batch; stages share the instructions, which are many on large clusters."""
    return tuple(Instruction(operation, m) for m in range(micro_batches))


@lru_cache(maxsize=64)
def zero_bubble(num_stages: int, micro_batches: int, max_lag: tuple[int, ...] | None = None) -> Schedule:
    """1F1B with every backward pass split, its ``W`` run where 1F1B would wait (ZB-H1).

    Stage ``s`` begins as under 1F1B. Each ``B`` is followed by the ``W`` of the micro-batch ``max_lag[s]`` before it,
    and then by a forward; what is left of ``W`` comes last. By default stage ``s`` lags by ``s``: all stages then hold
    at most ``num_stages`` micro-batches, in flight or waiting for their ``W``, as many as stage 0 under 1F1B. Stage 0,
    whose gradients nobody waits for, runs unsplit unless it lags.

    Args:
        num_stages: At least 1.
        micro_batches: At least 1.
        max_lag: For each stage the most ``B`` whose ``W`` waits while the stage has other work; 0: ``W`` comes right
            after its own ``B``, whose gradient is then on its way. A shorter lag holds less and fills less.

    Raises:
        ConfigError: There is no stage or no micro-batch, or ``max_lag`` is not one number of at least 0 per stage.

    Example:
        >>> print(zero_bubble(num_stages=2, micro_batches=3))
        F0 F1 BW0 F2 BW1 BW2
        F0 B0 F1 B1 W0 F2 B2 W1 W2

    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, schedule ZB-H1. Deviation: the optimizer waits for
    all gradients, as DeepSpeed's does, where the paper steps ahead and rolls back.
    """
    lags = tuple(range(num_stages)) if max_lag is None else max_lag
    if len(lags) != num_stages or min(lags, default=0) < 0:
        raise ConfigError(f"max_lag must be a number of at least 0 for each of {num_stages} stages, got {max_lag}")
    stages = [stage_order(num_stages - stage, micro_batches, lag) for stage, lag in enumerate(lags)]
    if lags[:1] == (0,):
        stages[0] = stage_order(num_stages, micro_batches)
    return Schedule(tuple(stages), micro_batches)


def zero_bubble_lean(num_stages: int, micro_batches: int) -> Schedule:
    """Zero-bubble that holds little more than 1F1B: every ``W`` runs right after its ``B``, whose gradient has left."""
    return zero_bubble(num_stages, micro_batches, max_lag=(0,) * num_stages)


ScheduleName = Literal["1f1b", "zero-bubble", "zero-bubble-lean"]
# By the names of plans and configurations; each takes the numbers of stages and micro-batches.
SCHEDULES: Mapping[ScheduleName, Callable[[int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "zero-bubble": zero_bubble,
    "zero-bubble-lean": zero_bubble_lean,
}


def check_units(layout: Layout) -> Encoder:
    """Refuse a layout that gives the encoder no devices of its own, or numbers of replicas that do not divide."""
    encoder = layout.encoder
    if encoder is None or encoder.placement != "own":
        raise ConfigError(f"layout must give the encoder devices of its own, got {layout}")
    if not layout.has_even_units:
        raise ConfigError(
            f"replicas of encoder and LLM must divide each other, got {encoder.num_replicas} and {layout.num_replicas}"
            "; omnibal.pipeline.encoder says the encoder's"
        )
    return encoder


def encoder_schedule(layout: Layout, micro_batches: int) -> Schedule:
    """What an encoder's replica runs, its own micro-batches numbered from 0: 1F1B, as deep as units need."""
    # `micro_batches` are those of an LLM's replica. An encoder that serves k replicas keeps k micro-batches for each
    # stage behind it in flight; one of k encoders that serve the same replica keeps a k-th.
    encoder = check_units(layout)
    behind = layout.num_stages - encoder.num_stages
    served = -(-behind * layout.num_replicas // encoder.num_replicas)
    own = -(-micro_batches * layout.num_replicas // encoder.num_replicas)
    depths = [served + encoder.num_stages - stage for stage in range(encoder.num_stages)]
    return Schedule(tuple(stage_order(depth, own) for depth in depths), own)


@lru_cache(maxsize=64)
def schedule_of(layout: Layout, micro_batches: int, schedule: ScheduleName) -> Schedule:
    """What all stages of a layout run in one step; stages of units run the micro-batches of their own replica.

    ``micro_batches`` are those of one of the LLM's replicas, ``schedule`` is what its stages run; an encoder's with
    devices of its own run `encoder_schedule`.

    >>> from omnibal.cluster import Encoder
    >>> print(schedule_of(Layout(2, 2, encoder=Encoder(num_stages=1, num_replicas=1)), 2, "1f1b"))
    F0 F1 F2 BW0 F3 BW1 BW2 BW3
    F0 BW0 F1 BW1
    """
    if not layout.has_units:
        return SCHEDULES[schedule](layout.num_stages, micro_batches)
    encoder, step = encoder_schedule(layout, micro_batches), micro_batches * layout.num_replicas
    own = layout.shape(0)[0]
    if step % own:
        raise ConfigError(
            f"omnibal.pipeline.encoder.num_replicas must divide the {step} packs of a step (micro-batches "
            f"{micro_batches}, replicas of the language model {layout.num_replicas}), got {own}"
        )
    behind = SCHEDULES[schedule](layout.num_stages - encoder.num_stages, micro_batches)
    replicas = tuple(layout.shape(stage)[0] for stage in range(layout.num_stages))
    return Schedule(encoder.stages + behind.stages, micro_batches, replicas, encoder.num_stages)


def _with_transfers(schedule: Schedule, stage: int) -> tuple[Instruction, ...]:
    own, is_last = schedule.stages[stage], stage == schedule.num_stages - 1
    trains_before = stage > schedule.frozen_stages  # otherwise no stage before this one waits for a gradient
    # Where the next stage runs each forward (True) and each backward pass (False): it decides where this stage has both
    # an activation to send and a gradient to receive. Replicas of a stage run alike, so those of the first one say it.
    behind = () if is_last else enumerate(schedule.stages[stage + 1])
    ratio = (1, 1) if is_last or not schedule.replicas else schedule.replicas[stage : stage + 2]
    order = {(e.operation == Operation.F, e.micro_batch): at for at, e in behind if e.operation != Operation.W}
    result: list[Instruction] = []
    for done, coming in pairwise((None, *own, None)):
        # DeepSpeed sends right after the computation, and receives right before the one that needs the tensor.
        transfers = []
        if done is not None and done.operation == Operation.F and not is_last:
            transfers.append(Instruction(Operation.SEND_ACTIVATION, done.micro_batch))
        if done is not None and done.operation in (Operation.BW, Operation.B) and trains_before:
            transfers.append(Instruction(Operation.SEND_GRADIENT, done.micro_batch))
        if coming is not None and coming.operation == Operation.F and stage > 0:
            transfers.append(Instruction(Operation.RECEIVE_ACTIVATION, coming.micro_batch))
        if coming is not None and coming.operation in (Operation.BW, Operation.B) and not is_last:
            transfers.append(Instruction(Operation.RECEIVE_GRADIENT, coming.micro_batch))
        match transfers:
            case [(Operation.SEND_ACTIVATION, sent), (Operation.RECEIVE_GRADIENT, received)]:
                # Micro-batch m of the first replica has the number n = m · replicas, on the next stage n // replicas.
                of_next = [own_number * ratio[0] // ratio[1] for own_number in (received, sent)]
                if order[False, of_next[0]] < order[True, of_next[1]]:
                    transfers.reverse()
        result += [*transfers, *([] if coming is None else [coming])]
    return tuple(result)
