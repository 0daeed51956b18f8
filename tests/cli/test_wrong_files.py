"""Files that hold something else than a command expects: one line with the file's name, whatever they hold."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from omnibal.data.limits import PackLimits
from omnibal.demo import write_demo
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from omnibal.vlm import load_model
from omnibal.vlm.weights import save_model
from tests.pipeline.profiles import fixed_profile
from tests.test_records import UNREADABLE

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's data, and its model with random weights."""
    paths = write_demo(tmp_path_factory.mktemp("demo") / "data", samples=20, held_out=20)
    model = load_model(paths.model)
    save_model(model, lambda index: dict(model.build_layer(index, seed=0).state_dict()), paths.model)
    return paths


@pytest.fixture
def model(demo, tmp_path):
    """A copy of the demo's model folder, to be damaged."""
    return shutil.copytree(demo.model, tmp_path / "model")


def refusal(omnibal, *arguments):
    error = omnibal(*arguments, exit_code=2).stderr
    return error[error.index("error: ") :].rstrip("\n")


@pytest.mark.parametrize("kind", UNREADABLE)
def test_json_that_cannot_be_read_is_named(omnibal, demo, tmp_path, kind):
    content, _ = UNREADABLE[kind]
    fixed_profile([1, 2, 3]).save(tmp_path / "profile.json")
    wrong = tmp_path / "wrong.json"
    wrong.write_bytes(content)
    stages = ("--num-stages", 2, "--bandwidth", 1)
    commands = [
        ("pack", wrong),
        ("partition", wrong, *stages),
        ("partition", tmp_path / "profile.json", *stages, "--config", wrong),
        ("partition", tmp_path / "profile.json", *stages, "--lengths", wrong),
        ("simulate", tmp_path / "profile.json", "--plan", wrong),
        ("ask", demo.model, "--meta", wrong),
    ]
    for command in commands:
        line = refusal(omnibal, *command)
        assert "wrong.json" in line and line.count("\n") == 0, (command, line)


@pytest.mark.parametrize("kind", [kind for kind in UNREADABLE if kind != "half a character"])  # a key that is not read
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"])
def test_a_model_folder_that_cannot_be_read_is_named(omnibal, demo, model, tmp_path, file, kind):
    (model / file).write_bytes(UNREADABLE[kind][0])
    line = refusal(omnibal, "lengths", demo.meta, tmp_path / "out", "--model", model)
    assert str(model) in line
    if file == "config.json":
        line = refusal(omnibal, "profile", model, tmp_path / "profile.json", "--device", "a100")
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
def test_a_configuration_of_no_model_is_refused(omnibal, model, tmp_path, part, key, value):
    config = json.loads((model / "config.json").read_text())
    (config if part is None else config[part])[key] = value
    (model / "config.json").write_text(json.dumps(config))
    assert str(model) in refusal(omnibal, "profile", model, tmp_path / "profile.json", "--device", "a100")


@pytest.mark.parametrize("token", [-1, 10**9, None])
def test_an_image_token_that_is_none_is_refused(omnibal, demo, model, tmp_path, token):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"image_token_id": token}))
    assert str(model) in refusal(omnibal, "lengths", demo.meta, tmp_path / "out", "--model", model)


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
def test_weights_that_are_not_the_models_do_not_answer(omnibal, model, damage):
    damage(model)
    assert str(model) in refusal(omnibal, "ask", model, "What is this?")


@pytest.mark.parametrize("device", ["cuda:99", "meta", "nonsense", ""])
def test_a_device_that_is_not_there_is_named(omnibal, model, device):
    line = refusal(omnibal, "ask", model, "What is this?", "--device", device)
    assert line.startswith(f"error: device must be one that torch can use here, got {device!r}")


@pytest.mark.parametrize("options", [[], ["--image"]])
def test_a_question_does_not_hold_parts_of_images(omnibal, demo, options):
    image = next((demo.meta.parent / "images").rglob("*.png"))
    asked = ("ask", demo.model, "What is <IMG_CONTEXT>?", *options, *([image] if options else []))
    assert "conversations must not hold <IMG_CONTEXT>" in refusal(omnibal, *asked)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (json.dumps({"conversations": [{"from": "human", "value": "\ud800"}]}), "half of a character"),
        ('{"a":' + "[" * 100_000, "brackets nest too deeply"),
        ("{", "entry must be JSON"),
    ],
)
def test_an_entry_that_cannot_be_read_is_named_or_left_out(omnibal, demo, tmp_path, entry, reason):
    good = demo.train_annotations[0].read_text().splitlines()[0]
    (tmp_path / "some.jsonl").write_text(f"{good}\n{entry}\n")
    root = demo.meta.parent / json.loads(demo.meta.read_text())[demo.train_annotations[0].stem]["root"]
    meta = tmp_path / "meta.json"
    meta.write_text(json.dumps({"some": {"root": str(root), "annotation": "some.jsonl"}}))
    measured = ("lengths", meta, tmp_path / "out", "--model", demo.model)
    for command in (measured, ("ask", demo.model, "--meta", meta)):
        line = refusal(omnibal, *command)
        assert "some.jsonl, line 2" in line and reason in line
    assert json.loads(omnibal(*measured, "--broken", "skip", "--json").stdout)["all"]["samples"] == 1


def test_a_path_with_a_zero_byte_is_refused(omnibal, demo, tmp_path):
    (tmp_path / "meta.json").write_text(json.dumps({"some": {"root": "a", "annotation": "a\0b"}}))
    line = refusal(omnibal, "lengths", tmp_path / "meta.json", tmp_path / "out", "--model", demo.model)
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
def test_a_plan_that_is_none_is_named(omnibal, tmp_path, key, value, reason):
    fixed_profile([1, 2, 3]).save(tmp_path / "profile.json")
    plan = Plan(PackLimits(9, 4096), 4, Partition((0, 2, 3)), ("none",) * 3)
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_record() | {key: value}))
    line = refusal(omnibal, "simulate", tmp_path / "profile.json", "--plan", tmp_path / "plan.json", "--bandwidth", 1)
    assert "plan.json" in line and reason in line


@pytest.mark.parametrize("verb", ["partition", "simulate"])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--bandwidth", 1e-300), "bandwidth_bytes_per_second must be at least 1 byte per second"),
        (("--bandwidth", 1, "--reduce-bandwidth", 1e-300), "reduce_bandwidth_bytes_per_second must be at least 1 byte"),
        (("--bandwidth", 1, "--latency", 1e300), "latency_seconds must lie between 0 and 3600"),
        (("--bandwidth", 1, "--plot", "picture.pdf"), "--plot must be a PNG, whose name ends in .png, got picture.pdf"),
    ],
)
def test_what_no_link_and_no_picture_is(omnibal, tmp_path, verb, options, reason):
    fixed_profile([1, 2, 3]).save(tmp_path / "profile.json")
    cut = ("--num-stages", 2) if verb == "partition" else ("--partition", "0,2,3")
    assert reason in refusal(omnibal, verb, tmp_path / "profile.json", *cut, *options)


def test_a_partition_of_more_layers_than_there_are_is_refused(omnibal, tmp_path):
    fixed_profile([1, 2, 3]).save(tmp_path / "profile.json")
    arguments = ("simulate", tmp_path / "profile.json", "--partition", f"0,2,{10**20}", "--bandwidth", 1)
    assert "partition must be of the profile's 3 layers" in refusal(omnibal, *arguments)


def test_too_many_tiles_are_refused(omnibal, demo, tmp_path):
    line = refusal(omnibal, "lengths", demo.meta, tmp_path / "out", "--model", demo.model, "--max-tiles", 10**18)
    assert "max_tiles must be at most 1024" in line


@pytest.mark.parametrize("section", ["bf16", "fp16", "zero_optimization", "data_types"])
def test_a_section_that_is_none_is_refused(omnibal, tmp_path, section):
    fixed_profile([1, 2, 3]).save(tmp_path / "profile.json")
    (tmp_path / "config.json").write_text(json.dumps({section: True}))
    options = ("--num-stages", 2, "--bandwidth", 1, "--config", tmp_path / "config.json")
    line = refusal(omnibal, "partition", tmp_path / "profile.json", *options)
    assert f"{section} of a ds_config must be an object, got True" in line


def test_options_that_no_launcher_takes_are_refused(omnibal, tmp_path):
    output = omnibal("partition", tmp_path, "--num-stages", 2, "--launcher", '"', exit_code=2).stderr
    assert "--launcher" in output and "No closing quotation" in output


@pytest.mark.parametrize("overhead", ["inf", "1e300", "nan"])
def test_no_device_holds_so_much_beside_the_model(omnibal, tmp_path, overhead):
    for command in (("plan", tmp_path), ("emulate", tmp_path, tmp_path), ("report",)):
        assert "--overhead" in omnibal(*command, "--overhead", overhead, exit_code=2).stderr


def test_more_processes_than_a_machine_starts_are_refused(omnibal, tmp_path):
    fixed_profile([1, 2, 3]).save(tmp_path / "profile.json")
    Plan(PackLimits(9, 4096), 4, Partition((0, 2, 3)), ("none",) * 3).save(tmp_path / "plan.json")
    options = ("--bandwidth", 1, "--budget", 80, "--num-replicas", 1000)
    line = refusal(omnibal, "emulate", tmp_path / "plan.json", tmp_path / "profile.json", *options)
    assert "stages x replicas must be at most 256 processes of one machine, got 2000" in line


def test_a_log_that_is_no_text_is_refused(omnibal, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(UNREADABLE["binary"][0])
    assert "metrics.jsonl must be a run's log" in refusal(omnibal, "report", "--run", tmp_path)
