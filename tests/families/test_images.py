import pytest

from omnibal.errors import ConfigError
from omnibal.families import family_of
from omnibal.families.base import ImageLoad

INTERNVL = {"model_type": "internvl", "vision_config": {"image_size": [448, 448], "patch_size": [14, 14]}}
TILES = {"size": {"height": 448, "width": 448}, "min_patches": 1, "max_patches": 6}
LLAVA = {"model_type": "llava", "vision_config": {"patch_size": 14}}
CROP = {"crop_size": {"height": 336, "width": 336}, "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672]]}
QWEN = {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 3136, "longest_edge": 1003520}}


def load(config, preprocessor, size, **limits):
    """What a lone image brings."""
    _, rule = family_of(config).images(config, preprocessor, **limits)
    (found,) = rule([size])
    return found


def test_internvl():
    assert load(INTERNVL, TILES, (900, 440)) == ImageLoad(3, 768)
    assert load(INTERNVL, TILES, (900, 440), max_tiles=1) == ImageLoad(1, 256)
    assert load(INTERNVL, TILES, (440, 440), min_tiles=3) == ImageLoad(5, 1280)
    assert load(INTERNVL | {"downsample_ratio": 0.25}, TILES, (440, 440)) == ImageLoad(1, 64)


def test_llava():
    assert load(LLAVA, CROP, (900, 440)) == ImageLoad(1, 576)
    assert load(LLAVA | {"vision_feature_select_strategy": "full"}, CROP, (9, 4)) == ImageLoad(1, 577)


def test_llava_next():
    assert load(LLAVA | {"model_type": "llava_next"}, CROP, (672, 336)) == ImageLoad(3, 1752)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_qwen2_vl(model_type):
    assert load({"model_type": model_type}, QWEN, (280, 140)) == ImageLoad(200, 50, 40_000)


@pytest.mark.parametrize(
    ("config", "preprocessor", "options", "reason"),
    [
        ({"model_type": "blip"}, {}, {}, "model_type must be one of internvl, llava.*got 'blip'"),
        (INTERNVL, TILES | {"size": {"height": 224, "width": 224}}, {}, r"image_size \(448, 448\), got \(224, 224\)"),
        (INTERNVL, TILES | {"size": {"height": 448, "width": 224}}, {}, "must be square"),
        (LLAVA, CROP, {"max_tiles": 4}, "max_tiles and min_tiles must be left out for llava"),
        ({"model_type": "qwen2_vl"}, {k: QWEN[k] for k in ("patch_size", "size")}, {}, "merge_size must be given"),
    ],
)
def test_what_does_not_fit_is_refused(config, preprocessor, options, reason):
    with pytest.raises(ConfigError, match=reason):
        load(config, preprocessor, (1, 1), **options)
