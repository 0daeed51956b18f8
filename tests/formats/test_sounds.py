"""Lengths of sounds from headers are those of transformers' processors, and nothing is decoded for them."""

import numpy as np
import pytest
import soundfile
from transformers import Qwen2_5OmniProcessor, Qwen2AudioProcessor, WhisperFeatureExtractor

from omnibal.errors import ConfigError
from omnibal.families.sounds import SoundHeader, SoundLoad, resampled, sound_rule
from omnibal.formats.sounds import load_sound, sound_header

RATES = (8000, 11025, 16000, 22050, 24000, 32000, 44100, 48000)
FORMATS = (("wav", "PCM_16"), ("wav", "FLOAT"), ("flac", "PCM_16"), ("ogg", "VORBIS"))
PROCESSORS = {"qwen2_audio": Qwen2AudioProcessor, "qwen2_5_omni": Qwen2_5OmniProcessor}


def processor_of(model_type, extractor):
    """The part of transformers' processor that counts the tokens of sounds."""
    processor = object.__new__(PROCESSORS[model_type])
    vars(processor).update(feature_extractor=extractor, audio_token="S")
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
            assert load.llm_tokens == len(text)
            frames = int(processed["feature_attention_mask"].sum())
            units = len(processed["input_features"]) if model_type == "qwen2_audio" else (frames - 1) // 2 + 1
            assert load.sound_units == units


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
    assert rule(SoundHeader(16000 * 30, 16000)) == SoundLoad(1, 750)
    with pytest.raises(ConfigError, match=r"model_type must be one of qwen2_audio, .* got 'qwen2_vl'"):
        sound_rule({"model_type": "qwen2_vl"}, {})


def test_files_that_are_no_sounds_are_named(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=r"sound must have a readable header, got .*a\.wav"):
        sound_header(tmp_path / "a.wav")
    with pytest.raises(ValueError, match=r"sound must exist, got .*b\.wav"):
        sound_header(tmp_path / "b.wav")
