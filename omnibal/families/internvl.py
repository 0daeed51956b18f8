"""InternVL: a ViT over fixed tiles, pixel shuffle, a two-layer projector, a decoder-only language model.

Source of its dynamic tiling: Chen et al., "How Far Are We to GPT-4V?" (InternVL 1.5, 2024), section 3.3. Ties are
broken exactly as in transformers' ``GotOcr2ImageProcessor`` (the image processor of InternVL checkpoints), whose
floating-point comparisons are kept, since exact fractions would break some ties differently.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from omnibal.errors import ConfigError
from omnibal.families.base import (
    Config,
    Family,
    ImageLoad,
    ImageRule,
    LayerRecord,
    each,
    numbered,
    section,
    size,
    size_pair,
    square,
)
from omnibal.families.cuts import Cut
from omnibal.families.parts import TEXT_CUTS, attention_and_mlp, text_records

# Of an image: every grid of as many tiles is weighed against its shape, and trained models have 6 to 40.
MOST_TILES = 1024


def layer_records(config: Mapping[str, Any]) -> tuple[LayerRecord, ...]:
    """The pipeline layers of an InternVL model, first to last; the same under every partition.

    The ViT's final norm, if any, belongs to the last block. Sizes are: ``hidden`` (width of the layer's output),
    ``intermediate``, ``heads``, ``kv_heads``, ``head_dim``, ``vocab``; of a block ``rms_norms`` and ``qk_norms`` (how
    many it has, the latter of queries and keys), and ``final_norms`` if it ends with the ViT's; ``patches_per_tile``
    and ``tokens_per_tile`` (patches and CLS) of the ViT; ``shuffled`` (width into the projector),
    ``image_tokens_per_tile`` (what a tile brings to the language model); ``parameters``.
    """
    layer, strategy = config.get("vision_feature_layer", -1), config.get("vision_feature_select_strategy", "default")
    if layer != -1:
        raise ConfigError(f"vision_feature_layer must be -1 (the last ViT block), got {layer!r}")
    if strategy != "default":
        raise ConfigError(f"vision_feature_select_strategy must be 'default' (CLS is dropped), got {strategy!r}")
    vision, text = section(config, "vision_config"), section(config, "text_config")
    tied = bool(config.get("tie_word_embeddings", True))  # the top level decides, as in transformers
    return (*_vision_records(config, vision, size(text, "hidden_size")), *text_records(text, tied=tied))


def _vision_records(config: Mapping[str, Any], vision: Mapping[str, Any], text_hidden: int) -> list[LayerRecord]:
    hidden, shuffle = size(vision, "hidden_size"), _shuffle(config)
    rows, columns = _patch_grid(vision, shuffle)
    counts = {"patches_per_tile": rows * columns, "tokens_per_tile": rows * columns + 1}
    shuffled = hidden * shuffle**2
    block = _block_sizes(vision, hidden) | counts
    blocks = [block] * size(vision, "num_hidden_layers")
    if not vision.get("use_mean_pooling", True):
        blocks[-1] = block | {"final_norms": 1, "parameters": block["parameters"] + 2 * hidden}
    embedding = _embedding_sizes(vision, hidden, counts) | counts
    projector = counts | {
        "shuffled": shuffled,
        "hidden": text_hidden,
        "image_tokens_per_tile": rows * columns // shuffle**2,
        "parameters": 2 * shuffled + (shuffled + 1 + text_hidden + 1) * text_hidden,
    }
    return [
        LayerRecord("patch_embedding", "patch_embedding", embedding, module="vision"),
        *numbered("vision_block", "vision", blocks),
        LayerRecord("projector", "projector", projector, module="projector"),
    ]


def _shuffle(config: Mapping[str, Any]) -> int:
    # Pixel shuffle makes one of so many patches in each direction.
    ratio = config.get("downsample_ratio", 0.5)
    if not isinstance(ratio, int | float) or not 0 < ratio <= 1 or round(1 / ratio) * ratio != 1:
        raise ConfigError(f"downsample_ratio must be 1/n for a positive integer n, got {ratio!r}")
    return round(1 / ratio)


def _patch_grid(vision: Mapping[str, Any], shuffle: int) -> tuple[int, int]:
    (height, width), (patch_height, patch_width) = size_pair(vision, "image_size"), size_pair(vision, "patch_size")
    rows, columns = height // patch_height, width // patch_width
    if rows != columns or rows % shuffle:
        raise ConfigError(
            f"image_size / patch_size must give a square grid with sides divisible by {shuffle}, "
            f"got {rows} x {columns}; {shuffle} is 1 / downsample_ratio"
        )
    return rows, columns


def _embedding_sizes(vision: Mapping[str, Any], hidden: int, counts: Mapping[str, int]) -> dict[str, int]:
    patch_height, patch_width = size_pair(vision, "patch_size")
    values = patch_height * patch_width * size(vision, "num_channels", default=3)
    tables = 1
    if vision.get("use_absolute_position_embeddings", True):
        tables += counts["tokens_per_tile"]
    sizes = {"hidden": hidden, "values_per_patch": values, "parameters": (values + 1 + tables) * hidden}
    if vision.get("use_mask_token", False):  # for masked image modelling; here it never gets a gradient
        return sizes | {"parameters": sizes["parameters"] + hidden, "untrained": hidden}
    return sizes


def _block_sizes(vision: Mapping[str, Any], hidden: int) -> dict[str, int]:
    heads, intermediate = size(vision, "num_attention_heads"), size(vision, "intermediate_size")
    has_rms_norms = vision.get("norm_type", "layer_norm") == "rms_norm"
    qk_norms = 2 if vision.get("use_qk_norm", False) else 0
    norm = hidden if has_rms_norms else 2 * hidden
    biases = hidden * (4 if vision.get("attention_bias", False) else 1)
    scales = 2 * hidden
    mlp = 2 * hidden * intermediate + intermediate + hidden
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


def image_rule(config: Config, preprocessor: Config) -> ImageRule:
    vision = section(config, "vision_config")
    tile, patch = size_pair(vision, "image_size"), size_pair(vision, "patch_size")
    cut = square(preprocessor, "size")
    if tile != (cut, cut):
        raise ConfigError(f"size of the preprocessor must be the vision_config's image_size {tile}, got {(cut, cut)}")
    ratio = config.get("downsample_ratio", 0.5)
    tokens = int(tile[0] // patch[0] * ratio) * int(tile[1] // patch[1] * ratio)
    limits = {"max_tiles": preprocessor["max_patches"], "min_tiles": preprocessor["min_patches"], "tile_size": cut}
    return each(_image_load, limits, tokens)


def _image_load(limits: Mapping[str, int], tokens: int, width: int, height: int) -> ImageLoad:
    tiles = num_tiles(width, height, **limits)
    return ImageLoad(tiles, tiles * tokens)


BLOCK = "vision_tower.encoder.layer.*"
CUTS = {
    **attention_and_mlp(BLOCK, "attention.[qkv]_proj", "attention.projection_layer", ("mlp.fc1",), "mlp.fc2"),
    f"{BLOCK}.attention.[qk]_norm": Cut("heads"),
    "multi_modal_projector.linear_1": Cut("hidden"),
    "multi_modal_projector.linear_2": Cut("hidden", 1),
    **TEXT_CUTS,
}
FAMILY = Family(
    model_types=("internvl",),
    image_rule=image_rule,
    tile_limits=tile_limits,
    layer_records=layer_records,
    layers="omnibal.vlm.tiled:internvl",
    disk_prefixes={
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    },
    cuts=CUTS,
    image_tokens={"start_image_token": "<img>", "context_image_token": "<IMG_CONTEXT>", "end_image_token": "</img>"},
)
