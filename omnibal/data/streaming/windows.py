"""Windows of steps that ranks plan together, each of samples that it drew: only numbers travel between them.

A rank may also draw nothing and hear what the others tell: then it knows the steps as they do, and what fails.
"""

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from omnibal.cost import IntArray
from omnibal.data.limits import PackLimits
from omnibal.data.mixture import Mixture
from omnibal.data.streaming.buffer import Asked, agree, asked, plan_buffer
from omnibal.data.streaming.draws import Draws, Sample
from omnibal.errors import ConfigError, DataError, said

FIRST_SAMPLES: Final = 16
"""By which ranks notice that they draw the same."""
PER_PACK: Final = 5
"""Numbers about a pack: vision units, LLM tokens, their squares, target tokens, samples."""
Packer = Callable[[list[Sample], Sample | None, bool], Any]
"""From a pack's samples, a filler, and whether the pack must have an image, to what is trained."""


class _Waiting(NamedTuple):
    """What a rank tells whose buffer is not full yet."""

    source: str
    idle_seconds: float


class _Full(NamedTuple):
    """What a rank tells of its full buffer."""

    asked: Asked
    has_image: bool
    """Whether it has drawn one, now or before: then all packs of all ranks have one from now on."""
    first: str
    """Of the first window: its first samples in short."""


class Window(NamedTuple):
    """Steps that were planned together."""

    position: Mapping[str, Any]
    """Where this rank stood before it."""
    batches: list[Any]
    """This rank's packs."""
    loads: IntArray
    """Of the packs of all ranks that draw, (ranks, packs, PER_PACK + sources), fillers aside: behind the numbers about
    a pack stands what each source has given."""


def shares_of(mixture: Mixture | None, step: int, given: IntArray) -> dict[str, tuple[float, float]]:
    """Of a mixture's sources: the share that a step was to hold of each, and the one that it holds.

    Args:
        mixture: What was asked for, if anything.
        step: From 0.
        given: What each source has given.
    """
    if mixture is None:
        return {}
    asked, held = mixture.shares_at(step + 0.5).tolist(), (given / max(given.sum(), 1)).tolist()
    return dict(zip(mixture.sources, zip(asked, held, strict=True), strict=True))


def beginning(epoch: int) -> dict[str, Any]:
    """The position before the first window of a pass over the sources."""
    return {"epoch": epoch, "window": 0, "first_step": 0, "steps_done": 0, "draws": None, "filler": None}


def warn_of_reading_again(names: Sequence[str], position: Mapping[str, Any]) -> None:
    """Say what going on from a position costs: sources without a state are read again."""
    stood = [] if position["draws"] is None else position["draws"]["from"]["sources"]
    again = {name: at["drawn"] for name, at in zip(names, stood, strict=False) if at["own"] is None and at["drawn"]}
    if again:
        told = ", ".join(f"{count:,} of {name!r}" for name, count in again.items())
        warnings.warn(f"sources without state_dict are read again from the start of their pass: {told}", stacklevel=3)


class Windows:
    """Plans this rank's packs, window after window, together with the other ranks.

    Args:
        draws: Makes this rank's buffer; gets ``first_pass``. None where it draws nothing.
        limits: The most a pack may hold.
        pack: Makes what is trained of a pack's samples.
        tell: Returns what all ranks pass, by rank, and raises on all of them where one passes an exception; called as
            often on every rank.
        rank: Of this process among those that draw; they are the first ones.
        micro_batches: Packs of each rank and step.
        seed: What chance decides by.
        fills: Whether packs need fillers, one of which is then kept in positions.
        warn_seconds: After how long a source that is waited for is named, on all ranks.
        wait_seconds: After how long without a sample it ends the run, on all ranks.
    """

    def __init__(
        self,
        draws: Callable[..., Draws] | None,
        limits: PackLimits,
        pack: Packer,
        tell: Callable[[Any], list[Any]],
        *,
        rank: int,
        micro_batches: int,
        seed: int,
        fills: bool = True,
        warn_seconds: float = 60,
        wait_seconds: float = 1800,
    ) -> None:
        if not 0 < warn_seconds <= wait_seconds:
            raise ConfigError(f"warn_seconds must lie between 0 and {wait_seconds}, got {warn_seconds}")
        self._draws, self._limits, self._pack, self._tell = draws, limits, pack, tell
        self._rank, self._micro_batches, self._seed, self._fills = rank, micro_batches, seed, fills
        self._warn_seconds, self._wait_seconds = warn_seconds, wait_seconds

    def following(self, begun: Mapping[str, Any]) -> Iterator[Window]:
        """The windows from a position on, to the end of the pass.

        Raises:
            DataError: On all ranks alike: a source fails, is empty, stalls for too long, or is the same on two ranks.
        """
        draws = None if self._draws is None else self._draws(first_pass=begun["epoch"])
        if draws is not None and begun["draws"] is not None:
            draws.load_state_dict(begun["draws"])
        number, step, filler = begun["window"], begun["first_step"], begun["filler"]
        while True:
            position = {**begun, "window": number, "first_step": step, "steps_done": 0, **_stand(draws, filler)}
            of_ranks = self._filled(draws, step, filler, is_first=number == 0)
            if all(rank.asked.ended and not rank.asked.packs for rank in of_ranks):
                return
            aim = agree([rank.asked for rank in of_ranks], self._micro_batches)
            batches: list[Any] = []
            told: Any = None
            if draws is not None:
                filler = _filler(draws.samples, filler) if self._fills else None
                try:
                    seed, waited = [self._seed, begun["epoch"], number, self._rank], len(position["draws"]["held"])
                    packs = plan_buffer(draws.lengths(), aim, self._limits, waited=waited, seed=seed)
                    keys = np.array([*draws.samples], dtype=np.int64)
                    taken = [draws.take(keys[pack].tolist()) for pack in packs]
                    told = np.array([[*_numbers(samples), *draws.given(samples)] for samples in taken])
                    has_image = any(rank.has_image for rank in of_ranks)
                    batches = [self._pack(samples, filler, has_image) for samples in taken]
                except Exception as error:  # the other ranks wait for an answer
                    told = _failure(error)
            yield Window(position, batches, np.stack(self._heard(told)))
            number, step = number + 1, step + aim.num_packs // self._micro_batches

    def _heard(self, told: Any) -> list[Any]:
        """What all ranks that draw tell; raises on all ranks where one of them tells a failure."""
        return [theirs for theirs in self._tell(told) if theirs is not None]

    def _filled(self, draws: Draws | None, step: int, filler: Sample | None, *, is_first: bool) -> list[_Full]:
        """Fill all ranks' buffers; whoever is waited for is named on all of them, and not waited for without end."""
        failures: list[DataError] = []

        def fill(draws: Draws) -> None:
            try:
                draws.fill(step)
            except Exception as error:
                failures.append(_failure(error))

        thread = threading.Thread(target=fill, args=(draws,), daemon=True, name="omnibal-draws")
        heard, since = 0 if draws is None else draws.heard, time.monotonic()
        if draws is not None:
            thread.start()
        while True:
            told: Any = None
            if draws is not None:
                thread.join(self._warn_seconds)
                if draws.heard != heard:
                    heard, since = draws.heard, time.monotonic()
                if thread.is_alive():
                    told = _Waiting(draws.drawing_from, time.monotonic() - since)
                else:
                    told = failures[0] if failures else self._full(draws, filler, is_first)
            of_ranks = self._heard(told)
            waiting = {rank: what for rank, what in enumerate(of_ranks) if isinstance(what, _Waiting)}
            if not waiting:
                _refuse_same(of_ranks)
                return of_ranks
            self._name(waiting)

    def _full(self, draws: Draws, filler: Sample | None, is_first: bool) -> _Full | DataError:
        try:
            samples = draws.samples.values()
            has_image = any(sample.loads[0] for sample in (*samples, filler) if sample is not None)
            first = [
                (sample.loads, _ids(sample.held)) for sample, _ in zip(samples, range(FIRST_SAMPLES), strict=False)
            ]
            counted = asked(draws.lengths(), self._limits, ended=draws.ended)
            return _Full(counted, has_image, repr(first) if is_first else "")
        except Exception as error:  # such as lengths that are none
            return _failure(error)

    def _name(self, waiting: Mapping[int, _Waiting]) -> None:
        for rank, (source, idle) in waiting.items():
            if idle >= self._wait_seconds:
                raise DataError(f"source {source!r} must bring samples, got none for {idle:.0f} s on rank {rank}")
        told = [f"source {source!r} of rank {rank}, idle for {idle:.0f} s" for rank, (source, idle) in waiting.items()]
        warnings.warn(f"all ranks wait for {'; '.join(told)}", stacklevel=2)


def _failure(error: Exception) -> DataError:
    return DataError(said(error))


def _stand(draws: Draws | None, filler: Sample | None) -> dict[str, Any]:
    """Where a rank's draws stand; its filler goes along where none of the buffer would do."""
    if draws is None:
        return {"draws": None, "filler": None}
    kept = None if any(sample.loads[0] for sample in draws.samples.values()) else filler
    return {"draws": draws.state_dict(), "filler": kept}


def _filler(samples: Mapping[int, Sample], before: Any) -> Any:
    """The smallest sample with an image that is at hand; else the filler before, or the smallest text."""
    with_image = [sample for sample in samples.values() if sample.loads[0]]
    if with_image or before is None:
        return min(with_image or samples.values(), key=lambda sample: sample.loads, default=None)
    return before


def _numbers(samples: Sequence[Sample]) -> tuple[int, ...]:
    loads = np.array([sample.loads for sample in samples], dtype=np.int64).reshape(-1, 3)
    vision, tokens, targets = loads.sum(axis=0)
    return vision, tokens, (loads[:, 1] ** 2).sum(), targets, len(samples)


def _refuse_same(of_ranks: list[_Full]) -> None:
    """Refuse ranks that draw the same samples: each would be trained several times."""
    seen: dict[str, int] = {}
    for rank, (_, _, first) in enumerate(of_ranks):
        if len(first) > len("[]") and first in seen:
            raise DataError(
                f"ranks must draw samples of their own, got the same first ones on ranks {seen[first]} and {rank}; "
                "divide the source over the ranks"
            )
        seen[first] = rank


def _ids(held: Any) -> list[int]:
    return np.asarray(held["input_ids"]).ravel().tolist() if isinstance(held, Mapping) and "input_ids" in held else []
