"""What a rank draws on its own, of a dataset or a stream that all ranks have: lists of items, a micro-batch each."""

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from omnibal.feeds.sources import EveryNth, iterated


class Epochs:
    """This rank's draws of a dataset that is read by index: every sample once an epoch, in another order each."""

    def __init__(
        self, dataset: Any, size: int, rank: int, num_ranks: int, seed: int, options: Mapping[str, Any]
    ) -> None:
        self._dataset, self._size, self._rank, self._num_ranks = dataset, size, rank, num_ranks
        self._seed, self._options = seed, options
        self._epoch, self._start = 0, 0

    def __iter__(self) -> Iterator[list[Any]]:
        order = np.random.default_rng((self._seed, self._epoch)).permutation(len(self._dataset))
        draws = [order[start : start + self._size].tolist() for start in range(0, len(order), self._size)]
        mine = draws[self._rank :: self._num_ranks][self._start :]
        # Of its own, since this runs in a thread beside the model's: the workers' seeds come from it.
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        self._epoch, self._start = self._epoch + 1, 0
        loader = DataLoader(
            self._dataset, batch_sampler=mine, collate_fn=as_it_is, generator=generator, **self._options
        )
        return iter(loader)

    def __len__(self) -> int:
        """Draws of the rank that has most."""
        return ceil(len(self._dataset) / (self._size * self._num_ranks))

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Let the next iteration be of this epoch, from this draw on."""
        self._epoch, self._start = epoch, start

    def made_from(self) -> dict[str, int]:
        """What the order depends on."""
        return {"samples": len(self._dataset), "seed": self._seed}


class Stream:
    """This rank's draws of a stream that is the same on all ranks: of n ranks each gets every n-th sample.

    Without a size, single samples are drawn. Where a stream's shards can be dealt (``datasets.IterableDataset``), a
    rank reads its own ones alone. If it has ``state_dict`` and ``load_state_dict`` and no workers read it, this has
    them too.
    """

    def __init__(self, dataset: Any, size: int | None, rank: int, num_ranks: int, options: Mapping[str, Any]) -> None:
        if hasattr(dataset, "num_shards"):
            from datasets.distributed import split_dataset_by_node

            dataset, rank, num_ranks = split_dataset_by_node(dataset, rank, num_ranks), 0, 1
        self._share = _Share(dataset, rank, num_ranks)
        # A generator of its own, since this is drawn in a thread beside the model's.
        generator = torch.Generator()
        self._loader = DataLoader(self._share, batch_size=size, collate_fn=as_it_is, generator=generator, **options)
        if hasattr(dataset, "state_dict") and not options.get("num_workers"):
            vars(self).update(state_dict=dataset.state_dict, load_state_dict=self._share.load_state_dict)

    def __iter__(self) -> Iterator[list[Any]]:
        return iterated(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream, if it wants to know."""
        if hasattr(self._share.dataset, "set_epoch"):
            self._share.dataset.set_epoch(epoch)

    def made_from(self) -> dict[str, int]:
        """A stream keeps its own."""
        return {}


class _Share(EveryNth, IterableDataset[Any]):
    """As a DataLoader takes it."""


def as_it_is(items: Any) -> Any:
    """What a DataLoader is to leave alone."""
    return items
