"""Micro-batches of a few steps, as a trainer would make them of samples drawn at random, in array operations alone.

Nothing is compiled, so that an answer comes at once; the planner of ``omnibal.data`` would first compile its loops.
Even packs are made by a simple rule; the planner's are a little more even (``tools/advise`` compares them).
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from omnibal.cost import FloatArray, Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits

Batching = Literal["random", "group_by_length", "batch_rebalance", "flattened", "packed", "even"]
"""Padded batches: of random samples; of samples alike in length; of a step's samples by length, fewer of the long ones.
Without padding: batches of random samples laid one after another; packs of as many random samples as limits hold;
packs that take equally long."""
GROUPED: Final = 50  # batches of a rank's step that transformers' group_by_length sorts at a time
QUADRATIC: Final = 0.001  # transformers' batch_rebalance evens out samples · (length + QUADRATIC · length²)
BISECTIONS: Final = 16  # steps of the search for the cost of a rebalanced batch
# Time of attention under a dense mask, in times of what is counted for as many squared tokens of packs, whose causal
# attention needs half of all pairs. At 8,192 tokens, which kernels like, an H200 took 2.0 times (tools/gpu/RESULTS.md,
# "Attention"). The five padded rows of its "ladder", of real lengths, fit best with 3.5.
MASKED: Final = 3.5
PARTS: Final = 8  # an eighth of the packs get a sample before packs are compared again
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Samples:
    sizes: FloatArray
    """One row per sample; columns are vision units, LLM tokens, their squares, the squares of patches, sound units and,
    only where they count, target tokens."""

    @classmethod
    def draw(cls, lengths: SampleLengths, count: int, generator: np.random.Generator) -> "Samples":
        """Draw samples with replacement, as the lengths may be a part of a dataset."""
        chosen = generator.integers(0, len(lengths), count)
        tokens = lengths.llm_tokens[chosen].astype(np.float64)
        squared, sounds = (
            np.zeros(count) if column is None else column[chosen]
            for column in (lengths.vision_squared, lengths.sound_units)
        )
        columns = (lengths.vision_units[chosen], tokens, tokens**2, squared, sounds)
        targets = () if lengths.target_tokens is None else (lengths.target_tokens[chosen],)
        return cls(np.stack([*columns, *targets], axis=1).astype(np.float64))

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def all_rows(self) -> "Samples":
        """The same samples for a head that works on all rows: every token counts as a target."""
        return Samples(self.sizes[:, :5])

    @property
    def load(self) -> Load:
        return load_of(self.sizes.T)


def load_of(columns: Any) -> Load:
    """Columns of ``Samples.sizes`` as a load."""
    vision, tokens, squares, squared, sounds, *targets = columns
    return Load(vision, tokens, squares, squared, targets[0] if targets else None, sounds)


@dataclass(frozen=True)
class Batches:
    """Micro-batches of some steps, shape (steps, ranks, micro-batches)."""

    loads: Load
    real: Load  # what they hold without padding
    samples_per_step: float

    def timed(self, *, masks: bool = True, on_targets: bool = False) -> Load:
        """The loads that costs are asked for: squared tokens are those that attention takes the time of.

        ``on_targets``: the head works on real targets alone, whatever the loads say.

        transformers makes a dense mask for rows of which any is padded, and none for rows of one length
        (``_ignore_causal_mask_sdpa``). Without masks, as flash attention does it, padding is not attended to.
        """
        loads, real = self.loads, self.real
        squares = np.where(loads.llm_tokens > real.llm_tokens, MASKED, 1.0) * loads.llm_tokens_squared
        return Load(
            loads.vision_units, loads.llm_tokens, squares if masks else real.llm_tokens_squared, loads.vision_squared,
            real.target_tokens if on_targets else loads.target_tokens, loads.sound_units,
        )  # fmt: skip

    @property
    def num_samples(self) -> float:
        return self.samples_per_step * self.loads.shape[0]

    @property
    def largest(self) -> PackLimits:
        most = self.loads.max()
        return PackLimits(int(most.vision_units), max(int(most.llm_tokens), 1))


def padded_batches(
    samples: Samples, *, batch: int, num_ranks: int, micro_batches: int, batching: Batching = "random"
) -> Batches:
    """Batches of ``batch`` samples, but for packs in any of the ways; samples beyond whole steps are left out."""
    per_step = num_ranks * micro_batches * batch
    sizes = samples.sizes[: len(samples) // per_step * per_step]
    if batching == "batch_rebalance":
        return _rebalanced(sizes.reshape(-1, per_step, sizes.shape[1]), num_ranks, micro_batches)
    if batching == "group_by_length":
        # As transformers' LengthGroupedSampler: sort stretches of the data, longest samples first.
        order = np.lexsort((-sizes[:, 1], np.arange(len(sizes)) // (GROUPED * batch * micro_batches)))
        # Accelerate hands one batch after another to the ranks in turn.
        sizes = sizes[order].reshape(-1, micro_batches, num_ranks, batch, sizes.shape[1]).transpose(0, 2, 1, 3, 4)
    sizes = sizes.reshape(-1, num_ranks, micro_batches, batch, sizes.shape[-1])
    sums = np.moveaxis(sizes.sum(axis=3), -1, 0)
    if batching == "flattened":
        return Batches(load_of(sums), load_of(sums), float(per_step))
    # Every sample becomes as long as the longest of its micro-batch; padding is no target.
    longest = sizes[..., 1].max(axis=3)
    padded = load_of([sums[0], batch * longest, batch * longest**2, *sums[3:]])
    return Batches(padded, load_of(sums), float(per_step))


def _rebalanced(steps: FloatArray, num_ranks: int, micro_batches: int) -> Batches:
    """Padded batches of unlike numbers of samples, cut from a step's samples by length where costs are most alike.

    Source: transformers' ``BatchRebalanceSampler``, which moves one sample at a time until batches cost about the same.
    """
    # steps: (steps, samples, columns)
    loads, real = list[FloatArray](), list[FloatArray]()
    for step in steps:
        ordered = step[np.argsort(-step[:, 1], kind="stable")]
        costs = ordered[:, 1] + QUADRATIC * ordered[:, 1] ** 2
        starts = np.array(_even_cuts(costs.tolist(), num_ranks * micro_batches))
        counts, longest = np.diff(np.append(starts, len(step))), ordered[starts, 1]
        # The dearest batches run at the same time on all ranks, then the next dearest.
        order = np.argsort(-counts * costs[starts], kind="stable")
        sums = np.add.reduceat(ordered, starts)
        padded = sums.copy()
        padded[:, 1], padded[:, 2] = counts * longest, counts * longest**2
        for found, kept in ((sums, real), (padded, loads)):
            kept.append(found[order].reshape(micro_batches, num_ranks, -1).transpose(1, 0, 2))
    padded_load, real_load = (load_of(np.moveaxis(np.stack(kept), -1, 0)) for kept in (loads, real))
    return Batches(padded_load, real_load, float(steps.shape[1]))


def _even_cuts(costs: list[float], num_batches: int) -> list[int]:
    """First samples of consecutive batches that cost about the same; a batch costs samples · cost of its first.

    The costs of samples descend.
    """
    costs = [max(cost, 1.0) for cost in costs]

    def cut(cost: float) -> list[int]:
        starts, start, spare = list[int](), 0, len(costs) - num_batches  # samples beyond one of each batch
        while spare and len(starts) < num_batches:
            starts.append(start)
            more = round(cost / costs[start]) - 1
            if more > 0:
                more = min(more, spare)
                start, spare = start + more, spare - more
            start += 1
        return [] if spare else [*starts, *range(start, len(costs))]

    # The smallest cost of a batch with which all samples are in one, by bisection of ratios.
    low, high = costs[0] / 2, costs[0] * len(costs)
    found = cut(high + 1)
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        if cuts := cut(middle):
            found, high = cuts, middle
        else:
            low = middle
    return found


def random_packs(samples: Samples, limits: PackLimits, *, num_ranks: int, micro_batches: int) -> Batches:
    """Packs of samples in their order; one is closed when the next sample would exceed a limit.

    A sample beyond the limits has a pack of its own. Packs that do not fill a step are left out, but where they do not
    fill the first one they are repeated.
    """
    pack, number, vision, tokens = np.empty(len(samples), dtype=np.int64), 0, 0.0, 0.0
    for place, (units, length) in enumerate(samples.sizes[:, :2].tolist()):
        is_full = tokens + length > limits.llm_tokens or vision + units > limits.vision_units
        if is_full and tokens:
            number, vision, tokens = number + 1, 0.0, 0.0
        vision, tokens = vision + units, tokens + length
        pack[place] = number
    sums = _sums(samples.sizes, pack, number + 1)
    steps = max(number // (num_ranks * micro_batches), 1)  # the last pack may be short
    kept = np.resize(np.arange(max(number, 1)), steps * num_ranks * micro_batches)
    load = load_of(sums[kept].T.reshape(-1, steps, num_ranks, micro_batches))
    return Batches(load, load, float(np.bincount(pack, minlength=number + 1)[kept].sum()) / steps)


def even_packs(
    samples: Samples, seconds: FloatArray, *, num_ranks: int, micro_batches: int, samples_per_step: int
) -> Batches:
    """Packs of each step's samples that take about equally long, those most alike at the same time.

    The longest samples go to the packs that are fastest so far, then the next longest, and so on (longest processing
    time first, for an eighth of the packs at once). With several encoders packs are level in each, as the planner makes
    them. ``seconds`` are those of every sample alone in each encoder and, last, in the LLM.
    """
    deal = _longest_first if seconds.shape[1] == 2 else _level_in_each
    steps, num_packs = len(samples) // samples_per_step, num_ranks * micro_batches
    sums = np.empty((steps, num_packs, samples.sizes.shape[1]))
    for step in range(steps):
        own = slice(step * samples_per_step, (step + 1) * samples_per_step)
        pack, filled = deal(seconds[own], num_packs)
        # Packs whose sums are even differ in one phase the opposite way as in the other, so language weighs more here.
        order = np.argsort(filled.sum(axis=1) + 2 * filled[:, -1], kind="stable")
        sums[step] = _sums(samples.sizes[own], pack, num_packs)[order]
    # Sorted packs are dealt to the ranks, there and back: like packs run at the same time.
    dealt = sums.reshape(steps, micro_batches, num_ranks, -1).copy()
    dealt[:, 1::2] = dealt[:, 1::2, ::-1]
    load = load_of(np.moveaxis(dealt.transpose(0, 2, 1, 3), -1, 0))
    return Batches(load, load, float(samples_per_step))


def _longest_first(seconds: FloatArray, num_packs: int) -> tuple[Indices, FloatArray]:
    """The pack of each sample, and the seconds that each pack takes in the encoders and in the LLM."""
    order = np.argsort(-seconds.sum(axis=1), kind="stable")
    pack, filled = np.empty(len(seconds), dtype=np.int64), np.zeros((num_packs, seconds.shape[1]))
    size = -(-num_packs // PARTS)
    for start in range(0, len(seconds), size):
        chosen = order[start : start + size]
        fastest = np.argsort(filled.sum(axis=1), kind="stable")[: len(chosen)]
        pack[chosen] = fastest
        filled[fastest] += seconds[chosen]
    return pack, filled


def _level_in_each(seconds: FloatArray, num_packs: int) -> tuple[Indices, FloatArray]:
    """As ``_longest_first``, but each sample goes where the sum of all parts' squared loads grows least."""
    # Loads of a part count in its mean, so that a small encoder's waits count like the LLM's.
    loads = seconds / np.maximum(seconds.mean(axis=0), np.finfo(float).tiny)
    pack, filled = np.empty(len(loads), dtype=np.int64), np.zeros((num_packs, loads.shape[1]))
    for sample in np.argsort(-loads.max(axis=1), kind="stable"):
        pack[sample] = least = (filled @ loads[sample]).argmin()
        filled[least] += loads[sample]
    return pack, _sums(seconds, pack, num_packs)


def _sums(sizes: FloatArray, pack: Indices, num_packs: int) -> Any:
    return np.stack([np.bincount(pack, weights=column, minlength=num_packs) for column in sizes.T], axis=1)
