"""The packs of one rank, step by step and epoch after epoch, as its pipeline stage needs them."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, Protocol, cast

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from omnibal.data.collate import pack_samples
from omnibal.data.lengths import SampleLengths
from omnibal.data.sampler import BalancedBatchSampler
from omnibal.engine.step import Step

View = Literal["images", "text", "nothing"]
Batch = dict[str, Tensor]

PAD_TOKEN_ID = 0
"""What stands in an empty pack; any token does, since nothing is learned from it."""


class VlmDataset(Protocol):
    """What a dataset for training offers."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample: ``input_ids``, ``labels`` (both (tokens,)), ``pixel_values`` (tiles, 3, H, W) or None."""

    def text(self, index: int) -> dict[str, Any]:
        """The same without decoding an image: ``pixel_values`` is None."""

    def lengths(self) -> SampleLengths:
        """The loads of all samples."""


def view_of(stage: int, num_stages: int) -> View:
    """What a stage reads: the first one images and text, the last one text (for its labels), others nothing."""
    if stage == 0:
        return "images"
    return "text" if stage == num_stages - 1 else "nothing"


class PackLoader:
    """The packs of one rank, step after step and without end: behind the last step of an epoch the next epoch begins.

    Args:
        dataset: The samples.
        sampler: This rank's packs; the samplers of all ranks agree on every step.
        view: What this rank reads of a sample; with ``"nothing"`` only the position is kept.
        pixel_shape: (channels, height, width) of a tile.
        workers: DataLoader processes where images are decoded.
    """

    def __init__(
        self,
        dataset: VlmDataset,
        sampler: BalancedBatchSampler,
        *,
        view: View,
        pixel_shape: tuple[int, int, int],
        workers: int = 0,
    ) -> None:
        self.sampler = sampler
        self.view = view
        self._pixel_shape = pixel_shape
        self._workers = workers if view == "images" else 0
        self._packs = DataLoader(
            cast(Dataset[dict[str, Any]], dataset) if view == "images" else TextView(dataset),
            batch_sampler=sampler,
            collate_fn=partial(pack_samples, pad_token_id=PAD_TOKEN_ID, pixel_shape=pixel_shape),
            num_workers=self._workers,
            persistent_workers=self._workers > 0,
        )
        self._iterator: Iterator[Batch] | None = None
        self._steps_done = sampler.steps_done

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

    def next_step(self) -> tuple[Step, list[Batch]]:
        """The next step, and this rank's collated packs of it (none where it reads nothing).

        Raises:
            DataError: A sample cannot be read.
        """
        if self._steps_done == self.sampler.epoch_steps:
            self.sampler.set_epoch(self.sampler.epoch + 1)
            self._iterator, self._steps_done = None, 0
        step = self.sampler.step(self._steps_done)
        batches: list[Batch] = []
        if self.view != "nothing":
            self._iterator = iter(self._packs) if self._iterator is None else self._iterator
            batches = [next(self._iterator) for _ in range(self.micro_batches)]
        self._steps_done += 1
        return Step(step.epoch, step.index, step.num_samples, step.load(self.sampler.lengths)), batches

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last step that ``next_step`` gave, whatever was read ahead."""
        return self.sampler.state_dict(self._steps_done)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        self.sampler.load_state_dict(state)
        self._iterator, self._steps_done = None, self.sampler.steps_done

    def over(self, dataset: VlmDataset, lengths: SampleLengths) -> "PackLoader":
        """A loader of other samples for the same ranks and under the same limits, for evaluation."""
        sampler = BalancedBatchSampler(
            lengths,
            self.sampler.limits,
            num_replicas=self.sampler.num_replicas,
            rank=self.sampler.rank,
            micro_batches=self.micro_batches,
        )
        return PackLoader(dataset, sampler, view=self.view, pixel_shape=self._pixel_shape, workers=self._workers)


class TextView(Dataset[dict[str, Any]]):
    """A dataset whose images are never decoded."""

    def __init__(self, dataset: VlmDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.dataset.text(index)
