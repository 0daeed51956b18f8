import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from omnibal.cluster import Links
from omnibal.cost import CostModel, Load
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, paper_limits
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.simulate import simulate_step
from omnibal.plan import Plan
from omnibal.planner.packings import spread_steps
from tests.cli.conftest import cluster_of
from tests.clusters import on_cluster
from tests.pipeline.profiles import fixed_profile, layer, profile

COSTS = fixed_profile([1, 2, 3, 4, 5, 6], output=[1e9] * 6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A profile of six layers of 1 to 6 seconds forward; each sends 1 GB."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    COSTS.save(path)
    return path


def cut(boundaries, num_devices=None, **cluster):
    """Options for a profile."""
    devices = num_devices or len(boundaries.replace(",", " ").split()) - 1
    return "--partition", boundaries, "--cluster", cluster_of(devices, **cluster)


def test_figures_are_those_of_the_simulated_step(omnibal, saved):
    options = cut("0,4,6", 4, gigabytes=0.5, latency_seconds=1.0)
    record = json.loads(omnibal("simulate", saved, *options, "--json").stdout)
    loads = [Load([9] * 8, [4096] * 8)] * 2
    step = simulate_step(COSTS, Partition((0, 4, 6)), loads, Links(0.5e9, latency_seconds=1), zero_stage=1)
    assert record["step_seconds"] == pytest.approx(step.step_seconds)
    assert record["bubble_ratio"] == pytest.approx(step.bubble_ratio)
    assert [row["idle_seconds"] for row in record["stages"]] == pytest.approx(step.replicas[0].idle_seconds)
    # eight forwards and eight backwards cross the cut, at 1 + 2 seconds each
    assert [row["transfer_seconds"] for row in record["stages"]] == pytest.approx([48, 48])
    assert [row["forward_seconds"] for row in record["stages"]] == [10, 11]
    assert [row["backward_seconds"] for row in record["stages"]] == [20, 22]
    assert [row["in_flight"] for row in record["stages"]] == [2, 1]
    assert (record["cluster"], record["layout"]["num_replicas"]) == ("4xtest", 2)


def write_plan(folder, **changes):
    """A plan beside its profile; the path."""
    plan = Plan(PackLimits(3, 100), 5, Partition((0, 3, 6)), ("full",) * 3 + ("none",) * 3, **changes)
    on_cluster(plan, links=Links(5e9)).save(folder / "plan.json")
    COSTS.save(folder / "profile.json")
    return folder / "plan.json"


def test_a_plan_says_all(omnibal, tmp_path):
    record = json.loads(omnibal("simulate", write_plan(tmp_path), "--json").stdout)
    assert record["limits"] == {"vision_units": 3, "llm_tokens": 100}
    assert record["micro_batches"] == 5
    # forward 1 + 2 + 3, input and weight gradients as much each, and the forward again
    assert [row["backward_seconds"] for row in record["stages"]] == [18, 30]
    other = ("--limits", "4,7", "--partition", "0,4,6")
    changed = json.loads(omnibal("simulate", tmp_path / "plan.json", *other, "--json").stdout)
    assert changed["limits"] == {"vision_units": 4, "llm_tokens": 7}
    assert [row["backward_seconds"] for row in changed["stages"]] == pytest.approx([2 * 10 + 6, 22])


def test_a_schedule_is_that_of_the_plan_or_the_one_named(omnibal, tmp_path):
    path = write_plan(tmp_path, schedule="zero-bubble")
    split, named = (
        json.loads(omnibal("simulate", path, *more, "--json").stdout) for more in ((), ("--schedule", "1f1b"))
    )
    assert (split["schedule"], named["schedule"]) == ("zero-bubble", "1f1b")
    plan, loads = Plan.load(path), [Load([3] * 5, [100] * 5)]
    expected = simulate_step(
        COSTS, plan.partition, loads, Links(5e9), zero_stage=1, recompute=plan.recompute, mode="overlap",
        schedule=plan.make_schedule(),
    )  # fmt: skip
    assert split["step_seconds"] == pytest.approx(expected.step_seconds)
    assert split["step_seconds"] < named["step_seconds"]


def test_a_level_that_costs_do_not_know_counts_as_none(omnibal, tmp_path):
    """Counted costs have no selective level outside blocks; a plan written by hand may name it for every layer."""
    write_plan(tmp_path)
    plan, records = Plan.load(tmp_path / "plan.json"), []
    for level in ("selective", "none"):
        replace(plan, recompute=(level,) * 6).save(tmp_path / "plan.json")
        records.append(json.loads(omnibal("simulate", tmp_path / "plan.json", "--json").stdout))
    assert records[0] == records[1]


def test_a_table_and_a_picture(omnibal, saved, tmp_path):
    plot = tmp_path / "new" / "timeline.png"
    text = omnibal("simulate", saved, *cut("0 2 4 6"), "--plot", plot).stdout
    assert "12 micro-batches; equal packs of 9 vision units and 4,096 LLM tokens" in " ".join(text.split())
    assert str(plot) in text.replace("\n", "")
    with Image.open(plot) as picture:
        assert picture.width > picture.height


def test_many_replicas_are_drawn_as_the_fastest_and_the_slowest(omnibal, saved, monkeypatch):
    drawn = []
    monkeypatch.setattr("omnibal.cli.simulate.plot_timeline", lambda panels, path: drawn.append(list(panels)))
    for replicas in (1, 3, 4):
        omnibal("simulate", saved, *cut("0,3,6", 2 * replicas), "--plot", "x.png")
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
    epoch = arrange_epoch(lengths, paper_limits(lengths), num_replicas=2, micro_batches=8)
    tokens, units = epoch.packs.llm_tokens(lengths)[epoch.steps], epoch.packs.vision_units(lengths)[epoch.steps]
    named = [part for path in token_lengths for part in ("--lengths", path)]
    options = (*named, *cut("0,1,2", 4, gigabytes=1000), "--json")
    for step in (0, epoch.num_steps - 1):
        record = json.loads(omnibal("simulate", by_tiles, *options, "--step", step).stdout)
        means = tuple(row["forward_seconds"] for row in record["stages"])
        assert means in {*zip(units[step].mean(axis=1), tokens[step].mean(axis=1), strict=True)}
        assert record["step"] == step
    median = json.loads(omnibal("simulate", by_tiles, *options).stdout)
    looked_at = spread_steps(epoch.num_steps, 32)
    sums = (tokens + units).sum(axis=2).max(axis=1)
    assert sums[median["step"]] == np.sort(sums[looked_at])[len(looked_at) // 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--partition must be given beside a profile, got none with"),
        (("--partition", "0,2", "--present"), "--partition must be left out beside --present, which has one, got both"),
        (cut("0,2,x", 2), "--partition must be layer numbers such as 0,13,26, got '0,2,x'"),
        (cut("0,2,5"), "partition must be of the profile's 6 layers, got one of 5"),
        (cut(f"0,2,{10**20}"), "partition must be of the profile's 6 layers"),
        (cut("0,4,2"), "boundaries must start at 0 and increase"),
        (cut("0,2,6", 3), "num_stages must divide the 3 devices of the cluster 3xtest, got 2"),
        ((*cut("0,6", 1), "--step", 3), "--step must come with lengths, got 3"),
        ((*cut("0,6", 1), "--limits", "9"), "--limits must be vision units and LLM tokens such as 16,4096, got '9'"),
        ((*cut("0,6", 1), "--plot", "picture.pdf"), "--plot must be a PNG, whose name ends in .png, got picture.pdf"),
    ],
)
def test_wrong_options_are_refused(refusal, saved, options, message):
    line = refusal("simulate", saved, *options)
    assert message in line and "\n" not in line


def test_steps_beyond_the_epoch_are_refused(refusal, saved, token_lengths):
    options = (*cut("0,6", 1), "--lengths", token_lengths[0], "--step", 10**6)
    assert "--step must be below the epoch's" in refusal("simulate", saved, *options)
