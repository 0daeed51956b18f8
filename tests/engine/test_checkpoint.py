"""Checkpoints on disk: what goes into one, when one is whole, and which one a run goes on from."""

import json
import os
from pathlib import Path

import pytest
import torch

from omnibal.cluster import Layout
from omnibal.config.section import OmnibalSection
from omnibal.engine import checkpoint as checkpoints
from omnibal.engine.checkpoint import (
    SavedFile,
    begin,
    choose,
    delete_all,
    export,
    finish,
    has_all_files,
    keep_newest,
    problem_of,
    write_manifest,
    write_model_files,
)
from omnibal.engine.resolve import ResolvedRun
from omnibal.errors import ConfigError
from omnibal.vlm import load_model
from tests.engine.cases import flip
from tests.engine.small import small_config

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "merges.txt", "chat_template.jinja")
OTHERS = ("preprocessor_config.json", "generation_config.json", "additional_chat_templates/tools.jinja")


def test_only_known_files_of_the_model_go_into_a_checkpoint(tmp_path):
    model = tmp_path / "model"
    checkpoint = model / "checkpoints" / "global_step1"  # in the model's folder, as some have it
    foreign = ("other.safetensors", "model.gguf", ".git/config", "data.json", "checkpoints/global_step0/config.json")
    checkpoint.mkdir(parents=True)
    for name in (*TOKENIZER, *OTHERS, *foreign):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(name)
    resolved = ResolvedRun({}, OmnibalSection(), model, load_model(small_config()), Layout())
    files = write_model_files(checkpoint, resolved, {})
    folder = checkpoint / "model"
    written = {str(path.relative_to(folder)) for path in files}
    assert set(files) == {path for path in folder.rglob("*") if path.is_file()}
    assert written == {*TOKENIZER, *OTHERS, "config.json"}
    assert all((folder / name).read_text() == name for name in (*TOKENIZER, *OTHERS))


def save(folder, tag, value, *, numbers=99):
    """A checkpoint of two files, as two ranks would have written it."""
    unfinished = begin(folder, tag)
    torch.save(torch.full((50,), float(value)), unfinished / "layer_00.pt")
    torch.save(torch.full((numbers,), float(value)), unfinished / "optimizer.pt")
    files = {"layer_00.pt": SavedFile.of(unfinished / "layer_00.pt", 0)}
    files["optimizer.pt"] = SavedFile.of(unfinished / "optimizer.pt", 1)
    write_manifest(unfinished, {}, files)
    finish(unfinished)


def value_of(folder, tag):
    return torch.load(folder / tag / "layer_00.pt")[0].item()


@pytest.fixture
def folder(tmp_path):
    """Two whole checkpoints."""
    save(tmp_path, "one", 1)
    save(tmp_path, "two", 2)
    return tmp_path


def cut_off(folder):
    os.truncate(folder / "two" / "optimizer.pt", 700)


def lose(folder):
    (folder / "two" / "optimizer.pt").unlink()


def mix(folder):
    (folder / "two" / "optimizer.pt").write_bytes((folder / "one" / "optimizer.pt").read_bytes())


def cut_off_manifest(folder, tag="two"):
    os.truncate(folder / tag / "omnibal.json", 20)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (cut_off, r"where optimizer.pt \(written by rank 1\) has 700 bytes instead of \d+"),
        (lose, r"where optimizer.pt \(written by rank 1\) is missing"),
        (mix, r"where optimizer.pt \(written by rank 1\) is not what was saved: its content is that of another save"),
        (cut_off_manifest, "must be a folder that omnibal wrote completely, got .*two: JSONDecodeError"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_named_and_the_newest_whole_one_offered(folder, damage, problem):
    assert choose(folder, None) == ("two", "")
    damage(folder)
    for tag in (None, "two"):
        with pytest.raises(ConfigError, match=problem + ".*; the newest whole one is one: name it to use it"):
            choose(folder, tag, fall_back=tag is not None)
    name, remark = choose(folder, None, fall_back=True)
    assert name == "one"
    assert remark.startswith("going on from one, the newest whole checkpoint: checkpoint must be ")
    assert choose(folder, "one") == ("one", "")
    (folder / "one" / "layer_00.pt").unlink()
    with pytest.raises(ConfigError, match=problem + ".*; no other checkpoint is whole"):
        choose(folder, None, fall_back=True)


def test_files_of_the_same_length_are_told_apart(folder):
    one, two = (folder / tag / "optimizer.pt" for tag in ("one", "two"))
    assert one.stat().st_size == two.stat().st_size


class Kill(BaseException):
    """A process ends here."""


RENAMED = {
    "two": "checkpoint to its side",
    "two.unfinished": "new one to its name",
    "two.replaced": "replaced one out of its name",
}


@pytest.mark.parametrize("kill_at", [*RENAMED.values(), "deletion", None])
def test_a_save_under_an_old_name_leaves_a_whole_checkpoint_whenever_it_is_killed(folder, monkeypatch, kill_at):
    def rename(path, target, rename=Path.rename):
        if RENAMED[path.name] == kill_at:
            raise Kill
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        if kill_at == "deletion":
            patched.setattr(checkpoints.shutil, "rmtree", delete_one_file)
        if kill_at is None:
            save(folder, "two", 3)
        else:
            with pytest.raises(Kill):
                save(folder, "two", 3)
    name, _ = choose(folder, None, fall_back=True)
    assert value_of(folder, name) == (2 if kill_at in (RENAMED["two"], RENAMED["two.unfinished"]) else 3)
    save(folder, "two", 4)
    assert sorted(path.name for path in folder.iterdir()) == ["one", "two"]
    assert choose(folder, None) == ("two", "")
    assert value_of(folder, "two") == 4


def delete_one_file(folder):
    """As far as a deletion comes before its process is killed: the manifest is gone, what takes memory stays."""
    (folder / "omnibal.json").unlink()
    raise Kill


def test_what_a_killed_deletion_leaves_goes_with_the_next_save(folder, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(Kill):
        patched.setattr(checkpoints.shutil, "rmtree", delete_one_file)
        keep_newest(folder, 1)
    assert choose(folder, None, fall_back=True) == ("two", "")
    save(folder, "three", 3)
    assert sorted(path.name for path in folder.iterdir()) == ["three", "two"]


def test_what_unfinished_saves_left_is_deleted_and_never_chosen(folder):
    write_manifest(begin(folder, "three"), {}, {})
    assert choose(folder, None, fall_back=True) == ("two", "")
    cut_off(folder)
    assert choose(folder, None, fall_back=True)[0] == "one"
    begin(folder, "four")
    assert not (folder / "three.unfinished").exists()


def test_a_file_that_rank_zero_does_not_find_means_that_the_folder_is_not_shared(tmp_path):
    unfinished = begin(tmp_path, "one")
    with pytest.raises(
        ConfigError, match=r"must be a folder that all ranks share, got .* what rank 3 wrote to one.unf"
    ):
        write_manifest(unfinished, {}, {"layer_00.pt": SavedFile(7, 7, 3)})
    assert problem_of(unfinished) is not None


@pytest.mark.parametrize("tag", ["", ".", "..", "a/b", "a.unfinished", "a.replaced"])
def test_names_that_are_none(tmp_path, tag):
    with pytest.raises(ConfigError, match="tag must be a name"):
        begin(tmp_path, tag)
    assert not [*tmp_path.iterdir()]


def test_the_newest_is_what_was_saved_last_whatever_clocks_say(folder):
    save(folder, "global_step9", 3)
    save(folder, "global_step10", 4)
    for age, name in enumerate(("global_step10", "global_step9", "two", "one")):
        os.utime(folder / name / "omnibal.json", ns=(age, age))  # a clock that goes back
    keep_newest(folder, 2)
    assert sorted(path.name for path in folder.iterdir()) == ["global_step10", "global_step9"]
    cut_off_manifest(folder, "global_step10")
    assert choose(folder, None, fall_back=True)[0] == "global_step9"
    # a run that goes back to an earlier step and on from there
    save(folder, "global_step5", 5)
    assert choose(folder, None, fall_back=True)[0] == "global_step5"
    keep_newest(folder, 1)
    assert [path.name for path in folder.iterdir()] == ["global_step5"]


def test_only_what_omnibal_wrote_is_deleted_behind_a_link_too(folder, tmp_path_factory):
    begin(folder, "three")
    notes = tmp_path_factory.mktemp("notes")
    (notes / "omnibal.json").write_text("{}")
    (folder / "linked").symlink_to(notes)
    (folder / "notes.txt").write_text("mine")
    (folder / "zero_to_fp32.py").touch()
    (folder / "latest").write_text("two")  # of an older omnibal
    (folder / "hf").mkdir()
    link = tmp_path_factory.mktemp("run") / "checkpoints"
    link.symlink_to(folder)
    assert delete_all(link) == [link / "hf", link / "notes.txt"]
    assert sorted(path.name for path in folder.iterdir()) == ["hf", "notes.txt"]
    assert (notes / "omnibal.json").is_file()
    for value in (1, 2):
        save(link, "hf", value)
    assert delete_all(link) == [link / "hf.aside1", link / "notes.txt"]
    (folder / "notes.txt").unlink()
    (folder / "hf.aside1").rmdir()
    assert delete_all(link) == []
    assert link.is_symlink()
    assert delete_all(folder) == []
    assert not folder.exists()
    assert delete_all(folder) == []


@pytest.mark.parametrize("place", [0, 1, 2**20 - 1, 2**20, -(2**20) - 1, -1])
def test_any_flipped_bit_is_seen(tmp_path, place):
    save(tmp_path, "one", 1, numbers=10**6)
    save(tmp_path, "two", 2, numbers=10**6)
    path = tmp_path / "two" / "optimizer.pt"
    flip(path, place)
    problem = r"where optimizer.pt \(written by rank 1\) is not what was saved: its content is that of another save"
    with pytest.raises(ConfigError, match=problem + ", or damaged; the newest whole one is one"):
        choose(tmp_path, None)
    assert choose(tmp_path, None, fall_back=True)[0] == "one"
    assert has_all_files(tmp_path / "two") is None  # sizes tell nothing
    flip(path, place)
    assert choose(tmp_path, None) == ("two", "")


def test_any_flipped_bit_of_a_manifest_is_seen(folder):
    manifest = folder / "two" / "omnibal.json"
    for place in range(manifest.stat().st_size - 1):  # the last byte is a line's end
        flip(manifest, place)
        assert problem_of(folder / "two") is not None, place
        flip(manifest, place)
    assert problem_of(folder / "two") is None


def test_a_checkpoint_of_an_older_version_is_refused(folder):
    (folder / "two" / "omnibal.json").write_text(json.dumps({"files": {}}))
    with pytest.raises(ConfigError, match="of an omnibal of before 2026-11-23"):
        choose(folder, None)
    assert choose(folder, None, fall_back=True)[0] == "one"


def test_export_names_the_weights_that_are_not_whole(folder, tmp_path):
    cut_off(folder)
    with pytest.raises(ConfigError, match=r"without config.json"):  # the optimizer's state is of no interest
        export(folder / "two", tmp_path / "exported")
    os.truncate(folder / "two" / "layer_00.pt", 10)
    with pytest.raises(ConfigError, match=r"where layer_00.pt \(written by rank 0\) has 10 bytes .* whole one is one:"):
        export(folder / "two", tmp_path / "exported")
