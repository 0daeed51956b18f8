"""Models by name or folder: sizes that publishers state, what a config.json leaves out, costs of LoRA's adapters.

A ``config.json`` leaves out what the class of its configuration has by default, and those of Qwen2-VL and Qwen2.5-VL
have the language model's keys at the top. transformers fills both in; this module does it without torch.

Sources: the ``config.json`` and ``preprocessor_config.json`` of the named repositories on huggingface.co (Qwen/…,
OpenGVLab/…-hf, llava-hf/…); defaults as in transformers 5.23.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Final

from omnibal.device import Device
from omnibal.errors import ConfigError
from omnibal.families import family_of, layer_records
from omnibal.families.base import Config, ImageRule, LayerRecord, SoundRule, VideoRule, vision_unit_of
from omnibal.families.qwen_vl import IMAGE_PIXELS, pixel_limits
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import ModelProfile
from omnibal.records import read_json

DEFAULT_TILES: Final = 12  # of an image, under the published folders of InternVL
PREPROCESSORS: Final = ("preprocessor_config.json", "processor_config.json")
VIDEO_PROCESSOR: Final = "video_preprocessor_config.json"


@dataclass(frozen=True)
class Model:
    """What is known of a model without its weights."""

    name: str
    config: Config  # all keys, as config.to_dict() of transformers has them
    preprocessor: Config
    """The configuration of the image processor, and of the feature extractor of a model that hears."""
    videos: Config | None = None
    """What a folder says of its video processor; None for what the family's published folders say."""
    has_own_images: bool = False
    """Whether a folder says how large images may be; if not, they are as published folders let them be."""

    folder: Path | None = None  # the Hugging Face folder; None where a known name is all there is

    @property
    def records(self) -> tuple[LayerRecord, ...]:
        return layer_records(self.config)

    @property
    def units(self) -> str:
        """What the ViT of this model counts: ``"patches"`` at native resolution, or ``"tiles"``."""
        return vision_unit_of(self.records)

    @property
    def image_limit(self) -> tuple[int, str] | None:
        """Most tiles or pixels of an image, as the image processor is configured; None if no setting says it."""
        if family_of(self.config).tile_limits is not None:
            return int(self.preprocessor.get("max_patches") or DEFAULT_TILES), "tiles"
        most = self.preprocessor["size"].get("longest_edge")
        return None if most is None else (int(most), "pixels")

    def image_rule(self, most: int | None = None) -> ImageRule:
        """The rule that turns sizes of images into loads.

        ``most`` are tiles of an image, or pixels under a family that resizes images, in place of the preprocessor's.
        """
        preprocessor, family = dict(self.preprocessor), family_of(self.config)
        if most is None:
            return family.images(self.config, preprocessor)[1]
        if family.tile_limits is not None:
            return family.images(self.config, preprocessor, max_tiles=most)[1]
        if "longest_edge" not in preprocessor["size"]:
            raise ConfigError(f"max_image must be left out for {self.name}, which has no such limit, got {most}")
        least = preprocessor["size"].get("shortest_edge", 1)
        if most < least:
            raise ConfigError(
                f"max_image must be at least {least:,} pixels for {self.name}, which resizes images, got {most}; tiles "
                "are of models that cut them"
            )
        preprocessor["size"] = {**preprocessor["size"], "longest_edge": most}
        return family.images(self.config, preprocessor)[1]

    def video_rule(self, **changed: Any) -> VideoRule:
        """The rule that turns videos' headers into loads, with other settings than the processor's where given."""
        family = family_of(self.config)
        if family.video_rule is None:
            raise ConfigError(f"model must be of a family whose videos are known, got {self.name}")
        settings = family.video_settings(_usual_videos(self.config) if self.videos is None else self.videos)
        return family.video_rule(self.config, {**settings, **changed})

    def sound_rule(self) -> SoundRule:
        """The rule that turns sounds' headers into loads."""
        family = family_of(self.config)
        if family.sound_rule is None:
            raise ConfigError(f"model must be of a family whose sounds are known, got {self.name}")
        return family.sound_rule(self.config, self.preprocessor)

    @classmethod
    def known(cls, name: str) -> "Model":
        """A published model by its name, with or without the owner and suffixes such as "Instruct".

        >>> Model.known("Qwen/Qwen2.5-VL-7B-Instruct").name, Model.known("internvl3-8b-hf").name
        ('Qwen2.5-VL-7B', 'InternVL3-8B')
        """
        by_plain = {_plain(known): known for known in MODELS}
        if (wanted := _plain(name)) not in by_plain:
            nearest = get_close_matches(wanted, by_plain, n=1, cutoff=0.4)
            hint = f"did you mean {by_plain[nearest[0]]}? " if nearest else f"known are {', '.join(MODELS)}; "
            raise ConfigError(
                f"model must be a known name, a Hugging Face folder or a config.json, got {name!r}; {hint}"
                "of another model give its config.json"
            )
        return cls(by_plain[wanted], *MODELS[by_plain[wanted]])

    @classmethod
    def of(cls, name: str, config: Config, preprocessor: Config | None = None, videos: Config | None = None) -> "Model":
        """A model by its ``config.json``, and what its folder or its family usually says of its processors."""
        whole = complete(config)
        family_of(whole)  # refuses an unknown family
        usual = _usual_preprocessor(whole)
        if preprocessor is None:
            return cls(name, whole, usual, videos)
        # A stated size stands alone, as in transformers: a published folder's values do not fill it up.
        has_pixels = "longest_edge" in usual["size"]
        size = pixel_limits(preprocessor, IMAGE_PIXELS) if has_pixels else preprocessor.get("size") or usual["size"]
        return cls(name, whole, {**usual, **preprocessor, "size": size}, videos, has_own_images=True)


def read_model(named: str) -> Model:
    """A model by a known name, the name of a Hugging Face folder, or that of a ``config.json``."""
    path = Path(named)
    if not path.exists():
        return Model.known(named)
    folder = path if path.is_dir() else path.parent
    config = read_json(path / "config.json" if path.is_dir() else path, "model")
    if not isinstance(config, dict) or "model_type" not in config:
        raise ConfigError(f"model must be a Hugging Face folder or a config.json with a model_type, got {path}")
    from omnibal.formats.model_format import with_own_ties  # which loads Pillow

    config = with_own_ties(config, folder)
    found = {
        name: read_json(folder / name, "the preprocessor's configuration")
        for name in (*PREPROCESSORS, VIDEO_PROCESSOR)
        if (folder / name).is_file()
    }
    preprocessor = next((found[name] for name in PREPROCESSORS if name in found), None)
    of_videos = found.get(VIDEO_PROCESSOR, found.get(PREPROCESSORS[0]))
    of_all = found.get(PREPROCESSORS[1])
    if isinstance(of_all, dict):  # as transformers looks for it: in the file of all processors first
        of_videos = of_all.get("video_processor", of_videos)
    if isinstance(preprocessor, dict):
        heard = preprocessor.get("feature_extractor", {})
        preprocessor = {**heard, **preprocessor.get("image_processor", preprocessor)}
    return replace(Model.of(folder.resolve().name, config, preprocessor, of_videos), folder=folder)


def adapted_profile(
    records: Sequence[LayerRecord],
    device: Device,
    *,
    rank: int,
    dtype: str = "bfloat16",
    tensor_parallel: int | Mapping[str, int] = 1,
) -> ModelProfile:
    """Counted costs where LoRA's adapters on the decoder blocks' products are all that is trained.

    Operations of adapters are counted; that small products take longer than their operations say is not.
    Source: Hu et al., "LoRA", ICLR 2022, section 4.
    """

    def adapted(record: LayerRecord) -> LayerRecord:
        sizes, adapters, products = record.sizes, 0, 0
        if record.kind == "decoder_block":
            hidden, query, key_value = sizes["hidden"], *(sizes[n] * sizes["head_dim"] for n in ("heads", "kv_heads"))
            # Queries, attention's output; keys, values; the MLP's three, but for experts, which peft leaves as they
            # are: transformers has all of them as one parameter.
            has_mlp = "experts" not in sizes
            mlp = 3 * (hidden + sizes["intermediate"]) if has_mlp else 0
            adapters, products = rank * (2 * (hidden + query) + 2 * (hidden + key_value) + mlp), 4 + 3 * has_mlp
        own = sizes["parameters"]
        trained = {"parameters": own + adapters, "untrained": own, "adapters": adapters}
        return replace(record, sizes={**sizes, **trained, "adapter_ranks": products * rank})

    return analytic_profile(list(map(adapted, records)), device, dtype=dtype, tensor_parallel=tensor_parallel)


def _plain(name: str) -> str:
    words = name.rpartition("/")[2].lower().replace("_", "-").split("-")
    suffixes = {"hf", "instruct", "thinking", "chat", "base", "ov", "si", "awq"}
    return "-".join(word for word in words if word not in suffixes)


def complete(config: Config) -> dict[str, Any]:
    """A configuration with the parts and values that its ``config.json`` leaves out.

    >>> complete({"model_type": "qwen2_5_vl", "hidden_size": 3584})["text_config"]["hidden_size"]
    3584
    """
    config = config.get("thinker_config") or config  # of Qwen2.5-Omni's folder
    kind = str(config.get("model_type"))
    vision, text = DEFAULTS.get(kind, ({}, {}))
    if kind == "qwen2_audio":
        usual = {"audio_config": _WHISPER, "text_config": text}
        return {**config, **{name: {**each, **(config.get(name) or {})} for name, each in usual.items()}}
    parts = {"vision_config": dict(config.get("vision_config") or {})}
    if kind == "qwen2_5_omni_thinker":
        parts["audio_config"] = {**_WHISPER, "n_window": 100, **dict(config.get("audio_config") or {})}
    own = config.get("text_config")
    parts["text_config"] = dict(own) if own else {key: value for key, value in config.items() if key not in parts}
    if kind.startswith("llava"):
        text = LLAVA_DEFAULTS.get(str(parts["text_config"].get("model_type")), {})
    for part, defaults in (("vision_config", vision), ("text_config", text)):
        given = {key: value for key, value in parts[part].items() if value is not None}
        parts[part] = {**defaults, **given}
    if kind in ("qwen2_vl", "qwen2_5_vl"):
        parts["text_config"]["model_type"] = f"{kind}_text"
    return {**config, **parts}


_LLAMA: Final = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "intermediate_size": 11008, "vocab_size": 32000,
}  # fmt: skip
# Defaults of LLaVA's and Qwen2-Audio's language models, by model_type.
LLAVA_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "None": _LLAMA,
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8},
    "qwen2": {**_LLAMA, "model_type": "qwen2", "intermediate_size": 22016, "vocab_size": 151936},
}
_CLIP: Final = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
}  # fmt: skip
_SIGLIP: Final = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26,
    "num_attention_heads": 16, "image_size": 384, "patch_size": 14, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
_QWEN2_VIT: Final = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "patch_size": 14}
_QWEN25_VIT: Final = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14, "window_size": 112,
    "fullatt_block_indexes": (7, 15, 23, 31), "hidden_act": "silu",
}  # fmt: skip
_QWEN3_VIT: Final = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": (8, 16, 24), "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
_QWEN3_SMALL_VIT: Final = {
    **_QWEN3_VIT, "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": (5, 11, 17),
}  # fmt: skip
_INTERN_VIT: Final = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": (448, 448), "patch_size": (14, 14), "attention_bias": True, "norm_type": "layer_norm",
}  # fmt: skip
_INTERN_VIT_6B: Final = {
    **_INTERN_VIT, "hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 45,
    "num_attention_heads": 25, "attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm",
}  # fmt: skip
_WHISPER: Final = {
    "num_mel_bins": 128, "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
    "max_source_positions": 1500,
}  # fmt: skip
# Defaults of ViT and language model, by the model_type of both together.
DEFAULTS: Final[Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]] = {
    "qwen2_vl": (_QWEN2_VIT, {}),
    "qwen2_5_vl": (_QWEN25_VIT, {}),
    "qwen2_audio": ({}, LLAVA_DEFAULTS["qwen2"]),
    "qwen2_5_omni_thinker": (_QWEN25_VIT, {"model_type": "qwen2_5_omni_text"}),
    "qwen3_vl": (_QWEN3_VIT, {"model_type": "qwen3_vl_text", "head_dim": 128}),
    "qwen3_vl_moe": (_QWEN3_VIT, {"model_type": "qwen3_vl_moe_text", "head_dim": 128}),
    "llava": (_CLIP, {}),
    "llava_next": (_CLIP, {}),
    "llava_onevision": (_SIGLIP, {}),
    "internvl": (_INTERN_VIT, {"model_type": "qwen2"}),
}
_NEXT_CANVASES: Final = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
_ONEVISION_CANVASES: Final = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))


def _usual_preprocessor(config: Config) -> dict[str, Any]:
    """The configuration that a family's published folders give their image processors."""
    kind, vision = config["model_type"], config.get("vision_config", {})
    if kind == "qwen2_audio":
        return {"sampling_rate": 16_000, "hop_length": 160, "chunk_length": 30, "size": {}}
    heard = {"sampling_rate": 16_000, "hop_length": 160, "chunk_length": 300} if "audio_config" in config else {}
    if kind in ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker"):
        return {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 3136, "longest_edge": 12_845_056}} | heard
    if kind in ("qwen3_vl", "qwen3_vl_moe"):
        return {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
    tile = vision["image_size"]
    side = tile[0] if isinstance(tile, list | tuple) else tile
    pinpoints = {"image_grid_pinpoints": config["image_grid_pinpoints"]} if "image_grid_pinpoints" in config else {}
    return {"size": {"height": side, "width": side}, "max_patches": DEFAULT_TILES, "min_patches": 1, **pinpoints}


def _usual_videos(config: Config) -> Config:
    """What published folders say of their video processors; Qwen2-VL's have the image processor's file alone."""
    if config["model_type"] in ("qwen3_vl", "qwen3_vl_moe"):
        return {"size": {"shortest_edge": 4096, "longest_edge": 25_165_824}}
    return _usual_preprocessor(config)


_SIZES: Final = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
)  # fmt: skip


def _text(kind: str, *sizes: int, **more: int) -> dict[str, Any]:
    """Keys of a language model, by ``_SIZES``."""
    return {"model_type": kind, **dict(zip(_SIZES, sizes, strict=True)), **more}


_qwen2 = partial(_text, "qwen2")


def _qwen3(size: str) -> dict[str, Any]:
    return _text("qwen3", *_QWEN3[size], _SMALL, head_dim=128)


def _qwen3_moe(size: str) -> dict[str, Any]:
    *sizes, of_expert = _QWEN3_MOE[size]
    experts = {"moe_intermediate_size": of_expert, "num_experts": 128, "num_experts_per_tok": 8}
    return _text("qwen3_moe", *sizes, _SMALL, head_dim=128, **experts)


def _entry(kind: str, vision: Mapping[str, Any], text: dict[str, Any], **more: Any) -> tuple[Config, Config]:
    if "qwen" in kind:
        text = text | {"model_type": f"{kind}_text"}
        vision = vision if kind == "qwen2_vl" else {**vision, "out_hidden_size": text["hidden_size"]}
    config = {"model_type": kind, "tie_word_embeddings": False, "vision_config": vision, "text_config": text, **more}
    return config, _usual_preprocessor(config)


def _hearing(kind: str, vision: Mapping[str, Any], text: dict[str, Any]) -> tuple[Config, Config]:
    """The thinker's configuration as its name stands for it, and what published folders say of processors."""
    config = complete({"model_type": kind, "vision_config": dict(vision), "text_config": text})
    return config, _usual_preprocessor(config)


# Hidden size, layers, heads, key-value heads, intermediate size (of mixtures also an expert's); below vocabularies.
_QWEN_05B, _QWEN_15B = (896, 24, 14, 2, 4864), (1536, 28, 12, 2, 8960)
_QWEN_7B, _QWEN_14B = (3584, 28, 28, 4, 18944), (5120, 48, 40, 8, 13824)
_QWEN_32B, _QWEN_72B = (5120, 64, 40, 8, 27648), (8192, 80, 64, 8, 29568)
_QWEN3: Final = {
    "0.6B": (1024, 28, 16, 8, 3072), "1.7B": (2048, 28, 16, 8, 6144), "4B": (2560, 36, 32, 8, 9728),
    "8B": (4096, 36, 32, 8, 12288), "14B": (5120, 40, 40, 8, 17408), "32B": (5120, 64, 64, 8, 25600),
}  # fmt: skip
_QWEN3_MOE: Final = {"30B-A3B": (2048, 48, 32, 4, 6144, 768), "235B-A22B": (4096, 94, 64, 4, 12288, 1536)}
_SMALL, _LARGE, _INTERN = 151_936, 152_064, 151_674
_WIDER_VIT: Final = {**_QWEN25_VIT, "intermediate_size": 3456}
_TIED: Final = {"tie_word_embeddings": True}
_VICUNA_7B = _text("llama", 4096, 32, 32, 32, 11008, 32064)
_VICUNA_13B = _text("llama", 5120, 40, 40, 40, 13824, 32064)
_YI_34B = _text("llama", 7168, 60, 56, 8, 20480, 64064)
_MISTRAL_7B = _text("mistral", 4096, 32, 32, 8, 14336, 32064)
_LLAVA: Final = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
_NEXT: Final = {**_LLAVA, "image_grid_pinpoints": _NEXT_CANVASES}
_ONEVISION: Final = {
    "vision_feature_layer": -1, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9",
    "image_grid_pinpoints": _ONEVISION_CANVASES,
}  # fmt: skip

# Configuration of each model, and of its image processor.
MODELS: Final[Mapping[str, tuple[Config, Config]]] = {
    "Qwen2-VL-2B": _entry("qwen2_vl", _QWEN2_VIT, _qwen2(*_QWEN_15B, _SMALL), **_TIED),
    "Qwen2-VL-7B": _entry("qwen2_vl", _QWEN2_VIT, _qwen2(*_QWEN_7B, _LARGE)),
    "Qwen2-VL-72B": _entry("qwen2_vl", _QWEN2_VIT, _qwen2(*_QWEN_72B, _LARGE)),
    "Qwen2.5-VL-3B": _entry("qwen2_5_vl", _QWEN25_VIT, _qwen2(2048, 36, 16, 2, 11008, _SMALL), **_TIED),
    "Qwen2.5-VL-7B": _entry("qwen2_5_vl", _QWEN25_VIT, _qwen2(*_QWEN_7B, _LARGE)),
    "Qwen2.5-VL-32B": _entry("qwen2_5_vl", _WIDER_VIT, _qwen2(*_QWEN_32B, _LARGE)),
    "Qwen2.5-VL-72B": _entry("qwen2_5_vl", _WIDER_VIT, _qwen2(*_QWEN_72B, _LARGE)),
    "Qwen2-Audio-7B": _hearing("qwen2_audio", {}, _qwen2(4096, 32, 32, 32, 11008, 156_032)),
    "Qwen2.5-Omni-7B": _hearing("qwen2_5_omni_thinker", _QWEN25_VIT, _qwen2(*_QWEN_7B, _LARGE)),
    "Qwen3-VL-2B": _entry("qwen3_vl", _QWEN3_SMALL_VIT, _qwen3("1.7B"), **_TIED),
    "Qwen3-VL-4B": _entry("qwen3_vl", _QWEN3_SMALL_VIT, _qwen3("4B"), **_TIED),
    "Qwen3-VL-8B": _entry("qwen3_vl", _QWEN3_VIT, _qwen3("8B")),
    "Qwen3-VL-32B": _entry("qwen3_vl", _QWEN3_VIT, _qwen3("32B")),
    "Qwen3-VL-30B-A3B": _entry("qwen3_vl_moe", _QWEN3_VIT, _qwen3_moe("30B-A3B")),
    "Qwen3-VL-235B-A22B": _entry("qwen3_vl_moe", _QWEN3_VIT, _qwen3_moe("235B-A22B")),
    "InternVL3-1B": _entry("internvl", _INTERN_VIT, _qwen2(*_QWEN_05B, _INTERN)),
    "InternVL3-2B": _entry("internvl", _INTERN_VIT, _qwen2(*_QWEN_15B, _INTERN)),
    "InternVL3-8B": _entry("internvl", _INTERN_VIT, _qwen2(*_QWEN_7B, _INTERN)),
    "InternVL3-14B": _entry("internvl", _INTERN_VIT, _qwen2(*_QWEN_14B, _INTERN)),
    "InternVL3-38B": _entry("internvl", _INTERN_VIT_6B, _qwen2(*_QWEN_32B, _INTERN)),
    "InternVL3-78B": _entry("internvl", _INTERN_VIT_6B, _qwen2(*_QWEN_72B, _INTERN)),
    "InternVL3.5-1B": _entry("internvl", _INTERN_VIT, _qwen3("0.6B")),
    "InternVL3.5-2B": _entry("internvl", _INTERN_VIT, _qwen3("1.7B")),
    "InternVL3.5-4B": _entry("internvl", _INTERN_VIT, _qwen3("4B")),
    "InternVL3.5-8B": _entry("internvl", _INTERN_VIT, _qwen3("8B")),
    "InternVL3.5-14B": _entry("internvl", _INTERN_VIT, _qwen3("14B")),
    "InternVL3.5-38B": _entry("internvl", _INTERN_VIT_6B, _qwen3("32B")),
    "InternVL3.5-30B-A3B": _entry("internvl", _INTERN_VIT, _qwen3_moe("30B-A3B")),
    "InternVL3.5-241B-A28B": _entry("internvl", _INTERN_VIT_6B, _qwen3_moe("235B-A22B")),
    "LLaVA-1.5-7B": _entry("llava", _CLIP, _VICUNA_7B, **_LLAVA),
    "LLaVA-1.5-13B": _entry("llava", _CLIP, _VICUNA_13B, **_LLAVA),
    "LLaVA-v1.6-mistral-7B": _entry("llava_next", _CLIP, _MISTRAL_7B, **_NEXT),
    "LLaVA-v1.6-vicuna-7B": _entry("llava_next", _CLIP, _VICUNA_7B, **_NEXT),
    "LLaVA-v1.6-vicuna-13B": _entry("llava_next", _CLIP, _VICUNA_13B, **_NEXT),
    "LLaVA-v1.6-34B": _entry("llava_next", _CLIP, _YI_34B, **_NEXT),
    "LLaVA-OneVision-Qwen2-0.5B": _entry("llava_onevision", _SIGLIP, _qwen2(*_QWEN_05B, 152_000), **_ONEVISION | _TIED),
    "LLaVA-OneVision-Qwen2-7B": _entry("llava_onevision", _SIGLIP, _qwen2(*_QWEN_7B, 152_128), **_ONEVISION),
    "LLaVA-OneVision-Qwen2-72B": _entry("llava_onevision", _SIGLIP, _qwen2(*_QWEN_72B, 152_064), **_ONEVISION),
}
