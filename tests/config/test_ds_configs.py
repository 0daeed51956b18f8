"""The configurations that ship with a plan: model, plan and machines fit one another, and are what their names say."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omnibal.cli.main import app
from omnibal.config import dtype_of
from omnibal.data.limits import largest_load
from omnibal.plan import Plan
from omnibal.profile.counted import analytic_profile
from omnibal.vlm import load_model
from omnibal.workspace import Overrides, Workspace

ROOT = Path(__file__).parents[2]
CONFIGS = {path.stem: path for path in sorted((ROOT / "ds_configs").glob("*gpu.json"))}
PARAMETERS = {
    "InternVL3-8B": 7_944_373_760,
    "Qwen2.5-VL-7B": 8_292_166_656,
    "Qwen3-VL-8B": 8_767_123_696,
    "LLaVA-1.5-7B": 7_063_427_072,
}
"""Of the published weights."""


@pytest.fixture
def in_repository(monkeypatch):
    """Paths in the configurations are relative to it."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT / "tools" / "configs")
    yield
    sys.modules.pop("plans", None)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_has_a_plan_that_fits(name, in_repository):
    from plans import LENGTHS

    plan = Plan.load(ROOT / "ds_configs" / "plans" / f"{name}.json")
    workspace = Workspace.read(CONFIGS[name], overrides=Overrides(plan=plan))
    config, section = workspace.config, workspace.section
    model = load_model(section.model.path, section.model.lora, section.model.frozen)
    lengths = LENGTHS[name]()
    assert plan.made_from["ds_config"] == f"ds_configs/{name}.json"
    assert name.endswith(f"-{section.cluster.num_devices}gpu")
    assert plan.cluster == section.cluster
    layout = workspace.layout_on(section.cluster.num_devices, "processes", len(model.records))
    assert workspace.resolve_plan(model.records, layout, lengths) == plan
    assert plan.made_from["lengths"] == lengths.content_hash
    assert plan.predicted.samples_per_step == pytest.approx(section.packing.samples_per_step, rel=0.1)
    profile = analytic_profile(
        model.records, section.cluster.device, dtype=dtype_of(config), frozen=section.model.frozen
    )
    memory = plan.memory(profile, largest_load(lengths, plan.limits))
    for stage, budget in zip(memory, section.cluster.stage_memory_bytes(layout), strict=True):
        assert stage.total <= budget


def test_units_are_named_as_the_family_counts_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ds_configs").symlink_to(ROOT / "ds_configs")
    for name, unit in (("qwen2.5-vl-7b-8gpu", "patches"), ("internvl3-8b-8gpu", "tiles")):
        said = CliRunner().invoke(app, ["plan", f"ds_configs/plans/{name}.json"]).stdout
        assert f" {unit} and " in said and "vision units" not in said


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_shapes_are_those_of_the_published_models(name):
    model = load_model(ROOT / "ds_configs" / "models" / name)
    assert all(parameter.is_meta for parameter in model.skeleton.parameters())
    assert sum(parameter.numel() for parameter in model.skeleton.parameters()) == PARAMETERS[name]
