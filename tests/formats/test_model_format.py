"""Token ids, lengths and pixels of every family, against transformers' chat templates and processors."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor

from omnibal.errors import ConfigError
from omnibal.formats.conversations import open_dataset
from omnibal.formats.model_format import ModelFormat, load_part
from tests.families.models import BEGIN_TEXTS, TEMPLATES, image_processor, image_token, save_folder, whole_processor

SIZES = [(120, 50), (30, 200), (64, 64)]
ONE_FAMILY = pytest.mark.parametrize("family", ["qwen2_vl"], indirect=True)
TURNS = [
    [("human", "<image>\nWhat is red?"), ("gpt", "the ball")],
    [("human", "What colour is a red hat?"), ("gpt", "red"), ("human", "Sure?"), ("gpt", "one hat")],
    [("human", "<image>\nWhere?"), ("gpt", "top left")],
    [("human", "<image>\n<image>\nHow many?"), ("gpt", "two")],
]


@pytest.fixture(params=TEMPLATES)
def family(request, model_folder, tmp_path):
    """A family's name, a model's folder, and its tokenizer."""
    tokenizer = save_folder(request.param, tmp_path / "model", model_folder)
    return request.param, tmp_path / "model", tokenizer


@pytest.fixture
def annotations(tmp_path):
    """A LLaVA file whose images are named by their sizes."""
    records = []
    for turns in TURNS:
        marks = sum(value.count("<image>") for _, value in turns)
        files = [f"{width}x{height}.png" for width, height in SIZES[:marks]]
        records.append({"conversations": [{"from": side, "value": value} for side, value in turns]})
        records[-1] |= {"image": files[0] if marks == 1 else files} if marks else {}
    for width, height in SIZES:
        pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{width}x{height}.png")
    path = tmp_path / "data.json"
    path.write_text(json.dumps(records, indent=2))
    return path


def by_transformers(model_type, tokenizer, turns, pictures):
    """Token ids, and what the image processor makes of the pictures."""
    text = tokenizer.apply_chat_template(as_messages(model_type, turns), tokenize=False)
    if model_type == "llava":  # what ends an answer is left to who trains
        text = re.sub(r"(?<=ASSISTANT: )([a-z ]*[a-z]) ", r"\1</s>", text)
    if model_type == "llava_onevision":  # as its prompt is
        text = text.replace("assistant \n", "assistant\n")
    if not pictures:
        return tokenizer(text)["input_ids"], None
    images = image_processor(model_type)
    made = images([pictures], return_tensors="pt")
    whole = whole_processor(model_type, images, token=image_token(model_type))
    before, *after = text.split(image_token(model_type))
    expanded = (whole.replace_image_token(made, number) + part for number, part in enumerate(after))
    return tokenizer(before + "".join(expanded))["input_ids"], made


def test_token_ids_and_loads_are_those_of_transformers(family, annotations):
    model_type, folder, tokenizer = family
    dataset = open_dataset(annotations, folder)
    lengths = dataset.lengths()
    for index, record in enumerate(json.loads(annotations.read_text())):
        files = [record["image"]] if isinstance(record.get("image"), str) else record.get("image", [])
        pictures = [Image.open(annotations.parent / file) for file in files]
        ids, made = by_transformers(model_type, tokenizer, record["conversations"], pictures)
        item = dataset[index]
        assert item["input_ids"].tolist() == ids
        assert lengths.llm_tokens[index] == len(ids)
        assert lengths.target_tokens[index] == (item["labels"] != -100).sum()
        if made is None:
            assert (lengths.vision_units[index], item["pixel_values"]) == (0, None)
            continue
        units = len(item["pixel_values"])  # tiles, or patches
        assert lengths.vision_units[index] == units
        if "qwen" in model_type:
            assert lengths.vision_squared[index] == (made["image_grid_thw"].prod(1) ** 2).sum()
    assert (lengths.vision_squared is None) == ("qwen" not in model_type)


def as_messages(model_type, turns):
    """As a user of transformers writes them; where the template breaks the line after an image, the user does not."""
    messages = []
    for turn in turns:
        marked = turn["value"] if "qwen" in model_type else turn["value"].replace("<image>\n", "<image>")
        before, *after = marked.split("<image>")
        parts = [{"type": "text", "text": before}] if before else []
        for text in after:
            parts += [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]
        messages.append({"role": {"human": "user", "gpt": "assistant"}[turn["from"]], "content": parts})
    return messages


def test_labels_are_the_answers_with_their_end(family, annotations):
    model_type, folder, tokenizer = family
    dataset = open_dataset(annotations, folder)
    labels = dataset.text(1)["labels"]
    said = tokenizer.decode(labels[labels != -100]).replace(" ", "")  # some tokens hold the space before a word
    end = "</s>" if model_type in BEGIN_TEXTS else "<|im_end|>"
    assert said == f"red{end}onehat{end}"
    assert dataset.added_end == ("</s>" if model_type == "llava" else "")  # Vicuna's template ends no answer


def test_pixels_are_the_image_processors_by_the_names_of_the_models_arguments(family, annotations):
    model_type, folder, _ = family
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    pictures = [Image.open(annotations.parent / f"{w}x{h}.png") for w, h in SIZES[:2]]
    expected = dict(processor([pictures], return_tensors="pt"))
    if expected["pixel_values"].ndim == 5:  # without the tiles that are padding
        tiles = expected["pixel_values"].flatten(0, 1)
        expected["pixel_values"] = tiles[(tiles != 0).flatten(1).any(1)]
    item = open_dataset(annotations, folder)[3]
    further = {"llava": set(), "llava_next": {"image_sizes"}, "llava_onevision": {"image_sizes", "batch_num_images"}}
    assert set(item) - {"input_ids", "labels", "pixel_values"} == further.get(model_type, {"image_grid_thw"})
    assert all(torch.equal(item[name], expected[name]) for name in set(item) - {"input_ids", "labels"})


@ONE_FAMILY
def test_tile_limits_are_internvls(family):
    with pytest.raises(ConfigError, match="max_tiles and min_tiles must be left out"):
        ModelFormat(family[1], max_tiles=4)


@ONE_FAMILY
def test_a_processors_own_template_goes_first(family, annotations):
    """Older folders keep it in a file that the tokenizer does not read."""
    _, folder, tokenizer = family
    before = open_dataset(annotations, folder).text(0)["input_ids"]
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": tokenizer.chat_template}))
    (folder / "chat_template.jinja").unlink()
    assert torch.equal(open_dataset(annotations, folder).text(0)["input_ids"], before)


@ONE_FAMILY
@pytest.mark.parametrize("content", [[], "text", {}, {"chat_template": 5}, {"chat_template": {"a": "b"}}, 7])
def test_a_legacy_template_of_another_kind_is_refused(family, content):
    folder = family[1]
    (folder / "chat_template.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"chat_template.json must hold a text as chat_template, got .* in "):
        ModelFormat(folder)


@ONE_FAMILY
def test_a_folder_without_a_chat_template_is_refused(family):
    _, folder, tokenizer = family
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match="tokenizer or processor must have a chat template"):
        ModelFormat(folder)


@ONE_FAMILY
def test_a_template_that_forgets_images_is_refused(family):
    folder = family[1]
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['role'] }}{% endfor %}")
    with pytest.raises(ConfigError, match=r"chat template must write .* for an image"):
        ModelFormat(folder)


@ONE_FAMILY
@pytest.mark.parametrize("instead", ["", "{{ raise_exception('no answers') }}"])
def test_a_template_that_does_not_write_answers_is_refused(family, instead):
    folder = family[1]
    template = (folder / "chat_template.jinja").read_text()
    unless = f"{{% if message['role'] == 'assistant' %}}{instead}{{% else %}}"
    content = template.index("{% for part in message['content']")
    rest = template.rindex("{% endfor %}")
    changed = template[:content] + unless + template[content:rest] + "{% endif %}" + template[rest:]
    (folder / "chat_template.jinja").write_text(changed)
    with pytest.raises(ConfigError, match=r"chat template must (write what an assistant|take the conversation)"):
        ModelFormat(folder)


def test_code_in_a_models_folder_does_not_run(tmp_path, monkeypatch):
    """transformers would ask whether to run it, and take whatever answers."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    ran = tmp_path / "ran"
    code = f"import pathlib\npathlib.Path({str(ran)!r}).touch()\nfrom transformers import PreTrainedConfig as Own\n"
    (tmp_path / "configuration_own.py").write_text(code)
    config = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="model's folder must hold what AutoConfig reads"):
        load_part(AutoConfig, tmp_path)
    assert not ran.exists()
