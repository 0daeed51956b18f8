"""Lengths and token ids of families that have a processor in transformers, against that processor."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    LlavaConfig,
    LlavaNextConfig,
    LlavaNextProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from omnibal.data.sources.conversations import open_dataset
from omnibal.data.sources.formats import ModelFormat
from omnibal.errors import ConfigError

# As in Qwen's and LLaVA's own folders: Qwen brackets images and adds a system message; LLaVA breaks the line after
# images and begins a text with a token of its tokenizer.
QWEN_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] if part['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{{ eos_token if message['role'] == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
SIDES = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
VISION = {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8}
SIZES = [(120, 50), (30, 200), (64, 64)]
TURNS = [
    [("human", "<image>\nWhat is red?"), ("gpt", "the ball")],
    [("human", "What colour is a red hat?"), ("gpt", "red"), ("human", "Sure?"), ("gpt", "one hat")],
    [("human", "<image>\nWhere?"), ("gpt", "top left")],
    [("human", "<image>\n<image>\nHow many?"), ("gpt", "two")],
]


def tokenizer_with(model_folder, template, tokens, *, begins=False):
    backend = Tokenizer.from_str(AutoTokenizer.from_pretrained(model_folder).backend_tokenizer.to_str())
    backend.add_special_tokens(["<s>", *tokens])
    if begins:
        backend.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    named = {"bos_token": "<s>"} if begins else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, eos_token="<|im_end|>", pad_token="<|endoftext|>", **named
    )


def qwen2_vl(model_folder):
    tokenizer = tokenizer_with(model_folder, QWEN_TEMPLATE, ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"])
    images = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64})
    config = Qwen2VLConfig(image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"))

    def process(text, pictures):
        """Qwen2VLProcessor cannot be built without torchvision: its ``replace_image_token`` in short."""
        patches = [grid.prod() for grid in images(pictures, return_tensors="np")["image_grid_thw"]] if pictures else []
        before, *after = text.split("<|image_pad|>")
        expanded = before + "".join("<|image_pad|>" * (n // 4) + part for n, part in zip(patches, after, strict=True))
        return tokenizer(expanded)["input_ids"], patches

    return config, tokenizer, images, process


def llava_next(model_folder):
    tokenizer = tokenizer_with(model_folder, LLAVA_TEMPLATE, ["<image>"], begins=True)
    pinpoints = [[32 * rows, 32 * columns] for rows, columns in [(1, 2), (2, 1), (2, 2), (3, 1), (1, 3)]]
    images = LlavaNextImageProcessorPil(image_grid_pinpoints=pinpoints, **SIDES)
    config = LlavaNextConfig(vision_config=VISION, image_token_index=tokenizer.convert_tokens_to_ids("<image>"))
    return config, tokenizer, images, processing(LlavaNextProcessor, images, tokenizer)


def llava(model_folder):
    tokenizer = tokenizer_with(model_folder, LLAVA_TEMPLATE, ["<image>"], begins=True)
    images = CLIPImageProcessorPil(**SIDES)
    config = LlavaConfig(vision_config=VISION, image_token_index=tokenizer.convert_tokens_to_ids("<image>"))
    return config, tokenizer, images, processing(LlavaProcessor, images, tokenizer)


def processing(processor_class, images, tokenizer):
    processor = processor_class(images, tokenizer, 8, "default", num_additional_image_tokens=1)

    def process(text, pictures):
        units = [len(images([picture], return_tensors="np")["pixel_values"].reshape(-1, 32)) for picture in pictures]
        return processor(images=pictures or None, text=text)["input_ids"][0], [unit // (3 * 32) for unit in units]

    return process


@pytest.fixture(params=[qwen2_vl, llava_next, llava], ids=lambda family: family.__name__)
def family(request, model_folder, tmp_path):
    """A model folder, transformers' rendering and processing, and data on disk."""
    config, tokenizer, images, process = request.param(model_folder)
    folder = tmp_path / "model"
    for part in (config, tokenizer, images):
        part.save_pretrained(folder)
    return folder, tokenizer, process


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


def test_token_ids_and_loads_are_those_of_transformers(family, annotations):
    folder, tokenizer, process = family
    dataset = open_dataset(annotations, folder)
    lengths = dataset.lengths()
    for index, record in enumerate(json.loads(annotations.read_text())):
        files = [record["image"]] if isinstance(record.get("image"), str) else record.get("image", [])
        messages = as_messages(record["conversations"], breaks_line=tokenizer.chat_template == LLAVA_TEMPLATE)
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids, units = process(text, [Image.open(annotations.parent / file) for file in files])
        item = dataset.text(index)
        assert item["input_ids"].tolist() == ids
        assert lengths.llm_tokens[index] == len(ids)
        assert lengths.vision_units[index] == sum(units)
        assert lengths.target_tokens[index] == (item["labels"] != -100).sum()
        if lengths.vision_squared is not None:
            assert lengths.vision_squared[index] == sum(unit**2 for unit in units)
    assert (lengths.vision_squared is None) == (tokenizer.chat_template == LLAVA_TEMPLATE)


def as_messages(turns, *, breaks_line):
    """As a user of transformers writes them; where the template breaks the line after an image, the user does not."""
    messages = []
    for turn in turns:
        marked = turn["value"].replace("<image>\n", "<image>") if breaks_line else turn["value"]
        before, *after = marked.split("<image>")
        parts = [{"type": "text", "text": before}] if before else []
        for text in after:
            parts += [{"type": "image"}, {"type": "text", "text": text}]
        messages.append({"role": {"human": "user", "gpt": "assistant"}[turn["from"]], "content": parts})
    return messages


def test_labels_are_the_answers_with_their_end(family, annotations):
    folder, tokenizer, _ = family
    labels = open_dataset(annotations, folder).text(1)["labels"]
    said = tokenizer.decode(labels[labels != -100]).replace(" ", "")  # LLaVA's tokens hold the space before a word
    assert said == "red<|im_end|>onehat<|im_end|>"


def test_pixels_are_the_image_processors_by_the_names_of_the_models_arguments(family, annotations):
    dataset = open_dataset(annotations, family[0])
    processor = AutoImageProcessor.from_pretrained(family[0], backend="pil")
    expected = processor([Image.open(annotations.parent / f"{w}x{h}.png") for w, h in SIZES[:2]], return_tensors="pt")
    item = dataset[3]
    names = set(item) - {"input_ids", "labels"}
    assert names == set(processor.model_input_names) & set(expected) >= {"pixel_values"}
    assert all(torch.equal(item[name], expected[name]) for name in names)
    assert dataset[1]["pixel_values"] is None


def test_tile_limits_are_internvls(family):
    with pytest.raises(ConfigError, match="max_tiles and min_tiles must be left out"):
        ModelFormat(family[0], max_tiles=4)


def test_a_folder_without_a_chat_template_is_refused(family):
    folder, tokenizer, _ = family
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match="tokenizer or processor must have a chat template"):
        ModelFormat(folder)


def test_a_template_that_forgets_images_is_refused(family):
    folder = family[0]
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['role'] }}{% endfor %}")
    with pytest.raises(ConfigError, match=r"chat template must write .* for an image"):
        ModelFormat(folder)


@pytest.mark.parametrize("instead", ["", "{{ raise_exception('no answers') }}"])
def test_a_template_that_does_not_write_answers_is_refused(family, instead):
    folder = family[0]
    template = (folder / "chat_template.jinja").read_text()
    unless = f"{{% if message['role'] == 'assistant' %}}{instead}{{% else %}}"
    content = template.index("{% for part in message['content']")
    rest = template.rindex("{% endfor %}")
    changed = template[:content] + unless + template[content:rest] + "{% endif %}" + template[rest:]
    (folder / "chat_template.jinja").write_text(changed)
    with pytest.raises(ConfigError, match=r"chat template must (write what an assistant|take the conversation)"):
        ModelFormat(folder)
