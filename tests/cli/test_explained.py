"""`omnibal plan` of a plan that is there: a step of it, stage by stage."""

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
from omnibal.pipeline.search import METHODS, search_partition
from omnibal.pipeline.simulate import simulate_step
from omnibal.plan import Plan
from omnibal.planner.packings import spread_steps
from tests.clusters import on_cluster
from tests.pipeline.profiles import fixed_profile, layer, profile

COSTS = fixed_profile([1, 2, 3, 4, 5, 6], output=[1e9] * 6)


def write_plan(
    folder,
    boundaries=(0, 3, 6),
    costs=COSTS,
    *,
    replicas=1,
    limits=(3, 100),
    micro_batches=5,
    recompute=None,
    links=None,
    **changes,
):
    """A plan beside its profile: six layers of 1 to 6 seconds forward, each sends 1 GB. The path."""
    levels = recompute or ("none",) * boundaries[-1]
    plan = Plan(PackLimits(*limits), micro_batches, Partition(boundaries), levels, **changes)
    on_cluster(plan, replicas, links=links or Links(5e9)).save(folder / "plan.json")
    costs.save(folder / "profile.json")
    return folder / "plan.json"


def test_figures_are_those_of_the_simulated_step(omnibal, tmp_path):
    links = Links(0.5e9, latency_seconds=1.0)
    path = write_plan(tmp_path, (0, 4, 6), replicas=2, limits=(9, 4096), micro_batches=8, links=links)
    record = json.loads(omnibal("plan", path, "--json").stdout)
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


def test_a_plan_says_all(omnibal, tmp_path):
    path = write_plan(tmp_path, recompute=("full",) * 3 + ("none",) * 3)
    record = json.loads(omnibal("plan", path, "--json").stdout)
    assert record["limits"] == {"vision_units": 3, "llm_tokens": 100}
    assert record["micro_batches"] == 5
    # forward 1 + 2 + 3, input and weight gradients as much each, and the forward again
    assert [row["backward_seconds"] for row in record["stages"]] == [18, 30]


def test_the_schedule_is_that_of_the_plan(omnibal, tmp_path):
    path = write_plan(tmp_path, (0, 4, 6), schedule="zero-bubble")
    record = json.loads(omnibal("plan", path, "--json").stdout)
    plan, loads = Plan.load(path), [Load([3] * 5, [100] * 5)]
    expected = simulate_step(
        COSTS, plan.partition, loads, Links(5e9), zero_stage=1, recompute=plan.recompute, mode="overlap",
        schedule=plan.make_schedule(),
    )  # fmt: skip
    assert (record["schedule"], record["step_seconds"]) == ("zero-bubble", pytest.approx(expected.step_seconds))
    assert record["step_seconds"] < record["cuts"]["search"]["step_seconds"]  # by 1F1B


def test_cuts_of_all_methods_stand_beside_the_plans(omnibal, tmp_path):
    path = write_plan(tmp_path, (0, 3, 6), micro_batches=8, limits=(9, 4096))
    cuts = json.loads(omnibal("plan", path, "--json").stdout)["cuts"]
    assert list(cuts) == list(METHODS)
    assert cuts["uniform"]["boundaries"] == [0, 3, 6]
    found = search_partition(COSTS, [Load([9] * 8, [4096] * 8, [4096**2] * 8)], 2, Links(5e9))
    assert cuts["search"]["boundaries"] == list(found.best.partition.boundaries) == [0, 4, 6]
    assert cuts["search"]["step_seconds"] == min(entry["step_seconds"] for entry in cuts.values())
    assert (cuts["search"]["gap"], cuts["search"]["lower_bound_seconds"]) == (found.gap, found.lower_bound_seconds)
    text = omnibal("plan", path).stdout
    assert all(f" {method} " in text for method in METHODS)
    assert "0 4 6" in text and "(lower bound)" in text and "cut at 0 3 6" in text


def test_a_level_that_costs_do_not_know_counts_as_none(omnibal, tmp_path):
    """Counted costs have no selective level outside blocks; a plan written by hand may name it for every layer."""
    write_plan(tmp_path)
    plan, records = Plan.load(tmp_path / "plan.json"), []
    for level in ("selective", "none"):
        replace(plan, recompute=(level,) * 6).save(tmp_path / "plan.json")
        records.append(json.loads(omnibal("plan", tmp_path / "plan.json", "--json").stdout))
    assert records[0] == records[1]


def test_a_table_and_a_picture(omnibal, tmp_path):
    plot = tmp_path / "new" / "timeline.png"
    path = write_plan(tmp_path, (0, 2, 4, 6), limits=(9, 4096))
    text = omnibal("plan", path, "--plot", plot).stdout
    assert "5 micro-batches; equal packs of 9 vision units and 4,096 LLM tokens" in " ".join(text.split())
    assert str(plot) in text.replace("\n", "")
    with Image.open(plot) as picture:
        assert picture.width > picture.height


def test_replicas_are_drawn_as_the_fastest_and_the_slowest(omnibal, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("omnibal.report.stages.plot_timeline", lambda panels, path: drawn.append(list(panels)))
    for replicas in (1, 3):
        omnibal("plan", write_plan(tmp_path, replicas=replicas), "--plot", "x.png")
    assert [[title.split(", ")[1] for title in titles] for titles in drawn] == [
        ["the slowest"],
        ["the fastest", "the slowest"],
    ]


@pytest.fixture
def by_tiles():
    """Layers whose seconds are the tiles and the tokens of a pack."""
    vision = replace(layer("vision", weight=0), forward_seconds=CostModel(vision_units=1), backward_seconds=CostModel())
    text = replace(layer("text", weight=0), forward_seconds=CostModel(llm_tokens=1), backward_seconds=CostModel())
    return profile([vision, text])


def test_real_packs_are_those_of_the_sampler(omnibal, by_tiles, token_lengths, tmp_path):
    lengths = SampleLengths.from_token_lengths(token_lengths)
    limits = paper_limits(lengths)
    epoch = arrange_epoch(lengths, limits, num_replicas=2, micro_batches=8)
    tokens, units = epoch.packs.llm_tokens(lengths)[epoch.steps], epoch.packs.vision_units(lengths)[epoch.steps]
    named = [part for path in token_lengths for part in ("--lengths", path)]
    path = write_plan(
        tmp_path, (0, 1, 2), by_tiles, replicas=2, limits=(limits.vision_units, limits.llm_tokens), micro_batches=8
    )
    record = json.loads(omnibal("plan", path, *named, "--json").stdout)
    step = record["step"]
    means = tuple(row["forward_seconds"] for row in record["stages"])
    assert means in {*zip(units[step].mean(axis=1), tokens[step].mean(axis=1), strict=True)}
    looked_at = spread_steps(epoch.num_steps, 32)
    sums = (tokens + units).sum(axis=2).max(axis=1)
    assert sums[step] == np.sort(sums[looked_at])[len(looked_at) // 2]


def test_what_cannot_be_shown_is_refused(refusal, tmp_path):
    path = write_plan(tmp_path)
    assert refusal("plan", path, "--plot", "picture.pdf") == (
        "--plot must be a PNG, whose name ends in .png, got picture.pdf"
    )
    assert refusal("plan", path, "--write").startswith("--write must be left out here, got True: ")
    (tmp_path / "profile.json").unlink()
    assert refusal("plan", path).startswith("--profile must name what")
