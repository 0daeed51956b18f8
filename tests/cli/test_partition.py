import json
from dataclasses import replace

import pytest

from omnibal.cluster import Layout, Links
from omnibal.cost import Load
from omnibal.memory.footprint import Footprint
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import one_f_one_b
from omnibal.pipeline.search import METHODS, search_partition
from omnibal.profile.records import ModelProfile
from tests.cli.conftest import cluster_of, stand_in
from tests.pipeline.profiles import fixed_profile

SECONDS = [1, 2, 3, 4, 5, 6]
TWO = ("--num-stages", 2, "--cluster", cluster_of(2))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Six layers of equal parameters; stages of 1 + 2 + 3 + 4 and 5 + 6 seconds are nearest to each other."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    fixed_profile(SECONDS).save(path)
    return path


@pytest.fixture
def config(ds_config, monkeypatch, tmp_path):
    """A ds_config about these layers, whose costs it keeps as if they were counted; 3 micro-batches of 4 devices."""
    stand_in(monkeypatch, fixed_profile(SECONDS))
    (tmp_path / "run").mkdir()
    replace(fixed_profile(SECONDS), versions={}).save(tmp_path / "run" / "profile.json")
    tokens = [{"vit_num": 1, "token_num": 50 + number} for number in range(60)]
    (tmp_path / "lengths.json").write_text(json.dumps(tokens))
    path = ds_config(deepspeed={"gradient_accumulation_steps": 3}, cluster=json.loads(cluster_of(4)))
    return path, "--lengths", tmp_path / "lengths.json"


def test_the_best_partition_comes_with_a_bound(omnibal, saved):
    record = json.loads(omnibal("partition", saved, *TWO, "--json").stdout)
    loads = [Load([9] * 8, [4096] * 8, [4096**2] * 8)]
    found = search_partition(fixed_profile(SECONDS), loads, 2, Links(1e9), top=5)
    assert record["chosen"] == list(found.best.partition.boundaries) == [0, 4, 6]
    assert record["lower_bound_seconds"] == found.lower_bound_seconds
    search = record["methods"]["search"]
    assert search["gap"] == found.gap
    assert [entry["step_seconds"] for entry in search["candidates"]] == [c.step_seconds for c in found.candidates]
    assert search["step_seconds"] == pytest.approx(found.best.step_seconds)
    assert [(row["vision_layers"], row["language_layers"]) for row in search["stages"]] == [(0, 4), (0, 2)]
    text = omnibal("partition", saved, *TWO).stdout
    assert "chosen: 0 4 6" in text
    bound, best = 1e3 * found.lower_bound_seconds, 1e3 * found.best.step_seconds
    assert f"predicted step {best:,.1f} ms; no partition is below {bound:,.1f} ms" in " ".join(text.split())


def test_methods_are_compared_side_by_side(omnibal, saved):
    options = ("partition", saved, "--num-stages", 3, "--cluster", cluster_of(3), "--compare")
    record = json.loads(omnibal(*options, "--json").stdout)
    assert list(record["methods"]) == list(METHODS)
    assert record["methods"]["uniform"]["boundaries"] == [0, 2, 4, 6]
    best = min(entry["step_seconds"] for entry in record["methods"].values())
    assert record["methods"]["search"]["step_seconds"] == best
    assert record["micro_batches"] == 12
    text = omnibal(*options).stdout
    assert all(f" {method} " in text for method in METHODS)
    assert "0 2 4 6" in text and "(lower bound)" in text


def test_limits_are_as_given_and_memory_is_that_of_the_largest_pack(omnibal, saved):
    options = ("--num-stages", 2, "--cluster", cluster_of(4), "--limits", "5,4096")
    record = json.loads(omnibal("partition", saved, *options, "--json").stdout)
    assert (record["micro_batches"], record["limits"]) == (8, {"vision_units": 5, "llm_tokens": 4096})
    layout = Layout(2, 2, precision="float32", accumulate_float32=False)
    footprint = Footprint(ModelProfile.load(saved), Load(5, 4096, 4096**2), one_f_one_b(2, 8), layout, 0)
    stages = record["methods"]["search"]["stages"]
    memory = footprint.stages(Partition(record["chosen"]), ("none",) * 6)
    assert [row["memory_bytes"] for row in stages] == [stage.total for stage in memory]
    # forward, input and weight gradients take as long each
    assert [row["forward_seconds"] for row in stages] == [10, 11]
    assert [row["backward_seconds"] for row in stages] == [20, 22]


def test_a_ds_config_says_stages_batch_and_levels(omnibal, config):
    record = json.loads(omnibal("partition", *config, "--json").stdout)
    assert (record["micro_batches"], record["layout"]["num_stages"], record["layout"]["num_replicas"]) == (3, 2, 2)
    assert record["limits"] == {"vision_units": 12, "llm_tokens": 256}
    assert record["step"] is not None
    path = config[0]
    content = json.loads(path.read_text())
    content["omnibal"]["pipeline"] |= {"recompute": "full", "partition": [0, 1, 6]}
    path.write_text(json.dumps(content))
    full = json.loads(omnibal("partition", *config, "--json").stdout)
    # of stages of 1 to 4 and 5 to 6, the forward pass runs again
    assert [row["backward_seconds"] for row in full["methods"]["search"]["stages"]] == [30, 33]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--num-stages", 7, "--cluster", cluster_of(7)), "num_stages must be at most the model's 6 layers, got 7"),
        (("--num-stages", 3, "--cluster", cluster_of(4)), "num_stages must divide the 4 devices of the cluster 4xtest"),
        (("--cluster", cluster_of(2)), "--num-stages must be given beside a profile, got none with"),
        (
            ("--num-stages", 2, "--cluster", cluster_of(2, gigabytes=1e-300)),
            "bandwidth_bytes_per_second must be at least 1",
        ),
        (("--num-stages", 2, "--cluster", cluster_of(2, latency_seconds=1e300)), "latency_seconds must lie between 0"),
    ],
)
def test_wrong_options_are_refused(refusal, saved, options, message):
    line = refusal("partition", saved, *options)
    assert message in line and "\n" not in line
