import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal.cost import CostModel, Load, smallest_first
from omnibal.errors import ConfigError


def test_a_cost_is_affine_in_every_size():
    model = CostModel(fixed=1, vision_units=2, llm_tokens=3, llm_tokens_squared=5, vision_squared=7)
    assert model(Load(1, 10, 100, 1000)) == 1 + 2 + 30 + 500 + 7000
    costs = model(Load([1, 0], [10, 0], [100, 0], [1000, 0]))
    np.testing.assert_array_equal(costs, [7533, 1])


def test_a_fixed_cost_falls_on_every_micro_batch():
    np.testing.assert_array_equal(CostModel(fixed=2)(Load([0, 1, 2], 0)), [2, 2, 2])


def test_costs_add_up_and_scale():
    load = Load([1, 2], [3, 4], [5, 6], [7, 8])
    a, b = CostModel(fixed=1, llm_tokens=2), CostModel(vision_units=3, vision_squared=4)
    np.testing.assert_array_equal((a + 2 * b)(load), a(load) + 2 * b(load))
    assert a * 2 == 2 * a


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_bad_numbers_are_refused(value):
    with pytest.raises(ConfigError, match=r"CostModel\.llm_tokens must be finite and not negative"):
        CostModel(llm_tokens=value)
    with pytest.raises(ConfigError, match=r"Load\.vision_squared must be finite and not negative"):
        Load(1, 2, vision_squared=[0, value])
    with pytest.raises(ConfigError, match="values must be finite"):
        CostModel.fit(Load([1], [2]), [value])


def test_loads_of_unequal_length_are_refused():
    with pytest.raises(ConfigError, match="equally long"):
        Load([1, 2], [1, 2, 3])
    with pytest.raises(ConfigError, match="one per load"):
        CostModel.fit(Load([1, 2], [1, 2]), [1])
    with pytest.raises(ConfigError, match="one or more of one shape"):
        Load.stack([Load(1, 2), Load([1], [2])])
    with pytest.raises(ConfigError, match="one or more of one shape"):
        Load.stack([])


def test_a_load_is_read_only_and_survives_pickling():
    load = Load([1, 2], [3, 4])
    with pytest.raises(AttributeError):
        load.vision_units = np.zeros(2)
    with pytest.raises(ValueError, match="read-only"):
        load.vision_units[0] = 5
    assert pickle.loads(pickle.dumps(load)) == load
    assert load != Load([1, 2], [3, 5])


def test_a_load_does_not_alias_its_arguments():
    units = np.array([1.0, 2.0])
    load = Load(units, [3, 4])
    units[0] = 99
    assert load.vision_units[0] == 1


def test_loads_stack_and_come_apart():
    parts = [Load(1, 2, 3, 4), Load(5, 6, 7, 8)]
    assert list(Load.stack(parts)) == parts


def test_loads_flatten_row_by_row_and_are_summed_up_column_by_column():
    rows = Load.stack([Load([1, 2], [3, 4], [5, 6], [7, 8]), Load([9, 10], [11, 12], [13, 14], [15, 16])])
    assert rows.ravel() == Load([1, 2, 9, 10], [3, 4, 11, 12], [5, 6, 13, 14], [7, 8, 15, 16])
    assert rows.mean() == Load(5.5, 7.5, 9.5, 11.5)
    assert rows.max() == Load(10, 12, 14, 16)


coefficients = st.floats(min_value=0, max_value=10, allow_subnormal=False).map(lambda x: x if x > 1e-3 else 0.0)


@given(st.tuples(*[coefficients] * 5), st.integers(0, 2**32 - 1))
def test_a_fit_recovers_an_affine_cost(truth, seed):
    rng = np.random.default_rng(seed)
    units, tokens = rng.integers(0, 10, 40), rng.integers(1, 5000, 40)
    loads = Load(units, tokens, tokens**2 * rng.uniform(0.1, 1, 40), units**2 * rng.uniform(0.1, 1, 40))
    model = CostModel(fixed=truth[0], vision_units=truth[1], llm_tokens=truth[2] * 1e-3,
                      llm_tokens_squared=truth[3] * 1e-6, vision_squared=truth[4])  # fmt: skip
    fitted = CostModel.fit(loads, model(loads))
    np.testing.assert_allclose(fitted(loads), model(loads), rtol=1e-6, atol=1e-9)


def test_a_fit_never_goes_below_zero():
    fitted = CostModel.fit(Load(0, [100, 200, 300]), [3.0, 2.0, 1.0])
    assert fitted.llm_tokens == 0
    assert 1 <= fitted.fixed <= 3


def test_a_fit_weighs_relative_errors():
    # one straight line cannot meet all three; the small measurements count as much as the large one
    fitted = CostModel.fit(Load(0, [1, 2, 1000]), [1.0, 2.0, 2000.0])
    errors = fitted(Load(0, [1, 2, 1000])) / [1.0, 2.0, 2000.0] - 1
    assert abs(errors[2]) > 0.05
    assert (abs(errors) < 0.6).all()


def test_the_smallest_runs_first_and_then_all_others_from_the_largest_on():
    assert smallest_first([[3, 1, 2, 2], [1, 2, 3, 4]]).tolist() == [[1, 0, 3, 2], [0, 3, 2, 1]]
    assert smallest_first([7]).tolist() == [0]


def test_what_costs_nothing_fits_to_nothing():
    assert CostModel.fit(Load([1, 2], [3, 4]), [0, 0]) == CostModel()
