"""How samples pack, as `omnibal lengths` says it."""

import json
import shutil

import numpy as np
import pytest

from omnibal.data.epoch import arrange_epoch
from omnibal.data.isf import iterative_sampling_and_filtering
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, paper_limits
from omnibal.data.metrics import dist_ratio, min_packs
from omnibal.plan import Plan
from omnibal.workspace import FoundLengths, Workspace

FIGURES = {
    "method", "samples", "packs", "empty_packs", "fewest_packs", "packs_over_fewest", "samples_per_pack", "steps",
    "pad_ratio", "pad_ratio_if_padded", "dist_ratio_vision", "dist_ratio_tokens", "dist_ratio_cost", "dist_ratio_least",
    "dist_ratio_sound", "randomness", "largest", "lost", "repeated", "over_limit", "seconds",
}  # fmt: skip


def packs_of(result):
    return json.loads(result.stdout)["packs"]


@pytest.fixture
def saved(token_lengths, tmp_path):
    """A folder of the lengths."""
    SampleLengths.from_token_lengths(token_lengths).save(tmp_path / "saved")
    return tmp_path / "saved"


def test_json_holds_the_figures_of_the_arranged_epoch(omnibal, saved):
    options = ["--limits", "16,4096", "--num-replicas", 4, "--micro-batches", 2]
    record = packs_of(omnibal("lengths", saved, *options, "--json"))
    lengths, limits = SampleLengths.load(saved), PackLimits(16, 4096)
    epoch = arrange_epoch(lengths, limits, num_replicas=4, micro_batches=2)
    assert set(record) == {
        "samples", "limits", "num_replicas", "micro_batches", "seed", "exchange_steps",
        "oversized", "methods", "warnings",
    }  # fmt: skip
    assert (record["samples"], record["num_replicas"], record["micro_batches"]) == (len(lengths), 4, 2)
    assert record["limits"]["vision_units"] == 16
    (figures,) = record["methods"]
    assert set(figures) == FIGURES
    assert figures["method"] == "balanced"
    assert figures["packs"] == (epoch.packs.sizes > 0).sum()
    assert figures["fewest_packs"] == min_packs(lengths, limits)
    assert figures["steps"] == epoch.num_steps
    assert figures["dist_ratio_vision"] == dist_ratio(epoch.packs.vision_units(lengths)[epoch.steps])
    assert (figures["lost"], figures["repeated"], figures["over_limit"]) == (0, 0, 0)


@pytest.fixture
def packing(tmp_path, monkeypatch):
    """Writes a ds_config about some lengths that says how to pack."""

    def write(loads=((1, 10), (1, 20), (1, 30), (1, 99)), **keys):
        lengths = SampleLengths(*zip(*loads, strict=True))
        found = FoundLengths(lengths, "here")
        monkeypatch.setattr(Workspace, "measured_lengths", lambda *_: found)
        content = {"omnibal": {"packing": keys, "data": {"train": "here"}, "run": {"output": str(tmp_path / "run")}}}
        (tmp_path / "packing.json").write_text(json.dumps(content))
        return tmp_path / "packing.json"

    return write


def test_a_ds_config_says_how_to_pack(omnibal, packing, saved):
    lengths, limits = SampleLengths.load(saved), PackLimits(16, 4096)
    loads = zip(lengths.vision_units.tolist(), lengths.llm_tokens.tolist(), strict=True)
    config = packing(list(loads), vision_units=16, llm_tokens=4096, method="isf", seed=3)
    record = packs_of(omnibal("lengths", config, "--json"))
    expected, of_another_seed = (
        len(iterative_sampling_and_filtering(lengths, limits, seed=np.random.default_rng([seed, 0]))) for seed in (3, 4)
    )
    assert (record["seed"], record["num_replicas"]) == (3, 8)
    assert PackLimits(**record["limits"]) == limits
    assert record["methods"][0]["packs"] == expected != of_another_seed
    other = packs_of(omnibal("lengths", config, "--limits", "9,8192", "--json"))
    assert PackLimits(**other["limits"]) == PackLimits(9, 8192)


@pytest.mark.usefixtures("few_steps")
def test_a_whole_ds_config_needs_nothing_more(omnibal, ds_config, tmp_path):
    record = packs_of(omnibal("lengths", ds_config(), "--json"))
    assert (record["samples"], record["num_replicas"], record["micro_batches"]) == (60, 2, 2)
    assert (tmp_path / "run" / "lengths" / "lengths.json").is_file()
    omnibal("plan", ds_config(), "--limits", "14,300", "--write")
    record = packs_of(omnibal("lengths", ds_config(), "--json"))
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert PackLimits(**record["limits"]) == plan.limits and record["micro_batches"] == plan.micro_batches


def test_limits_left_out_follow_the_papers_rule(omnibal, saved):
    ruled = paper_limits(SampleLengths.load(saved))
    record = packs_of(omnibal("lengths", saved, "--json"))
    assert (record["limits"]["vision_units"], record["limits"]["llm_tokens"]) == (ruled.vision_units, ruled.llm_tokens)


def test_compare_shows_all_methods_side_by_side(omnibal, saved):
    options = ["--limits", "16,4096", "--compare"]
    methods = [entry["method"] for entry in packs_of(omnibal("lengths", saved, *options, "--json"))["methods"]]
    assert sorted(methods) == ["balanced", "isf", "random"]
    lines = [line.split() for line in omnibal("lengths", saved, *options).stdout.splitlines()]
    assert methods in lines


@pytest.fixture
def trap(tmp_path):
    """Samples of which two fives never share a pack of 9."""
    path = tmp_path / "trap.json"
    path.write_text(json.dumps([{"vit_num": 5, "token_num": 100}, {"vit_num": 3, "token_num": 100}] * 50))
    return path


def test_a_trap_is_warned_of(omnibal, trap):
    options = [trap, "--limits", "9,9000"]
    (warning,) = packs_of(omnibal("lengths", *options, "--json"))["warnings"]
    assert warning.startswith("vision limit 9 is a trap")
    assert "warning: vision limit 9 is a trap" in omnibal("lengths", *options).stdout
    assert packs_of(omnibal("lengths", *options[:-1], "8,9000", "--json"))["warnings"] == []


@pytest.mark.parametrize(("policy", "samples", "lost"), [("alone", 4, 0), ("drop", 3, 0)])
def test_oversized_samples_are_counted(omnibal, packing, policy, samples, lost):
    options = [packing(vision_units=4, llm_tokens=60, method="isf", oversized=policy), "--num-replicas", 1]
    record = packs_of(omnibal("lengths", *options, "--json"))
    assert record["oversized"] == {"policy": policy, "samples": 1}
    (figures,) = record["methods"]
    assert (figures["samples"], figures["lost"], figures["over_limit"]) == (samples, lost, 0)
    assert "1 samples exceed a limit on their own" in omnibal("lengths", *options).stdout


def test_refused_oversized_samples_are_an_error_without_a_traceback(refusal, packing, tmp_path):
    config = packing(llm_tokens=60, method="isf", oversized="error")
    assert refusal("lengths", config).startswith("samples must keep the limits of 2 vision units")
    assert len(SampleLengths.load(tmp_path / "run" / "lengths")) == 4


def test_what_cannot_be_read_is_refused(refusal, saved, tmp_path):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "none.json").write_text("[]")
    (tmp_path / "lines.jsonl").write_text('{"vit_num": 1, "token_num": 2}\n' * 2)
    (tmp_path / "latin.json").write_bytes('["é"]'.encode("latin-1"))
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ([tmp_path / "missing.json"], "source must be a readable file or folder"),
        ([tmp_path / "text"], "source must be a folder, JSON or JSON lines, got 'hello'"),
        ([tmp_path / "empty"], f"got {tmp_path / 'empty'}, a folder of something else"),
        ([tmp_path / "none.json"], "lengths must hold at least one sample, got none in"),
        ([tmp_path / "lines.jsonl"], "lines.jsonl, which has the keys vit_num, token_num"),
        ([tmp_path / "latin.json"], "source must be text in UTF-8, got"),
        ([saved, "--num-replicas", 10**18], "num_replicas x micro_batches must be at most 16777216, got"),
        ([saved, "--micro-batches", 10**30], "num_replicas x micro_batches must be at most 16777216, got"),
        ([saved, "--limits", "0,1"], "limits must hold at least one sample, got 0 vision"),
        ([saved, "--limits", f"9,{10**9}"], "llm_tokens must be between 1 and"),
        ([saved, "--limits", "16"], "--limits must be vision units and LLM tokens such as 16,4096, got '16'"),
        ([saved, "--limits", "16,-3"], "--limits must be vision units and LLM tokens such as 16,4096, got"),
    ):
        line = refusal("lengths", *arguments)
        assert message in line and "\n" not in line, arguments


def test_a_dataset_packs_without_what_cannot_be_read(omnibal, demo, ds_config, tmp_path):
    data = shutil.copytree(demo.meta.parent, tmp_path / "data")
    stories = data / demo.train_annotations[-1].relative_to(demo.meta.parent)
    stories.write_text(stories.read_text().replace("{", "{{", 1))
    broken = {"train": str(data / demo.meta.name)}
    assert "line 1: entry must be" in omnibal("lengths", ds_config(data=broken), exit_code=2).stderr
    config = ds_config(data=broken | {"broken": "skip"})
    record = json.loads(omnibal("lengths", config, "--json").stdout)
    assert [problem["line"] for problem in record["broken"]] == [1]
    output = omnibal("lengths", config).stdout
    assert "1 items cannot be used and are left out" in output and f"{record['packs']['samples']} samples" in output
