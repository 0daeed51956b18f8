"""What a rank has drawn from its sources and not trained yet, and how to come to the same samples again."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from omnibal.data.checks import integer
from omnibal.data.lengths import SampleLengths
from omnibal.data.mixture import Mixture
from omnibal.data.streaming.sources import END, ShuffledItems, Source, is_indexed
from omnibal.errors import ConfigError, DataError, said

BARREN: Final = 1024
"""Samples of a source in a row that may lack what shares are counted in."""


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
    buffer was drawn, and what came since is drawn again: at most about twice what the buffer holds.

    Args:
        sources: By name. A source with a length that is read by index is shuffled and divided over the ranks; any other
            one is this rank's own.
        read: What the buffer holds of an item.
        most_samples: When the buffer is full.
        most_bytes: When it is full before that, by the bytes of arrays, tensors and byte strings.
        mixture: What share each source gets. Without, there is one source, and the buffer ends with it.
        rank: Of this process.
        num_ranks: How many there are.
        seed: Of map-style sources' order.
        first_pass: Number of the sources' first pass.

    Raises:
        ConfigError: The mixture does not name the sources, or there is none for several of them.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        read: Callable[[Any], Sample],
        *,
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
        self._lacking = [0] * len(self._sources)
        self._last = 0, 0
        """The step and the samples trained when the buffer was filled last."""
        self._fills: list[dict[str, Any]] = []
        self._to_load: Mapping[str, Any] | None = None
        self._bytes = 0
        self.samples: dict[int, Sample] = {}
        self.drawn = 0
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

    def fill(self, step: int) -> None:
        """Draw until the buffer is full, or the source has ended.

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
        while not self.ended and len(self.samples) < self._most_samples and self._bytes < self._most_bytes:
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

    def state_dict(self) -> Mapping[str, Any]:
        """What brings back the buffer and all that follows; to be taken before it is filled."""
        if self._to_load is not None:
            return self._to_load
        # No fill before the one that drew the oldest sample is needed again.
        oldest = min(self.samples, default=self.drawn)
        later = [fill["drawn"] for fill in self._fills[1:]] + [self.drawn]
        self._fills = [fill for fill, end in zip(self._fills, later, strict=False) if end > oldest]
        return {
            "from": self._fills[0] if self._fills else self._now(0, 0),
            "fills": [(fill["drawn"], fill["step"], fill["pace"]) for fill in self._fills],
            "last": self._last,
            "drawn": self.drawn,
            "held": [*self.samples],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``fill`` begin with what the buffer held then."""
        self._to_load = state

    def _draw_again(self) -> None:
        state, self._to_load = self._to_load, None
        if state is None:
            return
        first, held = state["from"], set(state["held"])
        for source, stood in zip(self._sources, first["sources"], strict=True):
            source.go_to(stood)
        self._owed, self.drawn, self._last = np.array(first["owed"]), first["drawn"], state["last"]
        ends = [drawn for drawn, *_ in state["fills"][1:]] + [state["drawn"]]
        for (_, step, pace), end in zip(state["fills"], ends, strict=False):
            self._begin_fill(step, pace)
            while self.drawn < end and not self.ended:
                self._draw_one(held)

    def _begin_fill(self, step: float, pace: float) -> None:
        self._fills.append(self._now(step, pace))

    def _now(self, step: float, pace: float) -> dict[str, Any]:
        return {
            "drawn": self.drawn,
            "step": step,
            "pace": pace,
            "owed": self._owed.tolist(),
            "sources": [source.state() for source in self._sources],
        }

    def _draw_one(self, wanted: set[int] | None = None) -> None:
        """Draw from the source that is owed most; where only some numbers are wanted, keep no other."""
        fill = self._fills[-1]
        shares = self._mixture.shares_at(fill["step"] + (self.drawn - fill["drawn"]) * fill["pace"])
        chosen = int(np.where(shares > 0, self._owed, -np.inf).argmax())
        source = self._sources[chosen]
        self.drawing_from = source.name
        item = source.draw()
        if item is END:
            self.ended = True
            return
        try:
            sample = self._read(item)._replace(source=chosen)
        except Exception as error:  # as in ``Source.draw``
            raise DataError(f"source {source.name!r}: {said(error)}") from error
        weight = self._weight(chosen, sample)
        self._owed = self._owed + shares * weight
        self._owed[chosen] -= weight
        if wanted is None or self.drawn in wanted:
            self.samples[self.drawn] = sample
            self._bytes += size_of(sample.held)
        self.drawn += 1

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
