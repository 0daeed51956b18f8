"""Pictures, videos and sounds that stand in the data themselves, as chat exports and tables have them."""

import io
import json
from base64 import b64encode, encodebytes, urlsafe_b64encode

import datasets
import numpy as np
import pytest
import soundfile
import torch
from datasets import Dataset
from PIL import Image

from omnibal.advise.measuring import measure
from omnibal.advise.models import read_model
from omnibal.advise.present import Present
from omnibal.errors import DataError
from omnibal.formats.chat import read_conversation
from omnibal.formats.conversations import open_dataset, open_streams
from tests.families.videos import make_clip

ASKED = [{"from": "human", "value": "<image>\nWhat is red?"}, {"from": "gpt", "value": "the ball"}]
SAID = {"role": "assistant", "content": "the ball"}


def content(kind, size=(120, 50)):
    file = io.BytesIO()
    values = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(values if max(size) > 60 else values // 200 * 200).save(file, kind)
    return file.getvalue()


def asked(part):
    """Messages with a part in place of the picture."""
    return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "\nWhat is red?"}]}, SAID]}


def uri(raw, kind="png"):
    return f"data:image/{kind};base64,{b64encode(raw).decode()}"


FORMS = {
    "data URI": lambda raw: {"conversations": ASKED, "image": uri(raw)},
    "URI, odd letters": lambda raw: {"conversations": ASKED, "image": "DATA:image/png;a=b;BASE64," + uri(raw)[22:]},
    "list of URIs": lambda raw: {"conversations": ASKED, "images": [uri(raw)]},
    "base64": lambda raw: {"conversations": ASKED, "image": b64encode(raw).decode()},
    "base64 with lines": lambda raw: {"conversations": ASKED, "image": encodebytes(raw).decode()},
    "base64 of addresses": lambda raw: {"conversations": ASKED, "image": urlsafe_b64encode(raw).decode().rstrip("=")},
    "bytes as base64": lambda raw: {
        "conversations": ASKED, "images": [{"bytes": b64encode(raw).decode(), "path": None}],
    },
    "key base64": lambda raw: {"conversations": ASKED, "image": {"base64": b64encode(raw).decode()}},
    "in the text": lambda raw: {
        "messages": [{"role": "user", "content": f"<img>{uri(raw)}</img>\nWhat is red?"}, SAID],
    },
    "image_url": lambda raw: asked({"type": "image_url", "image_url": {"url": uri(raw), "detail": "low"}}),
    "image_url, a text": lambda raw: asked({"type": "image_url", "image_url": uri(raw)}),
    "input_image": lambda raw: asked({"type": "input_image", "image_url": uri(raw)}),
    "image": lambda raw: asked({"type": "image", "image": uri(raw)}),
    "plain image": lambda raw: asked({"type": "image", "image": b64encode(raw).decode()}),
    "url": lambda raw: asked({"type": "image", "url": uri(raw)}),
    "key base64 of a part": lambda raw: asked({"type": "image", "base64": b64encode(raw).decode()}),
    "source": lambda raw: asked({
        "type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64encode(raw).decode()},
    }),
    "ShareGPT with an address": lambda raw: {
        "conversations": [{"from": "human", "value": [{"type": "image_url", "image_url": {"url": uri(raw)}},
                                                      {"type": "text", "text": "\nWhat is red?"}]}, ASKED[1]],
    },
}  # fmt: skip


@pytest.fixture
def expected(model_folder, tmp_path):
    def of(raw):
        (tmp_path / "expected.png").write_bytes(raw)
        record = {"conversations": ASKED, "image": "expected.png"}
        (tmp_path / "expected.jsonl").write_text(json.dumps(record))
        return open_dataset(tmp_path / "expected.jsonl", model_folder)[0]

    return of


def check(path, model, expected, **options):
    dataset = open_dataset(path, model, **options)
    lengths = dataset.lengths()
    assert all(torch.equal(dataset[0][name], value) for name, value in expected.items())
    assert torch.equal(dataset.text(0)["input_ids"], expected["input_ids"])
    assert lengths.vision_units.tolist() == [len(expected["pixel_values"])]
    assert lengths.llm_tokens.tolist() == [len(expected["input_ids"])]
    if not isinstance(path, Dataset):
        (item,) = next(iter(open_streams(path, model, **options).values()))
        assert all(torch.equal(item[name], value) for name, value in expected.items())
        found = measure([path], read_model(str(model)), Present()).lengths
        assert found.llm_tokens.tolist() == lengths.llm_tokens.tolist()


@pytest.mark.parametrize(
    ("kind", "size"), [("png", (120, 50)), ("jpeg", (120, 50)), ("gif", (20, 12)), ("webp", (40, 9))]
)
@pytest.mark.parametrize("form", FORMS)
def test_pictures_in_the_data_are_read_as_files_are(model_folder, tmp_path, expected, form, kind, size):
    raw = content(kind, size)
    (tmp_path / "a.jsonl").write_text(json.dumps(FORMS[form](raw)) + "\n")
    check(tmp_path / "a.jsonl", model_folder, expected(raw))


@pytest.mark.parametrize("column", ["struct", "struct of base64", "base64", "URI", "bytes", "list of structs", "part"])
def test_tables_hold_pictures_in_any_of_these_forms(model_folder, tmp_path, monkeypatch, expected, column):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    raw = content("png")
    given = {
        "struct": {"image": {"bytes": raw, "path": "a.png"}},
        "struct of base64": {"image": {"bytes": b64encode(raw).decode(), "path": None}},
        "base64": {"image": b64encode(raw).decode()},
        "URI": {"images": [uri(raw)]},
        "bytes": {"image": raw},
        "list of structs": {"images": [{"bytes": raw, "path": None}]},
        "part": {},
    }[column]
    record = {"conversations": ASKED, **given}
    if column == "part":
        parts = [
            {"type": "image_url", "text": None, "image_url": {"url": uri(raw)}},
            {"type": "text", "text": "\nWhat is red?", "image_url": None},
        ]
        answer = [{"type": "text", "text": "the ball", "image_url": None}]
        record = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}
    table = Dataset.from_list([record])
    table.to_parquet(tmp_path / "a.parquet")
    check(tmp_path / "a.parquet", model_folder, expected(raw))
    check(table, model_folder, expected(raw))


def test_videos_and_sounds_stand_in_the_data_too(tmp_path):
    clip = make_clip(tmp_path / "a.mp4", 40, 30, 5, 10).read_bytes()
    soundfile.write(tmp_path / "a.wav", np.zeros(400), 8000)
    sound = (tmp_path / "a.wav").read_bytes()
    encoded = b64encode(clip).decode(), b64encode(sound).decode()
    for parts in (
        [{"type": "video", "video": f"data:video/mp4;base64,{encoded[0]}"}, {"type": "audio", "audio": encoded[1]}],
        [
            {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{encoded[0]}"}},
            {"type": "input_audio", "input_audio": {"data": encoded[1], "format": "wav"}},
        ],
    ):
        record = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}, SAID]}
        read = read_conversation(record, tmp_path)
        assert read.turns[0].text == "<video><audio>?"
        assert (read.videos, read.sounds) == ((clip,), (sound,))


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("data:image/png;base64,????", "image must be a path or base64 that can be decoded, got 4 characters"),
        ("data:image/png;base64", "image must be a data URI with a comma before its content, got data:image/png"),
        ("data:image/png;base64,AAAA", "image must have a readable header, got one of 3 bytes within the data"),
        (uri(content("png"))[:9000], "image must be decodable, got one of"),
        ({"bytes": "?", "path": None}, "bytes must be a path or base64 that can be decoded"),
        (
            {"url": "https://x.org/a.png"},
            "image must be a path or content, got an address, https://x.org/a.png; download",
        ),
    ],
)
def test_content_that_is_damaged_is_named(model_folder, tmp_path, image, reason):
    (tmp_path / "a.jsonl").write_text(json.dumps({"conversations": ASKED, "image": image}) + "\n")
    with pytest.raises(DataError, match=f"a.jsonl, line 1: {reason}"):
        open_dataset(tmp_path / "a.jsonl", model_folder).lengths()
