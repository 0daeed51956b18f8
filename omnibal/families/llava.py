"""LLaVA 1.5: every image is one tile, cut from its middle."""

from omnibal.families.base import Config, Family, ImageLoad, ImageRule, each, section, size, square


def image_rule(config: Config, preprocessor: Config) -> ImageRule:
    """The same for every image."""
    tokens = (square(preprocessor, "crop_size") // patch_size(config)) ** 2 + class_token(config)
    return each(_fixed, ImageLoad(1, tokens))


def patch_size(config: Config) -> int:
    """Side of a patch in pixels."""
    return size(section(config, "vision_config"), "patch_size")


def class_token(config: Config) -> int:
    """1 where the ViT's class token goes on to the LLM."""
    return int(config.get("vision_feature_select_strategy", "default") == "full")


def _fixed(load: ImageLoad, _width: int, _height: int) -> ImageLoad:
    return load


FAMILY = Family(model_types=("llava",), image_rule=image_rule)
