"""Lengths and training agree on what can be used: files are decoded when lengths are measured, each once."""

import json
import re
import struct
import zlib

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from omnibal.errors import DataError
from omnibal.formats import conversations
from omnibal.formats.conversations import open_dataset
from omnibal.formats.media import image_size, load_image, load_sound, sound_header
from omnibal.formats.model_format import ModelFormat
from tests.families.models import save_folder
from tests.families.videos import make_clip
from tests.integrations.sounds import save_sound_folder

ANSWERED = {"role": "assistant", "content": "red"}


def write(folder, kind, *files):
    """A record for each file, which stands before its question."""
    asked = {"role": "user", "content": f"<{kind}>What is it?"}
    records = [{"messages": [asked, ANSWERED], f"{kind}s": [name]} for name in files]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "data.jsonl"


def noise(path, width=64, height=48, **options):
    values = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(values).save(path, **options)


def halved(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scrambled(path):
    content = bytearray(path.read_bytes())
    content[200:-20] = bytes(len(content) - 220)
    path.write_bytes(content)


@pytest.fixture
def pictures(tmp_path):
    """Good ones, some that are cut, and one whose pixels are damaged."""
    for name in ("a.png", "b.jpg", "cut.jpg", "cut.png", "cut.webp", "cut.tif", "cut.gif", "cut.bmp", "damaged.png"):
        noise(tmp_path / name)
        if name.startswith("cut"):
            halved(tmp_path / name)
    scrambled(tmp_path / "damaged.png")
    return write(tmp_path, "image", *sorted(path.name for path in tmp_path.iterdir()))


def check_agreement(path, model, num_good, **options):
    """Whether lengths leave out exactly what cannot be read, and training reads the rest as lengths say."""
    headers = open_dataset(path, model, decode=False, **options)
    readable = []
    for index in range(len(headers)):
        try:
            headers[index]
            readable.append(index)
        except DataError:
            assert headers.row_of(index).number
    left = open_dataset(path, model, broken="skip", **options)
    whole, lengths = [left.row_of(index).number for index in range(len(left))], left.lengths()
    assert whole == [headers.row_of(index).number for index in readable]
    assert len(whole) == num_good < len(headers)
    for index in range(len(left)):
        item = left[index]
        assert len(item["input_ids"]) == lengths.llm_tokens[index]
        assert torch.equal(item["input_ids"], left.text(index)["input_ids"])
    with pytest.raises(DataError, match=rf"{len(left.skipped)} of {len(headers)} items cannot be used"):
        open_dataset(path, model, **options).lengths()
    return left


def test_pictures_that_cannot_be_decoded_are_found_by_lengths(pictures, model_folder):
    left = check_agreement(pictures, model_folder, 2)
    assert all("image must " in problem.reason for problem in left.skipped)


def test_clips_with_fewer_frames_than_stated_are_found_by_lengths(model_folder, tmp_path):
    save_folder("qwen3_vl", tmp_path / "model", model_folder)
    make_clip(tmp_path / "a.mp4", 64, 48, 21, 10)
    make_clip(tmp_path / "counts.avi", 64, 48, 30, 10)
    raw = bytearray((tmp_path / "counts.avi").read_bytes())
    for mark, place in ((b"avih", 24), (b"strh", 40)):
        at = raw.index(mark) + place
        raw[at : at + 4] = struct.pack("<I", 37)
    (tmp_path / "counts.avi").write_bytes(raw)
    make_clip(tmp_path / "cut.webm", 64, 48, 30, 10)
    halved(tmp_path / "cut.webm")
    left = check_agreement(write(tmp_path, "video", "a.mp4", "counts.avi", "cut.webm"), tmp_path / "model", 2)
    assert "video must hold frame 36, as its header says, got fewer in" in left.skipped[0].reason


def test_sounds_that_cannot_be_decoded_are_found_by_lengths(model_folder, tmp_path):
    model = tmp_path / "model"
    save_sound_folder("qwen2_audio", model, model_folder)
    names = ("a.wav", "b.flac", "cut.flac", "damaged.ogg", "c.wav")
    for name in names:
        soundfile.write(tmp_path / name, 0.1 * np.random.default_rng(0).standard_normal(16000), 16000)
    halved(tmp_path / "cut.flac")
    scrambled(tmp_path / "damaged.ogg")
    halved(tmp_path / "c.wav")  # whose header counts what there is
    assert sound_header(tmp_path / "c.wav").samples == len(load_sound(tmp_path / "c.wav", 16000)) < 8100
    left = check_agreement(write(tmp_path, "audio", *names), model, 3)
    assert [re.search(r"sound must (.*), got", problem.reason)[1] for problem in left.skipped] == [
        "be decodable",
        "have a readable header",
    ]


def png_chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def turned_notes():
    """Chunks that turn a picture by a quarter, as cameras, ImageMagick and Photoshop write them."""
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = exif.tobytes()
    profile = f"\nexif\n{len(plain):8}\n{plain.hex()}\n".encode()
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    return {
        "eXIf": png_chunk(b"eXIf", plain.removeprefix(b"Exif\0\0")),
        "profile": png_chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(profile)),
        "text": png_chunk(b"tEXt", b"Raw profile type exif\0" + profile),
        "xmp": png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp),
        "none": png_chunk(b"tEXt", b"date:create\x002026"),
    }


@pytest.mark.parametrize("note", turned_notes())
def test_a_png_is_turned_by_what_stands_before_its_pixels(tmp_path, monkeypatch, note):
    noise(tmp_path / "a.png", 96, 32)
    content, mark = (tmp_path / "a.png").read_bytes(), turned_notes()[note]
    at = content.index(b"IDAT") - 4
    (tmp_path / "a.png").write_bytes(content[:at] + mark + content[at:])
    expected = (96, 32) if note == "none" else (32, 96)
    assert load_image(tmp_path / "a.png").size == expected
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", None)
    assert image_size(tmp_path / "a.png") == image_size((tmp_path / "a.png").read_bytes()) == expected


def test_a_png_that_is_turned_behind_its_pixels_is_refused(model_folder, tmp_path):
    noise(tmp_path / "a.png", 180, 50)
    content = (tmp_path / "a.png").read_bytes()
    at = content.rindex(b"IEND") - 4
    (tmp_path / "a.png").write_bytes(content[:at] + turned_notes()["eXIf"] + content[at:])
    with pytest.raises(DataError, match="image must decode to the size that its header says"):
        open_dataset(write(tmp_path, "image", "a.png"), model_folder).lengths()


@pytest.fixture
def decoded(monkeypatch):
    """The samples that are decoded."""
    seen, check = [], ModelFormat.check_decodes
    monkeypatch.setattr(
        ModelFormat, "check_decodes", lambda self, prepared: seen.append(prepared.images.files) or check(self, prepared)
    )
    return seen


@pytest.fixture
def many(tmp_path):
    """More pictures than are measured again before kept lengths are believed."""
    for number in range(90):
        Image.new("RGB", (30, 20), (number, 0, 0)).save(tmp_path / f"{number}.png")
    return write(tmp_path, "image", *(f"{number}.png" for number in range(90)))


def test_kept_lengths_are_believed_if_a_few_files_decode_again(many, model_folder, tmp_path, decoded):
    def opened(**options):
        return open_dataset(many, model_folder, cache=tmp_path / "cache", processes=1, **options)

    halved(tmp_path / "7.png")
    left = opened(broken="skip")
    assert [problem.line for problem in left.skipped] == [8] and len(decoded) == 90
    decoded.clear()
    assert opened(broken="skip").skipped == left.skipped
    assert len(decoded) == 64 + 1
    Image.new("RGB", (30, 20)).save(tmp_path / "7.png")
    assert len(opened(broken="skip")) == 90


def test_large_datasets_are_decoded_if_asked_and_small_ones_unless_told_not_to(
    many, model_folder, tmp_path, decoded, monkeypatch
):
    monkeypatch.setattr(conversations, "DECODED_ITEMS", 89)
    for options, count in (({}, 0), ({"decode": True}, 90)):
        open_dataset(many, model_folder, processes=1, **options).lengths()
        assert len(decoded) == count
    monkeypatch.setattr(conversations, "DECODED_ITEMS", 90)
    decoded.clear()
    for options, count in (({"decode": False}, 0), ({}, 90)):
        open_dataset(many, model_folder, processes=1, **options).lengths()
        assert len(decoded) == count


def test_processes_decode_side_by_side_and_show_how_far_they_are(many, model_folder, tmp_path, capsys):
    halved(tmp_path / "7.png")
    left = open_dataset(many, model_folder, processes=2, broken="skip")
    assert [problem.line for problem in left.skipped] == [8]
    assert re.search(r"decoding: 100%\|.* 90/90", capsys.readouterr().err)
