"""The demo's datasets: samples about one picture, with long answers, about two pictures, about none."""

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from omnibal.demo.questions import ABOUT_ONE, Exchange, ask_description, ask_pair, ask_text
from omnibal.demo.scenes import Scene, random_scene


class Sample(NamedTuple):
    """Pictures and a conversation about them; ``kinds`` names what is asked, joined by ``+``."""

    kinds: str
    scenes: list[Scene]
    exchanges: list[Exchange]


class Dataset(NamedTuple):
    """How a dataset's samples are made (from a generator and the most turns), its part of all, and its repetitions."""

    make: Callable[[np.random.Generator, int], Sample]
    share: float
    repeat: int = 1


def shapes(rng: np.random.Generator, max_turns: int) -> Sample:
    """Different questions about one picture."""
    scene, turns = _scene(rng, (0.7, 0.2, 0.07, 0.03)), int(rng.integers(max_turns)) + 1
    asked = {kind: ABOUT_ONE[kind](rng, scene) for kind in rng.permutation(list(ABOUT_ONE)).tolist()}
    answered = {kind: exchange for kind, exchange in asked.items() if exchange is not None}
    kinds = list(answered)[:turns]
    return Sample("+".join(kinds), [scene], [answered[kind] for kind in kinds])


def scenes(rng: np.random.Generator, _: int) -> Sample:
    """Long answers about fuller pictures."""
    scene = _scene(rng, (0.0, 0.5, 0.3, 0.2))
    return Sample("description", [scene], [ask_description(rng, scene)])


def pairs(rng: np.random.Generator, _: int) -> Sample:
    """Two pictures and a question about one of them."""
    first, second = random_scene(rng, 1), random_scene(rng, 1)
    return Sample("pair", [first, second], [ask_pair(rng, first, second)])


def stories(rng: np.random.Generator, _: int) -> Sample:
    """No picture."""
    return Sample("text", [], [ask_text(rng)])


DATASETS = MappingProxyType(
    {
        "shapes": Dataset(shapes, share=0.6),
        "scenes": Dataset(scenes, share=0.1, repeat=2),
        "pairs": Dataset(pairs, share=0.12),
        "stories": Dataset(stories, share=0.18),
    }
)


def _scene(rng: np.random.Generator, chances: tuple[float, ...]) -> Scene:
    """A picture with one, two, three or four figures."""
    return random_scene(rng, int(rng.choice([1, 2, 3, 4], p=chances)))
