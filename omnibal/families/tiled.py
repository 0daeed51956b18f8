"""Models whose ViT sees fixed tiles: InternVL and the LLaVAs.

**InternVL**: a ViT, pixel shuffle, a two-layer projector, a decoder-only language model. Source of its dynamic tiling:
Chen et al., "How Far Are We to GPT-4V?" (InternVL 1.5, 2024), section 3.3. Ties are broken exactly as in transformers'
``GotOcr2ImageProcessor`` (the image processor of InternVL checkpoints), whose floating-point comparisons are kept,
since exact fractions would break some ties differently.

**LLaVA 1.5** cuts one tile from the middle of an image; CLIP runs up to its last block but one. **LLaVA-NeXT** and
**LLaVA-OneVision** take the canvas that fits best, cut it into tiles and end its rows. Sources: Liu et al.,
"LLaVA-NeXT" (2024), https://llava-vl.github.io/blog/2024-01-30-llava-next/; Li et al., "LLaVA-OneVision" (2024),
section 3.2; as implemented by transformers (``select_best_resolution``, ``LlavaNextProcessor._get_number_of_features``,
and OneVision's), whose rounding is kept.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import sqrt
from typing import Any, NamedTuple

from omnibal.errors import ConfigError
from omnibal.families.base import (
    Config,
    Family,
    ImageLoad,
    ImageRule,
    LayerRecord,
    Size,
    each,
    numbered,
    section,
    size,
    size_pair,
    square,
)
from omnibal.families.parts import (
    TEXT_CUTS,
    TOWER_CUTS,
    Cut,
    attention_and_mlp,
    either_ties,
    text_records,
    tile_size,
    tower_records,
)
from omnibal.families.parts import image_tokens as tokens_of_tile

# Of an image: every grid of as many tiles is weighed against its shape, and trained models have 6 to 40.
MOST_TILES = 1024
_USUAL = {"use_mean_pooling": True, "use_mask_token": False, "use_absolute_position_embeddings": True}
# Names in published folders; the first prefix that fits a name counts.
LANGUAGE_ON_DISK = {
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
}


def internvl_records(config: Config) -> tuple[LayerRecord, ...]:
    """The pipeline layers of an InternVL model, first to last; the same under every partition."""
    # Sizes are: ``hidden`` (width of the layer's output), ``intermediate``, ``heads``, ``kv_heads``, ``head_dim``,
    # ``vocab``; of a block ``rms_norms`` and ``qk_norms`` (how many it has, the latter of queries and keys);
    # ``patches_per_tile`` and ``tokens_per_tile`` (patches and CLS) of the ViT; ``shuffled`` (width into the
    # projector), ``image_tokens_per_tile`` (what a tile brings to the language model); ``parameters``.
    layer, strategy = config.get("vision_feature_layer", -1), config.get("vision_feature_select_strategy", "default")
    if layer != -1:
        raise ConfigError(f"vision_feature_layer must be -1 (the last ViT block), got {layer!r}")
    if strategy != "default":
        raise ConfigError(f"vision_feature_select_strategy must be 'default' (CLS is dropped), got {strategy!r}")
    vision, text = section(config, "vision_config"), section(config, "text_config")
    for key, usual in _USUAL.items():
        if vision.get(key, usual) != usual:
            raise ConfigError(f"vision_config.{key} must be {usual}, as in published models, got {vision[key]!r}")
    tied = bool(config.get("tie_word_embeddings", True))  # the top level decides, as in transformers
    return (*_vision_records(config, vision, size(text, "hidden_size")), *text_records(text, tied=tied))


def _vision_records(config: Config, vision: Config, text_hidden: int) -> list[LayerRecord]:
    hidden, shuffle = size(vision, "hidden_size"), _shuffle(config)
    rows, columns = _patch_grid(vision, shuffle)
    counts = {"patches_per_tile": rows * columns, "tokens_per_tile": rows * columns + 1}
    shuffled, block = hidden * shuffle**2, _block_sizes(vision, hidden) | counts
    patch_height, patch_width = size_pair(vision, "patch_size")
    values = patch_height * patch_width * size(vision, "num_channels", default=3)
    embedding = {
        "hidden": hidden,
        "values_per_patch": values,
        "parameters": (values + 2 + counts["tokens_per_tile"]) * hidden,  # a bias, the class token, and positions
        **counts,
    }
    projector = counts | {
        "shuffled": shuffled,
        "hidden": text_hidden,
        "image_tokens_per_tile": rows * columns // shuffle**2,
        "parameters": 2 * shuffled + (shuffled + 1 + text_hidden + 1) * text_hidden,
    }
    return [
        LayerRecord("patch_embedding", "patch_embedding", embedding, module="vision"),
        *numbered("vision_block", "vision", [block] * size(vision, "num_hidden_layers")),
        LayerRecord("projector", "projector", projector, module="projector"),
    ]


def _shuffle(config: Config) -> int:
    # Pixel shuffle makes one of so many patches in each direction.
    ratio = config.get("downsample_ratio", 0.5)
    if not isinstance(ratio, int | float) or not 0 < ratio <= 1 or round(1 / ratio) * ratio != 1:
        raise ConfigError(f"downsample_ratio must be 1/n for a positive integer n, got {ratio!r}")
    return round(1 / ratio)


def _patch_grid(vision: Config, shuffle: int) -> tuple[int, int]:
    (height, width), (patch_height, patch_width) = size_pair(vision, "image_size"), size_pair(vision, "patch_size")
    rows, columns = height // patch_height, width // patch_width
    if rows != columns or rows % shuffle:
        raise ConfigError(
            f"image_size / patch_size must give a square grid with sides divisible by {shuffle}, "
            f"got {rows} x {columns}; {shuffle} is 1 / downsample_ratio"
        )
    return rows, columns


def _block_sizes(vision: Config, hidden: int) -> dict[str, int]:
    heads, intermediate = size(vision, "num_attention_heads"), size(vision, "intermediate_size")
    has_rms_norms = vision.get("norm_type", "layer_norm") == "rms_norm"
    qk_norms = 2 if vision.get("use_qk_norm", False) else 0
    norm = hidden if has_rms_norms else 2 * hidden
    biases = hidden * (4 if vision.get("attention_bias", False) else 1)
    mlp, scales = 2 * hidden * intermediate + intermediate + hidden, 2 * hidden
    return {
        "hidden": hidden,
        "intermediate": intermediate,
        "heads": heads,
        "head_dim": hidden // heads,
        "rms_norms": 2 if has_rms_norms else 0,
        "qk_norms": qk_norms,
        "parameters": 4 * hidden**2 + biases + qk_norms * hidden + 2 * norm + scales + mlp,
    }


def tile_grid(width: int, height: int, *, max_tiles: int, tile_size: int, min_tiles: int = 1) -> tuple[int, int]:
    """The grid of tiles, (columns, rows), whose aspect ratio is closest to that of an image of so many pixels.

    Among grids of one aspect ratio a larger one wins as long as the image has more than half the pixels of its canvas.
    The thumbnail does not count as one of ``max_tiles``.

    >>> [tile_grid(width, height, max_tiles=4, tile_size=56) for width, height in ((400, 200), (400, 400), (40, 40))]
    [(2, 1), (2, 2), (1, 1)]
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


def tile_limits(preprocessor: Config, max_tiles: int | None, min_tiles: int | None) -> dict[str, Any]:
    """What the image processor is told: the arguments, or else what its configuration says."""
    most = max_tiles or size(preprocessor, "max_patches", default=12)
    if most > MOST_TILES:
        raise ConfigError(f"max_tiles must be at most {MOST_TILES}, got {most}")
    fewest = min(min_tiles or size(preprocessor, "min_patches", default=1), most)
    return {"crop_to_patches": True, "min_patches": fewest, "max_patches": most}


def internvl_rule(config: Config, preprocessor: Config) -> ImageRule:
    vision = section(config, "vision_config")
    tile, cut = size_pair(vision, "image_size"), square(preprocessor, "size")
    if tile != (cut, cut):
        raise ConfigError(f"size of the preprocessor must be the vision_config's image_size {tile}, got {(cut, cut)}")
    rows, columns = _patch_grid(vision, _shuffle(config))
    tokens = rows * columns // _shuffle(config) ** 2
    limits = {"max_tiles": preprocessor["max_patches"], "min_tiles": preprocessor["min_patches"], "tile_size": cut}
    return each(_image_load, limits, tokens)


def _image_load(limits: Mapping[str, int], tokens: int, width: int, height: int) -> ImageLoad:
    tiles = num_tiles(width, height, **limits)
    return ImageLoad(tiles, tiles * tokens)


_BLOCK = "vision_tower.encoder.layer.*"
_CUTS = {
    **attention_and_mlp(_BLOCK, "attention.[qkv]_proj", "attention.projection_layer", ("mlp.fc1",), "mlp.fc2"),
    f"{_BLOCK}.attention.[qk]_norm": Cut("heads"),
    "multi_modal_projector.linear_1": Cut("hidden"),
    "multi_modal_projector.linear_2": Cut("hidden", 1),
    **TEXT_CUTS,
}
INTERNVL = Family(
    model_types=("internvl",),
    image_rule=internvl_rule,
    tile_limits=tile_limits,
    layer_records=internvl_records,
    layers="omnibal.vlm.tiled:tiled",
    disk_prefixes={"model.vision_tower.": "vision_tower.", **LANGUAGE_ON_DISK},
    cuts=_CUTS,
    image_tokens={"start_image_token": "<img>", "context_image_token": "<IMG_CONTEXT>", "end_image_token": "</img>"},
)

# LLaVA ------------------------------------------------------------------------------------------------------------


TOWER_ON_DISK = {
    "vision_tower.vision_model.": "vision_tower.vision_model.",
    "model.vision_tower.vision_model.": "vision_tower.vision_model.",  # as transformers 4.52 and later 4 wrote it
    "model.vision_tower.": "vision_tower.vision_model.",
    "vision_tower.": "vision_tower.vision_model.",  # as transformers 5 writes a model that was not loaded
}


def llava_records(config: Config) -> tuple[LayerRecord, ...]:
    kind = config["model_type"]
    # In NeXT the top level alone decides, as in transformers.
    tied = bool(config.get("tie_word_embeddings")) if kind == "llava_next" else either_ties(config)
    last = {"vision_feature_layer": -1} if kind == "llava_onevision" else {}
    tower = tower_records({**last, **config}, newline=kind != "llava")
    return (*tower, *text_records(section(config, "text_config"), tied=tied))


def llava_rule(config: Config, preprocessor: Config) -> ImageRule:
    return each(_fixed, ImageLoad(1, tokens_of_tile(config, tile_size(config, preprocessor))))


def _fixed(load: ImageLoad, _width: int, _height: int) -> ImageLoad:
    return load


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
    lone_only: bool = False  # whether of a sample's several images each is one tile, and the end of its only row

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

    def loads(self, sizes: Sequence[Size]) -> tuple[ImageLoad, ...]:
        if self.lone_only and len(sizes) > 1:
            return (ImageLoad(1, self.side**2 + 1),) * len(sizes)
        return tuple(self.load(width, height) for width, height in sizes)


def canvases_of(config: Config, preprocessor: Config | None = None) -> Canvases:
    """What LLaVA-NeXT or LLaVA-OneVision fits images to, by default as its configuration alone says."""
    selected, options = "default", dict[str, Any]()
    if config["model_type"] == "llava_onevision":
        aspect = config.get("vision_aspect_ratio", "anyres_max_9")
        most_tiles = re.fullmatch(r"anyres_max_([1-9]\d*)", str(aspect))
        if not most_tiles:
            raise ConfigError(f"vision_aspect_ratio must be anyres_max_ and a number, got {aspect!r}")
        selected, options = "full", {"most_tiles": int(most_tiles[1]), "lone_only": True}
    strategy = config.get("vision_feature_select_strategy", selected)
    if strategy != selected:
        raise ConfigError(f"vision_feature_select_strategy must be {selected!r}, got {strategy!r}")
    if preprocessor is None:
        side = size(section(config, "vision_config"), "image_size")
        known = config.get("image_grid_pinpoints", ())
        preprocessor = {"image_grid_pinpoints": known, "size": {"height": side, "width": side}}
    cut, known = (tuple((h, w) for h, w in side.get("image_grid_pinpoints", ())) for side in (preprocessor, config))
    if not cut:
        raise ConfigError("image_grid_pinpoints must name at least one resolution, got none")
    if known and known != cut:
        raise ConfigError(f"image_grid_pinpoints of the preprocessor must be the model's, {known}, got {cut}")
    tile = tile_size(config, preprocessor)
    return Canvases(cut, tile, round(sqrt(tokens_of_tile(config, tile))), **options)


def canvas_rule(config: Config, preprocessor: Config) -> ImageRule:
    return canvases_of(config, preprocessor).loads


LLAVA = Family(
    model_types=("llava",),
    image_rule=llava_rule,
    layer_records=llava_records,
    layers="omnibal.vlm.tiled:tiled",
    disk_prefixes=TOWER_ON_DISK | LANGUAGE_ON_DISK,
    cuts=TOWER_CUTS | TEXT_CUTS,
)
OF_CANVASES = replace(
    LLAVA,
    model_types=("llava_next", "llava_onevision"),
    image_rule=canvas_rule,
    disk_prefixes={"model.image_newline": "image_newline", **LLAVA.disk_prefixes},
)
