"""StreamFeed: steps of packs of samples that arrive one by one; every rank packs what it drew, and ranks stay even."""

# No sample leaves the rank that drew it: only numbers travel. Ranks plan a window of steps at a time (``buffer_plan``):
#
#    every rank            fills its buffer, counts what it holds                   (a thread draws, collates, measures)
#    all ranks, gather     what buffers hold ──► the same aim on all ranks: packs of each rank, load of a pack
#    every rank            chooses samples, packs them
#    all ranks, gather     loads of all packs, or what failed on one rank: raised on all
#
# Ranks of the later stages of a pipeline draw nothing: they gather too, so they know the same steps and failures.

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import or_
from typing import Any, Final, NamedTuple

import numpy as np

from omnibal.cost import IntArray, Load
from omnibal.data.epoch import Step
from omnibal.data.packs import in_full, smallest_of_kinds
from omnibal.errors import ConfigError, DataError
from omnibal.feeds.buffer import BufferedSample, SampleBuffer, StreamSettings, taken_over
from omnibal.feeds.buffer_plan import FullBuffer, SharedFilling, agree, failure_of, plan_buffer
from omnibal.feeds.feed import ahead, step_in_words

VERSION: Final = "streams 2"
"""Form of saved positions; another one is refused."""
PER_PACK: Final = 6
"""Numbers about a pack: vision units, LLM tokens, their squares, target tokens, samples, sound units."""
FREE: Final = ("sources", "mixture", "oversized")
"""Settings that a resumed run may have otherwise than the one before."""
FATES: Final = {"alone": "gets a pack of its own", "drop": "is left out"}
"""What becomes of a sample that exceeds a limit on its own."""


@dataclass(frozen=True)
class Position:
    """Where a rank stands in its streams; all fields are plain values, since a checkpoint is read as data."""

    epoch: int = 0  # passes over the sources before this one
    window: int = 0  # number, in the pass, of the window that is trained or comes next
    first_step: int = 0  # of the window
    steps_done: int = 0  # of the window
    oversized: int = 0  # samples over a limit that all ranks met since the run began
    # Whether `buffer` is the state behind the window's fill, from which the same window is planned again. If not, the
    # next window is drawn for and planned anew.
    filled: bool = False
    waited: int = 0  # samples that the buffer held before the fill
    kinds: int = 0  # of all ranks' samples so far, by the bits of `SampleLengths.kinds`
    fillers: Mapping[int, tuple[Any, ...]] = field(default_factory=dict)  # the smallest of kinds that `buffer` lacks
    buffer: Mapping[str, Any] | None = None  # None where nothing of the pass is drawn yet
    packs: Sequence[Sequence[int]] = ()  # numbers in the buffer of the samples of each pack of the window
    division: Sequence[int] | None = None  # numbers of ranks that shared this pass, run after run, if they changed

    def replanned(self, micro_batches: int) -> "Position":
        """The position from which the samples that are not trained yet are planned anew, with what is drawn next."""
        if not self.filled:
            return self
        buffer = self.buffer
        if buffer is not None:
            trained = {number for pack in self.packs[: self.steps_done * micro_batches] for number in pack}
            held = [number for number in buffer["held"] if number not in trained]
            buffer = {**buffer, "held": held, "ended": False}
        step = self.first_step + self.steps_done
        # A source may be gone with all samples of a kind.
        begun = replace(self, window=self.window + 1, first_step=step, steps_done=0, kinds=0)
        return replace(begun, filled=False, buffer=buffer, packs=())


class PlannedWindow(NamedTuple):
    """Steps that all ranks planned together."""

    position: Position
    """This rank's position before the first of the steps."""
    batches: list[Any]
    """This rank's packs."""
    loads: IntArray
    """Packs of all ranks that draw, (ranks, packs, PER_PACK + sources), without fillers: behind the numbers about a
    pack stands what each source has given to it."""


class StreamFeed(ABC):
    """The steps of one rank from sources that are drawn one by one.

    Args:
        rank: Number among the ranks that draw, which are the first of the ranks that gather.
        draws: Whether this process draws; if not, it has no packs.
    """

    fills = True
    """Whether packs need fillers that were drawn, which are then kept in positions."""

    def __init__(
        self, sources: Mapping[str, Any], settings: StreamSettings, *, rank: int, num_ranks: int, draws: bool = True
    ) -> None:
        self.settings, self.limits, self.micro_batches = settings, settings.limits, settings.micro_batches
        self.num_replicas, self.rank, self._draws = num_ranks, rank, draws
        self.filling = SharedFilling(self.gather, settings, rank)
        self._new_buffer = partial(SampleBuffer, sources, self.read, settings, rank=rank, part=self.part)
        names = self._new_buffer(division=[num_ranks]).names  # refuses what is wrong with the arguments
        limits = settings.limits.vision_units, settings.limits.llm_tokens, settings.limits.sound_units
        self.made_from: dict[str, Any] = {
            "sources": names,
            "mixture": None if settings.mixture is None else settings.mixture.record(names),
            "oversized": settings.oversized,
            "limits": [most for most in limits if most is not None],
            "buffer": settings.buffer,
            "seed": settings.seed,
            "num_ranks": num_ranks,
            "micro_batches": settings.micro_batches,
        }
        self.position = Position()  # behind the last step that `step` gave
        self.steps_done = 0
        self._steps: Iterator[tuple[Step, list[Any], Position]] | None = None

    @abstractmethod
    def read(self, item: Any) -> BufferedSample:
        """A sample as the buffer holds it; called in the thread that draws."""

    @abstractmethod
    def pack(self, samples: list[BufferedSample], smallest: Mapping[int, BufferedSample], wanted: int) -> Any:
        """What is trained of a pack's samples; ``smallest`` are drawn ones by kinds, ``wanted`` what it must have."""

    @abstractmethod
    def gather(self, told: Any) -> list[Any]:
        """What all ranks pass, by rank; raises on all ranks if one passes an exception."""

    def part(self, name: str, items: Any, rank: int, num_ranks: int) -> Any:
        """What a rank reads of a source without an index; by default sources were divided over the ranks before."""
        return items

    def received(self, window: PlannedWindow) -> list[Any]:
        """This rank's packs of a window; called in the thread that plans."""
        return window.batches

    def step(self) -> tuple[Step, list[Any]] | None:
        """The next step and this rank's packs of it; None, once, at the end of a pass. Errors reach all ranks."""
        if self._steps is None:
            self._steps = self._following(self.position)
        try:
            found = next(self._steps, None)
        except Exception:  # a generator that has raised would say that the pass has ended
            self.go_to(self.position)
            raise
        if found is None:
            self.go_to(Position(self.position.epoch + 1, oversized=self.position.oversized))
            return None
        step, batches, self.position = found
        self.steps_done += 1
        return step, batches

    def go_to(self, position: Position) -> None:
        self.position, self._steps = position, None

    def steps_left(self, _epochs: int | None = None) -> int:
        assert self.settings.num_steps is not None, "a single pass has as many steps as its samples make"
        return self.settings.num_steps - self.steps_done

    def state_dict(self) -> dict[str, Any]:
        """This rank's position behind the last step that ``step`` gave, and what packs depend on."""
        return {"version": VERSION, "made_from": self.made_from, "position": dict(vars(self.position))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from this rank's position in a run with as many ranks; rank 0 warns of what changes."""
        refuse_other_version(state)
        self.go_on(state["made_from"], Position(**state["position"]), tells=self.rank == 0)

    def go_on(self, before: Mapping[str, Any], position: Position, *, tells: bool) -> None:
        """Go on from a position that was taken under the settings ``before``."""
        for name, value in self.made_from.items():
            if name not in FREE and before.get(name) != value:
                raise ConfigError(
                    f"{name} must be that of the state of the streams, {before.get(name)!r:.200}, got {value!r:.200}; "
                    "every rank goes on in its own sources and buffer"
                )
        if tells:
            for text in _changes(self.made_from, before, position.buffer):
                warnings.warn(text, stacklevel=2)
        if any(self.made_from[name] != before.get(name) for name in FREE):
            position = position.replanned(self.micro_batches)
        self.go_to(position)

    def summary(self) -> dict[str, str]:
        names, size = ", ".join(self.made_from["sources"]), self.settings.buffer
        return {
            "samples": f"drawn from {names}; {size} of each replica planned at a time",
            "a step": step_in_words(self.num_replicas, self.micro_batches),
        }

    def _following(self, begun: Position) -> Iterator[tuple[Step, list[Any], Position]]:
        """Steps from a position on, this rank's packs, and the position behind each step."""
        size = self.micro_batches
        for number, window in enumerate(ahead(partial(self._windows_of_run, begun), 1)):
            # The first window may be one that was saved in its middle.
            for done in range(begun.steps_done if number == 0 else 0, window.loads.shape[1] // size):
                part = slice(done * size, (done + 1) * size)
                # A pack is let go when it is handed on: a window of pixels is large.
                batches, window.batches[part] = window.batches[part], [None] * len(window.batches[part])
                position = replace(window.position, steps_done=done + 1)
                yield self._step_of(window.position, done, window.loads[:, part]), batches, position

    def _step_of(self, window: Position, done: int, loads: IntArray) -> Step:
        index, mixture = window.first_step + done, self.settings.mixture
        vision, tokens, squares, targets, samples, sounds = np.moveaxis(loads[..., :PER_PACK], -1, 0)
        given = dict(zip(self.made_from["sources"], loads[..., PER_PACK:].sum(axis=(0, 1)).tolist(), strict=True))
        return Step(
            window.epoch,
            index,
            int(samples.sum()),
            Load(vision, tokens, squares, sound_units=sounds),
            {} if mixture is None else mixture.shares_of_step(index, given),
            {self.settings.oversized: window.oversized},
            int(targets.sum()),
        )

    def _windows_of_run(self, begun: Position) -> Iterator[PlannedWindow]:
        """Windows of one pass, or of pass after pass to the window of the run's last step."""
        steps, oversized, num_steps = self.steps_done - begun.steps_done, begun.oversized, self.settings.num_steps
        while True:
            for window in self._windows(begun):
                oversized = window.position.oversized
                yield window._replace(batches=self.received(window))
                steps += window.loads.shape[1] // self.micro_batches
                if num_steps is not None and steps >= num_steps:
                    return
            if num_steps is None:
                return
            begun = Position(begun.epoch + 1, oversized=oversized)

    def _windows(self, begun: Position) -> Iterator[PlannedWindow]:
        """Windows from a position on, to the end of the pass."""
        # Behind the pass in which ranks took over from others, sources are divided over those that there are.
        division = begun.division or [self.num_replicas]
        buffer = self._new_buffer(first_pass=begun.epoch, division=division) if self._draws else None
        if buffer is not None and begun.buffer is not None:
            buffer.load_state_dict(begun.buffer)
        fillers = {of: BufferedSample(*sample) for of, sample in begun.fillers.items()}
        at = replace(begun, steps_done=0, kinds=reduce(or_, fillers, begun.kinds), fillers={}, buffer=None, packs=())
        of_ranks: list[FullBuffer] = []
        if at.filled or at.window > 0:  # on all ranks alike
            of_ranks = self.filling.restore(buffer, at.kinds)
        while True:
            if not at.filled:
                waited = 0 if buffer is None else len(buffer.samples)
                of_ranks = self.filling.fill(buffer, at.kinds, at.first_step, is_first=at.window == 0)
                # All ranks count alike, as all have heard the same: so they end together, too.
                oversized = self._count_oversized(of_ranks, at.oversized)
                if all(rank.load.ended and not rank.load.packs for rank in of_ranks):
                    if at.window == 0:  # all were left out, or there would be a window
                        first = _first_oversized(of_ranks)
                        raise DataError(f"limits must allow a sample of the sources, got none; {first}")
                    return
                at = replace(at, filled=True, waited=waited, oversized=oversized)
            # A kind that some rank has met is in all packs of all ranks from now on: hosts gather an encoder's weights
            # or reduce its gradients together.
            at = replace(at, kinds=reduce(or_, (rank.kinds for rank in of_ranks), at.kinds))
            aim = agree([rank.load for rank in of_ranks], self.micro_batches)
            position, batches = at, list[Any]()
            told: Any = None
            if buffer is not None:
                try:
                    position, taken = self._planned(buffer, at, aim, fillers)
                    told = np.array([[*_numbers(samples), *buffer.given(samples)] for samples in taken])
                    batches = [self.pack(samples, fillers, at.kinds) for samples in taken]
                except Exception as error:  # the other ranks wait for an answer
                    told = failure_of(error)
            yield PlannedWindow(position, batches, np.stack(self.filling.heard(told)))
            step = at.first_step + aim.num_packs // self.micro_batches
            at = replace(at, window=at.window + 1, first_step=step, filled=False)

    def _planned(
        self, buffer: SampleBuffer, at: Position, aim: Any, fillers: dict[int, BufferedSample]
    ) -> tuple[Position, list[list[BufferedSample]]]:
        """The position before a window, and the samples of its packs, which are taken from the full buffer."""
        # The position is taken while the buffer is full: from it, this very window can be planned again.
        state, lengths, kept = buffer.state_dict(), buffer.lengths(), dict[int, tuple[Any, ...]]()
        if self.fills:
            held = [*buffer.samples.values()]
            own = {of: held[index] for of, index in smallest_of_kinds(lengths).items()}
            kept = {of: tuple(fillers[of]) for of in fillers.keys() - own.keys()}
            fillers |= own
        seed = [self.settings.seed, at.epoch, at.window, self.rank]
        keys = np.array([*buffer.samples], dtype=np.int64)
        planned = plan_buffer(lengths, aim, self.limits, waited=at.waited, seed=seed)
        packs = [keys[pack].tolist() for pack in planned]
        return replace(at, fillers=kept, buffer=state, packs=packs), [buffer.take(pack) for pack in packs]

    def _count_oversized(self, of_ranks: list[FullBuffer], before: int) -> int:
        """Samples over a limit so far; the first one is named, then the one that makes ten, a hundred, and so on."""
        oversized = before + sum(rank.num_oversized for rank in of_ranks)
        has_one_more_digit = oversized > 0 and (before == 0 or len(str(oversized)) > len(str(before)))
        if has_one_more_digit and self._draws and self.rank == 0:
            fate = FATES[self.settings.oversized]
            told = f"{_first_oversized(of_ranks)}; it {fate}, as all such ones ({oversized:,} so far)"
            warnings.warn(told, stacklevel=2)
        return oversized


def refuse_other_version(state: Mapping[str, Any]) -> None:
    if (found := state.get("version")) != VERSION:
        raise ConfigError(
            f"the state of the streams must be of version {VERSION!r}, got {found!r}; finish the run with the version "
            "of omnibal that saved it, or begin the streams anew"
        )


def of_other_ranks(positions: Sequence[Position], before: Mapping[str, Any], rank: int, num_ranks: int) -> Position:
    """The position of a rank that goes on for ranks of another number, or with other micro-batches.

    Args:
        positions: The positions of the earlier run's ranks, in the order of these ranks.
        before: What the packs of the earlier run depended on (its ``made_from``).
    """
    found = [position.replanned(before["micro_batches"]) for position in positions]
    if len(found) == num_ranks:
        return found[rank]
    buffers = [position.buffer for position in found if position.buffer is not None]
    if not buffers:  # nothing of the pass is drawn yet
        return found[0]
    division = [*(found[0].division or [len(found)]), num_ranks]
    return replace(found[0], division=division, fillers={}, buffer=taken_over(buffers, rank, num_ranks))


def _changes(own: Mapping[str, Any], before: Mapping[str, Any], buffer: Mapping[str, Any] | None) -> Iterator[str]:
    """What goes on otherwise than before, and what is read again because it has no state, in words."""
    names, names_before = own["sources"], before["sources"]
    for name in names:
        if name not in names_before:
            yield f"source {name!r} is new and begins at its start"
    for name in names_before:
        if name not in names:
            yield f"source {name!r} is gone; what was drawn of it is left out"
    if names == names_before:
        for name in FREE:
            if own[name] != before.get(name, own[name]):
                yield f"{name} is another one from here on"
    stood = {} if buffer is None else buffer["sources"]
    again = {name: at["drawn"] for name, at in stood.items() if name in names and at["own"] is None and at["drawn"]}
    if again:
        counts = ", ".join(f"{count:,} of {name!r}" for name, count in again.items())
        yield f"sources without state_dict are read again from the start of their pass: {counts}"


def _numbers(samples: Sequence[BufferedSample]) -> tuple[int, ...]:
    """The numbers of ``PER_PACK``."""
    loads = np.array([in_full(sample.loads) for sample in samples], dtype=np.int64).reshape(-1, 5)
    vision, tokens, targets, _, sounds = loads.sum(axis=0)
    return vision, tokens, (loads[:, 1] ** 2).sum(), targets, len(samples), sounds


def _first_oversized(of_ranks: list[FullBuffer]) -> str:
    return next((rank.first_oversized for rank in of_ranks if rank.first_oversized), "")
