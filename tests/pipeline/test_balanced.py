import pytest
from deepspeed.runtime.utils import partition_balanced
from hypothesis import given
from hypothesis import strategies as st

from omnibal.pipeline.balanced import balanced_boundaries, parameter_cut
from tests.pipeline.profiles import layer, profile


@given(st.lists(st.integers(0, 50), min_size=1, max_size=14), st.data())
def test_parameters_are_cut_as_deepspeed_does(weights, data):
    num_stages = data.draw(st.integers(1, len(weights)))
    assert list(balanced_boundaries(weights, num_stages)) == list(partition_balanced(weights, num_stages))


def test_it_minimises_a_difference_and_not_the_heaviest_stage():
    # stages of 10, 4, 4 differ less than stages of 2, 8, 8, which would be faster
    assert balanced_boundaries([2, 8, 2, 2, 4], 3) == (0, 2, 4, 5)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_stages_of_one_layer_or_all(num_stages):
    assert balanced_boundaries([5, 1, 1], num_stages) == (0, *range(1, num_stages), 3)


def test_frozen_parameters_do_not_count():
    first, second = (layer(name, parameter_bytes=1, gradient_bytes=1) for name in ("first", "second"))
    frozen = layer("frozen", parameter_bytes=9)
    assert parameter_cut(profile([frozen, first, second]), 2).boundaries == (0, 2, 3)
