"""Answers of every family, against transformers' own generation."""

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from omnibal.demo import vocabulary, write_model_folder
from omnibal.vlm import Answerer
from tests.families.models import TEMPLATES, image_processor, image_token, save_folder, whole_processor


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    write_model_folder(folder, vocabulary())
    return folder


@pytest.mark.parametrize("model_type", TEMPLATES)
def test_answers_are_what_transformers_generates(model_type, demo, tmp_path):
    tokenizer = save_folder(model_type, tmp_path, demo, weights=True)
    pictures = [Image.effect_noise(size, 90).convert("RGB") for size in ((60, 40), (30, 70))]
    for number, picture in enumerate(pictures):
        picture.save(tmp_path / f"{number}.png")
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Where?"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    images = image_processor(model_type)
    made = images([pictures], return_tensors="pt")
    token = image_token(model_type)
    whole = whole_processor(model_type, images, token=token)
    before, *after = text.split(token)
    expanded = (whole.replace_image_token(made, number) + part for number, part in enumerate(after))
    ids = tokenizer(before + "".join(expanded), return_tensors="pt")["input_ids"]
    if "qwen" in model_type:
        made["mm_token_type_ids"] = (ids == tokenizer.convert_tokens_to_ids(token)).long()
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    generated = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, **made
    )
    expected = tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True).strip()
    question = "<image><image>Where?" if "qwen" in model_type else "<image>\n<image>\nWhere?"
    answer = Answerer(tmp_path).answer(question, [tmp_path / "0.png", tmp_path / "1.png"], max_new_tokens=24)
    assert answer == expected
    assert Answerer(tmp_path).answer("Where?", max_new_tokens=2) is not None
