"""The samples that a rank has drawn from its sources and not trained yet, and how a resumed run comes to them again."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packing_spec import Mixture, Oversized
from omnibal.data.packs import Loads, in_full
from omnibal.errors import ConfigError, DataError, integer, said
from omnibal.feeds.sources import END, Source, already_divided, divided, lane_state, lanes_of, mark_of

BARREN: Final = 1024
"""Samples of a source, one after another, that may lack what shares count, or exceed a limit and be dropped."""


class BufferedSample(NamedTuple):
    held: Any
    """What the collator lays into packs."""
    loads: Loads
    source: int = 0
    """Index of its source."""


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """What packs of streams depend on besides the sources, and how long a run takes and waits."""

    limits: PackLimits
    micro_batches: int
    buffer: int  # samples that a rank plans at a time
    buffer_bytes: int | None = None
    mixture: Mixture | None = None
    seed: int = 0
    oversized: Oversized = "alone"
    num_steps: int | None = None  # of the run; sources that end are read again. None: a single pass over the sources
    warn_seconds: float = 60  # after these all ranks name a source that they wait for
    wait_seconds: float = 1800  # after these without a sample the run ends on all ranks


class _Fill(NamedTuple):
    """The moment before the buffer was filled."""

    drawn: int
    """Samples drawn before."""
    sources: dict[str, Any]
    """Position of each source, by name."""


class SampleBuffer:
    """Samples drawn from a rank's sources, numbered in the order in which they were drawn."""

    # A source with a length that is read by index is shuffled and divided over the ranks; any other one is this rank's
    # own. Under a mixture, sources that end are read again; without, there is one source, and the buffer ends with it.
    # The buffer is full at ``buffer`` samples, or before that at ``buffer_bytes`` of arrays, tensors and byte strings.

    # The state holds no samples. To restore a buffer, sources go back to their positions before its oldest sample was
    # drawn, and everything since is drawn again: at most about twice what the buffer holds. Checksums tell whether
    # these are the same samples. A source whose name is not in the state begins at its start; samples of a source that
    # is gone are left out.

    def __init__(
        self,
        sources: Mapping[str, Any],
        read: Callable[[Any], BufferedSample],
        settings: StreamSettings,
        *,
        rank: int,
        division: Sequence[int],
        part: Callable[[str, Any, int, int], Any] = already_divided,
        first_pass: int = 0,
    ) -> None:
        mixture, oversized = settings.mixture, settings.oversized
        if mixture is None and len(sources) != 1:
            raise ConfigError(f"mixture must say what share each source gets, got none for {', '.join(sources)}")
        self._mixture = mixture or Mixture(dict.fromkeys(sources, 1.0))
        self._mixture.check_sources([*sources])
        if oversized not in get_args(Oversized):
            raise ConfigError(f"oversized must be one of {get_args(Oversized)}, got {oversized!r}")
        self._limits, self._oversized = settings.limits, oversized
        self._most_samples = integer("buffer", settings.buffer, 1)
        most_bytes = settings.buffer_bytes
        self._most_bytes = np.inf if most_bytes is None else integer("buffer_bytes", most_bytes, 1)
        self._read, self._repeats = read, mixture is not None
        self._sources: list[Source] = []
        share = partial(divided, part=part, seed=settings.seed, repeats=self._repeats, first_pass=first_pass)
        for name in self._mixture.sources:
            items = share(name, sources[name], rank, division)
            self._sources.append(Source(name, items, repeats=self._repeats, first_pass=first_pass))
        # What each source is owed: the sum of its shares minus what it gave. The next sample is of the one owed most.
        self._owed = np.zeros(len(self._sources))
        # While the buffer is filled, draw n counts for step `step + (n - drawn) * pace`: shares are those of the step
        # that will train a sample, guessed from the steps and samples trained between the last two fills.
        self._shares_of = 0, 0.0, 0.0  # (drawn, step, pace) of the current fill
        self._last_fill = 0, 0  # (step, samples trained) before the current fill
        self._fills: list[_Fill] = []
        self._seen: dict[int, tuple[str, int]] = {}  # source and checksum of each sample since the first of the fills
        self._to_restore: Mapping[str, Any] | None = None
        self._bytes = 0
        self._lacking, self._fitting = [0] * len(self._sources), [False] * len(self._sources)
        self.samples: dict[int, BufferedSample] = {}
        self.drawn = 0
        self.num_oversized = 0  # samples over a limit met by the last fill; the first one in words
        self.first_oversized = ""
        self.ended = False
        self.drawing_from = ""  # the source whose sample is waited for

    @property
    def names(self) -> list[str]:
        return [source.name for source in self._sources]

    @property
    def heard(self) -> int:
        return sum(source.heard for source in self._sources)

    @property
    def is_bounded(self) -> bool:
        return self._bytes >= self._most_bytes

    def fill(self, step: int) -> None:
        """Draw until the buffer is full, or the source has ended; ``step`` is the next one that is trained."""
        # Between the last two fills, so many steps trained so many samples: at that pace, what is drawn now is trained
        # when all that the buffer kept is.
        kept = len(self.samples)
        trained, (before, trained_before) = self.drawn - kept, self._last_fill
        pace = (step - before) / (trained - trained_before) if trained > trained_before else 0.0
        self._last_fill = step, trained
        self._shares_of = self.drawn, step + kept * pace, pace
        self._begin_fill()
        self.num_oversized, self.first_oversized = 0, ""
        self.fill_up(self._most_samples)

    def fill_up(self, num_samples: int) -> None:
        """Draw until the buffer holds so many samples, or its bytes are used up, or the source has ended."""
        while not self.ended and len(self.samples) < num_samples and not self.is_bounded:
            drawn, step, pace = self._shares_of
            shares = self._mixture.shares_at(step + (self.drawn - drawn) * pace)
            sample = self._draw(self._sources[int(np.where(shares > 0, self._owed, -np.inf).argmax())])
            if sample is None:
                self.ended = True
            else:
                self._take_in(sample, shares)
                self.drawn += 1

    def take(self, numbers: Iterable[int]) -> list[BufferedSample]:
        taken = [self.samples.pop(number) for number in numbers]
        self._bytes -= sum(size_of(sample.held) for sample in taken)
        return taken

    def given(self, samples: Iterable[BufferedSample]) -> list[int]:
        units = [0] * len(self._sources)
        for sample in samples:
            units[sample.source] += self._units(sample)
        return units

    def lengths(self) -> SampleLengths:
        loads = [in_full(sample.loads) for sample in self.samples.values()]
        vision, tokens, targets, videos, sounds = np.array(loads, dtype=np.int64).reshape(-1, 5).T
        # Without sounds the planner levels one encoder less.
        heard = sounds if sounds.any() else None
        return SampleLengths(vision, tokens, target_tokens=targets, video_units=videos, sound_units=heard)

    def state_dict(self) -> dict[str, Any]:
        """What brings back the buffer as it is, and all that follows; between a fill and the next ``take``."""
        # No fill before the one that drew the oldest sample is needed again. The last one always is: by its samples
        # the sources are known again.
        oldest = min(self.samples, default=self.drawn - 1)
        ends = [fill.drawn for fill in self._fills[1:]] + [self.drawn]
        self._fills = [fill for fill, end in zip(self._fills, ends, strict=True) if end > oldest]
        first = self._fills[0]
        self._seen = {number: seen for number, seen in self._seen.items() if number >= first.drawn}
        return {
            "sources": first.sources,
            "fills": [fill.drawn for fill in self._fills],
            "seen": [*self._seen.values()],
            "held": [*self.samples],
            "last_fill": self._last_fill,
            "owed": dict(zip(self.names, self._owed.tolist(), strict=True)),
            "ended": self.ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let ``restore`` bring back what the buffer held then."""
        self._to_restore = state

    def restore(self) -> None:
        """Draw again what the buffer held in the state that was loaded, if one was."""
        state, self._to_restore = self._to_restore, None
        if state is None:
            return
        sources = {source.name: source for source in self._sources if source.name in state["sources"]}
        for name, source in sources.items():
            source.go_to(state["sources"][name])
        # Sources are drawn from in the order of before, without a look at shares; what the buffer did not hold any more
        # is drawn, and let go. Fills begin where they began, so that the next state need not go back further.
        fills, held = set(state["fills"]), set(state["held"])
        self.drawn = min(fills)
        for number, (name, mark) in enumerate(state["seen"], start=self.drawn):
            if number in fills:
                self._begin_fill()
            if name not in sources:
                self._seen[number] = name, mark
            elif (sample := self._draw(sources[name])) is None:
                raise DataError(f"source {name!r} must bring the samples again that were drawn of it, got its end")
            elif number in held:
                self._hold(sample)
            self.drawn += 1
        self._last_fill, self.ended = state["last_fill"], state["ended"]
        self._owed = np.array([state["owed"].get(name, 0.0) for name in self.names])
        for name in sources:
            self._check_restored(name, state["seen"])

    def _check_restored(self, name: str, seen: Iterable[tuple[str, int]]) -> None:
        """Refuse a source that brings other samples than before; where only some are others, say so."""
        pairs = zip(seen, self._seen.values(), strict=True)
        differs = [before[1] != again[1] for before, again in pairs if before[0] == name]
        if not any(differs):
            return
        told = f"source {name!r} must bring the samples again that the state was taken behind, got"
        if all(differs):
            raise DataError(
                f"{told} others; give it the seed, the files and the collator that it had, or another name, under "
                "which it begins at its start"
            )
        warnings.warn(
            f"{told} {sum(differs)} others of {len(differs)}, as where samples change at random", stacklevel=2
        )

    def _begin_fill(self) -> None:
        self._fills.append(_Fill(self.drawn, {source.name: source.state() for source in self._sources}))

    def _draw(self, source: Source) -> BufferedSample | None:
        """Draw a source's next sample and note its checksum; None where the source has ended."""
        self.drawing_from = source.name
        if (item := source.draw()) is END:
            return None
        try:
            sample = self._read(item)._replace(source=self._sources.index(source))
            _check_loads(sample.loads)
        except Exception as error:  # whatever a collator raises, the other ranks wait for an answer
            raise DataError(f"{source.last_item}: {said(error)}") from error
        self._seen[self.drawn] = source.name, mark_of((sample.loads, sample.held))
        return sample

    def _take_in(self, sample: BufferedSample, shares: npt.NDArray[np.float64]) -> None:
        """Hold a sample that was drawn for the first time, unless it is too large."""
        vision, tokens, _, _, sounds = in_full(sample.loads)
        limits = self._limits
        if vision > limits.vision_units or tokens > limits.llm_tokens or sounds > limits.most("sound_units"):
            self._meet_oversized(sample)
            if self._oversized == "drop":
                return
        weight = self._units(sample)
        self._lacking[sample.source] = 0 if weight else self._lacking[sample.source] + 1
        if self._lacking[sample.source] >= BARREN and self._repeats:
            raise DataError(
                f"source {self.names[sample.source]!r} must have {self._mixture.by} in a mixture by them, got none in "
                f"{BARREN} samples"
            )
        # Each sample's weight is shared out over the sources, and its own source pays for it.
        self._owed = self._owed + shares * weight
        self._owed[sample.source] -= weight
        self._hold(sample)

    def _hold(self, sample: BufferedSample) -> None:
        self._fitting[sample.source] = True
        self.samples[self.drawn] = sample
        self._bytes += size_of(sample.held)

    def _meet_oversized(self, sample: BufferedSample) -> None:
        vision, tokens, _, _, sounds = in_full(sample.loads)
        got = f"{vision} and {tokens}" + (f" and {sounds}" if self._limits.sound_units is not None else "")
        item = self._sources[sample.source].last_item
        told = f"{item} must be within the limits of {self._limits.in_words}, got {got}"
        if self._oversized == "error":
            raise DataError(f"{told}; oversized 'alone' gives it a pack of its own, 'drop' leaves it out")
        self.first_oversized = self.first_oversized or told
        self.num_oversized += 1
        if self._oversized == "drop" and not self._fitting[sample.source]:
            self._lacking[sample.source] += 1
            if self._lacking[sample.source] >= BARREN:
                raise DataError(f"{told}, as none of the first {BARREN} of this source is; raise the limits")

    def _units(self, sample: BufferedSample) -> int:
        return {"samples": 1, "llm_tokens": sample.loads[1], "target_tokens": sample.loads[2]}[self._mixture.by]


def _check_loads(loads: Loads) -> None:
    vision, tokens, targets, videos, sounds = in_full(loads)
    if tokens < 1:
        raise DataError(f"a sample must have at least 1 token, got {tokens}")
    if vision < 0 or not 0 <= targets <= tokens:
        raise DataError(
            f"a sample must have 0 vision units or more, and at most as many target tokens as tokens, got {vision}, "
            f"{targets} and {tokens}"
        )
    if not 0 <= videos <= vision or sounds < 0:
        raise DataError(
            f"a sample must have as many video units as vision units at most, and 0 sound units or more, got {videos}, "
            f"{vision} and {sounds}"
        )


def taken_over(states: Sequence[Mapping[str, Any]], rank: int, num_ranks: int) -> dict[str, Any]:
    """The state of a rank's buffer that takes over from other ranks: their untrained samples, then the rest."""
    # ``states`` are of every earlier rank's buffer, by rank; ``held`` are the samples that were not trained.
    lanes, _, num_parts = lanes_of(rank, num_ranks, len(states))
    sources, owed = dict[str, Any](), dict[str, float]()
    for name in states[0]["sources"]:
        found = []
        for state in (states[lane] for lane in lanes):
            first, held = min(state["fills"]), set(state["held"])
            numbers = [number for number, (of, _) in enumerate(state["seen"], start=first) if of == name]
            found.append(lane_state(state["sources"][name], [number not in held for number in numbers]))
        # Some lane was drawn from, so an end behind the first item is no empty source.
        sources[name] = {"pass": 0, "drawn": 1, "own": {"lanes": found, "turn": 0}}
        owed[name] = sum(states[lane]["owed"][name] for lane in lanes) / num_parts
    begun = {"fills": [0], "seen": [], "held": [], "last_fill": (0, 0)}
    return {"sources": sources, **begun, "owed": owed, "ended": False}


def size_of(held: Any) -> int:
    """Bytes of the arrays, tensors and byte strings of a sample.

    >>> size_of({"ids": np.zeros(3), "image": [b"12345"], "text": "?"})
    29
    """
    if isinstance(held, bytes):
        return len(held)
    if isinstance(held, Mapping):
        return sum(map(size_of, held.values()))
    if isinstance(held, list | tuple):
        return sum(map(size_of, held))
    return int(getattr(held, "nbytes", 0))
