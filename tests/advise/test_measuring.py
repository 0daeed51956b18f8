import json

import numpy as np
import pytest
from PIL import Image as Picture

from omnibal.advise import measuring
from omnibal.advise.measuring import END_TOKENS, IMAGE_TOKENS, TURN_TOKENS, draw_rows, estimated_tokens, measure
from omnibal.advise.models import Model
from omnibal.advise.present import Present
from omnibal.errors import DataError

NAMED = Model.known("Qwen2.5-VL-7B")
RULE = NAMED.image_rule()
NO_VIDEOS = Model.known("InternVL3-8B")
ASKED, SAID = "What is shown in this picture?", "A cat that sleeps on a red sofa, and a book beside it."
TEXT = estimated_tokens(ASKED) + estimated_tokens(SAID) + 2 * TURN_TOKENS
TARGETS = estimated_tokens(SAID) + END_TOKENS
SHAREGPT = {"conversations": [{"from": "human", "value": f"<image>{ASKED}"}, {"from": "gpt", "value": SAID}]}
MESSAGES = [{"role": "user", "content": f"<image>{ASKED}"}, {"role": "assistant", "content": SAID}]
PARTS = [
    {"role": "user", "content": [{"type": "image", "image": "file://a.jpg"}, {"type": "text", "text": ASKED}]},
    {"role": "assistant", "content": [{"type": "text", "text": SAID}]},
]
FORMS = {
    "llava": SHAREGPT | {"image": "a.jpg"},
    "sharegpt": {"messages": MESSAGES, "images": ["a.jpg"]},
    "qwen": {"messages": PARTS},
    "qwen_vl": {
        "conversations": [{"from": "user", "value": f"<img>a.jpg</img>\n{ASKED}"}, SHAREGPT["conversations"][1]]
    },
    "question": {"query": f"<image>{ASKED}", "response": SAID, "images": ["a.jpg"]},
    "completion": {"prompt": f"<image>{ASKED}", "completion": SAID, "images": ["a.jpg"]},
    "completion in turns": {"prompt": MESSAGES[:1], "completion": MESSAGES[1:], "images": ["a.jpg"]},
    "stated": SHAREGPT | {"image": "nowhere.jpg", "width": 280, "height": 140},
}


@pytest.fixture
def folder(tmp_path):
    Picture.new("RGB", (280, 140)).save(tmp_path / "a.jpg")
    return tmp_path


def write(path, records, *, as_array=False):
    lines = [json.dumps(record) for record in records]
    path.write_text(f"[{','.join(lines)}]" if as_array else "\n".join(lines))
    return path


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("as_array", [False, True])
def test_every_form_has_the_same_lengths(folder, form, as_array, monkeypatch):
    monkeypatch.setattr(measuring, "DRAWN", 2)
    path = write(folder / ("data.json" if as_array else "data.jsonl"), [FORMS[form]] * 4, as_array=as_array)
    found = measure([path], NAMED, Present())
    assert found.said.startswith("2 of 4 samples measured; tokens of text estimated")
    assert found.lengths.vision_units.tolist() == [200, 200]
    assert found.lengths.vision_squared.tolist() == [40_000, 40_000]
    assert found.lengths.llm_tokens.tolist() == [50 + TEXT + IMAGE_TOKENS] * 2
    assert found.lengths.target_tokens.tolist() == [TARGETS] * 2


def test_small_sources_are_drawn_from_too_where_sources_are_mixed(folder):
    files = {"large": 5000, "small": 3}
    for name, count in files.items():
        write(folder / f"{name}.jsonl", [FORMS["stated"]] * count)
    meta = {name: {"root": ".", "annotation": str(folder / f"{name}.jsonl"), "repeat_time": 1} for name in files}
    (folder / "meta.json").write_text(json.dumps(meta))
    _, _, source = draw_rows(folder / "meta.json", None, of_each=True, count=100)
    assert np.bincount(source).tolist() == [50, 3]


@pytest.mark.parametrize(
    ("text", "tokens"),
    # counted by Qwen's tokenizer
    [
        ("What is shown in this picture, and where was it taken?", 13),
        ("这是一个测试。图片中有一只猫坐在红色的沙发上，旁边放着一本打开的书。", 22),
        ("In 2024 it sold 1,250 units (up 12.5%).", 22),
    ],
)
def test_tokens_are_about_those_of_a_tokenizer(text, tokens):
    assert estimated_tokens(text) == pytest.approx(tokens, abs=0.2 * tokens)


def test_what_cannot_be_measured_is_said(folder):
    gone = SHAREGPT | {"image": "gone.jpg"}
    some = [*[FORMS["llava"]] * 9, gone]
    found = measure([write(folder / "some.jsonl", some)], NAMED, Present())
    assert len(found.lengths) == 9
    first = f"{folder}/some.jsonl, line 10: image must exist, got {folder}/gone.jpg"
    assert f"1 could not be read, the first: {first}" in found.said
    for records, count in (([*some, gone], "2 of 11"), ([gone], "1 of 1")):
        with pytest.raises(DataError, match=rf"data must have items .*, got {count} that .*: image must .*--images"):
            measure([write(folder / "many.jsonl", records)], NAMED, Present())
    with pytest.raises(DataError, match=r"got 5 of 5 that have none in .*; .*got preferences"):
        measure([write(folder / "pairs.jsonl", [{"prompt": ASKED, "chosen": SAID}] * 5)], NAMED, Present())
