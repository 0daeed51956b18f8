"""A ds_config that asks for adapters is planned for them."""

import pytest

from omnibal.plan import Plan
from omnibal.profile.records import ModelProfile

pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("few_steps")


def test_a_plan_counts_adapters_only(omnibal, ds_config, tmp_path):
    omnibal("profile", ds_config())
    whole = ModelProfile.load(tmp_path / "run" / "profile.json")
    said = omnibal("plan", ds_config(model={"lora": {"rank": 2}}), "--num-stages", 2).stderr
    assert "profile.json is made anew: profile must fit this run, got sizes of" in said
    plan = Plan.load(tmp_path / "run" / "what-if" / "plan.json")
    profile = ModelProfile.load(tmp_path / "run" / "profile.json")
    assert plan.made_from["adapters"] == profile.adapter_parameters > 0 == whole.adapter_parameters
    optimizer = [sum(layer.optimizer_bytes for layer in made.layers) for made in (profile, whole)]
    assert optimizer[0] == 8 * profile.adapter_parameters < 0.2 * optimizer[1]  # two moments in float32


def test_a_target_that_does_not_exist_is_one_line_before_anything_starts(refusal, ds_config):
    line = refusal("plan", ds_config(model={"lora": {"targets": ["q_prj"]}}))
    assert line.startswith("omnibal.model.lora.targets must name linear layers of the model's layers, got 'q_prj'; did")
    assert "\n" not in line
    line = refusal("plan", ds_config(model={"lora": {"rnak": 3}}))
    assert line.endswith("omnibal.model.lora.rnak must be a known key, got 'rnak'; did you mean 'rank'?")
    line = refusal("plan", ds_config(model={"lora": {"targets": []}}))
    assert "omnibal.model.lora.targets must" in line


def test_what_is_not_lora_is_not_merged(refusal, ds_config):
    assert "folder must say where the model goes, got none: --merged" in refusal("export", ds_config(), "--merged")
