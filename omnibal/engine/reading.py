"""How a rank reads packs: from a dataset, in processes of its own or on a Ray cluster, as tensors on the host.

DistTrain calls the second disaggregated pre-processing (section 6): images are decoded and cut into tiles where
processors are idle, and training takes finished tensors. Ray decides which machine reads which pack, and reads a pack
again whose reader was killed.
"""

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Final, Literal, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from omnibal.data.lengths import SampleLengths
from omnibal.errors import ConfigError, DataError, OmnibalError
from omnibal.feeds.feed import EpochFeed, PacksFromHere, Share, ahead
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.formats.collate import Positions, pack_samples
from omnibal.processes import leave_ends_to_parent

View = Literal["images", "text", "nothing"]
Batch = dict[str, Tensor]
Collate = Callable[[list[dict[str, Tensor]]], Batch]

# Key of a sample that cannot be read: its number and why; and of these in a pack, as bytes of JSON
LEFT_OUT: Final = "left_out"
PAD_TOKEN_ID: Final = 0  # the token of an empty pack; any would do, since nothing is learned from it


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


def cores_of_process() -> int:
    """Cores that a process of this launch has when those of its node share them alike."""
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    return max(1, len(os.sched_getaffinity(0)) // local_processes)


@dataclass(frozen=True, kw_only=True)
class PackReader:
    """How a rank reads packs, and as which tensors."""

    view: View  # what the rank reads of a sample; with "nothing" only the position is kept
    pixel_shape: tuple[int, ...]  # (channels, height, width) of a tile, (values,) of a patch
    pixel_dtype: torch.dtype = torch.float32  # the forward pass computes in this dtype
    # Integers that the model reads beside pixels, by name, with the shape of an entry
    image_integers: Mapping[str, tuple[int, ...]] | None = None
    positions: Positions | None = None  # counts the positions of a sample's tokens; see VisionLanguageModel
    share: Share | None = None  # the packs of a step that the rank reads; None for those of the sampler's rank
    # DataLoader processes where images are decoded (where only texts are read, one will do); 0 to read in this
    # process, when a step begins; None for one on each of this process's cores but one, which trains
    workers: int | None = None
    ray: str | None = None  # address of a Ray cluster that decodes images in place of workers
    pin_memory: bool = False  # whether packs are copied to a GPU

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
        return self.collate([*map(self._viewed(dataset).__getitem__, pack)])

    def _viewed(self, dataset: VlmDataset) -> "VlmDataset | TextView":
        return dataset if self.view == "images" else TextView(dataset)

    def feed(self, dataset: VlmDataset, sampler: BalancedBatchSampler) -> EpochFeed:
        """The steps of a sampler, their packs read ahead."""
        # While a step runs, workers read the next one: all its packs, collated, in the dtype and (for a GPU) the kind
        # of memory that they are copied from, and no pack of the step after it but for what rounding to whole workers
        # adds.
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


def left_out_of(batch: Batch) -> dict[int, str]:
    return dict(json.loads(batch[LEFT_OUT].numpy().tobytes())) if LEFT_OUT in batch else {}


class TextView(Dataset[dict[str, Any]]):
    def __init__(self, dataset: VlmDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.dataset.text(index)


class _Sent(NamedTuple):
    """A tensor as Ray hands it over without a copy: bytes, of bfloat16 too, which numpy does not know."""

    data: npt.NDArray[np.uint8]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_Sent":
        return cls(tensor.reshape(-1).view(torch.uint8).numpy(), tuple(tensor.shape), tensor.dtype)

    def received(self, *, pin: bool) -> Tensor:
        # Ray's memory is read-only. numpy copies without Python's lock, so that the thread that trains goes on.
        own = torch.empty(self.shape, dtype=self.dtype, pin_memory=pin)
        np.copyto(own.view(-1).view(torch.uint8).numpy(), self.data)
        return own


class RayPacks:
    """The packs of a batch sampler, read by a Ray cluster and handed out in the sampler's order."""

    # A pack takes one processor of the cluster while it is read. `count` packs are being read, or wait in the cluster's
    # memory, and as many wait on this machine; no more are asked for before one is taken. The dataset is sent to each
    # machine once, pickled: its files must have the same paths there. The address `"local"` starts a cluster here.

    def __init__(
        self, dataset: Any, packs: Iterable[list[int]], collate: Collate, *, address: str, count: int, pin: bool
    ) -> None:
        self._packs, self._count, self._pin = packs, count, pin
        self._ray = _joined(address)
        self._source = self._ray.put((dataset, collate))

    def __iter__(self) -> Iterator[Batch]:
        # A thread moves batches to this machine while a step runs.
        return ahead(self._batches, self._count)

    def _batches(self) -> Iterator[Batch]:
        ray = self._ray
        # A reader that dies, by a machine's end or for want of memory, is no fault of the pack: another one reads it.
        read = ray.remote(num_cpus=1, max_retries=3)(_read)
        packs = iter(self._packs)
        asked = deque((pack, read.remote([self._source], pack)) for pack in islice(packs, self._count))
        try:
            while asked:
                pack, answer = asked[0]
                batch = self._taken(pack, answer)
                asked.popleft()
                asked.extend((pack, read.remote([self._source], pack)) for pack in islice(packs, 1))
                yield {name: sent.received(pin=self._pin) for name, sent in batch.items()}
        finally:
            for _, answer in asked:
                ray.cancel(answer)

    def _taken(self, pack: list[int], answer: Any) -> dict[str, _Sent]:
        ray = self._ray
        try:
            found: dict[str, _Sent] = ray.get(answer)
        except ray.exceptions.RayTaskError as error:  # what the dataset raised
            if isinstance(error.cause, OmnibalError):
                raise error.cause from None
            raise DataError(f"samples {pack} must be readable by Ray, got {error.cause!r}") from error
        except ray.exceptions.RayError as error:
            raise DataError(
                f"samples {pack} must be readable by Ray, whose readers died four times, got {error}"
            ) from error
        return found


def _read(source: list[Any], pack: list[int]) -> dict[str, _Sent]:
    # In a list a reference stays one: Ray would load what an argument itself refers to for every pack anew.
    dataset, collate = _loaded(source[0])
    return {name: _Sent.of(tensor) for name, tensor in collate([dataset[index] for index in pack]).items()}


@lru_cache(maxsize=4)
def _loaded(source: Any) -> Any:
    """What a reader process keeps of each run's dataset."""
    import ray

    return ray.get(source)


def _joined(address: str) -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"omnibal.data.ray must be left out without Ray, got {address!r}; `pip install omnibal[ray]` brings it"
        ) from error
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"omnibal.data.ray must be the address of a Ray cluster that runs, got {address!r}: {error}; "
                "`ray start --head` starts one"
            ) from error
    return ray
