from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from omnibal.advise import estimate, layouts
from omnibal.advise.estimate import Scenario
from omnibal.advise.layout_ranking import LayoutRanking
from omnibal.advise.layouts import EQUAL, KINDS, LayoutAnswer, WeighedLayout, Weighing, weigh_layouts
from omnibal.advise.models import Model
from omnibal.cluster import Cluster
from omnibal.data.lengths import SampleLengths
from omnibal.errors import ConfigError
from omnibal.profile.counted import analytic_profile
from tools.layouts.brute_force import Setting, compare
from tools.synthetic import tiled_lengths

MIX = tiled_lengths(4000, seed=1)
LIMITS = {"MOST_TRIED": layouts.MOST_TRIED, "MOST_TIMES": layouts.MOST_TIMES}
FEW = {"MOST_TRIED": 3, "MOST_TIMES": 1}


@pytest.fixture(scope="module", autouse=True)
def few_are_tried():
    """What an answer is made of hardly depends on how many layouts are tried for it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, most in FEW.items():
            patch.setattr(layouts, name, most)
        patch.setattr(estimate, "LEAST_SAMPLES", 64)
        patch.setattr(estimate, "GROUPED", 1)
        yield


@pytest.fixture
def as_many_as_ever(monkeypatch):
    for name, most in LIMITS.items():
        monkeypatch.setattr(layouts, name, most)


def scenario(model="InternVL3-2B", cluster="4xA100-80GB", per_step=32, **more):
    machines = Cluster.parse(cluster)
    return Scenario(MIX, analytic_profile(Model.known(model).records, machines.device), machines, per_step, **more)


def counted(model, machines):
    def profiles(encoder, language):
        records, degrees = Model.known(model).records, {"vision": encoder, "language": language}
        return analytic_profile(records, machines.cluster.device, tensor_parallel=degrees)

    return profiles


def refuse(encoder, language):
    raise ConfigError("measured on one device")


@pytest.fixture(scope="module")
def small():
    asked = scenario()
    return asked, weigh_layouts(asked, counted("InternVL3-2B", asked))


def test_every_kind_is_weighed_on_the_same_samples(small):
    asked, found = small
    assert {each.kind for each in found.candidates} | set(found.missing_bytes) == set(KINDS)
    budget = asked.cluster.device.memory_bytes
    for each in found.candidates:
        assert sum(each.shares.values()) == pytest.approx(1) and 0 < each.peak_bytes <= budget
        assert 0 < each.shares["useful"] <= 1 and each.shares["recomputation"] >= 0
    rates = [each.samples_per_second for each in found.candidates]
    assert rates == sorted(rates, reverse=True)
    by_kind = {each.kind: each for each in found.candidates}
    # What is useful takes the same seconds in every layout, so samples a second follow from its share.
    useful = {kind: each.shares["useful"] / each.samples_per_second for kind, each in by_kind.items()}
    assert useful["pipeline"] == pytest.approx(useful["zero"], rel=0.05)
    assert by_kind["rearranged"].samples_per_second >= 0.98 * by_kind["zero"].samples_per_second


def test_hidden_talk_is_an_assumption_that_is_shown(small):
    _, found = small
    zero = next(each for each in found.candidates if each.kind == "zero")
    assert zero.unhidden_samples_per_second < zero.samples_per_second
    assert all((each.unhidden_samples_per_second is None) == (each.recipe is None) for each in found.candidates)


def test_what_runs_today_is_told_from_what_can_only_be_weighed(small):
    _, found = small
    runs = {each.kind for each in found.candidates if each.runs_today}
    assert runs <= {"zero", "rearranged", "pipeline", "tensor", "spread", "units"}
    for each in found.candidates:
        if each.kind in ("spread", "units"):
            assert each.runs_today == (not each.plan.layout.has_tensor_ranks)
    assert found.winner_today.runs_today


def candidate(kind, rate):
    return WeighedLayout(
        kind=kind, layout=kind, samples_per_second=rate, peak_bytes=1, micro_batches=1, shares={"useful": 1.0}
    )


def test_of_equally_fast_layouts_the_simplest_wins():
    close = LayoutAnswer((candidate("units", 10 * (1 + EQUAL)), candidate("spread", 10.1), candidate("zero", 10)), {})
    assert close.winner.kind == "zero"
    far = LayoutAnswer((candidate("units", 11), candidate("pipeline", 10.9), candidate("zero", 10)), {})
    assert far.winner.kind == "pipeline"
    for kind in ("spread", "units"):
        of_degree = {has: SimpleNamespace(layout=SimpleNamespace(has_tensor_ranks=has)) for has in (True, False)}
        shared, whole = (replace(candidate(kind, 11), plan=of_degree[has]) for has in (True, False))
        assert LayoutAnswer((shared,), {"zero": 5}).winner_today is None
        assert LayoutAnswer((shared, whole), {}).winner_today == whole


def test_costs_of_one_device_leave_tensor_ranks_out():
    found = weigh_layouts(scenario(), refuse, kinds=("zero", "tensor"))
    assert [each.kind for each in found.candidates] == ["zero"] and found.missing_bytes == {"tensor": 0}
    assert found.refused == ("measured on one device",)


def test_degrees_that_do_not_divide_a_width_are_named():
    asked = scenario("Qwen2.5-VL-7B", "8xA100-80GB", 16)
    found = weigh_layouts(asked, counted("Qwen2.5-VL-7B", asked), kinds=("tensor",))
    assert found.candidates[0].plan.layout.num_tensor in (2, 4)
    assert any("must divide the intermediate 3420 of vision_block.0, got 8" in reason for reason in found.refused)


def test_tensor_ranks_stay_within_nodes():
    asked = scenario("InternVL3-2B", "2x3xA100-80GB", 48)
    ranking = LayoutRanking(asked, counted("InternVL3-2B", asked))
    assert ranking.rank("tensor", []) == []  # ranks 2 and 3 are of two nodes
    assert {each.layout.num_tensor for each in ranking.rank("units", [])} == {1}
    asked = scenario("InternVL3-2B", "2x4xA100-80GB", 64)
    units = [each.layout for each in LayoutRanking(asked, counted("InternVL3-2B", asked)).rank("units", [])]
    assert {layout.num_tensor for layout in units} == {1, 2, 4}
    for layout in units:
        for stage in range(layout.num_stages):
            ranks = np.array(layout.ranks(stage)).reshape(-1, layout.shape(stage)[1])
            assert (ranks // 4 == ranks[:, :1] // 4).all(), str(layout)
    # All devices of one node reach each other alike.
    one = scenario("InternVL3-2B", "7xA100-80GB", 56)
    units = [each.layout for each in LayoutRanking(one, counted("InternVL3-2B", one)).rank("units", [])]
    assert any(layout.parts[0].num_devices % layout.num_tensor for layout in units)


def test_what_fits_nowhere_says_what_is_missing():
    asked = scenario("InternVL3-78B", "2xA100-40GB", 16)
    found = weigh_layouts(asked, refuse, kinds=("zero", "pipeline", "tensor"))
    assert (found.candidates, found.winner, found.winner_today) == ((), None, None)
    assert found.missing_bytes["zero"] > 2**30 < found.missing_bytes["pipeline"] and found.missing_bytes["tensor"] == 0


def test_pipelines_have_the_stages_that_are_asked_for():
    asked = scenario(cluster="8xA100-80GB")
    kinds = ("pipeline", "tensor", "spread", "units")
    found = weigh_layouts(asked, counted("InternVL3-2B", asked), kinds=kinds, num_stages=4)
    assert {each.kind: each.plan.layout.num_stages for each in found.candidates} == dict.fromkeys(kinds, 4)
    assert found.refused[-1] == "pipelines of other than the 4 stages that omnibal.pipeline.num_stages says"


def test_more_memory_never_makes_a_layout_slower():
    rates = []
    for memory in (40e9, 80e9):
        asked = scenario("InternVL3-8B", "8xA100-80GB", 32)
        asked = replace(asked, cluster=replace(asked.cluster, memory_bytes=memory))
        rates.append(weigh_layouts(asked, refuse, kinds=("pipeline",)).candidates[0].samples_per_second)
    assert rates[0] <= rates[1] * 1.001


def test_a_head_larger_than_other_layers_does_not_make_units_of_several_stages_look_slow():
    # The head of InternVL3-2B takes as long as several layers: stages of one GPU, cut around it, beat tensor ranks.
    asked = scenario("InternVL3-2B", "8xA100-40GB", 64)
    ranking = LayoutRanking(asked, counted("InternVL3-2B", asked))
    ranked = ranking.rank("units", [])
    packings = Weighing(asked, ranking, print)
    for stages in (4, 5):
        found = next(each for each in ranked if each.layout.encoder.num_stages + stages == each.layout.num_stages)
        placed = packings.placed(found, [])
        assert found.seconds <= 1.05 * min(step.step_seconds for step in placed), str(found.layout)


@pytest.mark.usefixtures("as_many_as_ever")
def test_few_micro_batches_do_not_hide_a_pipeline_whose_bubble_is_filled():
    # Two micro-batches of two stages are fastest; with 1F1B's bubble the formula ranks them behind others' steps.
    asked = scenario("InternVL3-2B", "2x4xA100-80GB", 16)
    ranking = LayoutRanking(asked, refuse)
    weighing = Weighing(asked, ranking, print)
    placed = [step for ranked in ranking.rank("pipeline", []) for step in weighing.placed(ranked, [])]
    fastest, _ = weighing.tried("pipeline", [])[0]
    assert fastest.step_seconds == min(step.step_seconds for step in placed)


def test_the_ranking_misses_little_of_what_all_layouts_would_do(monkeypatch):
    monkeypatch.setattr(layouts, "MOST_TRIED", 10)
    machines = replace(Cluster.parse("2x2xA100-40GB"), node_bytes_per_second=12e9)
    lost = compare(Setting("InternVL3-1B", machines, 2, "frozen ViT", seed=0))
    assert set(lost) == set(KINDS) - {"zero", "rearranged"} and max(lost.values()) <= 0.02, lost


def test_text_alone_leaves_nothing_to_units():
    asked = scenario()
    asked = replace(asked, lengths=SampleLengths(np.zeros(500, dtype=int), np.arange(500, 1000)))
    found = weigh_layouts(asked, counted("InternVL3-2B", asked), kinds=("zero", "spread", "units"))
    assert [each.kind for each in found.candidates if each.kind == "units"] == []
    assert found.missing_bytes == {"units": 0}


def test_one_stage_on_one_device_is_no_pipeline():
    asked = scenario("InternVL3-1B", "2xA100-80GB", 16)
    found = weigh_layouts(asked, refuse, kinds=("pipeline", "spread"))
    assert {each.plan.layout.num_stages for each in found.candidates} == {2}
