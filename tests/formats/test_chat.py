from pathlib import Path

import pytest

from omnibal.errors import DataError
from omnibal.formats.chat import read_conversation

ROOT = Path("/data")


def record(*turns, **more):
    return {"conversations": [{"from": side, "value": value} for side, value in turns], **more}


def test_conversation_with_system_and_images():
    turns = [
        ("system", "Be kind."),
        ("human", "<image> or <image>?"),
        ("gpt", "One."),
        ("human", "Why?"),
        ("gpt", "So."),
    ]
    parsed = read_conversation(record(*turns, image=["a.png", "/b.png"]), ROOT)
    assert parsed.images == (Path("/data/a.png"), Path("/b.png"))
    assert [turn.role for turn in parsed.turns] == ["system", "user", "assistant", "user", "assistant"]


@pytest.mark.parametrize("image", [{}, {"image": []}, {"image": None}, {"image": ""}])
def test_no_image(image):
    assert read_conversation(record(("human", "Hi"), ("gpt", "Hi"), **image), ROOT).images == ()


def test_images_named_twice_alike_are_read_once():
    parsed = read_conversation(record(("human", "Hi"), ("gpt", "Hi"), image="a.png", images=["a.png"]), ROOT)
    assert parsed.images == (Path("/data/a.png"),)


def test_empty_turns_beside_a_question_are_no_turns():
    parsed = read_conversation({"messages": [], "query": "What?", "response": "That."}, ROOT)
    assert [turn.text for turn in parsed.turns] == ["What?", "That."]


@pytest.mark.parametrize("images", [["a.png"], ["a.png", "b.png"]])
def test_images_without_a_mark_come_before_the_first_question(images):
    turns = [("system", "Be kind."), ("human", "What?"), ("gpt", "One."), ("human", "Why?"), ("gpt", "So.")]
    parsed = read_conversation(record(*turns, image=images), ROOT)
    assert [turn.text for turn in parsed.turns] == [
        "Be kind.",
        "<image>\n" * len(images) + "What?",
        "One.",
        "Why?",
        "So.",
    ]


def test_turns_of_a_table_may_stand_in_columns():
    columns = {"role": ["user", "assistant"], "content": ["Hi", "Ho"]}
    assert [*read_conversation({"messages": columns}, ROOT).turns] == [("user", "Hi"), ("assistant", "Ho")]


def test_a_text_that_looks_like_a_named_image_stays_where_the_record_names_its_images():
    parsed = read_conversation(record(("human", "<image> <img>b</img>"), ("gpt", "<img>c</img>"), image="a.png"), ROOT)
    assert (parsed.turns[0].text, parsed.images) == ("<image> <img>b</img>", (ROOT / "a.png",))


def test_advice_counts_turns_of_nobody_as_answers():
    turns = ["a", {"from": "system", "value": "b"}, {"from": "gpt", "value": "c"}]
    found = read_conversation({"conversations": turns}, ROOT, strict=False)
    assert [*found.turns] == [("assistant", "a"), ("system", "b"), ("assistant", "c")]


def test_advice_takes_what_training_refuses():
    turns = [{"role": "tool", "content": "3"}, {"role": "user", "content": "<image><image>"}]
    found = read_conversation({"messages": turns, "image": "http://a", "width": 3, "height": 4}, ROOT, strict=False)
    assert ([turn.role for turn in found.turns], found.sizes, found.images) == (["user", "user"], ((3, 4),), ())
    with pytest.raises(DataError, match=r"messages\[0\] must have role"):
        read_conversation({"messages": turns}, ROOT)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"chosen": "a", "rejected": "b"}, r"supervised training, got preferences \('chosen'\)"),
        ({"prompt": [], "chosen": [{"role": "user"}]}, r"supervised training, got preferences \('chosen'\)"),
        ({"messages": [], "rejected_response": "b"}, r"supervised training, got preferences \('rejected_response'\)"),
        ({"conversations": [], "kto_tag": False}, r"supervised training, got preferences \('kto_tag'\)"),
        ({"audios": ["b.wav"], "audio": "a.wav"}, "must name its audios under one key"),
        (
            {"query": "<audio>?", "response": "a", "audios": ["a.wav", "b.wav"]},
            "one <audio> per audio, got 1 for 2 audio",
        ),
        ({"caption": "a"}, "must hold a conversation .* got the keys caption"),
        ({"query": "What?", "response": "a", "answer": "b"}, "must alternate"),
        ({"query": "What?", "answer": ["a", "b"]}, "answer must be a text or a list of parts, got the part 'a'"),
        (
            {"query": "What?", "response": "a", "image": "https://a/b.png"},
            "image must be a path or content, got an",
        ),
    ],
)
def test_other_records_are_refused(other, reason):
    with pytest.raises(DataError, match=reason):
        read_conversation(other, ROOT)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({}, "must hold a conversation"),
        ({"conversations": "Hi"}, "conversations must be a list of turns, got 'Hi'"),
        (record(), "must hold a conversation .* got the keys conversations"),
        (record(("human", "Hi")), r"end with an answer, got \['user'\]"),
        (record(("gpt", "Hi"), ("human", "Hi")), "alternate"),
        (record(("human", "Hi"), ("gpt", "Hi"), ("system", "Hi")), "alternate"),
        (record(("human", "Hi"), ("gpt", " \n")), r"conversations\[1\] must hold an answer, got an empty one"),
        (
            record(("human", "Hi"), ("model", "Hi")),
            r"conversations\[1\] must have from \(system, human, user, gpt",
        ),
        (record(("human", 3), ("gpt", "Hi")), r"conversations\[0\] must have from .* and value"),
        (record(("human", "<image>"), ("gpt", "Hi")), "got 1 for 0 image"),
        (
            record(("human", "<image>"), ("gpt", "<image>"), image=["a", "b"]),
            "got 1 for 2 image",
        ),
        (
            record(("human", "Hi"), ("gpt", "Hi"), image={"place": "a"}),
            "image must be a path, bytes, base64, a data URI, or a list",
        ),
        (
            record(("human", "<image>"), ("gpt", "Hi"), image="data:image/png;base64,iVBORw0KG"),
            "image must be a path or base64 that can be decoded, got 9 characters, iVBORw0KG…: ",
        ),
        (
            record(("human", "<image>"), ("gpt", "Hi"), image=["?9j/4AAQ" * 600]),
            "image must be a path or base64 that can be decoded, got 4800 characters, .9j/4AAQ",
        ),
        (
            record(("human", "Hi"), ("gpt", "Hi"), audio="https://x.org/a.wav"),
            "audio must be a path or content, got an address, https://x.org/a.wav; download it",
        ),
        (
            record(("human", "Hi"), ("gpt", "Hi"), image="a", images=["b"]),
            "sample must name its images under one key, got different ones under image and images",
        ),
    ],
)
def test_what_is_wrong_is_said(broken, reason):
    with pytest.raises(ValueError, match=reason):
        read_conversation(broken, ROOT)
