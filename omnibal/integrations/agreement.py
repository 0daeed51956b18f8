"""What ranks must agree on before they train: what is wrong on one of them ends all, and none waits for another."""

from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import ConcatDataset, DataLoader
from torch.utils.data import Dataset as TorchDataset
from tqdm import tqdm

from omnibal.data.lengths import SampleLengths
from omnibal.errors import DataError, said
from omnibal.integrations.loading import Dataset, Loads, PlannedLoads

CHECKED_SAMPLES: Final = 16
"""That every rank reads before training, to see whether they are as they were measured."""
READ_AT_ONCE: Final = 16
"""By a process that measures, before it hands on what it found."""
LENGTHS: Final = "omnibal_lengths"
"""Of a trainer's ``output_dir``: the folder of lengths that were measured."""


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


class _Reader(TorchDataset[Loads | str]):
    """Reads samples, and says what is wrong with one in place of its loads."""

    def __init__(self, collator: Any, dataset: Dataset) -> None:
        self._collator, self._dataset = collator, dataset

    def __getitem__(self, sample: int) -> Loads | str:
        try:
            (loads,) = self._collator.measure(self._dataset, [sample])
        except Exception as error:  # whatever a user's dataset raises, the other ranks wait for an answer
            return f"sample {sample}: {said(error)}"
        return loads  # type: ignore[no-any-return]


def measured(collator: Any, dataset: Dataset, num_workers: int = 0) -> SampleLengths:
    """Every sample is read by one of the ranks; what one of them cannot read ends all.

    Args:
        collator: Its ``measure`` gives loads.
        dataset: The same on all ranks.
        num_workers: Processes of each rank that read.

    Raises:
        DataError: The message names the rank and the sample, and says what it met.
    """
    rank, num_ranks = place()
    own = range(rank, len(dataset), num_ranks)
    options: dict[str, Any] = {"batch_size": READ_AT_ONCE, "collate_fn": list, "num_workers": num_workers}
    # With a generator of its own: the default one goes on with what trains.
    loader = DataLoader(_Reader(collator, dataset), sampler=own, generator=torch.Generator(), **options)
    found: list[Loads] = []
    problem = None
    # Workers are forked before the bar starts its thread: a thread that is just starting may hold a lock of Python's,
    # which its copy in a worker would then wait for.
    parts = iter(loader)
    try:
        with tqdm(total=len(own), desc="lengths", unit=" samples", disable=True if rank else None, delay=1) as bar:
            for part in parts:
                problem = next((loads for loads in part if isinstance(loads, str)), None)
                if problem is not None:
                    break
                found += part
                bar.update(len(part))
    except RuntimeError as error:  # a worker was killed, as where memory does not suffice
        problem = said(error)
    loads = np.zeros((len(dataset), 3), dtype=np.int64)
    for number, theirs in enumerate(gathered(np.reshape(found, (-1, 3)) if problem is None else problem)):
        if isinstance(theirs, str):
            raise DataError(f"rank {number}: {theirs}")
        loads[number::num_ranks] = theirs
    vision_units, llm_tokens, target_tokens = loads.T
    return SampleLengths(vision_units, llm_tokens, target_tokens=target_tokens)


def kept_lengths(
    collator: Any, dataset: Dataset, folder: Path | None, *, saves: bool, num_workers: int
) -> SampleLengths:
    """Lengths as they were measured before, or measured now; all ranks together.

    Args:
        collator: Its ``measure`` gives loads.
        dataset: The same on all ranks.
        folder: Where lengths are kept, if they are. Those of other data, as far as a few samples tell, are measured
            again.
        saves: Whether this rank writes them.
        num_workers: As of ``measured``.

    Raises:
        DataError: As of ``measured``.
    """
    found = SampleLengths.load(folder) if folder is not None and folder.exists() else None
    hashes = gathered(None if found is None or len(found) != len(dataset) else found.content_hash)
    if found is not None and hashes[0] is not None and len(set(hashes)) == 1:
        with suppress(DataError):
            refuse_other_lengths(collator, dataset, found)
            return found
    found = measured(collator, dataset, num_workers)
    if folder is not None and saves:
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
    except Exception as error:  # as in ``_Reader``
        problem = f"rank {place()[0]}: {said(error)}"
    for found in gathered(problem):
        if found is not None:
            raise DataError(found)


def with_sources(lengths: SampleLengths, dataset: Any) -> SampleLengths:
    """Lengths that say the source of every sample: by themselves, or the parts of a ``ConcatDataset``."""
    if lengths.source is not None or not isinstance(dataset, ConcatDataset):
        return lengths
    parts = np.searchsorted(dataset.cumulative_sizes, np.arange(len(lengths)), side="right")
    return SampleLengths(**lengths.columns(), source=parts)


def gathered(record: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What all ranks passed; over a group of all of them, where a thread must not get in the way of others."""
    if not dist.is_initialized():
        return [record]
    records: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(records, record, group=group)
    return records


def told_by_all(told: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What all ranks tell; a string says what went wrong on one of them.

    Raises:
        DataError: Something went wrong: on all ranks alike, with the rank named.
    """
    of_ranks = gathered(told, group)
    wrong = [f"rank {rank}: {what}" for rank, what in enumerate(of_ranks) if isinstance(what, str)]
    if wrong:
        raise DataError("; ".join(wrong))
    return of_ranks


def place() -> tuple[int, int]:
    """This process's rank, of how many."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
