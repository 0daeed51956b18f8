"""Loader: a feed's steps as one rank of the pipeline trains on them; how the rank reads packs, and all ranks a step."""

import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from operator import or_
from time import perf_counter
from typing import Any, Final, Literal, NamedTuple, Protocol, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from omnibal.cluster import Layout
from omnibal.data.epoch import Step
from omnibal.data.lengths import SampleLengths
from omnibal.engine.ray_packs import RayPacks
from omnibal.errors import ConfigError, DataError, OmnibalError, message_alone
from omnibal.feeds.feed import EpochFeed, Feed, PacksFromHere, Share
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.formats.collate import IGNORED, Positions, pack_samples
from omnibal.processes import leave_ends_to_parent
from omnibal.ranks import WORK, gather

View = Literal["images", "text", "nothing"]
Batch = dict[str, Tensor]
Steps = Iterator[tuple[Step, list[Batch]]]
"""What a Loader iterates over."""

LOG: Final = logging.getLogger(__name__)

LEFT_OUT: Final = "left_out"
"""Key of a sample that cannot be read: its number and why; and of these in a pack, as bytes of JSON."""
COUNTED: Final = 4
"""Numbers that all ranks add up before a step, beside those of columns and of ranks."""
PAD_TOKEN_ID: Final = 0
"""The token of an empty pack; any would do, since nothing is learned from it."""


class VlmDataset(Protocol):
    """What a dataset for training offers."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample: ``input_ids``, ``labels`` (both (tokens,)), ``pixel_values`` (tiles, 3, H, W) or None.

        Patches of a native-resolution ViT are (patches, values); what else the model takes of images comes by name.
        """

    def text(self, index: int) -> dict[str, Any]:
        """One sample without decoding an image: ``pixel_values`` is None."""

    def lengths(self) -> SampleLengths:
        """The loads of all samples."""


def view_of(stage: int, num_stages: int) -> View:
    """What a stage reads: the first one images and text, the last one text (for its labels), others nothing."""
    if stage == 0:
        return "images"
    return "text" if stage == num_stages - 1 else "nothing"


def cores_of_process() -> int:
    """Cores that a process of this launch has when those of its node share them alike."""
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    return max(1, len(os.sched_getaffinity(0)) // local_processes)


@dataclass(frozen=True, kw_only=True)
class PackReader:
    """How a rank reads packs, and as which tensors."""

    view: View
    """What the rank reads of a sample; with ``"nothing"`` only the position is kept."""
    pixel_shape: tuple[int, ...]
    """(channels, height, width) of a tile, (values,) of a patch."""
    pixel_dtype: torch.dtype = torch.float32
    """The forward pass computes in this dtype."""
    image_integers: Mapping[str, tuple[int, ...]] | None = None
    """Integers that the model reads beside pixels, by name, with the shape of an entry."""
    positions: Positions | None = None
    """Counts the positions of a sample's tokens; see ``VisionLanguageModel``."""
    share: Share | None = None
    """The packs of a step that the rank reads; None for those of the sampler's rank."""
    workers: int | None = None
    """DataLoader processes where images are decoded (where only texts are read, one will do); 0 to read in this
    process, when a step begins; None for one on each of this process's cores but one, which trains."""
    ray: str | None = None
    """Address of a Ray cluster that decodes images in place of ``workers``."""
    pin_memory: bool = False
    """Whether packs are copied to a GPU."""

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        """A pack of samples as tensors, without those that cannot be read."""
        left_out = [sample[LEFT_OUT] for sample in samples if LEFT_OUT in sample]
        batch = pack_samples(
            [sample for sample in samples if LEFT_OUT not in sample],
            pad_token_id=PAD_TOKEN_ID,
            pixel_shape=self.pixel_shape,
            pixel_dtype=self.pixel_dtype,
            image_integers=self.image_integers,
            positions=self.positions if self.view == "images" else None,
        )
        if left_out:
            batch[LEFT_OUT] = torch.frombuffer(bytearray(json.dumps(left_out).encode()), dtype=torch.uint8)
        return batch

    def read(self, dataset: VlmDataset, pack: Sequence[int]) -> Batch:
        """A pack, read here and now."""
        return self.collate([*map(self._viewed(dataset).__getitem__, pack)])

    def _viewed(self, dataset: VlmDataset) -> "VlmDataset | TextView":
        return dataset if self.view == "images" else TextView(dataset)

    def feed(self, dataset: VlmDataset, sampler: BalancedBatchSampler) -> EpochFeed:
        """The steps of a sampler, their packs read ahead.

        While a step runs, workers read the next one: all its packs, collated, in the dtype and (for a GPU) the kind of
        memory that they are copied from, and no pack of the step after it but for what rounding to whole workers adds.
        """
        # A middle stage gets activations from its neighbours: it keeps the position in the epoch and reads nothing.
        if self.view == "nothing":
            return EpochFeed(sampler, None, self.share)
        share = self.share or Share(sampler.rank, sampler.num_replicas)
        micro_batches = sampler.num_replicas * sampler.micro_batches // share.num_shares
        packs = PacksFromHere(sampler, share)
        if self.ray is not None and self.view == "images":
            pin = self.pin_memory
            read = RayPacks(dataset, packs, self.collate, address=self.ray, count=micro_batches, pin=pin)
            return EpochFeed(sampler, read, share)
        workers = max(cores_of_process() - 1, 1) if self.workers is None else self.workers
        workers = min(workers, micro_batches if self.view == "images" else 1)
        reader: DataLoader[Batch] = DataLoader(
            cast(Dataset[Any], self._viewed(dataset)),
            batch_sampler=packs,
            collate_fn=self.collate,
            num_workers=workers,
            # DataLoader reads workers · prefetch_factor packs ahead: those of one step, rounded up.
            prefetch_factor=-(-micro_batches // workers) if workers else None,
            persistent_workers=workers > 0,  # a new epoch starts no processes
            pin_memory=self.pin_memory,
            worker_init_fn=leave_ends_to_parent,
        )
        return EpochFeed(sampler, reader, share)

    def loader(self, dataset: VlmDataset, sampler: BalancedBatchSampler) -> "Loader":
        """The steps of a sampler as this reader reads them."""
        return Loader(self.feed(dataset, sampler), self, dataset)


class Loader:
    """The packs of one rank, step after step, from a feed; ``initialize`` makes it.

    ``left_out`` are samples that could not be read so far, and why; the same on all ranks.
    """

    def __init__(self, feed: Feed, reader: PackReader, dataset: VlmDataset | None = None) -> None:
        self.feed, self._reader, self._dataset = feed, reader, dataset
        self.micro_batches = feed.micro_batches
        self.left_out: dict[int, str] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the next step's epoch; the same in all under ``"balanced"``. Streams have no epochs."""
        if not isinstance(self.feed, EpochFeed):
            raise ConfigError("steps_per_epoch must be asked of samples with lengths(), got a stream; it has no epochs")
        return self.feed.steps_per_epoch

    def __len__(self) -> int:
        """Steps of the epoch that the next step belongs to."""
        if not isinstance(self.feed, EpochFeed):  # list() and tqdm() take a TypeError for a length that is not known
            raise TypeError("a loader of a stream has no length")
        return self.steps_per_epoch

    def steps_left(self, epochs: int) -> int:
        """Steps from here to the end of epoch ``epochs - 1``, or of the run where there are no epochs."""
        return self.feed.steps_left(epochs)

    def __iter__(self) -> Steps:
        """Steps to the end of the epoch, or of a run on streams, as ``next_step`` gives them.

        Each is taken from what the engine trains next, unless it is the engine that gets the iterator:
        ``engine.train_batch(steps)``.
        """
        for _ in range(self.feed.steps_left()):
            yield self.next_step()

    def next_step(self) -> tuple[Step, list[Batch]]:
        """The next step, and this rank's packs of it (of a stream, on the last stage, labels); all ranks together."""
        try:
            found = self.feed.step()
        except OmnibalError as error:  # before what a worker says, torch puts its traceback
            raise type(error)(message_alone(error)) from error
        assert found is not None, "feeds of the engine do not end"
        return found

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last step that ``next_step`` gave, whatever was read ahead; all ranks together."""
        return self.feed.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        self.feed.load_state_dict(state)

    def samples_of(self, step: Step, share: Share, micro_batch: int) -> list[int]:
        """The samples of a micro-batch of a step of this epoch, as a share reads them; of a stream, no indices."""
        if not isinstance(self.feed, EpochFeed) or step.epoch != self.feed.sampler.epoch:
            return []
        packs = share.packs(self.feed.sampler, step.index)
        return packs[micro_batch] if micro_batch < len(packs) else []

    def over(self, dataset: VlmDataset, sampler: BalancedBatchSampler) -> "Loader":
        """A loader of the packs that another sampler makes of other samples, read alike, for evaluation."""
        return self._reader.loader(dataset, sampler)

    def mended(self, step: Step, batches: Sequence[Batch], unread: Mapping[int, str]) -> list[Batch]:
        """This rank's packs of the last step without all samples that some rank could not read."""
        assert isinstance(self.feed, EpochFeed), "the samples of a stream are read once"
        if not batches:
            return []
        assert self._dataset is not None, "a loader of samples with an index has them"
        mended = []
        for pack, batch in zip(self.feed.own_packs(step), batches, strict=True):
            stays = [sample for sample in pack if sample not in unread]
            # A pack is read again where another rank could not read what this one could: a file that was just written.
            is_mended = len(stays) + len(left_out_of(batch)) == len(pack)
            mended.append(batch if is_mended else self._reader.read(self._dataset, stays))
        return mended

    def note_left_out(self, step: Step, unread: Mapping[int, str]) -> Step:
        """The step without samples that some rank could not read; rank 0 names those that are new."""
        assert isinstance(self.feed, EpochFeed), "the samples of a stream are read once"
        for sample, reason in unread.items():
            if sample not in self.left_out and dist.get_rank() == 0:
                LOG.warning("A sample is left out: sample %d, %s", sample, reason)
        self.left_out |= unread
        left = self.feed.without(step, unread)
        if not left.num_samples:
            first, reason = next(iter(unread.items()))
            raise DataError(
                f"a step must have a sample that can be read, got none of {step.num_samples}: sample {first}, {reason}"
            )
        return left


def left_out_of(batch: Batch) -> dict[int, str]:
    """The samples of a pack that could not be read, and why."""
    return dict(json.loads(batch[LEFT_OUT].numpy().tobytes())) if LEFT_OUT in batch else {}


class TextView(Dataset[dict[str, Any]]):
    """A dataset whose images are never decoded."""

    def __init__(self, dataset: VlmDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.dataset.text(index)


class StepRead(NamedTuple):
    """A step that was read before it starts."""

    step: Step
    batches: list[Batch]
    """The packs of this rank."""
    targets: int
    """Target tokens of all ranks' packs."""
    data_seconds: float
    """How long the rank that was read for slowest waited for its packs."""


def read_step(
    loader: Loader, steps: Steps | None, *, layout: Layout, rank: int, device: torch.device, where: str
) -> StepRead:
    """Read a step whole before it starts; all ranks call this together.

    ``steps`` is ``iter(loader)``, where the step is to come from that.
    """
    # A collective between the schedule's sends and receives would deadlock, and a rank that cannot read its samples
    # must stop the others before they wait for it. So all ranks add up, in one all-reduce before the step, what
    # `_counted` tells of each. If one of them had to leave out samples, all hear which, and read their packs without
    # them: then they meet once more.
    started = perf_counter()
    failure: Exception | None = None
    batches: list[Batch] = []
    WORK.at("reading of its packs")
    try:
        step, batches = loader.next_step() if steps is None else _next_of(steps)
    except StopIteration:
        failure = ConfigError("data_iter must have a step left, got its end; take iter(loader) for another epoch")
    except Exception as error:  # any failure must reach the other ranks
        failure = error
    seconds, unread = perf_counter() - started, dict[int, str]()
    while True:
        found = {sample: why for batch in batches for sample, why in left_out_of(batch).items() if sample not in unread}
        counts = _counted(batches, layout, rank, seconds)
        counts[1], counts[2] = failure is not None, len(found)
        counts[3] = 0 if failure is not None else step.left_out
        counts = counts.to(device)
        WORK.at("meeting of all ranks before the step", waits=True)
        dist.all_reduce(counts)
        targets, failures, news, of_streams, *differences = counts[: COUNTED + layout.num_columns].tolist()
        if failures:
            gather(failure, where=where)  # raises the first one on all ranks
        if not news:
            break
        unread = reduce(or_, gather(found), unread)
        try:
            batches = loader.mended(step, batches, unread)
        except Exception as error:
            failure = error
    if any(differences):
        raise _disagreement(loader, step, batches, unread)
    step = loader.note_left_out(step, unread) if unread else replace(step, left_out=of_streams)
    waits = counts[COUNTED + layout.num_columns :]
    for batch in batches:
        batch.pop(LEFT_OUT, None)
    return StepRead(step, batches, targets, int(waits.max()) / 1e6)


def _counted(batches: Sequence[Batch], layout: Layout, rank: int, seconds: float) -> Tensor:
    """What a rank tells of its packs before a step, to be added up: numbers that all ranks have places for.

    `COUNTED` of all together: target tokens; failures, samples that are newly left out, and those that streams have
    left out, which the caller enters. Then a number per column that tells whether its first and last stages have read
    the same labels, and each rank's microseconds of reading: the largest is the wait that all ranks share.
    """
    place = layout.position(rank)
    # Of tensor ranks, which read the same packs, the first one counts.
    is_first, is_last = (place.tensor == 0 and place.stage == end for end in (0, layout.num_stages - 1))
    counts = torch.zeros(COUNTED + layout.num_columns + layout.num_devices, dtype=torch.int64)
    counts[COUNTED + layout.num_columns + rank] = round(1e6 * seconds)
    if is_last:
        counts[0] = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
    # The first stage adds what the last one takes away: a column whose stages read the same is left with zero.
    sign, (replicas, _) = is_first - is_last, layout.shape(place.stage)
    numbers = range(place.replica, replicas * len(batches), replicas)
    digests = [_digest(batch["labels"], number) for number, batch in zip(numbers, batches, strict=True)] if sign else []
    counts[COUNTED + place.replica % layout.num_columns] = sign * sum(digests)
    return counts


def _next_of(steps: Steps) -> tuple[Step, list[Batch]]:
    found: Any = next(steps)
    # DeepSpeed's own engine takes any iterator over batches.
    if not isinstance(found, tuple) or not isinstance(found[0], Step):
        raise ConfigError(f"data_iter must be iter(loader) of the loader, got an iterator over {type(found).__name__}")
    return found


def _disagreement(loader: Loader, step: Step, batches: list[Batch], unread: Collection[int]) -> DataError:
    """Name the sample that two stages read differently, all ranks together."""
    assert isinstance(loader.feed, EpochFeed), "the samples of a stream are read once"
    own: dict[int, int] = {}
    for pack, batch in zip(loader.feed.own_packs(step)[: len(batches)], batches, strict=True):
        samples, bounds = (sample for sample in pack if sample not in unread), batch["cu_seq_lens"].tolist()
        for sample, (start, stop) in zip(samples, pairwise(bounds), strict=False):
            own[sample] = _digest(batch["labels"][0, start:stop])
    seen: dict[int, int] = {}
    read = [entry for found in gather(own) for entry in found.items()]
    sample = next(sample for sample, number in read if seen.setdefault(sample, number) != number)
    return DataError(
        f"text({sample}) of the dataset must have the labels of [{sample}], got others; "
        "the last stage would train on another sample than the first one reads"
    )


def _digest(labels: Tensor, before: int = 0) -> int:
    """A number that tells labels, which are what the last stage trains on, from others."""
    return crc32(labels.numpy().data, before)
