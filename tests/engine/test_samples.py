"""What a dataset promises to training: each broken promise is named with its sample."""

import re

import pytest
import torch

from omnibal.data.lengths import SampleLengths
from omnibal.engine import loader
from omnibal.engine.loader import open_together
from omnibal.engine.samples import CheckedSamples, SampleRules, checked_lengths, checked_sample
from omnibal.errors import DataError
from omnibal.formats.collate import GRIDS
from omnibal.vlm import load_model
from omnibal.workspace import Workspace
from tests.engine.cases import SmallDataset, changed, settings
from tests.engine.small import IMAGE_TOKEN, VOCABULARY, small_config
from tests.families import models as families
from tests.vlm.families import family_samples
from tests.vlm.qwen import VIDEO_TOKEN, make_sample, tiny_qwen

INDEX = 2  # two images of two tiles and one, four tokens each; nine tokens of text
RULES = SampleRules.of(load_model(small_config()))


class Changed(SmallDataset):
    """The small samples, one of them changed."""

    pixels_of_text = None

    def __init__(self, change):
        super().__init__()
        sample = dict(self._samples[INDEX])
        self._changed = change(sample) or sample

    def __getitem__(self, index):
        return self._changed if index == INDEX else super().__getitem__(index)

    def text(self, index):
        if index != INDEX or not isinstance(self._changed, dict):
            return self[index]
        return self._changed | {"pixel_values": self.pixels_of_text}


def checked(change):
    return CheckedSamples(Changed(change), SmallDataset().lengths(), RULES)


def put(key, index, value):
    def change(sample):
        sample[key] = sample[key].clone()
        sample[key][index] = value

    return change


def cut(*keys):
    return lambda sample: sample.update({key: sample[key][:-1] for key in keys})


def test_good_samples_pass():
    dataset = SmallDataset()
    samples = CheckedSamples(dataset, checked_lengths(dataset), RULES)
    for index in range(len(samples)):
        assert samples[index] is dataset[index]
        assert samples.text(index)["pixel_values"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sample: [1, 2], "be a mapping of input_ids, labels and pixel_values, got list"),
        (lambda sample: sample | {"labels": None}, "have labels that are a 1-D tensor of int64, got none"),
        (lambda sample: sample | {"input_ids": [1, 2]}, "have input_ids that are a 1-D tensor of int64, got a list"),
        (
            lambda sample: sample | {"input_ids": sample["input_ids"][None]},
            "have input_ids that are a 1-D tensor of int64, got int64 of shape (1, 21)",
        ),
        (
            lambda sample: sample | {"labels": sample["labels"].float()},
            "have labels that are a 1-D tensor of int64, got float32 of shape (21,)",
        ),
        (cut("labels"), "have as many labels as input_ids, 21, got 20"),
        (cut("input_ids", "labels"), "have as many input_ids as its lengths() say, 21, got 20"),
        (put("input_ids", -1, VOCABULARY), "have input_ids from 0 to 60, the model's vocabulary, got 61"),
        (put("input_ids", -1, -1), "have input_ids from 0 to 60, the model's vocabulary, got -1"),
        (put("labels", -1, VOCABULARY), "have labels from 0 to 60 or -100, got 61"),
        (put("labels", -1, -1), "have labels from 0 to 60 or -100, got -1"),
        (put("labels", 0, 5), "begin with the label -100, since nothing comes before its first token, got 5"),
        (put("input_ids", -1, IMAGE_TOKEN), "have 4 image tokens (id 3) for each of 3 tiles, got 13"),
    ],
)
def test_broken_promises_name_the_sample(change, message):
    samples = checked(change)
    for read in (samples.__getitem__, samples.text):
        with pytest.raises(DataError, match=re.escape(f"sample {INDEX} must {message}")):
            read(INDEX)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut("pixel_values"), "have as many tiles as its lengths() say, 3, got 2"),
        (lambda sample: sample | {"pixel_values": None}, "have as many tiles as its lengths() say, 3, got 0"),
        (
            lambda sample: sample | {"pixel_values": torch.zeros(3, 3, 28, 14)},
            "have pixel_values of shape (tiles, 3, 28, 28), got float32 of shape (3, 3, 28, 14)",
        ),
        (
            lambda sample: sample | {"pixel_values": sample["pixel_values"].to(torch.uint8)},
            "have pixel_values of shape (tiles, 3, 28, 28), got uint8 of shape (3, 3, 28, 28)",
        ),
    ],
)
def test_pixels_are_what_the_lengths_say(change, message):
    with pytest.raises(DataError, match=re.escape(f"sample {INDEX} must {message}")):
        checked(change)[INDEX]


def test_texts_decode_no_image(monkeypatch):
    monkeypatch.setattr(Changed, "pixels_of_text", torch.zeros(3, 3, 28, 28))
    with pytest.raises(DataError, match=r"sample 2 must have no pixel_values in text\(\), got float32 of shape"):
        checked(lambda sample: None).text(INDEX)


def test_an_error_of_the_dataset_names_the_sample():
    class Failing(SmallDataset):
        def __getitem__(self, index):
            return {}["input_ids"]

    with pytest.raises(DataError, match="sample 5 must be readable, got KeyError: 'input_ids'"):
        CheckedSamples(Failing(), SmallDataset().lengths(), RULES)[5]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (SampleLengths([1], [7]), "must have an entry for each of the dataset's 32 samples, got 1"),
        ([(1, 7)] * 32, "must be SampleLengths, got list"),
    ],
)
def test_lengths_belong_to_the_dataset(lengths, message):
    dataset = SmallDataset()
    dataset.lengths = lambda: lengths
    with pytest.raises(DataError, match=message):
        checked_lengths(dataset)


def test_a_dataset_without_samples_is_refused_by_its_name():
    dataset = SmallDataset(0)
    dataset.lengths = lambda: SampleLengths([], [])
    with pytest.raises(DataError, match=r"^held-out data must hold at least one sample, got none$"):
        checked_lengths(dataset, "held-out data")


@pytest.mark.parametrize("part", ["train", "held_out"])
def test_a_file_without_samples_is_named_before_anything_is_arranged(tmp_path, monkeypatch, part):
    file = tmp_path / "broken.jsonl"  # of which "broken": "skip" has left nothing
    file.write_text("")
    config = changed(settings("model", num_stages=1), "data", **{part: str(file)})
    workspace = Workspace.read(changed(config, "run", output=str(tmp_path)))
    dataset = SmallDataset(0)
    dataset.lengths = lambda: SampleLengths([], [])
    monkeypatch.setattr(Workspace, "dataset", lambda *_, **__: dataset)
    monkeypatch.setattr(loader.dist, "get_rank", lambda: 0)
    expected = re.escape(f"omnibal.data.{part} ({file}) must hold at least one sample, got none")
    with pytest.raises(DataError, match=expected):
        open_together(workspace, part)


QWEN = SampleRules.of(load_model(tiny_qwen("qwen2_5_vl")))
SEEN = make_sample(0, grids=((4, 6), (2, 2)))


def problem(sample, *, decoded=True):
    return QWEN.problem(sample, tiles=len(SEEN["pixel_values"]), tokens=len(SEEN["input_ids"]), decoded=decoded)


def test_patches_with_their_grids_pass():
    assert problem(SEEN) is None
    assert problem(SEEN | {"pixel_values": None}, decoded=False) is None
    text = make_sample(0) | {GRIDS: None}
    assert QWEN.problem(text, tiles=0, tokens=len(text["input_ids"]), decoded=True) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({GRIDS: None}, "have image_grid_thw that are a tensor of int64 of shape (entries, 3), got none"),
        ({GRIDS: torch.ones(2, 2).long()}, "of shape (entries, 3), got int64 of shape (2, 2)"),
        ({GRIDS: torch.tensor([[1, 4, 6]])}, "have 6 image tokens (id 3) for its images, got 7"),
        ({GRIDS: torch.tensor([[1, 2, 2], [1, 4, 6]])}, "must stand in runs of [1, 6], one for each grid"),
        ({GRIDS: torch.tensor([[2, 2, 6], [1, 2, 2]])}, "got one of 2 frames: a video"),
        (
            {"pixel_values": torch.zeros(28, 5)},
            "have pixel_values of shape (patches, 24), got float32 of shape (28, 5)",
        ),
        (
            {"input_ids": SEEN["input_ids"].clone().index_fill_(0, torch.tensor([1]), VIDEO_TOKEN)},
            "for its images, got",
        ),
    ],
)
def test_patches_that_do_not_fit_are_named(change, message):
    assert message in problem(SEEN | change)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_videos_fit_their_tokens(family):
    sample = make_sample(0, grids=((2, 6),), videos=((3, 4, 4), (1, 2, 2)), family=family)
    rules = SampleRules.of(load_model(tiny_qwen(family)))
    sizes = {"tiles": 12 + 48 + 4, "tokens": len(sample["input_ids"]), "decoded": True}
    assert rules.problem(sample, **sizes) is None
    assert rules.problem(sample, **sizes | {"tiles": 12}) == "have as many patches as its lengths() say, 12, got 64"
    # A stream's buffer holds the patches of images and videos as an indexed sample's reader gives them.
    drawn, joined = checked_sample(sample, rules, torch.float32), rules.positions.joined(sample)
    assert drawn.loads == (64, sizes["tokens"], int((sample["labels"][1:] != -100).sum()))
    for name in ("input_ids", "pixel_values", "positions"):
        assert torch.equal(drawn.held[name], joined[name]), name
    wrong = sample | {"video_grid_thw": torch.tensor([[3, 4, 4], [1, 2, 4]])}
    assert "have videos that fit its tokens: video tokens must stand in runs of" in rules.problem(wrong, **sizes)


def test_what_a_family_reads_of_images_fits_its_tokens():
    several, text = (family_samples("llava_onevision")[index] for index in (2, 1))
    rules = SampleRules.of(load_model(families.small_config("llava_onevision")))
    tokens, image_tokens = len(several["input_ids"]), 3 * (3 * 3 + 1)

    def found(**changes):
        return rules.problem(several | changes, tiles=3, tokens=tokens, decoded=True)

    assert found() is None
    assert rules.problem(text, tiles=0, tokens=5, decoded=True) is None
    assert rules.problem(several | {"pixel_values": None}, tiles=3, tokens=tokens, decoded=False) is None
    assert found(image_sizes=None) == "have image_sizes that are a tensor of int64 of shape (entries, 2), got none"
    floats = several["batch_num_images"].float()
    assert found(batch_num_images=floats).startswith("have batch_num_images that are a tensor of int64 of shape (ent")
    assert found(batch_num_images=torch.tensor([2])) == (
        "have images that fit one another: batch_num_images must add up to 3, the entries of image_sizes, got [2]"
    )
    apart = found(batch_num_images=torch.tensor([1, 2]))  # the first one would be cut into tiles
    assert re.fullmatch(rf"have \d+ image tokens \(id 600\) for its images, got {image_tokens}", apart)
