import json
from dataclasses import replace

import pytest

from omnibal.data.lengths import SampleLengths
from omnibal.device import DEVICES
from omnibal.pipeline.schedule import SCHEDULES
from omnibal.plan import Plan
from omnibal.planner import PlanRequest, make_plan
from tests.planner.test_solve import PROFILE

OPTIONS = [
    *("--num-stages", 4, "--num-replicas", 2, "--global-batch", 128, "--bandwidth", 100),
    *("--overhead", 0, "--head-room", 0, "--method", "isf", "--steps", 2),
]


@pytest.fixture
def profile(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


@pytest.fixture
def arguments(profile, token_lengths, tmp_path):
    lengths = [argument for path in token_lengths for argument in ("--lengths", path)]
    return [profile, *lengths, "--out", tmp_path / "out" / "plan.json", *OPTIONS]


def test_the_plan_is_written_and_fits(omnibal, arguments, tmp_path):
    record = json.loads(omnibal("plan", *arguments, "--budget", "3.0", "--json").stdout)
    plan = Plan.load(tmp_path / "out" / "plan.json")
    assert record["plan"] == json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan.num_stages == 4
    assert max(stage.memory.total for stage in plan.predicted.stages) <= 3 * 2**30
    assert record["lower_bound_seconds"] <= plan.predicted.step_seconds
    best = min(record["tried"], key=lambda entry: entry["step_seconds"] / entry["samples_per_step"])
    assert best["partition"] == list(plan.partition.boundaries)
    assert best["micro_batches"] == plan.micro_batches
    if record["two_phase"]:
        baseline = record["two_phase"]["step_seconds"] / record["two_phase"]["samples_per_step"]
        assert plan.predicted.step_seconds / plan.predicted.samples_per_step <= baseline * (1 + 1e-5)


def test_explained_and_drawn(omnibal, arguments, tmp_path):
    folder = tmp_path / "plots"
    output = omnibal("plan", *arguments, "--budget", "3.0", "--explain", "--plot", folder).output
    for word in ("V+L", "recompute ms", "weights", "samples/s", "two phases", "written"):
        assert word in output, word
    assert {path.name for path in folder.iterdir()} == {"memory.png", "timeline.png"}


def test_the_schedule_may_be_chosen(omnibal, arguments, tmp_path):
    limits = ("--vision-units", 9, "--llm-tokens", 4096)
    record = json.loads(omnibal("plan", *arguments, *limits, "--budget", "5", "--schedule", "auto", "--json").stdout)
    assert {entry["schedule"] for entry in record["tried"]} == set(SCHEDULES)
    assert Plan.load(tmp_path / "out" / "plan.json").schedule == record["tried"][0]["schedule"] == "zero-bubble"


def test_budgets_may_differ_by_stage(omnibal, arguments, tmp_path):
    omnibal("plan", *arguments, "--budget", "2.6,6,6,6")
    plan = Plan.load(tmp_path / "out" / "plan.json")
    assert plan.predicted.stages[0].memory.total <= 2.6 * 2**30
    assert plan.cluster.stage_memory_bytes(plan.layout) == (int(2.6 * 2**30), *[6 * 2**30] * 3)


def test_what_does_not_fit_is_one_line_with_the_bytes(omnibal, arguments):
    result = omnibal("plan", *arguments, "--budget", "0.2", exit_code=2)
    assert result.stderr.startswith("error: memory must hold every stage, got 204.80 MiB")
    assert "bytes" in result.stderr and result.stderr.count("\n") == 1


def test_limits_can_be_fixed(omnibal, arguments, tmp_path):
    omnibal("plan", *arguments, "--budget", "6", "--vision-units", 12, "--llm-tokens", 5000)
    limits = Plan.load(tmp_path / "out" / "plan.json").limits
    assert (limits.vision_units, limits.llm_tokens) == (12, 5000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "lots"], "--budget must be GiB such as 80 or 80,80,40, got 'lots'"),
        ([], "--budget must be given for 'test', got none"),
        (["--budget", "3", "--vision-units", 9], "limits must be given as both"),
        (["--budget", "3", "--num-devices", 8], "--num-replicas must be left out beside --num-devices, got 2"),
        (["--budget", "inf"], "--budget must be GiB such as 80 or 80,80,40, got 'inf'"),
        (
            ["--budget", "3", "--overhead", 3],
            "memory_bytes must be finite and more than the 3221225472 bytes that a device holds",
        ),
        (["--budget", "3", "--tensor-parallel", 2], "--tensor-parallel must be left out where a profile is given"),
        (["--budget", "3", "--frozen", "head"], "frozen kinds [] where the run has ['head']"),
        (["--budget", "3", "--trials", 2], "--config must name a ds_config for --trials and --four-steps, got none"),
        (["--budget", "3", "--config", "c.json"], "--config must come with --trials or --four-steps, got c.json alone"),
        (["--budget", "3,3"], "--budget must be one for each of 4 stages, got '3,3'"),
    ],
)
def test_wrong_options(omnibal, arguments, options, message):
    assert message in omnibal("plan", *arguments, *options, exit_code=2).stderr


def test_trials_are_of_what_was_profiled(omnibal, arguments, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"omnibal": {"model": {"frozen": ["head"]}}}))
    replace(PROFILE, tensor_parallel=2).save(arguments[0])
    result = omnibal("plan", *arguments, "--budget", "3", "--trials", 1, "--config", config, exit_code=2)
    assert "dtype 'bfloat16' where the run has 'float32'" in result.stderr
    assert "tensor_parallel 2 where the run has 1" in result.stderr
    assert "frozen kinds [] where the run has ['head']" in result.stderr


def test_lengths_and_devices_must_be_named(omnibal, profile, token_lengths):
    given = [profile, "--budget", 3, "--bandwidth", 100]
    assert "--lengths must name sample lengths" in omnibal("plan", *given, "--num-devices", 8, exit_code=2).stderr
    result = omnibal("plan", *given, "--lengths", token_lengths[0], exit_code=2)
    assert "devices must be given as --num-devices" in result.stderr


def test_devices_that_share_layers_count_as_one(omnibal, arguments, tmp_path):
    replace(PROFILE, device="A100-80GB", tensor_parallel=2).save(tmp_path / "shared.json")
    options = ["--num-devices", 16, "--num-stages", 4, "--method", "isf", "--json"]
    given = [tmp_path / "shared.json", *arguments[1 : -len(OPTIONS)], *options]
    plan = json.loads(omnibal("plan", *given).stdout)["plan"]
    assert plan["made_from"]["device"] == "2 x A100-80GB"
    assert (plan["layout"]["num_stages"], plan["layout"]["num_replicas"], plan["layout"]["num_tensor"]) == (4, 2, 2)
    assert plan["cluster"]["memory_bytes"] == int(DEVICES["A100-80GB"].memory_bytes) < 80 * 2**30
    assert plan["cluster"]["links"]["bandwidth_bytes_per_second"] == 300e9


def test_a_plan_says_which_step_it_predicts(omnibal, arguments, tmp_path):
    """Its prediction comes back from the public simulator on the same packs."""
    omnibal("plan", *arguments, "--budget", "3.0")
    plan = Plan.load(tmp_path / "out" / "plan.json")
    request = PlanRequest(**plan.made_from["request"], cluster=plan.cluster)
    lengths = SampleLengths.from_token_lengths([arguments[i + 1] for i, a in enumerate(arguments) if a == "--lengths"])
    again = make_plan(PROFILE, lengths, request)
    assert again.plan.predicted == plan.predicted
    steps = [plan.simulate(PROFILE, loads).step_seconds for loads in again.choice.model.packing.steps]
    assert sum(steps) / len(steps) == pytest.approx(plan.predicted.step_seconds, rel=1e-5)
