"""Windows of steps that ranks plan together, each of samples that it drew: only numbers travel between them.

A rank may also draw nothing and hear what the others tell: then it knows the steps as they do, and what fails.
"""

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np

from omnibal.cost import IntArray
from omnibal.data.limits import PackLimits
from omnibal.data.mixture import Mixture
from omnibal.data.policies import Oversized
from omnibal.errors import ConfigError, DataError, said
from omnibal.feeds.buffer import Asked, agree, asked, grown, growth, plan_buffer
from omnibal.feeds.draws import Draws, Sample

FIRST_SAMPLES: Final = 16
"""By which ranks notice that they draw the same."""
PER_PACK: Final = 5
"""Numbers about a pack: vision units, LLM tokens, their squares, target tokens, samples."""
FREE: Final = ("sources", "mixture", "oversized")
"""What a run that goes on may have otherwise than the one before."""
FATES: Final = {"alone": "gets a pack of its own", "drop": "is left out"}
"""What becomes of a sample that exceeds a limit on its own."""
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
    num_oversized: int
    """Samples over a limit that it met since the window before."""
    oversized: str
    """The first of these, in words."""


class Window(NamedTuple):
    """Steps that were planned together."""

    position: Mapping[str, Any]
    """Where this rank stood before it."""
    batches: list[Any]
    """This rank's packs."""
    loads: IntArray
    """Of the packs of all ranks that draw, (ranks, packs, PER_PACK + sources), fillers aside: behind the numbers about
    a pack stands what each source has given."""
    oversized: int
    """Samples over a limit that all ranks met since the run began."""
    packs: list[list[int]]
    """The numbers of the samples of this rank's packs."""
    draws: Mapping[str, Any] | None
    """What this rank's draws say behind the window, if its samples may be wanted back."""

    def position_behind(self, steps: int) -> dict[str, Any]:
        """Where this rank stands when some of the steps are done."""
        behind = {"oversized": self.oversized, "packs": self.packs, "draws": self.draws}
        return {**self.position, "steps_done": steps, "behind": behind}


def left_over(position: Mapping[str, Any], micro_batches: int) -> dict[str, Any]:
    """The position from which what a window has left is planned anew: by a run whose next draws would be others.

    Args:
        position: In a window whose steps are partly done.
        micro_batches: Packs of each rank and step.
    """
    behind, done = position["behind"], position["steps_done"]
    if behind is None:
        return {**position}
    draws = behind["draws"]
    if draws is not None:
        left = [number for pack in behind["packs"][done * micro_batches :] for number in pack]
        draws = {**draws, "held": [*draws["held"], *left]}
    window, step = position["window"] + 1, position["first_step"] + done
    return {
        **position,
        "window": window,
        "first_step": step,
        "steps_done": 0,
        "oversized": behind["oversized"],
        "draws": draws,
        "behind": None,
    }


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


def beginning(epoch: int, oversized: int = 0) -> dict[str, Any]:
    """The position before the first window of a pass over the sources."""
    begun = {"epoch": epoch, "window": 0, "first_step": 0, "steps_done": 0, "draws": None, "filler": None}
    return begun | {"oversized": oversized, "behind": None}


def go_on(
    own: Mapping[str, Any], saved: Mapping[str, Any], position: Mapping[str, Any], *, tells: bool
) -> dict[str, Any]:
    """The position from which a run goes on in which another one was saved.

    Args:
        own: What the packs of this run are made from.
        saved: What those of the other were.
        position: Where that one stood.
        tells: Whether this rank says what goes on otherwise, and what is read again because it has no state.

    Raises:
        ConfigError: A value differs that is none of ``FREE``.
    """
    for name, value in own.items():
        if name not in FREE and saved.get(name) != value:
            raise ConfigError(
                f"{name} must be that of the state of the streams, {saved.get(name)!r:.200}, got {value!r:.200}; every "
                "rank goes on in its own sources and buffer"
            )
    if "behind" not in position:
        raise ConfigError(
            "the state of the streams must be of this version of omnibal, got that of an earlier one; begin them anew, "
            "or finish the run with the earlier one"
        )
    if tells:
        _tell_what_changes(own, saved, position)
    unchanged = all(own[name] == saved.get(name) for name in FREE)
    return {**position} if unchanged else left_over(position, own["micro_batches"])


def _tell_what_changes(own: Mapping[str, Any], saved: Mapping[str, Any], position: Mapping[str, Any]) -> None:
    names, before = own["sources"], saved["sources"]
    told = [
        *(f"source {name!r} is new and begins at its start" for name in names if name not in before),
        *(f"source {name!r} is gone; what was drawn of it is left out" for name in before if name not in names),
    ]
    if names == before:
        told += [f"{name} is another one from here on" for name in FREE if own[name] != saved.get(name, own[name])]
    stood = {} if position["draws"] is None else position["draws"]["from"]["sources"]
    again = {name: at["drawn"] for name, at in stood.items() if name in names and at["own"] is None and at["drawn"]}
    if again:
        counts = ", ".join(f"{count:,} of {name!r}" for name, count in again.items())
        told.append(f"sources without state_dict are read again from the start of their pass: {counts}")
    for text in told:
        warnings.warn(text, stacklevel=4)


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
        oversized: What becomes of a sample that exceeds a limit on its own.
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
        oversized: Oversized,
        fills: bool = True,
        warn_seconds: float = 60,
        wait_seconds: float = 1800,
    ) -> None:
        if not 0 < warn_seconds <= wait_seconds:
            raise ConfigError(f"warn_seconds must lie between 0 and {wait_seconds}, got {warn_seconds}")
        self._draws, self._limits, self._pack, self._tell = draws, limits, pack, tell
        self._rank, self._micro_batches, self._seed, self._fills = rank, micro_batches, seed, fills
        self._oversized = oversized
        self._warn_seconds, self._wait_seconds = warn_seconds, wait_seconds

    def following(self, begun: Mapping[str, Any]) -> Iterator[Window]:
        """The windows from a position on, to the end of the pass.

        Raises:
            DataError: On all ranks alike: a source fails, is empty, stalls for too long, or is the same on two ranks.
        """
        draws = None if self._draws is None else self._draws(first_pass=begun["epoch"])
        if draws is not None and begun["draws"] is not None:
            draws.load_state_dict(begun["draws"])
        number, step, filler, oversized = begun["window"], begun["first_step"], begun["filler"], begun["oversized"]
        while True:
            position = {**begun, "window": number, "first_step": step, "steps_done": 0, "oversized": oversized}
            position |= {"behind": None, **_stand(draws, filler)}
            of_ranks = self._filled(draws, step, filler, is_first=number == 0)
            oversized = self._count_oversized(of_ranks, oversized)
            if all(rank.asked.ended and not rank.asked.packs for rank in of_ranks):
                if number == 0:  # all were left out, or there would be a window
                    raise DataError(
                        f"limits must allow a sample of the sources, got none; {_first_oversized(of_ranks)}"
                    )
                return
            aim = agree([rank.asked for rank in of_ranks], self._micro_batches)
            batches: list[Any] = []
            numbers: list[list[int]] = []
            behind: Mapping[str, Any] | None = None
            told: Any = None
            if draws is not None:
                filler = _filler(draws.samples, filler) if self._fills else None
                try:
                    seed, waited = [self._seed, begun["epoch"], number, self._rank], len(position["draws"]["held"])
                    packs = plan_buffer(draws.lengths(), aim, self._limits, waited=waited, seed=seed)
                    keys = np.array([*draws.samples], dtype=np.int64)
                    numbers = [keys[pack].tolist() for pack in packs]
                    taken = [draws.take(pack) for pack in numbers]
                    behind = draws.state_dict(besides=chain.from_iterable(numbers))
                    told = np.array([[*_numbers(samples), *draws.given(samples)] for samples in taken])
                    has_image = any(rank.has_image for rank in of_ranks)
                    batches = [self._pack(samples, filler, has_image) for samples in taken]
                except Exception as error:  # the other ranks wait for an answer
                    told = _failure(error)
            yield Window(position, batches, np.stack(self._heard(told)), oversized, numbers, behind)
            number, step = number + 1, step + aim.num_packs // self._micro_batches

    def _heard(self, told: Any) -> list[Any]:
        """What all ranks that draw tell; raises on all ranks where one of them tells a failure."""
        return [theirs for theirs in self._tell(told) if theirs is not None]

    def _filled(self, draws: Draws | None, step: int, filler: Sample | None, *, is_first: bool) -> list[_Full]:
        """Fill all ranks' buffers, further than usual where their samples are so short that they do not fill a step."""
        of_ranks = self._drawn(draws, partial(Draws.fill, step=step), filler, is_first)
        _refuse_same(of_ranks)
        while max(times := growth([rank.asked for rank in of_ranks], self._micro_batches)) > 1:
            size = 0 if draws is None else grown(len(draws.samples), times[self._rank])
            of_ranks = self._drawn(draws, partial(Draws.fill_up, num_samples=size), filler, is_first)
        return of_ranks

    def _drawn(
        self, draws: Draws | None, draw: Callable[[Draws], None], filler: Sample | None, is_first: bool
    ) -> list[_Full]:
        """Let all ranks draw; whoever is waited for is named on all of them, and not waited for without end."""
        failures: list[DataError] = []

        def drawing(draws: Draws) -> None:
            try:
                draw(draws)
            except Exception as error:
                failures.append(_failure(error))

        thread = threading.Thread(target=drawing, args=(draws,), daemon=True, name="omnibal-draws")
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
                return of_ranks
            self._name(waiting)

    def _count_oversized(self, of_ranks: list[_Full], before: int) -> int:
        """Samples over a limit so far; the first one is named, then the one that makes ten, a hundred, and so on."""
        oversized = before + sum(rank.num_oversized for rank in of_ranks)
        has_one_more_digit = oversized > 0 and (before == 0 or len(str(oversized)) > len(str(before)))
        if has_one_more_digit and self._draws is not None and self._rank == 0:
            warnings.warn(
                f"{_first_oversized(of_ranks)}; it {FATES[self._oversized]}, as all such ones ({oversized:,} so far)",
                stacklevel=2,
            )
        return oversized

    def _full(self, draws: Draws, filler: Sample | None, is_first: bool) -> _Full | DataError:
        try:
            samples = draws.samples.values()
            has_image = any(sample.loads[0] for sample in (*samples, filler) if sample is not None)
            first = [
                (sample.loads, _ids(sample.held)) for sample, _ in zip(samples, range(FIRST_SAMPLES), strict=False)
            ]
            counted = asked(draws.lengths(), self._limits, ended=draws.ended, bounded=draws.is_bounded)
            first_samples = repr(first) if is_first else ""
            return _Full(counted, has_image, first_samples, draws.num_oversized, draws.oversized)
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
    for rank, (_, _, first, *_) in enumerate(of_ranks):
        if len(first) > len("[]") and first in seen:
            raise DataError(
                f"ranks must draw samples of their own, got the same first ones on ranks {seen[first]} and {rank}; "
                "divide the source over the ranks"
            )
        seen[first] = rank


def _first_oversized(of_ranks: list[_Full]) -> str:
    return next((rank.oversized for rank in of_ranks if rank.oversized), "")


def _ids(held: Any) -> list[int]:
    return np.asarray(held["input_ids"]).ravel().tolist() if isinstance(held, Mapping) and "input_ids" in held else []
