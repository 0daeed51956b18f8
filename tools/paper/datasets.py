"""Lengths for the paper's other datasets, tile limits and resolutions; made up, since none of them is published."""

import numpy as np

from omnibal.data.lengths import SampleLengths
from omnibal.data.synthetic import INTERNVL_MIX, TOKENS_PER_TILE, SyntheticSource, tiled_lengths
from omnibal.families.tiling import num_tiles

SAMPLES = 100_000
LCS = (SyntheticSource("lcs", 558_128, (0.0, 1.0, 0.0, 0.0, 0.0), 60, 0.4, 34),)
"""One tile and a caption."""
SHAPES = {
    # tiles under at most 4 → (share, width, height) of images that bring so many
    1: ((0.5, 640, 480), (0.5, 448, 448)),
    3: ((1.0, 900, 450),),
    4: ((1.0, 1350, 450),),
    5: ((1.0, 1300, 1300),),
}
"""Images that a sample with so many tiles may have: a photograph or a small square, a wide one, a page."""


def llava() -> SampleLengths:
    """LLaVA-665K: the mix's own part."""
    return tiled_lengths(SAMPLES, seed=1, sources=INTERNVL_MIX[:1])


def captions() -> SampleLengths:
    """LCS-558K."""
    return tiled_lengths(SAMPLES, seed=1, sources=LCS)


def cut_into(max_tiles: int) -> SampleLengths:
    """The mix with its images cut into at most so many tiles, thumbnails aside."""
    drawn, generator = tiled_lengths(SAMPLES, seed=1), np.random.default_rng(2)
    tiles = drawn.vision_units.copy()
    for before, shapes in SHAPES.items():
        members = np.flatnonzero(drawn.vision_units == before)
        shares = [share for share, _, _ in shapes]
        counts = [num_tiles(width, height, max_tiles=max_tiles, tile_size=448) for _, width, height in shapes]
        tiles[members] = generator.choice(counts, size=len(members), p=shares)
    return _with_tiles(drawn, tiles, TOKENS_PER_TILE)


def at_resolution(pixels: int) -> SampleLengths:
    """The mix in tiles of another size: a token for every 28 × 28 pixels."""
    drawn = tiled_lengths(SAMPLES, seed=1)
    return _with_tiles(drawn, drawn.vision_units, (pixels // 28) ** 2)


def _with_tiles(drawn: SampleLengths, tiles: np.ndarray, tokens_per_tile: int) -> SampleLengths:
    text = drawn.llm_tokens - TOKENS_PER_TILE * drawn.vision_units
    return SampleLengths(tiles, tokens_per_tile * tiles + text, source=drawn.source)
