import json
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from PIL import Image

from omnibal.cli import step_task
from omnibal.cluster import Links
from omnibal.cost import CostModel, Load
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, paper_limits
from omnibal.memory import footprint
from omnibal.pipeline import schedule
from omnibal.pipeline import simulate as simulate_module
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.simulate import simulate_step
from omnibal.plan import Plan
from omnibal.report import timeline
from tests.engine.small import small_config
from tests.pipeline.profiles import fixed_profile, layer, profile


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A profile of six layers of 1 to 6 seconds forward; each sends 1 GB."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    fixed_profile([1, 2, 3, 4, 5, 6], output=[1e9] * 6).save(path)
    return path


def test_figures_are_those_of_the_simulated_step(omnibal, saved):
    record = json.loads(
        omnibal(
            "simulate", saved, "--partition", "0,4,6", "--micro-batches", 3, "--num-replicas", 2, "--bandwidth", 0.5,
            "--latency", 1e6, "--json",
        ).stdout
    )  # fmt: skip
    loads = [Load([9] * 3, [4096] * 3)] * 2
    step = simulate_step(
        fixed_profile([1, 2, 3, 4, 5, 6], output=[1e9] * 6), Partition((0, 4, 6)), loads,
        Links(0.5e9, latency_seconds=1),
    )  # fmt: skip
    assert record["step_seconds"] == pytest.approx(step.step_seconds)
    assert record["bubble_ratio"] == pytest.approx(step.bubble_ratio)
    assert [row["idle_seconds"] for row in record["stages"]] == pytest.approx(step.replicas[0].idle_seconds)
    # three forwards and three backwards cross the cut, at 1 + 2 seconds each
    assert [row["transfer_seconds"] for row in record["stages"]] == pytest.approx([18, 18])
    assert [row["forward_seconds"] for row in record["stages"]] == [10, 11]
    assert [row["backward_seconds"] for row in record["stages"]] == [20, 22]
    assert [row["in_flight"] for row in record["stages"]] == [2, 1]
    assert record["mode"] == "rendezvous"


def test_a_schedule_is_that_of_the_plan_or_the_one_named(omnibal, saved, tmp_path):
    plan = Plan(PackLimits(9, 4096), 3, Partition((0, 4, 6)), ("none",) * 6, schedule="zero-bubble")
    plan.save(tmp_path / "plan.json")
    options = ("simulate", saved, "--plan", tmp_path / "plan.json", "--bandwidth", 5, "--json")
    split, named = (json.loads(omnibal(*options, *more).stdout) for more in ((), ("--schedule", "1f1b")))
    assert (split["schedule"], named["schedule"]) == ("zero-bubble", "1f1b")
    costs = fixed_profile([1, 2, 3, 4, 5, 6], output=[1e9] * 6)
    loads = [Load([9] * 3, [4096] * 3)]
    expected = simulate_step(costs, plan.partition, loads, Links(5e9), schedule=plan.make_schedule(), mode="overlap")
    assert split["step_seconds"] == pytest.approx(expected.step_seconds)
    assert split["step_seconds"] < named["step_seconds"]


def test_a_table_a_trace_and_a_picture(omnibal, saved, tmp_path):
    trace, plot = tmp_path / "new" / "trace.json", tmp_path / "new" / "timeline.png"
    options = ("--partition", "0 2 4 6", "--bandwidth", 5, "--mode", "overlap", "--trace", trace, "--plot", plot)
    text = omnibal("simulate", saved, *options).stdout
    assert "1 replica × 12 micro-batches: equal packs of 9 vision units and 4,096 LLM tokens" in " ".join(text.split())
    assert str(trace) in text.replace("\n", "")
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 3 * 12 * 2
    with Image.open(plot) as picture:
        assert picture.width > picture.height


def test_a_plan_says_partition_recomputation_and_packs(omnibal, saved, tmp_path):
    Plan(PackLimits(3, 100), 5, Partition((0, 3, 6)), ("full",) * 3 + ("none",) * 3).save(tmp_path / "plan.json")
    plan = ("simulate", saved, "--plan", tmp_path / "plan.json", "--bandwidth", 1, "--json")
    record = json.loads(omnibal(*plan).stdout)
    assert record["limits"] == {"vision_units": 3, "llm_tokens": 100}
    assert record["micro_batches"] == 5
    # forward 1 + 2 + 3, input and weight gradients as much each, and the forward again
    assert [row["backward_seconds"] for row in record["stages"]] == [18, 30]
    changed = json.loads(omnibal(*plan, "--recompute", "none", "--micro-batches", 2, "--llm-tokens", 7).stdout)
    assert [row["backward_seconds"] for row in changed["stages"]] == [12, 30]
    assert changed["micro_batches"] == 2
    assert changed["limits"] == {"vision_units": 3, "llm_tokens": 7}


def test_many_replicas_are_drawn_as_the_fastest_and_the_slowest(omnibal, saved, monkeypatch):
    drawn = []
    monkeypatch.setattr(timeline, "plot_timeline", lambda panels, path: drawn.append(list(panels)))
    for replicas in (1, 3, 4):
        omnibal(
            "simulate", saved, "--partition", "0,3,6", "--bandwidth", 1, "--num-replicas", replicas, "--plot", "x.png"
        )
    assert drawn[0] == [""]
    assert drawn[1] == ["replica 0", "replica 1", "replica 2"]
    assert [title.split(", ")[1] for title in drawn[2]] == ["the fastest", "the slowest"]


@pytest.fixture(scope="module")
def by_tiles(tmp_path_factory):
    """Layers whose seconds are the tiles and the tokens of a pack."""
    vision = replace(layer("vision", weight=0), forward_seconds=CostModel(vision_units=1), backward_seconds=CostModel())
    text = replace(layer("text", weight=0), forward_seconds=CostModel(llm_tokens=1), backward_seconds=CostModel())
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    profile([vision, text]).save(path)
    return path


def test_real_packs_are_those_of_the_sampler(omnibal, by_tiles, token_lengths):
    lengths = SampleLengths.from_token_lengths(token_lengths)
    epoch = arrange_epoch(lengths, paper_limits(lengths), num_replicas=2, micro_batches=3)
    tokens, units = epoch.packs.llm_tokens(lengths)[epoch.steps], epoch.packs.vision_units(lengths)[epoch.steps]
    named = [part for path in token_lengths for part in ("--lengths", path)]
    options = ("--partition", "0,1,2", "--bandwidth", "1000", "--num-replicas", 2, "--micro-batches", 3, "--json")
    for step in (0, epoch.num_steps - 1):
        record = json.loads(omnibal("simulate", by_tiles, *named, *options, "--step", step).stdout)
        means = tuple(row["forward_seconds"] for row in record["stages"])
        assert means in {*zip(units[step].mean(axis=1), tokens[step].mean(axis=1), strict=True)}
        assert f"step {step} of an epoch of {epoch.num_steps}" in record["packs"]
    median = json.loads(omnibal("simulate", by_tiles, *named, *options).stdout)
    chosen = int(median["packs"].split()[1])
    sums = (tokens + units).sum(axis=2).max(axis=1)
    assert sums[chosen] == np.sort(sums)[len(sums) // 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--bandwidth", 1), "a partition must come from --plan or --partition, got neither"),
        (("--bandwidth", 1, "--partition", "0,2", "--plan", "x"), "got both"),
        (("--bandwidth", 1, "--partition", "0,2,x"), "--partition must be layer numbers such as 0,13,26, got '0,2,x'"),
        (("--bandwidth", 1, "--partition", "0,2,5"), "partition must be of the profile's 6 layers, got one of 5"),
        (("--bandwidth", 1, "--partition", "0,4,2"), "boundaries must start at 0 and increase"),
        (("--partition", "0,6"), "--bandwidth must be given for 'test', got none; links are known of A100-40GB"),
        (("--bandwidth", 1, "--partition", "0,6", "--step", 3), "--step must come with --lengths, got 3 alone"),
        (("--bandwidth", 1, "--partition", "0,6", "--device", "a100"), "--device must be left out where a profile"),
        (("--bandwidth", 0, "--partition", "0,6"), "--bandwidth must be positive, got 0 GB/s"),
    ],
)
def test_wrong_options_are_refused(omnibal, saved, options, message):
    result = omnibal("simulate", saved, *options, exit_code=2)
    assert message in result.stderr.replace("\n", " ")


def test_steps_beyond_the_epoch_are_refused(omnibal, saved, token_lengths):
    options = ("--partition", "0,6", "--bandwidth", 1, "--lengths", token_lengths[0], "--step", 10**6)
    assert "--step must be below the epoch's" in omnibal("simulate", saved, *options, exit_code=2).stderr


def test_a_profile_must_be_the_models(omnibal, saved, tmp_path):
    small_config().save_pretrained(tmp_path)
    options = ("--model", tmp_path, "--partition", "0,6", "--bandwidth", 1)
    assert "6 layers where the model has 10" in omnibal("simulate", saved, *options, exit_code=2).stderr
    counted = json.loads(
        omnibal("simulate", "--model", tmp_path, "--device", "a100", "--partition", "0,4,10", "--json").stdout
    )
    assert counted["bandwidth_bytes_per_second"] == 300e9
    assert counted["profile"]["device"] == "A100-80GB"


def test_the_choices_are_those_of_the_package():
    assert step_task.Mode == simulate_module.Mode
    assert get_args(step_task.Level) == get_args(footprint.Level)
    assert get_args(step_task.ScheduleName) == get_args(schedule.ScheduleName)
