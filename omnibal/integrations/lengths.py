"""From a dataset to its packs: ranks measure lengths together, keep them, and compare them with the data."""

from collections.abc import Callable, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset

from omnibal.data.lengths import SampleLengths
from omnibal.data.packing_spec import Mixture
from omnibal.data.packs import in_full
from omnibal.data.step_size import StepSize
from omnibal.errors import DataError, said
from omnibal.feeds.sources import is_indexed
from omnibal.formats.measured import Found, Items, lengths_of, survey
from omnibal.formats.rows import Problem
from omnibal.packs.loading import PackSampler, PaddedSampler, PlannedLoads
from omnibal.ranks import check_same, gather, rank_and_size, run_on_all_ranks

CHECKED_SAMPLES: Final = 16  # that each rank reads again before training, to check the stored lengths
COLUMNS: Final = ("vision_units", "llm_tokens", "target_tokens", "video_units", "sound_units")  # as collators measure
LENGTHS: Final = "omnibal_lengths"  # the folder of measured lengths within a trainer's output_dir


def samples_to_check(lengths: SampleLengths, *, is_known: bool) -> list[int]:
    """The shortest sample of those with an image, or of all, and the shortest of the others."""
    # For a model that no test knows to pack also the one with the largest images, of those of twice the median length.
    tokens, units = lengths.llm_tokens, lengths.vision_units
    order = np.lexsort((tokens, units == 0))
    others = order[1:][np.argsort(tokens[order[1:]], kind="stable")]
    found = [*order[:1], *others[:1]]
    if not is_known and len(others) > 1:
        usual = others[1:][tokens[others[1:]] <= max(2 * np.median(tokens), tokens[others[1]])]
        found.append(usual[np.argmax(units[usual])])
    return [int(sample) for sample in found]


def prepare(
    dataset: Any,
    collator_of: Callable[..., Any],
    lengths: SampleLengths | Path | None,
    size_of: Callable[[SampleLengths], StepSize],
    *,
    padded: bool,
    check_lengths: bool,
    mixture: Mixture | None,
    saves: bool,
    num_workers: int,
    **options: Any,
) -> tuple[PackSampler, Any]:
    """The sampler of a dataset's packs, and their collator; all ranks together.

    Args:
        collator_of: Makes the collator, which holds samples to lengths if it is given some.
        lengths: Of every sample; or a folder that keeps them. They are measured now if there are none.
        size_of: Decides limits and micro-batches; called once lengths are known, on all ranks alike.
        saves: Whether this rank writes to the folder.
        num_workers: Processes of each rank that read.
        options: Further ones of a ``PackSampler``.
    """
    if not is_indexed(dataset) or isinstance(dataset, Mapping):  # several streams by name have a length, too
        raise DataError(
            f"the dataset must be read by index and have a length, got {type(dataset).__name__}; "
            "balance_stream(trainer, limits) takes streams, and balanced_stream in loops of your own"
        )
    if not len(dataset):
        raise DataError("the dataset must hold at least one sample, got none")
    # On all ranks alike: no rank may wait for one that has stopped.
    given = len(lengths) if isinstance(lengths, SampleLengths) else None
    for rank, (theirs, num_lengths) in enumerate(gather((len(dataset), given))):
        if theirs != len(dataset):
            raise DataError(f"the dataset must have as many samples on all ranks, got {theirs} on rank {rank}")
        if num_lengths not in (None, theirs):
            raise DataError(f"lengths must be those of the dataset's {theirs} samples, got {num_lengths}")
    collator, is_compared = collator_of(), False
    if not isinstance(lengths, SampleLengths):
        lengths, is_compared = kept_lengths(collator, dataset, lengths, saves=saves, num_workers=num_workers)
    if mixture is not None and lengths.source is None and isinstance(dataset, ConcatDataset):
        parts = np.searchsorted(dataset.cumulative_sizes, np.arange(len(lengths)), side="right")
        lengths = SampleLengths(**lengths.columns(), source=parts, unit_name=lengths.vision_unit)
    check_same({"lengths": lengths.content_hash})  # before what may fail on one rank alone
    size = size_of(lengths)
    sampler = (PaddedSampler if padded else PackSampler)(
        lengths, size.limits, micro_batches=size.micro_batches, mixture=mixture, **options
    )
    sampler.verify(gather)
    if check_lengths and not is_compared:
        refuse_other_lengths(collator, dataset, lengths)
    return sampler, collator_of(lengths=lengths, absorb=not check_lengths)


def measured(collator: Any, dataset: Any, num_workers: int = 0) -> SampleLengths:
    """Measure a dataset with all ranks, each of which reads a share of the samples in ``num_workers`` processes."""
    rank, num_ranks = rank_and_size()

    def measure(samples: Items) -> Found:
        found: Found = []
        for sample in samples.tolist():
            try:
                (loads,) = collator.measure(dataset, [sample])
                found.append(in_full(loads))
            except Exception as error:  # whatever a user's dataset raises, the other ranks wait for an answer
                found.append(Problem(Path("train_dataset"), sample, said(error), f"sample {sample}"))
        return found

    own = np.arange(rank, len(dataset), num_ranks)
    options: dict[str, Any] = {"workers": num_workers, "decodes": True, "is_shown": rank == 0}
    answer: npt.NDArray[np.int64] | DataError
    try:
        found = survey(measure, own, len(COLUMNS), **options)
        answer = found.loads
        if found.problems:
            answer = DataError(f"{found.problems[0].name}: {found.problems[0].reason}")
    except BrokenProcessPool as error:  # a process was killed, as where memory does not suffice
        answer = DataError(said(error))
    loads = np.zeros((len(dataset), len(COLUMNS)), dtype=np.int64)
    for number, theirs in enumerate(gather(answer)):
        loads[number::num_ranks] = theirs
    return lengths_of(loads, COLUMNS, unit_name=getattr(collator, "unit_name", None))


def kept_lengths(
    collator: Any, dataset: Any, folder: Path | None, *, saves: bool, num_workers: int
) -> tuple[SampleLengths, bool]:
    """Lengths as they were measured before, which are compared with the data, or measured now; all ranks together."""
    # Lengths that are damaged, missing on some rank, or of other data (as far as a few samples tell) are measured
    # again. The flag says whether they were compared.
    found = None
    if folder is not None:
        with suppress(DataError):  # there are none, or a killed or damaged write left them incomplete
            found = SampleLengths.load(folder)
    hashes = gather(None if found is None or len(found) != len(dataset) else found.content_hash)
    if found is not None and hashes[0] is not None and len(set(hashes)) == 1:
        with suppress(DataError):
            refuse_other_lengths(collator, dataset, found)
            return found, True
    found = measured(collator, dataset, num_workers)

    def save() -> None:
        if folder is not None and saves:
            try:
                found.save(folder)
            except OSError as error:
                raise DataError(f"{folder} must be a folder that lengths can be written to, got {error}") from error

    run_on_all_ranks(save)
    return found, False


def refuse_other_lengths(collator: Any, dataset: Any, lengths: SampleLengths) -> None:
    """Refuse, on all ranks alike, a dataset that differs between ranks or from the lengths: a few samples tell."""
    problem = None
    numbers = np.unique(np.linspace(0, len(dataset) - 1, CHECKED_SAMPLES, dtype=np.int64)).tolist()
    try:
        PlannedLoads(lengths).check(numbers, collator.measure(dataset, numbers))
    except Exception as error:  # as in ``measured``
        problem = DataError(said(error))
    gather(problem)
