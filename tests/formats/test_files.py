import json
import os
import pickle
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal.errors import DataError
from omnibal.formats import rows
from omnibal.formats.files import open_rows


def write(path, content):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n \n"])
def test_lines_are_read_by_number_whatever_ends_the_file(tmp_path, end):
    lines = open_rows(write(tmp_path / "a.jsonl", b'{"a": 1}\r\n{"a": "\xc3\xa4"}\n{}' + end))
    assert [row.read() for row in lines] == [{"a": 1}, {"a": "ä"}, {}]
    assert lines[1].number == 2


def test_lines_may_span_the_blocks_of_a_read(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "BLOCK_BYTES", 5)
    lines = open_rows(write(tmp_path / "a.jsonl", b'{"a": 1}\n\n{"b": 22222}\n{}\n'))
    assert [len(lines), *(lines[index].read() for index in (0, 2, 3))] == [4, {"a": 1}, {"b": 22222}, {}]
    with pytest.raises(ValueError, match="entry must be JSON"):
        lines[1].read()


def test_pickles_without_its_content(tmp_path):
    lines = open_rows(write(tmp_path / "a.jsonl", b'{"a": "' + b"x" * 10_000 + b'"}\n'))
    packed = pickle.dumps(lines)
    assert len(packed) < 1000
    assert pickle.loads(packed)[0].read() == lines[0].read()


@pytest.mark.parametrize("line", [b"{broken", b"[1, 2]", b'"text"', b'{"a": "\xff"}'])
def test_a_broken_line_is_refused_when_it_is_read(tmp_path, line):
    lines = open_rows(write(tmp_path / "a.jsonl", b"{}\n" + line + b"\n{}\n"))
    assert lines[0].read() == lines[2].read() == {}
    with pytest.raises(ValueError, match="entry must be"):
        lines[1].read()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": ', "entry must be JSON, got Expecting value at character 7"),
        (b"", "entry must be JSON, got an empty line"),
        (b'{"a": "\xe9"}', r"entry must be UTF-8, got b'\\xe9'"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(tmp_path, line, reason):
    with pytest.raises(DataError, match=reason):
        open_rows(write(tmp_path / "a.jsonl", line + b"\n{}\n"))[0].read()


def test_a_missing_or_empty_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.jsonl"):
        open_rows(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match=r"at least one entry, got none in .*empty\.jsonl"):
        open_rows(write(tmp_path / "empty.jsonl", b"\n \n"))


PRETTY = b"""
[
  {"id": 1, "text": "] } , \\\\ \\" [ {"},
  {
    "id": 2, "list": [{"a": [1, 2]}, []]
  }, {"id": 3},

  {"id": 4}
]
"""


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 20])
def test_a_json_array_is_read_entry_by_entry_whatever_the_blocks(tmp_path, monkeypatch, block):
    monkeypatch.setattr(rows, "BLOCK_BYTES", block)
    read = open_rows(write(tmp_path / "a.json", PRETTY.lstrip()))
    assert [row.read() for row in read] == json.loads(PRETTY)
    assert [row.number for row in read] == [2, 3, 5, 7]


JSON = st.recursive(
    st.none() | st.integers(0, 99) | st.text('a"\\\\[{,}] \n', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('b"\\\\,]', max_size=2), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(JSON, max_size=5), st.sampled_from([None, 0, 2]), st.integers(1, 20))
def test_entries_of_any_array_are_found_whatever_the_blocks(entries, indent, size):
    text = json.dumps(entries, indent=indent).encode()
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(rows, "BLOCK_BYTES", size)
        found, _ = rows.scan_json(write(Path(folder) / "a.json", text))
    assert [json.loads(text[start:stop]) for start, stop in zip(found.starts, found.stops, strict=True)] == entries
    assert found.lines.tolist() == [text[:start].count(b"\n") + 1 for start in found.starts]


def test_what_stands_in_an_array_may_be_any_json_until_it_is_read(tmp_path):
    read = open_rows(write(tmp_path / "a.json", b'[{"a": 1}, 2, "x,]y", {"b": null}]'))
    assert len(read) == 4
    assert [read[0].read(), read[3].read()] == [{"a": 1}, {"b": None}]
    for index in (1, 2):
        with pytest.raises(ValueError, match="entry must be"):
            read[index].read()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'[{"a": 1},\n {"a": "', "Unterminated string"),
        (b'[{"a": 1},\n {broken}]', "Expecting property name"),
        (b'[{"a": 1}\n', "Expecting ',' or ']'"),
        (b'[{"a": 1}]\n{"a": 2}\n', "The array has ended, and more follows"),
    ],
)
def test_a_damaged_array_is_refused_with_its_line(tmp_path, content, problem):
    with pytest.raises(DataError, match=rf"JSON array, got .*a\.json, line 2: {problem}"):
        open_rows(write(tmp_path / "a.json", content))


def test_an_array_that_nests_too_deeply_is_refused(tmp_path):
    with pytest.raises(DataError, match="nest too deeply"):
        open_rows(write(tmp_path / "a.json", b"[" * 200_000))


@pytest.mark.parametrize("content", [b'[{"a": 1}, {"b": 2}]', b'{"a": 1}\n{"b": 2}\n'])
def test_a_byte_order_mark_is_no_entry(tmp_path, content):
    read = open_rows(write(tmp_path / "a.json", b"\xef\xbb\xbf" + content))
    assert [row.read() for row in read] == [{"a": 1}, {"b": 2}]


def test_an_empty_array_is_refused(tmp_path):
    with pytest.raises(DataError, match="at least one entry"):
        open_rows(write(tmp_path / "a.json", b"[ ]\n"))


def test_hash_tells_contents_apart(tmp_path):
    first, same, other = (
        open_rows(write(tmp_path / name, content)).content_hash
        for name, content in (("a", b"{}\n"), ("b", b"{}\n"), ("c", b"{ }\n"))
    )
    assert first == same != other


@pytest.fixture
def scans(monkeypatch):
    """The files that are read from end to end."""
    found, scan = [], rows.scan_json
    monkeypatch.setattr(rows, "scan_json", lambda path: found.append(path) or scan(path))
    return found


@pytest.mark.parametrize("content", [b'[{"a": 1},\n {"b": 2}]', b'{"a": 1}\n{"b": 2}\n'])
def test_an_index_is_found_again_and_mapped(tmp_path, scans, content):
    path, index = write(tmp_path / "a", content), tmp_path / "index"
    first, again = open_rows(path, index), open_rows(path, index)
    assert scans == [path]
    assert [again[0].read(), again[1].read(), again[1].number, len(again)] == [{"a": 1}, {"b": 2}, 2, 2]
    assert again.content_hash == first.content_hash == open_rows(path).content_hash
    assert isinstance(again._entries.starts.base.base, np.memmap)
    assert isinstance(first._entries.starts.base.base, np.memmap)


def test_a_file_that_has_changed_is_indexed_anew(tmp_path, scans):
    path, index = write(tmp_path / "a", b'{"a": 1}\n'), tmp_path / "index"
    before = open_rows(path, index)
    write(path, b'{"b": 2}\n')
    os.utime(path, ns=(0, 0))
    after = open_rows(path, index)
    assert len(scans) == 2
    assert after[0].read() == {"b": 2}
    assert before.content_hash != after.content_hash


@pytest.mark.parametrize("name", ["entries.npy", "index.json"])
def test_an_index_that_cannot_be_read_is_made_anew(tmp_path, scans, caplog, name):
    path, index = write(tmp_path / "a", b'{"a": 1}\n'), tmp_path / "index"
    open_rows(path, index)
    (kept,) = index.iterdir()
    (kept / name).write_bytes(b"{")
    assert open_rows(path, index)[0].read() == {"a": 1}
    assert "indexed anew" in caplog.text
    open_rows(path, index)
    assert len(scans) == 2
    assert [*index.iterdir()] == [kept]


def test_places_that_are_kept_are_not_pickled(tmp_path):
    path, index = write(tmp_path / "a", b"{}\n" * 1000), tmp_path / "index"
    packed = pickle.dumps(open_rows(path, index))
    assert len(packed) < 1000
    again = pickle.loads(packed)
    assert [len(again), again[999].read(), again[999].number] == [1000, {}, 1000]
    shutil.rmtree(index)
    with pytest.raises(DataError, match=r"index of .* must stay while samples are read"):
        pickle.loads(packed)


def test_an_empty_file_leaves_no_index(tmp_path):
    with pytest.raises(DataError, match="at least one entry"):
        open_rows(write(tmp_path / "a", b"\n"), tmp_path / "index")
    assert not (tmp_path / "index").exists()
