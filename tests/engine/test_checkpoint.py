"""Checkpoints on disk: what goes into one, when one is whole, and which one a run goes on from."""

import os
from pathlib import Path

import pytest
import torch

from omnibal.cluster import Layout
from omnibal.config import OmnibalSection
from omnibal.engine import saved_files
from omnibal.engine.checkpoint import export, write_model_files
from omnibal.engine.resolve import Given
from omnibal.engine.saved_files import SavedFile, begin, choose, finish, keep_newest, problem_of, write_manifest
from omnibal.errors import ConfigError
from omnibal.vlm import load_model
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
    given = Given({}, OmnibalSection(), model, load_model(small_config()), Layout())
    files = write_model_files(checkpoint, given)
    folder = checkpoint / "model"
    written = {str(path.relative_to(folder)) for path in files}
    assert set(files) == {path for path in folder.rglob("*") if path.is_file()}
    assert written == {*TOKENIZER, *OTHERS, "config.json"}
    assert all((folder / name).read_text() == name for name in (*TOKENIZER, *OTHERS))


def save(folder, tag, value, *, is_latest=True):
    """A checkpoint of two files, as two ranks would have written it."""
    unfinished = begin(folder, tag)
    torch.save(torch.full((50,), float(value)), unfinished / "layer_00.pt")
    torch.save(torch.full((99,), float(value)), unfinished / "optimizer.pt")
    files = {"layer_00.pt": SavedFile.of(unfinished / "layer_00.pt", 0)}
    files["optimizer.pt"] = SavedFile.of(unfinished / "optimizer.pt", 1)
    write_manifest(unfinished, {}, files)
    finish(unfinished, is_latest=is_latest)


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


def cut_off_manifest(folder):
    os.truncate(folder / "two" / "omnibal.json", 20)


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


def test_without_the_file_latest_there_is_still_a_newest_one(folder):
    (folder / "latest").unlink()
    with pytest.raises(ConfigError, match=r"must hold a file 'latest'.*the newest whole one is two"):
        choose(folder, None)
    assert choose(folder, None, fall_back=True)[0] == "two"


@pytest.mark.parametrize("kill_at", ["checkpoint to its side", "new one to its name", "latest", None])
def test_a_save_under_an_old_name_leaves_a_whole_checkpoint_whenever_it_is_killed(folder, monkeypatch, kill_at):
    class Kill(BaseException):
        pass

    def rename(path, target, rename=Path.rename):
        moves = {"two": "checkpoint to its side", "two.unfinished": "new one to its name"}
        if moves.get(path.name) == kill_at:
            raise Kill
        return rename(path, target)

    def replace(path, target, replace=Path.replace):
        if kill_at == "latest":
            raise Kill
        return replace(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        patched.setattr(Path, "replace", replace)
        if kill_at is None:
            save(folder, "two", 3)
        else:
            with pytest.raises(Kill):
                save(folder, "two", 3)
    name, _ = choose(folder, None, fall_back=True)
    assert value_of(folder, name) == (3 if kill_at in ("latest", None) else 2)
    save(folder, "two", 4)
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "one", "two"]
    assert choose(folder, None) == ("two", "")
    assert value_of(folder, "two") == 4


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


@pytest.mark.parametrize("tag", ["", ".", "..", "a/b", "latest", "a.unfinished", "a.replaced"])
def test_names_that_are_none(tmp_path, tag):
    with pytest.raises(ConfigError, match="tag must be a name"):
        begin(tmp_path, tag)
    assert not [*tmp_path.iterdir()]


def test_only_the_newest_are_kept_and_the_latest(folder):
    save(folder, "three", 3, is_latest=False)
    keep_newest(folder, 1)
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "three", "two"]


def test_a_large_file_is_told_by_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_files, "_TAIL_BYTES", 1000)
    for number in range(2):
        torch.save(torch.full((9999,), float(number)), tmp_path / f"{number}.pt")
    first, second = (SavedFile.of(tmp_path / f"{number}.pt", 0) for number in range(2))
    assert first.size_bytes == second.size_bytes
    assert first != second


def test_export_names_the_weights_that_are_not_whole(folder, tmp_path):
    cut_off(folder)
    with pytest.raises(ConfigError, match=r"without config.json"):  # the optimizer's state is of no interest
        export(folder / "two", tmp_path / "exported")
    os.truncate(folder / "two" / "layer_00.pt", 10)
    with pytest.raises(ConfigError, match=r"where layer_00.pt \(written by rank 0\) has 10 bytes .* whole one is one:"):
        export(folder / "two", tmp_path / "exported")
