import json
import shlex
from pathlib import Path


def test_it_says_where_everything_is(omnibal, tmp_path):
    written = json.loads(omnibal("demo", tmp_path / "data", "--samples", 40, "--held-out", 20, "--json").stdout)
    assert 0 < written.pop("chance") < 1
    files = [path for value in written.values() for path in ([value] if isinstance(value, str) else value)]
    assert all(Path(path).exists() and Path(path).is_relative_to(tmp_path / "data") for path in files)


def test_the_next_command_can_be_pasted(omnibal, tmp_path):
    line = omnibal("demo", tmp_path / "data", "--samples", 20, "--held-out", 20).stdout.splitlines()[-1]
    omnibal(*shlex.split(line.removeprefix("next: omnibal ")))
    assert (tmp_path / "data" / "lengths" / "lengths.json").is_file()


def test_a_file_is_not_a_folder(omnibal, tmp_path):
    (tmp_path / "data").write_text("mine")
    result = omnibal("demo", tmp_path / "data", exit_code=2)
    assert "folder must be a folder, got" in result.stderr
    assert (tmp_path / "data").read_text() == "mine"


def test_a_folder_with_something_in_it_is_not_written_into(refusal, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    line = refusal("demo", tmp_path)
    assert line == f"folder must be empty or not exist yet, got {tmp_path} with mine.txt in it"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
