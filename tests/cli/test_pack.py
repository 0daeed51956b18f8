import json

import numpy as np
import pytest

from omnibal.cost import CostModel
from omnibal.data.epoch import arrange_epoch
from omnibal.data.isf import iterative_sampling_and_filtering
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, paper_limits
from omnibal.data.metrics import dist_ratio, min_packs
from omnibal.demo import write_demo
from omnibal.profile.records import LayerCost, ModelProfile

FIGURES = {
    "method", "samples", "packs", "empty_packs", "fewest_packs", "packs_over_fewest", "samples_per_pack", "steps",
    "pad_ratio", "pad_ratio_if_padded", "dist_ratio_vision", "dist_ratio_tokens", "dist_ratio_cost", "randomness",
    "largest", "largest_bytes", "rank_means", "lost", "repeated", "over_limit", "seconds",
}  # fmt: skip


def record_of(result):
    return json.loads(result.stdout)


def test_json_holds_the_figures_of_the_arranged_epoch(omnibal, token_lengths):
    options = ["--vision-units", 16, "--llm-tokens", 4096, "--num-replicas", 4, "--seed", 3, "--epoch", 2]
    record = record_of(omnibal("pack", *token_lengths, *options, "--method", "isf", "--micro-batches", 2, "--json"))
    lengths, limits = SampleLengths.from_token_lengths(token_lengths), PackLimits(16, 4096)
    epoch = arrange_epoch(lengths, limits, num_replicas=4, micro_batches=2, method="isf", seed=3, epoch=2)
    assert set(record) == {
        "samples", "limits", "num_replicas", "micro_batches", "seed", "epoch", "exchange_steps", "iterations",
        "oversized", "methods", "search", "warnings", "plots", "broken",
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
    assert len(figures["rank_means"]["llm_tokens"]) == 4


def test_isf_takes_its_rounds_and_where_packs_are_full(omnibal, token_lengths):
    options = ["--vision-units", 16, "--llm-tokens", 4096, "--method", "isf", "--seed", 3, "--json"]
    own = ["--iterations", 2, "--full-vision-units", 14, "--full-llm-tokens", 3500]
    record = record_of(omnibal("pack", *token_lengths, *options, *own))
    lengths = SampleLengths.from_token_lengths(token_lengths)
    limits = PackLimits(16, 4096, full_vision_units=14, full_llm_tokens=3500)
    expected, more_rounds, other_marks = (
        len(iterative_sampling_and_filtering(lengths, full, iterations=rounds, seed=np.random.default_rng([3, 0])))
        for full, rounds in ((limits, 2), (limits, 10), (PackLimits(16, 4096), 2))
    )
    assert record["iterations"] == 2
    assert PackLimits(**record["limits"]) == limits
    assert record["methods"][0]["packs"] == expected
    assert expected not in (more_rounds, other_marks)
    refused = omnibal("pack", *token_lengths, *own, "--search", exit_code=2)
    assert "must come without --search" in refused.stderr


def test_the_knob_between_randomness_and_balance(omnibal, token_lengths):
    options = ["--vision-units", 16, "--llm-tokens", 8192, "--json"]
    apart, together = (
        record_of(omnibal("pack", *token_lengths, *options, "--exchange-steps", number))["methods"][0]
        for number in (1, 64)
    )
    assert together["dist_ratio_cost"] < apart["dist_ratio_cost"]


def test_limits_left_out_follow_the_papers_rule(omnibal, token_lengths):
    ruled = paper_limits(SampleLengths.from_token_lengths(token_lengths))
    record = record_of(omnibal("pack", *token_lengths, "--method", "random", "--json"))
    assert (record["limits"]["vision_units"], record["limits"]["llm_tokens"]) == (ruled.vision_units, ruled.llm_tokens)
    record = record_of(omnibal("pack", *token_lengths, "--llm-tokens", 9000, "--method", "random", "--json"))
    assert (record["limits"]["vision_units"], record["limits"]["llm_tokens"]) == (ruled.vision_units, 9000)


def test_compare_shows_all_methods_side_by_side(omnibal, token_lengths):
    options = ["--vision-units", 16, "--llm-tokens", 4096, "--compare"]
    methods = [entry["method"] for entry in record_of(omnibal("pack", *token_lengths, *options, "--json"))["methods"]]
    assert sorted(methods) == ["balanced", "isf", "random"]
    header = omnibal("pack", *token_lengths, *options).stdout.splitlines()[3]
    assert [word for word in header.split() if word.isalpha()] == methods


def test_search_ranks_limits_under_the_ceiling_and_uses_the_best(omnibal, token_lengths):
    options = ["--search", "--vision-units", 10, "--llm-tokens", 6000, "--method", "isf"]
    record = record_of(omnibal("pack", *token_lengths, *options, "--json"))
    assert record["limits"] == record["search"][0]["limits"]
    assert all(entry["limits"]["vision_units"] <= 10 for entry in record["search"])
    assert all(entry["limits"]["llm_tokens"] <= 6000 for entry in record["search"])
    text = omnibal("pack", *token_lengths, *options).stdout
    assert f"the best of {len(record['search'])} limits that were tried" in text


def test_a_search_without_a_ceiling_goes_to_twice_the_papers_limits(omnibal, token_lengths):
    ruled = paper_limits(SampleLengths.from_token_lengths(token_lengths))
    record = record_of(omnibal("pack", *token_lengths, "--search", "--method", "isf", "--json"))
    assert max(entry["limits"]["vision_units"] for entry in record["search"]) == 2 * ruled.vision_units


@pytest.fixture
def trap(tmp_path):
    """Samples of which two fives never share a pack of 9."""
    path = tmp_path / "trap.json"
    path.write_text(json.dumps([{"vit_num": 5, "token_num": 100}, {"vit_num": 3, "token_num": 100}] * 50))
    return path


def test_a_trap_is_warned_of(omnibal, trap):
    options = [trap, "--vision-units", 9, "--llm-tokens", 9000, "--method", "isf"]
    (warning,) = record_of(omnibal("pack", *options, "--json"))["warnings"]
    assert warning.startswith("vision limit 9 is a trap")
    assert "warning: vision limit 9 is a trap" in omnibal("pack", *options).stdout
    assert record_of(omnibal("pack", *options[:1], "--vision-units", 8, *options[3:], "--json"))["warnings"] == []


def test_a_search_lists_each_trap_once_and_prints_the_nearest(omnibal, trap):
    options = [trap, "--search", "--vision-units", 24, "--llm-tokens", 2000, "--method", "isf", "--num-replicas", 1]
    record = record_of(omnibal("pack", *options, "--json"))
    limits = [int(warning.split()[2]) for warning in record["warnings"]]
    assert len(limits) == len(set(limits)) > 3
    assert limits == sorted(limits, key=lambda limit: abs(limit - record["limits"]["vision_units"]))
    assert f"{len(limits) - 3} more vision limits are traps" in omnibal("pack", *options).stdout


@pytest.mark.parametrize(("policy", "samples", "lost"), [("alone", 4, 0), ("drop", 3, 0)])
def test_oversized_samples_are_counted(omnibal, tmp_path, policy, samples, lost):
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([{"vit_num": 1, "token_num": tokens} for tokens in (10, 20, 30, 99)]))
    options = [path, "--vision-units", 4, "--llm-tokens", 60, "--num-replicas", 1, "--method", "isf"]
    record = record_of(omnibal("pack", *options, "--oversized", policy, "--json"))
    assert record["oversized"] == {"policy": policy, "samples": 1}
    (figures,) = record["methods"]
    assert (figures["samples"], figures["lost"], figures["over_limit"]) == (samples, lost, 0)
    assert "1 samples exceed a limit on their own" in omnibal("pack", *options, "--oversized", policy).stdout


def test_refused_oversized_samples_are_an_error_without_a_traceback(omnibal, token_lengths):
    options = ["--vision-units", 1, "--method", "isf", "--oversized", "error"]
    result = omnibal("pack", *token_lengths, *options, exit_code=2)
    assert result.stderr.startswith("error: samples must keep the limits of 1 vision units")


def test_plots_are_written_before_and_after(omnibal, token_lengths, tmp_path):
    options = ["--vision-units", 16, "--llm-tokens", 4096, "--method", "isf", "--plot", tmp_path / "plots", "--json"]
    written = record_of(omnibal("pack", *token_lengths, *options))["plots"]
    assert written == [str(tmp_path / "plots" / f"{name}.png") for name in ("rank_loads", "pack_fill", "lengths")]
    for path in (tmp_path / "plots").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "plots").iterdir())) == 3


def test_saved_lengths_pack_like_the_files_they_came_from(omnibal, token_lengths, tmp_path):
    SampleLengths.from_token_lengths(token_lengths).save(tmp_path / "saved")
    from_files, from_folder = (
        record_of(omnibal("pack", *paths, "--method", "isf", "--json"))["methods"][0]
        for paths in (token_lengths, [tmp_path / "saved"])
    )
    assert from_files | {"seconds": 0} == from_folder | {"seconds": 0}


def test_what_cannot_be_read_is_refused(omnibal, token_lengths, tmp_path):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "none.json").write_text("[]")
    (tmp_path / "lines.jsonl").write_text('{"vit_num": 1, "token_num": 2}\n' * 2)
    (tmp_path / "latin.json").write_bytes('["é"]'.encode("latin-1"))
    SampleLengths([1], [2]).save(tmp_path / "saved")
    (tmp_path / "saved" / "sources.json").write_text("[1, 2")
    (tmp_path / "meta.json").write_text('{"shapes": {}}')
    (tmp_path / "llava.json").write_text('[{"conversations": []}]')
    for paths, message in (
        ([tmp_path / "missing.json"], "lengths must be a readable file or folder"),
        ([tmp_path / "text"], "lengths must be a folder, JSON or JSON lines, got 'hello'"),
        ([tmp_path], "must be a folder of lengths, written completely by `omnibal lengths`"),
        ([tmp_path / "none.json"], "lengths must hold at least one sample, got none in"),
        ([tmp_path / "lines.jsonl"], "lines.jsonl must be a readable JSON file"),
        ([tmp_path / "latin.json"], "lengths must be text in UTF-8, got"),
        ([tmp_path / "saved"], "sources.json must be a JSON list of names"),
        ([*token_lengths, "--num-replicas", 10**18], "num_replicas x micro_batches must be at most 16777216, got"),
        ([*token_lengths, "--micro-batches", 10**30], "num_replicas x micro_batches must be at most 16777216, got"),
        ([*token_lengths, "--search", "--num-replicas", 10**18], "num_replicas x micro_batches must be at most"),
        ([*token_lengths, "--iterations", 10**18], "iterations must be between 1 and 10000, got"),
        ([*token_lengths, "--exchange-steps", 10**18], "exchange_steps must be between 1 and"),
        (
            [*token_lengths, "--vision-units", 0, "--llm-tokens", 1],
            "limits must hold at least one sample, got 0 vision",
        ),
        ([*token_lengths, "--vision-units", 0, "--llm-tokens", 1, "--search"], "limits must hold at least one sample"),
        ([*token_lengths, token_lengths[0]], "paths must be different files, got"),
        ([*token_lengths, "--broken", "skip"], "--broken must be left out where lengths are given, got skip"),
        ([*token_lengths, "--max-tiles", 3], "--max-tiles must be left out where lengths are given, got 3"),
        ([*token_lengths, "--llm-tokens", 10**9], "llm_tokens must be between 1 and"),
        ([*token_lengths, "--plot", tmp_path / "text"], "--plot must be a folder, got"),
        ([*token_lengths, "--llm-tokens", 1, "--oversized", "drop"], "samples exceed; raise the limits"),
        ([tmp_path / "meta.json"], "--model must name the model's folder"),
        ([tmp_path / "llava.json"], "--model must name the model's folder"),
        ([tmp_path / "meta.json", tmp_path], "paths must be JSON lists of lengths where there are several"),
        ([*token_lengths, tmp_path / "meta.json"], "paths must be JSON lists of lengths where there are several"),
        ([*token_lengths, "--model", tmp_path], "--model must be left out where lengths are given"),
    ):
        assert message in omnibal("pack", *paths, exit_code=2).stderr


def test_a_profile_says_how_much_memory_micro_batches_keep_and_bounds_the_search(omnibal, token_lengths, tmp_path):
    bytes_of = CostModel(vision_units=3e8, llm_tokens=1e6, llm_tokens_squared=50)
    half = 0.5 * bytes_of
    layers = tuple(
        LayerCost(
            name=f"block.{number}",
            kind="block",
            module="language",
            forward_seconds=CostModel(llm_tokens=1e-6),
            backward_seconds=CostModel(llm_tokens=2e-6),
            output_bytes=CostModel(llm_tokens=2),
            saved_bytes={"none": half, "full": CostModel(llm_tokens=2)},
        )
        for number in range(2)
    )
    profile = tmp_path / "profile.json"
    ModelProfile(layers=layers, device="A100-80GB", dtype="bfloat16").save(profile)
    options = [*token_lengths, "--search", "--method", "isf", "--profile", profile, "--budget", 6]
    record = record_of(omnibal("pack", *options, "--json"))
    limits = PackLimits(record["limits"]["vision_units"], record["limits"]["llm_tokens"])
    lengths = SampleLengths.from_token_lengths(token_lengths)
    epoch = arrange_epoch(lengths, limits, num_replicas=8, method="isf")
    most = bytes_of(epoch.packs.load(lengths)).max()
    assert record["methods"][0]["largest_bytes"] == pytest.approx(most)
    assert 3 * 2**30 < most <= 6 * 2**30
    assert f"largest, memory kept {most / 2**30:.2f} GiB" in " ".join(omnibal("pack", *options).stdout.split())


def test_a_budget_needs_a_search_and_a_profile(omnibal, token_lengths):
    output = omnibal("pack", *token_lengths, "--search", "--budget", 6, exit_code=2).stderr
    assert "--budget must come with --search and --profile" in output


def test_a_budget_without_end_is_refused(omnibal, token_lengths, tmp_path):
    options = ["--search", "--profile", tmp_path / "none.json", "--budget", "inf"]
    assert "--budget must be GiB such as 20, got inf" in omnibal("pack", *token_lengths, *options, exit_code=2).stderr


def test_a_dataset_packs_without_what_cannot_be_read(omnibal, tmp_path):
    demo = write_demo(tmp_path / "demo", samples=20, held_out=20)
    stories = demo.train_annotations[-1]
    stories.write_text(stories.read_text().replace("{", "{{", 1))
    options = [demo.meta, "--model", demo.model, "--method", "isf", "--num-replicas", 1]
    assert "line 1: entry must be" in omnibal("pack", *options, exit_code=2).stderr
    options += ["--broken", "skip", "--cache", tmp_path / "cache"]
    record = record_of(omnibal("pack", *options, "--json"))
    assert [problem["line"] for problem in record["broken"]] == [1]
    kept = {path.name for path in (tmp_path / "cache").iterdir()} - {"annotations"}  # where their entries begin
    assert len(kept) == 1
    output = omnibal("pack", *options).stdout
    assert "1 items cannot be used and are left out" in output and f"{record['samples']} samples" in output
