"""Ranks fill their buffers at the same time: all hear what each one holds, whom they wait for, and what failed."""

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from omnibal.errors import ConfigError, DataError, said
from omnibal.feeds.buffer import SampleBuffer, StreamSettings
from omnibal.feeds.buffer_plan import BufferLoad, buffer_load, grown, growth

FIRST_SAMPLES: Final = 16
"""Samples by which ranks notice that they draw the same."""


class _Waiting(NamedTuple):
    """What a rank tells whose buffer is not full yet."""

    source: str
    idle_seconds: float


class FullBuffer(NamedTuple):
    """What a rank tells of its full buffer."""

    load: BufferLoad
    kinds: int
    """Kinds of input that the rank has met, by the bits of ``SampleLengths.kinds``."""
    first: str
    """A digest of the first samples, in the first window only: equal digests mean that two ranks read the same data."""
    num_oversized: int
    """Samples over a limit that the rank met since the window before."""
    first_oversized: str


_Count = Callable[[SampleBuffer], FullBuffer | DataError]


class SharedFilling:
    """Fills a rank's buffer together with all other ranks'; a rank without a buffer only gathers (see `StreamFeed`)."""

    def __init__(self, gather: Callable[[Any], list[Any]], settings: StreamSettings, rank: int) -> None:
        self.warn_seconds, self.wait_seconds = settings.warn_seconds, settings.wait_seconds
        if not 0 < self.warn_seconds <= self.wait_seconds:
            raise ConfigError(f"warn_seconds must lie between 0 and {self.wait_seconds}, got {self.warn_seconds}")
        self._gather, self._settings, self._rank = gather, settings, rank

    def heard(self, told: Any) -> list[Any]:
        """What all ranks that draw tell; raises on all ranks where one of them tells a failure."""
        return [theirs for theirs in self._gather(told) if theirs is not None]

    def restore(self, buffer: SampleBuffer | None, kinds: int) -> list[FullBuffer]:
        """Let all ranks come back to the buffers of a state; ``kinds`` are those met before."""
        return self._drawn(buffer, SampleBuffer.restore, partial(self._full, kinds, False))

    def fill(self, buffer: SampleBuffer | None, kinds: int, step: int, *, is_first: bool) -> list[FullBuffer]:
        """Fill all ranks' buffers, further than usual where their samples are so short that they do not fill a step."""
        count = partial(self._full, kinds, is_first)
        of_ranks = self._drawn(buffer, partial(SampleBuffer.fill, step=step), count)
        _refuse_same(of_ranks)
        # A round ends where no rank has to grow further, which all know from the same numbers.
        while max(times := growth([rank.load for rank in of_ranks], self._settings.micro_batches)) > 1:
            size = 0 if buffer is None else grown(len(buffer.samples), times[self._rank])
            of_ranks = self._drawn(buffer, partial(SampleBuffer.fill_up, num_samples=size), count)
        return of_ranks

    def _drawn(
        self, buffer: SampleBuffer | None, draw: Callable[[SampleBuffer], None], count: _Count
    ) -> list[FullBuffer]:
        """Let all ranks draw, each in a thread of its own; nobody is waited for in silence, or without end."""
        failures: list[DataError] = []

        def drawing(buffer: SampleBuffer) -> None:
            try:
                draw(buffer)
            except Exception as error:
                failures.append(failure_of(error))

        thread = threading.Thread(target=drawing, args=(buffer,), daemon=True, name="omnibal-draws")
        heard, since = 0 if buffer is None else buffer.heard, time.monotonic()
        if buffer is not None:
            thread.start()
        # Every warn_seconds at most, ranks tell each other that they are done, or for which source they wait.
        while True:
            told: Any = None
            if buffer is not None:
                thread.join(self.warn_seconds)
                if buffer.heard != heard:
                    heard, since = buffer.heard, time.monotonic()
                if thread.is_alive():
                    told = _Waiting(buffer.drawing_from, time.monotonic() - since)
                else:
                    told = failures[0] if failures else count(buffer)
            of_ranks = self.heard(told)
            waiting = {rank: what for rank, what in enumerate(of_ranks) if isinstance(what, _Waiting)}
            if not waiting:
                return of_ranks
            self._name(waiting)

    def _full(self, kinds: int, is_first: bool, buffer: SampleBuffer) -> FullBuffer | DataError:
        try:
            samples, lengths = buffer.samples.values(), buffer.lengths()
            kinds = int(np.bitwise_or.reduce(lengths.kinds, initial=kinds))
            first = [
                (sample.loads, _ids(sample.held)) for sample, _ in zip(samples, range(FIRST_SAMPLES), strict=False)
            ]
            load = buffer_load(lengths, self._settings.limits, ended=buffer.ended, bounded=buffer.is_bounded)
            first_samples = repr(first) if is_first else ""
            return FullBuffer(load, kinds, first_samples, buffer.num_oversized, buffer.first_oversized)
        except Exception as error:  # such as lengths that are none
            return failure_of(error)

    def _name(self, waiting: Mapping[int, _Waiting]) -> None:
        for rank, (source, idle) in waiting.items():
            if idle >= self.wait_seconds:
                raise DataError(f"source {source!r} must bring samples, got none for {idle:.0f} s on rank {rank}")
        told = [f"source {source!r} of rank {rank}, idle for {idle:.0f} s" for rank, (source, idle) in waiting.items()]
        warnings.warn(f"all ranks wait for {'; '.join(told)}", stacklevel=2)


def failure_of(error: Exception) -> DataError:
    return DataError(said(error))


def _refuse_same(of_ranks: list[FullBuffer]) -> None:
    """Refuse ranks that draw the same samples: each would be trained several times."""
    seen: dict[str, int] = {}
    for number, rank in enumerate(of_ranks):
        if len(rank.first) > len("[]") and rank.first in seen:
            raise DataError(
                f"ranks must draw samples of their own, got the same first ones on ranks {seen[rank.first]} and "
                f"{number}; divide the source over the ranks"
            )
        seen[rank.first] = number


def _ids(held: Any) -> list[int]:
    return np.asarray(held["input_ids"]).ravel().tolist() if isinstance(held, Mapping) and "input_ids" in held else []
