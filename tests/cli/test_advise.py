"""What would it bring me?"""

import json
import math
import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from omnibal.advise.measuring import measure
from omnibal.advise.models import read_model
from omnibal.advise.present import Present
from omnibal.cli.main import app
from omnibal.data.lengths import SampleLengths
from omnibal.formats.conversations import open_dataset
from tools.synthetic import tiled_lengths

RUN = ("--model", "InternVL3-8B", "--cluster", "8xA100-80GB")
PROBE = """
import sys
from omnibal.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
loaded = {"torch", "transformers", "deepspeed", "datasets"} & set(sys.modules)
assert not loaded, loaded
"""


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lengths")
    tiled_lengths(20_000, seed=1).save(folder)
    return folder


@pytest.fixture(scope="module")
def annotations(tmp_path_factory):
    """Two thousand samples whose images' sizes stand beside them."""
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    turns = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "word " * 50}]
    sizes = ((400, 300), (1600, 1200), (800, 2400))
    records = (
        {"image": "a.jpg", "width": sizes[n % 3][0], "height": sizes[n % 3][1], "conversations": turns}
        for n in range(2000)
    )
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_the_answer_in_ten_lines(omnibal, tmp_path):
    SampleLengths([3] * 1000, [1000] * 1000, target_tokens=[100] * 1000).save(tmp_path / "alike")
    options = ("--today", "zero3", "--batch", 4, "--accumulation", 8, "--plot", tmp_path / "advice.png")
    lines = omnibal("advise", tmp_path / "alike", *RUN, *options).stdout.splitlines()
    # The answer comes first: against today, and packs against the trainer's own settings, which do as much here.
    assert re.match(
        r"your best settings \(without packs\) over today: 1\.4\dx \(1\.\d to 1\.\dx\); packs bring "
        r"(0\.99|1\.0\d)x, (leave them out|less than the estimate's error)$",
        lines[0],
    )
    way = "zero3, batch 4, accumulation 8, gradient checkpointing (assumed), 256 samples a step"
    optimizer = "AdamW (assumed), 16 bytes a trained parameter"
    assert lines[1] == f"computed for InternVL3-8B on 8xA100-80GB, {way}; {optimizer}"
    memory = r"memory of the fullest GPU: [\d.]+ GiB today, [\d.]+ GiB with these settings, of 79\.2 GiB$"
    assert re.match(memory, lines.pop(2))
    assert lines[2] == "data: 1,000 samples, lengths known"
    assert re.match(r"today: [\d.]+ samples/s; time of the GPUs: 7\d% useful, ", lines[3])
    assert lines[4].startswith("changes, each on top of the lines above it; ")
    # Parts of packs that as a whole bring nothing are not told: "balance 2.5" would look like a gain.
    assert [line.split(":")[0] for line in lines[5:11]] == [
        "0. head", "0. group_by_length", "0. batch_rebalance", "0. less recomputation", "0. lower ZeRO stage", "paste",
    ]  # fmt: skip
    assert "    target_rows(model)  # before the trainer" in lines
    assert "set: gradient_checkpointing=False" in lines
    assert not any("balance(trainer" in line or "packs of all samples" in line for line in lines)
    assert (tmp_path / "advice.png").stat().st_size > 10_000


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("sharding", ["zero3", "ddp"])
def test_printed_factors_multiply_up_to_the_first_line(omnibal, lengths, sharding):
    cluster = ("--model", "InternVL3-2B", *RUN[2:])
    lines = omnibal("advise", lengths, *cluster, "--today", sharding, "--batch", 4).stdout.splitlines()
    (whole,) = re.findall(r"over today:? ([\d.]+)x \(", lines[0])
    factors = [float(found[1]) for line in lines if (found := re.match(r"\d\. [\w ]+: ([\d.]+)x \(", line))]
    assert len(factors) > 2
    assert math.prod(factors) == pytest.approx(float(whole), rel=0.02)


def test_json_says_the_same(omnibal, lengths):
    options = ("--batch", 4, "--accumulation", 1)
    record = json.loads(omnibal("advise", lengths, *RUN, *options, "--json").stdout)
    printed = omnibal("advise", lengths, *RUN, *options).stdout.splitlines()
    assert record["headline"] in printed
    gain = record["beyond_settings"]
    said = ["{:.2f}x ({:.1f} to {:.1f}x)".format(each["factor"], *each["likely"]) for each in (gain, record)]
    assert record["headline"] == f"omnibal over your best settings: {said[0]}; over today: {said[1]}"
    assert gain == record["over_settings"]
    assert record["settings"]["factor"] * record["beyond_settings"]["factor"] == pytest.approx(
        record["factor"], rel=0.03
    )
    assert f"{record['limits']['samples_per_step']:,.0f} samples a step (32 today)" in "\n".join(printed)
    assert record["today"]["batch"] == 4
    assert sum(record["today"]["shares"].values()) == pytest.approx(1)
    assert record["changes"][0]["name"] == "head"
    assert record["after"]["sample_seconds"] < record["today"]["sample_seconds"] / 2


@pytest.mark.usefixtures("few_steps")
def test_layouts_are_one_table_behind_todays_answer(omnibal, lengths, tmp_path):
    options = ("--model", "InternVL3-1B", "--cluster", "2xA100-80GB", "--batch", 4, "--accumulation", 2, "--layouts")
    record = json.loads(omnibal("advise", lengths, *options, "--json").stdout)
    layouts = record["layouts"]
    kinds = [each["kind"] for each in layouts["candidates"]]
    assert {*kinds, *layouts["missing_bytes"]} == {"zero", "rearranged", "pipeline", "tensor", "spread", "units"}
    assert layouts["winner"] in kinds and layouts["winner_today"] in ("zero", "rearranged", "pipeline")
    assert "4, 8 tensor ranks would cross nodes of 2" in layouts["not_weighed"]
    rate = layouts["candidates"][0]["samples_per_second"]
    today = 2 / record["today"]["sample_seconds"]
    assert layouts["candidates"][0]["times_today"] == pytest.approx(rate / today)
    lines = omnibal("advise", lengths, *options, "--plot", tmp_path / "all.png").stdout.splitlines()
    places = [next(place for place, line in enumerate(lines) if line.startswith(word)) for word in (
        "today: ", "winner: ", "runner-up: ", "not weighed: ", "paste:", "written: "
    )]  # fmt: skip
    assert places == sorted(places)
    assert (tmp_path / "all.png").stat().st_size > 10_000


@pytest.mark.usefixtures("few_steps")
def test_layouts_are_weighed_where_todays_recipe_could_not_run(omnibal, lengths, no_recompute):
    options = ("--model", "InternVL3-1B", "--cluster", "2xA100-80GB", "--batch", 64, "--accumulation", 1, "--layouts")
    layouts = json.loads(omnibal("advise", lengths, *options, *no_recompute, "--json").stdout)["layouts"]
    assert [each["times_today"] for each in layouts["candidates"]] == [None] * len(layouts["candidates"])


@pytest.mark.parametrize("is_array", [False, True])
def test_a_sample_answers_without_torch(annotations, tmp_path, is_array):
    data = tmp_path / "train.json"
    data.write_text(f"[{','.join(annotations.read_text().splitlines())}]")
    arguments = ["advise", str(data if is_array else annotations), *RUN, "--lora", "--batch", "2", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, check=False,
        env=dict(os.environ) | {"PATH": "", "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["data"].startswith("1,000 of 2,000 samples measured; tokens of text estimated (±10%")
    assert record["today"]["fullest_rank_bytes"] < 79e9


def test_a_stream_is_piped():
    images = ({}, {"image": "a.jpg", "width": 400, "height": 400}, {"image": "a.jpg", "width": 800, "height": 1200})
    records = [{"query": "What?", "response": "word " * (7 * n % 900), **images[n % 3]} for n in range(1100)]
    arguments = ["advise", "-", *RUN, "--batch", "4", "--accumulation", "2"]
    lines = CliRunner().invoke(app, arguments, input="\n".join(map(json.dumps, records))).stdout.splitlines()
    assert "; images up to 12 tiles (the publisher's default; --max-image); " in lines[1]
    assert lines[3].startswith("data: the first 1,000 samples of a stream measured; tokens of text estimated")
    assert any("balance_stream(trainer, PackLimits(" in line and "max_steps" in line for line in lines)
    assert not any("packs of all samples" in line for line in lines)


@pytest.mark.usefixtures("few_steps")
def test_the_largest_assumption_stands_in_the_second_line(omnibal, annotations, lengths, tmp_path):
    (tmp_path / "factory.yaml").write_text("finetuning_type: full\ncutoff_len: 40000\ndeepspeed: zero.json\n")
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3}}')
    qwen, cluster = ("--model", "Qwen2.5-VL-7B"), ("--cluster", "8xA100-80GB")
    for options, assumed in (
        (qwen, "images up to 12,845,056 pixels (the publisher's default; --max-image)"),
        ((*qwen, "--max-image", 1003520), "images up to 1,003,520 pixels (--max-image)"),
        ((*qwen, "--today", tmp_path / "factory.yaml"),
         "images up to 589,824 pixels (as llama-factory resizes them; --max-image)"),
        (("--model", "InternVL3-8B"), "images up to 12 tiles (the publisher's default; --max-image)"),
        (("--model", "InternVL3-8B", "--max-image", 4), "images up to 4 tiles (--max-image)"),
    ):  # fmt: skip
        second = omnibal("advise", annotations, *options, *cluster).stdout.splitlines()[1]
        assert f"; {assumed}; " in second, second
    for model in (("--model", "LLaVA-1.5-7B"),):  # whose images bring one tile each, whatever their size
        assert "images up to" not in omnibal("advise", annotations, *model, *cluster).stdout
    assert "images up to" not in omnibal("advise", lengths, *RUN).stdout  # nothing is assumed of measured lengths


def test_a_refusal_names_the_largest_assumption(refusal, annotations):
    given = ("--model", "Qwen2.5-VL-7B", "--cluster", "8xA100-80GB", "--today", "ddp")
    assert refusal("advise", annotations, *given).endswith(
        "; counted are images up to 12,845,056 pixels (the publisher's default; --max-image)"
    )


def test_all_forms_are_measured_by_all_commands(omnibal, tmp_path):
    turns = [("human", "user", "What? " * 30), ("gpt", "assistant", "word " * 50)]
    (tmp_path / "swift.yaml").write_text("train_type: full\npadding_free: true\ndeepspeed: zero3\n")
    answers = []
    for form in ("conversations", "messages"):
        path = tmp_path / f"{form}.jsonl"
        keys = ("from", "value") if form == "conversations" else ("role", "content")
        said = [dict(zip(keys, (turn[form == "messages"], turn[2]), strict=True)) for turn in turns]
        records = [
            {form: said} | ({"image": "a.jpg", "width": 900, "height": 900} if n % 3 else {}) for n in range(300)
        ]
        path.write_text("\n".join(map(json.dumps, records)))
        answers.append(
            omnibal("advise", path, *RUN, "--batch", 2, "--accumulation", 2, "--today", tmp_path / "swift.yaml").stdout
        )
    assert f"omnibal lengths {tmp_path}/conversations.jsonl lengths --model FOLDER --limits " in answers[0]
    assert answers[1] == answers[0].replace("conversations.jsonl", "messages.jsonl")


def test_machines_may_be_a_file(omnibal, refusal, lengths, tmp_path):
    path = tmp_path / "machines.json"
    path.write_text('{"num_nodes": 1, "devices_per_node": 2, "device": "H100-80GB"}')
    record = json.loads(omnibal("advise", lengths, "--model", "InternVL3-1B", "--cluster", path, "--json").stdout)
    assert record["cluster"] == "2xH100-80GB"
    line = refusal("advise", lengths, *RUN, "--cluster", tmp_path / "none.json")
    assert line.startswith(f"--cluster must be a readable file, got {tmp_path / 'none.json'}")


def test_a_ds_config_with_comments_says_how_somebody_trains(omnibal, lengths, tmp_path):
    path = tmp_path / "zero.json"
    path.write_text('// of ours\n{\n  "zero_optimization": {"stage": 2}, # not 3\n}')
    record = json.loads(omnibal("advise", lengths, *RUN, "--today", path, "--json").stdout)
    assert record["today"]["trainer"] == "zero2"


def test_a_mixture_of_todays_ds_config_says_what_is_drawn(omnibal, annotations, tmp_path):
    shares = {"train": 1, "scans": 3}
    meta = {name: {"root": ".", "annotation": str(annotations), "repeat_time": 0.5} for name in shares}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    config = {"zero_optimization": {"stage": 2}, "omnibal": {"data": {"mixture": shares}}}
    (tmp_path / "mine.json").write_text(json.dumps(config))
    options = ("--today", tmp_path / "mine.json", "--json")
    record = json.loads(omnibal("advise", tmp_path / "meta.json", *RUN, *options).stdout)
    assert "; drawn with the mixture's first shares" in record["data"]
    assert record["today"]["trainer"] == "zero2"


def test_the_present_way_is_read_from_files(omnibal, lengths, tmp_path):
    (tmp_path / "z2.json").write_text('{"zero_optimization": {"stage": 2}}')
    yaml = tmp_path / "train.yaml"
    yaml.write_text(
        "model_name_or_path: OpenGVLab/InternVL3-8B-hf\nfinetuning_type: lora\ndeepspeed: z2.json\n"
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\ncutoff_len: 1500\nuse_galore: true\n"
    )
    found = omnibal("advise", lengths, "--today", yaml, "--cluster", "8xA100-80GB", "--json").stdout
    record = json.loads(found)
    today = record["today"]
    assert (today["trainer"], today["batch"], today["micro_batches"]) == ("zero2", 2, 4)
    assert "are cut at 1,500 tokens" in record["data"]
    assert record["read"]["cutoff_len"] == "1500"
    assert record["not_read"] == {"use_galore": "True"}
    assert (record["model"], record["after"]["recompute"]) == ("InternVL3-8B", "none")


def test_a_model_folder_brings_its_tokenizer_and_its_way_with_images(omnibal, demo):
    exact = open_dataset(demo.meta, demo.model).lengths()
    options = ("--model", demo.model, "--cluster", "2xA100-80GB", "--batch", 2, "--json")
    record = json.loads(omnibal("advise", demo.meta, *options).stdout)
    assert record["data"] == "60 of 60 samples measured"  # nothing is estimated
    measured = measure([demo.meta], read_model(str(demo.model)), Present()).lengths
    assert sorted(measured.vision_units) == sorted(exact.vision_units)
    # what the chat template adds to a sample is taken to be ChatML's
    assert measured.llm_tokens.mean() == pytest.approx(exact.llm_tokens.mean(), rel=0.1)


def test_even_samples_are_left_as_they_are(omnibal, tmp_path, no_recompute):
    SampleLengths([1] * 64, [900] * 64).save(tmp_path)
    text = omnibal("advise", tmp_path, *RUN, "--batch", 2, *no_recompute).stdout
    assert "leave it as it is: nothing brings more than the estimate's error" in text
    assert "paste" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "InternVL3-9B"), "a config.json, got 'InternVL3-9B'; did you mean InternVL3-"),
        (("--cluster", "8xA1000"), "device must begin like one of "),
        (("--cluster", "8xA1000"), 'for another one give a record with "name", "memory_bytes"'),
        (("--cluster", "8xA1000"), 'it is the "device" of a cluster\'s record, beside "num_nodes" and "devices_per'),
        (("--today", "zero4"), "today must be one of ddp, zero1, zero2, zero3, fsdp, or a file, got 'zero4'"),
        (("--model", "Qwen2.5-VL-7B"), "must be of Qwen2.5-VL-7B, with 4 patches for each image token, got sample"),
        (("--model", "LLaVA-1.5-7B"), "must be of LLaVA-1.5-7B, with 576 LLM tokens for each tile, got sample"),
        (("--today", "ddp", "--batch", "4"), "which is wrong: the batch of 4, ddp, recomputation 'full', what is"),
        (("--today", "ddp", "--batch", "4"), "; what would fit: zero1 in place of ddp, or LoRA of rank 16; --layouts"),
        (("--cluster", "A100-80GB", "--layouts"), "at least 2 devices for layouts to differ, got A100-80GB"),
        (("--plot", "a.pdf"), "--plot must be a PNG, whose name ends in .png, got a.pdf"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_line(refusal, lengths, arguments, message):
    line = refusal("advise", lengths, *RUN, *arguments)
    assert message in line
    assert "\n" not in line


def test_data_that_is_not_there_or_has_no_sizes(refusal, tmp_path):
    assert "which does not exist" in refusal("advise", tmp_path / "none.json", *RUN)
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"image": "gone.jpg", "conversations": [{"from": "human", "value": "<image>"}]}))
    assert "image must exist, got" in refusal("advise", path, *RUN)
