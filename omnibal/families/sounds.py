"""Qwen2-Audio and Qwen2.5-Omni's thinker: what sounds bring, by the samples and the rate that a header states; layers.

Sources: transformers 5.23, ``WhisperFeatureExtractor`` (frames) and ``_get_feat_extract_output_lengths`` (tokens); Chu
et al., "Qwen2-Audio" (2024), section 2; Xu et al., "Qwen2.5-Omni" (2025), section 2.2, for blocks of sound.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from omnibal.errors import ConfigError
from omnibal.families import qwen_vl
from omnibal.families.base import (
    Config,
    Family,
    ImageLoad,
    LayerRecord,
    Size,
    SoundHeader,
    SoundLoad,
    SoundRule,
    numbered,
    section,
    size,
)
from omnibal.families.parts import block_sizes, text_records

# transformers' Qwen2-Audio takes a row without two neighbouring tokens of sound for one that is not expanded yet.
LEAST_TOKENS: Final = 2


def sound_rule(config: Config, extractor: Config) -> SoundRule:
    """The rule of a model, from its configuration and its feature extractor's, both as dicts.

    >>> extractor = {"sampling_rate": 16000, "hop_length": 160, "chunk_length": 30}
    >>> rule = sound_rule({"model_type": "qwen2_audio"}, extractor)
    >>> rule(SoundHeader(samples=44100, rate=44100))
    SoundLoad(vision_units=1, sound_units=0, llm_tokens=25)
    """
    known = (*AUDIO.model_types, *OMNI.model_types)
    if config.get("model_type") not in known:
        raise ConfigError(f"model_type must be one of {', '.join(known)}, got {config.get('model_type')!r}")
    rate, hop, seconds = (size(extractor, key) for key in ("sampling_rate", "hop_length", "chunk_length"))
    return partial(_sound_load, config["model_type"] in AUDIO.model_types, rate, hop, seconds)


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
    return SoundLoad(1, 0, tokens) if fills_window else SoundLoad(0, positions, tokens)


def _refuse_images(sizes: Sequence[Size]) -> tuple[ImageLoad, ...]:
    if sizes:
        raise ValueError(f"sample must have no image for a model that hears alone, got {len(sizes)}")
    return ()


def _tower(config: Config, counts: Mapping[str, int], *, unused: int) -> list[LayerRecord]:
    """Convolutions and blocks of an encoder of sound; ``unused`` are parameters that never get a gradient."""
    hidden, mels = size(config, "d_model"), size(config, "num_mel_bins")
    # A position comes of two frames of the first convolution and one of the second, each of three neighbours.
    first = {"hidden": hidden, "values_per_patch": 6 * mels + 3 * hidden, "untrained": unused}
    first["parameters"] = (3 * mels + 1 + 3 * hidden + 1) * hidden + unused
    sides = {"num_heads": size(config, "encoder_attention_heads"), "hidden_act": "gelu"}
    block = dict(counts) | block_sizes(hidden, size(config, "encoder_ffn_dim"), sides)
    block["parameters"] -= hidden  # keys have no bias
    blocks = [dict(block) for _ in range(size(config, "encoder_layers"))]
    blocks[-1] |= {"final_norms": 1, "parameters": block["parameters"] + 2 * hidden}
    return [
        LayerRecord("sound_embedding", "sound_embedding", dict(counts) | first, module="sound"),
        *numbered("sound_block", "sound", blocks),
    ]


def _projector(config: Config, counts: Mapping[str, int], hidden: int) -> dict[str, int]:
    wide = size(config, "d_model")
    return dict(counts) | {"shuffled": wide, "hidden": hidden, "parameters": (wide + 1) * hidden}


def _audio_records(config: Config) -> tuple[LayerRecord, ...]:
    """The layers of Qwen2-Audio, first to last; a vision unit is a window of sound."""
    sound, text = section(config, "audio_config"), section(config, "text_config")
    positions = size(sound, "max_source_positions")
    counts = {"patches_per_tile": positions, "tokens_per_tile": positions}
    projector = _projector(sound, counts, size(text, "hidden_size"))
    return (
        *_tower(sound, counts, unused=positions * size(sound, "d_model")),  # embeddings of positions are frozen
        LayerRecord("projector", "sound_projector", projector, module="projector"),
        *text_records(text, tied=False),  # transformers never ties them
    )


def _omni_records(config: Config) -> tuple[LayerRecord, ...]:
    """The layers of Qwen2.5-Omni's thinker: the encoder of sound, then those of Qwen2.5-VL."""
    config = config.get("thinker_config") or config
    sound = section(config, "audio_config")
    hidden = size(section(config, "text_config"), "hidden_size")
    counts = {"patches_per_tile": 1, "tokens_per_tile": 1}
    tower = _tower(sound, counts | {"attended": size(sound, "n_window")}, unused=2 * hidden)  # embeddings of brackets
    projector = LayerRecord("sound_projector", "sound_projector", _projector(sound, counts, hidden), module="sound")
    text: Mapping[str, Any] = {**config["text_config"], "tie_word_embeddings": False}
    sees = {**config, "model_type": "qwen2_5_vl", "text_config": text}
    return (*tower, projector, *qwen_vl.qwen_records(sees))


AUDIO = Family(
    model_types=("qwen2_audio",),
    image_rule=lambda config, preprocessor: _refuse_images,
    layer_records=_audio_records,
    sound_rule=sound_rule,
    sees=False,
)
OMNI = Family(
    model_types=("qwen2_5_omni_thinker", "qwen2_5_omni"),
    image_rule=qwen_vl.image_rule,
    layer_records=_omni_records,
    sound_rule=sound_rule,
)
