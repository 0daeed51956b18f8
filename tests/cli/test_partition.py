import json
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image

from omnibal import vlm
from omnibal.cli.partition import Method
from omnibal.cluster import Layout, Links
from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.families.base import LayerRecord
from omnibal.memory.footprint import Footprint
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import one_f_one_b
from omnibal.pipeline.search import METHODS, search_partition
from omnibal.plan import Plan
from omnibal.profile.records import ModelProfile
from omnibal.trials import run as trials_module
from omnibal.trials.run import Trial
from tests.pipeline.profiles import fixed_profile

SECONDS = [1, 2, 3, 4, 5, 6]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Six layers of equal parameters; stages of 1 + 2 + 3 + 4 and 5 + 6 seconds are nearest to each other."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    fixed_profile(SECONDS).save(path)
    return path


@pytest.fixture
def counted(tmp_path):
    """The same costs, counted for a device and not measured."""
    replace(fixed_profile(SECONDS), versions={}).save(tmp_path / "counted.json")
    return tmp_path / "counted.json"


@pytest.fixture
def ds_config(tmp_path):
    path = tmp_path / "ds_config.json"
    model = {"path": "models/mine"}
    path.write_text(json.dumps({"gradient_accumulation_steps": 3, "omnibal": {"model": model}}))
    return path


def model_like(profile):
    """Stands in for the model that the profile is of."""
    records = [
        LayerRecord(cost.name, cost.kind, cost.sizes, cost.tied_key, module=cost.module) for cost in profile.layers
    ]
    return lambda path: SimpleNamespace(records=records)


@pytest.fixture
def engine(monkeypatch):
    """Stands in for model and real engine: the partition in ``fails`` does not run, the one in ``fastest`` wins."""
    monkeypatch.setattr(vlm, "load_model", model_like(fixed_profile(SECONDS)))

    class Engine:
        fails, fastest, calls = (0, 4, 6), (0, 3, 6), []

        def __call__(self, config, plans, *, launcher_options, steps=3, on_trial):
            self.calls.append((config, plans, launcher_options))
            trials = [self._trial(plan) for plan in plans]
            for trial in trials:
                on_trial(trial)
            return sorted(trials, key=lambda trial: trial.median_seconds)

        def _trial(self, plan):
            if plan.partition.boundaries == self.fails:
                return Trial(plan, error="OutOfMemoryError: no")
            return Trial(plan, (1.0 if plan.partition.boundaries == self.fastest else 9.0,), (2**30, 0))

    stand_in = Engine()
    stand_in.calls = []
    monkeypatch.setattr(trials_module, "run_trials", stand_in)
    return stand_in


def test_the_best_partition_comes_with_a_bound(omnibal, saved):
    options = ("--num-stages", 2, "--micro-batches", 4, "--bandwidth", 1, "--top", 3)
    record = json.loads(omnibal("partition", saved, *options, "--json").stdout)
    loads = [Load([9] * 4, [4096] * 4)]
    found = search_partition(fixed_profile(SECONDS), loads, 2, Links(1e9), top=3)
    assert record["chosen"] == list(found.best.partition.boundaries) == [0, 4, 6]
    assert record["lower_bound_seconds"] == found.lower_bound_seconds
    search = record["methods"]["search"]
    assert search["gap"] == found.gap
    assert [entry["step_seconds"] for entry in search["candidates"]] == [c.step_seconds for c in found.candidates]
    assert search["step_seconds"] == pytest.approx(found.best.step_seconds)
    assert len(search["candidates"]) == 3
    assert [(row["vision_layers"], row["language_layers"]) for row in search["stages"]] == [(0, 4), (0, 2)]
    text = omnibal("partition", saved, *options).stdout
    assert "chosen: 0 4 6" in text
    bound, best = 1e3 * found.lower_bound_seconds, 1e3 * found.best.step_seconds
    assert f"predicted step {best:,.1f} ms; no partition is below {bound:,.1f} ms" in " ".join(text.split())


def test_methods_are_compared_side_by_side(omnibal, saved):
    options = ("partition", saved, "--num-stages", 3, "--bandwidth", 1, "--compare")
    record = json.loads(omnibal(*options, "--json").stdout)
    assert list(record["methods"]) == list(METHODS)
    assert record["methods"]["uniform"]["boundaries"] == [0, 2, 4, 6]
    best = min(entry["step_seconds"] for entry in record["methods"].values())
    assert record["methods"]["search"]["step_seconds"] == best
    assert record["micro_batches"] == 12
    text = omnibal(*options).stdout
    assert all(f" {method} " in text for method in METHODS)
    assert "0 2 4 6" in text
    assert "(lower bound)" in text


def test_another_method_is_chosen_by_name(omnibal, saved):
    options = ("--num-stages", 2, "--bandwidth", 1, "--method", "uniform", "--json")
    record = json.loads(omnibal("partition", saved, *options).stdout)
    assert record["chosen"] == [0, 3, 6]
    assert list(record["methods"]) == ["uniform"]
    assert record["methods"]["uniform"]["gap"] > 0


def test_a_plan_and_a_picture_are_written(omnibal, saved, tmp_path):
    output, plot = tmp_path / "new" / "plan.json", tmp_path / "new" / "stages.png"
    options = ("--num-stages", 2, "--bandwidth", 1, "--num-replicas", 2, "--micro-batches", 4, "--vision-units", 5)
    record = json.loads(
        omnibal("partition", saved, *options, "--recompute", "full", "--out", output, "--plot", plot, "--json").stdout
    )
    assert record["written"] == [str(output), str(plot)]
    assert list(record["methods"]) == ["uniform", "parameters", "paper", "search"]
    plan = Plan.load(output)
    assert (plan.partition, plan.micro_batches) == (Partition((0, 4, 6)), 4)
    assert plan.limits == PackLimits(5, 4096)
    assert plan.recompute == ("full",) * 6
    predicted = plan.predicted
    assert predicted.step_seconds == pytest.approx(record["methods"]["search"]["step_seconds"])
    assert predicted.samples_per_step == 8
    # forward, input and weight gradients take as long each, and the forward pass runs again
    assert [stage.forward_seconds for stage in predicted.stages] == [10, 11]
    assert [stage.backward_seconds for stage in predicted.stages] == [30, 33]
    assert [stage.recompute_seconds for stage in predicted.stages] == [10, 11]
    profile = ModelProfile.load(saved)
    pack = Load(5, 4096, 4096**2)
    footprint = Footprint(profile, pack, one_f_one_b(2, 4), Layout(2, 2, precision="float32"))
    memory = footprint.stages(plan.partition, plan.recompute)
    assert tuple(stage.memory for stage in predicted.stages) == memory
    assert [row["memory_bytes"] for row in record["methods"]["search"]["stages"]] == [m.total for m in memory]
    assert plan.made_from["profile"]["hash"] == profile.content_hash
    assert plan.made_from["method"] == "search"
    with Image.open(plot) as picture:
        assert np.asarray(picture).std() > 0


def test_candidates_are_tried_and_the_fastest_is_kept(omnibal, counted, ds_config, engine, tmp_path):
    options = ("--num-stages", 2, "--bandwidth", 1, "--num-replicas", 2, "--trials", 3, "--config", ds_config)
    result = omnibal("partition", counted, *options, "--out", tmp_path / "plan.json")
    ((config, plans, launcher),) = engine.calls
    assert config["gradient_accumulation_steps"] == 3
    assert config["omnibal"]["model"]["path"] == "models/mine"
    assert launcher == ["--num_gpus", "4"]
    assert len(plans) == 3
    assert {plan.micro_batches for plan in plans} == {3}
    assert plans[0].partition.boundaries == (0, 4, 6)
    lines = result.stderr.splitlines()
    assert lines[0].startswith("trial 1 of 3: 0 4 6: predicted ")
    assert lines[0].endswith("failed: OutOfMemoryError: no")
    assert "measured 1,000.0 ms" in result.stderr
    assert "failed: OutOfMemoryError: no" in " ".join(result.stdout.split())
    assert Plan.load(tmp_path / "plan.json").partition.boundaries == (0, 3, 6)


def test_trials_are_rows_of_the_record(omnibal, counted, ds_config, engine):
    options = ("--num-stages", 2, "--bandwidth", 1, "--trials", 3, "--config", ds_config, "--launcher", "-H hosts")
    record = json.loads(omnibal("partition", counted, *options, "--json").stdout)
    assert engine.calls[0][2] == ["-H", "hosts"]
    assert record["chosen"] == [0, 3, 6]
    assert [row["measured_seconds"] for row in record["trials"]] == [1.0, 9.0, None]
    assert [row["outcome"] for row in record["trials"]] == ["fits", "fits", "failed: OutOfMemoryError: no"]
    assert record["trials"][0]["predicted_seconds"] == next(
        entry["step_seconds"] for entry in record["methods"]["search"]["candidates"] if entry["boundaries"] == [0, 3, 6]
    )


def test_without_any_candidate_that_runs_nothing_is_chosen(omnibal, counted, ds_config, engine, tmp_path):
    options = ("--num-stages", 2, "--bandwidth", 1, "--trials", 1, "--config", ds_config)
    result = omnibal("partition", counted, *options, "--out", tmp_path / "plan.json", exit_code=2)
    assert "a candidate must run, got 1 failures; the first: OutOfMemoryError: no" in result.stderr
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--num-stages", 7, "--bandwidth", 1), "num_stages must lie in [1, 6]"),
        (("--num-stages", 2), "--bandwidth must be given for 'test'"),
        (("--num-stages", 2, "--bandwidth", 1, "--trials", 2), "--config must name a ds_config for --trials 2, got"),
        (("--num-stages", 2, "--bandwidth", 1, "--recompute", "selective"), "recompute must be one of full, none"),
    ],
)
def test_wrong_options_are_refused(omnibal, saved, options, message):
    assert message in omnibal("partition", saved, *options, exit_code=2).stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("config", "difference"),
    [
        ({"bf16": {"enabled": True}}, "dtype 'float32' where the run has 'bfloat16'"),
        (
            {"omnibal": {"model": {"frozen": ["vision_block"]}}},
            "frozen kinds [] where the run has ['vision_block']",
        ),
    ],
)
def test_costs_of_another_run_than_the_ds_configs_are_refused(omnibal, saved, tmp_path, config, difference):
    (tmp_path / "other.json").write_text(json.dumps(config))
    options = ("--num-stages", 2, "--bandwidth", 1, "--config", tmp_path / "other.json")
    assert difference in omnibal("partition", saved, *options, exit_code=2).stderr


def test_trials_want_costs_that_were_measured_here(omnibal, saved, ds_config, engine):
    options = ("--num-stages", 2, "--bandwidth", 1, "--config", ds_config)
    omnibal("partition", saved, *options)
    refused = omnibal("partition", saved, *options, "--trials", 2, exit_code=2).stderr
    assert "device 'test' where the run has" in refused
    assert f"version of torch '1.0' where the run has {torch.__version__!r}" in refused
    assert not engine.calls


def test_trials_are_of_the_model_that_was_profiled(omnibal, counted, ds_config, engine, monkeypatch):
    monkeypatch.setattr(vlm, "load_model", model_like(fixed_profile([*SECONDS, 7])))
    options = ("--num-stages", 2, "--bandwidth", 1, "--config", ds_config, "--trials", 1)
    refused = omnibal("partition", counted, *options, exit_code=2).stderr
    assert "6 layers where the model has 7" in refused
    assert not engine.calls


def test_the_ds_config_says_the_micro_batches(omnibal, saved, ds_config):
    options = ("partition", saved, "--num-stages", 2, "--bandwidth", 1, "--config", ds_config)
    assert json.loads(omnibal(*options, "--json").stdout)["micro_batches"] == 3
    refused = omnibal(*options, "--micro-batches", 4, exit_code=2)
    assert "--micro-batches must be 3 as the ds_config says, got 4" in refused.stderr


def test_a_profile_or_a_model_and_a_device_are_needed(omnibal):
    result = omnibal("partition", "--num-stages", 2, "--device", "a100", exit_code=2)
    assert "costs must come from a PROFILE, or from --model and --device" in result.stderr


def test_the_choices_are_the_methods():
    assert get_args(Method) == METHODS
