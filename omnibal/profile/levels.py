"""Recompute levels: how much of a layer's activations is kept from forward to backward."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final, Literal

from omnibal.errors import ConfigError

Level = Literal["none", "selective", "full"]
LEVELS: Final[tuple[Level, ...]] = ("none", "selective", "full")
"""From the one that keeps most to the one that keeps least."""
MOST_LAYERS: Final = 10**6
"""No model has more: a number beyond it is a slip."""


def every_layer(level: Level, num_layers: int) -> tuple[Level, ...]:
    """The same level for each layer."""
    return (level,) * num_layers


def check_levels(levels: Sequence[str], num_layers: int) -> None:
    """Refuse what is not a level for each layer.

    Raises:
        ConfigError: There are more or fewer, or one is unknown.
    """
    if len(levels) != num_layers:
        raise ConfigError(f"recompute must have a level for each of {num_layers} layers, got {len(levels)}")
    unknown = sorted(set(levels) - set(LEVELS))
    if unknown:
        raise ConfigError(f"recompute must be one of {', '.join(LEVELS)} for each layer, got {unknown[0]!r}")


def levels_in_words(levels: Iterable[Level]) -> str:
    """Levels of consecutive layers as people read them.

    >>> levels_in_words(("full", "full", "none"))
    '2 full, 1 none'
    """
    return ", ".join(f"{len(list(group))} {level}" for level, group in groupby(levels))


def levels_from_words(words: str) -> tuple[Level, ...]:
    """Back again; what is not understood is left out, so that the number of levels is wrong.

    >>> levels_from_words("2 full, 1 none")
    ('full', 'full', 'none')
    >>> levels_from_words("2 full, none")
    ('full', 'full')
    """
    levels: list[Level] = []
    for entry in words.split(","):
        count, _, word = entry.strip().partition(" ")
        repeated = min(int(count), MOST_LAYERS) if count.isdecimal() else 0
        levels += [level for level in LEVELS if level == word] * repeated
    return tuple(levels)
