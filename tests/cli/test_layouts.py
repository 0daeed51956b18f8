"""All layouts weighed for what is trained by part, by adapters, on text alone, or on measured costs, as a user asks."""

import json

import numpy as np
import pytest

from omnibal.advise.layouts import KINDS
from omnibal.cli.planning import WEIGHED
from omnibal.data.lengths import SampleLengths
from omnibal.profile.records import ModelProfile
from tests.cli.conftest import cluster_of
from tools.synthetic import tiled_lengths

pytestmark = pytest.mark.usefixtures("few_steps")
CLUSTER = "2xA100-80GB"
MEASURED = "tensor ranks must have costs that are counted of the model, got costs of one device"


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    """Folders of lengths: of images with text, and of text alone."""
    folder = tmp_path_factory.mktemp("lengths")
    tiled_lengths(300, seed=1).save(folder / "mix")
    SampleLengths(np.zeros(300, dtype=int), np.arange(50, 350)).save(folder / "text")
    return folder


def useful_seconds(layouts, kind):
    found = next(each for each in layouts["candidates"] if each["kind"] == kind)
    return found["shares"]["useful"] / found["samples_per_second"]


def check_complete(layouts):
    kinds = [each["kind"] for each in layouts["candidates"]]
    assert sorted([*kinds, *layouts["missing_bytes"]]) == sorted(KINDS)
    assert all(sum(each["shares"].values()) == pytest.approx(1) for each in layouts["candidates"])


@pytest.fixture(scope="module")
def advised(lengths, demo):
    """Asks `omnibal advise --layouts` about the demo's model."""

    def ask(omnibal, *options, data="mix", cluster=CLUSTER):
        given = ("--model", demo.model, "--cluster", cluster, "--batch", 1, "--accumulation", 8)
        answered = json.loads(omnibal("advise", lengths / data, *given, *options, "--layouts", "--json").stdout)
        check_complete(answered["layouts"])
        return answered["layouts"]

    return ask


@pytest.fixture
def planned(ds_config, lengths):
    """Asks `omnibal plan --layout auto` about a ds_config of the demo."""

    def ask(omnibal, *options, data="mix", cluster=CLUSTER, **sections):
        sections |= {"pipeline": {"num_stages": "auto"}, "packing": {"samples_per_step": 16}}
        config = ds_config(cluster=cluster, **sections)
        given = ("--layout", "auto", "--lengths", lengths / data, *options)
        answered = json.loads(omnibal("plan", config, *given, "--json").stdout)
        check_complete(answered["layouts"])
        return answered["layouts"]

    return ask


def test_adapters_and_a_frozen_llm_leave_less_to_do(omnibal, advised, planned):
    for whole, adapted, frozen in (
        (advised(omnibal), advised(omnibal, "--lora"), advised(omnibal, "--frozen", "language")),
        (
            planned(omnibal),
            planned(omnibal, model={"lora": {"rank": 2}}),
            planned(omnibal, model={"frozen": ["language"]}),
        ),
    ):
        for kind in ("zero", "pipeline", "spread", "units"):
            seconds = [useful_seconds(layouts, kind) for layouts in (whole, frozen, adapted)]
            assert seconds[1] < seconds[0] and seconds[2] < seconds[0], kind


def test_text_alone_leaves_units_no_encoder(omnibal, advised, planned):
    for layouts in (advised(omnibal, data="text"), planned(omnibal, data="text")):
        assert layouts["missing_bytes"] == {"units": 0}
        # The encoder does nothing on any device.
        assert useful_seconds(layouts, "spread") == pytest.approx(useful_seconds(layouts, "pipeline"), rel=0.01)


def test_measured_costs_weigh_all_but_tensor_ranks(omnibal, advised, planned, ds_config, tmp_path):
    file = tmp_path / "measured.json"
    omnibal("profile", ds_config(), file, "--measure", "--limits", "4,300")
    profile = ModelProfile.load(file)
    record = json.loads(cluster_of(2))
    cluster = record | {"device": record["device"] | {"name": profile.device}}
    layouts = advised(omnibal, "--profile", file, cluster=json.dumps(cluster))
    assert layouts["missing_bytes"] == {"tensor": 0} and layouts["not_weighed"][0] == MEASURED
    profile.save(tmp_path / "run" / "profile.json")
    layouts = planned(omnibal, cluster=cluster)
    assert layouts["missing_bytes"] == {"tensor": 0} and layouts["not_weighed"][0] == MEASURED


def test_a_sample_that_fits_nowhere_gets_a_line_for_every_kind(omnibal, no_recompute, tmp_path):
    SampleLengths([4] * 300, [1500] * 299 + [50_000], target_tokens=[300] * 300).save(tmp_path / "long")
    given = ("--model", "InternVL3-8B", "--cluster", "2xA100-80GB", "--batch", 1, "--accumulation", 4, "--layouts")
    out = omnibal("advise", tmp_path / "long", *given, *no_recompute).stdout
    lines = out.splitlines()
    assert "winner: none, no layout fits these devices" in lines
    assert sum(line.startswith("cannot be: ") for line in lines) == len(KINDS)


def test_a_plan_of_nothing_that_fits_is_refused_kind_by_kind(refusal, ds_config, lengths, monkeypatch):
    small = json.dumps(dict(num_nodes=1, devices_per_node=2, device="A100-80GB", memory_bytes=1e6, overhead_bytes=0))
    monkeypatch.setitem(WEIGHED, "auto", ("zero", "rearranged"))
    given = ("--layout", "auto", "--lengths", lengths / "mix", "--cluster", small)
    line = refusal("plan", ds_config(packing={"samples_per_step": 16}), *given)
    assert line.startswith("a layout must fit 2xA100-80GB, got none; cannot be: ZeRO with balanced packs: the")
    assert line.count("cannot be") == 2
