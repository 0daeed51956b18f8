from pathlib import Path

import pytest

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
        (record(("human", "Hi"), ("gpt", "Hi"), image={"place": "a"}), "image must be a path or a list of paths"),
        (
            record(("human", "<image>"), ("gpt", "Hi"), image="data:image/png;base64,iVBORw0KGgo="),
            "image must be a path, got 34 characters of data, data:image/png;base64,iVBORw0K…; write pictures that "
            "stand in the data to files, and name those",
        ),
        (
            record(("human", "<image>"), ("gpt", "Hi"), image=["/9j/4AAQ" * 600]),
            "image must be a path, got 4800 characters of data, /9j/4AAQ",
        ),
        (record(("human", "Hi"), ("gpt", "Hi"), video="a.mp4"), "got a video"),
    ],
)
def test_what_is_wrong_is_said(broken, reason):
    with pytest.raises(ValueError, match=reason):
        read_conversation(broken, ROOT)
