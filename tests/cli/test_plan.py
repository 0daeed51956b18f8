"""`omnibal plan`: what it keeps, says and enters; its trials on the real engine and on a made-up one."""

import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

import omnibal.trials as trials_module
from omnibal import vlm
from omnibal.cli.plan_report import _weighed_table
from omnibal.cli.planning import WEIGHED
from omnibal.cluster import Cluster, Encoder
from omnibal.cost import Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.device import MOST_MARGIN_SHARE, usable_bytes
from omnibal.families.base import encoder_layers
from omnibal.pipeline.schedule import SCHEDULES
from omnibal.plan import Plan
from omnibal.planner import PlanRequest, make_plan
from omnibal.profile.calibration import TimedPass, calibrate, sizes_of
from omnibal.profile.records import ModelProfile
from omnibal.trials import Trial
from omnibal.workspace import Workspace
from tests.cli.conftest import cluster_of, stand_in
from tests.planner.test_solve import PROFILE
from tools.synthetic import tiled_lengths

pytestmark = pytest.mark.usefixtures("few_steps")
MIB = 2**20


@pytest.fixture
def arguments(token_lengths, tmp_path):
    """Of a plan for a profile's model on 8 devices of so many GiB."""
    PROFILE.save(tmp_path / "profile.json")

    def of(memory=3.0, lengths=token_lengths, samples=128, pipeline=None, **changes):
        section = {"packing": {"samples_per_step": samples}, "run": {"output": str(tmp_path / "out")}}
        content = {"bf16": {"enabled": True}, "omnibal": section | {"pipeline": pipeline or {"schedule": "auto"}}}
        (tmp_path / "some.json").write_text(json.dumps(content))
        named = [argument for path in lengths for argument in ("--lengths", path)]
        hardware = ("--cluster", cluster_of(8, gigabytes=100, memory=memory, **changes), "--num-stages", 4)
        return [tmp_path / "some.json", "--profile", tmp_path / "profile.json", *named, *hardware]

    return of


def test_the_plan_is_written_and_fits(omnibal, arguments, tmp_path):
    record = json.loads(omnibal("plan", *arguments(), "--json").stdout)
    plan = Plan.load(tmp_path / "out" / "what-if" / "plan.json")
    assert record["plan"] == json.loads((tmp_path / "out" / "what-if" / "plan.json").read_text())
    assert (plan.num_stages, plan.layout.num_replicas) == (4, 2)
    assert max(stage.memory.total for stage in plan.predicted.stages) <= usable_bytes(3 * 2**30)
    assert record["lower_bound_seconds"] <= plan.predicted.step_seconds
    best = min(record["tried"], key=lambda entry: entry["step_seconds"] / entry["samples_per_step"])
    assert best["partition"] == list(plan.partition.boundaries)
    assert (best["micro_batches"], best["schedule"]) == (plan.micro_batches, plan.schedule)
    assert {entry["schedule"] for entry in record["tried"]} == set(SCHEDULES)
    assert record["trained"].keys() == {"vision", "language"}


def test_a_plan_of_the_costs_that_a_run_measured(omnibal, refusal, ds_config, tmp_path):
    config, run = ds_config(packing={"samples_per_step": 16}), tmp_path / "earlier"
    omnibal("plan", config, "--limits", "11,200", "--write")
    before, counted = Plan.load(tmp_path / "run" / "plan.json"), ModelProfile.load(tmp_path / "run" / "profile.json")
    load = Load([4], [256], [256**2], [16])
    passes = [
        TimedPass((index, index + 1), is_backward, sizes_of(load)[0], 3 * cost(load).item())
        for index, layer in enumerate(counted.layers)
        for is_backward, cost in ((False, layer.forward_seconds), (True, layer.backward_seconds))
    ]
    found = calibrate(counted, passes, ["none"] * len(counted.layers), device=counted.device)
    run.mkdir()
    before.save(run / "run_plan.json")
    (run / "metrics.jsonl").write_text(found.line(step=20))
    omnibal("plan", config, "--from-run", run, "--limits", "12,220")
    other = Plan.load(tmp_path / "run" / "what-if" / "plan.json")
    assert other.predicted.step_seconds > 1.2 * before.predicted.step_seconds  # 0.85 for costs as they were counted
    assert other.limits == PackLimits(12, 220)
    omnibal("plan", config, "--from-run", run, "--write")
    after, measured = Plan.load(tmp_path / "run" / "plan.json"), ModelProfile.load(tmp_path / "run" / "profile.json")
    assert after.predicted.step_seconds > 1.5 * before.predicted.step_seconds
    assert after.limits == before.limits
    assert after.made_from["profile"] == measured.content_hash != counted.content_hash
    assert refusal("plan", config, "--from-run", tmp_path / "none").startswith("measured costs must be in a readable")


def test_a_plan_says_which_step_it_predicts(omnibal, arguments, token_lengths, tmp_path):
    """Its prediction comes back from the public simulator on the same packs."""
    omnibal("plan", *arguments())
    plan = Plan.load(tmp_path / "out" / "what-if" / "plan.json")
    request = PlanRequest(**plan.made_from["request"], cluster=plan.cluster)
    again = make_plan(PROFILE, SampleLengths.from_token_lengths(token_lengths), request)
    assert again.plan.predicted == plan.predicted
    steps = [plan.simulate(PROFILE, loads).step_seconds for loads in again.choice.model.packing.steps]
    assert sum(steps) / len(steps) == pytest.approx(plan.predicted.step_seconds, rel=1e-5)


def test_explained(omnibal, arguments, tmp_path):
    output = omnibal("plan", *arguments(), "--limits", "9,4096", "--explain").output
    for word in ("V+L", "first layer", "weights", "samples/s", "above the best partition", "parameters trained"):
        assert word in output, word
    assert [line.split()[0] for line in output.splitlines()[:5]] == ["gain", "step", "layout", "memory", "written"]
    limits = Plan.load(tmp_path / "out" / "what-if" / "plan.json").limits
    assert (limits.vision_units, limits.llm_tokens) == (9, 4096)


def test_memory_may_differ_by_device(omnibal, arguments, tmp_path):
    memory = [int(2.8 * 2**30)] * 2 + [6 * 2**30] * 6
    omnibal("plan", *arguments(memory_bytes=memory), "--limits", "9,4096")
    plan = Plan.load(tmp_path / "out" / "what-if" / "plan.json")
    assert plan.predicted.stages[0].memory.total <= 2.8 * 2**30
    assert plan.cluster.stage_memory_bytes(plan.layout) == (memory[0], *memory[-3:])


def test_what_does_not_fit_is_one_line_with_the_bytes(refusal, arguments):
    line = refusal("plan", *arguments(0.2), "--limits", "9,4096")
    assert line.startswith("memory must hold every stage, got 179.20 MiB")
    assert "bytes" in line and "\n" not in line


def test_devices_that_share_layers_are_tensor_ranks(omnibal, arguments, tmp_path):
    replace(PROFILE, device="A100-80GB", tensor_parallel=2).save(tmp_path / "profile.json")
    options = ("--cluster", "2x8xA100-80GB", "--limits", "9,4096", "--json")
    plan = json.loads(omnibal("plan", *arguments(pipeline={"num_tensor": 2}), *options).stdout)["plan"]
    assert plan["made_from"]["device"] == "2 x A100-80GB"
    assert (plan["layout"]["num_stages"], plan["layout"]["num_replicas"], plan["layout"]["num_tensor"]) == (4, 2, 2)


def test_a_ds_config_asks_for_tensor_ranks(omnibal, refusal, ds_config, tmp_path):
    config = ds_config(pipeline={"num_stages": "auto", "num_tensor": 2}, packing={"samples_per_step": 16})
    plan = json.loads(omnibal("plan", config, "--write", "--json").stdout)["plan"]
    layout = plan["layout"]
    assert layout["num_stages"] * layout["num_replicas"] * 2 == 4 and layout["num_tensor"] == 2
    assert ModelProfile.load(tmp_path / "run" / "profile.json").num_tensor == 2
    workspace = Workspace.read(config)
    assert workspace.layout_on(4, "processes", 13) == Plan.load(tmp_path / "run" / "plan.json").layout
    shown = json.loads(omnibal("plan", tmp_path / "run" / "plan.json", "--json").stdout)
    assert shown["layout"]["num_tensor"] == 2
    assert Workspace.read(ds_config(pipeline={"num_stages": "auto", "num_tensor": "auto"})).num_tensor == 2
    said = omnibal("profile", ds_config(pipeline={"num_tensor": 1}), "--json").stderr
    assert "profile.json is made anew: profile must fit this run, got tensor_parallel 2 where the run has 1" in said
    assert refusal("plan", ds_config(pipeline={"num_tensor": 5}), "--cluster", "10xA100-80GB").startswith(
        "num_tensor must be at most the 4 heads of vision_block.0, got 5"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limits", "9"], "--limits must be vision units and LLM tokens such as 16,4096, got '9'"),
        (["--num-stages", 3], "num_stages must divide the 8 devices, got 3"),
        (["--cluster", cluster_of(8, overhead_bytes=10**12)], "memory_bytes must be finite and more than the"),
    ],
)
def test_wrong_options(refusal, arguments, options, message):
    line = refusal("plan", *arguments(), *options)
    assert message in line and "\n" not in line


def test_layouts_keep_to_the_ds_configs_number_of_stages(omnibal, ds_config, tmp_path):
    lines = omnibal("plan", ds_config(), "--layout", "spread", "--write").stdout.splitlines()
    assert any(line.startswith("winner: the ViT on all devices") and "omnibal trains it" in line for line in lines)
    assert "not weighed: pipelines of other than the 2 stages that omnibal.pipeline.num_stages says" in lines
    assert Plan.load(tmp_path / "run" / "plan.json").layout.num_stages == 2


def test_where_a_pipeline_wins_it_is_planned(omnibal, ds_config, monkeypatch, tmp_path):
    monkeypatch.setitem(WEIGHED, "auto", ("pipeline",))  # of all kinds the search takes long
    config = ds_config(pipeline={"num_stages": "auto"})
    record = json.loads(omnibal("plan", config, "--layout", "auto", "--json").stdout)
    assert record["layouts"]["winner"] == "pipeline"
    assert record["plan"] == json.loads((tmp_path / "run" / "what-if" / "plan.json").read_text())


def test_where_tensor_ranks_win_their_number_is_said_and_then_planned(omnibal, ds_config, monkeypatch, tmp_path):
    monkeypatch.setitem(WEIGHED, "auto", ("tensor",))
    config = ds_config(pipeline={"num_stages": "auto"}, packing={"samples_per_step": 16})
    lines = omnibal("plan", config, "--layout", "auto").stdout.splitlines()
    (said,) = (line for line in lines if line.startswith('nothing is written: set "num_tensor": '))
    ranks = int(said.split()[5])
    asked = ds_config(pipeline={"num_stages": "auto", "num_tensor": ranks}, packing={"samples_per_step": 16})
    record = json.loads(omnibal("plan", asked, "--layout", "auto", "--json").stdout)
    assert record["plan"]["layout"]["num_tensor"] == ranks > 1


def test_where_zero_wins_nothing_is_planned(omnibal, ds_config, monkeypatch, tmp_path):
    monkeypatch.setitem(WEIGHED, "auto", ("zero", "rearranged"))
    result = omnibal("plan", ds_config(), "--layout", "auto")
    assert "nothing is written: what wins needs no pipeline; `omnibal advise --layouts` has" in result.stdout
    record = json.loads(omnibal("plan", ds_config(), "--layout", "auto", "--json").stdout)["layouts"]
    assert {each["kind"] for each in record["candidates"]} == {"zero", "rearranged"}
    assert record["candidates"][0]["times_today"] > 0
    assert not (tmp_path / "run" / "what-if").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layout", "units", "--limits", "9,4096"], "--limits must be left out here, got 9,4096: --layout weighs"),
        (["--layout", "auto", "--num-stages", "2"], "--num-stages must be left out here, got 2: --layout weighs all"),
        (["--layout", "spread", "--cluster", "A100-80GB"], "at least 2 devices for layouts to differ, got A100-80GB"),
        (["--layout", "spread"], "at least as many as the 4 devices of 4xA100-80GB"),
    ],
)
def test_wrong_options_beside_layouts(refusal, ds_config, options, message):
    line = refusal("plan", ds_config(packing={"samples_per_step": 3}), *options)
    assert message in line and "\n" not in line


def test_unknown_layouts_and_profiles_without_a_head_are_refused(omnibal, refusal, arguments):
    given = arguments()[:-2]
    assert "'spred' is not one of" in omnibal("plan", *given, "--layout", "spred", exit_code=2).stderr
    assert "profile must have a head of a known vocabulary for --layout" in refusal(
        "plan", *given, "--layout", "spread"
    )


@pytest.mark.parametrize("recompute", ["full", "selective"])  # counted costs know the latter in blocks alone
def test_a_ds_config_needs_nothing_more(omnibal, ds_config, tmp_path, recompute):
    """Five lines say what was chosen, what it gains over the present configuration, and why."""
    config = ds_config(pipeline={"recompute": recompute, "num_stages": 4, "schedule": "auto"})
    before = config.read_text()
    record = json.loads(omnibal("plan", config, "--json").stdout)
    assert record["written"] == str(tmp_path / "run" / "what-if" / "plan.json")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"lengths", "profile.json", "what-if"}
    present, plan = record["present_samples_per_second"], Plan.load(tmp_path / "run" / "what-if" / "plan.json")
    assert plan.cluster == Cluster.parse("4xA100-80GB")
    assert record["gain"] > 1
    assert record["problem"] == ""
    text = " ".join(omnibal("plan", config).stdout.split())
    planned, cheapest = record["gain"] * present, record["settings_samples_per_second"]
    # Both are counted for the same samples and layers: a pipeline is beside what needs no pipeline.
    assert (
        f"gain {planned / cheapest:.2f}x the {cheapest:,.1f} samples/s of ZeRO with a trainer's own settings, "
        f"{record['gain']:.2f}x the {present:,.1f} samples/s of the present configuration step"
    ) in text
    assert f" samples, {planned:,.1f} samples/s; stages are idle" in text  # the step's rate is the one compared
    for word in ("layout 4 stages", "the fullest device holds ", "layers recompute", f"written {tmp_path}"):
        assert word in text, word
    names = [line.split()[0] for line in omnibal("plan", config).stdout.splitlines()]
    assert names == ["gain", "step", "layout", "memory", "written", "asked"]
    assert config.read_text() == before


def test_a_fixed_number_of_stages_is_kept(omnibal, ds_config, tmp_path):
    config = ds_config(pipeline={"num_stages": 2})
    tried = json.loads(omnibal("plan", config, "--json").stdout)["tried"]
    assert {entry["num_stages"] for entry in tried} == {2}
    free = ds_config("free.json", pipeline={"num_stages": "auto"})
    tried = json.loads(omnibal("plan", free, "--write", "--json").stdout)["tried"]
    assert {entry["num_stages"] for entry in tried} == {1, 2, 4}
    assert Workspace.read(free).layout().num_stages == Plan.load(tmp_path / "run" / "plan.json").num_stages


def test_the_samples_of_a_step_are_those_of_the_present_configuration(omnibal, ds_config):
    present = json.loads(omnibal("lengths", ds_config(), "--json").stdout)["packs"]
    mean = 60 / present["methods"][0]["packs"] * 2 * 2  # of packs that hold any
    planned = json.loads(omnibal("plan", ds_config(), "--json").stdout)["plan"]["made_from"]["request"]
    assert planned["global_batch"] == round(mean)
    keyed = ds_config(packing={"samples_per_step": 20})
    assert json.loads(omnibal("plan", keyed, "--json").stdout)["plan"]["made_from"]["request"]["global_batch"] == 20


def test_a_present_configuration_that_does_not_fit_is_said(omnibal, ds_config):
    small = json.loads(cluster_of(4, memory=0.01)) | {"device": "a100"}
    record = json.loads(omnibal("plan", ds_config(cluster=small), "--json").stdout)
    assert record["gain"] is not None
    tiny = small | {"memory_bytes": 8.5 * MIB}
    result = omnibal("plan", ds_config(cluster=tiny, pipeline={"num_stages": "auto"}, packing={"samples_per_step": 20}))
    assert "the present configuration, which needs " in " ".join(result.stdout.split())


def test_a_present_configuration_that_cannot_train_is_said(omnibal, refusal, ds_config):
    config = ds_config(pipeline={"partition": [0, 5, 12]})
    assert refusal("plan", config).startswith(
        "omnibal.packing.samples_per_step must be given, as the present configuration cannot train: layers of the"
    )
    # Stages that cannot be are named before samples are asked for, which could not help.
    deep = ds_config("deep.json", pipeline={"num_stages": 99})
    assert refusal("plan", deep).startswith("num_stages must divide the 4 devices")
    config = ds_config(pipeline={"partition": [0, 5, 12]}, packing={"samples_per_step": 16})
    record = json.loads(omnibal("plan", config, "--json").stdout)
    assert record["gain"] is None and record["problem"].startswith("layers of the partition must be 13")
    lines = omnibal("plan", config).stdout.splitlines()
    gain = next(line for line in lines if line.startswith("gain "))
    assert (
        "samples/s of ZeRO with a trainer's own settings; the present" in gain and "cannot train here: layers" in gain
    )


def test_a_plan_of_another_model_is_made_anew(omnibal, refusal, ds_config, tmp_path):
    """As when the model of a configuration that ships with a plan is exchanged."""
    shipped = Path(__file__).parents[2] / "ds_configs" / "plans" / "qwen2.5-vl-7b-8gpu.json"
    config = ds_config(pipeline={"num_stages": "auto", "plan": str(shipped)}, packing={"samples_per_step": 16})
    assert refusal("report", config) == (
        "plan must be of the profile's 13 layers, got 65; `omnibal plan --write` makes another"
    )
    assert refusal("plan", config, "--write") == (
        f"omnibal.pipeline.plan must be left out for --write, got {shipped}; training then follows "
        f"{tmp_path}/run/plan.json"
    )
    assert "cannot train here" in omnibal("plan", config).stdout


def test_a_missing_model_is_no_matter_of_the_present_configuration(refusal, ds_config, tmp_path):
    line = refusal("plan", ds_config(model={"path": str(tmp_path / "nowhere")}))
    assert line.startswith("model must be a Hugging Face folder") and str(tmp_path / "nowhere") in line


def test_a_plan_is_entered_and_training_follows_it(omnibal, ds_config, tmp_path):
    config = ds_config(
        deepspeed={"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}}},
        packing={
            "samples_per_step": 15
        },  # or the second plan would be asked for the samples that the first one came to
        pipeline={"schedule": "1f1b", "num_stages": 2},
    )
    before = config.read_text()
    result = omnibal("plan", config, "--write")
    assert f"deepspeed launch/train.py --deepspeed_config {config} follows it" in result.stdout
    assert config.read_text() == before
    plan, followed = Plan.load(tmp_path / "run" / "plan.json"), Workspace.read(config)
    assert followed.run_config["gradient_accumulation_steps"] == plan.micro_batches
    assert followed.run_config["train_batch_size"] == "auto"
    lengths, records = SampleLengths.load(tmp_path / "run" / "lengths"), vlm.load_records(followed.section.model.path)
    assert followed.resolve_plan(records, plan.layout, lengths) == plan
    # planned again, the present configuration is the plan
    record = json.loads(omnibal("plan", config, "--json").stdout)
    assert record["gain"] == pytest.approx(1)
    # The ds_config says another number of stages than the command line did.
    result = omnibal("plan", config, "--num-stages", 4, "--write")
    assert "training refuses it: stages of the partition must be 2 as the model and the ds_config say" in result.stdout


@pytest.mark.parametrize(
    ("deepspeed", "message"),
    [
        (
            {"train_micro_batch_size_per_gpu": 4},
            "train_micro_batch_size_per_gpu must be 1 (a micro-batch is one pack), got 4",
        ),
        ({"train_batch_size": 6}, "train_batch_size must be 4 (2 micro-batches of one pack, 2 replicas), got 6; leave"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage must be 0 or 1 with a pipeline, got 2"),
    ],
)
def test_what_training_would_refuse_is_not_planned(refusal, ds_config, tmp_path, deepspeed, message):
    assert message in refusal("plan", ds_config(deepspeed=deepspeed))
    assert not (tmp_path / "run" / "plan.json").exists()


def test_an_encoder_with_devices_of_its_own_is_planned(omnibal, refusal, ds_config, tmp_path):
    apart = {"num_stages": "auto", "encoder": {"num_replicas": 2}}
    record = json.loads(omnibal("plan", ds_config(pipeline=apart), "--cluster", "6xA100-80GB", "--json").stdout)
    plan = Plan.load(tmp_path / "run" / "what-if" / "plan.json")
    assert plan.layout.encoder == Encoder(1, 2) and plan.layout.num_devices == 6
    assert plan.partition.boundaries[1] == encoder_layers(Workspace.read(ds_config()).records)
    assert plan.micro_batches * plan.layout.num_replicas % 2 == 0
    assert record["plan"]["predicted"]["step_seconds"] == plan.predicted.step_seconds > 0


def test_where_units_win_they_are_planned_and_entered(omnibal, ds_config, tmp_path):
    config = ds_config(pipeline={"num_stages": "auto"}, cluster="3xA100-80GB")
    record = json.loads(omnibal("plan", config, "--layout", "units", "--write", "--json").stdout)
    assert record["layouts"]["winner"] == "units" and record["layouts"]["candidates"][0]["runs_today"]
    assert "not weighed: " not in str(record) and "tensor ranks, which omnibal cannot train" in str(record["layouts"])
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert plan.layout.has_units and plan.layout.num_devices == 3
    workspace = Workspace.read(config)
    layout = workspace.layout_on(3, "processes", plan.partition.num_layers)
    assert workspace.resolve_plan(workspace.records, layout, workspace.lengths) == plan


@pytest.mark.parametrize("asked", ["key", "layout"])
def test_an_encoder_on_all_devices_is_planned_and_entered(omnibal, ds_config, tmp_path, asked):
    pipeline = {"num_stages": "auto"} | ({"encoder": "spread"} if asked == "key" else {})
    config = ds_config(pipeline=pipeline, cluster="4xA100-80GB")
    options = () if asked == "key" else ("--layout", "spread")
    record = json.loads(omnibal("plan", config, *options, "--write", "--json").stdout)
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert record["tried"][0]["partition"] == list(plan.partition.boundaries)
    if asked == "key":
        assert "encoder on all" in omnibal("plan", config, "--explain").stdout
    assert plan.layout.encoder == Encoder.on_all(4) and plan.layout.num_devices == 4
    assert plan.partition.boundaries[1] > encoder_layers(Workspace.read(config).records)
    assert record["plan"]["predicted"]["step_seconds"] == plan.predicted.step_seconds > 0
    assert record["trained"].keys() == {"vision", "projector", "language"}
    if asked == "layout":
        assert record["layouts"]["winner"] == "spread" and record["layouts"]["candidates"][0]["runs_today"]
    workspace = Workspace.read(config)
    layout = workspace.layout_on(4, "processes", plan.partition.num_layers)
    assert workspace.resolve_plan(workspace.records, layout, workspace.lengths) == plan
    shown = json.loads(omnibal("plan", tmp_path / "run" / "plan.json", "--json").stdout)
    assert shown["step_seconds"] > 0 and shown["boundaries"] == list(plan.partition.boundaries)


def test_a_batch_size_follows_on_the_ds_configs_own_cluster(omnibal, ds_config):
    config = ds_config(deepspeed={"train_batch_size": 4})
    assert " of 2x8xA100-80GB, " in omnibal("plan", config, "--cluster", "2x8xA100-80GB").stdout


def test_fewer_samples_than_a_step_was_to_have_are_all_in_one(omnibal, ds_config):
    result = omnibal("plan", ds_config(packing={"samples_per_step": 128}), "--json")
    assert "omnibal.packing.samples_per_step is 128, a step of the plan has all 60 samples" in result.stderr
    assert json.loads(result.stdout)["plan"]["made_from"]["request"]["global_batch"] == 60


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_what_ifs_leave_the_plan_and_the_profile_that_a_run_follows(omnibal, ds_config, tmp_path):
    config, run = ds_config(pipeline={"num_stages": "auto"}), tmp_path / "run"
    omnibal("plan", config, "--write")
    text, before = config.read_text(), contents(run)
    what_if = ("--cluster", "2x8xH100-80GB")
    result = omnibal("plan", config, *what_if)
    assert (
        f"written {run}/what-if/plan.json; training follows {run}/plan.json; with --write it follows this one"
    ) in " ".join(result.stdout.split())
    assert Plan.load(run / "what-if" / "plan.json").cluster == Cluster.parse("2x8xH100-80GB")
    asked = Plan.load(run / "plan.json").predicted.samples_per_step
    other = json.loads(omnibal("plan", config, "--cluster", "8xH100-80GB", "--json").stdout)
    assert other["plan"]["made_from"]["request"]["global_batch"] == round(asked)  # steps as large as under its plan
    assert (config.read_text(), contents(run)) == (text, before)
    assert ModelProfile.load(run / "what-if" / "profile.json").is_of(Cluster.parse("H100-80GB").device)
    omnibal("plan", config, *what_if, "--write")
    assert contents(run).keys() == before.keys() and contents(run) != before
    assert ModelProfile.load(run / "profile.json").is_of(Cluster.parse("H100-80GB").device)


def test_costs_that_a_what_if_measured_are_those_of_the_plan_that_is_entered(omnibal, ds_config, tmp_path):
    config, run = ds_config(), tmp_path / "run"
    omnibal("plan", config, "--write")
    counted = ModelProfile.load(run / "profile.json")
    omnibal("plan", config, "--cluster", "4xH100-80GB")
    replace(counted, versions={"torch": "1.0"}).save(run / "what-if" / "profile.json")
    omnibal("plan", config, "--measure")
    assert ModelProfile.load(run / "profile.json") == counted
    omnibal("plan", config, "--measure", "--write")
    assert ModelProfile.load(run / "profile.json").versions == {"torch": "1.0"}


def test_a_copy_of_a_ds_config_shares_no_plan_with_the_original(omnibal, ds_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = json.loads(ds_config(packing={"samples_per_step": 20}).read_text())
    del content["omnibal"]["run"]
    Path("mine.json").write_text(json.dumps(content))
    omnibal("plan", "mine.json", "--write")
    shutil.copy("mine.json", "other.json")
    assert Workspace.read("other.json").named_plan is None
    assert json.loads(omnibal("plan", "other.json", "--json").stdout)["written"] == "runs/other/what-if/plan.json"
    assert not Path("runs/other/plan.json").exists()
    omnibal("plan", "other.json", "--write")
    assert Plan.load("runs/other/plan.json").made_from["ds_config"] == "other.json"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("is_short", [False, True])
def test_plans_are_tried_on_the_real_engine(omnibal, ds_config, monkeypatch, tmp_path, is_short):
    """Costs keep less than the engine does: with room it fits all the same, without it the plan retreats."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}, "gradient_clipping": 1.0}

    def config(memory):
        device = {"name": "cpu", "memory_bytes": 2**31, "link_bytes_per_second": 1e9}
        cluster = {"num_nodes": 1, "devices_per_node": 2, "device": device, "memory_bytes": memory, "overhead_bytes": 0}
        keys = {"data": {"workers": 0}, "pipeline": {"schedule": "1f1b"}, "packing": {"samples_per_step": 16}}
        return ds_config(deepspeed=optimizer, cluster=cluster, **keys)

    counted = tmp_path / "profile.json"
    omnibal("profile", ds_config(), counted, "--cluster", "a100")
    (tmp_path / "run" / "profile.json").unlink(missing_ok=True)
    costs = replace(ModelProfile.load(counted), device="cpu")
    less = tuple(replace(c, saved_bytes=c.saved_bytes | {"none": 0.45 * c.saved_bytes["none"]}) for c in costs.layers)
    (tmp_path / "run").mkdir(exist_ok=True)
    replace(costs, layers=less).save(tmp_path / "run" / "profile.json")
    options = ("--num-stages", 2, "--limits", "12,256", "--json")
    omnibal("plan", config(2**30), *options)
    roomy = Plan.load(tmp_path / "run" / "what-if" / "plan.json")
    assert set(roomy.recompute) == {"none"}
    held = roomy.predicted.stages[0].memory.total
    if not is_short:
        (trial,) = json.loads(omnibal("plan", config(2**30), *options, "--trials", 1).stdout)["trials"]
        assert (trial["outcome"], trial["predicted_bytes"][0]) == ("fits", held)
        assert trial["measured_seconds"] > 0 and trial["peak_bytes"][0] > held
        return
    budgets = (int((held + MIB) / (1 - MOST_MARGIN_SHARE)), 2**30)  # enough as predicted
    result = omnibal("plan", config(list(budgets)), *options, "--trials", 1)
    short, fits = json.loads(result.stdout)["trials"]
    missing = short["peak_bytes"][0] - budgets[0]
    assert short["predicted_bytes"][0] == held < budgets[0] < short["peak_bytes"][0]
    assert short["outcome"].startswith(f"out of memory, {missing} bytes (") and short["outcome"].endswith("missing")
    assert fits["outcome"].startswith(f"after a retreat by {missing} bytes (") and fits["outcome"].endswith(": fits")
    for line, trial in zip(result.stderr.splitlines()[-2:], (short, fits), strict=True):
        assert line.startswith(f"{trial['name']}: predicted ") and line.endswith(trial["outcome"])
    assert short["measured_seconds"] is None and fits["measured_seconds"] > 0
    assert fits["peak_bytes"][0] <= budgets[0]
    assert fits["predicted_bytes"][0] <= held - missing
    kept = Plan.load(tmp_path / "run" / "what-if" / "plan.json")
    assert kept.partition == roomy.partition
    first = kept.recompute[: kept.partition.boundaries[1]]
    assert "full" in first and set(kept.recompute[len(first) :]) == {"none"}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("devices", "encoder"), [(3, {"num_stages": 1, "num_replicas": 1}), (2, "spread")])
def test_encoders_beside_the_pipeline_are_tried_on_the_real_engine(omnibal, ds_config, monkeypatch, devices, encoder):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = ds_config(
        deepspeed={"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}},
        cluster=json.loads(cluster_of(devices)) | {"device": "a100"},
        data={"workers": 0},
        pipeline={"num_stages": 2, "schedule": "1f1b", "encoder": encoder},
        packing={"samples_per_step": 16},
    )
    options = ("--limits", "12,256", "--trials", 1, "--json")
    (trial,) = json.loads(omnibal("plan", config, *options).stdout)["trials"]
    assert trial["outcome"] == "fits" and trial["measured_seconds"] > 0
    assert len(trial["peak_bytes"]) == 2 and min(trial["peak_bytes"]) > 0


MEMORY = 3 / (1 - MOST_MARGIN_SHARE)  # GiB; 3 beside the margin
BUDGET = int(MEMORY * 2**30)


@pytest.fixture
def tried(ds_config, token_lengths, monkeypatch, tmp_path):
    """Arguments of a plan with trials, of a model whose layers cost as the profile's."""
    stand_in(monkeypatch, PROFILE)
    (tmp_path / "run").mkdir()
    replace(PROFILE, versions={}).save(tmp_path / "run" / "profile.json")
    cluster = json.loads(cluster_of(8, gigabytes=100, memory=MEMORY))
    config = ds_config(
        deepspeed={"bf16": {"enabled": True}}, cluster=cluster, pipeline={"schedule": "1f1b", "partition": "uniform"},
        packing={"samples_per_step": 128},
    )  # fmt: skip
    lengths = [argument for path in token_lengths for argument in ("--lengths", path)]
    return [config, *lengths, "--num-stages", 4, "--limits", "9,4096"]


def surplus_of(plan, missing):
    return BUDGET + missing - max(stage.memory.total for stage in plan.predicted.stages)


@pytest.fixture
def engine(monkeypatch):
    """Install an engine whose stages hold more than predicted: the first plan's are short of so many bytes."""
    ran = []

    def install(missing):
        def run(config, plan):
            ran.append(plan)
            peaks = tuple(stage.memory.total + surplus_of(ran[0], missing) for stage in plan.predicted.stages)
            return Trial(plan, (1.0 + len(ran),), peaks)

        monkeypatch.setattr(trials_module, "_run_trial", run)
        return ran

    return install


def test_a_plan_that_holds_more_than_predicted_retreats_until_it_fits(omnibal, tried, engine, tmp_path):
    ran = engine(50 * MIB)
    record = json.loads(omnibal("plan", *tried, "--trials", 1, "--json").stdout)
    first, *retreats = ran
    surplus = surplus_of(first, 50 * MIB)
    assert retreats
    assert {plan.partition for plan in retreats} == {first.partition}
    written = tmp_path / "run" / "what-if" / "plan.json"
    kept = Plan.load(written)
    assert kept.recompute == ran[-1].recompute and kept.partition == ran[-1].partition
    assert record["plan"] == json.loads(written.read_text())
    assert max(stage.memory.total for stage in kept.predicted.stages) + surplus <= BUDGET
    assert sum(level != "none" for level in kept.recompute) > sum(level != "none" for level in first.recompute)
    outcomes = [trial["outcome"] for trial in record["trials"]]
    assert outcomes[0].startswith("out of memory, ") and "bytes" in outcomes[0]
    assert outcomes[-1].startswith("after a retreat by ") and outcomes[-1].endswith("fits")
    # every retreat frees on each stage what the trial before was short of there
    for before, after in zip(ran, retreats, strict=False):
        for held, less in zip(before.predicted.stages, after.predicted.stages, strict=True):
            missing = max(held.memory.total + surplus - BUDGET, 0)
            assert less.memory.total <= held.memory.total - missing
            assert missing or less.memory == held.memory


def test_a_plan_that_fits_stays(omnibal, tried, engine, tmp_path):
    ran = engine(0)
    (line,) = (line for line in omnibal("plan", *tried, "--trials", 1).stdout.splitlines() if "plan 1" in line)
    assert line.startswith("plan 1: predicted ") and line.endswith("measured 2,000.0 ms: fits")
    assert [Plan.load(tmp_path / "run" / "what-if" / "plan.json").recompute] == [plan.recompute for plan in ran]


def test_no_plan_that_fits_is_an_error(refusal, tried, engine):
    engine(BUDGET)
    assert refusal("plan", *tried, "--trials", 1).startswith(
        "a plan must run, got 1 failures; the first: out of memory"
    )


def test_trials_want_costs_that_were_measured_here(refusal, tried, engine, tmp_path):
    ran = engine(0)
    replace(PROFILE, device="test", versions={"torch": "1.0"}).save(tmp_path / "run" / "profile.json")
    refused = refusal("plan", *tried, "--trials", 1)
    assert "device 'test' where the run has" in refused
    assert f"version of torch '1.0' where the run has {torch.__version__!r}" in refused
    assert not ran


def test_the_longest_names_of_weighed_plans_are_whole_on_80_columns():
    choice = {"schedule": "zero-bubble-lean", "num_stages": 16, "micro_batches": 512, "samples_per_step": 1024.4}
    choice |= {"limits": {"vision_units": 12288, "llm_tokens": 16384}, "step_seconds": 23.4561, "recomputed": [10] * 16}
    console = Console(width=80, record=True, file=StringIO())
    console.print(_weighed_table([choice], "patches"))
    first, second = console.export_text().splitlines()[-3:-1]
    assert "zero-bubble " in first and second.split() == ["-lean"]


def test_a_step_of_other_samples_than_were_asked_for_is_said(omnibal, arguments, tmp_path):
    tiled_lengths(200, seed=1).save(tmp_path / "few")
    few = " ".join(omnibal("plan", *arguments(memory=30.0, lengths=[tmp_path / "few"])).stdout.split())
    assert "asked 128 samples a step; the plan has 100: " in few
    assert "samples each on average; no limits that were tried come nearer" in few
    same = omnibal("plan", *arguments(memory=30.0, lengths=[tmp_path / "few"], samples=100)).stdout
    assert "samples a step," not in same
