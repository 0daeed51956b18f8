"""Gradients are on their way between replicas while others are computed, and every bit is as if they had waited."""

from dataclasses import replace

import pytest
import torch

from tests.engine.launch import launch
from tests.engine.small import Case, save_small_model
from tests.engine.test_zero_bubble import LEVELS, PRECISIONS, is_same

pytestmark = pytest.mark.distributed
TWO_REPLICAS = [[[0, 1], [3, 5, 6], [2]], [[1, 7], [4], []]]  # the second one has no picture in the whole step
SCHEDULES = ("1f1b", "zero-bubble", "zero-bubble-lean")
CUT = (0, 6, 10)
CLIPPED = {"gradient_clipping": 0.01}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """For each case what two stages of two replicas saw: as it is, and under 1F1B with DeepSpeed's own reduction."""
    folders = [str(tmp_path_factory.mktemp(f"tied{tied}")) for tied in (False, True)]
    for tied, folder in enumerate(folders):
        save_small_model(folder, tied=bool(tied))
    cases = {
        precision: Case(
            CUT, TWO_REPLICAS, folders[number % 2], LEVELS, steps=2, schedule=SCHEDULES[number % 3], **settings
        )
        for number, (precision, settings) in enumerate(PRECISIONS.items())
    }
    cases["frozen"] = replace(cases["bf16, ZeRO 1"], frozen=("patch_embedding", "vision_block"))
    clipped = replace(cases["bf16, ZeRO 1, summed in fp32"], schedule="1f1b")
    cases["clipped"] = replace(clipped, extra=clipped.extra | CLIPPED)
    by_rank = launch(4, "tests.engine.reducing:train_both", [*cases.values()])
    return {name: (case, [results[n] for results in by_rank]) for n, (name, case) in enumerate(cases.items())}


@pytest.mark.parametrize("name", [*PRECISIONS, "frozen"])
def test_every_bit_is_that_of_deepspeeds_own_reduction(trained, name):
    _, by_rank = trained[name]
    for early, late in by_rank:
        assert early["losses"] == late["losses"]
        assert early["gradients"] and is_same(early["gradients"], late["gradients"])
        assert is_same(early["weights"], late["weights"])


def test_replicas_stay_alike(trained):
    for name, (_, by_rank) in trained.items():
        weights = [early["weights"] for early, _ in by_rank]
        assert is_same(weights[0], weights[1]) and is_same(weights[2], weights[3]), name


def test_the_norm_of_owned_parts_is_that_of_all(trained):
    _, by_rank = trained["clipped"]
    for early, late in by_rank:
        assert early["norms"] == pytest.approx(late["norms"], rel=1e-6)
        assert min(early["norms"]) > CLIPPED["gradient_clipping"]
        for name, weight in early["weights"].items():
            torch.testing.assert_close(weight, late["weights"][name], rtol=1e-2, atol=1e-5)  # a bit of bfloat16


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_layer_leaves_when_its_last_gradient_is_there_and_others_are_not(trained, name):
    _, by_rank = trained[name]
    for early, late in by_rank:
        order = early["order"]
        layers = CUT[early["stage"] + 1] - CUT[early["stage"]]
        assert [layer for event, layer in order if event == "reduce"] == [*reversed(range(layers))]
        for layer in range(layers):
            leaves = order.index(("reduce", layer))
            assert ("gradient", layer) not in order[leaves:], layer
        first = order.index(("reduce", layers - 1))
        assert {layer for event, layer in order[first:] if event == "gradient"} >= {0, 1}
        waited = [layer for event, layer in order[order.index(("passes end", None)) :] if event == "reduce"]
        assert waited in ([], [0]), "only the first layer of all has no pass to its input"
        assert not [event for event, _ in late["order"] if event == "reduce"]


@pytest.mark.parametrize("name", PRECISIONS)
def test_updated_weights_come_while_the_next_step_begins(trained, name):
    case, by_rank = trained[name]
    shared_by_ours = case.extra.get("bf16") and (case.zero_stage == 0 or "data_types" not in case.extra)
    for early, late in by_rank:
        layers = CUT[early["stage"] + 1] - CUT[early["stage"]]
        assert early["coming"] == (1 + layers if shared_by_ours else 0)
        assert late["coming"] == 0
