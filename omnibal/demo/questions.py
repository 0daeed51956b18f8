"""Pictures of coloured shapes, questions about them, each with the one answer it has, and the datasets made of them."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {
    "red": (220, 40, 40), "green": (40, 170, 60), "blue": (40, 80, 220),
    "yellow": (235, 215, 40), "purple": (150, 50, 190), "orange": (245, 140, 30),
}  # fmt: skip
# A white rim shows a shape whatever its colour: without it, telling shapes takes several times as long to learn as
# telling colours.
RIM = (255, 255, 255)
SHAPES = ("ring", "box", "triangle", "cross")
PLACES = ("top left", "top right", "bottom left", "bottom right")

SHORTEST_SIDE, LONGEST_SIDE = 40, 208
MAX_ASPECT = 4.5


@dataclass(frozen=True)
class ColouredShape:
    colour: str
    shape: str
    place: str


@dataclass(frozen=True)
class Scene:
    """A picture: its size in pixels and one to four figures in different quarters, in reading order."""

    width: int
    height: int
    figures: tuple[ColouredShape, ...]


def random_scene(rng: np.random.Generator, num_figures: int) -> Scene:
    """Figures of random colours and shapes in random quarters of a picture of random size and aspect ratio."""
    ratio = MAX_ASPECT ** (rng.random() ** 2)  # long over short side: squares are most frequent
    short = SHORTEST_SIDE * (LONGEST_SIDE / ratio / SHORTEST_SIDE) ** rng.random()
    width, height = (short * ratio, short) if rng.random() < 0.5 else (short, short * ratio)
    places = sorted(rng.choice(len(PLACES), size=num_figures, replace=False).tolist())
    figures = (
        ColouredShape(str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES)), PLACES[place]) for place in places
    )
    return Scene(round(width), round(height), tuple(figures))


def draw_scene(rng: np.random.Generator, scene: Scene) -> Image.Image:
    """Draw a scene on a dark background; shapes vary in size, lie off centre and stretch with the picture."""
    background = (int(rng.integers(0, 40)),) * 3
    image = Image.new("RGB", (scene.width, scene.height), background)
    canvas = ImageDraw.Draw(image)
    for figure in scene.figures:
        row, column = divmod(PLACES.index(figure.place), 2)
        x, y = (column + rng.uniform(0.48, 0.52)) * scene.width / 2, (row + rng.uniform(0.48, 0.52)) * scene.height / 2
        size = rng.uniform(0.40, 0.46) / 2
        for scale, fill in ((1.0, RIM), (0.82, COLOURS[figure.colour])):
            _fill(canvas, figure.shape, (x, y), (scale * size * scene.width, scale * size * scene.height), fill)
        if figure.shape == "ring":
            _fill(canvas, figure.shape, (x, y), (0.3 * size * scene.width, 0.3 * size * scene.height), background)
    return image


def _fill(
    canvas: ImageDraw.ImageDraw, shape: str, centre: tuple[float, float], reach: tuple[float, float],
    fill: tuple[int, ...],
) -> None:  # fmt: skip
    """Fill a shape that reaches so many pixels from its centre to each side, and up and down."""
    (x, y), (a, b) = centre, reach
    if shape == "ring":
        canvas.ellipse((x - a, y - b, x + a, y + b), fill=fill)
    elif shape == "box":
        canvas.rectangle((x - a, y - b, x + a, y + b), fill=fill)
    elif shape == "triangle":
        canvas.polygon([(x, y - b), (x + a, y + b), (x - a, y + b)], fill=fill)
    else:
        canvas.rectangle((x - a, y - b / 3, x + a, y + b / 3), fill=fill)
        canvas.rectangle((x - a / 3, y - b, x + a / 3, y + b), fill=fill)


NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")
NAMES = ("Anna", "Tom", "Mia", "Ben")
THINGS = ("ball", "bag", "hat", "cup")
SHORT = " Answer briefly."


class Exchange(NamedTuple):
    question: str
    answer: str


Ask = Callable[[np.random.Generator, Scene], Exchange | None]
"""Asks about a picture; None where it leaves the question without a clear answer."""


class DemoSample(NamedTuple):
    """Pictures and a conversation about them; ``kinds`` names what is asked, joined by ``+``."""

    kinds: str
    scenes: list[Scene]
    exchanges: list[Exchange]


class DemoDataset(NamedTuple):
    """How a dataset's samples are made, and how many there are."""

    make: Callable[[np.random.Generator, int], DemoSample]
    """Makes a sample from a generator and the most turns."""
    share: float
    """Share of all samples, repetitions included."""
    repeat: int = 1


def _ask_about_one(known_by: str, asked: str, question: str, sentence: str) -> Ask:
    """Ask for one attribute of a figure that another one tells apart from all others; both are named in the texts."""

    def ask(rng: np.random.Generator, scene: Scene) -> Exchange | None:
        counts = Counter(getattr(figure, known_by) for figure in scene.figures)
        alone = [vars(figure) for figure in scene.figures if counts[getattr(figure, known_by)] == 1]
        if not alone:
            return None
        words = alone[rng.integers(len(alone))]
        return _short_or_long(rng, question.format(**words), words[asked], sentence.format(**words))

    return ask


def ask_count(rng: np.random.Generator, scene: Scene) -> Exchange:
    count = NUMBERS[len(scene.figures)]
    return _short_or_long(rng, "How many shapes are there?", count, f"The number of shapes is {count}.")


def ask_description(_: np.random.Generator, scene: Scene) -> Exchange:
    """All shapes in reading order: a long answer."""
    parts = [f"{_with_article(figure.colour)} {figure.shape} at the {figure.place}" for figure in scene.figures]
    return Exchange("Describe the image.", f"I see {' and '.join(parts)}.")


# Questions about one picture by kind.
ABOUT_ONE: Mapping[str, Ask] = {
    "colour": _ask_about_one("shape", "colour", "What colour is the {shape}?", "The {shape} is {colour}."),
    "shape": _ask_about_one("colour", "shape", "Which shape is {colour}?", "The {colour} shape is a {shape}."),
    "count": ask_count,
    "place": _ask_about_one("shape", "place", "Where is the {shape}?", "The {shape} is at the {place}."),
    "description": ask_description,
}


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


def shapes(rng: np.random.Generator, max_turns: int) -> DemoSample:
    scene, turns = _scene(rng, (0.7, 0.2, 0.07, 0.03)), int(rng.integers(max_turns)) + 1
    asked = {kind: ABOUT_ONE[kind](rng, scene) for kind in rng.permutation(list(ABOUT_ONE)).tolist()}
    answered = {kind: exchange for kind, exchange in asked.items() if exchange is not None}
    kinds = list(answered)[:turns]
    return DemoSample("+".join(kinds), [scene], [answered[kind] for kind in kinds])


def scenes(rng: np.random.Generator, _: int) -> DemoSample:
    scene = _scene(rng, (0.0, 0.5, 0.3, 0.2))
    return DemoSample("description", [scene], [ask_description(rng, scene)])


def pairs(rng: np.random.Generator, _: int) -> DemoSample:
    first, second = random_scene(rng, 1), random_scene(rng, 1)
    return DemoSample("pair", [first, second], [ask_pair(rng, first, second)])


def stories(rng: np.random.Generator, _: int) -> DemoSample:
    return DemoSample("text", [], [ask_text(rng)])


DATASETS: Mapping[str, DemoDataset] = {
    "shapes": DemoDataset(shapes, share=0.6),
    "scenes": DemoDataset(scenes, share=0.1, repeat=2),
    "pairs": DemoDataset(pairs, share=0.12),
    "stories": DemoDataset(stories, share=0.18),
}


def _scene(rng: np.random.Generator, chances: tuple[float, ...]) -> Scene:
    return random_scene(rng, int(rng.choice([1, 2, 3, 4], p=chances)))
