"""Which members of a shard, and which files of a folder, are data: system files are none, and no picture is lost."""

import gzip
import io
import json
import tarfile

import pytest
import torch
from PIL import Image

from omnibal.advise.measuring import measure
from omnibal.advise.models import read_model
from omnibal.advise.present import Present
from omnibal.errors import DataError
from omnibal.formats.conversations import open_dataset, open_streams

MARKED = [{"from": "human", "value": "<image>\nWhat colour?"}, {"from": "gpt", "value": "red"}]
UNMARKED = [{"from": "human", "value": "What colour?"}, {"from": "gpt", "value": "red"}]
DOUBLE = b"\0\5\26\7\0\2\0\0Mac OS X        " + bytes(120)
SYSTEM = (
    *("{folder}._{base}", "{folder}.DS_Store", "__MACOSX/{folder}._{base}", "__MACOSX/{folder}{base}"),
    *("{folder}Thumbs.db", "{folder}desktop.ini", "{folder}PaxHeaders.12/{base}", "{folder}@eaDir/{base}"),
    *("./{folder}._{base}", "{folder}.ipynb_checkpoints/{base}", ".Trashes/501/{base}"),
)


def shard(path, members, *, beside=(), **options):
    """A tar of members, before and behind each of which those with the names ``beside`` stand."""
    with tarfile.open(path, "w", **options) as tar:
        for name, content in members:
            folder, slash, base = name.rpartition("/")
            extra = [(each.format(folder=folder + slash, base=base), DOUBLE) for each in beside]
            for member, held in (*extra, (name, content), *extra):
                entry = tarfile.TarInfo(member)
                entry.size, entry.pax_headers = len(held), {"LIBARCHIVE.xattr": "x"}
                tar.addfile(entry, io.BytesIO(held))
    return path


def picture(kind="png", shade=90):
    file = io.BytesIO()
    Image.new("RGB", (60, 40), (shade, 90, 30)).save(file, kind)
    return file.getvalue()


def samples(turns, *, folder="", order=("png", "json"), **record):
    files = {"json": json.dumps({"conversations": turns, **record}).encode()}
    for number in range(3):
        for kind in order:
            yield f"{folder}{number:04}.{kind}", files.get(kind) or picture(shade=40 * number)


@pytest.mark.parametrize("system", SYSTEM)
def test_system_files_are_no_members(model_folder, tmp_path, system):
    for folder, order, turns in (("", ("json", "png"), UNMARKED), ("a/b/", ("png", "json"), MARKED)):
        members = [*samples(turns, folder=folder, order=order)]
        plain = open_dataset(shard(tmp_path / "plain.tar", members), model_folder)
        path = shard(tmp_path / "mac.tar", members, beside=[system], format=tarfile.PAX_FORMAT)
        for broken in ("error", "skip"):
            dataset = open_dataset(path, model_folder, broken=broken)
            assert dataset.lengths().content_hash == plain.lengths().content_hash
            assert all(torch.equal(dataset[i]["pixel_values"], plain[i]["pixel_values"]) for i in range(3))
        (tmp_path / "mac.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
        for name in ("mac.tar", "mac.tar.gz"):
            (stream,) = open_streams(tmp_path / name, model_folder).values()
            assert [len(item["pixel_values"]) for item in stream] == plain.lengths().vision_units.tolist()
        found = measure([path], read_model(str(model_folder)), Present()).lengths
        assert found.llm_tokens.tolist() == plain.lengths().llm_tokens.tolist()


@pytest.mark.parametrize("kind", ["a.tar", "a.jsonl"])
def test_system_files_of_a_folder_are_no_data(model_folder, tmp_path, kind):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("._a.parquet", f"._{kind}", ".hidden.jsonl"):
        (folder / name).write_bytes(DOUBLE)
    if kind == "a.tar":
        shard(folder / kind, samples(MARKED))
    else:
        (folder / kind).write_text(json.dumps({"conversations": UNMARKED}) + "\n")
    assert len(open_dataset(folder, model_folder).lengths()) == (3 if kind == "a.tar" else 1)


@pytest.mark.parametrize(
    ("turns", "record"),
    [
        (MARKED, {}),
        (UNMARKED, {"image": "0.png"}),
        (UNMARKED, {"img_path": "0.png"}),
        (UNMARKED, {"picture": {"bytes": None, "path": "0.png"}}),
        (UNMARKED, {"photo_urls": ["https://x.org/0.jpg"]}),
    ],
)
def test_no_sample_is_trained_without_its_picture(model_folder, tmp_path, turns, record):
    path = shard(tmp_path / "a.tar", samples(turns, order=("json",), **record))
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"conversations": turns, **record}) + "\n")
    for place in (path, lines):
        with pytest.raises(DataError, match="items cannot be used"):
            open_dataset(place, model_folder).lengths()
        with pytest.raises(DataError, match="at least one usable"):
            open_dataset(place, model_folder, broken="skip")
        (stream,) = open_streams(place, model_folder).values()
        with pytest.raises(DataError):
            list(stream)


def test_fewer_pictures_than_a_record_names_are_refused(model_folder, tmp_path):
    path = shard(tmp_path / "a.tar", samples(UNMARKED, images=["0.png", "1.png"]))
    with pytest.raises(DataError, match="sample must hold each image that it names, got 1 of 2"):
        open_dataset(path, model_folder).lengths()


def test_text_alone_is_a_sample(model_folder, tmp_path):
    path = shard(tmp_path / "a.tar", samples(UNMARKED, order=("json",), image_width=60, photo_caption="a red hat"))
    assert open_dataset(path, model_folder).lengths().vision_units.tolist() == [0, 0, 0]


def test_pictures_of_kinds_that_cannot_be_read_are_broken(model_folder, tmp_path):
    path = shard(tmp_path / "a.tar", samples(UNMARKED, order=("heic", "json")))
    assert open_dataset(path, model_folder).lengths().vision_units.all()  # by its content it is a PNG
    members = [
        (name, b"ftypheic" * 9 if name.endswith("heic") else content)
        for name, content in samples(UNMARKED, order=("heic", "json"))
    ]
    with pytest.raises(DataError, match=r"0000: image must have a readable header"):
        open_dataset(shard(tmp_path / "b.tar", members), model_folder).lengths()


def test_members_of_a_sample_that_stand_apart_are_refused(model_folder, tmp_path):
    members = sorted(samples(UNMARKED), key=lambda member: member[0].rpartition(".")[2])
    path = shard(tmp_path / "a.tar", members)
    message = r"stand side by side in a shard, got 0000\.json and 0000\.png apart in .*a\.tar; `tar --sort=name`"
    for broken in ("error", "skip"):
        with pytest.raises(DataError, match=message):
            open_dataset(path, model_folder, broken=broken)
        (stream,) = open_streams(path, model_folder, broken=broken).values()
        with pytest.raises(DataError, match=message):
            list(stream)
    twice = [*samples(UNMARKED), *samples(UNMARKED)]  # whole samples of the same names are samples
    assert len(open_dataset(shard(tmp_path / "b.tar", twice), model_folder).lengths()) == 6
