"""Kinds of input (images, videos, sounds): the loads of a sample that has some, and fillers for packs without."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from omnibal.data.lengths import IMAGE, SOUND, VIDEO, SampleLengths

Sample = TypeVar("Sample")
Loads = tuple[int, ...]
"""Vision units, LLM tokens and target tokens of a sample; of one with videos also the vision units that they bring; of
one with sounds beside images that and sound units."""
NAMES: Final = {IMAGE: "an image", VIDEO: "a video", SOUND: "a sound"}


def loads_of(images: int, videos: int, llm_tokens: int, target_tokens: int, sound_units: int = 0) -> Loads:
    """Loads from the vision units of images and of videos; videos and sounds are named where there are any."""
    loads = images + videos, llm_tokens, target_tokens
    if sound_units:
        return (*loads, videos, sound_units)
    return (*loads, videos) if videos else loads


def in_full(loads: Sequence[Any]) -> tuple[Any, ...]:
    """Loads with the numbers of videos and of sounds, which are 0 where they were left out."""
    return (*loads, 0, 0)[:5]


def kinds_of(loads: Loads) -> int:
    """The bits of ``SampleLengths.kinds`` of one sample."""
    vision, _, _, videos, sounds = in_full(loads)
    kinds: int = IMAGE * (vision > videos) + VIDEO * (videos > 0) + SOUND * (sounds > 0)
    return kinds


def smallest_of_kinds(lengths: SampleLengths) -> dict[int, int]:
    """By ``kinds`` of the lengths: the sample with the fewest vision units, then the fewest tokens, then the first."""
    found = dict[int, int]()
    for kinds in np.unique(lengths.kinds):
        among = np.flatnonzero(lengths.kinds == kinds)
        order = np.lexsort((lengths.llm_tokens[among], lengths.vision_units[among]))
        found[int(kinds)] = int(among[order[0]])
    return found


def fillers_for(
    smallest: Mapping[int, Sample], size: Callable[[Sample], Any], has: int, wanted: int, *, is_empty: bool
) -> list[Sample]:
    """Samples that bring the kinds that a pack lacks, and none that the step has not; an empty pack gets one at least.

    Args:
        smallest: A sample with each combination of kinds that there is, by the bits of ``SampleLengths.kinds``.
        has: Kinds of the pack.
        wanted: Kinds of the step.
    """
    found = list[Sample]()
    allowed = {kinds: sample for kinds, sample in smallest.items() if not kinds & ~wanted}
    while missing := wanted & ~has:
        one = missing & -missing  # a sample with this kind: where it is in the step, so is all that it comes with
        kinds = min((kinds for kinds in allowed if kinds & one), key=lambda kinds: size(allowed[kinds]))
        found.append(allowed[kinds])
        has |= kinds
    if is_empty and not found and allowed:
        found.append(min(allowed.values(), key=size))
    return found
