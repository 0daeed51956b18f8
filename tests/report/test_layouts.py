from dataclasses import replace

import pytest
from rich.console import Console

from omnibal.advise.estimate import Recipe, Scenario
from omnibal.advise.layouts import LayoutAnswer, WeighedLayout
from omnibal.advise.memory import TrainingPrecision
from omnibal.advise.models import Model
from omnibal.cluster import Cluster, Encoder, Layout
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from omnibal.profile.counted import analytic_profile
from omnibal.report.layouts import LayoutReport, causes_of

GIB = 2**30
MACHINES = Cluster.parse("2x4xA100-80GB")
SCENARIO = Scenario(
    SampleLengths([1], [300]), analytic_profile(Model.known("InternVL3-1B").records, MACHINES.device), MACHINES, 8
)


def candidate(kind, rate, unhidden=None, **shares):
    recipe = Recipe("zero3", "even") if unhidden else None
    return WeighedLayout(
        kind=kind, layout=f"the {kind} layout", samples_per_second=rate, peak_bytes=60 * GIB, micro_batches=4,
        shares=shares, unhidden_samples_per_second=unhidden, recipe=recipe,
    )  # fmt: skip


SHARED = Plan(
    PackLimits(9, 4096), 4, Partition((0, 1, 2)), ("none",) * 2,
    layout=Layout(2, 2, num_tensor=2, encoder=Encoder(1, 2, 2)),
)  # fmt: skip
UNITS = candidate("units", 20.0, useful=0.8, **{"tensor ranks": 0.1, "bubbles, transfers, sums of gradients": 0.1})
UNITS = replace(UNITS, plan=SHARED)
PIPELINE = candidate("pipeline", 16.0, useful=0.64, **{"bubbles, transfers, sums of gradients": 0.36})
ZERO = candidate("zero", 15.0, 12.0, useful=0.6, waits=0.1, recomputation=0.2, communication=0.1)
ANSWER = LayoutAnswer((UNITS, PIPELINE, ZERO), {"spread": 3 * GIB, "tensor": 0}, ("the heads 6, got 4",))
REPORT = LayoutReport(ANSWER, SCENARIO, 10.0)


def test_lines_say_winner_runner_up_and_why():
    assert REPORT.lines()[3:] == [
        "winner: ViT and LLM on devices of their own (DistTrain), 20.0 samples/s; omnibal cannot train it",
        "runner-up, and best that omnibal trains: one pipeline through ViT and LLM (OmniBal), 16.0 samples/s "
        "(0.80 ×); omnibal trains it",
        "gain of pipeline: 1.60x the 10.0 samples/s of today",
        "cannot be: the ViT on all devices, the LLM in a pipeline: the fullest device lacks 3.00 GiB at least",
        "cannot be: one pipeline with tensor ranks in its stages: these devices, costs and samples of a step have no "
        "such layout",
        "not weighed: the heads 6, got 4",
        "not weighed: 8 tensor ranks would cross nodes of 4",
    ]


def test_the_simplest_of_equals_wins_and_the_lines_say_so():
    close = LayoutAnswer((candidate("units", 10.2, useful=1.0), candidate("zero", 10.0, 9.0, useful=1.0)), {})
    lines = LayoutReport(close, SCENARIO).lines()
    assert "winner: ZeRO with balanced packs, 10.0 samples/s; omnibal trains it" in lines
    assert "equal within 3%: take the simplest, which is the winner; units 10.2" in lines
    assert not any(line.startswith(("best of those", "cannot", "today's")) for line in lines)


def test_a_winner_by_hidden_communication_is_said_to_be_one():
    hidden = LayoutAnswer((candidate("zero", 20.0, 12.0, useful=1.0), UNITS, PIPELINE), {})
    assert "without overlap: units 20.0, the winner 12.0" in LayoutReport(hidden, SCENARIO).lines()
    assert LayoutReport(hidden, SCENARIO).to_record()["winner_unhidden"] == "units"
    assert REPORT.to_record()["winner_unhidden"] == "units"


def test_where_nothing_runs_today_it_is_said():
    lines = LayoutReport(LayoutAnswer((UNITS,), {"zero": GIB}), SCENARIO).lines()
    assert "omnibal trains none of these" in lines
    assert not any(line.startswith("runner-up") for line in lines)


def test_where_nothing_fits_every_kind_says_what_it_lacks():
    report = LayoutReport(LayoutAnswer((), {"zero": 2 * GIB, "tensor": 0}), SCENARIO)
    assert [str(part) for part in report.parts()] == report.lines() == [
        "winner: none, no layout fits these devices",
        "cannot be: ZeRO with balanced packs: the fullest device lacks 2.00 GiB at least",
        "cannot be: one pipeline with tensor ranks in its stages: these devices, costs and samples of a step have no "
        "such layout",
        "not weighed: 8 tensor ranks would cross nodes of 4",
    ]  # fmt: skip
    record = report.to_record()
    assert {record[name] for name in ("winner", "winner_unhidden", "runner_up", "winner_today")} == {None}


def test_what_the_precision_of_today_counts_for_is_said():
    other = replace(SCENARIO, precision=TrainingPrecision(pure=True))
    assert any("count for ZeRO alone" in line for line in replace(REPORT, scenario=other).not_weighed)
    alone = LayoutReport(LayoutAnswer((ZERO,), {}), SCENARIO)
    assert alone.not_weighed == []


def test_causes_are_alike_for_all_kinds():
    for each in ANSWER.candidates:
        assert sum(causes_of(each).values()) == pytest.approx(1)
    assert causes_of(UNITS)["communication"] == 0.1 and causes_of(PIPELINE)["waits"] == 0.36


def test_the_table_fits_a_narrow_terminal():
    console = Console(width=80, record=True)
    for part in REPORT.parts()[:1]:
        console.print(part)
    rows = [line.split() for line in console.export_text().splitlines()]
    assert ["units", "20.0", "–", "2.00", "60.0", "no", "80%", "10%", "0%", "10%"] in rows
    assert ["ZeRO", "15.0", "12.0", "1.50", "60.0", "yes", "60%", "10%", "20%", "10%"] in rows


def test_a_record():
    record = REPORT.to_record()
    assert (record["winner"], record["runner_up"], record["winner_today"]) == ("units", "pipeline", "pipeline")
    assert record["missing_bytes"] == {"spread": 3 * GIB, "tensor": 0}
    zero = record["candidates"][2]
    assert (zero["times_today"], zero["unhidden_samples_per_second"], zero["runs_today"]) == (1.5, 12.0, True)
