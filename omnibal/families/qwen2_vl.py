"""Qwen2-VL's native resolution: how many patches an image brings to the ViT, and how many tokens to the LLM.

Source: Wang et al., "Qwen2-VL" (2024), section 2.1, as implemented by transformers (``smart_resize``), whose rounding
is kept. Qwen2.5-VL and Qwen3-VL follow the same rule with other sizes.
"""

from collections.abc import Mapping
from math import ceil, floor, sqrt

from omnibal.families.base import Config, Family, ImageLoad, ImageRule, each, section, size

MAX_ASPECT = 200
"""The widest image, as a ratio of its sides, that the models accept."""


def patch_grid(
    width: int, height: int, *, patch_size: int, merge_size: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """The patches of an image after it is resized to whole blocks of merged patches.

    Args:
        width: Pixels of the image, at least 1.
        height: Pixels of the image, at least 1.
        patch_size: Side of a patch in pixels.
        merge_size: Patches, in each direction, that become one LLM token.
        min_pixels: Fewest pixels of the resized image.
        max_pixels: Most pixels of the resized image (thin images may exceed it by the rounding to whole blocks).

    Returns:
        ``(columns, rows)``, both multiples of ``merge_size``.

    Raises:
        ValueError: If one side is more than 200 times the other: the models refuse such an image.

    >>> patch_grid(100, 200, patch_size=14, merge_size=2, min_pixels=56 * 56, max_pixels=28 * 28 * 1280)
    (8, 14)
    """
    if max(width, height) / min(width, height) > MAX_ASPECT:
        raise ValueError(f"image must be at most {MAX_ASPECT} times as long as wide, got {width} x {height} pixels")
    block = patch_size * merge_size
    columns, rows = round(width / block), round(height / block)
    pixels = columns * rows * block * block
    if pixels > max_pixels:
        shrink = sqrt((height * width) / max_pixels)
        columns, rows = max(1, floor(width / shrink / block)), max(1, floor(height / shrink / block))
    elif pixels < min_pixels:
        grow = sqrt(min_pixels / (height * width))
        columns, rows = ceil(width * grow / block), ceil(height * grow / block)
    return columns * merge_size, rows * merge_size


def image_rule(config: Config, preprocessor: Config) -> ImageRule:
    """Patches and tokens by the preprocessor's least and most pixels; the model's configuration adds nothing."""
    pixels = section(preprocessor, "size")
    sizes = {key: size(preprocessor, key) for key in ("patch_size", "merge_size")}
    limits = {"min_pixels": size(pixels, "shortest_edge"), "max_pixels": size(pixels, "longest_edge")}
    return each(_image_load, sizes | limits)


def _image_load(sizes: Mapping[str, int], width: int, height: int) -> ImageLoad:
    columns, rows = patch_grid(width, height, **sizes)
    patches = columns * rows
    return ImageLoad(patches, patches // sizes["merge_size"] ** 2, patches**2)


FAMILY = Family(model_types=("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), image_rule=image_rule)
