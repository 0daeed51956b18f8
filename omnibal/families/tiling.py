"""InternVL's dynamic tiling: into how many tiles an image is cut, from its width and height alone.

Source: Chen et al., "How Far Are We to GPT-4V?" (InternVL 1.5, 2024), section 3.3. Ties are broken exactly as in
transformers' ``GotOcr2ImageProcessor`` (the image processor of InternVL checkpoints), whose floating-point
comparisons are kept, since exact fractions would break some ties differently.
"""

from functools import lru_cache

from omnibal.errors import ConfigError


def tile_grid(width: int, height: int, *, max_tiles: int, tile_size: int, min_tiles: int = 1) -> tuple[int, int]:
    """The grid of tiles whose aspect ratio is closest to the image's.

    Args:
        width: Pixels of the image, at least 1.
        height: Pixels of the image, at least 1.
        max_tiles: Most tiles a grid may have, the thumbnail not counted.
        tile_size: Side of a square tile in pixels.
        min_tiles: Fewest tiles a grid may have.

    Returns:
        ``(columns, rows)``. Among grids of the same aspect ratio a larger one wins as long as the image has more than
        half the pixels of its canvas.

    Raises:
        ConfigError: If no grid lies between ``min_tiles`` and ``max_tiles``.

    >>> tile_grid(400, 200, max_tiles=4, tile_size=56)
    (2, 1)
    >>> tile_grid(400, 400, max_tiles=4, tile_size=56)
    (2, 2)
    >>> tile_grid(40, 40, max_tiles=4, tile_size=56)
    (1, 1)
    """
    aspect, pixels = width / height, width * height
    best, best_gap = (1, 1), float("inf")
    for columns, rows in _grids(min_tiles, max_tiles):
        gap = abs(aspect - columns / rows)
        if gap < best_gap or (gap == best_gap and pixels > 0.5 * tile_size * tile_size * columns * rows):
            best, best_gap = (columns, rows), gap
    return best


def num_tiles(width: int, height: int, *, max_tiles: int, tile_size: int, min_tiles: int = 1) -> int:
    """Tiles that an image brings to the ViT; an image cut into several brings a thumbnail of the whole as well.

    Arguments and errors are those of `tile_grid`.

    >>> [num_tiles(side, 200, max_tiles=4, tile_size=56) for side in (40, 60, 400, 200)]
    [5, 4, 3, 5]
    """
    columns, rows = tile_grid(width, height, max_tiles=max_tiles, tile_size=tile_size, min_tiles=min_tiles)
    return columns * rows + (columns * rows > 1)


@lru_cache(maxsize=64)
def _grids(min_tiles: int, max_tiles: int) -> tuple[tuple[int, int], ...]:
    """Every (columns, rows) with an admissible number of tiles, fewest tiles first, then fewest columns."""
    if not 1 <= min_tiles <= max_tiles:
        raise ConfigError(
            f"min_tiles and max_tiles must hold 1 <= min_tiles <= max_tiles, got {min_tiles}, {max_tiles}"
        )
    sides = range(1, max_tiles + 1)
    grids = [(c, r) for c in sides for r in range(-(-min_tiles // c), max_tiles // c + 1)]
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))
