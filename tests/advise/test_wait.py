from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from omnibal.advise.models import Model, adapted_profile
from omnibal.advise.wait import LAUNCH_SECONDS, MEETINGS, PHASES, host_seconds, operations, phase_seconds, wait
from omnibal.cost import Load
from omnibal.device import Device
from omnibal.errors import ConfigError
from omnibal.profile.counted import analytic_profile
from tests.profile.test_counted import COUNTER, RECORDS

# One step of two ranks, two micro-batches each: (vision, language) is (4, 1), (0, 2) on rank 0; (1, 2), (1, 5) on 1.
COSTS = {"vision": [[[4, 0], [1, 1]]], "language": [[[1, 2], [2, 5]]]}


def waits(layout, costs=COSTS):
    return {phase: seconds.tolist() for phase, seconds in wait(costs, layout).items()}


@pytest.mark.parametrize("layout", ["ddp", "zero1"])
def test_ranks_meet_once_a_step(layout):
    # Rank 1 takes 9 seconds, rank 0 takes 7: language costs rank 0 four seconds, of which vision gives two back.
    assert waits(layout) == {"vision": [[-2, 0]], "language": [[4, 0]]}


def test_zero_2_meets_after_every_micro_batch():
    # First rank 1 waits 5 - 3, then rank 0 waits 6 - 2.
    assert waits("zero2") == {"vision": [[1, 3]], "language": [[3, -1]]}


@pytest.mark.parametrize("layout", ["zero3", "fsdp"])
def test_ranks_meet_in_every_phase_where_parameters_are_gathered(layout):
    assert waits(layout) == {"vision": [[1, 3]], "language": [[4, 0]]}


def test_steps_are_apart():
    costs = {"vision": [[[1], [2]], [[5], [2]]]}
    assert waits("ddp", costs) == {"vision": [[1, 0], [0, 3]]}


@given(
    arrays(np.int64, st.tuples(*(st.integers(1, 3) for _ in range(4))), elements=st.integers(0, 50)),
    st.sampled_from(sorted(MEETINGS)),
)
def test_with_its_wait_every_rank_ends_a_step_at_the_same_time(seconds, layout):
    costs = {f"phase {number}": phase for number, phase in enumerate(seconds)}
    waited = sum(wait(costs, layout).values())
    ends = seconds.sum(axis=(0, 3)) + waited
    assert (waited >= 0).all()
    assert (ends == ends[:, :1]).all()
    sooner = [sum(wait(costs, other).values()).sum() for other in ("ddp", "zero2", "zero3")]
    assert sooner == sorted(sooner)  # the more often ranks meet, the more they wait


@pytest.mark.parametrize(
    ("costs", "layout", "message"),
    [
        (COSTS, "zero4", "layout must be one of ddp, zero1, zero2, zero3, fsdp, got 'zero4'"),
        ({}, "ddp", "costs must hold at least one phase, got none"),
        ({"vision": [[1]]}, "ddp", r"costs must be of one shape .*, got {'vision': \(1, 1\)}"),
        ({"vision": [[[1]]], "language": [[[1, 2]]]}, "ddp", "costs must be of one shape"),
        ({"vision": np.zeros((1, 0, 1))}, "ddp", "none of them 0"),
        ({"vision": [[[-1]]]}, "ddp", r"costs\['vision'\] must be finite and not negative, got -1"),
        ({"vision": [[[np.inf]]]}, "ddp", r"costs\['vision'\] must be finite and not negative, got inf"),
    ],
)
def test_bad_costs_are_named(costs, layout, message):
    with pytest.raises(ConfigError, match=message):
        wait(costs, layout)


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


def test_a_host_starts_the_operations_of_all_blocks():
    records = Model.known("InternVL3-1B").records
    profile = analytic_profile(records, Device.named("H200"))
    by_kind = {layer.kind: operations(layer) for layer in profile.layers}
    assert (by_kind["vision_block"], by_kind["decoder_block"], by_kind["head"]) == (14, 38, 0)
    # what one H200's host took for the forward pass of each, and for both passes of an eighth of a pack
    assert pytest.approx(0.47e-3, rel=0.15) == LAUNCH_SECONDS * 14
    assert pytest.approx(1.02e-3, rel=0.15) == LAUNCH_SECONDS * 38
    found = host_seconds(profile)
    assert found == pytest.approx(24 * (14 + 38) * 3 * LAUNCH_SECONDS)
    assert 0.8 * 0.13 < found < 0.13
    assert host_seconds(profile, recompute="full") == pytest.approx(4 / 3 * found)
    frozen = analytic_profile(records, Device.named("H200"), frozen=("vision", "projector"))
    assert host_seconds(frozen) == pytest.approx(24 * (14 + 3 * 38) * LAUNCH_SECONDS)
    assert host_seconds(replace(profile, versions={"torch": "2.13"})) == 0  # measured costs have it in them
    qwen = {
        layer.kind: operations(layer) for layer in analytic_profile(Model.known("Qwen3-VL-8B").records, COUNTER).layers
    }
    assert qwen["decoder_block"] == 38 + 2 * 8  # norms of queries and keys


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
