"""What a rank has drawn from its sources and not trained yet, and how to come to the same samples again."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from omnibal.data.checks import integer
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.mixture import Mixture
from omnibal.data.policies import Oversized
from omnibal.errors import ConfigError, DataError, said
from omnibal.feeds.sources import END, ShuffledItems, Source, is_indexed, mark_of

BARREN: Final = 1024
"""Samples of a source in a row that may lack what shares are counted in, or exceed a limit where these are dropped."""
GONE: Final = -1
"""In place of the number of a source that a resumed run no longer has."""


class Sample(NamedTuple):
    """A sample in the buffer."""

    held: Any
    """As its collator lays it into packs."""
    loads: tuple[int, int, int]
    """Vision units, LLM tokens, target tokens."""
    source: int = 0
    """The number of its source."""


class Draws:
    """This rank's buffer: samples drawn from its sources, by number in the order in which they were drawn.

    Its state holds no samples. Where it is loaded, sources go back to where they stood before the oldest sample of the
    buffer was drawn, and what came since is drawn again: at most about twice what the buffer holds. Checksums tell
    whether these are the same samples. Sources go on by their names: one that the state does not know begins at its
    start, and what was drawn of one that is gone is left out.

    Args:
        sources: By name. A source with a length that is read by index is shuffled and divided over the ranks; any other
            one is this rank's own.
        read: What the buffer holds of an item.
        limits: The most a pack may hold.
        oversized: What becomes of a sample that exceeds a limit on its own.
        most_samples: When the buffer is full.
        most_bytes: When it is full before that, by the bytes of arrays, tensors and byte strings.
        mixture: What share each source gets. Without, there is one source, and the buffer ends with it.
        rank: Of this process.
        num_ranks: How many there are.
        seed: Of map-style sources' order.
        first_pass: Number of the sources' first pass.

    Raises:
        ConfigError: The mixture does not name the sources, or there is none for several of them; ``oversized`` is
            unknown.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        read: Callable[[Any], Sample],
        *,
        limits: PackLimits,
        oversized: Oversized,
        most_samples: int,
        most_bytes: int | None = None,
        mixture: Mixture | None = None,
        rank: int,
        num_ranks: int,
        seed: int = 0,
        first_pass: int = 0,
    ) -> None:
        if mixture is None and len(sources) != 1:
            raise ConfigError(f"mixture must say what share each source gets, got none for {', '.join(sources)}")
        self._mixture = mixture or Mixture(dict.fromkeys(sources, 1.0))
        self._mixture.check_sources([*sources])
        if oversized not in get_args(Oversized):
            raise ConfigError(f"oversized must be one of {get_args(Oversized)}, got {oversized!r}")
        self._limits, self._oversized = limits, oversized
        self._most_samples = integer("buffer", most_samples, 1)
        self._most_bytes = np.inf if most_bytes is None else integer("buffer_bytes", most_bytes, 1)
        self._read, self._repeats = read, mixture is not None
        self._sources = [
            Source(
                name,
                ShuffledItems(items, rank=rank, num_ranks=num_ranks, seed=seed) if is_indexed(items) else items,
                repeats=self._repeats,
                first_pass=first_pass,
            )
            for name, items in ((name, sources[name]) for name in self._mixture.sources)
        ]
        self._owed = np.zeros(len(self._sources))
        self._lacking, self._fitting = [0] * len(self._sources), [False] * len(self._sources)
        self._last = 0, 0
        """The step and the samples trained when the buffer was filled last."""
        self._fills: list[dict[str, Any]] = []
        self._seen: dict[int, tuple[int, int]] = {}
        """Source and checksum of each sample since the first of the fills."""
        self._to_load: Mapping[str, Any] | None = None
        self._bytes = 0
        self.samples: dict[int, Sample] = {}
        self.drawn = self.num_oversized = 0
        self.oversized = ""
        """The first of them, in words."""
        self.ended = False
        self.drawing_from = ""
        """Whose sample is waited for."""

    @property
    def names(self) -> list[str]:
        """Of the sources."""
        return [source.name for source in self._sources]

    @property
    def heard(self) -> int:
        """Signs of life of all sources."""
        return sum(source.heard for source in self._sources)

    @property
    def is_bounded(self) -> bool:
        """Whether its bytes allow no more samples."""
        return self._bytes >= self._most_bytes

    def fill(self, step: int) -> None:
        """Draw until the buffer is full, or the source has ended; ``num_oversized`` then counts what it met.

        Args:
            step: The next one that is trained. A sample is drawn with the shares of the step that will train it, at
                the pace since the last call.

        Raises:
            DataError: A source yields nothing, or raises something; the message names it.
        """
        self._draw_again()
        kept = len(self.samples)
        trained, (before, trained_before) = self.drawn - kept, self._last
        pace = (step - before) / (trained - trained_before) if trained > trained_before else 0.0
        self._last = step, trained
        self._begin_fill(step + kept * pace, pace)
        self.num_oversized, self.oversized = 0, ""
        self.fill_up(self._most_samples)

    def fill_up(self, num_samples: int) -> None:
        """Draw until the buffer holds so many samples or bytes, or the source has ended.

        Raises:
            DataError: As of ``fill``.
        """
        while not self.ended and len(self.samples) < num_samples and not self.is_bounded:
            self._draw_one()

    def take(self, numbers: Iterable[int]) -> list[Sample]:
        """Remove samples from the buffer."""
        taken = [self.samples.pop(number) for number in numbers]
        self._bytes -= sum(size_of(sample.held) for sample in taken)
        return taken

    def given(self, samples: Iterable[Sample]) -> list[int]:
        """What some samples count for in the share of each source."""
        units = [0] * len(self._sources)
        for sample in samples:
            units[sample.source] += self._units(sample)
        return units

    def lengths(self) -> SampleLengths:
        """Of what the buffer holds, the oldest first."""
        loads = np.array([sample.loads for sample in self.samples.values()], dtype=np.int64).reshape(-1, 3).T
        return SampleLengths(loads[0], loads[1], target_tokens=loads[2])

    def state_dict(self, besides: Iterable[int] = ()) -> Mapping[str, Any]:
        """What brings back the buffer and all that follows; to be taken before it is filled.

        Args:
            besides: Samples that were taken from the buffer and may be wanted back.
        """
        if self._to_load is not None:
            return self._to_load
        # No fill before the one that drew the oldest sample is needed again. The last one always is: by its samples
        # the sources are known again.
        oldest = min([*self.samples, *besides], default=self.drawn - 1)
        later = [fill["drawn"] for fill in self._fills[1:]] + [self.drawn]
        self._fills = [fill for fill, end in zip(self._fills, later, strict=False) if end > oldest]
        begin = self._fills[0] if self._fills else self._now(0, 0)
        self._seen = {number: seen for number, seen in self._seen.items() if number >= begin["drawn"]}
        return {
            "from": begin,
            "fills": [(fill["drawn"], fill["step"], fill["pace"]) for fill in self._fills],
            "last": self._last,
            "drawn": self.drawn,
            "held": [*self.samples],
            "names": self.names,
            "owed": self._owed.tolist(),
            "seen": [*self._seen.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``fill`` begin with what the buffer held then."""
        self._to_load = state

    def _draw_again(self) -> None:
        """Come to the buffer of a state.

        Raises:
            DataError: A source does not bring the samples that were drawn of it.
        """
        state, self._to_load = self._to_load, None
        if state is None:
            return
        first, held, names = state["from"], set(state["held"]), self.names
        for source in self._sources:
            if source.name in first["sources"]:
                source.go_to(first["sources"][source.name])
        numbers = [names.index(name) if name in names else None for name in state["names"]]
        self.drawn, self._last = first["drawn"], state["last"]
        ends = [drawn for drawn, *_ in state["fills"][1:]] + [state["drawn"]]
        drawn_before = iter(state["seen"])
        for (_, step, pace), end in zip(state["fills"], ends, strict=False):
            self._begin_fill(step, pace)
            while self.drawn < end:
                old, _ = next(drawn_before)
                number = None if old == GONE else numbers[old]
                if number is None:
                    self._seen[self.drawn] = GONE, 0
                    self.drawn += 1
                else:
                    self._draw_one(number, held)
        owed = dict(zip(state["names"], state["owed"], strict=True))
        self._owed = np.array([owed.get(name, 0.0) for name in names])
        self._check_again(state["seen"], numbers)

    def _check_again(self, before: Sequence[tuple[int, int]], numbers: Sequence[int | None]) -> None:
        """Refuse sources that bring other samples than before; where only some are others, say so."""
        again = [self._seen[self.drawn - len(before) + place][1] for place in range(len(before))]
        for old, number in enumerate(numbers):
            marks = [(mark, found) for (source, mark), found in zip(before, again, strict=True) if source == old]
            others = sum(mark != found for mark, found in marks)
            if number is None or not others:
                continue
            told = f"source {self.names[number]!r} must bring the samples again that the state was taken behind, got"
            if others == len(marks):
                raise DataError(
                    f"{told} others; give it the seed, the files and the collator that it had, or another name, under "
                    "which it begins at its start"
                )
            warnings.warn(f"{told} {others} others of {len(marks)}, as where samples change at random", stacklevel=2)

    def _begin_fill(self, step: float, pace: float) -> None:
        self._fills.append(self._now(step, pace))

    def _now(self, step: float, pace: float) -> dict[str, Any]:
        sources = {source.name: source.state() for source in self._sources}
        return {"drawn": self.drawn, "step": step, "pace": pace, "sources": sources}

    def _draw_one(self, chosen: int | None = None, wanted: set[int] | None = None) -> None:
        """Draw from a source, by default the one that is owed most; where only some numbers are wanted, keep no other.

        Raises:
            DataError: As of ``fill``; or the source ends where it is drawn from again.
        """
        fill = self._fills[-1]
        shares = self._mixture.shares_at(fill["step"] + (self.drawn - fill["drawn"]) * fill["pace"])
        if chosen is None:
            chosen = int(np.where(shares > 0, self._owed, -np.inf).argmax())
        source = self._sources[chosen]
        self.drawing_from = source.name
        item = source.draw()
        if item is END and wanted is not None:
            raise DataError(f"source {source.name!r} must bring the samples again that were drawn of it, got its end")
        if item is END:
            self.ended = True
            return
        try:
            sample = self._read(item)._replace(source=chosen)
            _check_loads(sample.loads)
        except Exception as error:  # as in ``Source.draw``
            raise DataError(f"{source.last_item}: {said(error)}") from error
        self._seen[self.drawn] = chosen, mark_of((sample.loads, sample.held))
        if wanted is None:
            self._take_in(sample, shares)
        elif self.drawn in wanted:
            self._hold(sample)
        self.drawn += 1

    def _take_in(self, sample: Sample, shares: npt.NDArray[np.float64]) -> None:
        """Hold a sample that was drawn for the first time, unless it is too large."""
        vision, tokens, _ = sample.loads
        if vision > self._limits.vision_units or tokens > self._limits.llm_tokens:
            self._meet_oversized(sample)
            if self._oversized == "drop":
                return
        weight = self._weight(sample.source, sample)
        self._owed = self._owed + shares * weight
        self._owed[sample.source] -= weight
        self._hold(sample)

    def _hold(self, sample: Sample) -> None:
        self._fitting[sample.source] = True
        self.samples[self.drawn] = sample
        self._bytes += size_of(sample.held)

    def _meet_oversized(self, sample: Sample) -> None:
        """Count a sample over a limit, or refuse it."""
        limits, source = self._limits, self._sources[sample.source]
        vision, tokens, _ = sample.loads
        told = (
            f"{source.last_item} must be within the limits of {limits.vision_units} vision units and "
            f"{limits.llm_tokens} LLM tokens, got {vision} and {tokens}"
        )
        if self._oversized == "error":
            raise DataError(f"{told}; oversized 'alone' gives it a pack of its own, 'drop' leaves it out")
        self.oversized = self.oversized or told
        self.num_oversized += 1
        if self._oversized == "drop" and not self._fitting[sample.source]:
            self._lacking[sample.source] += 1
            if self._lacking[sample.source] >= BARREN:
                raise DataError(f"{told}, as none of the first {BARREN} of this source is; raise the limits")

    def _weight(self, chosen: int, sample: Sample) -> int:
        """What a sample that was just drawn counts for; a source that has nothing of the kind is refused."""
        weight = self._units(sample)
        self._lacking[chosen] = 0 if weight else self._lacking[chosen] + 1
        if self._lacking[chosen] >= BARREN and self._repeats:
            raise DataError(
                f"source {self._sources[chosen].name!r} must have {self._mixture.by} in a mixture by them, got none in "
                f"{BARREN} samples"
            )
        return weight

    def _units(self, sample: Sample) -> int:
        """What a sample counts for in its source's share."""
        return {"samples": 1, "llm_tokens": sample.loads[1], "target_tokens": sample.loads[2]}[self._mixture.by]


def _check_loads(loads: tuple[int, int, int]) -> None:
    vision, tokens, targets = loads
    if tokens < 1:
        raise DataError(f"a sample must have at least 1 token, got {tokens}")
    if vision < 0 or not 0 <= targets <= tokens:
        raise DataError(
            f"a sample must have 0 vision units or more, and at most as many target tokens as tokens, got {vision}, "
            f"{targets} and {tokens}"
        )


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
