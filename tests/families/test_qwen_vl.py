import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from omnibal.families.qwen_vl import patch_grid

RULE = {"patch_size": 14, "merge_size": 2, "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}


def test_literal_grids():
    grids = {(56, 56): (4, 4), (1, 1): (4, 4), (280, 140): (20, 10), (4000, 2000): (100, 50), (42, 700): (4, 50)}
    assert {size: patch_grid(*size, **RULE) for size in grids} == grids


@given(
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.sampled_from([(14, 2), (16, 2), (14, 1)]),
    st.sampled_from([(56 * 56, 28 * 28 * 1280), (4 * 28 * 28, 16 * 28 * 28), (256 * 28 * 28, 1280 * 28 * 28)]),
)
def test_grid_is_that_of_transformers(width, height, sizes, pixels):
    (patch, merge), (fewest, most) = sizes, pixels
    rule = {"patch_size": patch, "merge_size": merge, "min_pixels": fewest, "max_pixels": most}
    if max(width, height) / min(width, height) > 200:
        with pytest.raises(ValueError, match="at most 200 times"):
            patch_grid(width, height, **rule)
        return
    rows, columns = smart_resize(height, width, patch * merge, fewest, most)
    assert patch_grid(width, height, **rule) == (columns // patch, rows // patch)
