import json
import os

import pytest
import torch

from omnibal.config.section import RunFiles
from omnibal.engine import checkpoint as checkpoints
from omnibal.engine.checkpoint import _read_layer, export_newest
from omnibal.errors import ConfigError
from omnibal.vlm import Answerer


def test_what_is_no_checkpoint_is_named(refusal, tmp_path):
    assert "or a folder of checkpoints or a checkpoint" in refusal("export", tmp_path, tmp_path / "model")
    (tmp_path / "omnibal.json").write_text("{}")
    line = refusal("export", tmp_path, tmp_path / "model")
    assert f"checkpoint must be a folder that omnibal wrote completely, got {tmp_path}" in line
    assert not (tmp_path / "model").exists()
    assert "folder must say where the model goes, got none" in refusal("export", tmp_path)


def test_a_folder_whose_newest_checkpoint_is_not_whole_is_named(refusal, ds_config, tmp_path):
    config = ds_config()
    assert "folder must hold checkpoints that omnibal wrote completely" in refusal("export", config)
    assert "folder must hold checkpoints that omnibal wrote completely" in refusal("ask", config, "What?")
    newest = tmp_path / "run" / "checkpoints" / "global_step7"
    newest.mkdir(parents=True)
    (newest / "omnibal.json").write_text("{}")
    for command in (("export", newest.parent, tmp_path / "model"), ("export", config)):
        assert str(newest) in refusal(*command)


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A run with a checkpoint, whose export writes which one it is of; the names of those that were exported."""
    exported = []
    folder = tmp_path / "run" / "checkpoints" / "global_step7"
    folder.mkdir(parents=True)
    (folder / "omnibal.json").write_text("{}")

    def export(checkpoint, target, merged=False):
        exported.append(checkpoint.name)
        target.mkdir(exist_ok=True)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(checkpoints, "export", export)
    return exported


def test_the_newest_checkpoint_is_exported_once(omnibal, ds_config, trained, tmp_path):
    record = json.loads(omnibal("export", ds_config(), "--json").stdout)
    assert record["model"] == str(tmp_path / "run" / "model")
    assert record["checkpoint"] == str(tmp_path / "run" / "checkpoints" / "global_step7")
    files = RunFiles(tmp_path / "run")
    assert export_newest(files) == files.model
    assert trained == ["global_step7"]
    # a run that began anew writes the same name at another time
    os.utime(files.checkpoints / "global_step7" / "omnibal.json", ns=(1, 1))
    export_newest(files)
    files.exported.write_text("{")
    export_newest(files)
    assert trained == ["global_step7"] * 3


def test_a_model_may_go_elsewhere(omnibal, refusal, ds_config, trained, tmp_path):
    omnibal("export", ds_config(), tmp_path / "mine")
    assert trained == ["global_step7"] and (tmp_path / "mine" / "config.json").is_file()
    line = refusal("export", ds_config(), tmp_path / "mine")
    assert f"folder must be empty or not exist yet, got {tmp_path / 'mine'} with config.json in it" in line


def test_a_layers_file_that_is_not_whole_is_named(tmp_path):
    file = tmp_path / "layer_02-model_states.pt"
    torch.save({"weight": torch.ones(1000)}, file)
    whole = file.read_bytes()
    assert _read_layer(file)["weight"].sum() == 1000
    for content in (b"", whole[:500], bytes(range(128, 256))):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"layer_02-model_states\.pt must be a whole file of a layer"):
            _read_layer(file)
    torch.save([1, 2], file)
    with pytest.raises(ConfigError, match=r"must hold a layer.s weights by name, got list"):
        _read_layer(file)


def test_a_model_answers_about_images_and_without(omnibal, demo):
    image = next((demo.meta.parent / "images").rglob("*.png"))
    omnibal("ask", demo.model, "What is this?", "--image", image)
    omnibal("ask", demo.model, "What is this?")
    output = omnibal("ask", demo.model, "--meta", demo.held_out_meta, "--count", 2).stdout
    assert "right answer" in output


def test_an_answer_is_shown_as_it_is(omnibal, demo, monkeypatch):
    monkeypatch.setattr(Answerer, "answer", lambda *_: "[/INST] a [red] cat")
    assert "[/INST] a [red] cat" in omnibal("ask", demo.model, "What is this?").stdout


def test_a_ds_configs_newest_model_answers_its_held_out_questions(omnibal, ds_config, demo, monkeypatch):
    monkeypatch.setattr(checkpoints, "export_newest", lambda files: demo.model)
    answers = omnibal("ask", ds_config(), "--count", 3, "--json").stdout.splitlines()
    assert len(answers) == 3
    assert all(sorted(json.loads(answer)) == ["answer", "images", "question", "right"] for answer in answers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["What?", "--meta", "held_out.json"], "ask must get a question or --meta"),
        ([], "ask must get a question or --meta"),
        (["What?", "--image", "missing.png"], "image must exist, got missing.png"),
        (["Is <image> like <image>?"], "question must hold one <image> per image, got 2 for 0 images"),
        (["--meta", "missing.json"], "missing.json"),
    ],
)
def test_what_cannot_be_asked_is_named(refusal, demo, arguments, message):
    assert message in refusal("ask", demo.model, *arguments)


def test_a_folder_without_a_model_is_named(refusal, tmp_path):
    assert str(tmp_path) in refusal("ask", tmp_path, "What?")
