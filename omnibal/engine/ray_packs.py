"""Packs that other machines read: the steps of a rank's reader as tasks of a Ray cluster.

DistTrain calls this disaggregated pre-processing (section 6): images are decoded and cut into tiles where processors
are idle, and training takes finished tensors. Ray decides which machine reads which pack, and reads a pack again whose
reader was killed.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnibal.errors import ConfigError, DataError, OmnibalError
from omnibal.feeds.feed import ahead

Batch = dict[str, Tensor]
Collate = Callable[[list[dict[str, Tensor]]], Batch]


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
    """The packs of a batch sampler, read by a Ray cluster and handed out in the sampler's order.

    A pack takes one processor of the cluster while it is read. ``count`` packs are being read, or wait in the cluster's
    memory, and as many wait on this machine; no more are asked for before one is taken.

    Args:
        dataset: Is sent to each machine once, pickled; its files must have the same paths there.
        packs: Sample indices of each pack; every iteration over them begins where training stands.
        collate: Makes a batch of a pack's samples, on the machine that reads them.
        address: Of a Ray cluster (``"host:6379"``, or ``"auto"`` for the one this machine belongs to); ``"local"``
            starts one on this machine.
        pin: Whether batches are copied to pinned memory, for a GPU.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at the address.
    """

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
