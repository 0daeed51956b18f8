import json
import shutil

import numpy as np
import pytest

from omnibal.data.epoch import arrange_epoch
from omnibal.data.isf import iterative_sampling_and_filtering
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, paper_limits
from omnibal.data.metrics import dist_ratio, min_packs

FIGURES = {
    "method", "samples", "packs", "empty_packs", "fewest_packs", "packs_over_fewest", "samples_per_pack", "steps",
    "pad_ratio", "pad_ratio_if_padded", "dist_ratio_vision", "dist_ratio_tokens", "dist_ratio_cost", "dist_ratio_sound",
    "randomness", "largest", "lost", "repeated", "over_limit", "seconds",
}  # fmt: skip


def record_of(result):
    return json.loads(result.stdout)


def test_json_holds_the_figures_of_the_arranged_epoch(omnibal, token_lengths):
    options = ["--limits", "16,4096", "--num-replicas", 4]
    record = record_of(omnibal("pack", *token_lengths, *options, "--method", "isf", "--micro-batches", 2, "--json"))
    lengths, limits = SampleLengths.from_token_lengths(token_lengths), PackLimits(16, 4096)
    epoch = arrange_epoch(lengths, limits, num_replicas=4, micro_batches=2, method="isf")
    assert set(record) == {
        "samples", "limits", "num_replicas", "micro_batches", "seed", "exchange_steps",
        "oversized", "methods", "warnings", "plots", "broken",
    }  # fmt: skip
    assert (record["samples"], record["num_replicas"], record["micro_batches"]) == (len(lengths), 4, 2)
    assert record["limits"]["vision_units"] == 16
    (figures,) = record["methods"]
    assert set(figures) == FIGURES
    assert figures["method"] == "isf"
    assert figures["packs"] == (epoch.packs.sizes > 0).sum()
    assert figures["fewest_packs"] == min_packs(lengths, limits)
    assert figures["steps"] == epoch.num_steps
    assert figures["dist_ratio_vision"] == dist_ratio(epoch.packs.vision_units(lengths)[epoch.steps])
    assert (figures["lost"], figures["repeated"], figures["over_limit"]) == (0, 0, 0)


@pytest.fixture
def packing(tmp_path):
    """Writes a ds_config that says nothing but how to pack."""

    def write(**keys):
        (tmp_path / "packing.json").write_text(json.dumps({"omnibal": {"packing": keys}}))
        return tmp_path / "packing.json"

    return write


def named(paths):
    return [argument for path in paths for argument in ("--lengths", path)]


def test_a_ds_config_says_how_to_pack(omnibal, packing, token_lengths):
    config = packing(vision_units=16, llm_tokens=4096, method="isf", seed=3)
    record = record_of(omnibal("pack", config, *named(token_lengths), "--json"))
    lengths, limits = SampleLengths.from_token_lengths(token_lengths), PackLimits(16, 4096)
    expected, of_another_seed = (
        len(iterative_sampling_and_filtering(lengths, limits, seed=np.random.default_rng([seed, 0]))) for seed in (3, 4)
    )
    assert (record["seed"], record["num_replicas"]) == (3, 8)
    assert PackLimits(**record["limits"]) == limits
    assert record["methods"][0]["packs"] == expected != of_another_seed
    other = record_of(omnibal("pack", config, *named(token_lengths), "--limits", "9,8192", "--json"))
    assert PackLimits(**other["limits"]) == PackLimits(9, 8192)


def test_a_whole_ds_config_needs_nothing_more(omnibal, ds_config, tmp_path):
    record = record_of(omnibal("pack", ds_config(), "--json"))
    assert (record["samples"], record["num_replicas"], record["micro_batches"]) == (60, 2, 2)
    assert (tmp_path / "run" / "lengths" / "lengths.json").is_file()


def test_limits_left_out_follow_the_papers_rule(omnibal, packing, token_lengths):
    ruled = paper_limits(SampleLengths.from_token_lengths(token_lengths))
    record = record_of(omnibal("pack", *token_lengths, "--method", "random", "--json"))
    assert (record["limits"]["vision_units"], record["limits"]["llm_tokens"]) == (ruled.vision_units, ruled.llm_tokens)
    config = packing(llm_tokens=9000, method="random")
    record = record_of(omnibal("pack", config, *named(token_lengths), "--json"))
    assert (record["limits"]["vision_units"], record["limits"]["llm_tokens"]) == (ruled.vision_units, 9000)


def test_compare_shows_all_methods_side_by_side(omnibal, token_lengths):
    options = ["--limits", "16,4096", "--compare"]
    methods = [entry["method"] for entry in record_of(omnibal("pack", *token_lengths, *options, "--json"))["methods"]]
    assert sorted(methods) == ["balanced", "isf", "random"]
    lines = [line.split() for line in omnibal("pack", *token_lengths, *options).stdout.splitlines()]
    assert methods in lines


@pytest.fixture
def trap(tmp_path):
    """Samples of which two fives never share a pack of 9."""
    path = tmp_path / "trap.json"
    path.write_text(json.dumps([{"vit_num": 5, "token_num": 100}, {"vit_num": 3, "token_num": 100}] * 50))
    return path


def test_a_trap_is_warned_of(omnibal, trap):
    options = [trap, "--method", "isf", "--limits", "9,9000"]
    (warning,) = record_of(omnibal("pack", *options, "--json"))["warnings"]
    assert warning.startswith("vision limit 9 is a trap")
    assert "warning: vision limit 9 is a trap" in omnibal("pack", *options).stdout
    assert record_of(omnibal("pack", *options[:-1], "8,9000", "--json"))["warnings"] == []


@pytest.mark.parametrize(("policy", "samples", "lost"), [("alone", 4, 0), ("drop", 3, 0)])
def test_oversized_samples_are_counted(omnibal, packing, tmp_path, policy, samples, lost):
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([{"vit_num": 1, "token_num": tokens} for tokens in (10, 20, 30, 99)]))
    config = packing(vision_units=4, llm_tokens=60, method="isf", oversized=policy)
    options = [config, "--lengths", path, "--num-replicas", 1]
    record = record_of(omnibal("pack", *options, "--json"))
    assert record["oversized"] == {"policy": policy, "samples": 1}
    (figures,) = record["methods"]
    assert (figures["samples"], figures["lost"], figures["over_limit"]) == (samples, lost, 0)
    assert "1 samples exceed a limit on their own" in omnibal("pack", *options).stdout


def test_refused_oversized_samples_are_an_error_without_a_traceback(refusal, packing, token_lengths):
    config = packing(vision_units=1, method="isf", oversized="error")
    assert refusal("pack", config, *named(token_lengths)).startswith("samples must keep the limits of 1 vision units")


def test_a_picture_shows_before_and_after(omnibal, token_lengths, tmp_path):
    options = ["--limits", "16,4096", "--method", "isf", "--plot", tmp_path / "new" / "packs.png", "--json"]
    written = record_of(omnibal("pack", *token_lengths, *options))["plots"]
    assert written == [str(tmp_path / "new" / "packs.png")]
    assert (tmp_path / "new" / "packs.png").read_bytes().startswith(b"\x89PNG")


def test_saved_lengths_pack_like_the_files_they_came_from(omnibal, token_lengths, tmp_path):
    SampleLengths.from_token_lengths(token_lengths).save(tmp_path / "saved")
    from_files, from_folder = (
        record_of(omnibal("pack", *paths, "--method", "isf", "--json"))["methods"][0]
        for paths in (token_lengths, [tmp_path / "saved"])
    )
    assert from_files | {"seconds": 0} == from_folder | {"seconds": 0}


def test_what_cannot_be_read_is_refused(refusal, packing, token_lengths, tmp_path):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "none.json").write_text("[]")
    (tmp_path / "lines.jsonl").write_text('{"vit_num": 1, "token_num": 2}\n' * 2)
    (tmp_path / "latin.json").write_bytes('["é"]'.encode("latin-1"))
    SampleLengths([1], [2]).save(tmp_path / "saved")
    empty, lines = tmp_path / "empty", tmp_path / "lines"
    for folder in (empty, lines):
        folder.mkdir()
    (lines / "a.jsonl").write_text('{"conversations": []}\n')
    (tmp_path / "meta.json").write_text('{"shapes": {}}')
    (tmp_path / "llava.json").write_text('[{"conversations": []}]')
    config = packing()
    for paths, message in (
        ([tmp_path / "missing.json"], "source must be a readable file or folder"),
        ([tmp_path / "text"], "source must be a folder, JSON or JSON lines, got 'hello'"),
        ([empty], f'a folder of lengths or a JSON list of {{"vit_num", "token_num"}}, got {empty}, a folder'),
        ([tmp_path / "lines"], "lines, which is a dataset"),
        ([tmp_path / "none.json"], "lengths must hold at least one sample, got none in"),
        ([tmp_path / "lines.jsonl"], "lines.jsonl, which has the keys vit_num, token_num; `omnibal lengths`"),
        ([tmp_path / "latin.json"], "source must be text in UTF-8, got"),
        ([tmp_path / "meta.json"], "which is a dataset (an InternVL meta file, or conversations in JSON lines, "),
        ([tmp_path / "llava.json"], "which is a dataset (an InternVL meta file, or conversations in JSON lines, "),
        ([*token_lengths, tmp_path / "meta.json"], "meta.json, which is a dataset"),
        ([*token_lengths, tmp_path / "saved"], "where there are several, got the folder"),
        ([*token_lengths, token_lengths[0]], "source must be different files, got"),
        ([config, token_lengths[0]], "source must be one ds_config, got"),
        ([config], "lengths must be known here, got none; set omnibal.data.train in"),
        ([token_lengths[0], "--lengths", token_lengths[1]], "--lengths must come with a ds_config, got"),
        ([token_lengths[0], "--cluster", "8xa100"], "--cluster must come with a ds_config, got"),
        ([*token_lengths, "--num-replicas", 10**18], "num_replicas x micro_batches must be at most 16777216, got"),
        ([*token_lengths, "--micro-batches", 10**30], "num_replicas x micro_batches must be at most 16777216, got"),
        ([*token_lengths, "--limits", "0,1"], "limits must hold at least one sample, got 0 vision"),
        ([*token_lengths, "--limits", f"9,{10**9}"], "llm_tokens must be between 1 and"),
        ([*token_lengths, "--limits", "16"], "--limits must be vision units and LLM tokens such as 16,4096, got '16'"),
        ([*token_lengths, "--limits", "16,-3"], "--limits must be vision units and LLM tokens such as 16,4096, got"),
        ([*token_lengths, "--plot", tmp_path / "text"], "--plot must be a PNG, whose name ends in .png, got"),
    ):
        line = refusal("pack", *paths)
        assert message in line and "\n" not in line, paths


def test_a_dataset_packs_without_what_cannot_be_read(omnibal, refusal, demo, ds_config, tmp_path):
    data = shutil.copytree(demo.meta.parent, tmp_path / "data")
    stories = data / demo.train_annotations[-1].relative_to(demo.meta.parent)
    stories.write_text(stories.read_text().replace("{", "{{", 1))
    broken = {"train": str(data / demo.meta.name)}
    assert "line 1: entry must be" in omnibal("pack", ds_config(data=broken), exit_code=2).stderr
    config = ds_config(data=broken | {"broken": "skip"})
    record = record_of(omnibal("pack", config, "--json"))
    assert [problem["line"] for problem in record["broken"]] == [1]
    output = omnibal("pack", config).stdout
    assert "1 items cannot be used and are left out" in output and f"{record['samples']} samples" in output
