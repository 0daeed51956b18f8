import json
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Picture

from omnibal.advise.models import Model
from omnibal.errors import DataError
from omnibal.formats.drawn import (
    END_TOKENS,
    IMAGE_TOKENS,
    TURN_TOKENS,
    draw_lengths,
    estimated_tokens,
    parse_item,
)

RULE = Model.known("Qwen2.5-VL-7B").image_rule()
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
def test_every_form_has_the_same_lengths(folder, form, as_array):
    path = write(folder / "data.json", [FORMS[form]] * 4, as_array=as_array)
    if not as_array:
        path = path.rename(folder / "data.jsonl")
    drawn = draw_lengths(path, RULE, count=2)
    assert (drawn.num_samples, len(drawn.lengths), drawn.problems) == (4, 2, ())
    assert drawn.lengths.vision_units.tolist() == [200, 200]
    assert drawn.lengths.vision_squared.tolist() == [40_000, 40_000]
    assert drawn.lengths.llm_tokens.tolist() == [50 + TEXT + IMAGE_TOKENS] * 2
    assert drawn.lengths.target_tokens.tolist() == [TARGETS] * 2
    assert drawn.text_tokens == TEXT + IMAGE_TOKENS


def test_earlier_questions_and_turns_of_nobody_count():
    item = parse_item({"history": [["a", "b"]], "query": "c", "response": "d"}, Path())
    assert (item.asked, item.answers) == (("a", "c"), ("b", "d"))
    item = parse_item({"conversations": ["a", {"from": "system", "value": "b"}, {"from": "gpt", "value": "c"}]}, Path())
    assert (item.asked, item.answers) == (("b",), ("a", "c"))


def test_a_saved_dataset_keeps_its_images_closed(folder):
    content = (folder / "a.jpg").read_bytes()
    turn = {"role": Value("string"), "content": Value("string")}
    features = Features({"messages": List(turn), "images": List(Image())})
    rows = {"messages": [MESSAGES] * 3, "images": [[{"bytes": content, "path": None}]] * 3}
    Dataset.from_dict(rows, features=features).save_to_disk(folder / "saved")
    drawn = draw_lengths(folder / "saved", RULE)
    assert drawn.num_samples == 3
    assert drawn.lengths.vision_units.tolist() == [200] * 3
    assert drawn.lengths.llm_tokens.tolist() == [50 + TEXT + IMAGE_TOKENS] * 3


def test_small_sources_are_drawn_from_too_where_sources_are_mixed(folder):
    files = {"large": 5000, "small": 3}
    for name, count in files.items():
        write(folder / f"{name}.jsonl", [FORMS["stated"]] * count)
    meta = {name: {"root": ".", "annotation": str(folder / f"{name}.jsonl"), "repeat_time": 1} for name in files}
    (folder / "meta.json").write_text(json.dumps(meta))
    drawn = draw_lengths(folder / "meta.json", RULE, count=100, of_each_source=True)
    assert np.bincount(drawn.lengths.source).tolist() == [50, 3]


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
    drawn = draw_lengths(write(folder / "some.jsonl", some), RULE)
    assert len(drawn.lengths) == 9
    assert drawn.problems == (f"{folder}/some.jsonl, line 10: image must exist, got {folder}/gone.jpg",)
    for records, count in (([*some, gone], "2 of 11"), ([gone], "1 of 1")):
        with pytest.raises(DataError, match=rf"data must have items .*, got {count} that .*: image must .*--images"):
            draw_lengths(write(folder / "many.jsonl", records), RULE)
    for record, message in (
        ({"videos": ["a.mp4"]}, "got a video, which is not supported"),
        ({"caption": "a"}, "must hold a conversation .* got the keys caption"),
    ):
        with pytest.raises(DataError, match=message):
            parse_item(record, folder)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": ASKED, "chosen": SAID, "rejected": "No."},
        {"prompt": MESSAGES[:1], "chosen": MESSAGES[1:], "rejected": MESSAGES[1:]},
        {"messages": MESSAGES, "rejected_response": "No."},
        {**SHAREGPT, "kto_tag": False},
    ],
)
def test_preferences_are_refused(record, tmp_path):
    with pytest.raises(DataError, match="samples must be for supervised training, got preferences"):
        parse_item(record, tmp_path)
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join([json.dumps(record)] * 5))
    with pytest.raises(DataError, match=r"got 5 of 5 that have none in .*; .*got preferences"):
        draw_lengths(path, RULE)
