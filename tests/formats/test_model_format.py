"""Token ids, lengths and pixels of every family, against transformers' chat templates and processors."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

from omnibal.errors import ConfigError
from omnibal.formats.chat import read_conversation
from omnibal.formats.conversations import open_dataset
from omnibal.formats.model_format import ModelFormat, load_part
from tests.families.models import (
    BEGIN_TEXTS,
    PROCESSORS,
    TEMPLATES,
    image_processor,
    image_token,
    save_folder,
    whole_processor,
)

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
    text = as_trained(model_type, tokenizer.apply_chat_template(as_messages(model_type, turns), tokenize=False))
    if not pictures:
        return tokenizer(text)["input_ids"], None
    images = image_processor(model_type)
    made = images([pictures], return_tensors="pt")
    whole = whole_processor(model_type, images, token=image_token(model_type))
    before, *after = text.split(image_token(model_type))
    expanded = (whole.replace_image_token(made, number) + part for number, part in enumerate(after))
    return tokenizer(before + "".join(expanded))["input_ids"], made


def as_trained(model_type, text):
    """What a chat template writes, with what training makes of it."""
    if model_type == "llava":  # what ends an answer is left to who trains
        text = re.sub(r"(?<=ASSISTANT: )([a-z ]*[a-z]) ", r"\1</s>", text)
    if model_type == "llava_onevision":  # as its prompt is
        text = text.replace("assistant \n", "assistant\n")
    return text.replace("<IMG_CONTEXT>", "<img><IMG_CONTEXT></img>")


PLACES = {
    "chat_template.jinja": lambda old, new: {"chat_template.jinja": new},
    "chat_template.json before all": lambda old, new: {
        "chat_template.json": json.dumps({"chat_template": new}), "chat_template.jinja": old,
    },
    "processor_config.json before all": lambda old, new: {
        "processor_config.json": json.dumps({"chat_template": new}), "chat_template.jinja": old,
        "chat_template.json": json.dumps({"chat_template": old}),
    },
    "processor_config.json alone": lambda old, new: {"processor_config.json": json.dumps({"chat_template": new})},
    "named in processor_config.json": lambda old, new: {
        "processor_config.json": json.dumps({"chat_template": {"rag": old, "default": new}}),
    },
    "additional templates": lambda old, new: {
        "chat_template.jinja": new, "additional_chat_templates/tool_use.jinja": "{{ 'TOOLS' }}",
    },
    "a default among additional ones": lambda old, new: {
        "additional_chat_templates/default.jinja": new, "additional_chat_templates/rag.jinja": old,
    },
    "tokenizer_config.json": lambda old, new: {"tokenizer_config.json": {"chat_template": new}},
    "a list in tokenizer_config.json": lambda old, new: {
        "tokenizer_config.json": {"chat_template": [
            {"name": "rag", "template": old}, {"name": "default", "template": new},
        ]},
    },
    "tokenizer_config.json behind a processor's": lambda old, new: {
        "tokenizer_config.json": {"chat_template": old},
        "processor_config.json": json.dumps({"chat_template": new}),
    },
}  # fmt: skip
"""Files of a model's folder where ``new`` is the template that a processor takes."""


def move_template(folder, place, old, new):
    """Let a folder have its template at one of `PLACES` and nowhere else."""
    for name in ("chat_template.jinja", "chat_template.json"):
        (folder / name).unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in PLACES[place](old, new).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(settings | content))


def by_processor(model_type, folder):
    """A processor of transformers with the template that it takes of a folder, and the tokenizer."""
    given, _ = PROCESSORS[model_type].get_processor_dict(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = object.__new__(PROCESSORS[model_type])
    template = given.get("chat_template")
    vars(processor).update(tokenizer=tokenizer, chat_template=tokenizer.chat_template if template is None else template)
    return processor, tokenizer


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("model_type", ["internvl", *TEMPLATES])
def test_text_and_labels_are_the_processors_wherever_its_template_stands(model_type, place, model_folder, tmp_path):
    folder = tmp_path / "model"
    if model_type == "internvl":
        shutil.copytree(model_folder, folder)
    else:
        save_folder(model_type, folder, model_folder)
    old = AutoTokenizer.from_pretrained(folder).chat_template
    move_template(folder, place, old, "one ball " + old)
    processor, tokenizer = by_processor(model_type, folder)
    read = ModelFormat(folder)
    for turns in TURNS:
        turned = [{"from": side, "value": value} for side, value in turns]
        images = [Image.new("RGB", (60, 40))] * sum(value.count("<image>") for _, value in turns)
        expected = as_trained(model_type, processor.apply_chat_template(as_messages(model_type, turned)))
        rendered = read.render(read_conversation({"conversations": turned, "images": ["a.png"] * len(images)}, folder))
        assert rendered.text.removeprefix(str(tokenizer.bos_token)) == expected.removeprefix(str(tokenizer.bos_token))
        assert "one ball" in rendered.text[:20]
        said = [value for side, value in turns if side == "gpt"]
        found = [rendered.text[start:stop] for start, stop in rendered.targets]
        end = "</s>" if model_type in BEGIN_TEXTS else "<|im_end|>"
        assert [answer.strip().replace(" " + end, end) for answer in found] == [answer + end for answer in said]


def test_internvl_is_written_by_chatml_unless_its_folder_says_otherwise(model_folder, tmp_path):
    turned = [{"from": "human", "value": "Is <image> red?"}, {"from": "gpt", "value": "one"}]
    conversation = read_conversation({"conversations": turned, "image": "a.png"}, tmp_path)
    chatml = "<|im_start|>user\nIs <img><IMG_CONTEXT></img> red?<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
    assert ModelFormat(model_folder).render(conversation).text == chatml
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    before, own = ModelFormat(folder).fingerprint, AutoTokenizer.from_pretrained(folder).chat_template
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None}))
    assert ModelFormat(folder).render(conversation).text == chatml
    (folder / "processor_config.json").write_text(json.dumps({"chat_template": own}))
    (folder / "chat_template.jinja").write_text(own.replace("<|im_start|>", "<|im_start|>one "))
    assert ModelFormat(folder).render(conversation).text == chatml
    (folder / "processor_config.json").unlink()
    rendered, text = (
        ModelFormat(folder).render(conversation),
        "<|im_start|>one user\nIs <img><IMG_CONTEXT></img>\n red?",
    )
    assert rendered.text.startswith(text)
    assert ModelFormat(folder).fingerprint != before


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
def test_a_template_of_another_kind_is_refused(family, content):
    folder = family[1]
    (folder / "chat_template.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"chat template must be (one that transformers reads|a text, or have one)"):
        ModelFormat(folder)


@ONE_FAMILY
def test_named_templates_without_a_default_are_refused_by_name(family):
    _, folder, tokenizer = family
    (folder / "processor_config.json").write_text(json.dumps({"chat_template": {"rag": tokenizer.chat_template}}))
    with pytest.raises(ConfigError, match=r"have one that is named default, got named ones without a default \(rag\)"):
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
