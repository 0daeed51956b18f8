"""LLaVA-NeXT's any-resolution rule: into how many tiles an image is cut, and how many LLM tokens it becomes.

Source: Liu et al., "LLaVA-NeXT" (2024), https://llava-vl.github.io/blog/2024-01-30-llava-next/, as implemented by
transformers (``select_best_resolution``, ``LlavaNextProcessor._get_number_of_features``), whose rounding is kept.
"""

from collections.abc import Sequence

from omnibal.errors import ConfigError
from omnibal.families.base import Config, Family, ImageLoad, ImageRule, each, square
from omnibal.families.llava import class_token, patch_size

Resolution = tuple[int, int]
"""(height, width) in pixels, in the order of ``image_grid_pinpoints``."""


def best_resolution(width: int, height: int, resolutions: Sequence[Resolution]) -> Resolution:
    """The canvas that keeps most of an image's pixels and, among those, wastes least of itself.

    Args:
        width: Pixels of the image, at least 1.
        height: Pixels of the image, at least 1.
        resolutions: The canvases to choose from; the first of equally good ones is taken.

    Raises:
        ConfigError: If there is none to choose from.

    >>> best_resolution(1000, 500, [(336, 672), (672, 336), (672, 672)])
    (336, 672)
    """
    if not resolutions:
        raise ConfigError("image_grid_pinpoints must name at least one resolution, got none")

    def merit(resolution: Resolution) -> tuple[int, int]:
        rows, columns = resolution
        scale = min(columns / width, rows / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, -(rows * columns - kept)

    return max(resolutions, key=merit)


def num_tiles(width: int, height: int, *, resolutions: Sequence[Resolution], tile_size: int) -> int:
    """Tiles that an image brings to the ViT: those of its canvas, and the whole image once more.

    >>> num_tiles(1000, 500, resolutions=[(336, 672), (672, 336), (672, 672)], tile_size=336)
    3
    """
    rows, columns = best_resolution(width, height, resolutions)
    return (rows // tile_size) * (columns // tile_size) + 1


def num_image_tokens(
    width: int, height: int, *, resolutions: Sequence[Resolution], tile_size: int, patch_size: int
) -> int:
    """Tokens that an image brings to the LLM.

    Those of the whole image; those of the canvas without the rows or columns that only pad it; one for the end of each
    row. No class token is counted (``vision_feature_select_strategy`` "default").

    >>> num_image_tokens(672, 336, resolutions=[(336, 672), (672, 672)], tile_size=336, patch_size=14)
    1752
    """
    side = tile_size // patch_size
    canvas_rows, canvas_columns = best_resolution(width, height, resolutions)
    rows, columns = canvas_rows // tile_size * side, canvas_columns // tile_size * side
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    return side * side + rows * columns + rows


def image_rule(config: Config, preprocessor: Config) -> ImageRule:
    """Tiles and tokens by the preprocessor's canvases."""
    resolutions = [(height, width) for height, width in preprocessor.get("image_grid_pinpoints", ())]
    return each(_image_load, resolutions, square(preprocessor, "crop_size"), patch_size(config), class_token(config))


def _image_load(
    resolutions: Sequence[Resolution], tile: int, patch: int, extra: int, width: int, height: int
) -> ImageLoad:
    tiles = num_tiles(width, height, resolutions=resolutions, tile_size=tile)
    tokens = num_image_tokens(width, height, resolutions=resolutions, tile_size=tile, patch_size=patch)
    return ImageLoad(tiles, tokens + extra)


FAMILY = Family(model_types=("llava_next",), image_rule=image_rule)
