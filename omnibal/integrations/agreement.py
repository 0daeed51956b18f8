"""What ranks must agree on before they train: what is wrong on one of them ends all, and none waits for another."""

from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch.distributed as dist

from omnibal.data.lengths import SampleLengths
from omnibal.errors import DataError, said
from omnibal.integrations.loading import Dataset, Loads, PlannedLoads

CHECKED_SAMPLES: Final = 16
"""That every rank reads before training, to see whether they are as they were measured."""


def two_samples(lengths: SampleLengths) -> list[int]:
    """The shortest sample of those with an image, or of all, and the shortest of the others."""
    order = np.lexsort((lengths.llm_tokens, lengths.vision_units == 0))
    others = order[1:][np.argsort(lengths.llm_tokens[order[1:]], kind="stable")]
    return [int(sample) for sample in (*order[:1], *others[:1])]


def refuse_unlike_sizes(samples: int, num_lengths: int | None) -> None:
    """Refuse lengths of another dataset, on all ranks alike: none may wait for one that has stopped."""
    for rank, (theirs, their_lengths) in enumerate(gathered((samples, num_lengths))):
        if theirs != samples:
            raise DataError(f"train_dataset must have as many samples on all ranks, got {theirs} on rank {rank}")
        if their_lengths not in (None, theirs):
            raise DataError(f"lengths must be those of the dataset's {theirs} samples, got {their_lengths}")


def measured(collator: Any, dataset: Dataset) -> SampleLengths:
    """Every sample is read by one of the ranks; what one of them cannot read ends all.

    Args:
        collator: Its ``measure`` gives loads.
        dataset: The same on all ranks.

    Raises:
        DataError: The message names the rank and says what it met.
    """
    rank, num_ranks = place()
    found: list[Loads] | str
    try:
        found = collator.measure(dataset, range(rank, len(dataset), num_ranks))
    except Exception as error:  # whatever a user's dataset raises, the other ranks wait for an answer
        found = f"rank {rank}: {said(error)}"
    loads = np.zeros((len(dataset), 3), dtype=np.int64)
    for number, part in enumerate(gathered(found)):
        if isinstance(part, str):
            raise DataError(part)
        loads[number::num_ranks] = np.reshape(part, (-1, 3))
    vision_units, llm_tokens, target_tokens = loads.T
    return SampleLengths(vision_units, llm_tokens, target_tokens=target_tokens)


def kept_lengths(collator: Any, dataset: Dataset, folder: Path, *, saves: bool) -> SampleLengths:
    """Lengths as they were measured before, or measured now; all ranks together.

    Args:
        collator: Its ``measure`` gives loads.
        dataset: The same on all ranks.
        folder: Where lengths are kept. Those of other data, as far as a few samples tell, are measured again.
        saves: Whether this rank writes them.

    Raises:
        DataError: A sample cannot be read; the message names the rank and says what it met.
    """
    found = SampleLengths.load(folder) if folder.exists() else None
    hashes = gathered(None if found is None or len(found) != len(dataset) else found.content_hash)
    if found is not None and hashes[0] is not None and len(set(hashes)) == 1:
        with suppress(DataError):
            refuse_other_lengths(collator, dataset, found)
            return found
    found = measured(collator, dataset)
    if saves:
        found.save(folder)
    return found


def refuse_other_lengths(collator: Any, dataset: Dataset, lengths: SampleLengths) -> None:
    """Refuse a dataset that is not alike on all ranks, or not the one that was measured: a few samples tell.

    Args:
        collator: Its ``measure`` gives loads.
        dataset: Of this rank; a few samples are read.
        lengths: The same on all ranks.

    Raises:
        DataError: On all ranks alike; the message names the rank and the sample.
    """
    problem = None
    numbers = np.unique(np.linspace(0, len(dataset) - 1, CHECKED_SAMPLES, dtype=np.int64)).tolist()
    try:
        PlannedLoads(lengths).check(numbers, collator.measure(dataset, numbers))
    except Exception as error:  # as in ``measured``
        problem = f"rank {place()[0]}: {said(error)}"
    for found in gathered(problem):
        if found is not None:
            raise DataError(found)


def gathered(record: Any) -> list[Any]:
    """What all ranks passed."""
    if not dist.is_initialized():
        return [record]
    records: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(records, record)
    return records


def place() -> tuple[int, int]:
    """This process's rank, of how many."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
