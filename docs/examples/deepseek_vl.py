"""DeepSeek-VL as a family from outside: SigLIP over one tile an image, a projector of two matrices, a Llama."""

from dataclasses import replace

from omnibal.families import register
from omnibal.families.base import Config, Family, ImageLoad, ImageRule, LayerRecord, each, section, size
from omnibal.families.parts import image_tokens, text_records, tile_size, tower_records

TOWER = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
"""In LLaVA's words: what the last block puts out is read, and SigLIP has no class token to drop."""


def layer_records(config: Config) -> tuple[LayerRecord, ...]:
    """The pipeline layers, first to last. SigLIP's last norm is read as well: its last block ends with it."""
    *tower, last, projector = tower_records(TOWER | dict(config), newline=False)
    norm = 2 * size(section(config, "vision_config"), "hidden_size")
    sizes = {**last.sizes, "final_norms": 1, "parameters": last.sizes["parameters"] + norm}
    text = text_records(section(config, "text_config"), tied=bool(config["tie_word_embeddings"]))
    return (*tower, replace(last, sizes=sizes), projector, *text)


def image_rule(config: Config, preprocessor: Config) -> ImageRule:
    """Each image is padded to a square, which is one tile."""
    return each(_one_tile, image_tokens(TOWER | dict(config), tile_size(config, preprocessor)))


def _one_tile(tokens: int, _width: int, _height: int) -> ImageLoad:
    return ImageLoad(1, tokens)


register(
    Family(
        model_types=("deepseek_vl",),
        image_rule=image_rule,
        layer_records=layer_records,
        layers="deepseek_vl_layers:deepseek_vl",
    )
)
