import json
import pickle
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from transformers import AutoTokenizer
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from omnibal.data.packing_spec import Mixture
from omnibal.errors import ConfigError, DataError
from omnibal.formats.conversations import open_dataset

ONE = ([("human", "<image>\nWhat is red?"), ("gpt", "the ball")], [(120, 50)])
TWO = (
    [
        ("system", "Answer well."),
        ("human", "First <image> then <image>\nWhere?"),
        ("gpt", "top left"),
        ("human", "Why?\n"),
        ("gpt", "It is Größe 7."),
    ],
    [(200, 210), (50, 300)],
)
NONE = ([("human", "What colour is a red hat?"), ("gpt", " red\n")], [])


def as_messages(turns):
    """The conversation as a user of transformers writes it."""
    roles = {"system": "system", "human": "user", "gpt": "assistant"}
    return [{"role": roles[side], "content": value} for side, value in turns]


def by_transformers(folder, turns, images):
    """transformers' chat template, its processor's expansion of image tokens, its tokenizer, its image processor."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = GotOcr2ImageProcessorPil.from_pretrained(folder)
    processed = processor(images, return_tensors="pt") if images else {"num_patches": []}
    text = tokenizer.apply_chat_template(as_messages(turns), tokenize=False).replace("<image>", "<IMG_CONTEXT>")
    num_patches = iter(processed["num_patches"])
    expanded = re.sub("<IMG_CONTEXT>", lambda _: f"<img>{'<IMG_CONTEXT>' * 4 * next(num_patches)}</img>", text)
    return tokenizer(expanded, return_tensors="pt")["input_ids"][0], processed.get("pixel_values")


@pytest.mark.parametrize("sample", [ONE, TWO, NONE], ids=["one image", "two images", "no image"])
def test_equal_to_transformers(write_dataset, model_folder, sample):
    meta = write_dataset([sample])
    record = json.loads((meta.parent / "shapes.jsonl").read_text())
    files = [record["image"]] if isinstance(record.get("image"), str) else record.get("image", [])
    images = [Image.open(meta.parent / "images" / file) for file in files]
    input_ids, pixel_values = by_transformers(model_folder, sample[0], images)
    item = open_dataset(meta, model_folder)[0]
    assert torch.equal(item["input_ids"], input_ids)
    if pixel_values is None:
        assert item["pixel_values"] is None
    else:
        assert torch.equal(item["pixel_values"], pixel_values)
        assert item["pixel_values"].dtype == torch.float32


def test_labels_are_the_answers_with_their_end_of_turn(write_dataset, model_folder):
    dataset = open_dataset(write_dataset([TWO]), model_folder)
    item = dataset[0]
    labels, ids = item["labels"], item["input_ids"]
    assert dataset.tokenizer.decode(labels[labels != -100]) == "top left<|im_end|>It is Größe 7.<|im_end|>"
    assert torch.equal(labels[labels != -100], ids[labels != -100])
    assert labels[0] == -100


def test_text_is_the_sample_without_pixels_and_decodes_no_image(write_dataset, model_folder, monkeypatch):
    dataset = open_dataset(write_dataset([ONE, NONE, TWO]), model_folder)
    full = [dataset[index] for index in range(3)]
    monkeypatch.setattr(Image.Image, "convert", None)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", None)
    for index, item in enumerate(full):
        text = dataset.text(index)
        assert text["pixel_values"] is None
        assert torch.equal(text["input_ids"], item["input_ids"])
        assert torch.equal(text["labels"], item["labels"])


def test_lengths_are_those_of_the_samples_and_decode_no_image(write_dataset, model_folder, monkeypatch):
    write_dataset([ONE, NONE, TWO], "a")
    dataset = open_dataset(write_dataset([NONE, ONE], "b", repeat_time=2), model_folder, decode=False)
    items = [dataset[index] for index in range(len(dataset))]
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", None)
    lengths = dataset.lengths()
    tiles = [0 if item["pixel_values"] is None else len(item["pixel_values"]) for item in items]
    assert lengths.vision_units.tolist() == tiles == [3, 0, 10, 0, 3, 0, 3]
    assert lengths.llm_tokens.tolist() == [len(item["input_ids"]) for item in items]
    assert lengths.target_tokens.tolist() == [int((item["labels"] != -100).sum()) for item in items]
    assert lengths.source.tolist() == [0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("repeat", "order"), [(1, [0, 1, 2, 3]), (0.5, [0, 1]), (2, [0, 1, 2, 3] * 2), (1.6, [0, 1, 2, 3, 0, 1])]
)
def test_repeat_time_counts_samples(write_dataset, model_folder, repeat, order):
    answers = ["red", "blue", "green", "yellow"]
    meta = write_dataset([([("human", "?"), ("gpt", answer)], []) for answer in answers], repeat_time=repeat)
    dataset = open_dataset(meta, model_folder)
    said = [dataset.tokenizer.decode(dataset[i]["labels"][dataset[i]["labels"] >= 0]) for i in range(len(dataset))]
    assert said == [f"{answers[item]}<|im_end|>" for item in order]
    assert len(dataset.lengths()) == len(order)


def test_mixtures_have_each_item_once_and_know_what_repeat_time_says(write_dataset, model_folder):
    answers = ["red", "blue", "green", "yellow"]
    meta = write_dataset([([("human", "?"), ("gpt", answer)], []) for answer in answers], "half", repeat_time=0.5)
    dataset = open_dataset(meta, model_folder, each_once=True)
    assert len(dataset) == len(dataset.lengths()) == 4
    assert dataset.lengths().source_names == ("half",)
    assert dataset.repeat_time() == Mixture({"half": 2}, epoch_samples=2)
    assert len(open_dataset(meta, model_folder)) == 2


def test_tile_limits_of_argument_meta_and_folder(write_dataset, model_folder):
    wide = (ONE[0], [(300, 50)])
    write_dataset([wide], "own", max_dynamic_patch=2)
    meta = write_dataset([wide], "common")
    assert open_dataset(meta, model_folder).lengths().vision_units.tolist() == [3, 5]
    dataset = open_dataset(meta, model_folder, max_tiles=6, min_tiles=3)
    assert [len(dataset[0]["pixel_values"]), len(dataset[1]["pixel_values"])] == [3, 7]
    assert dataset.lengths().vision_units.tolist() == [3, 7]


def test_pickles_and_works_in_loader_workers(write_dataset, model_folder):
    dataset = open_dataset(write_dataset([ONE, NONE, TWO] * 2), model_folder)
    dataset.lengths()
    copy = pickle.loads(pickle.dumps(dataset))
    loaded = list(DataLoader(copy, batch_size=None, num_workers=2))
    for index, item in enumerate(loaded):
        assert torch.equal(item["input_ids"], dataset[index]["input_ids"])


def test_several_processes_find_the_same(write_dataset, model_folder, monkeypatch):
    meta = write_dataset([ONE, NONE, "{broken", TWO] * 5)
    alone = open_dataset(meta, model_folder, processes=1, broken="skip")
    monkeypatch.setattr("omnibal.formats.measured.ITEMS_WORTH_A_PROCESS", 4)
    monkeypatch.setattr("omnibal.formats.measured.CHUNK_ITEMS", 3)
    several = open_dataset(meta, model_folder, processes=2, broken="skip")
    assert several.lengths().content_hash == alone.lengths().content_hash
    assert several.skipped == alone.skipped


def broken_lines(folder):
    """Lines that each have another fault, and the reason that must be given."""
    root = folder / "images"
    root.mkdir()
    (root / "text.png").write_text("no image")
    image = Image.fromarray(np.zeros((90, 90, 3), dtype=np.uint8))
    image.save(root / "good.png")

    def line(question, answer, **more):
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        return json.dumps({"id": 1, "conversations": turns, **more})

    return {
        '{"id": 1, "conv': "entry must be JSON",
        line("<image>", "a", image="none.png"): "image must exist, got .*none.png",
        line("<image>", "a", image="text.png"): "image must have a readable header, got .*text.png",
        line("<image><image>", "a", image="good.png"): "one <image> per image, got 2 for 1",
        line("<image>", "", image="good.png"): "must hold an answer",
        '{"id": 1}': "sample must hold a conversation .* got the keys id",
        line("<image> <IMG_CONTEXT>", "a", image="good.png"): "must not hold <IMG_CONTEXT>",
    }


def test_all_broken_items_are_refused_in_one_report_with_file_line_and_reason(write_dataset, model_folder, tmp_path):
    broken = broken_lines(tmp_path)
    meta = write_dataset([ONE, *broken, ONE])
    dataset = open_dataset(meta, model_folder)
    with pytest.raises(DataError) as error:
        dataset.lengths()
    assert f"{len(broken)} of {len(broken) + 2} items cannot be used" in str(error.value)
    for number, reason in enumerate(broken.values(), start=2):
        assert re.search(rf"shapes\.jsonl, line {number}: .*{reason}", str(error.value))
        with pytest.raises(DataError, match=rf"shapes\.jsonl, line {number}: .*{reason}"):
            dataset[number - 1]


def test_a_long_report_shows_the_first_problems_and_the_number(write_dataset, model_folder):
    dataset = open_dataset(write_dataset([ONE, *["{"] * 30]), model_folder)
    with pytest.raises(DataError, match=r"30 of 31 items(.|\n)*line 11: (.|\n)*and 20 more") as error:
        dataset.lengths()
    assert "line 12:" not in str(error.value)


def test_images_that_are_too_large_or_of_an_unknown_scale_are_broken(write_dataset, model_folder, tmp_path, caplog):
    meta = write_dataset([ONE, ([("human", "<image>?"), ("gpt", "red")], [(60, 50)])])
    large = (
        r"shapes.jsonl, line 1: image must have at most 3,000 pixels, got 120 x 50 in .*; omnibal.data.max_image_pixels"
    )
    with pytest.raises(DataError, match=large):
        open_dataset(meta, model_folder, max_image_pixels=3000).lengths()
    dataset = open_dataset(meta, model_folder, max_image_pixels=3000, broken="skip")
    assert len(dataset) == len(dataset.lengths()) == 1
    assert len(open_dataset(meta, model_folder)) == 2
    # A scale is known when pixels are read.
    Image.fromarray(np.full((50, 120), 300.0, dtype=np.float32)).save(tmp_path / "images" / "shapes-0.png", "TIFF")
    with pytest.raises(DataError, match=r"shapes.jsonl, line 1: image must have floats from 0 to 1, got 300 … 300 in"):
        open_dataset(meta, model_folder)[0]


def test_skipped_items_are_reported_and_the_rest_is_the_dataset(write_dataset, model_folder, tmp_path, caplog):
    broken = broken_lines(tmp_path)
    meta = write_dataset([ONE, *broken, NONE], repeat_time=2)
    dataset = open_dataset(meta, model_folder, broken="skip")
    assert [problem.line for problem in dataset.skipped] == list(range(2, len(broken) + 2))
    assert len(dataset) == len(dataset.lengths()) == 4
    assert dataset.lengths().vision_units.tolist() == [3, 0, 3, 0]
    assert [dataset[index]["pixel_values"] is None for index in range(4)] == [False, True, False, True]
    assert f"{len(broken)} of {len(broken) + 2}" in caplog.text
    assert "line 2" in caplog.text


def test_a_dataset_without_a_usable_item_is_refused(write_dataset, model_folder):
    with pytest.raises(DataError, match="at least one usable"):
        open_dataset(write_dataset(["{", "{"]), model_folder, broken="skip")


def test_pixels_that_cannot_be_decoded_are_named_when_they_are_read(write_dataset, model_folder):
    meta = write_dataset([NONE, ONE])
    path = meta.parent / "images" / "shapes-0.png"
    path.write_bytes(path.read_bytes()[:200])
    dataset = open_dataset(meta, model_folder, decode=False)
    assert dataset.lengths().vision_units.tolist() == [0, 3]
    with pytest.raises(DataError, match=r"shapes\.jsonl, line 2: image must be decodable, got .*shapes-0\.png"):
        dataset[1]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "meta must be a readable JSON file"),
        ("{}", "meta must be an object of datasets"),
        ('{"a": 3}', "a must be an object, got 3"),
        ('{"a": {"annotation": "a.jsonl"}}', r"a\.root must be a path, got 'nothing'"),
        ('{"a": {"root": "."}}', r"a\.annotation must be a path"),
        ('{"a": {"root": ".", "annotation": "none.jsonl"}}', r"annotation must be a readable file, got .*none\.jsonl"),
        ('{"a": {"root": ".", "annotation": "a.jsonl", "repeat_time": 0}}', r"a\.repeat_time must be a number above 0"),
        ('{"a": {"root": ".", "annotation": "a.jsonl", "repeat_time": "2"}}', r"a\.repeat_time must be a number"),
        ('{"a": {"root": ".", "annotation": "a.jsonl", "repeat_time": 0.1}}', "draw at least one of 2 items"),
        (
            '{"a": {"root": ".", "annotation": "a.jsonl", "length": 3}}',
            r"a\.length must be the 2 entries of .*a\.jsonl",
        ),
        ('{"a": {"root": ".", "annotation": "a.jsonl", "data_augment": true}}', "data_augment must be false"),
        ('{"a": {"root": ".", "annotation": "a.jsonl", "max_dynamic_patch": 0}}', r"a\.max_dynamic_patch must be"),
        ('{"a": {"root": ".", "annotation": "a.jsonl", "max_dynamic_patch": true}}', r"a\.max_dynamic_patch must be"),
        ('{"a": {"root": ".", "annotation": "a.jsonl", "repeat_time": NaN}}', r"a\.repeat_time must be .* got nan"),
        ('{"a": {"root": ".", "annotation": "a.jsonl", "repeat_time": Infinity}}', r"at most 10000, got inf"),
        ('{"a": {"root": ".", "annotation": "a.jsonl", "repeat_times": 2}}', r"repeat_times must be spelt repeat_time"),
        ('{"a": {"root": ".", "annotation": "a.jsonl"}, "a": {}}', "the key 'a' stands twice"),
    ],
)
def test_a_broken_meta_file_is_refused_with_dataset_and_key(tmp_path, model_folder, content, reason):
    (tmp_path / "a.jsonl").write_text("{}\n{}\n")
    (tmp_path / "meta.json").write_text(content)
    with pytest.raises(DataError, match=reason):
        open_dataset(tmp_path / "meta.json", model_folder)


def test_paths_start_beside_the_meta_file_or_at_the_working_directory(write_dataset, model_folder, monkeypatch):
    meta = write_dataset([ONE])
    moved = meta.parent / "elsewhere" / "meta.json"
    moved.parent.mkdir()
    meta.rename(moved)
    with pytest.raises(DataError, match=r"elsewhere/shapes\.jsonl"):
        open_dataset(moved, model_folder)
    monkeypatch.chdir(meta.parent)
    assert open_dataset(moved, model_folder).lengths().vision_units.tolist() == [3]


def test_a_folder_whose_parts_do_not_fit_is_refused(write_dataset, model_folder, tmp_path):
    meta = write_dataset([ONE])
    for name, change, reason in [
        (
            "preprocessor_config.json",
            {"size": {"height": 64, "width": 64}},
            r"size of the preprocessor must be the vision_config's image_size",
        ),
        ("config.json", {"image_token_id": 3}, r"image_token_id in .*config\.json must be the id of <IMG_CONTEXT>"),
        ("config.json", {"model_type": "qwen2"}, "model_type must be one of internvl, .*, got 'qwen2'"),
    ]:
        folder = tmp_path / f"broken-{reason[:5]}"
        folder.mkdir()
        for file in model_folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
        with pytest.raises(ConfigError, match=reason):
            open_dataset(meta, folder)
    with pytest.raises(ConfigError, match="model's folder must be one with configuration and tokenizer"):
        open_dataset(meta, tmp_path / "nothing")


@pytest.fixture
def paths(write_dataset, tmp_path):
    """The same entries as InternVL's meta file and JSON lines, and as LLaVA's JSON array."""
    meta = write_dataset([ONE, NONE])
    entries = [json.loads(line) for line in (tmp_path / "shapes.jsonl").read_text().splitlines()]
    (tmp_path / "llava.json").write_text(json.dumps(entries, indent=1))
    return meta, tmp_path / "shapes.jsonl", tmp_path / "llava.json", tmp_path / "images"


def test_samples_are_those_of_internvls_format(paths, model_folder):
    meta, lines, array, images = paths
    expected = open_dataset(meta, model_folder)
    for file in (lines, array):
        dataset = open_dataset(file, model_folder, image_folder=images)
        assert dataset.lengths().content_hash == expected.lengths().content_hash
        for index in range(2):
            assert torch.equal(dataset[index]["input_ids"], expected[index]["input_ids"])
            assert torch.equal(dataset[index]["labels"], expected[index]["labels"])
        assert torch.equal(dataset[0]["pixel_values"], expected[0]["pixel_values"])


def test_several_files_are_several_sources(paths, model_folder):
    _, lines, array, images = paths
    dataset = open_dataset([lines, array], model_folder, image_folder=images)
    assert dataset.lengths().source.tolist() == [0, 0, 1, 1]
    assert [shard.name for shard in dataset.shards] == ["shapes", "llava"]


def test_a_broken_entry_of_an_array_is_named_by_its_line(paths, model_folder):
    _, _, array, images = paths
    array.write_text('[\n {"conversations": []},\n\n {"conversations":\n 3}]')
    with pytest.raises(DataError, match=r"llava\.json, line 2: .*(.|\n)*llava\.json, line 4: "):
        open_dataset(array, model_folder, image_folder=images).lengths()


def test_files_are_opened_by_what_they_hold(paths, model_folder):
    meta, lines, array, images = paths
    opened = [
        open_dataset(meta, model_folder),
        open_dataset(lines, model_folder, image_folder=images),
        open_dataset(array, model_folder, image_folder=images, max_tiles=4),
    ]
    assert len({dataset.lengths().content_hash for dataset in opened}) == 1
    array.rename(images / "here.json")
    assert open_dataset(images / "here.json", model_folder).lengths().vision_units.tolist() == [3, 0]


def test_what_cannot_be_opened_is_refused(paths, model_folder, tmp_path):
    with pytest.raises(ConfigError, match="image_folder must be left out for a meta file"):
        open_dataset(paths[0], model_folder, image_folder=tmp_path)
    with pytest.raises(DataError, match=r"readable text file, got .*none\.json"):
        open_dataset(tmp_path / "none.json", model_folder)
