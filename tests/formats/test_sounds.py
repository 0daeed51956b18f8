"""Lengths of sounds from headers are those of transformers' processors, and nothing is decoded for them."""

import json

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from transformers import Qwen2_5OmniProcessor, Qwen2AudioProcessor, WhisperFeatureExtractor

from omnibal.advise.measuring import measure
from omnibal.advise.models import read_model
from omnibal.advise.present import Present
from omnibal.errors import ConfigError, DataError
from omnibal.families.base import SoundHeader, SoundLoad
from omnibal.families.sounds import resampled, sound_rule
from omnibal.formats import model_format
from omnibal.formats.chat import read_conversation
from omnibal.formats.conversations import open_dataset, open_streams
from omnibal.formats.media import load_sound, sound_header
from tests.formats.test_videos import same_items, tar_of
from tests.integrations.sounds import save_sound_folder

RATES = (8000, 11025, 16000, 22050, 24000, 32000, 44100, 48000)
FORMATS = (("wav", "PCM_16"), ("wav", "FLOAT"), ("flac", "PCM_16"), ("ogg", "VORBIS"))
PROCESSORS = {"qwen2_audio": Qwen2AudioProcessor, "qwen2_5_omni_thinker": Qwen2_5OmniProcessor}
SAID = {"role": "assistant", "content": "a ball"}


def processor_of(model_type, extractor):
    """The part of transformers' processor that counts the tokens of sounds."""
    processor = object.__new__(PROCESSORS[model_type])
    vars(processor).update(feature_extractor=extractor, audio_token="<|AUDIO|>")
    return processor


def check_sounds(folder, count, seconds):
    """Made-up sounds of all rates, some shorter than a frame is long, and as long as the model hears."""
    rng = np.random.default_rng(count)
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=seconds)
    for number in range(count):
        rate, channels, (kind, subtype) = rng.choice(RATES), rng.integers(1, 3), FORMATS[number % len(FORMATS)]
        length = int(rng.integers(rate // 12, rate * seconds)) if number % 10 else int(rate * seconds)
        file = folder / f"{number}.{kind}"
        soundfile.write(file, 0.1 * rng.standard_normal((length, channels)), int(rate), subtype=subtype)
        header = sound_header(file)
        assert header == sound_header(file.read_bytes()) == (length, rate)
        samples = load_sound(file, 16000)
        assert len(samples) == resampled(header, 16000)
        for model_type in PROCESSORS:
            processor = processor_of(model_type, extractor)
            processed, (text,) = processor._process_audio(
                [samples], sampling_rate=16000, return_attention_mask=True, return_tensors="pt"
            )
            load = sound_rule({"model_type": model_type}, extractor.to_dict())(header)
            assert load.llm_tokens == text.count("<|AUDIO|>")
            frames = int(processed["feature_attention_mask"].sum())
            positions = (frames - 1) // 2 + 1
            assert load[:2] == ((1, 0) if model_type == "qwen2_audio" else (0, positions))


def test_lengths_are_those_of_the_processors(tmp_path):
    check_sounds(tmp_path, 40, 2)


@pytest.mark.slow
def test_lengths_of_500_sounds_are_those_of_the_processors(tmp_path):
    check_sounds(tmp_path, 500, 30)


def test_no_sound_is_decoded_to_be_measured(tmp_path, monkeypatch):
    soundfile.write(tmp_path / "a.wav", np.zeros((44100, 2)), 44100)
    monkeypatch.setattr(soundfile.SoundFile, "read", None)
    assert sound_header(tmp_path / "a.wav") == SoundHeader(44100, 44100)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (16000 * 30 + 1, r"sound must last at most 30 s, got 30\.0 s; the model hears no more"),
        (900, r"sound must last at least 0\.07 s, got 0\.056 s"),
    ],
)
def test_sounds_that_the_model_does_not_hear_whole_are_refused(samples, message):
    rule = sound_rule({"model_type": "qwen2_audio"}, WhisperFeatureExtractor().to_dict())
    with pytest.raises(ValueError, match=message):
        rule(SoundHeader(samples, 16000))
    assert rule(SoundHeader(16000 * 30, 16000)) == SoundLoad(1, 0, 750)
    with pytest.raises(ConfigError, match=r"model_type must be one of qwen2_audio, .* got 'qwen2_vl'"):
        sound_rule({"model_type": "qwen2_vl"}, {})


def test_files_that_are_no_sounds_are_named(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=r"sound must have a readable header, got .*a\.wav"):
        sound_header(tmp_path / "a.wav")
    with pytest.raises(ValueError, match=r"sound must exist, got .*b\.wav"):
        sound_header(tmp_path / "b.wav")


@pytest.fixture(params=PROCESSORS)
def heard(request, model_folder, tmp_path):
    """A model's folder, and records: two sounds of unlike rates, a text, a sound beside an image where one is seen."""
    rng, model = np.random.default_rng(3), tmp_path / "model"
    soundfile.write(tmp_path / "a.wav", 0.1 * rng.standard_normal((30_000, 2)), 22_050)
    soundfile.write(tmp_path / "b.flac", 0.1 * rng.standard_normal(9_000), 16_000)
    Image.linear_gradient("L").resize((40, 24)).convert("RGB").save(tmp_path / "c.png")
    asked = [
        {"type": "image", "image": "c.png"},
        {"type": "audio", "audio": "b.flac"},
        {"type": "text", "text": "What?"},
    ]
    asked = asked[request.param == "qwen2_audio" :]
    records = [
        {
            "messages": [{"role": "user", "content": "<audio>\nWhat is this ? <audio>"}, SAID],
            "audios": ["a.wav", "b.flac"],
        },
        {"messages": [{"role": "user", "content": "What is <audio> ?"}, SAID]},
        {"messages": [{"role": "user", "content": asked}, SAID]},
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    return request.param, model, tmp_path / "data.jsonl", *save_sound_folder(request.param, model, model_folder)


def test_conversations_become_what_transformers_makes_of_them(heard, monkeypatch):
    model_type, folder, data, tokenizer, extractor = heard
    dataset = open_dataset(data, folder, cache=data.parent / "kept")
    lengths = dataset.lengths()
    parts = [{"type": "audio"}, {"type": "text", "text": "What is this ? "}, {"type": "audio"}]
    if model_type != "qwen2_audio":  # whose template breaks the line behind a sound
        parts[1]["text"] = "\n" + parts[1]["text"]
    text = tokenizer.apply_chat_template([{"role": "user", "content": parts}, SAID], tokenize=False)
    samples = [load_sound(data.parent / name, 16_000) for name in ("a.wav", "b.flac")]
    made, replaced = processor_of(model_type, extractor)._process_audio(
        samples, sampling_rate=16_000, return_attention_mask=True, return_tensors="pt"
    )
    for sound in replaced:
        text = text.replace("<|AUDIO|>", sound.replace("AUDIO", "PIECE"), 1)
    item = dataset[0]
    assert item["input_ids"].tolist() == tokenizer(text.replace("PIECE", "AUDIO"))["input_ids"]
    for name in ("input_features", "feature_attention_mask"):
        torch.testing.assert_close(item[name], made[name])
    units = [2, 0, 1] if model_type == "qwen2_audio" else [69 + 29, 0, 29]
    found = lengths.vision_units if model_type == "qwen2_audio" else lengths.sound_units
    assert (found.tolist(), lengths.vision_unit) == (units, "windows" if model_type == "qwen2_audio" else "patches")
    for number in range(3):
        found = dataset[number]
        assert lengths.llm_tokens[number] == len(found["input_ids"])
        assert lengths.target_tokens[number] == (found["labels"] != -100).sum()
        assert set(found) - {"image_grid_thw"} == {"input_ids", "labels", "pixel_values"} | (
            set() if number == 1 else {"input_features", "feature_attention_mask"}
        )
    advised = measure([data], read_model(str(folder)), Present()).lengths
    assert advised.columns().keys() >= lengths.columns().keys() - {"vision_squared"}
    assert advised.vision_units.tolist() == lengths.vision_units.tolist()
    again = open_dataset(data, folder, cache=data.parent / "kept")
    monkeypatch.setattr(again, "_measure_all", None)
    assert again.lengths().content_hash == lengths.content_hash
    soundfile.write(data.parent / "b.flac", np.zeros(8_000), 16_000)
    assert open_dataset(data, folder, cache=data.parent / "kept").lengths().content_hash != lengths.content_hash


def test_sounds_that_cannot_be_heard_are_named_with_their_lines(heard):
    _, folder, data, *_ = heard
    soundfile.write(data.parent / "long.wav", np.zeros(16_000 * 3), 16_000)
    for sound, message in (
        ("none.wav", r"sound must exist, got .*none\.wav"),
        ("data.jsonl", r"sound must have a readable header, got .*data\.jsonl"),
        ("long.wav", r"sound must last at most 2 s, got 3\.0 s; the model hears no more"),
    ):
        record = {"query": "What?", "response": "a ball", "audio": sound}
        (data.parent / "broken.jsonl").write_text(json.dumps(record))
        with pytest.raises(DataError, match=rf"broken\.jsonl, line 1: {message}"):
            open_dataset(data.parent / "broken.jsonl", folder).lengths()


def test_a_header_that_lies_and_a_model_that_does_not_hear_are_refused(heard, model_folder, monkeypatch):
    _, folder, data, *_ = heard
    with pytest.raises(ConfigError, match="must be one whose sounds are known, got 'internvl'"):
        open_dataset(data, model_folder).lengths()
    monkeypatch.setattr(model_format, "sound_header", lambda sound: SoundHeader(8_000, 16_000))
    with pytest.raises(DataError, match=r"sound must decode to the length that its header says, got another: .*a\.wav"):
        open_dataset(data, folder)[0]


PART = {"type": "audio", "audio_url": "a.wav"}


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": [{"role": "user", "content": "<audio>\nWhat?"}, SAID], "audio": "a.wav"},
        {"messages": [{"role": "user", "content": "What?"}, SAID], "audios": ["a.wav"]},
        {"query": "<audio>\nWhat?", "response": "a ball", "audios": {"path": "a.wav"}},
        {"messages": [{"role": "user", "content": [PART, {"type": "text", "text": "\nWhat?"}]}, SAID]},
    ],
)
def test_forms_of_records_are_read_alike(asked, tmp_path):
    read = read_conversation(asked, tmp_path)
    assert (read.sounds, read.turns[0].text) == ((tmp_path / "a.wav",), "<audio>\nWhat?")


def test_parts_of_a_sound_are_refused(tmp_path):
    record = {"messages": [{"role": "user", "content": [PART | {"audio_start": 1.0}]}, SAID]}
    with pytest.raises(DataError, match=r"must leave audio_start to the audio processor of .* got 1\.0; cut the file"):
        read_conversation(record, tmp_path)


def test_sounds_lie_in_shards_and_come_in_streams(heard):
    _, folder, data, *_ = heard
    dataset, record = open_dataset(data, folder), json.loads(data.read_text().splitlines()[0])
    shard = tar_of(data.parent, {"messages": record["messages"]}, "a.wav", "b.flac")
    same_items(dataset[0], open_dataset(shard, folder)[0])
    for path in (data, shard):
        (stream,) = open_streams(path, folder).values()
        same_items(dataset[0], next(iter(stream)))
