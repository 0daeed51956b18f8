"""A plan decides about time and memory alone: where the pipeline is cut changes nothing that is learnt."""

import pytest
import torch

from omnibal.data.limits import PackLimits
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from tests.engine.cases import changed, settings
from tests.engine.launch import launch
from tests.engine.small import NUM_LAYERS, save_small_model

pytestmark = pytest.mark.distributed
STEPS = 4
# Cuts in the ViT, before and behind the projector, in the LLM, and before the head; the whole model first.
CUTS = [(0, 10), (0, 2, 10), (0, 4, 10), (0, 5, 10), (0, 7, 10), (0, 9, 10)]
RECOMPUTE = {(0, 5, 10): ("full",) * 3 + ("none",) * 4 + ("full",) * 3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """For an untied and a tied model: what each stage of each cut saw."""
    folder = tmp_path_factory.mktemp("cuts")
    configs = {1: {}, 2: {}}
    for tied in (False, True):
        save_small_model(folder / f"tied{tied}", tied=tied)
        for cut in CUTS:
            num_stages, path = len(cut) - 1, folder / f"plan{cut[1]}.json"
            Plan(PackLimits(4, 48), 2, Partition(cut), RECOMPUTE.get(cut, ("none",) * NUM_LAYERS)).save(path)
            config = settings(folder / f"tied{tied}", num_stages=num_stages, zero_stage=0)
            assert config["gradient_clipping"] == 0.0
            configs[num_stages][tied, cut] = changed(config, "pipeline", plan=str(path), recompute="none")
    found = {}
    for num_stages, cases in configs.items():
        by_rank = launch(num_stages, "tests.engine.cases:train_under", [*cases.values()], STEPS)
        found |= dict(zip(cases, zip(*by_rank, strict=True), strict=True))
    return {tied: [found[tied, cut] for cut in CUTS] for tied in (False, True)}


def test_each_run_has_the_cut_of_its_plan(runs):
    for found in runs.values():
        assert [stages[0]["boundaries"] for stages in found] == CUTS


def test_all_cuts_of_an_untied_model_train_bit_identically(runs):
    (whole,), *others = runs[False]
    assert whole["losses"][-1] < whole["losses"][0]
    for stages in others:
        assert all(stage["losses"] == whole["losses"] for stage in stages)
        weights = weights_of_all(stages)
        assert weights.keys() == whole["weights"].keys()
        assert all(torch.equal(weight, whole["weights"][name]) for name, weight in weights.items())


def test_all_cuts_of_a_tied_model_train_alike(runs):
    # where both ends share a stage, the tied weight's two gradients are added up in another order
    (whole,), *others = runs[True]
    assert whole["losses"][-1] < whole["losses"][0]
    for stages in others:
        assert all(stage["losses"] == pytest.approx(whole["losses"], rel=1e-5) for stage in stages)
        weights = weights_of_all(stages)
        assert weights.keys() == whole["weights"].keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, whole["weights"][name], rtol=1e-3, atol=1e-4, msg=name)


def test_a_pack_beyond_the_plan_recomputes_everything(tmp_path):
    save_small_model(tmp_path)
    config = changed(settings(tmp_path, num_stages=2), "packing", llm_tokens=16, vision_units=4)
    config = changed(config, "pipeline", recompute="none")
    for used in launch(2, "tests.engine.cases:levels_used", config):
        assert {tokens > 16 for tokens in used} == {False, True}
        assert all(levels == ({"full"} if tokens > 16 else {"none"}) for tokens, levels in used.items())


def weights_of_all(stages):
    return {name: weight for stage in stages for name, weight in stage["weights"].items()}
