"""Lengths for the paper's other datasets, tile limits and resolutions; made up, since none of them is published."""

import numpy as np

from omnibal.data.lengths import SampleLengths
from omnibal.families.tiled import num_tiles
from tools.synthetic import INTERNVL_MIX, TOKENS_PER_TILE, SyntheticSource, tiled_lengths

SAMPLES = 100_000
LCS = (SyntheticSource("lcs", 558_128, (0.0, 1.0, 0.0, 0.0, 0.0), 60, 0.4, 34),)
"""One tile and a caption."""
PHOTOGRAPHS = {"llava_mix", "llava_instruct_zh", "sharegpt4v"}
PHOTOGRAPH = ((640, 480), (640, 427))
"""The two formats of a camera, at COCO's size: nine in ten of its images have 168 to 356 thousand pixels."""
SHAPES = {1: ((448, 448),), 3: ((900, 450),), 4: ((1350, 450),), 5: ((1300, 1300),)}
"""Images that a sample with so many tiles may have, each as often: a chart, a wide picture, a wider one, a page."""


def llava() -> SampleLengths:
    """LLaVA-665K: the mix's own part."""
    return tiled_lengths(SAMPLES, seed=1, sources=INTERNVL_MIX[:1])


def captions() -> SampleLengths:
    """LCS-558K."""
    return tiled_lengths(SAMPLES, seed=1, sources=LCS)


def cut_into(max_tiles: int = 4, pixels: int = 448) -> SampleLengths:
    """The mix with its images cut into at most so many tiles of so many pixels, thumbnails aside.

    A tile brings a token for every 28 × 28 pixels. InternVL's rule cuts an image further the smaller the tiles are: a
    photograph is one tile of 448 pixels, and four and a thumbnail of 336.
    """
    drawn, generator = tiled_lengths(SAMPLES, seed=1), np.random.default_rng(2)
    sources = [number for number, source in enumerate(INTERNVL_MIX) if source.name in PHOTOGRAPHS]
    photographs = (drawn.vision_units == 1) & np.isin(drawn.source, sources)
    kinds = [(drawn.vision_units == before, shapes) for before, shapes in SHAPES.items()]
    tiles = drawn.vision_units.copy()
    for members, shapes in (*kinds, (photographs, PHOTOGRAPH)):
        counts = [num_tiles(width, height, max_tiles=max_tiles, tile_size=pixels) for width, height in shapes]
        tiles[members] = generator.choice(counts, size=members.sum())
    return with_tiles(drawn, tiles, pixels)


def with_tiles(drawn: SampleLengths, tiles: np.ndarray | None = None, pixels: int = 448) -> SampleLengths:
    """The samples with other tiles, or as many; of so many pixels each."""
    tiles = drawn.vision_units if tiles is None else tiles
    text = drawn.llm_tokens - TOKENS_PER_TILE * drawn.vision_units
    tokens = (pixels // 28) ** 2 * tiles + text
    return SampleLengths(tiles, tokens, target_tokens=drawn.target_tokens, source=drawn.source)
