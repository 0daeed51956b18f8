"""Questions about pictures of coloured shapes, each with the one answer it has."""

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from omnibal.demo.scenes import COLOURS, PLACES, SHAPES, Figure, Scene

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")
NAMES = ("Anna", "Tom", "Mia", "Ben")
THINGS = ("ball", "bag", "hat", "cup")
SHORT = " Answer briefly."


class Exchange(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str


def ask_colour(rng: np.random.Generator, scene: Scene) -> Exchange | None:
    """The colour of a shape that occurs once."""
    figure = _pick(rng, _unique(scene, "shape"))
    if figure is None:
        return None
    return _short_or_long(
        rng, f"What colour is the {figure.shape}?", figure.colour, f"The {figure.shape} is {figure.colour}."
    )


def ask_shape(rng: np.random.Generator, scene: Scene) -> Exchange | None:
    """The shape that has a colour which occurs once."""
    figure = _pick(rng, _unique(scene, "colour"))
    if figure is None:
        return None
    return _short_or_long(
        rng, f"Which shape is {figure.colour}?", figure.shape, f"The {figure.colour} shape is a {figure.shape}."
    )


def ask_count(rng: np.random.Generator, scene: Scene) -> Exchange:
    """The number of shapes."""
    count = NUMBERS[len(scene.figures)]
    return _short_or_long(rng, "How many shapes are there?", count, f"The number of shapes is {count}.")


def ask_place(rng: np.random.Generator, scene: Scene) -> Exchange | None:
    """The quarter of the picture where a shape is that occurs once."""
    figure = _pick(rng, _unique(scene, "shape"))
    if figure is None:
        return None
    return _short_or_long(
        rng, f"Where is the {figure.shape}?", figure.place, f"The {figure.shape} is at the {figure.place}."
    )


def ask_description(_: np.random.Generator, scene: Scene) -> Exchange:
    """All shapes in reading order: a long answer."""
    parts = [f"{_with_article(figure.colour)} {figure.shape} at the {figure.place}" for figure in scene.figures]
    return Exchange("Describe the image.", f"I see {' and '.join(parts)}.")


ABOUT_ONE: Mapping[str, Callable[[np.random.Generator, Scene], Exchange | None]] = MappingProxyType(
    {"colour": ask_colour, "shape": ask_shape, "count": ask_count, "place": ask_place, "description": ask_description}
)
"""Questions about one picture by kind; None where the picture leaves the question without a clear answer."""


def ask_pair(rng: np.random.Generator, first: Scene, second: Scene) -> Exchange:
    """About two pictures with one shape each: the colour or the shape in one of them."""
    number = int(rng.integers(2))
    figure, ordinal = (first, second)[number].figures[0], ("first", "second")[number]
    if rng.random() < 0.5:
        return Exchange(f"What colour is the shape in the {ordinal} image?{SHORT}", figure.colour)
    return Exchange(f"Which shape is in the {ordinal} image?{SHORT}", figure.shape)


def ask_text(rng: np.random.Generator) -> Exchange:
    """Without a picture: one to three sentences tell the answer."""
    count = int(rng.integers(1, 4))
    names, things, colours = (rng.permutation(words)[:count] for words in (NAMES, THINGS, list(COLOURS)))
    story = " ".join(f"{n} has {_with_article(c)} {t}." for n, c, t in zip(names, colours, things, strict=True))
    asked = int(rng.integers(count))
    return Exchange(f"{story} What colour is the {things[asked]}?{SHORT}", str(colours[asked]))


def vocabulary() -> list[str]:
    """Words that may be missing in a few random samples, each at the start of a text and within one, twice."""
    words = (*COLOURS, *SHAPES, *PLACES, *NUMBERS, *NAMES, *THINGS, "user", "assistant", "system")
    return [f"{word} {word}" for word in words] * 2


def _short_or_long(rng: np.random.Generator, question: str, word: str, sentence: str) -> Exchange:
    return Exchange(question + SHORT, word) if rng.random() < 0.5 else Exchange(question, sentence)


def _with_article(colour: str) -> str:
    return f"an {colour}" if colour[0] in "aeiou" else f"a {colour}"


def _unique(scene: Scene, attribute: str) -> list[Figure]:
    counts = Counter(getattr(figure, attribute) for figure in scene.figures)
    return [figure for figure in scene.figures if counts[getattr(figure, attribute)] == 1]


def _pick(rng: np.random.Generator, figures: list[Figure]) -> Figure | None:
    return figures[rng.integers(len(figures))] if figures else None
