import sys
from dataclasses import replace

import pytest

import omnibal.trials as trials_module
from omnibal.data.limits import PackLimits
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from omnibal.trials import Trial, missing_bytes, read_missing, run_trials, write_missing
from tests.engine.demo import demo_config
from tests.engine.launch import launch

LIMITS = PackLimits(12, 256)


def plan(*boundaries):
    return Plan(LIMITS, 2, Partition(boundaries), ("none",) * boundaries[-1])


def give_up(trial):
    """Try nothing in a trial's place."""


def test_a_launch_that_fails_is_a_row(tmp_path, monkeypatch):
    """tests/cli/test_plan.py has launches by DeepSpeed's launcher, slow ones."""
    says = "import sys; print(sys.argv[1:]); raise ValueError('layers of the partition must be 13, got 12')"
    monkeypatch.setattr(trials_module, "LAUNCHER", (sys.executable, "-c", says))
    (trial,) = run_trials({"omnibal": {}}, plan(0, 12), (), give_up)
    assert trial.median_seconds == float("inf")
    assert trial.missing_bytes == ()
    assert trial.error == "ValueError: layers of the partition must be 13, got 12"


def test_a_launch_gets_the_plan_and_its_result_is_read(tmp_path, monkeypatch):
    """In place of the engine: looks at what it is given, and says how long and how large its steps were."""
    writes = """
import json, sys
from omnibal.plan import Plan
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
config = json.load(open(options["--deepspeed_config"]))
plan = Plan.load(config["omnibal"]["pipeline"]["plan"])
assert (options["--module"], options["--num_gpus"]) == ("omnibal.trials", "2")
assert (config["gradient_accumulation_steps"], config["train_batch_size"]) == (plan.micro_batches, "auto")
assert config["omnibal"]["pipeline"]["num_stages"] == plan.num_stages
result = {"step_seconds": [3, 1, 2], "peak_bytes": plan.partition.boundaries[1:]}
json.dump(result, open(options["--output"], "w"))
"""
    monkeypatch.setattr(trials_module, "LAUNCHER", (sys.executable, "-c", writes))
    (trial,) = run_trials({"omnibal": {}}, plan(0, 5, 12), (), give_up)
    assert trial == Trial(plan(0, 5, 12), (3, 1, 2), (5, 12))
    assert trial.median_seconds == 2


@pytest.fixture
def made_up(monkeypatch):
    """Trials that hold a tenth of a stage's budget less for each layer that recomputes."""

    def run(config, plan):
        peaks = tuple(120 - 10 * sum(plan.recompute[i] == "full" for i in plan.partition.layers(s)) for s in range(2))
        return Trial(plan, (1.0,), peaks)

    monkeypatch.setattr(trials_module, "_run_trial", run)


def one_more(trial):
    """Let the first layer that keeps recompute, on every stage that ran out."""
    levels = list(trial.plan.recompute)
    for stage, missing in enumerate(trial.missing_bytes):
        keeping = [layer for layer in trial.plan.partition.layers(stage) if levels[layer] == "none"]
        if missing and not keeping:
            return None
        levels[keeping[0]] = "full" if missing else levels[keeping[0]]
    return replace(trial.plan, recompute=tuple(levels))


def test_a_trial_over_its_budget_retreats_until_it_fits(made_up):
    first, second, fits = run_trials({}, plan(0, 5, 12), (105, 200), one_more)
    assert [trial.plan.recompute.count("full") for trial in (first, second, fits)] == [0, 1, 2]
    assert [trial.missing_bytes for trial in (first, second, fits)] == [(15, 0), (5, 0), ()]
    assert [trial.retreat_bytes for trial in (first, second, fits)] == [(), (15, 0), (5, 0)]
    assert first.error == "out of memory: stage 0 by 15 bytes"
    assert first.peak_bytes == (120, 120)
    assert first.median_seconds == float("inf")


def test_a_retreat_ends_where_nothing_is_left(made_up):
    trials = list(run_trials({}, plan(0, 2, 12), (50, 200), one_more))
    assert len(trials) == 3
    assert all(trial.error for trial in trials)
    assert len(list(run_trials({}, plan(0, 2, 12), (50, 200), give_up))) == 1


@pytest.mark.distributed
def test_steps_are_measured_and_what_the_allocators_of_two_stages_say_is_found(tmp_path):
    measured, _ = launch(2, "tests.engine.memory_trials:run_trials", demo_config(tmp_path), str(tmp_path))
    assert (len(measured["step_seconds"]), len(measured["peak_bytes"])) == (3, 2)
    assert min(measured["step_seconds"]) > 0
    assert min(measured["peak_bytes"]) > 2**20  # weights and more
    assert read_missing(tmp_path, 2) == (2**29, 3 * 2**29)


def test_what_an_allocator_says_is_missing(tmp_path):
    message = (
        "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 384.50 MiB "
        "is free. Including non-PyTorch memory, this process has 78.77 GiB memory in use."
    )
    assert missing_bytes(message) == 127.5 * 2**20
    assert missing_bytes("out of memory") == 1
    for rank, text in enumerate((message, "out of memory")):
        write_missing(tmp_path, 1, rank, text)
    assert read_missing(tmp_path, 3) == (0, 127.5 * 2**20, 0)
