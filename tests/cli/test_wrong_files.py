"""Files that hold something else than a command expects: one line with the file's name, whatever they hold."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from omnibal.cli.options import NAMES
from omnibal.data.limits import PackLimits
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from tests.clusters import on_cluster
from tests.pipeline.profiles import fixed_profile
from tests.test_records import UNREADABLE

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(demo, tmp_path):
    """A copy of the demo's model folder, to be damaged."""
    return shutil.copytree(demo.model, tmp_path / "model")


@pytest.mark.parametrize("kind", UNREADABLE)
def test_json_that_cannot_be_read_is_named(refusal, demo, ds_config, tmp_path, kind):
    content, _ = UNREADABLE[kind]
    wrong = tmp_path / "wrong.json"
    wrong.write_bytes(content)
    verbs = ("lengths", "profile", "plan", "report", "export", "ask")
    commands = [
        *((verb, wrong) for verb in verbs),
        ("plan", ds_config(), "--lengths", wrong),
        ("plan", ds_config(), "--profile", wrong),
        ("plan", ds_config(pipeline={"plan": str(wrong)})),
        ("ask", demo.model, "--meta", wrong),
    ]
    for command in commands:
        line = refusal(*command)
        assert "wrong.json" in line and line.count("\n") == 0, (command, line)


@pytest.mark.parametrize(("start", "name"), [(b"SQLite", "SQLite"), (b"ARROW1", "ARROW1")])
def test_tables_are_named_with_what_to_do(refusal, demo, tmp_path, start, name):
    table, meta = tmp_path / "train.table", tmp_path / "meta.json"
    table.write_bytes(start + b"\0\x93" * 100)
    meta.write_text(json.dumps({"mine": {"root": ".", "annotation": table.name}}))
    rule = "must be JSON lines, a JSON list, a tar shard, Parquet, or a folder that datasets saved"
    for data in (table, meta):
        line = refusal("lengths", data, tmp_path / "out", "--model", demo.model)
        assert rule in line and line.endswith(f"got {table} in {name}; write its rows as JSON lines")


@pytest.mark.parametrize("kind", [kind for kind in UNREADABLE if kind != "half a character"])  # a key that is not read
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"])
def test_a_model_folder_that_cannot_be_read_is_named(refusal, demo, model, tmp_path, file, kind):
    (model / file).write_bytes(UNREADABLE[kind][0])
    line = refusal("lengths", demo.meta, tmp_path / "out", "--model", model)
    assert str(model) in line
    if file == "config.json":
        line = refusal("profile", model, tmp_path / "profile.json", "--cluster", "a100")
        assert str(model / file) in line


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("text_config", "hidden_size", -64),
        ("text_config", "num_hidden_layers", -2),
        ("text_config", "vocab_size", -5),
        ("text_config", "hidden_size", 10**18),
        ("text_config", "hidden_size", "96"),
        ("text_config", "hidden_act", "nonsense"),
        ("vision_config", "hidden_size", -96),
        ("vision_config", "num_hidden_layers", -2),
        ("vision_config", "image_size", [-56, -56]),
        ("vision_config", "patch_size", [0, 0]),
        (None, "text_config", [1]),
        (None, "image_token_id", None),
    ],
)
def test_a_configuration_of_no_model_is_refused(refusal, model, tmp_path, part, key, value):
    config = json.loads((model / "config.json").read_text())
    (config if part is None else config[part])[key] = value
    (model / "config.json").write_text(json.dumps(config))
    assert str(model) in refusal("profile", model, tmp_path / "profile.json", "--cluster", "a100")


@pytest.mark.parametrize("token", [-1, 10**9, None])
def test_an_image_token_that_is_none_is_refused(refusal, demo, model, tmp_path, token):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"image_token_id": token}))
    assert str(model) in refusal("lengths", demo.meta, tmp_path / "out", "--model", model)


def cut(model):
    (model / WEIGHTS).write_bytes((model / WEIGHTS).read_bytes()[:-1000])


def empty(model):
    (model / WEIGHTS).write_bytes(b"")


def remove(model):
    (model / WEIGHTS).unlink()


def shorten(model):
    weights = load_file(model / WEIGHTS)
    name = min(weights)
    save_file(weights | {name: weights[name][:5].clone()}, model / WEIGHTS, metadata={"format": "pt"})


def forget(model):
    weights = load_file(model / WEIGHTS)
    del weights[min(weights)]
    save_file(weights, model / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("damage", [cut, empty, remove, shorten, forget])
def test_weights_that_are_not_the_models_do_not_answer(refusal, model, damage):
    damage(model)
    assert str(model) in refusal("ask", model, "What is this?")


@pytest.mark.parametrize("device", ["cuda:99", "meta", "nonsense", ""])
def test_a_device_that_is_not_there_is_named(refusal, model, device):
    line = refusal("ask", model, "What is this?", "--device", device)
    assert line.startswith(f"device must be one that torch can use here, got {device!r}")


@pytest.mark.parametrize("options", [[], ["--image"]])
def test_a_question_does_not_hold_parts_of_images(refusal, demo, options):
    image = next((demo.meta.parent / "images").rglob("*.png"))
    asked = ("ask", demo.model, "What is <IMG_CONTEXT>?", *options, *([image] if options else []))
    assert "conversations must not hold <IMG_CONTEXT>" in refusal(*asked)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (json.dumps({"conversations": [{"from": "human", "value": "\ud800"}]}), "half of a character"),
        ('{"a":' + "[" * 100_000, "brackets nest too deeply"),
        ("{", "entry must be JSON"),
    ],
)
def test_an_entry_that_cannot_be_read_is_named_or_left_out(omnibal, refusal, demo, tmp_path, entry, reason):
    good = demo.train_annotations[0].read_text().splitlines()[0]
    (tmp_path / "some.jsonl").write_text(f"{good}\n{entry}\n")
    root = demo.meta.parent / json.loads(demo.meta.read_text())[demo.train_annotations[0].stem]["root"]
    meta = tmp_path / "meta.json"
    meta.write_text(json.dumps({"some": {"root": str(root), "annotation": "some.jsonl"}}))
    measured = ("lengths", meta, tmp_path / "out", "--model", demo.model)
    for command in (measured, ("ask", demo.model, "--meta", meta)):
        line = refusal(*command)
        assert "some.jsonl, line 2" in line and reason in line
    assert json.loads(omnibal(*measured, "--broken", "skip", "--json").stdout)["all"]["samples"] == 1


def test_a_path_with_a_zero_byte_is_refused(refusal, demo, tmp_path):
    (tmp_path / "meta.json").write_text(json.dumps({"some": {"root": "a", "annotation": "a\0b"}}))
    line = refusal("lengths", tmp_path / "meta.json", tmp_path / "out", "--model", demo.model)
    assert "some.annotation must be a path, got 'a\\x00b'" in line


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("micro_batches", 2.5, "plan.micro_batches must be a valid integer, got 2.5"),
        ("micro_batches", 10**18, "micro_batches must be between 1 and"),
        ("partition", "023", "plan.partition must be a valid array, got '023'"),
        ("partition", [0, 1.5, 3], "plan.partition[1] must be a valid integer, got 1.5"),
        ("partition", [0, 2, 10**20], "plan.partition[2] must be less than or equal to"),
        ("recompute", ["99999999999999999999 full", "1 none"], "recompute of stage 0 must count its 2 layers"),
        ("made_from", 3, "plan.made_from must be an object, got 3"),
        ("limits", None, "plan.limits must be an object, got None"),
    ],
)
def test_a_plan_that_is_none_is_named(refusal, tmp_path, key, value, reason):
    fixed_profile([1, 2, 3]).save(tmp_path / "profile.json")
    plan = on_cluster(Plan(PackLimits(9, 4096), 4, Partition((0, 2, 3)), ("none",) * 3))
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_record() | {key: value}))
    line = refusal("plan", tmp_path / "plan.json")
    assert "plan.json" in line and reason in line


def test_a_plan_of_another_model_is_refused(refusal, tmp_path):
    fixed_profile([1, 2, 3, 4]).save(tmp_path / "profile.json")
    on_cluster(Plan(PackLimits(9, 4096), 4, Partition((0, 2, 3)), ("none",) * 3)).save(tmp_path / "plan.json")
    assert refusal("plan", tmp_path / "plan.json") == "plan must be of the profile's 4 layers, got 3"


@pytest.mark.parametrize(
    ("content", "is_what"),
    [
        ({"limits": 1, "partition": 2}, "a plan"),
        ({"layers": 1, "device": 2}, "a profile"),
        ({"shapes": {"annotation": "a.jsonl"}}, NAMES["dataset"]),
        ([{"vit_num": 1, "token_num": 2}], 'a JSON list of {"vit_num", "token_num"}'),
        ({"conversations": []}, NAMES["dataset"]),
    ],
)
def test_files_in_each_others_place_are_told_apart_by_content(refusal, tmp_path, content, is_what):
    """Whatever their names."""
    (tmp_path / "file.txt").write_text(json.dumps(content))
    line = refusal("ask", tmp_path / "file.txt", "What?")
    wanted = "source must be a ds_config or a Hugging Face model folder"
    assert line == f"{wanted}, got {tmp_path / 'file.txt'}, which is {is_what}"


@pytest.mark.parametrize("form", ["[{}]", "{}\n{}"])
def test_conversations_in_another_form_are_told_by_their_keys(refusal, demo, tmp_path, form):
    entry = json.dumps({"caption": "A cat.", "picture": "cat.jpg"})
    (tmp_path / "train.jsonl").write_text(form.replace("{}", entry))
    line = refusal("lengths", tmp_path / "train.jsonl", tmp_path / "out", "--model", demo.model)
    assert line.endswith("train.jsonl, which has the keys caption, picture")


def test_an_object_of_another_kind_is_said_with_its_keys(refusal, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "internvl", "hidden_size": 3}')
    line = refusal("plan", tmp_path / "config.json")
    assert line.endswith("config.json, which has the keys model_type, hidden_size")


def test_too_many_tiles_are_refused(refusal, demo, tmp_path):
    line = refusal("lengths", demo.meta, tmp_path / "out", "--model", demo.model, "--max-tiles", 10**18)
    assert "max_tiles must be at most 1024" in line


@pytest.mark.parametrize(
    ("overhead", "reason"), [("1e300", "overhead_bytes"), ("NaN", "overhead_bytes"), ("Infinity", "overhead_bytes")]
)
def test_no_device_holds_so_much_beside_the_model(refusal, ds_config, overhead, reason):
    record = f'{{"num_nodes": 1, "devices_per_node": 2, "device": "a100", "overhead_bytes": {overhead}}}'
    line = refusal("plan", ds_config(), "--cluster", record)
    assert reason in line and "\n" not in line
