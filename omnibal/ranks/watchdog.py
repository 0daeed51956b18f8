"""A watchdog: a rank at which nothing moves any more says where it stands and for whom it waits, and ends later.

Each rank notes what it does in `WORK`. Two threads look at the note. The one of `omnibal.ranks.failures`, which has a
connection to the store, writes it there as a beat every few seconds and reads the beats of the others while this rank
stands still. The thread of `Watchdog` never touches the store, which may be gone with its rank: it prints and ends.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from time import monotonic, sleep
from typing import Final, NamedTuple

from torch.distributed.distributed_c10d import Store

STALLED_STATUS: Final = 75  # EX_TEMPFAIL of sysexits.h: the same command may succeed later
ENDS_AFTER: Final = 3  # times as long as until the first word
BEATS: Final = 10  # in the time until the first word
LONGEST_BEAT_SECONDS: Final = 10.0
BEAT: Final = "omnibal/beat/{}"


class Note(NamedTuple):
    """What a process does since a time of its own clock."""

    doing: str
    step: int | None
    micro_batch: int | None
    waits: bool  # for other ranks
    is_long: bool  # what may take hours: it ends a run only where a rank does not answer
    since: float

    def text(self, told: Callable[[int], str]) -> str:
        """The note in words; ``told`` says what is behind the number of a micro-batch."""
        number = self.micro_batch
        where = "" if self.step is None else f"step {self.step}: "
        return f"{where}{self.doing}" + ("" if number is None else f" of micro-batch {number}{told(number)}")


class CurrentWork:
    """What this process does now; its main thread writes, other threads read."""

    note: Note | None = None
    step: int | None = None

    def at(self, doing: str, micro_batch: int | None = None, *, waits: bool = False, is_long: bool = False) -> None:
        self.note = Note(doing, self.step, micro_batch, waits, is_long, monotonic())

    @contextmanager
    def within(self, step: int | None = None) -> Iterator[None]:
        """Notes inside belong to a step; behind the block this process is at nothing that others wait for."""
        self.step = step
        try:
            yield
        finally:
            self.step = self.note = None


WORK: Final = CurrentWork()


class Beat(NamedTuple):
    number: int
    note: Note | None
    since: float  # when this process saw a new number


class Watchdog:
    """Watches the notes of this rank, and of the others while this one stands still.

    A rank that stands still for so many ``seconds`` says so; after ``ENDS_AFTER`` times as long it ends. ``told`` has
    the samples of a micro-batch of a rank in this rank's step, in words: ``", samples 3, 7"``, or ``""``.
    """

    def __init__(self, rank: int, names: Sequence[str], told: Callable[[int, int], str], seconds: float) -> None:
        self._rank, self._names, self._told, self._seconds = rank, names, told, seconds
        self.beat_seconds = min(LONGEST_BEAT_SECONDS, seconds / BEATS)
        self._beats: dict[int, Beat] = {}
        self._count, self._sent = 0, 0.0
        self._answered = monotonic()  # when the store last did, which is asked between two visits, too
        self._spoken_of: Note | None = None
        self.is_closed = False
        Thread(target=self._look, daemon=True, name="omnibal-watchdog").start()

    def visit(self, store: Store) -> None:
        """Leave this rank's beat in the store; while the rank stands still, read those of the others."""
        now, note = monotonic(), WORK.note
        self._answered = now
        if now - self._sent < self.beat_seconds:
            return
        self._count, self._sent = self._count + 1, now
        store.set(BEAT.format(self._rank), json.dumps([self._count, note and [*note[:-1], now - note.since]]))
        if note is not None and now - note.since > self._seconds / 2:
            others = [rank for rank in range(len(self._names)) if rank != self._rank]
            keys = [BEAT.format(rank) for rank in others]
            for rank, key in zip(others, keys, strict=True):
                number, beat = json.loads(store.get(key)) if store.check([key]) else (None, None)
                if number is not None and (rank not in self._beats or self._beats[rank].number != number):
                    heard = monotonic()
                    self._beats[rank] = Beat(number, beat and Note(*[*beat[:-1], heard - beat[-1]]), heard)

    def _look(self) -> None:
        while not self.is_closed:
            sleep(self.beat_seconds)
            note, now = WORK.note, monotonic()
            if note is None or now - note.since < self._seconds:
                continue
            if note is not self._spoken_of:
                self._spoken_of = note
                self._say(
                    f"{self._standing(note, now)}. {self._cause(now)}. Ranks end with status {STALLED_STATUS} after "
                    f"{ENDS_AFTER * self._seconds:g} s of this ({ENDS_AFTER} times omnibal.run.watchdog_seconds)"
                )
            elif now - note.since > ENDS_AFTER * self._seconds and self._may_end(note, now):
                self._say(f"{self._standing(note, now)}, and ends with status {STALLED_STATUS}. {self._cause(now)}")
                os._exit(STALLED_STATUS)  # an exchange that waits can neither be finished nor interrupted

    def _may_end(self, note: Note, now: float) -> bool:
        """Whether nothing can be hoped for: not while a rank that answers is between steps, or at what may be long."""
        if self._silent(now, self._seconds):
            return True
        notes = [note, *(beat.note for beat in self._beats.values())]
        return all(each is not None and not each.is_long for each in notes)

    def _standing(self, note: Note, now: float) -> str:
        stands = "waits for others" if note.waits else "has not moved on"
        text = note.text(lambda micro_batch: self._told(self._rank, micro_batch))
        return f"{self._names[self._rank]} {stands} since {now - note.since:.0f} s in {text}"

    def _cause(self, now: float) -> str:
        """The rank that holds up the others: one that is silent, else one that computes, else the longest to wait."""
        silent = self._silent(now, self._seconds / 4)
        if silent:
            rank = silent[0]
            others = f", nor do {len(silent) - 1} other ranks" if len(silent) > 1 else ""
            beat = self._beats.get(rank)
            known = "" if beat is None or beat.note is None else f"; it was last seen in {self._of_other(rank, beat)}"
            return f"{self._names[rank]} does not answer{others}: it is stopped, or its host is gone{known}"
        between = [rank for rank, beat in self._beats.items() if beat.note is None]
        if between:
            return f"{self._names[between[0]]} is not in a step"
        unheard = {*range(len(self._names))} - {self._rank, *self._beats}
        if unheard:
            return f"{self._names[min(unheard)]} has left no word yet"
        noted = [(beat.note, rank) for rank, beat in self._beats.items() if beat.note is not None]
        if not noted:
            return "There is no other rank"
        note, rank = min(noted, key=lambda found: (found[0].waits, found[0].since))
        kind = "waits, too, longest of the others" if note.waits else "has not moved on"
        where = self._of_other(rank, self._beats[rank])
        return f"{self._names[rank]} {kind}, since {now - note.since:.0f} s in {where}"

    def _silent(self, now: float, seconds: float) -> list[int]:
        """Ranks without a new beat for so long; the holder of the store, where that does not answer."""
        silent = [rank for rank, beat in self._beats.items() if now - beat.since > seconds]
        if now - self._answered > seconds:
            return [0]  # the store of a launch lives in this process, or in a launcher beside it
        return sorted(silent, key=lambda rank: self._beats[rank].since)

    def _of_other(self, rank: int, beat: Beat) -> str:
        note = beat.note
        assert note is not None, "callers have looked"
        same = WORK.note is not None and note.step == WORK.note.step
        return note.text(lambda micro_batch: self._told(rank, micro_batch) if same else "")

    def _say(self, text: str) -> None:
        print(f"omnibal: {text}", file=sys.stderr, flush=True)
