import json
from pathlib import Path


def test_it_says_where_everything_is(omnibal, tmp_path):
    written = json.loads(omnibal("demo", tmp_path / "data", "--samples", 40, "--held-out", 20, "--json").stdout)
    files = [path for value in written.values() for path in ([value] if isinstance(value, str) else value)]
    assert all(Path(path).exists() and Path(path).is_relative_to(tmp_path / "data") for path in files)


def test_a_file_is_not_a_folder(omnibal, tmp_path):
    (tmp_path / "data").write_text("mine")
    result = omnibal("demo", tmp_path / "data", exit_code=2)
    assert "folder must be a folder or not exist yet" in result.stderr
    assert (tmp_path / "data").read_text() == "mine"
