"""The packs of one rank, step by step and epoch after epoch, as its pipeline stage needs them."""

import logging
import math
import os
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from omnibal.cost import Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.policies import Oversized
from omnibal.errors import OmnibalError
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.formats.collate import Positions, pack_samples

View = Literal["images", "text", "nothing"]
Batch = dict[str, Tensor]

LOG: Final = logging.getLogger(__name__)

PAD_TOKEN_ID = 0
"""What stands in an empty pack; any token does, since nothing is learned from it."""

_PIXEL_SECONDS: Final = 8e-3 / (3 * 448**2)
"""To decode, scale and cut out one value of a tile on one core: 8 ms for a tile of 448 x 448, measured."""
_SLACK: Final = 2
"""Steps may be half as long as predicted before workers fall behind."""


class VlmDataset(Protocol):
    """What a dataset for training offers."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample: ``input_ids``, ``labels`` (both (tokens,)), ``pixel_values`` (tiles, 3, H, W) or None.

        Patches of a native-resolution ViT are (patches, values); what else the model takes of images comes by name.
        """

    def text(self, index: int) -> dict[str, Any]:
        """The same without decoding an image: ``pixel_values`` is None."""

    def lengths(self) -> SampleLengths:
        """The loads of all samples."""


@dataclass(frozen=True)
class Step:
    """What all ranks together process before the next optimizer update.

    Attributes:
        epoch: From 0.
        index: Of the step in its epoch, from 0.
        num_samples: In all packs of the step.
        load: Vision units and LLM tokens of every pack, in arrays of shape (num_replicas, micro_batches).
        shares: Of a mixture's sources: the share that was asked for, and the one that the step holds.
        oversized: Of a stream: what becomes of samples over a limit, and how many the run has met of them so far.
    """

    epoch: int
    index: int
    num_samples: int
    load: Load
    shares: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    oversized: Mapping[Oversized, int] = field(default_factory=dict)

    @property
    def llm_tokens(self) -> int:
        """LLM tokens in all packs of the step."""
        return int(np.sum(self.load.llm_tokens))

    def balance(self) -> dict[str, float]:
        """Mean load of a pack over the largest one, for vision units and LLM tokens: 1 where all packs are alike.

        Packs of one rank count as well as packs of different ranks: the former hold up each other in the pipeline,
        the latter at the end of the step.
        """
        return {"vision": _evenness(self.load.vision_units), "llm": _evenness(self.load.llm_tokens)}


def _evenness(values: object) -> float:
    loads = np.asarray(values, dtype=np.float64)
    largest = loads.max(initial=0.0)
    return float(loads.mean() / largest) if largest > 0 else 1.0


Steps = Iterator[tuple[Step, list[Batch]]]
"""What a PackLoader iterates over."""


class Loader(Protocol):
    """The packs of one rank, step after step, as an engine trains on them."""

    @property
    def micro_batches(self) -> int:
        """Packs of each rank in a step."""

    def __iter__(self) -> Steps:
        """Steps, as ``next_step`` gives them."""

    def next_step(self) -> tuple[Step, list[Batch]]:
        """The next step, and this rank's packs of it; all ranks together."""

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last step; all ranks together."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position."""

    def steps_left(self, epochs: int) -> int:
        """Steps from here to the end of epoch ``epochs - 1``, or of the run where there are no epochs."""

    def over(self, dataset: VlmDataset, lengths: SampleLengths) -> "PackLoader":
        """A loader of other samples for the same ranks and under the same limits, for evaluation."""

    def summary(self) -> dict[str, str]:
        """What is trained on, in words."""


def view_of(stage: int, num_stages: int) -> View:
    """What a stage reads: the first one images and text, the last one text (for its labels), others nothing."""
    if stage == 0:
        return "images"
    return "text" if stage == num_stages - 1 else "nothing"


def step_in_words(num_replicas: int, micro_batches: int) -> str:
    """What a step consists of."""
    return f"{num_replicas * micro_batches} packs: {num_replicas} replicas × {micro_batches} micro-batches"


def cores_of_process() -> int:
    """Cores that a process of this launch has when those of its node share them alike."""
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    return max(1, len(os.sched_getaffinity(0)) // local_processes)


def workers_for(read_seconds: float, step_seconds: float | None, micro_batches: int) -> int:
    """DataLoader processes that have a step's packs ready when the step before it is done.

    Args:
        read_seconds: To read the images of a step on one core.
        step_seconds: What a step takes; None where nobody knows: then as many as there are cores for.
        micro_batches: Packs in a step; each is read by one process.

    >>> workers_for(3.0, 20.0, micro_batches=32)
    1
    """
    cores = max(1, cores_of_process() - 1)  # one computes
    wanted = cores if step_seconds is None else math.ceil(_SLACK * read_seconds / step_seconds)
    return max(1, min(wanted, cores, micro_batches))


class PackLoader:
    """The packs of one rank, step after step and without end: behind the last step of an epoch the next epoch begins.

    While a step runs, workers read the next one: all its packs, collated, in the dtype and (for a GPU) the kind of
    memory that they are copied from, and no pack of the step after it but for what rounding to whole workers adds.

    Args:
        dataset: The samples.
        sampler: This rank's packs; the samplers of all ranks agree on every step.
        view: What this rank reads of a sample; with ``"nothing"`` only the position is kept.
        pixel_shape: (channels, height, width) of a tile, (values,) of a patch.
        pixel_dtype: What the model computes in.
        image_integers: What it reads of images beside pixels, as of ``VisionLanguageModel``.
        positions: Of a sample's tokens, likewise.
        workers: DataLoader processes where images are decoded (where only texts are read, one will do); 0 to read in
            this process, when a step begins; None for as many as the images of a step need.
        step_seconds: What a step is predicted to take, None if nobody did.
        pin_memory: Whether packs are copied to a GPU.
    """

    def __init__(
        self,
        dataset: VlmDataset,
        sampler: BalancedBatchSampler,
        *,
        view: View,
        pixel_shape: tuple[int, ...],
        pixel_dtype: torch.dtype = torch.float32,
        image_integers: Mapping[str, tuple[int, ...]] | None = None,
        positions: Positions | None = None,
        workers: int | None = None,
        step_seconds: float | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.sampler = sampler
        self.view = view
        self._alike = partial(
            PackLoader,
            view=view,
            pixel_shape=pixel_shape,
            pixel_dtype=pixel_dtype,
            image_integers=image_integers,
            positions=positions,
            workers=workers,
            step_seconds=step_seconds,
            pin_memory=pin_memory,
        )
        self.workers = self._workers(workers, math.prod(pixel_shape) * _PIXEL_SECONDS, step_seconds)
        self._packs = DataLoader(
            cast(Dataset[dict[str, Any]], dataset) if view == "images" else TextView(dataset),
            batch_sampler=_PacksFromHere(self.sampler),
            collate_fn=partial(
                pack_samples,
                pad_token_id=PAD_TOKEN_ID,
                pixel_shape=pixel_shape,
                pixel_dtype=pixel_dtype,
                image_integers=image_integers,
                positions=positions if view == "images" else None,
            ),
            num_workers=self.workers,
            prefetch_factor=-(-self.micro_batches // self.workers) if self.workers else None,
            persistent_workers=self.workers > 0,
            pin_memory=pin_memory and view != "nothing",
        )
        self._iterator: Iterator[Batch] | None = None
        self._steps_done = sampler.steps_done

    def _workers(self, given: int | None, tile_seconds: float, step_seconds: float | None) -> int:
        if self.view != "images":
            return 0 if given == 0 or self.view == "nothing" else 1
        tiles = self.sampler.lengths.summary.total_vision_units / (self.sampler.num_steps * self.sampler.num_replicas)
        read_seconds = tiles * tile_seconds
        workers = workers_for(read_seconds, step_seconds, self.micro_batches) if given is None else given
        if step_seconds is not None and read_seconds / max(workers, 1) > step_seconds:
            LOG.warning(
                "data.workers must read a step's images in the %.2f s of a step, got %d that take about %.2f s; every "
                "step will wait for its data: raise data.workers, or give each process more than %d cores",
                step_seconds,
                workers,
                read_seconds / max(workers, 1),
                cores_of_process(),
            )
        return workers

    @property
    def micro_batches(self) -> int:
        """Packs of each rank in a step."""
        return self.sampler.micro_batches

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the epoch that the next step belongs to; the same in all under ``"balanced"``."""
        ended = self._steps_done == self.sampler.epoch_steps
        return self.sampler.steps_of(self.sampler.epoch + ended)

    def steps_left(self, epochs: int) -> int:
        """Steps from here to the end of epoch ``epochs - 1``; what it costs says ``BalancedBatchSampler.steps_of``."""
        if self.sampler.epoch >= epochs:
            return 0
        later = (self.sampler.steps_of(epoch) for epoch in range(self.sampler.epoch + 1, epochs))
        return self.sampler.epoch_steps - self._steps_done + sum(later)

    def __len__(self) -> int:
        """Steps of the epoch that the next step belongs to."""
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[tuple[Step, list[Batch]]]:
        """Steps to the end of the epoch, as ``next_step`` gives them.

        Each is taken from what the engine trains next, unless it is the engine that gets the iterator:
        ``engine.train_batch(steps)``.
        """
        for _ in range(self.steps_left(self.sampler.epoch + 1) or self.steps_per_epoch):
            yield self.next_step()

    def next_step(self) -> tuple[Step, list[Batch]]:
        """The next step, and this rank's collated packs of it (none where it reads nothing).

        Raises:
            DataError: A sample cannot be read.
        """
        if self._steps_done == self.sampler.epoch_steps:
            self.sampler.set_epoch(self.sampler.epoch + 1)
            self._steps_done = 0
        if self.view != "nothing" and self._iterator is None:
            self._iterator = iter(self._packs)
        step, shares = self.sampler.step(self._steps_done), self.sampler.shares_of(self._steps_done)
        try:
            batches = [] if self._iterator is None else [next(self._iterator) for _ in range(self.micro_batches)]
        except OmnibalError as error:  # before what a worker says, torch puts its traceback
            kind = f"\n{type(error).__module__}.{type(error).__name__}: "
            raise type(error)(str(error).rpartition(kind)[2].strip()) from error
        self._steps_done += 1
        return Step(step.epoch, step.index, step.num_samples, step.load(self.sampler.lengths), shares), batches

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last step that ``next_step`` gave, whatever was read ahead."""
        return self.sampler.state_dict(self._steps_done)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        self.sampler.load_state_dict(state)
        self._iterator, self._steps_done = None, self.sampler.steps_done

    def summary(self) -> dict[str, str]:
        """What is trained on, in words."""
        sampler = self.sampler
        return {
            "samples": f"{len(sampler.lengths):,}; {sampler.oversized_report}",
            "a step": step_in_words(sampler.num_replicas, sampler.micro_batches),
            f"epoch {sampler.epoch}": f"{sampler.num_steps:,} steps",
        }

    def over(self, dataset: VlmDataset, lengths: SampleLengths) -> "PackLoader":
        """A loader of other samples for the same ranks and under the same limits, for evaluation."""
        sampler = BalancedBatchSampler(
            lengths,
            self.sampler.limits,
            num_replicas=self.sampler.num_replicas,
            rank=self.sampler.rank,
            micro_batches=self.micro_batches,
        )
        return self._alike(dataset, sampler)


class _PacksFromHere:
    """A rank's packs from where its sampler stands, through one epoch after another; the sampler stays where it is."""

    def __init__(self, sampler: BalancedBatchSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        ahead = copy(self.sampler)
        while True:
            yield from ahead
            ahead.set_epoch(ahead.epoch + 1)


class TextView(Dataset[dict[str, Any]]):
    """A dataset whose images are never decoded."""

    def __init__(self, dataset: VlmDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.dataset.text(index)
