"""Published rules of sampling, in our own words: for methods that come without an installable package.

Each takes a ``Task`` and returns its micro-batches in running order: step after step, rank after rank. What does not
fill the last step is lost, as with the originals.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from omnibal.data.isf import iterative_sampling_and_filtering
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packs import Packs

Order = npt.NDArray[np.int64]

MEGA_BATCH = 50
"""Steps' worth of samples that device grouping sorts at once, as transformers' length grouping does."""


@dataclass(frozen=True)
class Task:
    """What is to be packed, and for whom."""

    lengths: SampleLengths
    limits: PackLimits
    num_replicas: int
    batch_size: int
    seed: int = 0

    @property
    def step_samples(self) -> int:
        """Samples of a step of methods with batches of fixed size."""
        return self.num_replicas * self.batch_size

    def generator(self) -> np.random.Generator:
        """A generator in its first state."""
        return np.random.default_rng(self.seed)


def random_batches(task: Task) -> Packs:
    """Samples in random order, so many to a micro-batch."""
    return _batches(task, task.generator().permutation(len(task.lengths)))


def length_grouped(task: Task) -> Packs:
    """LLaVA's group_by_modality_length, which OmniBal's paper compares with.

    The samples of a random step are sorted; each goes, longest first, to the rank with the fewest tokens that is not
    full. Samples without an image form steps of their own; the steps run in random order.
    """
    generator = task.generator()
    vision = task.lengths.vision_units
    kinds = (generator.permutation(np.flatnonzero(kind)) for kind in (vision > 0, vision == 0))
    megabatches = [step for kind in kinds for step in _whole(kind, task.step_samples)]
    steps = [_spread_longest_first(step, task) for step in megabatches]
    generator.shuffle(steps)
    return _batches(task, np.concatenate(steps))


def device_grouped(task: Task) -> Packs:
    """OmniBal's paper, Table 3: samples of similar size run at the same time on all ranks.

    So many steps' samples are sorted and cut into rows of one sample per rank; random rows make a step.
    """
    generator = task.generator()
    order = generator.permutation(len(task.lengths))
    steps = []
    for part in _whole(order, task.step_samples, MEGA_BATCH):
        by_length = part[np.argsort(-task.lengths.llm_tokens[part], kind="stable")]
        rows = generator.permutation(by_length.reshape(-1, task.num_replicas))
        steps.append(rows.reshape(-1, task.batch_size, task.num_replicas).transpose(0, 2, 1).ravel())
    return _batches(task, np.concatenate(steps))


def published_isf(task: Task, iterations: int = 10) -> Packs:
    """OmniBal's published code: each rank owns one stretch of the packs and shuffles it, all ranks alike.

    ISF emits full packs first, so that some ranks own full packs and others the thin tail.
    """
    packs = iterative_sampling_and_filtering(task.lengths, task.limits, iterations=iterations, seed=task.seed)
    steps = len(packs) // task.num_replicas
    owned = np.arange(steps * task.num_replicas).reshape(task.num_replicas, steps)
    return packs.take(owned[:, task.generator().permutation(steps)].T.ravel())


def published_isf_50(task: Task) -> Packs:
    """The same with 50 iterations, as the published script has it."""
    return published_isf(task, iterations=50)


def best_fit(task: Task) -> Packs:
    """Best fit decreasing in both dimensions; the packs in random order."""
    packs = best_fit_packs(task)
    whole = len(packs) // task.num_replicas * task.num_replicas
    return packs.take(task.generator().permutation(len(packs))[:whole])


def best_fit_sorted(task: Task) -> Packs:
    """The same packs, sorted across all steps: small Dist Ratios, and nothing left of randomness."""
    packs = best_fit_packs(task)
    load = packs.load(task.lengths)
    order = np.lexsort((load.llm_tokens_squared, load.llm_tokens, load.vision_units))
    whole = order[: len(order) // task.num_replicas * task.num_replicas]
    return packs.take(task.generator().permutation(whole.reshape(-1, task.num_replicas)).ravel())


RULES: dict[str, Callable[[Task], Packs]] = {
    rule.__name__: rule
    for rule in (
        random_batches,
        length_grouped,
        device_grouped,
        published_isf,
        published_isf_50,
        best_fit,
        best_fit_sorted,
    )
}


def _batches(task: Task, order: Order) -> Packs:
    """Cut an order of samples into batches, and those into whole steps."""
    kept = order[: len(order) // task.step_samples * task.step_samples]
    return Packs(kept, np.arange(0, len(kept) + 1, task.batch_size))


def _whole(order: Order, step_samples: int, most_steps: int = 1) -> Iterator[Order]:
    """Parts of up to so many whole steps."""
    kept = order[: len(order) // step_samples * step_samples]
    for start in range(0, len(kept), step_samples * most_steps):
        yield kept[start : start + step_samples * most_steps]


def _spread_longest_first(step: Order, task: Task) -> Order:
    """A step's samples by rank, each rank's one after another."""
    tokens = task.lengths.llm_tokens
    ranks: list[list[int]] = [[] for _ in range(task.num_replicas)]
    sums = np.zeros(task.num_replicas)
    for sample in step[np.argsort(-tokens[step], kind="stable")].tolist():
        rank = int(sums.argmin())
        ranks[rank].append(sample)
        sums[rank] = np.inf if len(ranks[rank]) == task.batch_size else sums[rank] + tokens[sample]
    return np.array(ranks).ravel()


def best_fit_packs(task: Task) -> Packs:
    """Packs by best fit in both dimensions, largest samples first."""
    vision, tokens = task.lengths.vision_units, task.lengths.llm_tokens
    share = np.maximum(vision / max(task.limits.vision_units, 1), tokens / task.limits.llm_tokens)
    order = np.argsort(-share, kind="stable")
    pack = _best_fit(vision[order], tokens[order], task.limits.vision_units, task.limits.llm_tokens)
    by_pack = np.argsort(pack, kind="stable")
    return Packs(order[by_pack], np.concatenate([[0], np.cumsum(np.bincount(pack))]))


@njit(cache=True)
def _best_fit(vision: Order, tokens: Order, most_vision: int, most_tokens: int) -> Order:
    """The pack of each sample: the one that both loads leave the least room in, or a new one."""
    pack = np.empty(len(vision), dtype=np.int64)
    open_packs = np.empty(len(vision), dtype=np.int64)
    left_vision = np.empty(len(vision), dtype=np.int64)
    left_tokens = np.empty(len(vision), dtype=np.int64)
    least_vision, least_tokens = vision.min(), tokens.min()
    num_packs = num_open = 0
    for sample in range(len(vision)):
        best, room = -1, np.inf
        for place in range(num_open):
            candidate = open_packs[place]
            after_vision = left_vision[candidate] - vision[sample]
            after_tokens = left_tokens[candidate] - tokens[sample]
            if after_vision >= 0 and after_tokens >= 0:
                left = after_vision / max(most_vision, 1) + after_tokens / most_tokens
                if left < room:
                    best, room = place, left
        if best < 0:
            best = num_open
            open_packs[num_open] = num_packs
            left_vision[num_packs], left_tokens[num_packs] = most_vision, most_tokens
            num_packs, num_open = num_packs + 1, num_open + 1
        chosen = open_packs[best]
        pack[sample] = chosen
        left_vision[chosen] -= vision[sample]
        left_tokens[chosen] -= tokens[sample]
        if left_vision[chosen] < least_vision or left_tokens[chosen] < least_tokens:
            num_open -= 1
            open_packs[best] = open_packs[num_open]
    return pack
