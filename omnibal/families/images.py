"""What an image brings to the ViT and to the LLM, by the rule of the model's family, from its size alone."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from omnibal.errors import ConfigError
from omnibal.families import llava_next, qwen2_vl, tiling
from omnibal.families.base import section, size, size_pair

Config = Mapping[str, Any]
MOST_TILES = 1024
"""Of an image: every grid of as many tiles is weighed against its shape, and trained models have 6 to 40."""


class ImageLoad(NamedTuple):
    """What one image brings.

    Attributes:
        vision_units: Tiles; patches in a native-resolution ViT.
        llm_tokens: Tokens that stand for it in the LLM, brackets not counted.
        vision_squared: Square of its patches in a native-resolution ViT, whose attention covers the image; else 0.
    """

    vision_units: int
    llm_tokens: int
    vision_squared: int = 0


ImageRule = Callable[[int, int], ImageLoad]
"""From width and height in pixels, both at least 1; a ValueError says why the model refuses such an image.

Rules are partial functions rather than closures, so that datasets which hold them can be pickled.
"""


def image_rule(
    config: Config, preprocessor: Config, *, max_tiles: int | None = None, min_tiles: int | None = None
) -> ImageRule:
    """The rule of a model.

    Args:
        config: The model's configuration as a dict (``config.to_dict()``).
        preprocessor: The image processor's (``processor.to_dict()``).
        max_tiles: Most tiles of an image where the family has such a limit; what the preprocessor says by default.
        min_tiles: Fewest tiles, likewise.

    Raises:
        ConfigError: If the family is unknown or has no tile limits, or the two configurations do not fit one another.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in RULES:
        raise ConfigError(f"model_type must be one of {', '.join(RULES)}, got {model_type!r}")
    if model_type == "internvl":
        return _internvl(config, preprocessor, max_tiles, min_tiles)
    if max_tiles is not None or min_tiles is not None:
        raise ConfigError(f"max_tiles and min_tiles must be left out for {model_type}, got {max_tiles}, {min_tiles}")
    return RULES[model_type](config, preprocessor)


def _internvl(
    config: Config, preprocessor: Config, max_tiles: int | None = None, min_tiles: int | None = None
) -> ImageRule:
    vision = section(config, "vision_config")
    tile, patch = size_pair(vision, "image_size"), size_pair(vision, "patch_size")
    cut = _square(preprocessor, "size")
    if tile != (cut, cut):
        raise ConfigError(f"size of the preprocessor must be the vision_config's image_size {tile}, got {(cut, cut)}")
    ratio = config.get("downsample_ratio", 0.5)
    tokens = int(tile[0] // patch[0] * ratio) * int(tile[1] // patch[1] * ratio)
    most = max_tiles or size(preprocessor, "max_patches", default=12)
    if most > MOST_TILES:
        raise ConfigError(f"max_tiles must be at most {MOST_TILES}, got {most}")
    fewest = min(min_tiles or size(preprocessor, "min_patches", default=1), most)
    return partial(_tiled, {"max_tiles": most, "min_tiles": fewest, "tile_size": cut}, tokens)


def _tiled(limits: Mapping[str, int], tokens: int, width: int, height: int) -> ImageLoad:
    tiles = tiling.num_tiles(width, height, **limits)
    return ImageLoad(tiles, tiles * tokens)


def _llava(config: Config, preprocessor: Config) -> ImageRule:
    """LLaVA 1.5: every image is one tile."""
    tokens = (_square(preprocessor, "crop_size") // _patch(config)) ** 2 + _class_token(config)
    return partial(_fixed, ImageLoad(1, tokens))


def _fixed(load: ImageLoad, _width: int, _height: int) -> ImageLoad:
    return load


def _llava_next(config: Config, preprocessor: Config) -> ImageRule:
    tile, patch = _square(preprocessor, "crop_size"), _patch(config)
    resolutions = [(height, width) for height, width in preprocessor.get("image_grid_pinpoints", ())]
    return partial(_any_resolution, resolutions, tile, patch, _class_token(config))


def _any_resolution(
    resolutions: Sequence[llava_next.Resolution], tile: int, patch: int, extra: int, width: int, height: int
) -> ImageLoad:
    tiles = llava_next.num_tiles(width, height, resolutions=resolutions, tile_size=tile)
    tokens = llava_next.num_image_tokens(width, height, resolutions=resolutions, tile_size=tile, patch_size=patch)
    return ImageLoad(tiles, tokens + extra)


def _qwen2_vl(config: Config, preprocessor: Config) -> ImageRule:
    pixels = section(preprocessor, "size")
    sizes = {key: size(preprocessor, key) for key in ("patch_size", "merge_size")}
    limits = {"min_pixels": size(pixels, "shortest_edge"), "max_pixels": size(pixels, "longest_edge")}
    return partial(_native_resolution, sizes | limits)


def _native_resolution(sizes: Mapping[str, int], width: int, height: int) -> ImageLoad:
    columns, rows = qwen2_vl.patch_grid(width, height, **sizes)
    patches = columns * rows
    return ImageLoad(patches, patches // sizes["merge_size"] ** 2, patches**2)


def _square(preprocessor: Config, key: str) -> int:
    """The side of a square ``{"height", "width"}``."""
    sides = section(preprocessor, key)
    if size(sides, "height") != size(sides, "width"):
        raise ConfigError(f"{key} of the preprocessor must be square, got {dict(sides)}")
    return size(sides, "height")


def _patch(config: Config) -> int:
    return size(section(config, "vision_config"), "patch_size")


def _class_token(config: Config) -> int:
    """1 where the ViT's class token goes on to the LLM."""
    return int(config.get("vision_feature_select_strategy", "default") == "full")


RULES: Mapping[str, Callable[[Config, Config], ImageRule]] = MappingProxyType(
    {
        "internvl": _internvl,
        "llava": _llava,
        "llava_next": _llava_next,
        "qwen2_vl": _qwen2_vl,
        "qwen2_5_vl": _qwen2_vl,
        "qwen3_vl": _qwen2_vl,
    }
)
"""From ``model_type`` to what makes the family's rule of a configuration and its preprocessor's."""
