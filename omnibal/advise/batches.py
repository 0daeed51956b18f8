"""Micro-batches of a few steps, as a trainer would make them of samples drawn at random; even packs by the planner."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from omnibal.cost import FloatArray, Load
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.step_size import samples_made

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
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Samples:
    lengths: SampleLengths

    @classmethod
    def draw(cls, lengths: SampleLengths, count: int, generator: np.random.Generator) -> "Samples":
        """Draw samples with replacement, as the lengths may be a part of a dataset."""
        return cls(lengths.take(generator.integers(0, len(lengths), count)))

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def sizes(self) -> FloatArray:
        """One row per sample; columns are those of ``load_of``."""
        lengths, tokens = self.lengths, self.lengths.llm_tokens.astype(np.float64)
        further = (lengths.vision_squared, lengths.sound_units)
        squared, sounds = (np.zeros(len(self)) if column is None else column for column in further)
        targets = () if lengths.target_tokens is None else (lengths.target_tokens,)
        columns = (lengths.vision_units, tokens, tokens**2, squared, sounds, *targets)
        return np.stack(columns, axis=1).astype(np.float64)

    @cached_property
    def all_rows(self) -> "Samples":
        """The same samples for a head that works on all rows: every token counts as a target."""
        of = self.lengths
        return Samples(
            SampleLengths(
                of.vision_units, of.llm_tokens, vision_squared=of.vision_squared, sound_units=of.sound_units,
                video_units=of.video_units,
            )
        )  # fmt: skip

    @property
    def load(self) -> Load:
        return load_of(self.sizes.T)


def load_of(columns: Any) -> Load:
    """Vision units, LLM tokens, their squares, the squares of patches, sound units and, where they count, targets."""
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


def even_packs(samples: Samples, limits: PackLimits, *, num_ranks: int, micro_batches: int) -> Batches:
    """Packs as ``balance`` plans them, of as many samples as fill whole steps."""
    # An epoch has whole steps, too, but so many that one more makes no difference to its packs.
    per_step = samples_made(samples.lengths, limits, num_ranks * micro_batches)
    count = min(int(max(len(samples) // per_step, 1) * per_step), len(samples))
    lengths = samples.lengths.take(np.arange(count))
    epoch = arrange_epoch(lengths, limits, num_replicas=num_ranks, micro_batches=micro_batches)
    load = epoch.packs.load(lengths)[epoch.steps]
    return Batches(load, load, count / epoch.num_steps)


def _sums(sizes: FloatArray, pack: Indices, num_packs: int) -> Any:
    return np.stack([np.bincount(pack, weights=column, minlength=num_packs) for column in sizes.T], axis=1)
