"""Conversations with videos: token ids, lengths and patches against transformers' processors; forms and refusals."""

import io
import json
import tarfile

import pytest
import torch
from PIL import Image
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from omnibal.advise.measuring import measure
from omnibal.advise.models import read_model
from omnibal.advise.present import Present
from omnibal.errors import ConfigError, DataError
from omnibal.formats import media
from omnibal.formats.chat import read_conversation
from omnibal.formats.conversations import open_dataset, open_streams
from tests.families.models import VIDEO_PROCESSORS, image_processor, save_folder
from tests.families.videos import make_clip, whole_video_processor
from tests.formats.test_model_format import as_messages

ASKED = [("human", "<video>\nWhat is <image> ?"), ("gpt", "the ball"), ("human", "<video>Sure?"), ("gpt", "one hat")]
ALONE = [("human", "What colour?"), ("gpt", "red")]
HTML = [("human", "What is <video> ?"), ("gpt", "a tag")]


@pytest.fixture(params=VIDEO_PROCESSORS)
def family(request, model_folder, tmp_path):
    return request.param, tmp_path / "model", save_folder(request.param, tmp_path / "model", model_folder)


@pytest.fixture
def annotations(tmp_path):
    """Videos of two containers, an image between them, and a list of frames."""
    make_clip(tmp_path / "a.mp4", 40, 30, 41, 10)
    make_clip(tmp_path / "b.webm", 36, 48, 17, 25)
    for name, size in {"c.png": (50, 40), "1.jpg": (32, 32), "2.jpg": (32, 32), "3.jpg": (32, 32)}.items():
        Image.linear_gradient("L").resize(size).convert("RGB").save(tmp_path / name)
    records = [
        {"conversations": ASKED, "video": ["a.mp4", "b.webm"], "image": "c.png"},
        {"conversations": ALONE, "videos": [["1.jpg", "2.jpg", "3.jpg"]]},
        {"conversations": ALONE},
        {"conversations": HTML},
    ]
    turned = [r | {"conversations": [{"from": f, "value": v} for f, v in r["conversations"]]} for r in records]
    (tmp_path / "data.json").write_text(json.dumps(turned))
    return tmp_path / "data.json"


def by_transformers(whole, tokenizer, model_type, turns, files, picture=None):
    """Token ids and fields of the video processor, as a whole processor makes them."""
    messages = as_messages(model_type, [{"from": who, "value": text} for who, text in turns])
    for message in messages:  # the test of images knows images alone
        message["content"] = [part for given in message["content"] for part in with_videos(given)]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    frames = isinstance(files, list) and files[0].endswith(".jpg")
    made, replaced = whole._process_videos([files] if frames else files, **{"do_sample_frames": not frames})
    vars(whole).update(image_token="<|image_pad|>", image_processor=image_processor(model_type))
    images = []
    if picture is not None:
        images = [whole.replace_image_token(whole.image_processor([picture], return_tensors="pt"), 0)]
    ((expanded,), _) = whole.get_text_with_replacements([text], images, replaced)
    return tokenizer(expanded)["input_ids"], made


def with_videos(part):
    if part["type"] != "text":
        return [part]
    before, *after = part["text"].split("<video>")
    found = [{"type": "text", "text": before}] if before else []
    return found + [one for text in after for one in ({"type": "video"}, {"type": "text", "text": text})]


def test_token_ids_and_lengths_are_those_of_transformers(family, annotations, monkeypatch, caplog):
    model_type, folder, tokenizer = family
    media._tell_of_counting.cache_clear()
    dataset = open_dataset(annotations, folder)
    lengths = dataset.lengths()
    assert [record.message.partition(":")[0] for record in caplog.records if "counted" in record.message] == [
        "Frames are counted where a container has no count, by reading all of it once"
    ]
    item = dataset[0]
    whole, _ = whole_video_processor(monkeypatch, model_type, tokenizer, return_metadata=True)
    root = annotations.parent
    ids, made = by_transformers(
        whole, tokenizer, model_type, ASKED, [str(root / "a.mp4"), str(root / "b.webm")], Image.open(root / "c.png")
    )
    assert item["input_ids"].tolist() == ids
    assert torch.equal(item["video_grid_thw"], made["video_grid_thw"])
    difference = (item["pixel_values_videos"] - made["pixel_values_videos"]).abs()
    assert difference.mean() < 0.02 and difference.max() < 0.2  # Pillow resizes in 8 bits
    if model_type == "qwen2_5_vl":
        torch.testing.assert_close(item["second_per_grid_ts"], torch.tensor(made["second_per_grid_ts"]))
    units = [int(made["video_grid_thw"].prod(1).sum()), len(item["pixel_values"])]
    assert (lengths.vision_units[0], lengths.video_units[0]) == (sum(units), units[0])
    grids = [*made["video_grid_thw"].tolist(), *item["image_grid_thw"].tolist()]
    assert lengths.vision_squared[0] == sum(slices * (rows * columns) ** 2 for slices, rows, columns in grids)
    for number in range(4):
        found = dataset[number]
        assert lengths.llm_tokens[number] == len(found["input_ids"])
        assert lengths.target_tokens[number] == (found["labels"] != -100).sum()
        assert torch.equal(dataset.text(number)["input_ids"], found["input_ids"])
    said = tokenizer.decode(item["labels"][item["labels"] != -100]).replace(" ", "")
    assert said == "theball<|im_end|>onehat<|im_end|>"
    assert lengths.kinds.tolist() == [3, 2, 0, 0]
    assert "video_grid_thw" not in dataset[2]


def test_advice_counts_as_training_does(family, annotations):
    model_type, folder, _ = family
    lengths = open_dataset(annotations, folder).lengths()
    found = measure([annotations], read_model(str(folder)), Present()).lengths
    for name in (
        "vision_units",
        "video_units",
        "vision_squared",
        *(["llm_tokens"] if model_type == "qwen3_vl" else []),
    ):
        assert found.columns()[name].tolist() == lengths.columns()[name].tolist(), name


def test_images_as_frames_are_all_taken(family, annotations, monkeypatch):
    model_type, folder, tokenizer = family
    item = open_dataset(annotations, folder)[1]
    whole, _ = whole_video_processor(monkeypatch, model_type, tokenizer, return_metadata=True)
    frames = torch.zeros(3, 3, 32, 32, dtype=torch.uint8)
    made, (text,) = whole._process_videos([frames], do_sample_frames=False)
    assert torch.equal(item["video_grid_thw"], made["video_grid_thw"])
    runs = text.count("<|video_pad|>")
    assert (item["input_ids"] == tokenizer.convert_tokens_to_ids("<|video_pad|>")).sum() == runs
    if model_type == "qwen2_5_vl":
        torch.testing.assert_close(item["second_per_grid_ts"], torch.tensor(made["second_per_grid_ts"]))


def tar_of(folder, record, *files):
    """A shard of one sample: a record, and files beside it in their order."""
    with tarfile.open(folder / "shard.tar", "w") as tar:
        for number, name in enumerate(["record.json", *files]):
            kind = name.rpartition(".")[2]
            content = json.dumps(record).encode() if number == 0 else (folder / name).read_bytes()
            member = tarfile.TarInfo(f"one.{kind if number == 0 else f'{number}.{kind}'}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return folder / "shard.tar"


def same_items(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name], name


def test_videos_lie_in_shards_and_come_in_streams(annotations, model_folder, tmp_path):
    save_folder("qwen2_5_vl", tmp_path / "model", model_folder)
    dataset = open_dataset(annotations, tmp_path / "model")
    record = json.loads(annotations.read_text())[0]
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps(record))
    shard = tar_of(tmp_path, {"conversations": record["conversations"]}, "a.mp4", "c.png", "b.webm")
    by_number = open_dataset(shard, tmp_path / "model")
    assert [column.tolist() for column in by_number.lengths().take([0]).columns().values()] == [
        column.tolist() for column in dataset.lengths().take([0]).columns().values()
    ]
    same_items(dataset[0], by_number[0])
    for path in (lines, shard):
        (stream,) = open_streams(path, tmp_path / "model").values()
        same_items(dataset[0], next(iter(stream)))


CLIP = {"type": "video", "video": "a.mp4"}
SAID = {"role": "assistant", "content": "A cat."}


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [{"from": "human", "value": "<video>\nWhat?"}, {"from": "gpt", "value": "A cat."}]},
        {"messages": [{"role": "user", "content": "What?"}, SAID], "videos": ["a.mp4"]},
        {"messages": [{"role": "user", "content": [CLIP, {"type": "text", "text": "\nWhat?"}]}, SAID]},
        {"query": "<video>\nWhat?", "response": "A cat.", "videos": ["a.mp4"]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "a.mp4"}},
                                             {"type": "text", "text": "\nWhat?"}]},
                SAID,
            ]
        },
    ],
)  # fmt: skip
def test_forms_of_records_are_read_alike(record, tmp_path):
    if "conversations" in record:
        record = record | {"video": "a.mp4"}
    read = read_conversation(record, tmp_path)
    assert read.videos == (tmp_path / "a.mp4",)
    assert read.turns[0].text == "<video>\nWhat?"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"video": "a.mp4", "videos": ["b.mp4"]}, "must name its videos under one key"),
        ({"video": ["a.mp4", "b.mp4"], "query": "<video>?"}, "one <video> per video, got 1 for 2 video"),
        ({"video": "https://x.org/a.mp4"}, "video must be a path or content, got an address"),
        (
            {"query": "", "messages": [{"role": "user", "content": [CLIP | {"fps": 1.0}]}, SAID]},
            "must leave fps to the video processor of the model's folder, got 1.0; video_preprocessor",
        ),
    ],
)
def test_what_cannot_be_read_is_named(change, message, tmp_path):
    with pytest.raises(DataError, match=message):
        read_conversation({"query": "What?", "response": "A cat."} | change, tmp_path)


def test_models_without_videos_and_other_processors_are_refused(model_folder, annotations, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="must be one whose videos are known, got 'internvl'"):
        open_dataset(annotations, model_folder).lengths()
    folder = tmp_path / "third"
    save_folder("qwen3_vl", folder, model_folder)
    monkeypatch.setattr(Qwen3VLVideoProcessor, "sample_frames", lambda self, metadata, **others: [0, 1, 2])
    with pytest.raises(ConfigError, match=r"must sample and resize videos as 5.23 does, got .* makes 3 frames"):
        open_dataset(annotations, folder).lengths()
    monkeypatch.undo()
    settings = folder / "video_preprocessor_config.json"
    settings.write_text(json.dumps({"video_processor_type": "RandomFrames"}))
    with pytest.raises(ConfigError, match="video_processor_type must be Qwen3VLVideoProcessor, got 'RandomFrames'"):
        open_dataset(annotations, folder).lengths()


def test_videos_without_the_extra_say_which(annotations, monkeypatch):
    import sys

    from omnibal.errors import MissingExtraError

    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtraError, match=r"omnibal\[video\]"):
        media.video_header((annotations.parent / "a.mp4").read_bytes())
