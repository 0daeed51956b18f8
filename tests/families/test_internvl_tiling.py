import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

from omnibal.errors import ConfigError
from omnibal.families.tiled import num_tiles, tile_grid


def test_literal_grids():
    grids = {
        (56, 56): (1, 1),
        (120, 56): (2, 1),
        (56, 300): (1, 4),
        (300, 300): (2, 2),
        (200, 150): (2, 2),
        (90, 60): (2, 1),
    }
    assert {size: tile_grid(*size, max_tiles=4, tile_size=56) for size in grids} == grids


@given(
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.integers(1, 12),
    st.integers(0, 6),
    st.sampled_from([56, 64, 384, 448]),
)
def test_grid_holds_the_limits_and_thumbnail_is_added_to_several_tiles_only(width, height, min_tiles, extra, tile_size):
    rule = {"min_tiles": min_tiles, "max_tiles": min_tiles + extra, "tile_size": tile_size}
    columns, rows = tile_grid(width, height, **rule)
    assert min_tiles <= columns * rows <= min_tiles + extra
    assert num_tiles(width, height, **rule) == (1 if columns * rows == 1 else columns * rows + 1)


@pytest.mark.parametrize(("min_tiles", "max_tiles"), [(1, 1), (1, 4), (1, 6), (2, 5), (1, 12)])
def test_equal_to_transformers_for_many_sizes(min_tiles, max_tiles):
    rng = np.random.default_rng(max_tiles)
    ties = [(tile * a, tile * b) for tile in (1, 28, 40, 56, 100) for a in range(1, 9) for b in range(1, 9)]
    halves = [(5 * k, 12 * k) for k in (1, 7, 30)] + [(7 * k, 12 * k) for k in (1, 7, 30)]
    for width, height in [*ties, *halves, *rng.integers(1, 2000, size=(300, 2)).tolist()]:
        expected = get_optimal_tiled_canvas((height, width), (56, 56), min_tiles, max_tiles)
        assert tile_grid(width, height, min_tiles=min_tiles, max_tiles=max_tiles, tile_size=56) == expected


def test_a_limit_that_no_image_reaches_takes_no_time():
    # One tile in a billion pairs of sides would take minutes to find; there are a million admissible grids.
    assert tile_grid(4, 2, max_tiles=10**5, tile_size=448) == (2, 1)


@pytest.mark.parametrize(("min_tiles", "max_tiles"), [(0, 4), (5, 4)])
def test_impossible_limits_are_refused(min_tiles, max_tiles):
    with pytest.raises(ConfigError, match="min_tiles"):
        tile_grid(10, 10, min_tiles=min_tiles, max_tiles=max_tiles, tile_size=56)
