import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlavaNextConfig
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.modeling_llava_next import LlavaNextModel

from omnibal.families.tiled import Canvases

PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


def test_literal_canvases():
    canvases = {(672, 336): (336, 672), (300, 900): (1008, 336), (5000, 5000): (672, 672), (10, 10): (336, 672)}
    assert {size: Canvases(PINPOINTS, 336, 24).best(*size) for size in canvases} == canvases


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_canvas_is_that_of_transformers(width, height):
    assert Canvases(PINPOINTS, 336, 24).best(width, height) == select_best_resolution((height, width), PINPOINTS)


def sizes(count, most):
    return np.random.default_rng(0).integers(9, most, size=(count, 2)).tolist()


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
        load = Canvases(pinpoints, tile, side).load(width, height)
        _, (expected,) = LlavaNextModel.pack_image_features(
            owner,
            [torch.zeros(load.vision_units, side * side, 1)],
            torch.tensor([[height, width]]),
            "default",
            image_newline=torch.zeros(1),
        )
        assert load.llm_tokens == expected
