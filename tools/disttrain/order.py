"""The order in which a replica's micro-batches pass a pipeline: DistTrain's rule, and a local search.

Losses and gradients are sums over the micro-batches of a step, so that the order changes nothing but the time.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike

from omnibal.compiled import compiled
from omnibal.cost import FloatArray, IntArray, smallest_first
from omnibal.errors import ConfigError, integer
from omnibal.pipeline.schedule import Schedule
from omnibal.pipeline.simulate import Mode, simulate


def order_micro_batches(
    schedule: Schedule,
    forward_seconds: ArrayLike,
    backward_seconds: ArrayLike,
    weight_seconds: ArrayLike | None = None,
    transfer_seconds: ArrayLike | None = None,
    *,
    mode: Mode = "rendezvous",
    max_simulations: int = 3,
) -> IntArray:
    """Find an order of micro-batches whose makespan is never longer than that of the order given.

    Three orders are simulated, and the fastest one is taken: the order given, that of :func:`fill_intervals`, and the
    smallest micro-batch first, then all others from the largest on. Further simulations swap pairs of micro-batches as
    long as that shortens the makespan.

    Args:
        schedule: As in :func:`omnibal.pipeline.simulate.simulate`, and so are all arguments but the last.
        max_simulations: The most orders that are simulated, at least 3; with 3 nothing is swapped. A round of swaps
            takes m (m - 1) / 2 simulations of m micro-batches.

    Returns:
        The micro-batches in running order, shape (micro-batches,): entry i is the row that comes i-th.

    Raises:
        ConfigError: As :func:`omnibal.pipeline.simulate.simulate`, or ``max_simulations`` is below 3.

    Source: the second order is that of Zhang et al., DistTrain, SIGCOMM 2025, section 6.2; the third one, the swaps and
    that nothing gets slower are ours. The paper's intra-microbatch order, which shares samples among replicas, is
    :func:`omnibal.dispatch.divide.divide` with ``"longest_first"``, within 4/3 of the optimum.

    Example:
        >>> from omnibal.pipeline.schedule import one_f_one_b
        >>> forward = np.array([[3.0, 1.0], [1.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
        >>> order_micro_batches(one_f_one_b(2, 4), forward, 2 * forward).tolist()
        [1, 0, 3, 2]
    """
    integer("max_simulations", max_simulations, 3)
    forward, backward = (np.asarray(each, dtype=np.float64) for each in (forward_seconds, backward_seconds))
    weight, transfer = (
        None if each is None else np.asarray(each, dtype=np.float64) for each in (weight_seconds, transfer_seconds)
    )

    def makespan(order: IntArray) -> float:
        return simulate(
            schedule, forward[order], backward[order], None if weight is None else weight[order],
            None if transfer is None else transfer[order], mode=mode,
        ).makespan_seconds  # fmt: skip

    whole = backward if weight is None else backward + weight
    orders = [np.arange(schedule.micro_batches), fill_intervals(forward, whole)]
    orders.append(smallest_first((forward + whole).sum(axis=1)))
    # Of orders that are equally fast the earlier one stays.
    shortest, _, best = min((makespan(order), rank, order) for rank, order in enumerate(orders))
    simulated, improving = len(orders), True
    while improving:
        improving = False
        for first, second in combinations(range(schedule.micro_batches), 2):
            if simulated >= max_simulations:
                return best
            swapped = best.copy()
            swapped[[first, second]] = best[[second, first]]
            found, simulated = makespan(swapped), simulated + 1
            if found < shortest:
                shortest, best, improving = found, swapped, True
    return best


def fill_intervals(forward_seconds: ArrayLike, backward_seconds: ArrayLike) -> IntArray:
    """Order micro-batches for 1F1B by DistTrain's rule, without a simulation.

    The smallest micro-batch comes first, so that all stages soon have work, and the ``stages - 1`` next smallest ones
    come last, the smallest at the very end, as the first stage has no forward passes left while it waits for their
    gradients. Every earlier wait of the first stage for a gradient is filled by the micro-batches whose forward passes
    match it best: the first wait by ``stages - 1`` of them, the others by one each.

    Args:
        forward_seconds: Shape (micro-batches, stages).
        backward_seconds: Shape (micro-batches, stages), the weights' part included.

    Returns:
        The micro-batches in running order, shape (micro-batches,); where some match alike, the smallest comes first.

    Raises:
        ConfigError: The arrays differ in shape, or one has no micro-batch or no stage.

    Complexity: O(m (m + stages)) for m micro-batches. Source: Zhang et al., DistTrain, SIGCOMM 2025, section 6.2,
    Algorithm 3. Deviations: a micro-batch's size is its time on all stages, not in encoder and generator alone; the
    loop ends when nothing is left, where the printed one would ask for ``stages - 2`` micro-batches too many; each of
    the first wait's micro-batches is the one nearest to an equal share of what is left of it; transfers take no time.
    """
    forward, backward = (np.ascontiguousarray(each, dtype=np.float64) for each in (forward_seconds, backward_seconds))
    if forward.shape != backward.shape or forward.ndim != 2 or 0 in forward.shape:
        raise ConfigError(
            "forward_seconds and backward_seconds must have one shape (micro-batches, stages), "
            f"got {forward.shape} and {backward.shape}"
        )
    # By their seconds on all stages, the shortest first.
    by_size = np.argsort((forward + backward).sum(axis=1), kind="stable")
    order: IntArray = _fill_intervals(forward, backward, by_size)
    return order


@compiled
def _fill_intervals(forward: FloatArray, backward: FloatArray, by_size: IntArray) -> IntArray:
    count, num_stages = forward.shape
    num_last = min(num_stages - 1, count - 1)
    order = np.empty(count, dtype=np.int64)
    order[0] = by_size[0]
    order[count - num_last :] = by_size[1 : 1 + num_last][::-1]
    left = by_size[1 + num_last :].copy()
    clock = np.zeros(num_stages)  # when a stage has ended what it has run
    ended = np.zeros((count, num_stages))  # when a stage has ended the forward pass at each place of the order
    clock[0] = ended[0, 0] = forward[order[0], 0]
    # Of the first wait only the first micro-batch is known: the wait lasts until its gradient has come back.
    wait = forward[order[0], 1:].sum() + backward[order[0], 1:].sum()
    place, turn, shares = 1, 0, min(num_stages - 1, len(left))
    while True:
        for share in range(shares, 0, -1):
            nearest = np.argmin(np.abs(forward[left, 0] - wait / share))
            order[place] = left[nearest]
            left[nearest:-1] = left[nearest + 1 :]
            left = left[:-1]
            wait -= forward[order[place], 0]
            clock[0] += forward[order[place], 0]
            ended[place, 0] = clock[0]
            place += 1
        if len(left) == 0:
            return order
        if turn == 0:
            gradient = _gradient_of(turn, order, forward, backward, clock, ended)
        clock[0] = max(clock[0], gradient) + backward[order[turn], 0]
        turn += 1
        gradient = _gradient_of(turn, order, forward, backward, clock, ended)
        wait, shares = gradient - clock[0], 1


@compiled
def _gradient_of(
    turn: int, order: IntArray, forward: FloatArray, backward: FloatArray, clock: FloatArray, ended: FloatArray
) -> float:
    """When the gradient of the micro-batch at place ``turn`` reaches the first stage; runs all stages behind it."""
    num_stages = len(clock)
    # Before backward pass t, stage s has run the forward passes up to place t + stages - 1 - s, one of them since
    # backward pass t - 1.
    for stage in range(1, num_stages):
        until = turn + num_stages - stage
        for place in range(0 if turn == 0 else until - 1, until):
            clock[stage] = max(clock[stage], ended[place, stage - 1]) + forward[order[place], stage]
            ended[place, stage] = clock[stage]
    gradient = 0.0
    for stage in range(num_stages - 1, 0, -1):
        gradient = clock[stage] = max(clock[stage], gradient) + backward[order[turn], stage]
    return gradient
