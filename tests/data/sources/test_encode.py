import numpy as np
import pytest
from transformers import AutoTokenizer

from omnibal.data.sources.chat import Rendered
from omnibal.data.sources.encode import encode


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


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
