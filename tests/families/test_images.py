import numpy as np
import pytest
from PIL import Image

from omnibal.errors import ConfigError
from omnibal.families import family_of
from omnibal.families.base import ImageLoad
from tests.families.models import SEEING, image_processor, small_config, whole_processor

INTERNVL = {"model_type": "internvl", "vision_config": {"image_size": [448, 448], "patch_size": [14, 14]}}
TILES = {"size": {"height": 448, "width": 448}, "min_patches": 1, "max_patches": 6}
LLAVA = {"model_type": "llava", "vision_config": {"patch_size": 14}}
NEXT, ONE = LLAVA | {"model_type": "llava_next"}, LLAVA | {"model_type": "llava_onevision"}
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
    assert load(NEXT, CROP, (672, 336)) == ImageLoad(3, 1752)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_qwen2_vl(model_type):
    assert load({"model_type": model_type}, QWEN, (280, 140)) == ImageLoad(200, 50, 40_000)


def by_transformers(model_type, images, processor, options):
    """(vision units, LLM tokens) of each image of a sample, from what the processor makes of its pixels."""
    made = processor([images], return_tensors="pt", **options)
    if "image_grid_thw" in made:
        units = made["image_grid_thw"].prod(1).tolist()
    elif "num_patches" in made:
        units = made["num_patches"].tolist()
    elif model_type == "llava":
        units = [1] * len(made["pixel_values"])
    else:  # padded by tiles of zeros: those that are cut from white images are not
        units = [int((tiles.flatten(1) != 0).any(1).sum()) for tiles in made["pixel_values"]]
    whole = whole_processor(model_type, processor)
    return [(unit, len(whole.replace_image_token(made, number))) for number, unit in enumerate(units)]


def check_against_transformers(model_type, count, most):
    config, processor = small_config(model_type).to_dict(), image_processor(model_type)
    options, rule = family_of(config).images(config, processor.to_dict())
    generator = np.random.default_rng(count)
    for number in range(count):
        sizes = generator.integers(1, most, size=(number % 4 and 1 + number % 3, 2)).tolist() or [[7, 5]]
        images = [Image.new("RGB", size, "white") for size in sizes]
        expected = by_transformers(model_type, images, processor, options)
        assert [load[:2] for load in rule(sizes)] == expected, sizes


@pytest.mark.parametrize("model_type", SEEING)
def test_loads_are_what_transformers_makes_of_images(model_type):
    check_against_transformers(model_type, count=300, most=150)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SEEING)
def test_loads_are_what_transformers_makes_of_thousands_of_samples(model_type):
    check_against_transformers(model_type, count=3000, most=200)


def test_onevision_cuts_lone_images_only():
    config = {"model_type": "llava_onevision", "vision_config": {"image_size": 384, "patch_size": 14}}
    pinpoints = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
    _, rule = family_of(config).images(
        config, {"size": {"height": 384, "width": 384}, "image_grid_pinpoints": pinpoints}
    )
    assert rule([(384, 384)]) == (ImageLoad(2, 2 * 27**2 + 27),)
    assert rule([(3000, 2000)]) == (ImageLoad(4 * 6 + 1, 27**2 + 66 * 99 + 66),)
    assert rule([(3000, 2000), (384, 384)]) == (ImageLoad(1, 27**2 + 1),) * 2
    assert rule([]) == ()


@pytest.mark.parametrize(
    ("config", "preprocessor", "options", "reason"),
    [
        ({"model_type": "blip"}, {}, {}, "model_type must be one of internvl, llava.*got 'blip'"),
        (INTERNVL, TILES | {"size": {"height": 224, "width": 224}}, {}, r"image_size \(448, 448\), got \(224, 224\)"),
        (INTERNVL, TILES | {"size": {"height": 448, "width": 224}}, {}, "must be square"),
        (LLAVA, CROP, {"max_tiles": 4}, "max_tiles and min_tiles must be left out for llava"),
        (LLAVA | {"vision_config": {"image_size": 224, "patch_size": 14}}, CROP, {}, "image_size 224, got 336"),
        (NEXT, CROP | {"image_grid_pinpoints": []}, {}, "image_grid_pinpoints must name at least one"),
        (NEXT | {"image_grid_pinpoints": [[336, 336]]}, CROP, {}, r"must be the model's, \(\(336, 336\),\), got"),
        (NEXT | {"vision_feature_select_strategy": "full"}, CROP, {}, "strategy must be 'default', got 'full'"),
        (ONE | {"vision_aspect_ratio": "pad"}, CROP, {}, "vision_aspect_ratio must be anyres_max_ and a number"),
        ({"model_type": "qwen2_vl"}, {k: QWEN[k] for k in ("patch_size", "size")}, {}, "merge_size must be given"),
    ],
)
def test_what_does_not_fit_is_refused(config, preprocessor, options, reason):
    with pytest.raises(ConfigError, match=reason):
        load(config, preprocessor, (1, 1), **options)
