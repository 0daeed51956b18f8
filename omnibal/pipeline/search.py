"""Where to cut a model into pipeline stages: every method behind one function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from omnibal.cluster import Links
from omnibal.cost import FloatArray, Load
from omnibal.errors import ConfigError
from omnibal.pipeline.optimize import Boundaries, descend, least_maximum, model_optima
from omnibal.pipeline.partition import Partition, check_num_stages, parameter_cut
from omnibal.pipeline.problem import PartitionProblem
from omnibal.pipeline.schedule import one_f_one_b
from omnibal.pipeline.simulate import Mode
from omnibal.pipeline.times import step_times
from omnibal.profile.records import ModelProfile

# Yao et al. find the optimum within three layers of their anchor, and try 10 to 15 candidates.
_PAPER_RADIUS, _PAPER_TOP = 3, 15
_MODEL_STARTS = 4  # partitions of the makespan model that the search starts from


@dataclass(frozen=True)
class Candidate:
    """A partition and its predicted step."""

    partition: Partition
    step_seconds: float


@dataclass(frozen=True)
class PartitionSearch:
    method: str
    candidates: tuple[Candidate, ...]
    """Best first, at least one."""
    lower_bound_seconds: float
    """No partition has a faster step."""

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def gap(self) -> float:
        """How far the best candidate may be from the optimum at most, as a share of the lower bound."""
        return self.best.step_seconds / self.lower_bound_seconds - 1 if self.lower_bound_seconds else 0.0


def search_partition(
    profile: ModelProfile,
    loads: Iterable[Load],
    num_stages: int,
    links: Links,
    *,
    method: str = "search",
    mode: Mode = "rendezvous",
    zero_stage: int = 1,
    recompute: Sequence[str] | None = None,
    top: int = 10,
) -> PartitionSearch:
    """Find the partition with the shortest 1F1B step.

    Args:
        profile: What the layers cost.
        loads: One Load per replica, each with one entry per micro-batch.
        num_stages: At most the number of layers.
        links: How fast data moves.
        method: ``"uniform"`` and ``"parameters"``: DeepSpeed's. ``"paper"``: OmniBal's, its best candidates tried in
            the simulator. ``"slowest_stage"``: the slowest stage's time is least, exactly. ``"model"``: optima of a
            closed formula for the makespan. ``"bound"``: the least lower bound. ``"search"``: the results of all
            others, improved by local search in the simulator; so it is never worse than any of them.
        mode: How transfers run, see :func:`omnibal.pipeline.simulate.simulate`.
        zero_stage: 0 or 1, see :class:`omnibal.cluster.Layout`.
        recompute: A level for each layer; by default ``"none"``.
        top: The most candidates to return.

    Raises:
        ConfigError: There are fewer layers than stages, the method is unknown, or the step cannot be simulated.
    """
    if method not in METHODS:
        raise ConfigError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if mode not in get_args(Mode):
        raise ConfigError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    check_num_stages(len(profile.layers), num_stages)
    times = step_times(profile, loads, links, zero_stage=zero_stage, recompute=recompute)
    schedule = one_f_one_b(num_stages, times.forward.shape[1])
    problem = PartitionProblem(profile, times, schedule, mode)
    seconds = _search(problem) if method == "search" else _simulate(problem, _PROPOSALS[method](problem))
    ranking = sorted(seconds, key=lambda boundaries: (seconds[boundaries], boundaries))[: max(1, top)]
    return PartitionSearch(
        method=method,
        candidates=tuple(Candidate(Partition(boundaries), seconds[boundaries]) for boundaries in ranking),
        lower_bound_seconds=problem.lower_bound_seconds,
    )


def _paper(problem: PartitionProblem) -> list[Boundaries]:
    anchor = greedy_anchor(problem.mean.forward, problem.num_stages)
    return best_neighbours(anchor, problem.mean.forward, problem.mean.crossing, radius=_PAPER_RADIUS, top=_PAPER_TOP)


# What each method proposes; the simulator ranks the proposals.
_PROPOSALS: dict[str, Callable[[PartitionProblem], list[Boundaries]]] = {
    "uniform": lambda problem: [Partition.uniform(len(problem.profile.layers), problem.num_stages).boundaries],
    "parameters": lambda problem: [parameter_cut(problem.profile, problem.num_stages).boundaries],
    "paper": _paper,
    "slowest_stage": lambda problem: [least_maximum(problem.mean.stage)[1]],
    "model": lambda problem: model_optima(problem.mean.pace, problem.mean.passing, problem.micro_batches),
    "bound": lambda problem: [problem.least_bound],
}
METHODS = (*_PROPOSALS, "search")
"""Names of the methods of :func:`search_partition`, from the simplest to the best."""


def _simulate(problem: PartitionProblem, partitions: list[Boundaries]) -> dict[Boundaries, float]:
    return dict(zip(partitions, problem.evaluate(np.array(partitions)).tolist(), strict=True))


def _search(problem: PartitionProblem) -> dict[Boundaries, float]:
    # All other methods' results are known before the descent begins, so it cannot end above any of them.
    seconds: dict[Boundaries, float] = {}
    starts: list[Boundaries] = []
    for method, propose in _PROPOSALS.items():
        proposed = _simulate(problem, propose(problem))
        seconds |= proposed
        starts += sorted(proposed, key=proposed.__getitem__)[: _MODEL_STARTS if method == "model" else 1]
    return descend(starts, seconds, problem.evaluate, problem.bound)


def greedy_anchor(forward_seconds: FloatArray, num_stages: int) -> Boundaries:
    """Fill one stage after another until the next layer would take it farther from the mean of what is left.

    >>> greedy_anchor(np.array([1.0, 1.0, 1.0, 1.0, 4.0]), 2)
    (0, 4, 5)
    """
    num_layers = len(forward_seconds)
    sums = np.concatenate([[0.0], np.cumsum(forward_seconds)])
    boundaries = [0]
    for stages_left in range(num_stages, 1, -1):
        start = boundaries[-1]
        target = sums[start] + (sums[-1] - sums[start]) / stages_left
        # Every stage that is left needs a layer.
        ends = np.arange(start + 1, num_layers - stages_left + 2)
        boundaries.append(int(ends[np.argmin(np.abs(sums[ends] - target))]))
    return (*boundaries, num_layers)


def best_neighbours(
    anchor: Boundaries, forward_seconds: FloatArray, crossing_seconds: FloatArray, *, radius: int, top: int
) -> list[Boundaries]:
    """The paper's candidates: the ``top`` partitions around its anchor with even stages and cheap cuts, best first.

    Source: Yao et al., OmniBal, ICML 2025, section 4.2 (balanced model partitioning). Deviations: the paper adds a
    variance in seconds² to a volume in bytes; here the variance is divided by the mean stage time and the volume by
    the bandwidth, so that both are seconds. The best of all (2 radius + 1)^(stages - 1) neighbours are found exactly.
    """
    # penalty = VAR(forward time of the stages) / mean + SUM(communication), in seconds. The mean is the same for all
    # partitions, so the penalty is a sum over stages, and dynamic programming can keep the best ``top`` beginnings for
    # each place of a boundary: O(stages × (2 radius + 1)² × top).
    sums = np.concatenate([[0.0], np.cumsum(forward_seconds)])
    num_layers, num_stages = anchor[-1], len(anchor) - 1
    mean = sums[-1] / num_stages

    def stage_penalty(start: int, end: int) -> float:
        deviation = (sums[end] - sums[start] - mean) ** 2
        return float((deviation / mean if deviation else 0.0) + (crossing_seconds[end] if end < num_layers else 0.0))

    # The best beginnings that end at each place, as (penalty so far, boundaries). All beginnings of a place go on in
    # the same ways at the same cost, so none but the best ``top`` can become one of the best ``top`` partitions.
    beginnings: dict[int, list[tuple[float, Boundaries]]] = {0: [(0.0, (0,))]}
    for middle in (*anchor[1:-1], num_layers):
        places = range(middle - radius, middle + radius + 1) if middle < num_layers else [num_layers]
        beginnings = {
            place: sorted(
                (score + stage_penalty(start, place), (*boundaries, place))
                for start, kept in beginnings.items()
                if start < place <= num_layers
                for score, boundaries in kept
            )[:top]
            for place in places
        }
    return [boundaries for _, boundaries in beginnings[num_layers]]
