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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any, Final, NamedTuple

import numpy as np

from omnibal.cost import IntArray, Load
from omnibal.data.kinds import in_full, smallest_of_kinds
from omnibal.data.limits import PackLimits
from omnibal.data.mixture import Mixture
from omnibal.data.packing_spec import Oversized
from omnibal.errors import ConfigError, DataError
from omnibal.feeds.buffer import BufferedSample, SampleBuffer, taken_over
from omnibal.feeds.buffer_plan import agree, plan_buffer
from omnibal.feeds.feed import Step, ahead, step_in_words
from omnibal.feeds.filling import FullBuffer, SharedFilling, failure_of
from omnibal.feeds.sources import as_it_is

PER_PACK: Final = 6
"""Numbers about a pack: vision units, LLM tokens, their squares, target tokens, samples, sound units."""
FREE: Final = ("sources", "mixture", "oversized")
"""Settings that a resumed run may have otherwise than the one before."""
FATES: Final = {"alone": "gets a pack of its own", "drop": "is left out"}
"""What becomes of a sample that exceeds a limit on its own."""
Packer = Callable[[list[BufferedSample], Mapping[int, BufferedSample], int], Any]
"""From a pack's samples, the smallest ones that were drawn by their kinds, and the kinds that the pack must have, to
what is trained."""


class PlannedWindow(NamedTuple):
    """Steps that all ranks planned together."""

    position: Mapping[str, Any]
    """This rank's position before the first of the steps."""
    batches: list[Any]
    """This rank's packs."""
    loads: IntArray
    """Packs of all ranks that draw, (ranks, packs, PER_PACK + sources), without fillers: behind the numbers about a
    pack stands what each source has given to it."""


class StreamFeed:
    """The steps of one rank from sources that are drawn one by one.

    Args:
        gather: Returns what all ranks pass, by rank, and raises on all ranks if one passes an exception.
        part: From a source's name, the source, a rank and the number of ranks to what the rank reads; what is read
            by index is divided without it.
        rank: Number among the ranks that draw, which are the first of the ranks that gather.
        draws: Whether this process draws; if not, it has no packs.
        fills: Whether packs need fillers that were drawn, which are then kept in positions.
        num_steps: Steps of the run; sources that end are read again. None for a single pass over the sources.
        warn_seconds: After how long all ranks name a source that they wait for.
        wait_seconds: After how long without a sample the run ends on all ranks.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        limits: PackLimits,
        *,
        read: Callable[[Any], BufferedSample],
        pack: Packer,
        gather: Callable[[Any], list[Any]],
        rank: int,
        num_ranks: int,
        part: Callable[[str, Any, int, int], Any] = as_it_is,
        micro_batches: int,
        buffer: int,
        buffer_bytes: int | None = None,
        mixture: Mixture | None = None,
        seed: int = 0,
        oversized: Oversized = "alone",
        draws: bool = True,
        fills: bool = True,
        num_steps: int | None = None,
        warn_seconds: float = 60,
        wait_seconds: float = 1800,
    ) -> None:
        self.limits, self.num_replicas, self.rank, self.micro_batches = limits, num_ranks, rank, micro_batches
        self._pack, self._draws, self._fills = pack, draws, fills
        self._mixture, self._seed, self._oversized, self._num_steps = mixture, seed, oversized, num_steps
        self.filling = SharedFilling(
            gather,
            limits,
            rank=rank,
            micro_batches=micro_batches,
            warn_seconds=warn_seconds,
            wait_seconds=wait_seconds,
        )
        self._new_buffer = partial(
            SampleBuffer,
            sources,
            read,
            limits=limits,
            oversized=oversized,
            most_samples=buffer,
            most_bytes=buffer_bytes,
            mixture=mixture,
            rank=rank,
            part=part,
            seed=seed,
        )
        names = self._new_buffer(division=[num_ranks]).names  # refuses what is wrong with the arguments
        self.made_from: dict[str, Any] = {
            "sources": names,
            "mixture": None if mixture is None else mixture.record(names),
            "oversized": oversized,
            "limits": [limits.vision_units, limits.llm_tokens]
            + ([] if limits.sound_units is None else [limits.sound_units]),
            "buffer": buffer,
            "seed": seed,
            "num_ranks": num_ranks,
            "micro_batches": micro_batches,
        }
        self.position: Mapping[str, Any] = _beginning(0, 0)  # behind the last step that `step` gave
        self.steps_done = 0
        self._steps: Iterator[tuple[Step, list[Any], Mapping[str, Any]]] | None = None

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
            self.go_to(_beginning(self.position["epoch"] + 1, self.position["oversized"]))
            return None
        step, batches, self.position = found
        self.steps_done += 1
        return step, batches

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Let the next step be the one behind an earlier ``position`` of this feed; what was drawn ahead is let go."""
        self.position, self._steps = position, None

    def steps_left(self, _epochs: int | None = None) -> int:
        """Steps to the end of the run."""
        assert self._num_steps is not None, "a single pass has as many steps as its samples make"
        return self._num_steps - self.steps_done

    def state_dict(self) -> dict[str, Any]:
        """This rank's position behind the last step that ``step`` gave, and what packs depend on."""
        return {"made_from": self.made_from, **self.position}

    def load_state_dict(self, state: Mapping[str, Any], *, tells: bool = True) -> None:
        """Go on from this rank's position in a run with as many ranks; a rank that ``tells`` warns of what changes."""
        before, position = state["made_from"], {name: value for name, value in state.items() if name != "made_from"}
        if "filled" not in position:
            raise ConfigError(
                "the state of the streams must be of this version of omnibal, got that of an earlier one; begin them "
                "anew, or finish the run with the earlier one"
            )
        if "filler" in position:  # of a version that knew images alone
            old = position.pop("filler")
            position |= {"kinds": 0, "fillers": {} if old is None else {int(old.loads[0] > 0): tuple(old)}}
        for name, value in self.made_from.items():
            if name not in FREE and before.get(name) != value:
                raise ConfigError(
                    f"{name} must be that of the state of the streams, {before.get(name)!r:.200}, got {value!r:.200}; "
                    "every rank goes on in its own sources and buffer"
                )
        if tells:
            for text in _changes(self.made_from, before, position["buffer"]):
                warnings.warn(text, stacklevel=2)
        if any(self.made_from[name] != before.get(name) for name in FREE):
            position = replanned(position, self.micro_batches)
        self.go_to(position)

    def summary(self) -> dict[str, str]:
        """Sources, buffer, and packs of a step."""
        names, size = ", ".join(self.made_from["sources"]), self.made_from["buffer"]
        return {
            "samples": f"drawn from {names}; {size} of each replica planned at a time",
            "a step": step_in_words(self.num_replicas, self.micro_batches),
        }

    def received(self, window: PlannedWindow) -> list[Any]:
        """This rank's packs of a window; called in the thread that plans."""
        return window.batches

    def _following(self, begun: Mapping[str, Any]) -> Iterator[tuple[Step, list[Any], Mapping[str, Any]]]:
        """Steps from a position on, this rank's packs, and the position behind each step."""
        size = self.micro_batches
        for number, window in enumerate(ahead(partial(self._windows_of_run, begun), 1)):
            # The first window may be one that was saved in its middle.
            for done in range(begun["steps_done"] if number == 0 else 0, window.loads.shape[1] // size):
                part = slice(done * size, (done + 1) * size)
                # A pack is let go when it is handed on: a window of pixels is large.
                batches, window.batches[part] = window.batches[part], [None] * len(window.batches[part])
                yield self._step_of(window, done), batches, {**window.position, "steps_done": done + 1}

    def _step_of(self, window: PlannedWindow, done: int) -> Step:
        position = window.position
        index = position["first_step"] + done
        loads = window.loads[:, done * self.micro_batches : (done + 1) * self.micro_batches]
        vision, tokens, squares, targets, samples, sounds = np.moveaxis(loads[..., :PER_PACK], -1, 0)
        names, given = self.made_from["sources"], loads[..., PER_PACK:].sum(axis=(0, 1)).tolist()
        return Step(
            position["epoch"],
            index,
            int(samples.sum()),
            Load(vision, tokens, squares, sound_units=sounds),
            {} if self._mixture is None else self._mixture.shares_of_step(index, dict(zip(names, given, strict=True))),
            {self._oversized: position["oversized"]},
            int(targets.sum()),
        )

    def _windows_of_run(self, begun: Mapping[str, Any]) -> Iterator[PlannedWindow]:
        """Windows of one pass, or of pass after pass to the window of the run's last step."""
        steps, oversized = self.steps_done - begun["steps_done"], begun["oversized"]
        while True:
            for window in self._windows(begun):
                oversized = window.position["oversized"]
                yield window._replace(batches=self.received(window))
                steps += window.loads.shape[1] // self.micro_batches
                if self._num_steps is not None and steps >= self._num_steps:
                    return
            if self._num_steps is None:
                return
            begun = _beginning(begun["epoch"] + 1, oversized)

    def _windows(self, begun: Mapping[str, Any]) -> Iterator[PlannedWindow]:
        """Windows from a position on, to the end of the pass."""
        # Behind the pass in which ranks took over from others, sources are divided over those that there are.
        division = begun.get("division", [self.num_replicas])
        buffer = self._new_buffer(first_pass=begun["epoch"], division=division) if self._draws else None
        if buffer is not None and begun["buffer"] is not None:
            buffer.load_state_dict(begun["buffer"])
        number, step, oversized = begun["window"], begun["first_step"], begun["oversized"]
        filled, waited = begun["filled"], begun["waited"]
        fillers = {of: BufferedSample(*sample) for of, sample in begun["fillers"].items()}
        kinds = reduce(or_, fillers, begun["kinds"])
        of_ranks: list[FullBuffer] = []
        if filled or number > 0:  # on all ranks alike
            of_ranks = self.filling.restore(buffer, kinds)
        while True:
            if not filled:
                waited = 0 if buffer is None else len(buffer.samples)
                of_ranks = self.filling.fill(buffer, kinds, step, is_first=number == 0)
                # All ranks count alike, as all have heard the same: so they end together, too.
                oversized = self._count_oversized(of_ranks, oversized)
                if all(rank.load.ended and not rank.load.packs for rank in of_ranks):
                    if number == 0:  # all were left out, or there would be a window
                        first = _first_oversized(of_ranks)
                        raise DataError(f"limits must allow a sample of the sources, got none; {first}")
                    return
            filled = False
            # A kind that some rank has met is in all packs of all ranks from now on: hosts gather an encoder's weights
            # or reduce its gradients together.
            kinds = reduce(or_, (rank.kinds for rank in of_ranks), kinds)
            position = {**begun, "window": number, "first_step": step, "steps_done": 0, "oversized": oversized}
            position |= {"filled": True, "waited": waited, "kinds": kinds, "fillers": {}, "buffer": None, "packs": []}
            aim = agree([rank.load for rank in of_ranks], self.micro_batches)
            # The position is taken while the buffer is full: from it, this very window can be planned again.
            batches: list[Any] = []
            told: Any = None
            if buffer is not None:
                try:
                    position["buffer"], lengths = buffer.state_dict(), buffer.lengths()
                    if self._fills:
                        held = [*buffer.samples.values()]
                        own = {of: held[place] for of, place in smallest_of_kinds(lengths).items()}
                        # As data: a checkpoint is read without making objects of a class.
                        position["fillers"] = {of: tuple(fillers[of]) for of in fillers.keys() - own.keys()}
                        fillers |= own
                    seed = [self._seed, begun["epoch"], number, self.rank]
                    packs = plan_buffer(lengths, aim, self.limits, waited=waited, seed=seed)
                    keys = np.array([*buffer.samples], dtype=np.int64)
                    position["packs"] = [keys[pack].tolist() for pack in packs]
                    taken = [buffer.take(pack) for pack in position["packs"]]
                    told = np.array([[*_numbers(samples), *buffer.given(samples)] for samples in taken])
                    batches = [self._pack(samples, fillers, kinds) for samples in taken]
                except Exception as error:  # the other ranks wait for an answer
                    told = failure_of(error)
            yield PlannedWindow(position, batches, np.stack(self.filling.heard(told)))
            number, step = number + 1, step + aim.num_packs // self.micro_batches

    def _count_oversized(self, of_ranks: list[FullBuffer], before: int) -> int:
        """Samples over a limit so far; the first one is named, then the one that makes ten, a hundred, and so on."""
        oversized = before + sum(rank.num_oversized for rank in of_ranks)
        has_one_more_digit = oversized > 0 and (before == 0 or len(str(oversized)) > len(str(before)))
        if has_one_more_digit and self._draws and self.rank == 0:
            warnings.warn(
                f"{_first_oversized(of_ranks)}; it {FATES[self._oversized]}, as all such ones ({oversized:,} so far)",
                stacklevel=2,
            )
        return oversized


# A position, this rank's own, in JSON values but for `fillers` (the smallest samples of kinds that the buffer lacks):
# the window that is trained (its number, the pass and the first step it belongs to, its steps that are done); `filled`
# says that `buffer` is the state behind the window's fill, from which the same window is planned again, and `packs`
# which samples its packs took. Where it is not filled, the next window is drawn for and planned anew. `kinds` are those
# of all ranks' samples so far, by the bits of `SampleLengths.kinds`.
def _beginning(epoch: int, oversized: int) -> dict[str, Any]:
    """The position before the first window of a pass over the sources."""
    begun = {"epoch": epoch, "window": 0, "first_step": 0, "steps_done": 0, "oversized": oversized}
    return begun | {"filled": False, "waited": 0, "kinds": 0, "fillers": {}, "buffer": None, "packs": []}


def replanned(position: Mapping[str, Any], micro_batches: int) -> dict[str, Any]:
    """The position from which a window's samples that are not trained yet are planned anew, with what is drawn next."""
    if not position["filled"]:
        return {**position}
    buffer, done = position["buffer"], position["steps_done"]
    if buffer is not None:
        trained = {number for pack in position["packs"][: done * micro_batches] for number in pack}
        held = [number for number in buffer["held"] if number not in trained]
        buffer = {**buffer, "held": held, "ended": False}
    # A source may be gone with all samples of a kind.
    begun = {"window": position["window"] + 1, "first_step": position["first_step"] + done, "steps_done": 0, "kinds": 0}
    return {**position, **begun, "filled": False, "buffer": buffer, "packs": []}


def of_other_ranks(
    positions: Sequence[Mapping[str, Any]], before: Mapping[str, Any], rank: int, num_ranks: int
) -> dict[str, Any]:
    """The position of a rank that goes on for ranks of another number, or with other micro-batches.

    Args:
        positions: The positions of the earlier run's ranks, in the order of these ranks.
        before: What the packs of the earlier run depended on (its ``made_from``).
    """
    found = [replanned(position, before["micro_batches"]) for position in positions]
    if len(found) == num_ranks:
        return found[rank]
    buffers, division = [each["buffer"] for each in found], found[0].get("division", [len(found)])
    if buffers[0] is None:  # nothing of the pass is drawn yet
        return found[0]
    position = {**found[0], "division": [*division, num_ranks], "fillers": {}}
    return {**position, "buffer": taken_over(buffers, rank, num_ranks)}


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
