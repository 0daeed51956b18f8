"""Who trains which samples together: what trainers do, what others offer, and our packs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from omnibal.cost import Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packs import Packs
from omnibal.data.step_size import PLANNED_SHARE
from omnibal.packs.loading import PackSampler, PaddedSampler

WINDOW = 64
"""Micro-batches' worth of samples that the knapsack looks at, at a time."""
FILLED, OPEN = 0.97, 64
"""How full first fit makes packs by tokens, roughly, and how many stay open."""
STEP_ERROR = 0.02
"""How far from the samples of a step that were asked for our packs may be, on average."""

Steps = list[list[list[list[int]]]]
"""Samples by step, rank and micro-batch."""


@dataclass(frozen=True)
class Task:
    """What all ways are asked for: ``batch`` samples in each of a step's micro-batches, on average."""

    lengths: SampleLengths
    ranks: int
    micro_batches: int
    batch: int = 4

    @property
    def step_samples(self) -> int:
        """Samples of a step."""
        return self.batch * self.micro_batches * self.ranks


@dataclass(frozen=True)
class Way:
    """A name, whether micro-batches are padded to their longest sample, and the steps."""

    name: str
    padded: bool
    steps: Steps

    def load(self, lengths: SampleLengths) -> Load:
        """What micro-batches hold, padding among it, shape (steps, ranks, micro-batches)."""
        groups = [group for step in self.steps for rank in step for group in rank]
        packs = Packs.from_lists(groups)
        load = packs.load(lengths)
        tokens, squared = load.llm_tokens, load.llm_tokens_squared
        if self.padded:
            longest = np.array([lengths.llm_tokens[group].max() if group else 0 for group in groups], dtype=float)
            tokens, squared = packs.sizes * longest, packs.sizes * longest**2
        shape = (len(self.steps), len(self.steps[0]), len(self.steps[0][0]))
        columns = (load.vision_units, tokens, squared, load.vision_squared)
        return Load(*(np.broadcast_to(column, len(groups)).reshape(shape) for column in columns))

    @property
    def samples_a_step(self) -> float:
        """On average."""
        return sum(len(group) for step in self.steps for rank in step for group in rank) / len(self.steps)


def default(task: Task) -> Way:
    """Samples in random order."""
    order = np.random.default_rng(0).permutation(len(task.lengths)).tolist()
    return Way("default", True, _dealt(order, task))


def group_by_length(task: Task) -> Way:
    """Trainer's ``train_sampling_strategy="group_by_length"``, by its own class."""
    generator = torch.Generator().manual_seed(0)
    tokens = task.lengths.llm_tokens.tolist()
    sampler = LengthGroupedSampler(task.batch * task.micro_batches, lengths=tokens, generator=generator)
    return Way("group_by_length", True, _dealt(list(sampler), task))


def rebalance(task: Task) -> Way:
    """Trainer's ``train_sampling_strategy="batch_rebalance"``, by its own class."""
    tokens = task.lengths.llm_tokens.tolist()
    ranks = [
        list(BatchRebalanceSampler(tokens, task.step_samples, task.ranks, task.micro_batches, rank=rank))
        for rank in range(task.ranks)
    ]
    steps = range(len(ranks[0]) // task.micro_batches)
    size = task.micro_batches
    return Way("batch_rebalance", True, [[own[step * size : (step + 1) * size] for own in ranks] for step in steps])


def knapsack(task: Task, limits: PackLimits) -> Way:
    """As nanoVLM packs: each rank its own samples, by windows, largest first into the emptiest pack; packs shuffled."""
    order = np.random.default_rng(0).permutation(len(task.lengths))
    ranks = [_knapsacks(task, order[rank :: task.ranks], limits) for rank in range(task.ranks)]
    steps = min(map(len, ranks)) // task.micro_batches
    size = task.micro_batches
    return Way("knapsack", False, [[own[step * size : (step + 1) * size] for own in ranks] for step in range(steps)])


def _knapsacks(task: Task, samples: np.ndarray, limits: PackLimits) -> list[list[int]]:
    vision, tokens, generator = task.lengths.vision_units, task.lengths.llm_tokens, np.random.default_rng(samples[:1])
    packs: list[list[int]] = []
    for window in np.array_split(samples, max(len(samples) // (WINDOW * task.batch), 1)):
        bound = max(tokens[window].sum() / limits.llm_tokens, vision[window].sum() / max(limits.vision_units, 1))
        opened: list[list[int]] = [[] for _ in range(int(bound) + 1)]
        held = [[0, 0] for _ in opened]
        for sample in window[np.argsort(-tokens[window], kind="stable")].tolist():
            own = int(vision[sample]), int(tokens[sample])
            room = [
                number
                for number, (units, ids) in enumerate(held)
                if units + own[0] <= limits.vision_units and ids + own[1] <= limits.llm_tokens
            ]
            if not room:
                room = [len(opened)]
                opened.append([])
                held.append([0, 0])
            chosen = min(room, key=lambda number: held[number][1])
            opened[chosen].append(sample)
            held[chosen] = [held[chosen][0] + own[0], held[chosen][1] + own[1]]
        filled = [pack for pack in opened if pack]
        packs += [filled[number] for number in generator.permutation(len(filled))]
    return packs


def random_packs(task: Task) -> Way:
    """The batches of ``default`` without their padding: what packing alone brings."""
    return Way("packed, not balanced", False, default(task).steps)


def by_tokens(task: Task) -> Way:
    """Packs of at most as many tokens as the samples of a batch have on average, first fit; tiles count for nothing."""
    tokens, order = task.lengths.llm_tokens, np.random.default_rng(0).permutation(len(task.lengths)).tolist()
    limit = max(round(task.batch * float(tokens.mean()) / FILLED), int(tokens.max()))
    packs, room, first = list[list[int]](), list[int](), 0
    for sample in order:
        # Few packs are left open, so that one of small samples does not stay open until the end.
        first = max(first, len(packs) - OPEN)
        fitting = (number for number in range(first, len(packs)) if tokens[sample] <= room[number])
        chosen = next(fitting, len(packs))
        if chosen == len(packs):
            packs.append([])
            room.append(limit)
        packs[chosen].append(sample)
        room[chosen] -= int(tokens[sample])
    size = task.ranks * task.micro_batches
    steps = [packs[start : start + size] for start in range(0, len(packs) - size + 1, size)]
    return Way("packed by tokens", False, [[step[rank :: task.ranks] for rank in range(task.ranks)] for step in steps])


def ours(task: Task, *, padded: bool = False, name: str = "omnibal, packed") -> Way:
    """Our packs, or our batches for models that cannot pack; the last step, which may be short, is left out."""
    sampler = _sampler(task, padded=padded)
    steps = []
    for number in range(sampler.num_steps - 1):
        packs = [list(pack) for pack in sampler.packs_of_all_ranks(number)]
        size = sampler.micro_batches
        steps.append([packs[rank * size : (rank + 1) * size] for rank in range(task.ranks)])
    return Way(name, padded, steps)


def _sampler(task: Task, *, padded: bool = False) -> PackSampler:
    """With limits in the proportions of the data, and a step of so many packs that has the samples asked for."""
    mean = np.array([task.lengths.vision_units.mean(), task.lengths.llm_tokens.mean()])
    mean *= task.batch
    low, high = 0.9, 2.5
    for _ in range(12):  # halves the range to less than a thousandth
        factor = (low + high) / 2
        vision, tokens = np.ceil(mean * factor / (PLANNED_SHARE if padded else 1)).astype(int).tolist()
        sampler = (PaddedSampler if padded else PackSampler)(
            task.lengths,
            PackLimits(max(vision, 1), tokens),
            num_replicas=task.ranks,
            rank=0,
            micro_batches=task.micro_batches,
        )
        samples = len(task.lengths) / sampler.num_steps
        if abs(samples / task.step_samples - 1) < STEP_ERROR:
            break
        low, high = (factor, high) if samples < task.step_samples else (low, factor)
    return sampler


def limits_of(task: Task) -> PackLimits:
    """The limits of our packs."""
    return _sampler(task).limits


def _dealt(order: Sequence[int], task: Task) -> Steps:
    """Batches as Accelerate deals them: the first to rank 0, the next to rank 1, and so on."""
    size, steps = task.batch, []
    for start in range(0, len(order) - task.step_samples + 1, task.step_samples):
        batches = [list(order[first : first + size]) for first in range(start, start + task.step_samples, size)]
        steps.append([batches[rank :: task.ranks] for rank in range(task.ranks)])
    return steps
