"""PackLimits: the most a pack may hold."""

from dataclasses import asdict, dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from omnibal.cost import Load
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.packs import Packs
from omnibal.errors import DataError, integer

MOST: Final = 2**22
"""Planners count samples by size up to the limits: seconds for 4 million, and no device holds a pack of more."""


@dataclass(frozen=True, init=False)
class PackLimits:
    """The most that a pack may hold in both loads, and from where on it counts as full.

    Args:
        vision_units: Q_v, most vision units (tiles or patches) in a pack; 0 allows no image.
        llm_tokens: Q_t, most LLM tokens in a pack.
        full_vision_units: Q'_v: a pack with as many is full. By default ``vision_units`` (1 where that is 0, so that
            an empty vision load never makes a pack full).
        full_llm_tokens: Q'_t: a pack with as many is full. By default max(``llm_tokens`` / 2, ``llm_tokens`` − 128).
        sound_units: Most units of an encoder of sound beside the ViT; None for no limit but that of the tokens.

    Raises:
        ConfigError: A limit is negative or above 2**22, or a full mark lies outside 1 … its limit.

    >>> PackLimits(9, 4096)
    PackLimits(vision_units=9, llm_tokens=4096, full_vision_units=9, full_llm_tokens=3968)
    """

    vision_units: int
    llm_tokens: int
    full_vision_units: int
    full_llm_tokens: int
    sound_units: int | None = field(default=None, repr=False)

    def __init__(
        self,
        vision_units: int,
        llm_tokens: int,
        *,
        full_vision_units: int | None = None,
        full_llm_tokens: int | None = None,
        sound_units: int | None = None,
    ) -> None:
        vision_units = integer("vision_units", vision_units, 0, MOST)
        llm_tokens = integer("llm_tokens", llm_tokens, 1, MOST)
        if full_vision_units is None:
            full_vision_units = max(vision_units, 1)
        if full_llm_tokens is None:
            full_llm_tokens = max((llm_tokens + 1) // 2, llm_tokens - 128)
        # A frozen record sets its own fields only through object.
        object.__setattr__(self, "vision_units", vision_units)
        object.__setattr__(self, "llm_tokens", llm_tokens)
        full = integer("full_vision_units", full_vision_units, 1, max(vision_units, 1))
        object.__setattr__(self, "full_vision_units", full)
        object.__setattr__(self, "full_llm_tokens", integer("full_llm_tokens", full_llm_tokens, 1, llm_tokens))
        if sound_units is not None:
            sound_units = integer("sound_units", sound_units, 0, MOST)
        object.__setattr__(self, "sound_units", sound_units)

    def most(self, encoder: str) -> int:
        """The most units of an encoder, by its column of the lengths."""
        most = getattr(self, encoder)
        return MOST if most is None else int(most)

    def within(self, other: "PackLimits") -> bool:
        """Whether no limit exceeds another's."""
        sizes = (self.vision_units, other.vision_units), (self.llm_tokens, other.llm_tokens)
        sounds = self.sound_units or 0, other.most("sound_units")
        return all(mine <= theirs for mine, theirs in (*sizes, sounds))

    @property
    def in_words(self) -> str:
        """The limits for people."""
        sounds = "" if self.sound_units is None else f" and {self.sound_units} sound units"
        return f"{self.vision_units} vision units and {self.llm_tokens} LLM tokens{sounds}"

    def record(self) -> dict[str, int]:
        """The limits as JSON values, by name; an encoder without a limit is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def oversized(self, lengths: SampleLengths) -> npt.NDArray[np.int64]:
        """Return the samples, ascending, that exceed a limit on their own; reads no sample where none can."""
        summary = lengths.summary
        further = lengths.further_units()
        fits = all(getattr(summary, f"max_{name}") <= self.most(name) for name in further)
        if fits and summary.max_vision_units <= self.vision_units and summary.max_llm_tokens <= self.llm_tokens:
            return np.zeros(0, dtype=np.int64)
        over = (lengths.vision_units > self.vision_units) | (lengths.llm_tokens > self.llm_tokens)
        for name, units in further.items():
            over |= units > self.most(name)
        return np.flatnonzero(over)

    def refuse_none(self, lengths: SampleLengths) -> None:
        """Refuse limits that every sample exceeds: nothing could ever share a pack."""
        if not len(lengths):
            raise DataError("lengths must hold at least one sample, got none")
        if len(self.oversized(lengths)) == len(lengths):
            raise DataError(
                f"limits must hold at least one sample, got {self.in_words}, which all {len(lengths)} samples exceed; "
                "raise the limits, the "
                f"largest samples have {lengths.summary.max_vision_units} and {lengths.summary.max_llm_tokens}"
            )

    def refuse_oversized(self, lengths: SampleLengths) -> None:
        """Refuse samples that exceed a limit on their own; the message names the first one."""
        over = self.oversized(lengths)
        if len(over):
            first = over[0]
            sounds = [] if self.sound_units is None else [*lengths.further_units().values()]
            found = [int(units[first]) for units in (lengths.vision_units, lengths.llm_tokens, *sounds)]
            raise DataError(
                f"samples must keep the limits of {self.in_words}, "
                f"got {' and '.join(map(str, found))} for sample {first} "
                f"({len(over)} samples in all); raise the limits, or pass oversized='alone' or 'drop'"
            )


def largest_limits(lengths: SampleLengths, *, hears: bool = False) -> PackLimits:
    """The smallest limits that hold every sample; with one of sound units where ``hears``."""
    summary = lengths.summary
    sounds = summary.max_sound_units if hears else None
    return PackLimits(summary.max_vision_units, max(summary.max_llm_tokens, 1), sound_units=sounds)


def paper_limits(lengths: SampleLengths) -> PackLimits:
    """Limits by the OmniBal paper's rule: Q_t = longest sample, Q_v = round(Q_t · vision units / LLM tokens).

    Source: Yao et al., OmniBal, ICML 2025, section 5.1; deviation: the largest sample always fits. ``search_limits``
    finds limits that waste less.

    >>> paper_limits(SampleLengths([1, 3, 5], [400, 1200, 2000]))
    PackLimits(vision_units=5, llm_tokens=2000, full_vision_units=5, full_llm_tokens=1872)
    """
    summary = lengths.summary
    if max(summary.max_vision_units, summary.max_llm_tokens) > MOST:
        worst = int(np.argmax(np.maximum(lengths.vision_units, lengths.llm_tokens)))
        raise DataError(
            f"samples must have at most {MOST} vision units and LLM tokens, got {lengths.vision_units[worst]} and "
            f"{lengths.llm_tokens[worst]} for sample {worst}; leave it out, or choose limits that it exceeds"
        )
    # On the made-up InternVL-1.2 mix (``tiled_lengths``) the rule gives 4096 / 393.9 = 10.4, so 10, where the paper has
    # 9. That the paper counts a blank tile for a sample without an image does not explain it: with these tiles it is
    # 10.6, with their 256 tokens as well 10.5. The published code takes the mean of lengths that it rounds up to
    # multiples of 256, which does: 8.9, or 9.1 and 9.0 with blank tiles. Packs hold lengths as they are, so the rule
    # here rounds none.
    longest = max(summary.max_llm_tokens, 1)
    units_per_token = summary.total_vision_units / max(summary.total_llm_tokens, 1)
    return PackLimits(min(max(round(longest * units_per_token), summary.max_vision_units), MOST), longest)


def choose_limits(lengths: SampleLengths, vision_units: int | None = None, llm_tokens: int | None = None) -> PackLimits:
    """The limits that were given; what was left out is what the paper's rule says."""
    if vision_units is None or llm_tokens is None:
        ruled = paper_limits(lengths)
        vision_units = ruled.vision_units if vision_units is None else vision_units
        llm_tokens = ruled.llm_tokens if llm_tokens is None else llm_tokens
    limits = PackLimits(vision_units, llm_tokens)
    limits.refuse_none(lengths)
    return limits


def largest_load(lengths: SampleLengths, limits: PackLimits) -> Load:
    """A micro-batch that none within the limits exceeds in any size; squares are largest in the longest samples."""
    tokens, longest = limits.llm_tokens, min(lengths.summary.max_llm_tokens, limits.llm_tokens)

    def most_per(column: IntArray | None, of: IntArray, unknown: float) -> float:
        return unknown if column is None else float((column / np.maximum(of, 1)).max(initial=0))

    squared = limits.vision_units * most_per(lengths.vision_squared, lengths.vision_units, 0.0)
    targets = tokens * most_per(lengths.target_tokens, lengths.llm_tokens, 1.0)
    # Without a limit of their own the tokens bound sounds.
    sounds = min(limits.most("sound_units"), tokens * most_per(lengths.sound_units, lengths.llm_tokens, 0.0))
    return Load(limits.vision_units, tokens, tokens * longest, squared, targets, sounds)


def fullest_load(lengths: SampleLengths, limits: PackLimits) -> Load:
    """A micro-batch that none of a run exceeds in any size: samples alone in packs and fillers included."""
    loads, over = [largest_load(lengths, limits)], limits.oversized(lengths)
    if len(over):
        loads.append(Packs(over, np.arange(len(over) + 1)).load(lengths).max())
    most, seen = Load.stack(loads).max(), lengths.llm_tokens[lengths.vision_units > 0]
    filler = float(seen.min(initial=lengths.summary.max_llm_tokens)) if len(seen) else 0.0
    tokens = most.llm_tokens + filler, most.llm_tokens_squared + filler**2
    return Load(most.vision_units, *tokens, most.vision_squared, most.target_tokens, most.sound_units)
