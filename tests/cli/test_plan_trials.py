"""`omnibal plan --trials` on the real engine, then many cases of it and of `--four-steps` on a made-up one."""

import json
from dataclasses import replace

import pytest

from omnibal.plan import Plan
from omnibal.profile.records import ModelProfile
from omnibal.trials import run as trials_module
from omnibal.trials.run import Trial
from tests.engine.demo import demo_config
from tests.planner.test_solve import PROFILE

MIB = 2**20
CONFIG = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "omnibal": {}}
BUDGET = 3072 * MIB
OPTIONS = [
    *("--num-stages", 4, "--num-replicas", 2, "--global-batch", 128, "--bandwidth", 100, "--budget", 3),
    *("--overhead", 0, "--head-room", 0, "--method", "isf", "--steps", 2, "--vision-units", 9, "--llm-tokens", 4096),
]


@pytest.fixture
def demo(omnibal, tmp_path, monkeypatch):
    """Arguments to plan the demo's model for two processes of this machine."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = demo_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, data = config["omnibal"]["model"]["path"], config["omnibal"]["data"]["train"]
    omnibal("lengths", data, tmp_path / "lengths", "--model", model)
    omnibal("profile", model, tmp_path / "profile.json", "--device", "a100", "--dtype", "float32")
    files = [tmp_path / "profile.json", "--lengths", tmp_path / "lengths", "--out", tmp_path / "plan.json"]
    limits = ["--vision-units", 12, "--llm-tokens", 256, "--global-batch", 16]
    return [*files, *limits, "--num-stages", 2, "--num-replicas", 1, "--overhead", 0, "--head-room", 0, "--json"]


def keeps_less(profile, share):
    """A profile of kernels that keep less than the engine's here."""
    return replace(
        profile,
        layers=tuple(
            replace(layer, saved_bytes=layer.saved_bytes | {"none": share * layer.saved_bytes["none"]})
            for layer in profile.layers
        ),
    )


@pytest.mark.distributed
def test_the_real_engine_runs_out_of_memory_and_the_plan_retreats(omnibal, demo, tmp_path):
    path = demo[0]
    keeps_less(ModelProfile.load(path), 0.6).save(path)
    omnibal("plan", *demo, "--budget", 1)
    roomy = Plan.load(tmp_path / "plan.json")
    assert set(roomy.recompute) == {"none"}
    held = roomy.predicted.stages[0].memory.total
    budgets = (held + MIB, 2**30)  # enough as predicted
    tight = ["--budget", ",".join(str(budget / 2**30) for budget in budgets)]
    result = omnibal("plan", *demo, *tight, "--trials", 1, "--config", tmp_path / "config.json")
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
    assert fits["peak_bytes"][1] == short["peak_bytes"][1]
    kept = Plan.load(tmp_path / "plan.json")
    assert kept.partition == roomy.partition
    first = kept.recompute[: kept.partition.boundaries[1]]
    assert "full" in first and set(kept.recompute[len(first) :]) == {"none"}


@pytest.fixture
def arguments(token_lengths, tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    lengths = [argument for path in token_lengths for argument in ("--lengths", path)]
    files = ["--config", tmp_path / "config.json", "--out", tmp_path / "plan.json"]
    return [tmp_path / "profile.json", *lengths, *files, *OPTIONS]


def surplus_of(plan, missing):
    return BUDGET + missing - max(stage.memory.total for stage in plan.predicted.stages)


@pytest.fixture
def engine(monkeypatch):
    """Install an engine whose stages hold more than predicted: the first plan's are short of so many bytes."""
    ran = []

    def install(missing):
        def run(config, plan, launcher_options, steps):
            ran.append(plan)
            peaks = tuple(stage.memory.total + surplus_of(ran[0], missing) for stage in plan.predicted.stages)
            return Trial(plan, (1.0 + len(ran),) * steps, peaks)

        monkeypatch.setattr(trials_module, "_run_trial", run)
        return ran

    return install


def test_a_plan_that_holds_more_than_predicted_retreats_until_it_fits(omnibal, arguments, engine, tmp_path):
    ran = engine(50 * MIB)
    record = json.loads(omnibal("plan", *arguments, "--trials", 1, "--json").stdout)
    first, *retreats = ran
    surplus = surplus_of(first, 50 * MIB)
    assert retreats
    assert {plan.partition for plan in retreats} == {first.partition}
    kept = Plan.load(tmp_path / "plan.json")
    assert kept == ran[-1]
    assert record["plan"] == json.loads((tmp_path / "plan.json").read_text())
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


def test_a_plan_that_fits_stays(omnibal, arguments, engine, tmp_path):
    ran = engine(0)
    output = omnibal("plan", *arguments, "--trials", 1).stdout
    row = next(line for line in output.splitlines() if line.startswith(" plan 1 "))
    assert f"{ran[0].micro_batches}" in row and "2,000.0" in row  # packs; measured milliseconds
    assert "plan 1: fits" in output
    assert [Plan.load(tmp_path / "plan.json")] == ran


def test_no_plan_that_fits_is_an_error(omnibal, arguments, engine):
    engine(BUDGET)
    result = omnibal("plan", *arguments, "--trials", 1, exit_code=2)
    assert "error: a plan must run, got 1 failures; the first: out of memory" in result.stderr


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"zero_optimization": {}}, [], "--zero-stage must be the ds_config's 0 for trials, got 1"),
        ({}, ["--zero-stage", 0], "--zero-stage must be the ds_config's 1 for trials, got 0"),
        ({}, ["--no-float32-gradients"], "--float32-gradients must be given for trials"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, [], "--no-float32-gradients must be given for trials"),
    ],
)
def test_trials_keep_the_memory_that_is_planned(omnibal, arguments, tmp_path, changes, options, message):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    assert message in omnibal("plan", *arguments, *options, "--trials", 1, exit_code=2).stderr


@pytest.mark.parametrize("surplus", [0, 30 * MIB])
def test_the_four_steps_find_levels_from_measured_memory_alone(omnibal, arguments, monkeypatch, tmp_path, surplus):
    """A machine on which a block of the ViT keeps 10 MiB, none of the LLM's anything, and more than two a surplus."""
    blocks = [layer.name.startswith("vision_block") for layer in PROFILE.layers]
    held, room = (4, 3, 2, 1), 100 * MIB

    def kept(plan, stage):
        return sum(blocks[i] and plan.recompute[i] == "none" for i in plan.partition.layers(stage))

    def peak(plan, stage):
        return BUDGET - room + 10 * MIB * held[stage] * kept(plan, stage) + surplus * (kept(plan, stage) > 2)

    def run(config, plan, launcher_options, steps):
        peaks = tuple(peak(plan, stage) for stage in range(4))
        return Trial(plan, (1.0,) * steps, peaks, peaks)

    monkeypatch.setattr(trials_module, "_run_trial", run)
    result = omnibal("plan", *arguments, "--four-steps", "--json")
    record = json.loads(result.stdout)
    assert record["plan"] == json.loads((tmp_path / "plan.json").read_text())
    trials = record["trials"]
    last = trials[-2]
    assert [trial["name"] for trial in trials] == [*(f"paper's {n}" for n in range(1, len(trials))), "solver's"]
    assert last["outcome"].startswith("after a retreat by ") == (surplus > 0)
    said = [line for line in result.stderr.splitlines() if line.startswith(f"{last['name']}: ")]
    assert said[0].endswith(last["outcome"])
    plan = Plan.load(tmp_path / "plan.json")
    for stage in range(4):
        there = sum(blocks[i] for i in plan.partition.layers(stage))
        fitting = room // (10 * MIB * held[stage])
        assert peak(plan, stage) <= BUDGET
        assert surplus or kept(plan, stage) == min(there, fitting)
    assert kept(plan, 0) == 2
