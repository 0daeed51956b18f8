"""Every file that is read, with every kind of damage: it is read, or refused in one of our errors."""

import io
import json
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from omnibal.advise.present import read_today
from omnibal.cli.options import expect
from omnibal.config import read_config
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.engine.checkpoint import MANIFEST, SavedFile, _read_layer, problem_of, read_manifest, write_manifest
from omnibal.errors import OmnibalError
from omnibal.formats.files import open_rows, stream_rows
from omnibal.formats.media import image_size, load_image
from omnibal.formats.shards import named_files
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from omnibal.profile.records import ModelProfile
from omnibal.report.training import read_metrics
from omnibal.vlm.weights import _opened, _read_index, load_data
from tests.pipeline.profiles import fixed_profile
from tests.report.test_training import logged

CONVERSATION = {
    "image": "a.png",
    "conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "."}],
}
PLAN = Plan(PackLimits(9, 4096), 8, Partition((0, 3, 5)), ("full", "full", "full", "none", "none"))


def rows_of(path):
    """All rows of annotations, by number and as a stream; rows that cannot be read say so by a ValueError."""
    rows = open_rows(path)
    for row in (rows[index] for index in range(len(rows))):
        read_row(row)
    for _, row in stream_rows(path):
        read_row(row)


def read_row(row):
    try:
        row.read()
    except ValueError as error:
        row.problem(error)


def save_tar(path):
    with tarfile.open(path, "w") as tar:
        for name, content in (("0.json", json.dumps(CONVERSATION).encode()), ("0.png", picture())):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def picture(kind="PNG"):
    buffer = io.BytesIO()
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(buffer, kind)
    return buffer.getvalue()


def save_checkpoint(path):
    folder = path.parent / "global_step1"
    folder.mkdir(exist_ok=True)
    (folder / "layer.pt").write_bytes(b"x")
    write_manifest(folder, {}, {"layer.pt": SavedFile.of(folder / "layer.pt", 0)})


def save_columns(path):
    SampleLengths([1, 5, 0], [300, 1400, 40]).save(path.parent)


def read_weights(path):
    with _opened(path) as file:
        return [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118  (no mapping)


def read_checkpoint(path):
    read_manifest(path.parent)
    problem_of(path.parent)


def read_image(path):
    """An image's size and pixels; what is wrong is a ValueError, which datasets turn into ours with file and line."""
    try:
        image_size(path)
        load_image(path)
    except ValueError as error:
        assert str(error).startswith("image must ")


# What is read: the file's name, how a good one is written, how it is read.
READERS = {
    "ds_config": ("x.json", lambda p: p.write_text('{"omnibal": {"run": {"output": "r"}}}'), read_config),
    "ds_config with comments": ("x.json", lambda p: p.write_text('// ours\n{"omnibal": {}}'), read_config),
    "plan": ("plan.json", PLAN.save, Plan.load),
    "profile": ("profile.json", fixed_profile([1, 2, 3]).save, ModelProfile.load),
    "lengths": ("lengths.json", save_columns, lambda p: SampleLengths.load(p.parent)),
    "a column of lengths": ("llm_tokens.npy", save_columns, lambda p: SampleLengths.load(p.parent)),
    "token lengths": (
        "a.json",
        lambda p: p.write_text('[{"vit_num": 1, "token_num": 9}]'),
        lambda p: SampleLengths.from_token_lengths([p]),
    ),
    "meta file": (
        "meta.json",
        lambda p: p.write_text('{"a": {"root": ".", "annotation": "a.jsonl"}}'),
        named_files,
    ),
    "annotations": ("a.jsonl", lambda p: p.write_text((json.dumps(CONVERSATION) + "\n") * 3), rows_of),
    "a list of annotations": ("a.json", lambda p: p.write_text(json.dumps([CONVERSATION] * 3)), rows_of),
    "tar shard": ("a.tar", save_tar, rows_of),
    "image": ("a.png", lambda p: p.write_bytes(picture()), read_image),
    "JPEG": ("a.jpg", lambda p: p.write_bytes(picture("JPEG")), read_image),
    "TIFF": ("a.tif", lambda p: p.write_bytes(picture("TIFF")), read_image),
    "log of a run": ("metrics.jsonl", lambda p: logged(p, 2), read_metrics),
    "manifest of a checkpoint": (f"global_step1/{MANIFEST}", lambda p: save_checkpoint(p.parent), read_checkpoint),
    "layer of a checkpoint": ("layer.pt", lambda p: torch.save({"a": torch.ones(3)}, p), _read_layer),
    "weights": ("a.safetensors", lambda p: save_file({"a": torch.ones(3)}, p), read_weights),
    "index of weights": ("i.json", lambda p: p.write_text('{"weight_map": {"a": "b.safetensors"}}'), _read_index),
    "setting of today": (
        "a.yaml",
        lambda p: p.write_text("per_device_train_batch_size: 4\n"),
        lambda p: read_today(str(p)),
    ),
    "what a command is given": ("a.json", PLAN.save, lambda p: expect("source", p, ("plan",))),
}  # fmt: skip


class Code:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, (Code.mark,)


DAMAGES = {
    "cut in half": lambda content: content[: len(content) // 2],
    "the last byte is missing": lambda content: content[:-1],
    "empty": lambda content: b"",
    "null": lambda content: b"null",
    "a list": lambda content: b"[1]",
    "an object": lambda content: b"{}",
    "a number": lambda content: b"7",
    "a huge number": lambda content: b"9" * 5000,
    "not a number": lambda content: content.replace(b"1", b"NaN"),
    "numbers below zero": lambda content: content.replace(b": 1", b": -1").replace(b"[1", b"[-1"),
    "huge numbers": lambda content: content.replace(b": 1", b": 1" + b"0" * 30),
    "words in the place of numbers": lambda content: content.replace(b": 1", b': "one"'),
    "a version that is yet to come": lambda content: content.replace(b'"version": ', b'"version": 9').replace(
        b'"format": ', b'"format": 9'
    ),
    "binary": lambda content: bytes(range(256)) * 8,
    "deep brackets": lambda content: b"[" * 100_000,
    "markup": lambda content: content.replace(b'"a"', b'"[/red]<script>a</script>"'),
    "paths that climb": lambda content: content.replace(b"b.safetensors", b"../../b.safetensors").replace(
        b"layer.pt", b"../../../etc/shadow"
    ),
    "a pickle": lambda content: pickle.dumps(Code()),
    "a torch file with an object": lambda content: _saved(Code()),
}


def _saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def refused_or_read(read, path):
    """What is not read is refused in an error of ours."""
    try:
        return read(path)
    except OmnibalError as error:
        assert str(error)
        return error


@pytest.mark.parametrize("reader", READERS)
def test_each_file_with_each_damage(tmp_path, reader):
    name, write, read = READERS[reader]
    Code.mark = str(tmp_path / "ran")
    for damage, change in DAMAGES.items():
        folder = tmp_path / damage
        folder.mkdir()
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        write(path)
        if damage == "cut in half":
            assert not isinstance(refused_or_read(read, path), OmnibalError), f"a good {reader} is refused"
        path.write_bytes(change(path.read_bytes()))
        refused_or_read(read, path)
        assert not Path(Code.mark).exists(), f"code of a {reader} has run: {damage}"


@pytest.mark.parametrize("reader", READERS)
def test_each_file_that_is_none(tmp_path, reader):
    """Missing, a folder, a link to itself, a link to nothing."""
    name, write, read = READERS[reader]
    for kind in ("missing", "folder", "loop", "nothing"):
        path = tmp_path / kind / name
        path.parent.mkdir(parents=True)
        write(path)
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind != "missing":
            path.symlink_to(path if kind == "loop" else "nowhere")
        refused_or_read(read, path)


def test_an_index_names_files_beside_it_alone(tmp_path):
    (tmp_path / "i.json").write_text('{"weight_map": {"a": "../b.safetensors"}}')
    with pytest.raises(OmnibalError, match=r"i.json must name files beside it, got '../b.safetensors'"):
        _read_index(tmp_path / "i.json")


def test_code_in_checkpoints_is_named_and_does_not_run(tmp_path):
    Code.mark = str(tmp_path / "ran")
    torch.save(Code(), tmp_path / "a.pt")
    for read in (load_data, _read_layer):
        with pytest.raises(OmnibalError, match=r"a\.pt must .*mkdir"):
            read(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_readers_fuzzed(tmp_path, reader):
    """100,000 cases in all."""
    name, write, read = READERS[reader]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    write(path)
    good = path.read_bytes()
    changes = st.lists(st.tuples(st.integers(0), st.integers(0, 3), st.binary(max_size=4)), max_size=4)

    @given(changes)
    @settings(
        max_examples=-(-100_000 // len(READERS)), deadline=None, suppress_health_check=[*HealthCheck], derandomize=True
    )
    def fuzz(changes):
        content = bytearray(good)
        for place, taken, put in changes:
            at = place % (len(content) + 1)
            content[at : at + taken] = put
        path.write_bytes(content)
        refused_or_read(read, path)

    fuzz()
