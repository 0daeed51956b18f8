"""Which steps stand for an epoch: some that are spread evenly over it, behind its fullest batches."""

from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import numpy as np
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler

from omnibal.cost import Load
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.packs import Packs
from omnibal.integrations.trainer.clock import WARM_UP
from omnibal.integrations.trainer.settings import batch_size_of, data_rank_of
from omnibal.packs.loading import PackSampler
from omnibal.ranks import gather, rank_and_size

GROUPED: Final = "group_by_length"
MOST_LOOKED_AT: Final = 512  # steps of packs among which the fullest pack is looked for


def spread(count: int) -> list[int]:
    """All numbers below a count, so that the first of them, however many, are spread evenly.

    >>> spread(5)
    [0, 4, 2, 1, 3]
    """
    bits = max(count - 1, 0).bit_length()
    order = [int(f"{number:0{bits}b}"[::-1], 2) if bits else 0 for number in range(2**bits)]
    return [number for number in order if number < count]


def spread_packs(sampler: PackSampler) -> None:
    """Let a sampler's first steps be its fullest packs, on all ranks alike, and the others be spread over its epoch.

    Ranks then run out of memory together, if they do: one alone would leave the others waiting for it. A single rank
    has the fullest pack last in each of these steps, beside gradients, and others before it, as that takes less time.
    """
    planned, dealt, turns = sampler.step_packs, sampler.packs_of_step, spread(sampler.num_steps)
    looked = turns[:MOST_LOOKED_AT]
    loads = Load.stack([sampler.load(number) for number in looked])
    size, warm_up = sampler.num_replicas * sampler.micro_batches, list[Packs]()
    for step, fullest in enumerate(_fullest(loads.llm_tokens, loads.vision_units)):
        place, number = divmod(fullest, size)
        pack = dealt(looked[place])[number].tolist()
        others = (
            [each.tolist() for each in dealt(turns[step % len(turns)])] if sampler.num_replicas == 1 else [pack] * size
        )
        warm_up.append(Packs.from_lists([*others[:-1], pack]))

    def turn_of(step: int) -> int:
        """Which step of the epoch has its turn; negative for the first ones."""
        behind = step - WARM_UP if sampler.epoch == 0 else step
        return behind if behind < 0 else turns[behind % len(turns)]

    def step_packs(step: int) -> Packs:
        turn = turn_of(step)
        return warm_up[turn] if turn < 0 else planned(turn)

    def packs_of_step(step: int) -> Packs:
        turn = turn_of(step)
        return warm_up[turn] if turn < 0 else dealt(step)

    step_of = partial(sampler.step_without, samples=())
    vars(sampler).update(step_packs=step_packs, packs_of_step=packs_of_step, step=step_of)


def spread_batches(trainer: Any, steps: int, lengths: SampleLengths | None) -> None:
    """Let a trainer train batches that its own sampler makes, but steps of them that are spread over an epoch.

    The fullest batches come first, on all ranks alike. A trainer with a loader of its own, or whose lengths are not
    known, begins its epoch as it would.
    """
    args, strategy = trainer.args, trainer.args.train_sampling_strategy
    is_own = type(trainer).get_train_dataloader is Trainer.get_train_dataloader
    if lengths is None or not is_own or strategy == "batch_rebalance":  # whose sampler gives batches
        return
    num_replicas = data_rank_of(trainer)[1]
    size = batch_size_of(trainer, num_replicas) * max(args.n_gpu, 1)
    order: list[int] | None = None
    if rank_and_size()[0] == 0:  # others may draw in another order
        own: Iterable[int] = (
            trainer._get_train_sampler(trainer.train_dataset)
            if strategy != GROUPED
            else (
                LengthGroupedSampler(
                    args.train_batch_size * args.gradient_accumulation_steps, lengths=lengths.llm_tokens.tolist()
                )
            )
        )
        epoch = np.fromiter(own, np.int64)
        order = _ordered(epoch, lengths, (args.gradient_accumulation_steps, num_replicas, size), steps)
    order = gather(order)[0]
    if order:
        vars(trainer)["_get_train_sampler"] = lambda *arguments, **others: order


def _ordered(epoch: IntArray, lengths: SampleLengths, shape: tuple[int, int, int], steps: int) -> list[int]:
    """Samples of the fullest batches, once for each rank, and then of steps spread over an epoch.

    Args:
        epoch: Samples in the order of an epoch.
        shape: Micro-batches, ranks, samples of a micro-batch: as Accelerate deals an order.
        steps: How many follow the fullest ones at least.
    """
    whole = epoch[: len(epoch) // np.prod(shape) * np.prod(shape)]
    if not len(whole):  # fewer samples than a step has
        return []
    of_steps, batches = whole.reshape(-1, *shape), whole.reshape(-1, shape[-1])
    padded, units = lengths.llm_tokens[batches].max(axis=1), lengths.vision_units[batches].sum(axis=1)
    # DDP may need gradients of an encoder in every step.
    fullest = _fullest(np.where((units > 0) | ~units.any(), padded, 0), units)
    turns, warm_up = spread(len(of_steps)), list[IntArray]()
    for step, number in enumerate(fullest):
        warm_up.append(np.broadcast_to(batches[number], shape).copy())
        if shape[1] == 1:  # see ``spread_packs``
            warm_up[-1][:-1] = of_steps[turns[step % len(turns)]][:-1]
    timed = [of_steps[turns[number % len(turns)]] for number in range(steps)]
    return [int(sample) for step in (*warm_up, *timed) for sample in step.flat]


def _fullest(tokens: Any, vision_units: Any) -> list[int]:
    """Places of the micro-batches with most tokens and with most vision units, for the first steps in turn."""
    return [int(np.argmax((tokens, vision_units)[step % 2])) for step in range(WARM_UP)]
