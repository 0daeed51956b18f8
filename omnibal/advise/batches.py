"""Micro-batches of a few steps, as a trainer would make them of samples drawn at random, in array operations alone.

Nothing is compiled: an answer comes at once, where the planner of ``omnibal.data`` would first compile its loops. Even
packs are made by a simple rule; those of the planner are a little more even (``tools/advise`` has both side by side).
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from omnibal.cost import FloatArray, Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits

Batching = Literal["random", "group_by_length", "batch_rebalance", "flattened", "packed", "even"]
"""Batches of random samples, padded; of samples alike in length, padded; of a step's samples by length, fewer of the
long ones, padded; of random ones laid one after another without padding; packs of as many random samples as limits
hold; and even packs."""
GROUPED: Final = 50
"""Batches of a rank's step that transformers' ``group_by_length`` sorts at a time."""
QUADRATIC: Final = 0.001
"""Weight of a batch's samples times its squared length in the cost that transformers' ``batch_rebalance`` evens out."""
HALVINGS: Final = 16
"""Of the range in which the cost of a rebalanced batch is searched."""
AT_ONCE: Final = 8
"""Of so many packs one gets a sample before they are compared again."""
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Samples:
    """Drawn samples: what each brings, one row a sample; columns as of ``Load``, the last one only where it counts."""

    sizes: FloatArray

    @classmethod
    def draw(cls, lengths: SampleLengths, count: int, generator: np.random.Generator) -> "Samples":
        """So many samples at random; the same one may come again, as where the lengths are a part of a dataset."""
        chosen = generator.integers(0, len(lengths), count)
        tokens = lengths.llm_tokens[chosen].astype(np.float64)
        squared = np.zeros(count) if lengths.vision_squared is None else lengths.vision_squared[chosen]
        columns = (lengths.vision_units[chosen], tokens, tokens**2, squared)
        targets = () if lengths.target_tokens is None else (lengths.target_tokens[chosen],)
        return cls(np.stack([*columns, *targets], axis=1).astype(np.float64))

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def tokens(self) -> FloatArray:
        """LLM tokens of each."""
        return self.sizes[:, 1]

    @property
    def all_rows(self) -> "Samples":
        """The same for a head that works on all rows, whatever predicts a target."""
        return Samples(self.sizes[:, :4])

    @property
    def load(self) -> Load:
        """Each as a micro-batch of its own."""
        return Load(*self.sizes.T)


@dataclass(frozen=True)
class Batches:
    """Micro-batches of some steps, shape (steps, ranks, micro-batches).

    Attributes:
        loads: What they hold, padding included.
        real: The same without padding.
        samples_per_step: On average.
    """

    loads: Load
    real: Load
    samples_per_step: float

    @property
    def num_samples(self) -> float:
        """In all steps."""
        return self.samples_per_step * self.loads.shape[0]

    @property
    def largest(self) -> PackLimits:
        """The most that any of them holds."""
        most = self.loads.max()
        return PackLimits(int(most.vision_units), max(int(most.llm_tokens), 1))


def padded_batches(
    samples: Samples, *, batch: int, num_ranks: int, micro_batches: int, batching: Batching = "random"
) -> Batches:
    """Batches of so many samples in their order, or by their lengths.

    Args:
        samples: At least a step of them; those beyond whole steps are left out.
        batch: Samples of a micro-batch.
        num_ranks: Data-parallel ranks.
        micro_batches: Per step and rank.
        batching: ``"random"``, ``"group_by_length"``, ``"batch_rebalance"`` or ``"flattened"``.
    """
    per_step = num_ranks * micro_batches * batch
    sizes = samples.sizes[: len(samples) // per_step * per_step]
    if batching == "batch_rebalance":
        return _rebalanced(sizes.reshape(-1, per_step, sizes.shape[1]), num_ranks, micro_batches)
    if batching == "group_by_length":
        order = _grouped(sizes[:, 1], GROUPED * batch * micro_batches)
        # batch after batch goes to the ranks in turn
        sizes = sizes[order].reshape(-1, micro_batches, num_ranks, batch, sizes.shape[1]).transpose(0, 2, 1, 3, 4)
    sizes = sizes.reshape(-1, num_ranks, micro_batches, batch, sizes.shape[-1])
    real = Load(*np.moveaxis(sizes.sum(axis=3), -1, 0))
    return Batches(real if batching == "flattened" else _padded(sizes), real, float(per_step))


def _grouped(tokens: FloatArray, size: int) -> Indices:
    """Positions of all samples, every ``size`` of them by length, longest first."""
    return np.lexsort((-tokens, np.arange(len(tokens)) // size))


def _rebalanced(steps: FloatArray, num_ranks: int, micro_batches: int) -> Batches:
    """Batches of unlike numbers of samples, padded: a step's samples by length, cut where costs are most alike.

    Source: transformers' ``BatchRebalanceSampler``, which moves one sample at a time until batches cost about the same.

    Args:
        steps: Samples of each step, shape (steps, samples, columns).
        num_ranks: Data-parallel ranks.
        micro_batches: Per step and rank.
    """
    num_batches, loads, real = num_ranks * micro_batches, list[FloatArray](), list[FloatArray]()
    for step in steps:
        ordered = step[np.argsort(-step[:, 1], kind="stable")]
        costs = ordered[:, 1] + QUADRATIC * ordered[:, 1] ** 2
        starts = np.array(_even_cuts(costs.tolist(), num_batches))
        counts, longest = np.diff(np.append(starts, len(step))), ordered[starts, 1]
        # the dearest batches of all ranks run at the same time, then the next dearest
        order = np.argsort(-counts * costs[starts], kind="stable")
        sums = np.add.reduceat(ordered, starts)
        padded = sums.copy()
        padded[:, 1], padded[:, 2] = counts * longest, counts * longest**2
        for found, kept in ((sums, real), (padded, loads)):
            kept.append(found[order].reshape(micro_batches, num_ranks, -1).transpose(1, 0, 2))
    padded_load, real_load = (Load(*np.moveaxis(np.stack(kept), -1, 0)) for kept in (loads, real))
    return Batches(padded_load, real_load, float(steps.shape[1]))


def _even_cuts(costs: list[float], num_batches: int) -> list[int]:
    """First samples of consecutive batches that cost about the same, ``samples · cost of the first`` each.

    Args:
        costs: Of each sample, descending.
        num_batches: At most as many as samples.
    """

    def cut(cost: float) -> list[int]:
        starts, start = [], 0
        for left in range(num_batches - 1, -1, -1):
            starts.append(start)
            start += min(max(round(cost / max(costs[start], 1.0)), 1), len(costs) - start - left)
        return starts if start == len(costs) else []

    low, high = costs[0] / 2, costs[0] * len(costs)
    found = cut(high + 1)
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        if cuts := cut(middle):
            found, high = cuts, middle
        else:
            low = middle
    return found


def _padded(sizes: FloatArray) -> Load:
    """Every sample of a micro-batch as long as its longest one; padding is no target."""
    batch, longest, sums = sizes.shape[3], sizes[..., 1].max(axis=3), np.moveaxis(sizes.sum(axis=3), -1, 0)
    return Load(sums[0], batch * longest, batch * longest**2, *sums[3:])


def random_packs(samples: Samples, limits: PackLimits, *, num_ranks: int, micro_batches: int) -> Batches:
    """Packs of samples in their order: one is closed when the next sample would exceed a limit.

    Args:
        samples: In the order in which they are drawn.
        limits: The most a pack holds; a sample beyond them has a pack of its own.
        num_ranks: Data-parallel ranks.
        micro_batches: Packs per step and rank.

    Returns:
        Whole steps only, at least one: packs are repeated where they do not fill it.
    """
    pack, number, vision, tokens = np.empty(len(samples), dtype=np.int64), 0, 0.0, 0.0
    for place, (units, length) in enumerate(samples.sizes[:, :2].tolist()):
        is_full = tokens + length > limits.llm_tokens or vision + units > limits.vision_units
        if is_full and tokens:
            number, vision, tokens = number + 1, 0.0, 0.0
        vision, tokens = vision + units, tokens + length
        pack[place] = number
    sums = _sums(samples.sizes, pack, number + 1)
    size = num_ranks * micro_batches
    steps = max(number // size, 1)  # the last pack may be short
    kept = np.resize(np.arange(max(number, 1)), steps * size)
    load = Load(*sums[kept].T.reshape(-1, steps, num_ranks, micro_batches))
    counts = np.bincount(pack, minlength=number + 1)[kept]
    return Batches(load, load, float(counts.sum()) / steps)


def even_packs(
    samples: Samples, seconds: FloatArray, *, num_ranks: int, micro_batches: int, samples_per_step: int
) -> Batches:
    """Packs of each step's samples that take about equally long, those most alike at the same time.

    The longest samples go to the packs that are fastest so far, then the next longest, and so on (longest processing
    time first, for an eighth of the packs at once). Packs are then sorted and dealt to the ranks, there and back.

    Args:
        samples: In the order in which they are drawn.
        seconds: Of every sample alone in vision and language, shape (samples, 2).
        num_ranks: Data-parallel ranks.
        micro_batches: Packs per step and rank.
        samples_per_step: So many samples are packed together.
    """
    steps, num_packs = len(samples) // samples_per_step, num_ranks * micro_batches
    sums = np.empty((steps, num_packs, samples.sizes.shape[1]))
    for step in range(steps):
        own = slice(step * samples_per_step, (step + 1) * samples_per_step)
        pack, filled = _longest_first(seconds[own], num_packs)
        # even in both: what differs in one phase differs the other way in the other where their sum is even
        order = np.argsort(filled.sum(axis=1) + 2 * filled[:, 1], kind="stable")
        sums[step] = _sums(samples.sizes[own], pack, num_packs)[order]
    dealt = sums.reshape(steps, micro_batches, num_ranks, -1).copy()
    dealt[:, 1::2] = dealt[:, 1::2, ::-1]
    load = Load(*np.moveaxis(dealt.transpose(0, 2, 1, 3), -1, 0))
    return Batches(load, load, float(samples_per_step))


def _longest_first(parts: FloatArray, num_packs: int) -> tuple[Indices, FloatArray]:
    """The pack of each sample, and what each pack takes in every part."""
    order = np.argsort(-parts.sum(axis=1), kind="stable")
    pack, filled = np.empty(len(parts), dtype=np.int64), np.zeros((num_packs, parts.shape[1]))
    size = -(-num_packs // AT_ONCE)
    for start in range(0, len(parts), size):
        chosen = order[start : start + size]
        fastest = np.argsort(filled.sum(axis=1), kind="stable")[: len(chosen)]
        pack[chosen] = fastest
        filled[fastest] += parts[chosen]
    return pack, filled


def _sums(sizes: FloatArray, pack: Indices, num_packs: int) -> Any:
    """What each pack holds, shape (packs, columns)."""
    return np.stack([np.bincount(pack, weights=column, minlength=num_packs) for column in sizes.T], axis=1)
