"""Pictures of coloured shapes: what stands where, and the drawing of it."""

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 80, 220),
    "yellow": (235, 215, 40),
    "purple": (150, 50, 190),
    "orange": (245, 140, 30),
}
RIM = (255, 255, 255)
SHAPES = ("ring", "box", "triangle", "cross")
PLACES = ("top left", "top right", "bottom left", "bottom right")

SHORTEST_SIDE, LONGEST_SIDE = 40, 208
MAX_ASPECT = 4.5


@dataclass(frozen=True)
class Figure:
    """One coloured shape in one quarter of the picture."""

    colour: str
    shape: str
    place: str


@dataclass(frozen=True)
class Scene:
    """A picture: its size in pixels and one to four figures in different quarters, in reading order."""

    width: int
    height: int
    figures: tuple[Figure, ...]


def random_scene(rng: np.random.Generator, num_figures: int) -> Scene:
    """Figures of random colours and shapes in random quarters of a picture of random size and aspect ratio."""
    ratio = MAX_ASPECT ** (rng.random() ** 2)  # long over short side: squares are most frequent
    short = SHORTEST_SIDE * (LONGEST_SIDE / ratio / SHORTEST_SIDE) ** rng.random()
    width, height = (short * ratio, short) if rng.random() < 0.5 else (short, short * ratio)
    places = sorted(rng.choice(len(PLACES), size=num_figures, replace=False).tolist())
    figures = tuple(Figure(str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES)), PLACES[place]) for place in places)
    return Scene(round(width), round(height), figures)


def draw_scene(rng: np.random.Generator, scene: Scene) -> Image.Image:
    """Draws a scene on a dark background; figures vary in size, lie off centre and stretch with the picture.

    A white rim shows a figure's shape whatever its colour: without it, telling shapes takes several times as long to
    learn as telling colours.
    """
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
    canvas: ImageDraw.ImageDraw,
    shape: str,
    centre: tuple[float, float],
    reach: tuple[float, float],
    fill: tuple[int, ...],
) -> None:
    """Fills a shape that reaches so many pixels from its centre to each side, and up and down."""
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
