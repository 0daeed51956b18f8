"""What gives steps of packs as one rank reads them: the feeds of all ranks agree on every step.

An epoch, a mixture and a stream differ in where packs come from, not in what a host's loader does with them:

    samples with an index ── BalancedBatchSampler ── EpochFeed ──┐
    (an epoch or a mixture)                                      ├── step() ── the loader of a host
    samples that arrive ──── SampleBuffer ────────── StreamFeed ─┘
"""

import queue
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import copy
from typing import Any, Final, NamedTuple, TypeVar

from omnibal.data.epoch import Step
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.processes import start_until_exit

Made = TypeVar("Made")
_END: Final = object()


class Share(NamedTuple):
    """Which packs of a step a rank reads: of all, in the order of their numbers, every ``num_shares``-th."""

    # Micro-batch m of the sampler's rank d has the number ``n = m · ranks + d`` (`omnibal.pipeline.schedule`): share d
    # of as many shares as there are ranks is what the sampler gives rank d.

    number: int
    num_shares: int

    def packs(self, sampler: BalancedBatchSampler, step: int) -> list[list[int]]:
        """The sample indices of the rank's packs of a step of the current epoch, in order."""
        packs, ranks, size = sampler.step_packs(step), sampler.num_replicas, sampler.micro_batches
        numbers = range(self.number, ranks * size, self.num_shares)
        return [packs[n % ranks * size + n // ranks].tolist() for n in numbers]


class PacksFromHere:
    """A ``batch_sampler`` of a share of the packs, its rank's by default; the sampler itself stays where it is."""

    def __init__(self, sampler: BalancedBatchSampler, share: Share | None = None) -> None:
        self.sampler, self.share = sampler, share or Share(sampler.rank, sampler.num_replicas)

    def __iter__(self) -> Iterator[list[int]]:
        ahead = copy(self.sampler)
        while True:
            for step in range(ahead.steps_done, ahead.epoch_steps):
                yield from self.share.packs(ahead, step)
            ahead.set_epoch(ahead.epoch + 1)


class EpochFeed:
    """The steps of a sampler, epoch after epoch without end."""

    # ``reader`` yields the packs of ``PacksFromHere(sampler, share)``, read and collated; None for ranks that read
    # nothing. By default the share is that of the sampler's rank.

    def __init__(self, sampler: BalancedBatchSampler, reader: Iterable[Any] | None, share: Share | None = None) -> None:
        self.sampler, self._reader = sampler, reader
        self.limits, self.num_replicas = sampler.limits, sampler.num_replicas
        self.share = share or Share(sampler.rank, sampler.num_replicas)
        self.rank = sampler.rank
        self.micro_batches = sampler.num_replicas * sampler.micro_batches // self.share.num_shares
        self._packs: Iterator[Any] | None = None
        # The sampler's own count runs ahead of training: workers ask it for packs before they are wanted.
        self._steps_done = sampler.steps_done

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the epoch that the next step belongs to; the same in all under ``"balanced"``."""
        ended = self._steps_done == self.sampler.epoch_steps
        return self.sampler.steps_of(self.sampler.epoch + ended)

    def step(self) -> tuple[Step, list[Any]]:
        """The next step and this rank's packs of it; behind the last step of an epoch the next epoch begins."""
        sampler = self.sampler
        if self._steps_done == sampler.epoch_steps:
            sampler.set_epoch(sampler.epoch + 1)
            self._steps_done = 0
        if self._packs is None and self._reader is not None:
            self._packs = iter(self._reader)
        batches = [] if self._packs is None else [next(self._packs) for _ in range(self.micro_batches)]
        step = sampler.step(self._steps_done)
        self._steps_done += 1
        return step, batches

    def own_packs(self, step: Step) -> list[list[int]]:
        return self.share.packs(self.sampler, step.index)

    def without(self, step: Step, samples: Collection[int]) -> Step:
        """A step of this epoch as it is without some samples, which cannot be read."""
        return self.sampler.step_without(step.index, samples)

    def steps_left(self, epochs: int | None = None) -> int:
        """Steps to the end of epoch ``epochs - 1``, by default of the next step's epoch."""
        # Counting later epochs costs as much as ``BalancedBatchSampler.steps_of``.
        sampler = self.sampler
        left = sampler.epoch_steps - self._steps_done
        if epochs is None:
            return left or self.steps_per_epoch
        if sampler.epoch >= epochs:
            return 0
        return left + sum(sampler.steps_of(epoch) for epoch in range(sampler.epoch + 1, epochs))

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict(self._steps_done)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a sampler's state, also one of another number of ranks."""
        self.sampler.load_state_dict(state)
        self._packs, self._steps_done = None, self.sampler.steps_done

    def summary(self) -> dict[str, str]:
        sampler = self.sampler
        return {
            "samples": f"{len(sampler.lengths):,}; {sampler.oversized_report}",
            "a step": step_in_words(sampler.num_replicas, sampler.micro_batches),
            f"epoch {sampler.epoch}": f"{sampler.num_steps:,} steps",
        }


def micro_batches_of(feed: Any) -> Iterator[tuple[Any, Any]]:
    """Micro-batches of the steps of a feed with a ``position``, each beside its step, to the end of the feed's pass."""
    # The position moves on with the last micro-batch of a step, since its optimizer step follows: whoever saves then
    # has trained the step. What was made ahead is let go at the end, also where a loop is left early.
    feed.go_to(feed.position)
    try:
        while True:
            before = feed.position
            if (found := feed.step()) is None:
                return
            behind, feed.position = feed.position, before
            for number, batch in enumerate(found[1], start=1):
                if number == len(found[1]):
                    feed.position = behind
                yield found[0], batch
    finally:
        feed.go_to(feed.position)


def step_in_words(num_replicas: int, micro_batches: int) -> str:
    return f"{num_replicas * micro_batches} packs: {num_replicas} replicas × {micro_batches} micro-batches"


def ahead(make: Callable[[], Iterator[Made]], count: int) -> Iterator[Made]:
    """Yield what ``make`` yields, made in a thread, ``count`` of them before they are wanted; raise what it raises."""
    # Things are made on request only, one for each that is taken: where making one is a meeting of all ranks, a run
    # that stops early on all of them leaves no rank waiting in a meeting that others never enter.
    requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
    made: queue.SimpleQueue[Made | Exception | object] = queue.SimpleQueue()

    def work() -> None:
        try:
            things = make()
            while requests.get():
                thing = next(things, _END)
                made.put(thing)
                if thing is _END:
                    return
        except Exception as error:
            made.put(error)

    thread = threading.Thread(target=work, daemon=True, name="omnibal-ahead")
    forget = start_until_exit(thread, lambda: requests.put(False))
    for _ in range(count):
        requests.put(True)
    try:
        while (thing := made.get()) is not _END:
            if isinstance(thing, Exception):
                raise thing
            requests.put(True)
            yield thing  # type: ignore[misc]
    finally:
        requests.put(False)
        if not sys.is_finalizing():  # no thread runs any more when Python ends
            thread.join()
            forget()
