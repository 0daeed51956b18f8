"""What sounds bring to Qwen2-Audio and to Qwen2.5-Omni's thinker, by the samples and the rate that a header states.

Sources: transformers 5.23, ``WhisperFeatureExtractor`` (frames) and ``_get_feat_extract_output_lengths`` (tokens); Chu
et al., "Qwen2-Audio" (2024), section 2; Xu et al., "Qwen2.5-Omni" (2025), section 2.2, for blocks of sound.
"""

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from omnibal.errors import ConfigError
from omnibal.families.base import Config, size

LEAST_TOKENS: Final = 2
"""transformers' Qwen2-Audio takes a row without two neighbouring tokens of sound for one that is not expanded yet."""


class SoundHeader(NamedTuple):
    """What a file says of a sound without decoding it."""

    samples: int
    """Samples of one channel."""
    rate: int
    """Samples a second."""


class SoundLoad(NamedTuple):
    """What one sound brings."""

    sound_units: int
    """Windows of Qwen2-Audio, each as long as the longest sound; positions of Qwen2.5-Omni's encoder."""
    llm_tokens: int


SoundRule = Callable[[SoundHeader], SoundLoad]
"""From a sound's header to what the sound brings; a ValueError says why the model refuses such a sound."""
SOUND_MODELS: Final = {"qwen2_audio": True, "qwen2_5_omni": False, "qwen2_5_omni_thinker": False}
"""Model types with an encoder of sound, and whether every sound fills a window."""


def sound_rule(config: Config, extractor: Config) -> SoundRule:
    """The rule of a model, from its configuration and its feature extractor's, both as dicts.

    >>> extractor = {"sampling_rate": 16000, "hop_length": 160, "chunk_length": 30}
    >>> rule = sound_rule({"model_type": "qwen2_audio"}, extractor)
    >>> rule(SoundHeader(samples=44100, rate=44100))
    SoundLoad(sound_units=1, llm_tokens=25)
    """
    if config.get("model_type") not in SOUND_MODELS:
        raise ConfigError(f"model_type must be one of {', '.join(SOUND_MODELS)}, got {config.get('model_type')!r}")
    rate, hop, seconds = (size(extractor, key) for key in ("sampling_rate", "hop_length", "chunk_length"))
    return partial(_sound_load, SOUND_MODELS[config["model_type"]], rate, hop, seconds)


def resampled(header: SoundHeader, rate: int) -> int:
    """Samples behind resampling: as librosa, soxr and ``scipy.signal.resample_poly`` round them.

    >>> resampled(SoundHeader(samples=44101, rate=44100), 16000)
    16001
    """
    return -(-header.samples * rate // header.rate)


def _sound_load(fills_window: bool, rate: int, hop: int, seconds: int, header: SoundHeader) -> SoundLoad:
    samples = resampled(header, rate)
    if samples > seconds * rate:
        # The feature extractor would cut the rest off without a word.
        raise ValueError(f"sound must last at most {seconds} s, got {samples / rate:.1f} s; the model hears no more")
    frames = -(-samples // hop)  # every hop-th sample of the mask, as the feature extractor counts them
    positions = (frames - 1) // 2 + 1  # behind a convolution of stride 2
    tokens = (positions - 2) // 2 + 1  # behind pooling by 2
    if tokens < LEAST_TOKENS:
        raise ValueError(f"sound must last at least {7 * hop / rate:.2f} s, got {samples / rate:.3f} s")
    return SoundLoad(1 if fills_window else positions, tokens)
