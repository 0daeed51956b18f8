import json

import pytest
from PIL import Image

from omnibal.cli import emulation as parts
from omnibal.cost import CostModel, Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.sampler import BalancedBatchSampler
from omnibal.emulator.run import Emulation
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from tests.pipeline.profiles import layer, profile


@pytest.fixture
def saved(tmp_path):
    """A plan of two stages and its profile."""
    kept = {"none": CostModel(llm_tokens=100), "full": CostModel()}
    layers = [layer(f"block.{number}", forward=number, output=1e9, saved_bytes=kept) for number in (1, 2, 3)]
    profile(layers).save(tmp_path / "profile.json")
    Plan(PackLimits(9, 4096), 4, Partition((0, 2, 3)), ("none",) * 3).save(tmp_path / "plan.json")
    return "emulate", tmp_path / "plan.json", tmp_path / "profile.json", "--bandwidth", 1, "--overhead", 0


@pytest.fixture
def tasks(monkeypatch):
    """Emulated runs are as predicted; the tasks."""
    seen = []

    def run(task):
        seen.append(task)
        return Emulation(task.predicted, (1 << 30,) * task.plan.num_stages, start_seconds=1.5)

    monkeypatch.setattr(parts, "run_emulation", run)
    return seen


def test_steps_are_the_samplers(omnibal, saved, tasks, token_lengths):
    options = ("--lengths", token_lengths[0], "--num-replicas", 2, "--steps", 2, "--budget", "4,5", "--json")
    record = json.loads(omnibal(*saved, *options).stdout)
    lengths = SampleLengths.from_token_lengths([token_lengths[0]])
    sampler = BalancedBatchSampler(lengths, PackLimits(9, 4096), num_replicas=2, rank=0, micro_batches=4)
    steps = (0, sampler.num_steps - 2)  # the last one may be short
    assert tasks[0].steps == tuple(tuple(sampler.step(number).load(lengths)) for number in steps)
    assert tasks[0].budget_bytes == (4 << 30, 5 << 30)
    assert record["step_seconds"] == record["predicted_seconds"]
    assert record["over_prediction"] == 0
    assert [stage["peak_bytes"] for stage in record["stages"]] == [1 << 30] * 2
    assert sum(replica["times_slowest"] for replica in record["replicas"]) == 2


def test_memory_is_predicted_for_the_largest_packs(omnibal, saved, tasks):
    record = json.loads(omnibal(*saved, "--budget", 4, "--json").stdout)
    task, largest = tasks[0], Load(9, 4096, 4096**2)
    expected = task.footprint(largest).stages(task.plan.partition, task.plan.recompute)
    assert [stage["predicted_peak_bytes"] for stage in record["stages"]] == [stage.total for stage in expected]


def test_a_scale_too_small_for_the_engines_own_work_is_said(omnibal, saved, tasks):
    hint = "DeepSpeed's own work counts"
    assert hint not in omnibal(*saved, "--budget", 4).stdout
    assert hint in omnibal(*saved, "--budget", 4, "--time-scale", 0.001).stdout


def test_tables_a_trace_and_a_picture(omnibal, saved, tasks, tmp_path):
    trace, plot = tmp_path / "new" / "trace.json", tmp_path / "new" / "timeline.png"
    text = omnibal(*saved, "--num-replicas", 3, "--budget", 4, "--trace", trace, "--plot", plot).stdout
    assert tasks[0].plan.layout.num_replicas == 3
    assert "+0.0% over the prediction" in text
    assert "waits for the slowest" in text
    assert sum(event["ph"] == "X" for event in json.loads(trace.read_text())["traceEvents"]) == 3 * (8 + 8 + 16)
    with Image.open(plot) as picture:
        assert picture.width > picture.height


@pytest.mark.parametrize("option", ["--plot", "--trace"])
def test_a_path_that_cannot_be_written_is_refused_before_the_run(omnibal, saved, tasks, option, tmp_path):
    error = omnibal(*saved, "--budget", 4, option, saved[1] / "timeline", exit_code=2).stderr
    assert f"the folder of {option} must be a folder, got" in error.replace("\n", " ")
    error = omnibal(*saved, "--budget", 4, option, tmp_path, exit_code=2).stderr
    assert f"{option} must be a file, got the folder" in error.replace("\n", " ")
    assert not tasks


def test_a_picture_that_is_no_png_is_refused_before_anything_runs(omnibal, saved, tasks):
    error = omnibal(*saved, "--budget", 4, "--plot", "timeline.abc", exit_code=2).stderr
    assert "--plot must be a PNG, whose name ends in .png, got timeline.abc" in error
    assert not tasks


@pytest.mark.parametrize(
    ("scale", "message"), [("0", "time_scale must be positive and finite, got 0.0"), ("inf", "'--time-scale'")]
)
def test_a_time_scale_must_be_positive_and_finite(omnibal, saved, tasks, scale, message):
    error = omnibal(*saved, "--budget", 4, "--time-scale", scale, exit_code=2).stderr
    assert message in error.replace("\n", " ")
    assert not tasks


def test_files_given_in_each_others_place_are_told_apart(omnibal, saved):
    command, plan, profile, *options = saved
    error = omnibal(command, profile, plan, *options, exit_code=2).stderr
    assert "profile must have the key 'device', got none" in error
    error = omnibal(command, profile, profile, *options, "--budget", 4, exit_code=2).stderr
    assert "plan must have the key 'cluster', got none" in error
