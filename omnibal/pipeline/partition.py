"""Where a pipeline is cut: the record of a cut, the cuts that DeepSpeed makes, and good ones for given costs.

Costs of possible stages have the shape (stages, layers + 1, layers + 1): ``costs[s, a, b]`` is what stage ``s`` costs
with layers ``a`` to ``b - 1``. Entries with ``a >= b`` are no stage and are ignored.

    least_maximum    exact: dynamic programming for the least slowest stage
    model_optima     within 1 %: the optima of a closed formula for the makespan
    best_neighbours  OmniBal's: even stages and cheap cuts around a greedy anchor
    descend          from known cuts to better neighbours, by any measure of a cut
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index

import numpy as np

from omnibal.cluster import Layout
from omnibal.compiled import compiled
from omnibal.cost import FloatArray, IntArray
from omnibal.errors import ConfigError, InfeasibleError
from omnibal.families.base import Layer, encoder_layers
from omnibal.profile.records import ModelProfile

Boundaries = tuple[int, ...]
Evaluate = Callable[[IntArray], FloatArray]  # from partitions, shape (partitions, stages + 1), to their seconds
_STEP = 1.01  # ratio of one limit on the slowest stage to the next: the model's optimum is met within 1 %
_EVENNESS = 1e-3  # weight of even stages in a passage: decides among partitions that the model finds about equal
_ROUNDING = 1 + 1e-12
_REACH = 3  # the most layers that a descent moves one boundary by
_AT_A_TIME = 16  # neighbours that a descent evaluates together, before it looks at the best of them


@dataclass(frozen=True)
class Partition:
    """The cut of a model's layers into pipeline stages.

    Args:
        boundaries: ``num_stages + 1`` layer indices: stage ``s`` holds layers ``boundaries[s] : boundaries[s + 1]``.

    Raises:
        ConfigError: The boundaries do not start at 0 or do not increase (a stage without a layer).

    Example:
        >>> cut = Partition((0, 3, 4))
        >>> cut.num_stages, cut.num_layers, list(cut.layers(1))
        (2, 4, [3])
    """

    boundaries: tuple[int, ...]

    def __init__(self, boundaries: Sequence[int]) -> None:
        try:
            cut = tuple(index(boundary) for boundary in boundaries)
        except TypeError:
            raise ConfigError(f"boundaries must be integers, got {boundaries!r:.80}") from None
        if len(cut) < 2 or cut[0] != 0 or any(left >= right for left, right in pairwise(cut)):
            raise ConfigError(f"boundaries must start at 0 and increase from stage to stage, got {cut}")
        object.__setattr__(self, "boundaries", cut)

    @classmethod
    def uniform(cls, num_layers: int, num_stages: int) -> Partition:
        """Stages of equally many layers, or one more in the first ones: DeepSpeed's ``partition_method="uniform"``.

        >>> Partition.uniform(num_layers=10, num_stages=4).boundaries
        (0, 3, 6, 8, 10)

        Raises:
            ConfigError: ``num_stages`` is below 1 or above ``num_layers``.
        """
        check_num_stages(num_layers, num_stages)
        size, larger = divmod(num_layers, num_stages)  # the first ``larger`` stages hold one layer more
        return cls([stage * size + min(stage, larger) for stage in range(num_stages + 1)])

    @property
    def num_stages(self) -> int:
        return len(self.boundaries) - 1

    @property
    def num_layers(self) -> int:
        return self.boundaries[-1]

    def layers(self, stage: int) -> range:
        if not 0 <= stage < self.num_stages:
            raise ConfigError(f"stage must lie in [0, {self.num_stages}), got {stage}")
        return range(self.boundaries[stage], self.boundaries[stage + 1])


def frozen_stages(profile: ModelProfile, boundaries: IntArray) -> IntArray:
    """How many of the first stages train nothing; boundaries (…, stages + 1) -> (…,). The last stage never counts."""
    # The last stage computes the loss and so runs a backward pass of its own.
    count: IntArray = np.sum(boundaries[..., 1:-1] <= profile.frozen_front, axis=-1)
    return count


def check_num_stages(num_layers: int, num_stages: int) -> None:
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(f"num_stages must lie in [1, {num_layers}] (each stage holds a layer), got {num_stages}")


def parameter_cut(profile: ModelProfile, num_stages: int) -> Partition:
    """DeepSpeed's ``partition_method="parameters"``, which counts parameters that are trained."""
    return Partition(balanced_boundaries([layer.gradient_bytes for layer in profile.layers], num_stages))


def cut_parts(
    layers: Sequence[Layer],
    weights: Sequence[float],
    layout: Layout,
    cut: Callable[[Sequence[float], int], Sequence[int]] | None = None,
) -> Partition:
    """Boundaries by a weight of each layer; encoder and language model each by itself where the encoder has a place."""
    # `cut` makes boundaries of weights and a number of stages; by default `balanced_boundaries`. The layers of a spread
    # encoder, which has no stage, are counted with the first one.
    cut = cut or balanced_boundaries
    if layout.encoder is None:
        return Partition(cut(weights, layout.num_stages))
    border, own = encoder_layers(layers), layout.encoder.num_stages
    parts = (("encoder", weights[:border], own), ("language model", weights[border:], layout.num_stages - own))
    for name, part, num_stages in parts:
        if num_stages > len(part):
            raise ConfigError(f"stages of the {name} must be at most its {len(part)} layers, got {num_stages}")
    first, behind = (cut(part, num_stages) if num_stages else (0,) for _, part, num_stages in parts)
    return Partition((*first, *(border + boundary for boundary in behind[1:])))


def language_partition(layers: Sequence[Layer], partition: Partition) -> Partition:
    """The stages in layers of the LLM alone; the encoder's are counted with the first one."""
    border, (first, *others) = encoder_layers(layers), partition.boundaries
    if others[0] <= border:
        raise ConfigError(
            f"the first stage of the partition must end in the language model, which begins with layer {border}, where "
            f"the encoder is spread, got an end before layer {others[0]}"
        )
    return Partition((first, *(boundary - border for boundary in others)))


def balanced_boundaries(weights: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """DeepSpeed's ``partition_balanced``: boundaries of ``num_stages`` stages with about equal sums of weights.

    >>> balanced_boundaries([1, 1, 1, 3], 2)
    (0, 3, 4)
    """
    num_layers = len(weights)
    if num_layers == num_stages:
        return tuple(range(num_stages + 1))
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    # For each prefix of the layers and number of stages DeepSpeed keeps one cut, that with the least difference between
    # the heaviest and the lightest stage, of equal ones the last. Keeping one is greedy: another cut may have a smaller
    # difference in the end. Dynamic programming, O(stages × layers²): entry i of both arrays is the weight of the
    # heaviest and of the lightest stage of the one cut that is kept for the first i layers.
    heaviest, lightest = np.full(num_layers + 1, np.inf), np.full(num_layers + 1, np.inf)
    heaviest[0] = 0
    last_cut = np.zeros((num_stages + 1, num_layers + 1), dtype=int)
    for stage in range(1, num_stages + 1):
        before = heaviest, lightest
        heaviest, lightest = np.full(num_layers + 1, np.inf), np.full(num_layers + 1, np.inf)
        for i in range(stage, num_layers + 1):
            most = np.maximum(before[0][:i], sums[i] - sums[:i])
            least = np.minimum(before[1][:i], sums[i] - sums[:i])
            # Entry c belongs to a last stage of layers c to i - 1; reversed, argmin finds the last of equal ones.
            kept = i - 1 - int(np.argmin((most - least)[::-1]))
            last_cut[stage, i], heaviest[i], lightest[i] = kept, most[kept], least[kept]
    boundaries = [num_layers]  # walk back from the end of the model along the cuts that were kept
    for stage in range(num_stages, 0, -1):
        boundaries.append(int(last_cut[stage, boundaries[-1]]))
    return tuple(reversed(boundaries))


def least_maximum(costs: FloatArray) -> tuple[float, Boundaries]:
    """The exact least maximum of the stages' costs, and its partition (of equal ones that of smallest boundaries).

    >>> seconds = np.array([[0, 1, 3, 6], [0, 0, 2, 5], [0, 0, 0, 3], [0, 0, 0, 0]], dtype=float)
    >>> least_maximum(np.stack([seconds, seconds]))
    (3.0, (0, 2, 3))
    """
    value, boundaries = _solve(costs, False)  # O(stages × layers²)
    if not np.isfinite(value):
        raise InfeasibleError("a partition must have stages of finite cost only, got none that has")
    return float(value), _follow(boundaries)


@compiled
def _solve(costs: FloatArray, adds: bool) -> tuple[float, IntArray]:
    """The least sum (``adds``) or maximum of the stages' costs of any partition, and each stage's best end by start."""
    num_stages, size, _ = costs.shape
    choices = np.zeros((num_stages, size), dtype=np.int64)
    # Dynamic programming from the last stage to the first:
    # rest[a] = min over b of combine(costs[stage, a, b], rest of the next stage[b]); choices[stage, a] is that b.
    rest = _last_boundary(size)
    for stage in range(num_stages - 1, -1, -1):
        combined = np.full(size, np.inf)
        for a in range(size):
            for b in range(a + 1, size):
                value = costs[stage, a, b] + rest[b] if adds else max(costs[stage, a, b], rest[b])
                if value < combined[a]:
                    combined[a], choices[stage, a] = value, b
        rest = combined
    return rest[0], choices


def model_optima(pace_seconds: FloatArray, passing_seconds: FloatArray, micro_batches: int) -> list[Boundaries]:
    """Partitions that a closed formula for the makespan finds best, fastest pace first.

    ``pace_seconds`` is how long a possible stage is busy with a micro-batch, ``passing_seconds`` how long a micro-batch
    takes through the stage and over the link behind it, there and back.
    """
    # The formula: one micro-batch passes all stages and links there and back, the others follow at the pipeline's pace,
    #     makespan = Σ passing + (micro_batches - 1) · pace
    # The pace is that of the slowest stage, or of a round trip shared by the micro-batches in flight:
    #     pace = max(slowest stage, max over s of (Σ passing from stage s on) / (stages - s))
    # For each limit on the pace dynamic programming finds the shortest passage. Limits grow by 1 %, so that the best
    # partition found is within 1 % of the formula's optimum. O(limits × stages × layers²).
    shortest, choices = _solve(passing_seconds, True)
    loosest = _follow(choices)
    # Entry k is the round trip over the last k + 1 stages, shared by k + 1 micro-batches in flight.
    trips = np.cumsum(_costs(loosest, passing_seconds)[::-1]) / np.arange(1, len(loosest))
    slowest = float(max(_costs(loosest, pace_seconds).max(), trips.max()))
    last_limit = slowest * _STEP  # beyond it no passage gets shorter
    # No partition has a faster pace: neither its slowest stage nor the round trip that all stages share is shorter.
    limit = max(least_maximum(pace_seconds)[0], shortest / len(pace_seconds))
    best, found = np.inf, dict[Boundaries, None]()
    # A looser limit may shorten the passage, which counts once, and slows the pace, which counts micro_batches - 1
    # times. The search ends where even the shortest passage of all partitions could not make up for the pace.
    while limit <= last_limit and shortest + (micro_batches - 1) * limit < best:
        keeps, choices = _within(limit, pace_seconds, passing_seconds)
        if keeps:
            boundaries = _follow(choices)
            found[boundaries] = None
            best = min(best, _costs(boundaries, passing_seconds).sum() + (micro_batches - 1) * limit)
        limit *= _STEP
    return list(found)


@compiled
def _within(limit: float, pace_seconds: FloatArray, passing_seconds: FloatArray) -> tuple[bool, IntArray]:
    """Whether a partition keeps to a limit on the pace, and each stage's end by start in that of shortest passage."""
    num_stages, size, _ = pace_seconds.shape
    most, whole = limit * _ROUNDING, max(passing_seconds[0, 0, size - 1], 1e-300)
    choices = np.zeros((num_stages, size), dtype=np.int64)
    score, passage = _last_boundary(size), _last_boundary(size)
    for stage in range(num_stages - 1, -1, -1):
        scores, passages = np.full(size, np.inf), np.full(size, np.inf)
        for a in range(size):
            for b in range(a + 1, size):
                if not pace_seconds[stage, a, b] <= most or score[b] == np.inf:
                    continue
                # The square of each stage's passage, with a small weight, prefers even stages among about equal
                # partitions.
                passing = passing_seconds[stage, a, b]
                candidate = passing * (1 + _EVENNESS * passing / whole) + score[b]
                if candidate < scores[a]:
                    scores[a], passages[a], choices[stage, a] = candidate, passing + passage[b], b
            # The round trip from here to the end is shared by as many micro-batches as there are stages on the way.
            if not passages[a] / (num_stages - stage) <= most:
                scores[a] = np.inf
        score, passage = scores, passages
    return score[0] < np.inf, choices


def _costs(boundaries: Boundaries, costs: FloatArray) -> FloatArray:
    stages: FloatArray = costs[np.arange(len(costs)), boundaries[:-1], boundaries[1:]]
    return stages


@compiled
def _last_boundary(size: int) -> FloatArray:
    # The cost of the stages behind the last one, by where they start: they start at the end of the model or nowhere.
    costs = np.full(size, np.inf)
    costs[-1] = 0
    return costs


def _follow(choices: IntArray) -> Boundaries:
    boundaries = [0]
    for choice in choices:  # each stage's end is the next one's start
        boundaries.append(int(choice[boundaries[-1]]))
    return tuple(boundaries)


def descend(
    starts: Iterable[Boundaries], known: Mapping[Boundaries, float], evaluate: Evaluate, bound: Evaluate
) -> dict[Boundaries, float]:
    """Move each start to better neighbours until none is better; returns the seconds of every partition evaluated.

    ``known`` has the seconds of the starts and of other partitions, ``bound`` gives cheap lower bounds of ``evaluate``.
    """
    # All descents share what they have learned: no partition is evaluated twice or gone on from twice.
    seconds, left = dict(known), set[Boundaries]()
    for start in starts:
        best: Boundaries | None = start
        while best is not None and best not in left:
            left.add(best)
            best = _better_neighbour(best, seconds, left, evaluate, bound)
    return seconds


def _better_neighbour(
    boundaries: Boundaries, seconds: dict[Boundaries, float], left: set[Boundaries], evaluate: Evaluate, bound: Evaluate
) -> Boundaries | None:
    """A better neighbour that no descent has ``left`` yet; ``seconds`` gets those that are evaluated."""
    limit, moved = seconds[boundaries], neighbours(boundaries, _REACH)
    rows = _rows(moved)
    unknown = moved[[row not in seconds for row in rows]]
    bounds = bound(unknown)
    # A neighbour whose bound is not below the limit cannot be better; the lowest bounds come first.
    order = np.argsort(bounds, kind="stable")[: np.count_nonzero(bounds < limit)]
    for first in range(0, len(order), _AT_A_TIME):
        few = unknown[order[first : first + _AT_A_TIME]]
        seconds.update(zip(_rows(few), evaluate(few).tolist(), strict=True))
        best = min(_rows(few), key=seconds.__getitem__)
        if seconds[best] < limit:
            return best
    # Nothing new is better; another descent may have evaluated a better neighbour and not gone on from it.
    better = [row for row in rows if seconds.get(row, limit) < limit and row not in left]
    return min(better, key=seconds.__getitem__, default=None)


def neighbours(boundaries: Boundaries, reach: int) -> IntArray:
    """Partitions one move away: one boundary by up to ``reach`` layers, or a run of boundaries by one layer.

    >>> neighbours((0, 1, 4), reach=2).tolist()
    [[0, 2, 4], [0, 3, 4]]
    """
    inner = len(boundaries) - 2
    # One row for every run of adjacent inner boundaries (first to last), then the far moves of single boundaries.
    first, last = np.triu_indices(inner)
    rows = (np.arange(inner) >= first[:, None]) & (np.arange(inner) <= last[:, None])
    moves = [sign * rows.astype(np.int64) for sign in (1, -1)]
    moves += [sign * far * np.eye(inner, dtype=np.int64) for far in range(2, reach + 1) for sign in (1, -1)]
    moved = np.array(boundaries) + np.pad(np.concatenate(moves), ((0, 0), (1, 1)))
    return moved[(np.diff(moved, axis=1) > 0).all(axis=1)]


def _rows(partitions: IntArray) -> list[Boundaries]:
    return list(map(tuple, partitions.tolist()))


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
