"""LLaVA 1.5: every image is one tile, cut from its middle; CLIP up to its last block but one."""

from omnibal.families.base import Config, Family, ImageLoad, ImageRule, LayerRecord, each, section
from omnibal.families.text import text_records
from omnibal.families.vit import image_tokens, tile_size, tower_records

TOWER_ON_DISK = {
    "vision_tower.vision_model.": "vision_tower.vision_model.",
    "model.vision_tower.vision_model.": "vision_tower.vision_model.",  # as transformers 4.52 and later 4 wrote it
    "model.vision_tower.": "vision_tower.vision_model.",
    "vision_tower.": "vision_tower.vision_model.",  # as transformers 5 writes a model that was not loaded
}
"""The first prefix that fits a name counts."""
LANGUAGE_ON_DISK = {
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
}
"""Names of LLaVA's kin in the folders that are published."""


def layer_records(config: Config) -> tuple[LayerRecord, ...]:
    """The pipeline layers, first to last."""
    text = section(config, "text_config")
    return (*tower_records(config, newline=False), *text_records(text, tied=either_ties(config)))


def either_ties(config: Config) -> bool:
    """Head and embedding share their weight where the model or its language model says so."""
    ties = (config.get("tie_word_embeddings"), section(config, "text_config").get("tie_word_embeddings"))
    return any(ties)


def image_rule(config: Config, preprocessor: Config) -> ImageRule:
    """The same for every image.

    Raises:
        ConfigError: If tiles are not what the ViT takes.
    """
    return each(_fixed, ImageLoad(1, image_tokens(config, tile_size(config, preprocessor))))


def _fixed(load: ImageLoad, _width: int, _height: int) -> ImageLoad:
    return load


FAMILY = Family(
    model_types=("llava",),
    image_rule=image_rule,
    layer_records=layer_records,
    layers="omnibal.vlm.llava:llava",
    disk_prefixes=TOWER_ON_DISK | LANGUAGE_ON_DISK,
)
