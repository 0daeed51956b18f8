import json

import pytest
import torch

from omnibal.data.sources.conversations import open_dataset
from omnibal.errors import ConfigError, DataError

SAMPLES = [
    ([("human", "<image>\nWhat is red?"), ("gpt", "the ball")], [(120, 50)]),
    ([("human", "What colour is a red hat?"), ("gpt", "red")], []),
]


@pytest.fixture
def paths(write_dataset, tmp_path):
    """The same entries as InternVL's meta file and JSON lines, and as LLaVA's JSON array."""
    meta = write_dataset(SAMPLES)
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
