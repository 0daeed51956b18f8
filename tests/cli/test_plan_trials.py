"""`omnibal plan --trials` and `--four-steps` on a made-up engine that holds more than was predicted."""

import json

import pytest

from omnibal.engine import trials as trials_module
from omnibal.engine.trials import Trial
from omnibal.plan import Plan
from tests.planner.test_solve import PROFILE

MIB = 2**20
BUDGET = 3072 * MIB
OPTIONS = [
    *("--num-stages", 4, "--num-replicas", 2, "--global-batch", 128, "--bandwidth", 100, "--budget", 3),
    *("--overhead", 0, "--head-room", 0, "--method", "isf", "--steps", 2, "--vision-units", 9, "--llm-tokens", 4096),
]


@pytest.fixture
def arguments(token_lengths, tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    (tmp_path / "config.json").write_text(json.dumps({"bf16": {"enabled": True}, "omnibal": {}}))
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
    omnibal("plan", *arguments, "--trials", 1)
    assert [Plan.load(tmp_path / "plan.json")] == ran


def test_no_plan_that_fits_is_an_error(omnibal, arguments, engine):
    engine(BUDGET)
    result = omnibal("plan", *arguments, "--trials", 1, exit_code=2)
    assert "error: a plan must run, got 1 failures; the first: out of memory" in result.stderr


def test_the_four_steps_find_levels_from_measured_memory_alone(omnibal, arguments, monkeypatch, tmp_path):
    """A machine on which a block of the ViT keeps 10 MiB, and none of the LLM's anything."""
    blocks = [layer.name.startswith("vision_block") for layer in PROFILE.layers]
    held, budget, base = (4, 3, 2, 1), 3072 * MIB, 2900 * MIB

    def run(config, plan, launcher_options, steps):
        keeps = [blocks[i] and plan.recompute[i] == "none" for i in range(len(blocks))]
        peaks = [base + 10 * MIB * held[s] * sum(keeps[i] for i in plan.partition.layers(s)) for s in range(4)]
        return Trial(plan, (1.0,) * steps, tuple(peaks))

    monkeypatch.setattr(trials_module, "_run_trial", run)
    omnibal("plan", *arguments, "--four-steps")
    plan = Plan.load(tmp_path / "plan.json")
    for stage in range(4):
        layers = plan.partition.layers(stage)
        kept = sum(blocks[i] and plan.recompute[i] == "none" for i in layers)
        assert kept == min(sum(blocks[i] for i in layers), (budget - base) // (10 * MIB * held[stage]))
