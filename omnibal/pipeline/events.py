"""The event simulator: when each row of a schedule's table runs what, and when a step ends.

What differs between layouts is data: the table says which stages have how many replicas and who neighbours whom.
"""

from __future__ import annotations

import numpy as np

from omnibal.compiled import compiled, compiled_part
from omnibal.cost import FloatArray, IntArray
from omnibal.pipeline.schedule import Operation, Table
from omnibal.pipeline.times import StepTimes

_F, _BW, _B, _W = int(Operation.F), int(Operation.BW), int(Operation.B), int(Operation.W)
_SEND_ACTIVATION, _RECEIVE_GRADIENT = int(Operation.SEND_ACTIVATION), int(Operation.RECEIVE_GRADIENT)


@compiled
def run_table(
    table: Table, blocking: bool, seconds: FloatArray, transfers: FloatArray, release: FloatArray, starts: FloatArray,
    ends: FloatArray,
) -> bool:  # fmt: skip
    """Write when each instruction of a table starts and ends; False if not all could run, which is a deadlock."""
    # If transfers block (`Schedule.blocking_table`), both sides wait for each other and are busy until a transfer ends.
    # Otherwise (`Schedule.table`) transfers start by themselves and cost no stage time, one at a time on each link.
    # seconds: of each computation by Operation, (4, micro-batches, stages); transfers: from a stage to the next one,
    # either way, (micro-batches, stages); release: when a row may begin its first forward pass, (rows,).
    operations, micro_batches, lengths, stages, before, behind = table
    num_rows = len(lengths)
    # When a row has ended its last instruction, and when the links from it are free.
    clock, down, up = np.zeros(num_rows), np.zeros(num_rows), np.zeros(num_rows)
    done = np.zeros(num_rows, dtype=np.int64)  # instructions that a row has run
    count = 0 if blocking else len(before)  # of micro-batches whose activations and gradients arrive at rows
    activation, gradient = np.empty((count, num_rows)), np.empty((count, num_rows))
    _write_first_arrivals(before, activation)
    _write_first_arrivals(behind, gradient)
    # Visit the rows in turn. Each one runs until it meets a transfer whose other side has not come to it, or an input
    # that has not been sent. A round in which no row ran anything is the end of the step, or a deadlock.
    going_on, is_waiting = True, False
    while going_on:
        going_on, is_waiting = False, False
        for row in range(num_rows):
            stage = stages[row]
            while done[row] < lengths[row]:
                here = done[row]
                operation, m = operations[row, here], micro_batches[row, here]
                if operation > _W:
                    # Activations go to the row behind, and their gradients come back from there; the other two
                    # operations face the row before. A send and its receive differ in the last bit.
                    peer = behind[m, row] if operation in (_SEND_ACTIVATION, _RECEIVE_GRADIENT) else before[m, row]
                    there = done[peer]
                    is_there = there < lengths[peer] and micro_batches[peer, there] == m
                    if not is_there or operations[peer, there] != operation ^ 1:
                        break
                    starts[row, here] = starts[peer, there] = max(clock[row], clock[peer])
                    clock[row] = starts[row, here] + transfers[m, min(stage, stages[peer])]
                    clock[peer] = ends[row, here] = ends[peer, there] = clock[row]
                    done[peer] += 1
                else:
                    ready = max(clock[row], release[row])
                    if not blocking:
                        ready = max(ready, activation[m, row] if operation == _F else gradient[m, row])
                        if ready == np.inf:
                            break
                    starts[row, here] = ready
                    clock[row] = ends[row, here] = ready + seconds[operation, m, stage]
                    # The result leaves when its row has computed it and the link has carried all earlier ones.
                    sender, receiver = before[m, row], behind[m, row]
                    if operation == _F and receiver >= 0 and not blocking:
                        down[row] = activation[m, receiver] = max(clock[row], down[row]) + transfers[m, stage]
                    elif operation in (_BW, _B) and sender >= 0 and not blocking:
                        up[row] = gradient[m, sender] = max(clock[row], up[row]) + transfers[m, stages[sender]]
                done[row] += 1
                going_on = True
            is_waiting |= done[row] < lengths[row]
    return not is_waiting


@compiled_part
def _write_first_arrivals(neighbours: IntArray, arrivals: FloatArray) -> None:
    # Infinity until the sender has run. The first stage's pixels are there from the beginning, and so is the gradient
    # of the last stage's loss.
    for m in range(arrivals.shape[0]):
        for row in range(arrivals.shape[1]):
            arrivals[m, row] = 0.0 if neighbours[m, row] < 0 else np.inf


@compiled
def run_steps(
    times: StepTimes,
    table: Table,
    boundaries: IntArray,
    num_steps: int,
    blocking: bool,
    head_start: float,
    starts: FloatArray,
    ends: FloatArray,
    reduced: FloatArray,
) -> FloatArray:
    """Seconds of each step, (steps,), under one partition; empty if there is a deadlock.

    Replicas do not meet within a step, but for those of units, which the table holds as one.

    Args:
        times: The replicas of ``num_steps`` steps, step after step.
        head_start: Seconds for which updated weights have been on their way when a step begins.
        starts: Output of the last step, (replicas, rows, longest list); with room for one replica, the last one's.
        ends: Output, likewise.
        reduced: Output, (stages,): when each stage has added up its gradients over the replicas in the last step.
    """
    num_stages, num_rows = len(reduced), len(table.lengths)
    num_replicas = len(times.forward) // num_steps
    seconds = np.empty((4, times.forward.shape[1], num_stages))
    transfers, release = np.empty(seconds.shape[1:]), np.empty(num_rows)
    ready, result = np.empty(len(times.reduce) - 1), np.empty(num_steps)
    updated = 0.0
    for stage in range(num_stages):
        updated = max(updated, times.optimizer[boundaries[stage + 1]] - times.optimizer[boundaries[stage]])
    for step in range(num_steps):
        # step = max(end of the last row, end of the last sum of gradients) + slowest optimizer
        finish = 0.0
        ready[:] = 0.0
        for number in range(num_replicas):
            replica, place = step * num_replicas + number, min(number, len(starts) - 1)
            _write_seconds(times, replica, boundaries, seconds, transfers)
            _write_release(times, replica, boundaries, table, head_start, release)
            if not run_table(table, blocking, seconds, transfers, release, starts[place], ends[place]):
                return result[:0]
            for row in range(num_rows):
                finish = max(finish, ends[place, row, table.lengths[row] - 1])
            _raise_ready(times, replica, boundaries, table, starts[place], ready)
        _write_reduced(times, boundaries, ready, reduced)
        for stage in range(num_stages):
            finish = max(finish, reduced[stage])
        result[step] = finish + updated
    return result


@compiled_part
def _write_seconds(
    times: StepTimes, replica: int, boundaries: IntArray, seconds: FloatArray, transfers: FloatArray
) -> None:
    """Seconds of F, BW, B and W on every stage, and of the transfers behind it, as of `run_table`."""
    for m in range(seconds.shape[1]):
        for stage in range(seconds.shape[2]):
            # A stage's seconds are the difference of two sums over layers.
            first, last = boundaries[stage], boundaries[stage + 1]
            to_inputs = times.backward[replica, m, last] - times.backward[replica, m, first]
            weight = times.weight[replica, m, last] - times.weight[replica, m, first]
            seconds[_F, m, stage] = times.forward[replica, m, last] - times.forward[replica, m, first]
            seconds[_BW, m, stage] = to_inputs + weight
            seconds[_B, m, stage] = to_inputs + times.split[replica, m, last] - times.split[replica, m, first]
            seconds[_W, m, stage] = weight
            transfers[m, stage] = times.crossing[replica, m, last]


@compiled_part
def _write_release(
    times: StepTimes, replica: int, boundaries: IntArray, table: Table, head_start: float, release: FloatArray
) -> None:
    # Updated weights come from the other replicas layer by layer, while the stage already runs its first layers.
    # Layer l runs at release + (forward of the stage's layers before l), and needs the weights of all layers up to l.
    for row in range(len(release)):
        stage, m = table.stages[row], table.micro_batches[row, 0]
        first, last = boundaries[stage], boundaries[stage + 1]
        release[row] = 0.0
        for layer in range(first, last):
            come = times.gather[layer + 1] - times.gather[first]
            turn = times.forward[replica, m, layer] - times.forward[replica, m, first]
            release[row] = max(release[row], come - turn)
        release[row] = max(release[row] - head_start, 0.0)


@compiled_part
def _raise_ready(
    times: StepTimes, replica: int, boundaries: IntArray, table: Table, starts: FloatArray, ready: FloatArray
) -> None:
    """Raise ``ready``, (layers,), to when the rows have the complete gradient of each layer."""
    # Gradients are complete layer by layer from the last one on, during a row's last backward pass to the weights.
    for row in range(len(table.lengths)):
        # Find the row's last BW or W, and walk through its layers from the last to the first.
        position = table.lengths[row] - 1
        while position >= 0 and table.operations[row, position] not in (_BW, _W):
            position -= 1
        if position < 0:
            continue
        operation, m = table.operations[row, position], table.micro_batches[row, position]
        clock, stage = starts[row, position], table.stages[row]
        for layer in range(boundaries[stage + 1] - 1, boundaries[stage] - 1, -1):
            clock += times.weight[replica, m, layer + 1] - times.weight[replica, m, layer]
            if operation == _BW:
                clock += times.backward[replica, m, layer + 1] - times.backward[replica, m, layer]
            ready[layer] = max(ready[layer], clock)


@compiled_part
def _write_reduced(times: StepTimes, boundaries: IntArray, ready: FloatArray, reduced: FloatArray) -> None:
    # A stage's reductions run one after another, from its last layer on: each starts when the layer is ready and the
    # one before it has ended.
    for stage in range(len(reduced)):
        reduced[stage] = 0.0
        for layer in range(boundaries[stage + 1] - 1, boundaries[stage] - 1, -1):
            reduced[stage] = max(reduced[stage], ready[layer]) + times.reduce[layer + 1] - times.reduce[layer]
