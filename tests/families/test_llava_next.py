import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlavaNextConfig
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.modeling_llava_next import LlavaNextModel

from omnibal.errors import ConfigError
from omnibal.families.llava_next import best_resolution, num_image_tokens, num_tiles

PINPOINTS = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]


def test_literal_canvases():
    canvases = {(672, 336): (336, 672), (300, 900): (1008, 336), (5000, 5000): (672, 672), (10, 10): (336, 672)}
    assert {size: best_resolution(*size, PINPOINTS) for size in canvases} == canvases


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_canvas_is_that_of_transformers(width, height):
    assert best_resolution(width, height, PINPOINTS) == select_best_resolution((height, width), PINPOINTS)


def sizes(count, most):
    return np.random.default_rng(0).integers(9, most, size=(count, 2)).tolist()


def test_tiles_are_those_that_the_processor_cuts():
    pinpoints = [(side * a, side * b) for side in (8,) for a, b in [(1, 2), (2, 1), (2, 2), (3, 1), (1, 3)]]
    processor = LlavaNextImageProcessorPil(
        image_grid_pinpoints=[list(pair) for pair in pinpoints],
        size={"shortest_edge": 8},
        crop_size={"height": 8, "width": 8},
        do_pad=False,
    )
    for width, height in sizes(100, 60):
        pixels = processor([np.zeros((height, width, 3), dtype=np.uint8)], return_tensors="np")["pixel_values"][0]
        assert len(pixels) == num_tiles(width, height, resolutions=pinpoints, tile_size=8)


@pytest.mark.parametrize(("tile", "patch"), [(336, 14), (224, 16)])
def test_tokens_are_those_that_the_model_makes(tile, patch):
    pinpoints = [[tile * a, tile * b] for a, b in [(1, 2), (2, 1), (2, 2), (3, 1), (1, 3)]]
    config = LlavaNextConfig(
        vision_config={"model_type": "clip_vision_model", "image_size": tile, "patch_size": patch},
        image_grid_pinpoints=pinpoints,
    )
    owner = type("Model", (), {"config": config})()
    side = tile // patch
    for width, height in sizes(200, 2000):
        tiles = num_tiles(width, height, resolutions=pinpoints, tile_size=tile)
        _, (expected,) = LlavaNextModel.pack_image_features(
            owner,
            [torch.zeros(tiles, side * side, 1)],
            torch.tensor([[height, width]]),
            "default",
            image_newline=torch.zeros(1),
        )
        assert num_image_tokens(width, height, resolutions=pinpoints, tile_size=tile, patch_size=patch) == expected


def test_no_resolution_is_refused():
    with pytest.raises(ConfigError, match="at least one resolution"):
        best_resolution(10, 10, [])
