from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from omnibal.errors import ConfigError
from omnibal.formats.chat import Conversation, Turn
from omnibal.formats.text import ChatTemplate, Rendered, encode, render_chatml, text_start

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


def test_chatml_and_its_targets_which_are_answers_with_their_end():
    turns = (Turn("system", "S <image>"), Turn("user", "<image><image>Q"), Turn("assistant", "A <image>"))
    conversation = Conversation((*turns, Turn("user", "R"), Turn("assistant", "B")), IMAGES)
    rendered = render_chatml(conversation, "[image]", start="<s>")
    assert rendered.text == (
        "<s><|im_start|>system\nS <image><|im_end|>\n<|im_start|>user\n[image][image]Q<|im_end|>\n"
        "<|im_start|>assistant\nA <image><|im_end|>\n"
        "<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"
    )
    targets = [rendered.text[start:stop] for start, stop in rendered.targets]
    assert targets == ["A <image><|im_end|>", "B<|im_end|>"]


def test_internvls_template_writes_what_chatml_does(tokenizer):
    rendered = ChatTemplate.of(tokenizer, tokenizer.chat_template, "<IMG_CONTEXT>").render(Conversation(TURNS, IMAGES))
    expected = render_chatml(Conversation(TURNS, IMAGES), "<IMG_CONTEXT>")
    assert rendered == expected
    targets = [rendered.text[start:stop] for start, stop in rendered.targets]
    assert targets == ["A cat.\n<|im_end|>", "<image><|im_end|>"]


def test_images_stand_where_their_marks_do(tokenizer):
    turns = (Turn("user", "Is <image> before\n<image>?"), Turn("assistant", "no"))
    rendered = ChatTemplate.of(tokenizer, tokenizer.chat_template, "<IMG_CONTEXT>").render(Conversation(turns, IMAGES))
    assert "Is <IMG_CONTEXT>\n before\n<IMG_CONTEXT>\n?<|im_end|>" in rendered.text


def test_a_template_that_changes_earlier_turns_is_refused(tokenizer):
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['role'] + '\\n'", "message['role'] + (loop.length | string) + '\\n'"
    )
    template = ChatTemplate.of(tokenizer, tokenizer.chat_template, "<IMG_CONTEXT>")
    with pytest.raises(ValueError, match="one turn after another"):
        template.render(Conversation(TURNS, IMAGES))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{% for i in range(10 ** 12) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_template_without_an_end_is_refused(tokenizer, template, reason):
    with pytest.raises(ConfigError, match=f"chat template must take the conversation, got .*{reason}"):
        ChatTemplate.of(tokenizer, template, "<IMG_CONTEXT>")


def test_text_start_is_what_the_tokenizer_adds(tokenizer):
    assert text_start(tokenizer) == ""


def spans(text, *parts):
    return Rendered(text, tuple((text.index(part), text.index(part) + len(part)) for part in parts))


def test_text_is_tokenised_as_a_whole_and_targets_are_its_parts(tokenizer):
    text = "<|im_start|>user\nWhat colour?<|im_end|>\n<|im_start|>assistant\nred \u00e9\U0001f600 ball<|im_end|>\n"
    (encoded,) = encode(tokenizer, [spans(text, "red \u00e9\U0001f600 ball<|im_end|>")])
    assert encoded.ids.tolist() == tokenizer(text)["input_ids"]
    assert tokenizer.decode(encoded.ids[encoded.is_target]) == "red \u00e9\U0001f600 ball<|im_end|>"


def test_a_token_that_joins_prompt_and_answer_is_a_target(tokenizer):
    (encoded,) = encode(tokenizer, [spans("one red ball", "red")])
    assert len(encoded.ids) == 3, "the test needs words that are tokens together with the space before them"
    assert encoded.is_target.tolist() == [False, True, False]


def test_batches_equal_single_texts(tokenizer):
    samples = [spans("What colour is a red hat?", "red hat"), spans("one", "one"), Rendered("", ())]
    for together, alone in zip(encode(tokenizer, samples), [encode(tokenizer, [s])[0] for s in samples], strict=True):
        assert together.ids.tolist() == alone.ids.tolist()
        assert together.is_target.tolist() == alone.is_target.tolist()
    assert encode(tokenizer, []) == []


def test_images_expand_in_order_and_labels_start_with_none(tokenizer):
    image = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    text = "<IMG_CONTEXT>red<IMG_CONTEXT>blue"
    (encoded,) = encode(tokenizer, [Rendered(text, ((0, len(text)),))])
    expanded = encoded.expanded(image, [3, 2])
    red, blue = tokenizer.convert_tokens_to_ids(["red", "blue"])
    assert expanded.ids.tolist() == [image] * 3 + [red] + [image] * 2 + [blue]
    assert expanded.labels.tolist() == [-100, *expanded.ids[1:].tolist()]
    assert expanded.ids.dtype == expanded.labels.dtype == np.int64
