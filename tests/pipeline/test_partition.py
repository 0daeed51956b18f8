"""The record, and DeepSpeed's own cuts."""

import pytest
from deepspeed.runtime.utils import partition_balanced, partition_uniform
from hypothesis import given
from hypothesis import strategies as st

from omnibal.errors import ConfigError
from omnibal.pipeline.partition import Partition, balanced_boundaries, parameter_cut
from tests.pipeline.profiles import layer, profile


@pytest.mark.parametrize("boundaries", [(), (0,), (1, 2), (0, 2, 2), (0, 3, 1), (0, -1), (-1, 3)])
def test_boundaries_that_do_not_increase_from_zero_are_refused(boundaries):
    with pytest.raises(ConfigError, match="boundaries must start at 0 and increase"):
        Partition(boundaries)


def test_boundaries_that_are_no_integers_are_refused():
    with pytest.raises(ConfigError, match="boundaries must be integers"):
        Partition((0, 1.5, 3))


def test_every_layer_is_in_one_stage():
    cut = Partition([0, 1, 4, 9])
    assert cut.boundaries == (0, 1, 4, 9)
    assert [layer for stage in range(cut.num_stages) for layer in cut.layers(stage)] == list(range(cut.num_layers))


def test_unknown_stages_are_refused():
    cut = Partition((0, 1, 4))
    for stage in (-1, 2):
        with pytest.raises(ConfigError, match=r"stage must lie in \[0, 2\)"):
            cut.layers(stage)


def test_partitions_compare_by_their_boundaries():
    assert Partition([0, 2, 4]) == Partition((0, 2, 4))
    assert len({Partition([0, 2, 4]), Partition((0, 2, 4)), Partition((0, 1, 4))}) == 2


@pytest.mark.parametrize("num_stages", range(1, 8))
@pytest.mark.parametrize("num_layers", [8, 9, 15, 17, 48])
def test_uniform_is_deepspeeds(num_layers, num_stages):
    assert list(Partition.uniform(num_layers, num_stages).boundaries) == partition_uniform(num_layers, num_stages)


@pytest.mark.parametrize("num_stages", [0, 6])
def test_each_stage_needs_a_layer(num_stages):
    with pytest.raises(ConfigError, match=r"num_stages must lie in \[1, 5\]"):
        Partition.uniform(5, num_stages)


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
