"""Compiled event simulation: when each stage of a pipeline runs each instruction of its table.

Both functions take a schedule's table and fill in when each instruction starts and ends:

    durations      seconds of each computation, shape (4, micro-batches, stages), by Operation
    transfers      seconds between stages s and s + 1, either way, shape (micro-batches, stages - 1)
    release        when each stage may begin its first forward pass, shape (stages,)
    starts, ends   filled with seconds, shape of the table's operations

They return whether every instruction could run; False means a deadlock. Stages are visited in turn and run as far as
they can: O(instructions) for pipelines that keep busy, O(instructions × stages) at worst.
"""

import numpy as np

from omnibal.compiled import compiled
from omnibal.cost import FloatArray
from omnibal.pipeline.schedule import Operation, Table

_F, _BW, _B, _W = int(Operation.F), int(Operation.BW), int(Operation.B), int(Operation.W)
_SEND_ACTIVATION, _RECEIVE_GRADIENT = int(Operation.SEND_ACTIVATION), int(Operation.RECEIVE_GRADIENT)


@compiled
def run_blocking(
    table: Table,
    durations: FloatArray,
    transfers: FloatArray,
    release: FloatArray,
    starts: FloatArray,
    ends: FloatArray,
) -> bool:
    """Run ``Schedule.blocking_table``: the two sides of a transfer wait for each other and are busy until it ends."""
    operations, micro_batches, lengths = table
    num_stages = len(lengths)
    clock = np.zeros(num_stages)  # when a stage has ended its last instruction
    done = np.zeros(num_stages, dtype=np.int64)  # instructions that a stage has run
    # Visit the stages in turn. Each one runs until it meets a transfer whose other side has not come to it; a round in
    # which no stage ran anything is the end of the step, or a deadlock.
    going_on = True
    while going_on:
        going_on = False
        for stage in range(num_stages):
            while done[stage] < lengths[stage]:
                here = done[stage]
                operation, micro_batch = operations[stage, here], micro_batches[stage, here]
                if operation <= _W:  # a computation waits for nobody
                    if operation == _F and micro_batch == 0:
                        clock[stage] = max(clock[stage], release[stage])
                    starts[stage, here] = clock[stage]
                    clock[stage] += durations[operation, micro_batch, stage]
                    ends[stage, here] = clock[stage]
                    done[stage] += 1
                    going_on = True
                    continue
                # A transfer runs once both stages have come to it. Activations go to the next stage, and their
                # gradients come back from there; the other two operations face the stage before.
                peer = stage + 1 if operation in (_SEND_ACTIVATION, _RECEIVE_GRADIENT) else stage - 1
                there = done[peer]
                if there == lengths[peer] or micro_batches[peer, there] != micro_batch:
                    break
                if operations[peer, there] != operation ^ 1:  # a send and its receive differ in the last bit
                    break
                starts[stage, here] = starts[peer, there] = max(clock[stage], clock[peer])
                clock[stage] = starts[stage, here] + transfers[micro_batch, min(stage, peer)]
                clock[peer] = ends[stage, here] = ends[peer, there] = clock[stage]
                done[stage] += 1
                done[peer] += 1
                going_on = True
    return bool(np.all(done == lengths))


@compiled
def run_overlapped(
    table: Table,
    durations: FloatArray,
    transfers: FloatArray,
    release: FloatArray,
    starts: FloatArray,
    ends: FloatArray,
) -> bool:
    """Run ``Schedule.table``: transfers start by themselves and cost no stage time; a link carries one at a time."""
    operations, micro_batches, lengths = table
    num_stages, num_micro_batches = len(lengths), durations.shape[1]
    clock = np.zeros(num_stages)  # when a stage has ended its last instruction
    done = np.zeros(num_stages, dtype=np.int64)  # instructions that a stage has run
    # Arrival of a micro-batch's activation and of its gradient at each stage; infinity until its sender has run.
    activation = np.full((num_micro_batches, num_stages), np.inf)
    gradient = np.full((num_micro_batches, num_stages), np.inf)
    activation[:, 0] = 0
    gradient[:, num_stages - 1] = 0
    down, up = np.zeros(num_stages), np.zeros(num_stages)  # when the links from a stage are free
    # As in run_blocking, but a stage stops only where the input of its next instruction has not been sent.
    going_on = True
    while going_on:
        going_on = False
        for stage in range(num_stages):
            while done[stage] < lengths[stage]:
                here = done[stage]
                operation, m = operations[stage, here], micro_batches[stage, here]
                ready = activation[m, stage] if operation == _F else gradient[m, stage]
                if ready == np.inf:
                    break
                if operation == _F and m == 0:
                    ready = max(ready, release[stage])
                starts[stage, here] = max(clock[stage], ready)
                clock[stage] = ends[stage, here] = starts[stage, here] + durations[operation, m, stage]
                done[stage] += 1
                going_on = True
                # The result leaves when its stage has computed it and the link has carried all earlier ones.
                if operation == _F and stage < num_stages - 1:
                    down[stage] = activation[m, stage + 1] = max(clock[stage], down[stage]) + transfers[m, stage]
                elif operation in (_BW, _B) and stage > 0:
                    up[stage] = gradient[m, stage - 1] = max(clock[stage], up[stage]) + transfers[m, stage - 1]
    return bool(np.all(done == lengths))
