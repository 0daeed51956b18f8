from pathlib import Path

import pytest
from transformers import AutoTokenizer

from omnibal.data.sources.chat import Conversation, Turn, render_chatml
from omnibal.data.sources.template import ChatTemplate, text_start

TURNS = (
    Turn("system", "Be kind."),
    Turn("user", "<image>\n<image>\nWhat?"),
    Turn("assistant", "A cat.\n"),
    Turn("user", "Why?"),
    Turn("assistant", "<image>"),
)
IMAGES = (Path("a.png"), Path("b.png"))


@pytest.fixture
def tokenizer(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


def test_internvls_template_writes_what_chatml_does(tokenizer):
    rendered = ChatTemplate.of(tokenizer, "<IMG_CONTEXT>").render(Conversation(TURNS, IMAGES))
    expected = render_chatml(Conversation(TURNS, IMAGES), "<IMG_CONTEXT>")
    assert rendered == expected
    targets = [rendered.text[start:stop] for start, stop in rendered.targets]
    assert targets == ["A cat.\n<|im_end|>", "<image><|im_end|>"]


def test_images_stand_where_their_marks_do(tokenizer):
    turns = (Turn("user", "Is <image> before\n<image>?"), Turn("assistant", "no"))
    rendered = ChatTemplate.of(tokenizer, "<IMG_CONTEXT>").render(Conversation(turns, IMAGES))
    assert "Is <IMG_CONTEXT>\n before\n<IMG_CONTEXT>\n?<|im_end|>" in rendered.text


def test_a_template_that_changes_earlier_turns_is_refused(tokenizer):
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['role'] + '\\n'", "message['role'] + (loop.length | string) + '\\n'"
    )
    template = ChatTemplate.of(tokenizer, "<IMG_CONTEXT>")
    with pytest.raises(ValueError, match="one turn after another"):
        template.render(Conversation(TURNS, IMAGES))


def test_text_start_is_what_the_tokenizer_adds(tokenizer):
    assert text_start(tokenizer) == ""
