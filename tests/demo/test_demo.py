import json

import pytest
from PIL import Image
from transformers import AutoConfig, AutoTokenizer, InternVLForConditionalGeneration

from omnibal.demo import majority_accuracy, write_demo
from omnibal.errors import ConfigError
from omnibal.formats.conversations import open_dataset


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return write_demo(tmp_path_factory.mktemp("demo"), samples=400, held_out=100, seed=3)


def records(annotations):
    return [json.loads(line) for path in annotations for line in path.read_text().splitlines()]


def test_both_parts_are_read_by_the_internvl_source_without_a_problem(demo):
    for meta, samples in ((demo.meta, 400), (demo.held_out_meta, 100)):
        dataset = open_dataset(meta, demo.model)
        lengths = dataset.lengths()
        assert len(dataset) == len(lengths) == samples
        item = dataset[0]
        assert (len(item["pixel_values"]), len(item["input_ids"])) == (lengths.vision_units[0], lengths.llm_tokens[0])


def test_loads_differ_widely(demo):
    lengths = open_dataset(demo.meta, demo.model).lengths()
    assert set(lengths.vision_units.tolist()) >= {0, 1, 3, 4, 5, 10}
    assert lengths.llm_tokens.max() > 3 * lengths.llm_tokens.min()
    assert set(lengths.source.tolist()) == {0, 1, 2, 3}


def test_images_are_png_and_jpeg_of_many_sizes(demo):
    found = [Image.open(path) for path in (demo.meta.parent / "images" / "train").rglob("*.*")]
    assert {image.format for image in found} == {"PNG", "JPEG"}
    assert len({image.size for image in found}) > len(found) / 2
    assert all(40 <= side <= 210 for image in found for side in image.size)


def test_every_kind_is_asked_for_and_held_out_samples_ask_once(demo):
    held_out = records(demo.held_out_annotations)
    kinds = {record["id"].split("-")[0] for record in held_out}
    assert kinds == {"colour", "shape", "count", "place", "description", "pair", "text"}
    assert {len(record["conversations"]) for record in held_out} == {2}
    assert {len(record["conversations"]) for record in records(demo.train_annotations)} == {2, 4, 6, 8}
    assert {len(record["image"]) for record in held_out if isinstance(record.get("image"), list)} == {2}


def test_the_same_seed_writes_the_same_bytes(tmp_path):
    first, again, other = (
        write_demo(tmp_path / name, samples=40, held_out=20, seed=seed)
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    files = [path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*") if path.is_file()]
    assert len(files) > 40
    for file in files:
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    assert records(first.train_annotations) == records(again.train_annotations) != records(other.train_annotations)


def test_tokenizer_holds_words_whole_and_knows_every_text(demo):
    tokenizer = AutoTokenizer.from_pretrained(demo.model)
    assert tokenizer.tokenize("Where is the red ring?") == ["Where", "Ġis", "Ġthe", "Ġred", "Ġring", "?"]
    text = "Größe: 7 ≠ 8\n\tend"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert [
        len(tokenizer(word)["input_ids"]) for word in ("red", "<img>", "</img>", "<IMG_CONTEXT>", "<|im_end|>")
    ] == [1] * 5


def test_chat_template_writes_images_as_internvl_does(demo):
    tokenizer = AutoTokenizer.from_pretrained(demo.model)
    content = [{"type": "image"}, {"type": "text", "text": "What?"}]
    rendered = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Hi."}, {"role": "user", "content": content}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert rendered == (
        "<|im_start|>system\nHi.<|im_end|>\n<|im_start|>user\n<IMG_CONTEXT>\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_configuration_builds_a_small_model(tmp_path):
    folder = write_demo(tmp_path, samples=20, held_out=20).model
    model = InternVLForConditionalGeneration(AutoConfig.from_pretrained(folder))
    assert sum(parameter.numel() for parameter in model.parameters()) < 2e6
    assert model.lm_head.weight is not model.get_input_embeddings().weight


def test_majority_accuracy(tmp_path):
    def write(name, *exchanges):
        turns = [
            {"from": side, "value": value}
            for pair in exchanges
            for side, value in zip(("human", "gpt"), pair, strict=True)
        ]
        path = tmp_path / name
        path.write_text(json.dumps({"conversations": [{"from": "system", "value": "Hi"}, *turns]}) + "\n")
        return path

    train = write("train", ("a?", "1"), ("a?", "2"), ("a?", "2"), ("b?", "3"), ("b?", "1"), ("c?", "2"))
    held_out = write("held_out", ("a?", "2"), ("a?", "1"), ("b?", "3"), ("b?", "1"), ("new?", "2"))
    assert majority_accuracy([train], [held_out]) == pytest.approx(3 / 5)


def test_chance_on_the_demo_is_low(demo):
    assert majority_accuracy(demo.train_annotations, demo.held_out_annotations) < 0.3


def test_too_few_samples_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="held_out must be at least 20, got 3"):
        write_demo(tmp_path, held_out=3)
