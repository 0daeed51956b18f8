"""The first items of webdataset shards and of standard input."""

import io
import json
import tarfile
from itertools import islice

import pytest
from PIL import Image

from omnibal.advise import measuring
from omnibal.advise.measuring import STANDARD_INPUT, head_rows, measure_rows
from omnibal.errors import DataError
from tests.advise.test_measuring import ASKED, FORMS, NO_VIDEOS, RULE, SAID, SHAREGPT


def picture(width, height):
    held = io.BytesIO()
    Image.new("RGB", (width, height)).save(held, "PNG")
    return held.getvalue()


def shard(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def measured(*paths, count=1000):
    return measure_rows(islice(head_rows(paths), count), RULE, str.__len__, "the shards", NO_VIDEOS)


def test_members_of_one_name_are_a_sample_and_shards_take_turns(tmp_path):
    record = json.dumps(SHAREGPT | {"image": "elsewhere.png", "width": 28, "height": 28}).encode()
    first = shard(
        tmp_path / "0.tar",
        {"a/0.json": record, "a/0.png": picture(280, 140), "a/1.txt": SAID.encode(), "a/1.left.png": picture(140, 140)},
    )
    second = shard(tmp_path / "1.tar", {f"{n}.json": json.dumps({"query": ASKED}).encode() for n in range(3)})
    found = measured(first, second)
    # By turns, while there are several; the pictures are those beside the record.
    assert found.lengths.vision_units.tolist() == [200, 0, 100, 0, 0]
    assert (len(found.lengths), found.problems) == (5, ())
    assert len(measured(first, second, count=2).lengths) == 2


def test_of_many_shards_some_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "MOST_OPEN", 2)
    one = {"0.json": json.dumps({"query": ASKED}).encode()}
    rows = [row for row, _ in head_rows([shard(tmp_path / f"{n}.tar.gz", one) for n in range(5)])]
    assert [(row.file.name, row.name) for row in rows] == [("0.tar.gz", "0"), ("3.tar.gz", "0")]


def test_lines_of_standard_input_are_items(tmp_path, monkeypatch):
    lines = [*[json.dumps(FORMS["stated"])] * 18, "", "{", "[]", json.dumps({"query": ASKED, "response": SAID})]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    found = measured(STANDARD_INPUT)
    assert found.lengths.vision_units.tolist() == [200] * 18 + [0]
    assert [problem.split(":")[0] for problem in found.problems] == [
        "standard input, line 20",
        "standard input, line 21",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(
        DataError, match="whose lengths can be told, got 0 of 0 that have none in the shards; it is empty"
    ):
        measured(STANDARD_INPUT)


def test_what_is_no_shard_is_refused(tmp_path):
    (tmp_path / "a.tar").write_text("no archive")
    with pytest.raises(DataError, match=r"data must be shards that can be read, got .*a\.tar"):
        measured(tmp_path / "a.tar")


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
@pytest.mark.parametrize("share", [0.1, 0.4, 0.7, 0.95])
def test_shards_that_are_cut_off_are_refused(tmp_path, name, share):
    path = tmp_path / name
    with tarfile.open(path, "w:gz" if name.endswith("gz") else "w") as tar:
        for number in range(30):
            content = json.dumps({"query": ASKED, "number": number}).encode()
            entry = tarfile.TarInfo(f"{number}.json")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content)) // 512 * 512 + 100])
    with pytest.raises(DataError, match=rf"data must be shards that can be read, got .*{name}: "):
        measured(path)


def test_a_record_of_a_shard_that_nests_too_deeply_is_a_problem(tmp_path):
    fine = {f"{n}.json": json.dumps({"query": ASKED}).encode() for n in range(20)}
    found = measured(shard(tmp_path / "a.tar", fine | {"deep.json": b"[" * 100_000}))
    assert found.problems == (f"{tmp_path}/a.tar, deep: entry must be readable JSON, got: brackets nest too deeply",)
