"""LLaVA 1.5: every image is one tile. LLaVA-NeXT, LLaVA-OneVision: an image is cut into the tiles of a canvas.

LLaVA 1.5 cuts a tile from the middle of an image; CLIP runs up to its last block but one. The others take the canvas
that fits best and end its rows. Sources: Liu et al., "LLaVA-NeXT" (2024),
https://llava-vl.github.io/blog/2024-01-30-llava-next/; Li et al., "LLaVA-OneVision" (2024), section 3.2; as implemented
by transformers (``select_best_resolution``, ``LlavaNextProcessor._get_number_of_features``, and OneVision's), whose
rounding is kept.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import NamedTuple

from omnibal.errors import ConfigError
from omnibal.families.base import Config, Family, ImageLoad, ImageRule, LayerRecord, Size, each, section, size
from omnibal.families.parts import TEXT_CUTS, TOWER_CUTS, text_records, tile_size, tower_records
from omnibal.families.parts import image_tokens as tokens_of_tile

# Names of LLaVA's kin in the folders that are published; the first prefix that fits a name counts.
TOWER_ON_DISK = {
    "vision_tower.vision_model.": "vision_tower.vision_model.",
    "model.vision_tower.vision_model.": "vision_tower.vision_model.",  # as transformers 4.52 and later 4 wrote it
    "model.vision_tower.": "vision_tower.vision_model.",
    "vision_tower.": "vision_tower.vision_model.",  # as transformers 5 writes a model that was not loaded
}
LANGUAGE_ON_DISK = {
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
}


def layer_records(config: Config) -> tuple[LayerRecord, ...]:
    text = section(config, "text_config")
    return (*tower_records(config, newline=False), *text_records(text, tied=either_ties(config)))


def either_ties(config: Config) -> bool:
    """Head and embedding share their weight where the model or its language model says so."""
    ties = (config.get("tie_word_embeddings"), section(config, "text_config").get("tie_word_embeddings"))
    return any(ties)


def image_rule(config: Config, preprocessor: Config) -> ImageRule:
    return each(_fixed, ImageLoad(1, tokens_of_tile(config, tile_size(config, preprocessor))))


def _fixed(load: ImageLoad, _width: int, _height: int) -> ImageLoad:
    return load


FAMILY = Family(
    model_types=("llava",),
    image_rule=image_rule,
    layer_records=layer_records,
    layers="omnibal.vlm.tiled:llava",
    disk_prefixes=TOWER_ON_DISK | LANGUAGE_ON_DISK,
    cuts=TOWER_CUTS | TEXT_CUTS,
)


LEAST_SHRINK = 1.1  # LLaVA-OneVision leaves canvases that would be shrunk by less as they are
Resolution = tuple[int, int]  # (height, width) in pixels, in the order of ``image_grid_pinpoints``


class Fit(NamedTuple):
    """How an image lies on its canvas, in patches."""

    tiles: tuple[int, int]  # of the canvas, as (rows, columns)
    padding: tuple[int, int]  # rows above the image, and below it; columns left of it, and right of it
    kept: tuple[int, int]  # rows and columns between
    shrunk: tuple[int, int]  # rows and columns that they are shrunk to


@dataclass(frozen=True)
class Canvases:
    resolutions: tuple[Resolution, ...]  # the canvases to choose from, at least one
    tile: int  # side of a tile in pixels
    side: int  # patches along it
    most_tiles: int | None = None  # canvases are shrunk to about the tokens of so many tiles; None: never

    def best(self, width: int, height: int) -> Resolution:
        """The canvas that keeps most of an image's pixels and, among those, wastes least of itself.

        >>> Canvases(((336, 672), (672, 336), (672, 672)), 336, 24).best(1000, 500)
        (336, 672)
        """

        def merit(resolution: Resolution) -> tuple[int, int]:
            rows, columns = resolution
            scale = min(columns / width, rows / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, -(rows * columns - kept)

        return max(self.resolutions, key=merit)  # the first of equally good ones

    def fit(self, width: int, height: int) -> Fit:
        """How an image lies on its canvas.

        >>> Canvases(((336, 672), (672, 672)), 336, 24).fit(672, 300)
        Fit(tiles=(1, 2), padding=(1, 0), kept=(22, 48), shrunk=(22, 48))
        """
        canvas_height, canvas_width = self.best(width, height)
        tiles = canvas_height // self.tile, canvas_width // self.tile
        rows, columns = (count * self.side for count in tiles)
        above = left = 0
        if width / height > columns / rows:
            above = (rows - int(round(height * (columns / width), 7))) // 2
        else:
            left = (columns - int(round(width * (rows / height), 7))) // 2
        rows, columns = kept = rows - 2 * above, columns - 2 * left
        if self.most_tiles is not None:
            shrink = sqrt(rows * columns / (self.most_tiles * self.side**2))
            if shrink > LEAST_SHRINK:
                rows, columns = int(rows // shrink), int(columns // shrink)
        return Fit(tiles, (above, left), kept, (rows, columns))

    def load(self, width: int, height: int) -> ImageLoad:
        """What a lone image brings: its tokens, those of its canvas without padding, and one for the end of each row.

        >>> Canvases(((336, 672), (672, 672)), 336, 24).load(672, 336)
        ImageLoad(vision_units=3, llm_tokens=1752, vision_squared=0)
        """
        fit = self.fit(width, height)
        rows, columns = fit.shrunk
        return ImageLoad(1 + fit.tiles[0] * fit.tiles[1], self.side**2 + rows * (columns + 1))


def next_rule(config: Config, preprocessor: Config) -> ImageRule:
    return rule_of_canvases(next_canvases(config, preprocessor), lone_only=False)


def next_canvases(config: Config, preprocessor: Config | None = None) -> Canvases:
    """What LLaVA-NeXT fits images to, by default as its configuration alone says."""
    return _canvases(config, preprocessor or _own(config), "default")


def onevision_rule(config: Config, preprocessor: Config) -> ImageRule:
    """A sample's only image lies on a canvas; of several each is one tile, and the end of its only row."""
    return rule_of_canvases(onevision_canvases(config, preprocessor), lone_only=True)


def onevision_canvases(config: Config, preprocessor: Config | None = None) -> Canvases:
    """What LLaVA-OneVision fits images to, by default as its configuration alone says."""
    aspect = config.get("vision_aspect_ratio", "anyres_max_9")
    most_tiles = re.fullmatch(r"anyres_max_([1-9]\d*)", str(aspect))
    if not most_tiles:
        raise ConfigError(f"vision_aspect_ratio must be anyres_max_ and a number, got {aspect!r}")
    return _canvases(config, preprocessor or _own(config), "full", int(most_tiles[1]))


def _own(config: Config) -> Config:
    """An image processor's configuration that fits the model's."""
    tile = size(section(config, "vision_config"), "image_size")
    pinpoints = config.get("image_grid_pinpoints", ())
    return {"image_grid_pinpoints": pinpoints, "size": {"height": tile, "width": tile}}


def _canvases(config: Config, preprocessor: Config, selected: str, most_tiles: int | None = None) -> Canvases:
    strategy = config.get("vision_feature_select_strategy", selected)
    if strategy != selected:
        raise ConfigError(f"vision_feature_select_strategy must be {selected!r}, got {strategy!r}")
    cut, known = (tuple((h, w) for h, w in side.get("image_grid_pinpoints", ())) for side in (preprocessor, config))
    if not cut:
        raise ConfigError("image_grid_pinpoints must name at least one resolution, got none")
    if known and known != cut:
        raise ConfigError(f"image_grid_pinpoints of the preprocessor must be the model's, {known}, got {cut}")
    tile = tile_size(config, preprocessor)
    side = round(sqrt(tokens_of_tile(config, tile)))
    return Canvases(cut, tile, side, most_tiles)


def rule_of_canvases(canvases: Canvases, *, lone_only: bool) -> ImageRule:
    """The rule of images that are fitted to canvases; if ``lone_only``, a sample's only image alone is."""
    return partial(_loads, canvases, lone_only)


def _loads(canvases: Canvases, lone_only: bool, sizes: Sequence[Size]) -> tuple[ImageLoad, ...]:
    if lone_only and len(sizes) > 1:
        return (ImageLoad(1, canvases.side**2 + 1),) * len(sizes)
    return tuple(canvases.load(width, height) for width, height in sizes)


def next_records(config: Config) -> tuple[LayerRecord, ...]:
    tied = bool(config.get("tie_word_embeddings"))  # the top level alone decides
    text = section(config, "text_config")
    return (*tower_records(config, newline=True), *text_records(text, tied=tied))


def onevision_records(config: Config) -> tuple[LayerRecord, ...]:
    text = section(config, "text_config")
    vision = tower_records({"vision_feature_layer": -1, **config}, newline=True)
    return (*vision, *text_records(text, tied=either_ties(config)))


NEXT = replace(
    FAMILY,
    model_types=("llava_next",),
    image_rule=next_rule,
    layer_records=next_records,
    layers="omnibal.vlm.tiled:llava_next",
    disk_prefixes={"model.image_newline": "image_newline", **FAMILY.disk_prefixes},
)
ONEVISION = replace(
    NEXT,
    model_types=("llava_onevision",),
    image_rule=onevision_rule,
    layer_records=onevision_records,
    layers="omnibal.vlm.tiled:llava_onevision",
)
