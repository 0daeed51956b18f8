"""Lengths of a dataset: ranks measure them together, keep them on disk and compare them with the data at each start."""

from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader
from torch.utils.data import Dataset as TorchDataset
from tqdm import tqdm

from omnibal.data.kinds import Loads, in_full
from omnibal.data.lengths import SampleLengths
from omnibal.errors import DataError, said
from omnibal.packs.loading import Dataset, PlannedLoads
from omnibal.ranks import gather, place, run_on_all_ranks

CHECKED_SAMPLES: Final = 16  # that each rank reads again before training, to check the stored lengths
READ_AT_ONCE: Final = 16  # samples that a measuring process hands on together
LENGTHS: Final = "omnibal_lengths"  # the folder of measured lengths within a trainer's output_dir


def samples_to_check(lengths: SampleLengths, *, is_known: bool) -> list[int]:
    """The shortest sample of those with an image, or of all, and the shortest of the others.

    For a model that no test knows to pack also the one with the largest images, of those of twice the median length.
    """
    tokens, units = lengths.llm_tokens, lengths.vision_units
    order = np.lexsort((tokens, units == 0))
    others = order[1:][np.argsort(tokens[order[1:]], kind="stable")]
    found = [*order[:1], *others[:1]]
    if not is_known and len(others) > 1:
        usual = others[1:][tokens[others[1:]] <= max(2 * np.median(tokens), tokens[others[1]])]
        found.append(usual[np.argmax(units[usual])])
    return [int(sample) for sample in found]


def refuse_unlike_sizes(samples: int, num_lengths: int | None) -> None:
    """Refuse lengths of another dataset, on all ranks alike: no rank may wait for one that has stopped."""
    for rank, (theirs, their_lengths) in enumerate(gather((samples, num_lengths))):
        if theirs != samples:
            raise DataError(f"train_dataset must have as many samples on all ranks, got {theirs} on rank {rank}")
        if their_lengths not in (None, theirs):
            raise DataError(f"lengths must be those of the dataset's {theirs} samples, got {their_lengths}")


class _Reader(TorchDataset[Loads | str]):
    """Reads the loads of samples; of a sample that cannot be read, the message."""

    def __init__(self, collator: Any, dataset: Dataset) -> None:
        self._collator, self._dataset = collator, dataset

    def __getitem__(self, sample: int) -> Loads | str:
        try:
            (loads,) = self._collator.measure(self._dataset, [sample])
        except Exception as error:  # whatever a user's dataset raises, the other ranks wait for an answer
            return f"sample {sample}: {said(error)}"
        return loads  # type: ignore[no-any-return]


def measured(collator: Any, dataset: Dataset, num_workers: int = 0) -> SampleLengths:
    """Measure a dataset with all ranks, each of which reads a share of the samples in ``num_workers`` processes."""
    rank, num_ranks = place()
    own = range(rank, len(dataset), num_ranks)
    options: dict[str, Any] = {"batch_size": READ_AT_ONCE, "collate_fn": list, "num_workers": num_workers}
    # A generator of its own: drawing from the default one would change what is trained.
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
    loads = np.zeros((len(dataset), 5), dtype=np.int64)
    own_loads = np.reshape([in_full(each) for each in found], (-1, 5)) if problem is None else DataError(problem)
    for number, theirs in enumerate(gather(own_loads)):
        loads[number::num_ranks] = theirs
    vision_units, llm_tokens, target_tokens, video_units, sound_units = loads.T
    return SampleLengths(
        vision_units,
        llm_tokens,
        target_tokens=target_tokens,
        video_units=video_units if video_units.any() else None,
        sound_units=sound_units if sound_units.any() else None,
        unit_name=getattr(collator, "unit_name", None),
    )


def kept_lengths(
    collator: Any, dataset: Dataset, folder: Path | None, *, saves: bool, num_workers: int
) -> SampleLengths:
    """Lengths as they were measured before, or measured now; all ranks together.

    Lengths that are damaged, missing on some rank, or of other data (as far as a few samples tell) are measured again.
    ``saves`` says whether this rank writes to the folder; ``num_workers`` are processes of each rank that read.
    """
    found = None
    if folder is not None:
        with suppress(DataError):  # there are none, or a killed or damaged write left them incomplete
            found = SampleLengths.load(folder)
    hashes = gather(None if found is None or len(found) != len(dataset) else found.content_hash)
    if found is not None and hashes[0] is not None and len(set(hashes)) == 1:
        with suppress(DataError):
            refuse_other_lengths(collator, dataset, found)
            return found
    found = measured(collator, dataset, num_workers)
    run_on_all_ranks(lambda: _save(found, folder) if folder is not None and saves else None)
    return found


def _save(lengths: SampleLengths, folder: Path) -> None:
    try:
        lengths.save(folder)
    except OSError as error:
        raise DataError(f"{folder} must be a folder that lengths can be written to, got {error}") from error


def refuse_other_lengths(collator: Any, dataset: Dataset, lengths: SampleLengths) -> None:
    """Refuse, on all ranks alike, a dataset that differs between ranks or from the lengths: a few samples tell."""
    problem = None
    numbers = np.unique(np.linspace(0, len(dataset) - 1, CHECKED_SAMPLES, dtype=np.int64)).tolist()
    try:
        PlannedLoads(lengths).check(numbers, collator.measure(dataset, numbers))
    except Exception as error:  # as in ``_Reader``
        problem = DataError(said(error))
    gather(problem)


def with_sources(lengths: SampleLengths, dataset: Any) -> SampleLengths:
    """Lengths that say the source of every sample: by themselves, or the parts of a ``ConcatDataset``."""
    if lengths.source is not None or not isinstance(dataset, ConcatDataset):
        return lengths
    parts = np.searchsorted(dataset.cumulative_sizes, np.arange(len(lengths)), side="right")
    return SampleLengths(**lengths.columns(), source=parts, unit_name=lengths.vision_unit)
