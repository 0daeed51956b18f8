"""What commands about a ds_config keep, find again, and make anew."""

import json
from pathlib import Path

import pytest

from omnibal import workspace
from omnibal.cli.options import open_workspace
from omnibal.cli.planning import median_packs, plan_of
from omnibal.cluster import Cluster
from omnibal.config.section import RunFiles
from omnibal.data.lengths import SampleLengths
from omnibal.plan import Plan
from omnibal.profile.records import ModelProfile
from omnibal.report.stages import Explanation

pytestmark = pytest.mark.usefixtures("few_steps")


@pytest.fixture
def look(capsys):
    """A step of the plan that commands find for a ds_config, or make, and what they say beside it."""

    def run(config):
        workspace = open_workspace(config)
        plan = plan_of(workspace)
        explained = Explanation(workspace.profile, plan, median_packs(workspace, plan))
        return explained, capsys.readouterr().err

    return run


def test_each_command_finds_or_makes_what_it_needs(look, ds_config, tmp_path):
    config, folder = ds_config(), tmp_path / "run"
    explained, said = look(config)
    assert f"planned: {folder / 'what-if' / 'plan.json'}" in said
    plan = Plan.load(folder / "what-if" / "plan.json")
    assert plan.cluster == Cluster.parse("4xA100-80GB")
    assert plan.made_from["lengths"] == SampleLengths.load(folder / "lengths").content_hash
    assert plan.made_from["profile"] == ModelProfile.load(folder / "profile.json").content_hash
    assert explained.profile.content_hash == plan.made_from["profile"] and explained.plan == plan
    again, said = look(config)
    assert said == "" and again.figures == explained.figures


@pytest.mark.parametrize("method", ["balanced", "random"])
def test_whoever_has_the_plan_is_asked_for_nothing(omnibal, look, ds_config, tmp_path, method):
    omnibal("plan", ds_config(packing={"method": method}), "--write")
    of_config, _ = look(tmp_path / "config.json")
    of_plan = json.loads(omnibal("plan", tmp_path / "run" / "plan.json", "--json").stdout)
    assert of_plan == json.loads(json.dumps(of_config.to_record())) | {"written": []}


def test_what_was_made_from_something_else_is_made_anew(omnibal, look, demo, ds_config, tmp_path):
    """Other data, another cluster, other frozen layers, a damaged file: each is noticed and said."""
    plan = tmp_path / "run" / "what-if" / "plan.json"
    omnibal("plan", ds_config(), "--json")
    hashes = [Plan.load(plan).made_from["lengths"]]
    annotations = tmp_path / "part.jsonl"
    meta = tmp_path / "meta.json"
    source = demo.train_annotations[0]
    root = demo.meta.parent / json.loads(demo.meta.read_text())[source.stem]["root"]
    meta.write_text(json.dumps({"part": {"root": str(root), "annotation": str(annotations)}}))
    lines = source.read_text().splitlines()
    for count in (30, 24):  # other data; then the same file with fewer lines
        annotations.write_text("\n".join(lines[:count]) + "\n")
        assert "plan.json is made anew: lengths changed" in look(ds_config(data={"train": str(meta)}))[1]
        hashes.append(Plan.load(plan).made_from["lengths"])
    assert len(set(hashes)) == 3
    changed = {"data": {"train": str(meta)}}
    _, said = look(ds_config(**changed, cluster="2xH100-80GB"))
    assert "profile.json is made anew: profile must be of H100-80GB, got A100-80GB" in said
    assert "plan.json is made anew: costs, cluster changed" in said
    changed |= {"cluster": "2xH100-80GB", "model": {"frozen": ["vision_block"]}}
    _, said = look(ds_config(**changed))
    assert "profile.json is made anew: profile must fit this run, got frozen parts []" in said
    plan.write_text("{")
    assert "plan.json is made anew: plan must be JSON" in look(ds_config(**changed))[1]
    assert look(ds_config(**changed))[1] == ""


def test_a_plan_that_is_not_what_the_ds_config_asks_for_is_made_anew(look, ds_config):
    changes = {"pipeline": {"num_stages": 2}, "packing": {}}
    look(ds_config(**changes))
    for part, change, name in (
        ("pipeline", {"num_stages": 4}, "number of stages"),
        ("pipeline", {"schedule": "1f1b"}, "schedule"),
        ("packing", {"samples_per_step": 11}, "samples of a step"),
        ("packing", {"method": "random"}, "method of packing"),
    ):
        changes[part] |= change
        assert f"plan.json is made anew: {name} changed" in look(ds_config(**changes))[1]
        assert look(ds_config(**changes))[1] == ""
    changes["pipeline"] |= {"num_stages": "auto", "schedule": "auto"}
    assert look(ds_config(**changes))[1] == ""


def test_a_command_may_name_what_it_takes_instead(omnibal, ds_config, token_lengths, tmp_path):
    config = ds_config()
    omnibal("profile", config, tmp_path / "mine.json")
    options = ("--profile", tmp_path / "mine.json", "--cluster", "8xA100-80GB", "--lengths", token_lengths[0])
    plan = json.loads(omnibal("plan", config, *options, "--limits", "16,4096", "--json").stdout)["plan"]
    assert (plan["layout"]["num_stages"], plan["layout"]["num_replicas"]) == (2, 4)
    assert plan["made_from"]["lengths"] == SampleLengths.from_token_lengths(token_lengths[:1]).content_hash
    assert not (tmp_path / "run" / "plan.json").exists()


@pytest.mark.parametrize("verb", ["plan", "report", "profile"])
def test_without_a_cluster_it_says_how_to_give_one(refusal, ds_config, monkeypatch, verb):
    monkeypatch.setattr(workspace, "devices_at_hand", lambda: None)
    config = ds_config(cluster=None)
    assert refusal(verb, config) == (
        f'cluster must be known here, got none and no CUDA device; set "omnibal": {{"cluster": …}} in {config}, or say '
        "--cluster 4x8xA100-80GB"
    )


def test_the_devices_at_hand_are_the_cluster(ds_config, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert workspace.devices_at_hand() == Cluster.parse("2xH200-141GB")
    found = open_workspace(ds_config(cluster=None))
    assert (str(found.cluster), found.profile.device) == ("2xH200-141GB", "H200-141GB")


def test_a_measured_profile_stays_while_its_device_does(ds_config, demo, tmp_path):
    """As torch calls the device; a counted one gives way to it only where that is asked for."""
    config = ds_config()
    counted = open_workspace(config).profile
    measured = type(counted)(counted.layers, device="NVIDIA A100-SXM4-80GB", dtype="float32", versions={"torch": "2"})
    measured.save(tmp_path / "run" / "profile.json")
    assert open_workspace(config, measures=True).profile == measured == open_workspace(config).profile
    assert open_workspace(config, cluster="4xA100-40GB").profile.device == "A100-40GB"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing": {"llm_token": 1}}, "omnibal.packing.llm_token must be a known key, got 'llm_token'"),
        ({"cluster": "4xB100"}, "device must begin like one of A100-40GB"),
        ({"cluster": {"nodes": 2}}, "cluster.nodes must be a known key"),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "zero_optimization.stage must be 0 or 1 with a pipeline"),
        ({"deepspeed": {"fp16": {"enabled": True}}}, "fp16.enabled must be false, got True"),
        ({"deepspeed": {"gradient_accumulation_steps": 0}}, "gradient_accumulation_steps must be at least 1, got 0"),
        ({"deepspeed": {"bf16": True}}, "bf16 of a ds_config must be an object, got True"),
        ({"pipeline": {"num_stages": 3}}, "num_stages must divide the 4 devices, got 3"),
        ({"model": {"path": "nowhere"}}, "nowhere without config.json"),
        ({"model": {"path": None}}, "omnibal.model.path must name the model's folder, got none in "),
        ({"model": {"frozen": ["visoin"]}}, "got 'visoin'"),
        ({"data": {"train": "nowhere.json"}}, "nowhere.json"),
        ({"data": {"train": None}}, "lengths must be known here, got none; set omnibal.data.train in "),
        ({"pipeline": {"plan": "nowhere.json"}}, "plan must be a readable file, got nowhere.json"),
        ({"pipeline": {"recompute": ["full"]}}, "recompute must have a level for each of 13 layers, got 1"),
        ({"pipeline": {"partition": [0, 5, 12]}}, "layers of the partition must be 13"),
    ],
)
def test_a_wrong_ds_config_is_said_in_one_line(refusal, ds_config, changes, message):
    line = refusal("plan", ds_config(**changes))
    assert message in line and "\n" not in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0xA100", "devices_per_node must be positive, got 0"),
        ("4x8xtpu", "device must begin like one of A100-40GB, A100-80GB, H100-80GB,"),
        ("", "cluster must be such as '4x8xA100-80GB'"),
        ('{"num_nodes": 1', "--cluster must be JSON where it begins with a brace"),
        (
            '{"num_nodes": 1, "devices_per_node": 2, "device": "a100", "memory": 3}',
            "cluster.memory must be a known key",
        ),
        ('{"num_nodes": 1, "devices_per_node": 2, "device": "a100", "memory_bytes": 0}', "memory_bytes must be finite"),
    ],
)
def test_a_wrong_cluster_is_said_in_one_line(refusal, ds_config, text, message):
    line = refusal("plan", ds_config(), "--cluster", text)
    assert message in line and "\n" not in line


def test_a_plan_without_its_profile_says_what_is_missing(omnibal, refusal, ds_config, tmp_path):
    config, alone = ds_config(), tmp_path / "alone" / "plan.json"
    omnibal("plan", config, "--write")
    alone.parent.mkdir()
    alone.write_bytes((tmp_path / "run" / "plan.json").read_bytes())
    record = json.loads(omnibal("plan", alone, "--json").stdout)
    assert record["step"] is not None  # of the data of the ds_config that it was made for
    config.unlink()
    assert refusal("plan", alone) == (
        f"--profile must name what {alone} was made from, got none, and none lies beside it"
    )
    record = json.loads(omnibal("plan", alone, "--profile", tmp_path / "run" / "profile.json", "--json").stdout)
    assert record["step"] is None  # packs as large as the limits allow


def test_nothing_in_a_run_folder_has_the_name_of_something_else():
    files = RunFiles(Path("run"))
    names = [getattr(files, name) for name in vars(RunFiles) if isinstance(getattr(files, name), Path)]
    assert len(names) > 10
    assert len(set(names)) == len(names)
