"""How good packs and steps are: padding, imbalance between ranks, randomness of steps, and the fewest packs possible.

No figure stands alone: sorted steps have a small Dist Ratio and no randomness, tiny packs are balanced and many.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from omnibal.compiled import compiled
from omnibal.cost import FloatArray, Load
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packing_spec import DEFAULT_COST
from omnibal.data.packs import Packs
from omnibal.errors import kind

MOST_ROUNDINGS = 32  # more have not raised the lower bound on real lengths
LARGEST: Final = ("vision_units", "llm_tokens", "llm_tokens_squared")
LENGTH_CLASSES: Final = 8  # classes of token lengths that stand for sources where there is but one


def pad_ratio(lengths: SampleLengths, packs: Packs) -> float:
    """Share of padding if every pack were a batch of samples padded to its longest one; a packed sequence has none.

    The mean over packs of Σ(t_max − t_i) / (t_max · B), with t_i the tokens of the pack's B samples.
    Source: Yao et al., OmniBal, ICML 2025, equation 1.

    >>> pad_ratio(SampleLengths([1, 1, 1], [100, 50, 30]), Packs([0, 1, 2], [0, 2, 3]))
    0.125
    """
    sizes = packs.sizes
    filled = sizes > 0
    if not filled.any():
        return 0.0
    longest = np.maximum.reduceat(lengths.llm_tokens[packs.samples], packs.starts[:-1][filled]).astype(np.float64)
    padded = longest * sizes[filled]
    padding = padded - packs.llm_tokens(lengths)[filled]
    return float(np.divide(padding, padded, out=np.zeros_like(padded), where=padded > 0).mean())


def dist_ratio(loads: npt.ArrayLike, *, axis: int = 1) -> float:
    """Share of time that ranks wait for the one with the largest load, were time proportional to load.

    The mean over steps (and micro-batches) of Σ(T_max − T_i) / (T_max · N), with T_i the load of the i-th of N ranks;
    0 where no rank has any load. Source: Yao et al., OmniBal, ICML 2025, equation 2.

    Args:
        loads: Vision units, tokens or cost; by default of shape (steps, ranks) or (steps, ranks, micro-batches).
        axis: Which axis numbers the ranks.

    >>> dist_ratio([[4, 4], [4, 2]])
    0.125
    """
    array = np.asarray(loads, dtype=np.float64)
    largest = array.max(axis=axis, initial=0)
    waiting = largest - array.mean(axis=axis)
    ratios = np.divide(waiting, largest, out=np.zeros_like(largest), where=largest > 0)
    return float(ratios.mean()) if ratios.size else 0.0


def source_mix(source: IntArray, packs: Packs, steps: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Samples of each source in every step, shape (steps, sources); ``steps`` holds pack numbers, (steps, ...)."""
    numbers = np.asarray(steps, dtype=np.int64)
    chosen = packs.take(numbers.ravel())
    packs_per_step = numbers.size // max(len(numbers), 1)
    step = np.repeat(np.repeat(np.arange(len(numbers)), packs_per_step), chosen.sizes)
    num_sources = int(source.max(initial=0)) + 1
    counts = np.bincount(step * num_sources + source[chosen.samples], minlength=len(numbers) * num_sources)
    return counts.reshape(len(numbers), num_sources)


def step_randomness(mix: npt.ArrayLike) -> float:
    """How far the steps' mixes of sources are from independent draws: χ² per degree of freedom.

    1 is as random as plain shuffling (the mean over all shuffles is exactly 1, with a standard deviation of about
    √(2 / degrees)); large means that steps are sorted; near 0 that every step is alike.

    Args:
        mix: Samples of each source in every step, as ``source_mix`` counts them, shape (steps, sources).

    Returns:
        The figure, or nan where it says nothing: fewer than two steps or two sources that occur.

    >>> round(step_randomness([[5, 5], [5, 5]]), 2), round(step_randomness([[10, 0], [0, 10]]), 2)
    (0.0, 19.0)
    """
    counts = np.asarray(mix, dtype=np.float64)
    counts = counts[counts.sum(axis=1) > 0][:, counts.sum(axis=0) > 0]
    if min(counts.shape) < 2:
        return float("nan")
    total = counts.sum()
    expected = np.outer(counts.sum(axis=1), counts.sum(axis=0)) / total
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    degrees = (counts.shape[0] - 1) * (counts.shape[1] - 1)
    # Drawing without replacement takes χ² to degrees · total / (total − 1).
    return float(chi_squared / degrees * (total - 1) / total)


def min_packs(lengths: SampleLengths, limits: PackLimits) -> int:
    """A number of packs that no packing can do without: the largest of all dimensions' bounds.

    The dimensions are vision units, LLM tokens, and units of a further encoder that the limits bound.

    In each dimension every sample gets a weight such that no pack can weigh more than 1; then the sum of weights is a
    bound. Weights: the share of the limit that a sample takes (the volume bound); the same, with samples over half the
    limit counted as a whole pack if nothing above a threshold fits beside them (Martello and Toth's L2); and rounded
    shares ⌊(k+1)x⌋/k for k = 1 … 32, which see that a limit of 12 holds two samples of 5 and no third of 3 (Fekete and
    Schepers). A sample over a limit takes a pack of its own.

    Complexity: one pass over the samples, then O(limits). Sources: Martello and Toth, Lower bounds and reduction
    procedures for the bin packing problem, 1990; Fekete and Schepers, New classes of fast lower bounds for bin
    packing problems, 2001.

    >>> min_packs(SampleLengths([5, 5, 5, 5], [10, 10, 10, 10]), PackLimits(9, 100))
    4
    """
    oversized, histograms = load_histograms(lengths, limits)
    return oversized + max(map(histogram_bound, histograms))


def volume_bound(lengths: SampleLengths, limits: PackLimits) -> int:
    """The packs that would do if samples could be cut: what to compare packs with when limits are chosen.

    ``min_packs`` is closer to what a packer can reach; the difference is what the limits themselves waste.
    """
    oversized, histograms = load_histograms(lengths, limits)
    return oversized + max(map(histogram_volume, histograms))


def load_histograms(lengths: SampleLengths, limits: PackLimits) -> tuple[int, list[IntArray]]:
    """Count the samples over a limit, and the others by each size that has one, in arrays of shape (limit + 1,)."""
    kind("limits", limits, PackLimits)
    columns, most = [lengths.vision_units, lengths.llm_tokens], [limits.vision_units, limits.llm_tokens]
    for name, units in lengths.further_units().items():
        if getattr(limits, name) is not None:
            columns.append(units)
            most.append(limits.most(name))
    counts = np.zeros((len(most), max(most) + 1), dtype=np.int64)
    oversized = _count(tuple(columns), np.array(most), counts)
    return int(oversized), [row[: limit + 1] for row, limit in zip(counts, most, strict=True)]


def histogram_volume(counts: IntArray) -> int:
    """Bins of size ``len(counts) − 1`` that ``counts[i]`` items of size ``i`` fill if they may be cut."""
    return -(-int(counts @ np.arange(len(counts), dtype=np.int64)) // max(len(counts) - 1, 1))


def histogram_bound(counts: IntArray) -> int:
    """Fewest bins of size ``len(counts) − 1`` for ``counts[i]`` items of size ``i``: the bounds of ``min_packs``."""
    limit = len(counts) - 1
    if limit == 0:
        return 0
    rounded = -(-rounded_totals(counts) // (np.arange(1, MOST_ROUNDINGS + 1) * limit))
    return max(histogram_volume(counts), _martello_toth(counts), int(rounded.max()))


def rounded_totals(counts: IntArray, full: int = 0) -> npt.NDArray[np.int64]:
    """Total of ``counts`` in weights of ``rounded_shares`` for each k from 1 to ``MOST_ROUNDINGS``.

    Args:
        counts: ``counts[i]`` items of size ``i``; the limit is the last one, above 0.
        full: Weights are in units of 1 / ``full`` of a bin, rounded down; by default of 1 / (k · limit).
    """
    totals = np.zeros(MOST_ROUNDINGS, dtype=np.int64)
    _add_rounded(np.asarray(counts, dtype=np.int64), full, totals)
    return totals


@compiled
def _add_rounded(counts: IntArray, full: int, totals: IntArray) -> None:
    # The shares of `rounded_shares`, without its divisions: whole · limit + rest = (k + 1) · size.
    limit = len(counts) - 1
    for size in range(1, len(counts)):
        if counts[size] == 0:
            continue
        whole, rest = size // limit, size % limit
        for k in range(1, len(totals) + 1):
            rest += size
            if rest >= limit:
                whole, rest = whole + 1, rest - limit
            if rest == 0:
                share = size * full // limit if full else k * size
            else:
                share = whole * full // k if full else whole * limit
            totals[k - 1] += counts[size] * share


def rounded_shares(limit: int, k: int) -> npt.NDArray[np.int64]:
    """Weight of each size from 0 to ``limit`` in units of 1 / (k · limit): no bin weighs more than k · limit.

    A share x of the limit weighs x where (k+1)x is a whole number, else ⌊(k+1)x⌋ / k.

    >>> (rounded_shares(12, 4)[[1, 3, 4, 5]] / (4 * 12)).tolist()
    [0.0, 0.25, 0.25, 0.5]
    """
    sizes = np.arange(limit + 1, dtype=np.int64)
    whole, rest = np.divmod((k + 1) * sizes, limit)
    return np.where(rest == 0, k * sizes, whole * limit)


def _martello_toth(counts: IntArray) -> int:
    """L2 at its best threshold: large items take a bin each, mid-sized ones fill what is left or more bins."""
    limit = len(counts) - 1
    numbers = np.concatenate([[0], np.cumsum(counts)])  # items smaller than i
    volumes = np.concatenate([[0], np.cumsum(counts * np.arange(limit + 1, dtype=np.int64))])
    thresholds = np.arange(limit // 2 + 1)
    half = limit // 2 + 1  # smallest size of which two do not fit
    large = numbers[-1] - numbers[half]
    beside = numbers[limit - thresholds + 1] - numbers[half]  # large items that leave room for the threshold
    free = beside * limit - (volumes[limit - thresholds + 1] - volumes[half])
    middle = volumes[half] - volumes[thresholds]
    more = np.maximum(middle - free, 0)
    return int(large + (-(-more // limit)).max())


@compiled
def _count(columns: Any, most: IntArray, counts: IntArray) -> int:
    """Count in one pass, without arrays as long as the samples: there may be a hundred million."""
    oversized = 0
    for sample in range(len(columns[0])):
        over = False
        for size in range(len(columns)):
            over |= columns[size][sample] > most[size]
        if over:
            oversized += 1
            continue
        for size in range(len(columns)):
            counts[size, columns[size][sample]] += 1
    return oversized


@dataclass(frozen=True)
class PackingFigures:
    method: str
    samples: int  # samples that are in a pack
    packs: int  # packs that hold a sample
    empty_packs: int
    fewest_packs: int  # no method can do with fewer
    steps: int
    pad_ratio: float  # padding as a share of the tokens that the LLM works on; the mean over packs
    pad_ratio_if_padded: float  # Pad Ratio if the samples of a pack were padded to the longest one
    dist_ratio_vision: float
    dist_ratio_tokens: float
    dist_ratio_cost: float  # Dist Ratio of what micro-batches cost the LLM
    dist_ratio_least: float  # what of it the costliest samples force, however the others are dealt to their ranks
    dist_ratio_sound: float | None  # Dist Ratio of an encoder of sound beside the ViT; None where there is none
    # χ² per degree of freedom of the steps' mixes: 1 as shuffled, more where sorted; NaN with nothing to compare.
    randomness: float
    largest: dict[str, int]  # the most of each load that a pack holds
    lost: int  # samples in no pack, without those that were left out on purpose
    repeated: int  # samples in a pack beyond the first time
    over_limit: int  # packs of several samples that exceed a limit
    seconds: float  # what planning took

    @property
    def packs_over_fewest(self) -> float:
        return self.packs / self.fewest_packs - 1 if self.fewest_packs else 0.0

    @property
    def samples_per_pack(self) -> float:
        return self.samples / self.packs if self.packs else 0.0

    def to_record(self) -> dict[str, Any]:
        return asdict(self) | {
            "packs_over_fewest": self.packs_over_fewest,
            "samples_per_pack": self.samples_per_pack,
            "randomness": None if math.isnan(self.randomness) else self.randomness,
        }


def measure_packing(
    method: str,
    lengths: SampleLengths,
    limits: PackLimits,
    packs: Packs,
    steps: npt.NDArray[np.int64],
    *,
    seconds: float,
    load: Load | None = None,
    left_out: int = 0,
) -> PackingFigures:
    """Work out the figures of an arrangement; ``steps`` are pack numbers by (step, rank, micro-batch).

    ``load`` is what packs bring to the device where padding makes it more than samples hold, and ``left_out`` counts
    the samples over a limit that are left out on purpose.
    """
    # What samples hold, and what the device gets where padding makes it more.
    brought = packs.load(lengths)
    load = brought if load is None else load
    times = np.bincount(packs.samples, minlength=len(lengths))
    filled = packs.sizes > 0
    # A sample over a limit may be alone in its pack; packs of several must keep the limits.
    over = (load.vision_units > limits.vision_units) | (load.llm_tokens > limits.llm_tokens)
    for name in lengths.further_units():
        over |= getattr(load, name) > limits.most(name)
    return PackingFigures(
        method=method,
        samples=int((times > 0).sum()),
        packs=int(filled.sum()),
        empty_packs=int((~filled).sum()),
        fewest_packs=min_packs(lengths, limits) - left_out,
        steps=len(steps),
        pad_ratio=float(1 - (brought.llm_tokens[filled] / np.maximum(load.llm_tokens[filled], 1)).mean()),
        pad_ratio_if_padded=pad_ratio(lengths, packs),
        dist_ratio_vision=dist_ratio(load.vision_units[steps]),
        dist_ratio_tokens=dist_ratio(load.llm_tokens[steps]),
        dist_ratio_cost=dist_ratio(DEFAULT_COST(load)[steps]),
        dist_ratio_least=_forced(DEFAULT_COST(load)[steps], _costliest(lengths, packs)[steps]),
        dist_ratio_sound=None if lengths.sound_units is None else dist_ratio(load.sound_units[steps]),
        randomness=step_randomness(source_mix(mix_labels(lengths), packs, steps)),
        largest={name: int(getattr(load, name).max(initial=0)) for name in LARGEST},
        lost=int((times == 0).sum()) - left_out,
        repeated=int(np.maximum(times - 1, 0).sum()),
        over_limit=int((over & (packs.sizes > 1)).sum()),
        seconds=seconds,
    )


def _costliest(lengths: SampleLengths, packs: Packs) -> FloatArray:
    """What the costliest sample of each pack costs alone; 0 of an empty pack."""
    alone = DEFAULT_COST(Packs(np.arange(len(lengths)), np.arange(len(lengths) + 1)).load(lengths))
    found, filled = np.zeros(len(packs)), packs.sizes > 0
    if filled.any():
        found[filled] = np.maximum.reduceat(alone[packs.samples], packs.starts[:-1][filled])
    return found


def _forced(costs: FloatArray, costliest: FloatArray) -> float:
    """The least Dist Ratio: ranks wait at least for the costliest sample of those that run at the same time."""
    mean = costs.mean(axis=1)
    least = np.maximum(costliest.max(axis=1, initial=0), mean)
    return float((1 - np.divide(mean, least, out=np.ones_like(mean), where=least > 0)).mean()) if mean.size else 0.0


def mix_labels(lengths: SampleLengths) -> IntArray:
    """What the randomness of steps is measured on: each sample's source or, with a single source, class of length."""
    if lengths.source is not None and int(lengths.source.max(initial=0)) > 0:
        return lengths.source
    # equally many samples in each class
    bounds = np.quantile(lengths.llm_tokens, np.arange(1, LENGTH_CLASSES) / LENGTH_CLASSES)
    return np.searchsorted(bounds, lengths.llm_tokens, side="right")
