import json
import pickle
import shutil

import numpy as np
import pytest
from PIL import Image

from omnibal.errors import DataError
from omnibal.formats import rows
from omnibal.formats.conversations import ConversationDataset, open_dataset

ONE = ([("human", "<image>\nWhat is red?"), ("gpt", "the ball")], [(120, 50)])
NONE = ([("human", "What colour is a red hat?"), ("gpt", "red")], [])


@pytest.fixture
def measured_items(monkeypatch):
    """Counts the items that are measured."""
    counts = []
    measure = ConversationDataset._measure
    monkeypatch.setattr(
        ConversationDataset, "_measure", lambda self, items: counts.append(len(items)) or measure(self, items)
    )
    return counts


@pytest.fixture
def open_again(write_dataset, model_folder, tmp_path):
    """Opens the same data with the same cache."""
    meta = write_dataset([ONE, NONE] * 100, repeat_time=1.5)
    return lambda **options: open_dataset(meta, model_folder, cache=tmp_path / "cache", **{"decode": False} | options)


def kept_lengths(folder):
    """What the cache holds beside the indexes of annotation files."""
    return [path for path in (folder / "cache").iterdir() if path.name != "annotations"]


def test_a_second_run_measures_few_items_and_maps_the_lengths(open_again, measured_items):
    first = open_again().lengths()
    assert sum(measured_items) == 200
    measured_items.clear()
    again = open_again().lengths()
    assert sum(measured_items) == 64
    assert again.content_hash == first.content_hash
    assert isinstance(again.vision_units.base, np.memmap)


@pytest.mark.parametrize("options", [{"max_tiles": 1}, {"min_tiles": 4}])
def test_other_settings_are_measured_anew(open_again, options):
    first, other = open_again().lengths(), open_again(**options).lengths()
    assert first.content_hash != other.content_hash
    assert open_again().lengths().content_hash == first.content_hash


def test_other_annotations_and_other_models_are_measured_anew(open_again, measured_items, model_folder, tmp_path):
    open_again().lengths()
    path = tmp_path / "shapes.jsonl"
    path.write_text(path.read_text().replace("the ball", "the red ball"))
    measured_items.clear()
    open_again().lengths()
    assert sum(measured_items) == 200
    other_model = tmp_path / "other_model"
    shutil.copytree(model_folder, other_model)
    settings = json.loads((other_model / "preprocessor_config.json").read_text()) | {"max_patches": 2}
    (other_model / "preprocessor_config.json").write_text(json.dumps(settings))
    measured_items.clear()
    open_dataset(tmp_path / "meta.json", other_model, cache=tmp_path / "cache", decode=False).lengths()
    assert sum(measured_items) == 200


def test_other_images_of_the_same_names_are_measured_anew(open_again, tmp_path):
    assert open_again().lengths().vision_units.max() == 3
    for path in (tmp_path / "images").iterdir():
        Image.new("RGB", (200, 200)).save(path)
    assert open_again().lengths().vision_units.max() == 5


def test_problems_are_kept_until_they_are_mended(open_again, measured_items, tmp_path):
    lost = tmp_path / "images" / "shapes-7.png"
    content = lost.read_bytes()
    lost.unlink()
    first = open_again(broken="skip")
    measured_items.clear()
    again = open_again(broken="skip")
    assert sum(measured_items) == 65
    assert again.skipped == first.skipped
    assert len(again) == len(again.lengths()) == len(first) < 300
    with pytest.raises(DataError, match=r"1 of 200 items(.|\n)*shapes-7\.png"):
        open_again().lengths()
    lost.write_bytes(content)
    assert len(open_again().lengths()) == 300


def test_a_broken_cache_is_measured_anew_and_replaced(open_again, measured_items, tmp_path, caplog):
    first = open_again().lengths()
    (kept,) = kept_lengths(tmp_path)
    (kept / "llm_tokens.npy").write_bytes(b"nonsense")
    assert open_again().lengths().content_hash == first.content_hash
    assert "measured anew" in caplog.text
    measured_items.clear()
    open_again().lengths()
    assert sum(measured_items) == 64
    assert kept_lengths(tmp_path) == [kept]


def test_where_another_process_has_measured_nothing_is_read_but_what_it_kept(
    open_again, measured_items, tmp_path, caplog, monkeypatch
):
    with pytest.raises(DataError, match="must be kept where another process has measured the samples"):
        open_again(measured=True).lengths()
    (tmp_path / "images" / "shapes-7.png").unlink()
    first = open_again(broken="skip")
    measured_items.clear()
    caplog.clear()
    monkeypatch.setattr(rows, "scan_json", None)  # no annotation is read
    again = open_again(broken="skip", measured=True)
    assert measured_items == []
    assert caplog.text == ""
    assert again.skipped == first.skipped
    assert again.lengths().content_hash == first.lengths().content_hash
    assert [again[i]["input_ids"].tolist() for i in range(len(again))] == [
        first[i]["input_ids"].tolist() for i in range(len(first))
    ]


def test_what_loader_processes_get_does_not_grow_with_the_data(write_dataset, model_folder, tmp_path):
    sizes = []
    for count in (10, 2000):
        dataset = open_dataset(write_dataset([NONE] * count), model_folder, cache=tmp_path / str(count))
        sizes.append(len(pickle.dumps((dataset, dataset.lengths()))))
    assert sizes[1] < sizes[0] + 100
