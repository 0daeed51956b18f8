import numpy as np
import pytest

from omnibal.advise.costs import PHASES, adapted_profile, adapter_parameters, phase_seconds
from omnibal.cost import Load
from omnibal.profile.counted import analytic_profile
from tests.profile.test_counted import COUNTER, RECORDS

LOADS = Load([[3, 0], [5, 2]], [[50, 700], [200, 60]], [[1300, 90_000], [20_000, 1800]])


def seconds(*, recompute="none", **options):
    return phase_seconds(analytic_profile(RECORDS, COUNTER, **options), LOADS, recompute=recompute)


def test_phases_add_up_to_all_layers():
    profile = analytic_profile(RECORDS, COUNTER)
    parts = [layer.forward_seconds + layer.backward_seconds + layer.weight_seconds for layer in profile.layers]
    found = seconds()
    assert tuple(found) == PHASES
    np.testing.assert_allclose(sum(found.values()), sum(part(LOADS) for part in parts))
    assert (found["vision forward"][LOADS.vision_units == 0] == 0).all()


def test_recomputing_runs_the_forward_pass_again():
    plain, again = seconds(), seconds(recompute="full")
    head = analytic_profile(RECORDS, COUNTER).layers[-1].forward_seconds(LOADS)  # which nobody recomputes
    for part in ("vision", "language"):
        forward, backward = f"{part} forward", f"{part} backward"
        np.testing.assert_allclose(again[backward], plain[backward] + plain[forward] - head * (part == "language"))


def test_a_frozen_front_has_no_backward_pass():
    plain, frozen = seconds(recompute="full"), seconds(recompute="full", frozen=("vision", "projector"))
    assert not frozen["vision backward"].any()
    np.testing.assert_array_equal(frozen["vision forward"], plain["vision forward"])
    np.testing.assert_array_equal(frozen["language backward"], plain["language backward"])
    behind = seconds(frozen=("language",))  # gradients pass it, its weights have none
    assert (behind["language backward"] < seconds()["language backward"]).all()


@pytest.mark.parametrize("rank", [1, 8])
def test_adapters_count_their_parameters_and_operations(rank):
    whole, adapted = analytic_profile(RECORDS, COUNTER), adapted_profile(RECORDS, COUNTER, rank=rank)
    for full, layer in zip(whole.layers, adapted.layers, strict=True):
        assert layer.trainable == (layer.kind == "decoder_block")
        if not layer.trainable:
            assert layer.gradient_bytes == layer.optimizer_bytes == 0
            continue
        # q, o: 96 -> 96; k, v: 96 -> 32; gate, up, down: 96 and 192
        parameters = rank * (2 * 192 + 2 * 128 + 3 * 288)
        assert adapter_parameters(layer.sizes, rank) == parameters
        assert layer.gradient_bytes == 2 * parameters
        assert layer.optimizer_bytes == 12 * parameters
        assert layer.parameter_bytes == full.parameter_bytes + 2 * parameters
        # two operations a token and parameter, forward and twice backward
        np.testing.assert_allclose(
            layer.forward_seconds(LOADS), full.forward_seconds(LOADS) + 2 * parameters * LOADS.llm_tokens
        )
        np.testing.assert_allclose(layer.weight_seconds(LOADS), 2 * parameters * LOADS.llm_tokens)
        again = layer.recompute_seconds["full"](LOADS)
        np.testing.assert_allclose(again, layer.forward_seconds(LOADS))
