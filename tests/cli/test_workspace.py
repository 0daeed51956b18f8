"""What commands about a ds_config keep, find again, and make anew."""

import json
from pathlib import Path

import pytest

from omnibal import workspace
from omnibal.cli.opening import open_workspace
from omnibal.cluster import Cluster
from omnibal.config import RunFiles
from omnibal.data.lengths import SampleLengths
from omnibal.plan import Plan
from omnibal.profile.records import ModelProfile

pytestmark = pytest.mark.usefixtures("few_steps")


def test_each_command_finds_or_makes_what_it_needs(omnibal, ds_config, tmp_path):
    config, folder = ds_config(), tmp_path / "run"
    result = omnibal("simulate", config, "--json")
    assert f"planned: {folder / 'plan.json'}" in result.stderr
    plan = Plan.load(folder / "plan.json")
    assert plan.cluster == Cluster.parse("4xA100-80GB")
    assert plan.made_from["lengths"] == SampleLengths.load(folder / "lengths").content_hash
    assert plan.made_from["profile"] == ModelProfile.load(folder / "profile.json").content_hash
    record = json.loads(result.stdout)
    assert record["profile"]["hash"] == plan.made_from["profile"]
    assert record["micro_batches"] == plan.micro_batches
    again = omnibal("simulate", config, "--json")
    assert again.stderr == "" and json.loads(again.stdout) == record


@pytest.mark.parametrize("method", ["balanced", "random"])
def test_whoever_has_the_plan_is_asked_for_nothing(omnibal, ds_config, tmp_path, method):
    of_config = json.loads(omnibal("simulate", ds_config(packing={"method": method}), "--json").stdout)
    of_plan = json.loads(omnibal("simulate", tmp_path / "run" / "plan.json", "--json").stdout)
    assert of_plan == of_config


def test_what_was_made_from_something_else_is_made_anew(omnibal, demo, ds_config, tmp_path):
    """Other data, another cluster, other frozen layers, a damaged file: each is noticed and said."""
    plan = tmp_path / "run" / "plan.json"
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
        result = omnibal("simulate", ds_config(data={"train": str(meta)}))
        assert "plan.json is made anew: lengths changed" in result.stderr
        hashes.append(Plan.load(plan).made_from["lengths"])
    assert len(set(hashes)) == 3
    changed = {"data": {"train": str(meta)}}
    result = omnibal("simulate", ds_config(**changed, cluster="2xH100-80GB"))
    assert "profile.json is made anew: profile must be of H100-80GB, got A100-80GB" in result.stderr
    assert "plan.json is made anew: costs, cluster changed" in result.stderr
    changed |= {"cluster": "2xH100-80GB", "model": {"frozen": ["vision_block"]}}
    result = omnibal("simulate", ds_config(**changed))
    assert "profile.json is made anew: profile must fit this run, got frozen parts []" in result.stderr
    plan.write_text("{")
    result = omnibal("simulate", ds_config(**changed))
    assert "plan.json is made anew: plan must be JSON" in result.stderr
    assert omnibal("simulate", ds_config(**changed)).stderr == ""


def test_a_plan_that_is_not_what_the_ds_config_asks_for_is_made_anew(omnibal, ds_config):
    changes = {"pipeline": {"num_stages": 2}, "packing": {}}
    omnibal("simulate", ds_config(**changes))
    for part, change, name in (
        ("pipeline", {"num_stages": 4}, "number of stages"),
        ("pipeline", {"schedule": "1f1b"}, "schedule"),
        ("packing", {"samples_per_step": 11}, "samples of a step"),
        ("packing", {"method": "random"}, "method of packing"),
    ):
        changes[part] |= change
        assert f"plan.json is made anew: {name} changed" in omnibal("simulate", ds_config(**changes)).stderr
        assert omnibal("simulate", ds_config(**changes)).stderr == ""
    changes["pipeline"] |= {"num_stages": "auto", "schedule": "auto"}
    assert omnibal("simulate", ds_config(**changes)).stderr == ""


def test_a_command_may_name_what_it_takes_instead(omnibal, ds_config, token_lengths, tmp_path):
    config = ds_config()
    omnibal("profile", config, tmp_path / "mine.json")
    options = ("--profile", tmp_path / "mine.json", "--cluster", "8xA100-80GB", "--lengths", token_lengths[0])
    record = json.loads(omnibal("simulate", config, "--present", *options, "--json").stdout)
    assert record["cluster"] == "8xA100-80GB"
    assert (record["layout"]["num_stages"], record["layout"]["num_replicas"]) == (2, 4)
    assert not (tmp_path / "run" / "plan.json").exists()


@pytest.mark.parametrize("verb", ["plan", "partition", "simulate", "report", "profile"])
def test_without_a_cluster_it_says_how_to_give_one(refusal, ds_config, monkeypatch, verb):
    monkeypatch.setattr(workspace, "devices_at_hand", lambda: None)
    config = ds_config(cluster=None)
    assert refusal(verb, config) == (
        f'cluster must be known here, got none and no CUDA device; set "omnibal": {{"cluster": …}} in {config}, or say '
        "--cluster 4x8xA100-80GB"
    )


def test_the_devices_at_hand_are_the_cluster(omnibal, ds_config, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert workspace.devices_at_hand() == Cluster.parse("2xH200-141GB")
    record = json.loads(omnibal("simulate", ds_config(cluster=None), "--present", "--json").stdout)
    assert (record["cluster"], record["profile"]["device"]) == ("2xH200-141GB", "H200-141GB")


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
        ({"deepspeed": {"gradient_accumulation_steps": 0}}, "gradient_accumulation_steps must be a positive integer"),
        ({"deepspeed": {"bf16": True}}, "bf16 of a ds_config must be an object, got True"),
        ({"pipeline": {"num_stages": 3}}, "num_stages must divide the 4 devices of the cluster 4xA100-80GB, got 3"),
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
    line = refusal("simulate", ds_config(**changes), "--present")
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
    line = refusal("simulate", ds_config(), "--present", "--cluster", text)
    assert message in line and "\n" not in line


def test_a_plan_without_its_profile_says_what_is_missing(omnibal, refusal, ds_config, tmp_path):
    omnibal("plan", ds_config())
    alone = tmp_path / "alone" / "plan.json"
    alone.parent.mkdir()
    alone.write_bytes((tmp_path / "run" / "plan.json").read_bytes())
    assert refusal("simulate", alone) == (
        f"--profile must name what {alone} was made from, got none, and none lies beside it"
    )
    record = json.loads(omnibal("simulate", alone, "--profile", tmp_path / "run" / "profile.json", "--json").stdout)
    assert record["step"] is None  # packs as large as the limits allow


def test_nothing_in_a_run_folder_has_the_name_of_something_else():
    files = RunFiles(Path("run"))
    names = [getattr(files, name) for name in vars(RunFiles) if isinstance(getattr(files, name), Path)]
    assert len(names) > 10
    assert len(set(names)) == len(names)
