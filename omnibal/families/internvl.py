"""InternVL: a ViT over fixed tiles, pixel shuffle, a two-layer projector, a decoder-only language model."""

from collections.abc import Mapping
from typing import Any

from omnibal.errors import ConfigError
from omnibal.families.base import LayerRecord, section, size, size_pair
from omnibal.families.text import text_records


def layer_records(config: Mapping[str, Any]) -> tuple[LayerRecord, ...]:
    """The pipeline layers of an InternVL model, first to last.

    Patch embedding, one record per ViT block, projector (the ViT's final norm, if any, belongs to it), text
    embedding, one record per decoder block, final norm, head. The list is the same under every partition.

    Args:
        config: ``InternVLConfig.to_dict()``, or the dict of a complete ``config.json``.

    Returns:
        Records whose sizes are: ``hidden`` (width of the layer's output), ``intermediate``, ``heads``, ``kv_heads``,
        ``head_dim``, ``vocab``; of a block ``rms_norms`` and ``qk_norms`` (how many it has, the latter of queries and
        keys); ``patches_per_tile`` and ``tokens_per_tile`` (patches and CLS) of the ViT; ``shuffled`` (width into the
        projector), ``image_tokens_per_tile`` (what a tile brings to the language model); ``parameters``.

    Raises:
        ConfigError: For a missing or impossible size, or a setting that InternVL models do not have.
    """
    _refuse_unusual_features(config)
    vision, text = section(config, "vision_config"), section(config, "text_config")
    return (*_vision_records(config, vision, size(text, "hidden_size")), *text_records(text, tied=_is_tied(config)))


def _is_tied(config: Mapping[str, Any]) -> bool:
    """The top level decides, as in transformers; there the default is to tie."""
    return bool(config.get("tie_word_embeddings", True))


def _refuse_unusual_features(config: Mapping[str, Any]) -> None:
    layer, strategy = config.get("vision_feature_layer", -1), config.get("vision_feature_select_strategy", "default")
    if layer != -1:
        raise ConfigError(f"vision_feature_layer must be -1 (the last ViT block), got {layer!r}")
    if strategy != "default":
        raise ConfigError(f"vision_feature_select_strategy must be 'default' (CLS is dropped), got {strategy!r}")


def _vision_records(config: Mapping[str, Any], vision: Mapping[str, Any], text_hidden: int) -> list[LayerRecord]:
    hidden, shuffle = size(vision, "hidden_size"), _shuffle(config)
    rows, columns = _patch_grid(vision, shuffle)
    counts = {"patches_per_tile": rows * columns, "tokens_per_tile": rows * columns + 1}
    shuffled = hidden * shuffle**2
    block = _block_sizes(vision, hidden) | counts
    return [
        LayerRecord("patch_embedding", "patch_embedding", _embedding_sizes(vision, hidden, counts) | counts),
        *(LayerRecord(f"vision_block.{i}", "vision_block", block) for i in range(size(vision, "num_hidden_layers"))),
        LayerRecord(
            "projector",
            "projector",
            counts
            | {
                "shuffled": shuffled,
                "hidden": text_hidden,
                "image_tokens_per_tile": rows * columns // shuffle**2,
                "parameters": 2 * shuffled
                + (shuffled + 1 + text_hidden + 1) * text_hidden
                + (0 if vision.get("use_mean_pooling", True) else 2 * hidden),
            },
        ),
    ]


def _shuffle(config: Mapping[str, Any]) -> int:
    """How many patches, in each direction, pixel shuffle makes one."""
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
