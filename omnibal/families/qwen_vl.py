"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images at their native resolution, as patches that attend to their whole image.

Sources: Wang et al., "Qwen2-VL" (2024), section 2.1, as implemented by transformers (``smart_resize``), whose rounding
is kept; Bai et al., "Qwen2.5-VL" (2025), section 2.1, for windows; Bai et al., "Qwen3-VL" (2025), for deep-stack.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, floor, sqrt
from typing import NamedTuple

import numpy as np

from omnibal.errors import ConfigError
from omnibal.families.base import (
    Config,
    Family,
    ImageLoad,
    ImageRule,
    LayerRecord,
    VideoHeader,
    VideoLoad,
    VideoRule,
    each,
    section,
    size,
)
from omnibal.families.parts import TEXT_CUTS, Cut, attention_and_mlp, block_sizes, either_ties, text_records

THIRD_TYPES = ("qwen3_vl", "qwen3_vl_moe")
PATCH = {"patches_per_tile": 1, "tokens_per_tile": 1}
IMAGE_PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # of Qwen2VLImageProcessor
TOKEN_BYTES = 32  # a token's id, and its position in time, height and width
MAX_ASPECT = 200  # the widest image, as a ratio of its sides, that the models accept


def patch_grid(
    width: int,
    height: int,
    *,
    patch_size: int,
    merge_size: int,
    min_pixels: int,
    max_pixels: int,
    frames: int = 1,
    even_frames: int = 1,
) -> tuple[int, int]:
    """The patches of an image, (columns, rows), after it is resized to whole blocks of merged patches.

    ``merge_size`` patches in each direction become one LLM token. Thin images may exceed ``max_pixels`` of the resized
    image by the rounding to whole blocks; one with a side more than 200 times the other is a ValueError, as in the
    models themselves. Where pixels of a whole video are limited, ``frames`` are those that were sampled, and
    ``even_frames`` their number rounded to whole temporal patches.

    >>> patch_grid(100, 200, patch_size=14, merge_size=2, min_pixels=56 * 56, max_pixels=28 * 28 * 1280)
    (8, 14)
    """
    if max(width, height) / min(width, height) > MAX_ASPECT:
        raise ValueError(f"image must be at most {MAX_ASPECT} times as long as wide, got {width} x {height} pixels")
    block = patch_size * merge_size
    columns, rows = round(width / block), round(height / block)
    pixels = even_frames * columns * rows * block * block
    if pixels > max_pixels:
        shrink = sqrt((frames * height * width) / max_pixels)
        columns, rows = max(1, floor(width / shrink / block)), max(1, floor(height / shrink / block))
    elif pixels < min_pixels:
        grow = sqrt(min_pixels / (frames * height * width))
        columns, rows = ceil(width * grow / block), ceil(height * grow / block)
    return columns * merge_size, rows * merge_size


def image_rule(config: Config, preprocessor: Config) -> ImageRule:
    """Patches and tokens by the preprocessor's least and most pixels; the model's configuration adds nothing."""
    pixels = pixel_limits({"size": section(preprocessor, "size")}, IMAGE_PIXELS)
    sizes = {key: size(preprocessor, key) for key in ("patch_size", "merge_size")}
    limits = {"min_pixels": size(pixels, "shortest_edge"), "max_pixels": size(pixels, "longest_edge")}
    return each(_image_load, sizes | limits)


def _image_load(sizes: Mapping[str, int], width: int, height: int) -> ImageLoad:
    columns, rows = patch_grid(width, height, **sizes)
    patches = columns * rows
    return ImageLoad(patches, patches // sizes["merge_size"] ** 2, patches**2)


def video_rule(config: Config, preprocessor: Config) -> VideoRule:
    """Frames, patches and tokens as ``Qwen2VLVideoProcessor`` or ``Qwen3VLVideoProcessor`` of transformers 5.23."""
    for key in ("use_token_compression", "cap_pixels_per_frame"):
        if preprocessor.get(key):
            raise ConfigError(f"{key} of the video processor must be false, got true")
    sampling = [preprocessor.get(key) for key in ("fps", "num_frames")]
    if preprocessor.get("do_sample_frames") and sampling.count(None) != 1:
        raise ConfigError(f"video processor must name one of fps and num_frames to sample by, got {sampling}")
    kind = _third_video if config["model_type"] in THIRD_TYPES else _second_video
    return partial(kind, VideoSizes.of(preprocessor))


def video_settings(defaults: Config, given: Config) -> Config:
    """A video processor's whole configuration; limits of pixels may stand at the top, as in older folders."""
    return {**defaults, **given, "size": pixel_limits(given, defaults["size"])}


def pixel_limits(given: Config, default: Config) -> dict[str, int]:
    """Least and most pixels as transformers 5.23 reads a processor's file."""
    # A stated ``size`` stands alone: what it leaves out is not filled in from the class, whose ``default`` counts
    # without a ``size``. ``min_pixels`` and ``max_pixels`` count beside it, and not within.
    stated = given.get("size") or default
    found = dict(stated) if isinstance(stated, Mapping) else {}
    for edge, key in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if given.get(key) is not None:
            found[edge] = given[key]
    if not (found.get("shortest_edge") and found.get("longest_edge")):
        raise ConfigError(
            f"size of the processor must have shortest_edge and longest_edge, got {stated}, as transformers refuses "
            "it; min_pixels and max_pixels stand beside size"
        )
    return found


# Defaults of the classes of transformers 5.23.
_VIDEOS = {
    "temporal_patch_size": 2, "merge_size": 2, "min_frames": 4, "max_frames": 768, "resample": 3,
    "rescale_factor": 1 / 255,
}  # fmt: skip
SECOND_VIDEOS = {
    **_VIDEOS, "patch_size": 14, "do_sample_frames": False,
    "size": {"shortest_edge": 128 * 28**2, "longest_edge": 768 * 28**2},
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip
THIRD_VIDEOS = {
    **_VIDEOS, "patch_size": 16, "do_sample_frames": True, "fps": 2,
    "size": {"shortest_edge": 128 * 32**2, "longest_edge": 768 * 32**2},
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip


class VideoSizes(NamedTuple):
    samples: bool
    fps: float | None
    num_frames: int | None
    min_frames: int
    max_frames: int
    slice_frames: int  # frames of a temporal slice
    sizes: Mapping[str, int]  # of patches, and the least and most pixels

    @classmethod
    def of(cls, preprocessor: Config) -> "VideoSizes":
        pixels, rate = section(preprocessor, "size"), preprocessor.get("fps")
        return cls(
            bool(preprocessor.get("do_sample_frames")),
            None if rate is None else float(rate),
            preprocessor.get("num_frames"),
            size(preprocessor, "min_frames"),
            size(preprocessor, "max_frames"),
            size(preprocessor, "temporal_patch_size"),
            {key: size(preprocessor, key) for key in ("patch_size", "merge_size")}
            | {"min_pixels": size(pixels, "shortest_edge"), "max_pixels": size(pixels, "longest_edge")},
        )

    def load(self, numbers: Sequence[int], columns: int, rows: int) -> VideoLoad:
        slices, merged = -(-len(numbers) // self.slice_frames), columns * rows // self.sizes["merge_size"] ** 2
        return VideoLoad(numbers, (slices, rows, columns), (slices * merged,))


def _second_video(facts: VideoSizes, header: VideoHeader) -> VideoLoad:
    frames, even = header.frames, facts.slice_frames
    numbers: Sequence[int] = range(frames)
    if facts.samples and header.fps is not None:
        if facts.num_frames is not None:
            wanted = round(facts.num_frames / even) * even
        else:
            assert facts.fps is not None, "the rule checks it"
            most = floor(min(facts.max_frames, frames) / even) * even
            wanted = floor(min(max(frames / header.fps * facts.fps, facts.min_frames), most, frames) / even) * even
        if not 0 < wanted <= frames:
            raise ValueError(f"video must have frames to sample {wanted or even} of, got {frames}")
        # As torch.arange counts, whose steps may be one too many, and whose numbers are of 32 bits.
        steps = np.arange(ceil(frames / (frames / wanted))) * (frames / wanted)
        numbers = [number for number in steps.astype(np.float32).astype(np.int64).tolist() if number < frames]
    return facts.load(numbers, *patch_grid(header.width, header.height, **facts.sizes))


def _third_video(facts: VideoSizes, header: VideoHeader) -> VideoLoad:
    total, even = header.frames, facts.slice_frames
    frames, numbers = total, list(range(total))
    if facts.samples and header.fps is not None:
        frames = facts.num_frames or 0
        if facts.num_frames is None:
            assert facts.fps is not None, "the rule checks it"
            frames = min(max(int(total / header.fps * facts.fps), facts.min_frames), facts.max_frames, total)
        numbers = np.linspace(0, total - 1, frames).round().astype(np.int64).tolist()
    if frames < even:
        raise ValueError(f"video must have at least {even} frames, got {frames}")
    width, height, block = header.width, header.height, facts.sizes["patch_size"] * facts.sizes["merge_size"]
    if min(width, height) < block:
        grow = max(block / height, block / width)
        width, height = int(width * grow), int(height * grow)
    counts = {"frames": frames, "even_frames": round(frames / even) * even}
    load = facts.load(numbers, *patch_grid(width, height, **facts.sizes, **counts))
    # Each slice has a run of its own behind its time, the mean of its first and last frame's; the last frame is
    # repeated to fill a slice, and frames without a rate are taken for 24 a second.
    times = [index / (header.fps or 24) for index in (*numbers, *numbers[-1:] * (-frames % even))]
    seconds = tuple((times[first] + times[first + even - 1]) / 2 for first in range(0, len(times), even))
    return load._replace(runs=(load.runs[0] // len(seconds),) * len(seconds), seconds=seconds)


def qwen_records(config: Config) -> tuple[LayerRecord, ...]:
    """The pipeline layers, first to last; a vision unit is a patch."""
    # Blocks of Qwen2.5-VL whose attention stays within windows are of the kind ``window_block``; blocks of Qwen3-VL
    # whose output a decoder layer reads as well are of the kind ``deepstack_block``, and ``carried`` says how many such
    # outputs a cut behind a layer sends along.
    vision, text = section(config, "vision_config"), section(config, "text_config")
    is_third = config["model_type"] in THIRD_TYPES
    # The merger's output is as wide as the language model; Qwen2-VL calls its width hidden_size.
    key, wanted = "hidden_size" if config["model_type"] == "qwen2_vl" else "out_hidden_size", size(text, "hidden_size")
    if size(vision, key, default=wanted) != wanted:
        raise ConfigError(f"vision_config.{key} must be text_config's hidden_size {wanted}, got {vision[key]}")
    tied = bool(config.get("tie_word_embeddings")) if is_third else either_ties(config)
    deepstack = _deepstack(vision, text) if is_third else []
    records = (
        _embedding(config, vision),
        *_blocks(config, vision, deepstack),
        LayerRecord("projector", "projector", _merger(config, vision, norm_of=1), module="projector"),
        *text_records(text, tied=tied),
    )
    records = tuple(replace(record, token_bytes=TOKEN_BYTES) for record in records)
    return _carrying(records, deepstack) if deepstack else records


def _deepstack(vision: Config, text: Config) -> list[int]:
    """The blocks of the ViT whose outputs decoder layers read, by depth."""
    given, depth = list(vision.get("deepstack_visual_indexes", ())), size(vision, "depth")
    found = sorted(set(given))
    if len(found) < len(given) or not all(0 <= number < depth for number in found):
        raise ConfigError(f"deepstack_visual_indexes must be different ones of the ViT's {depth} blocks, got {given}")
    if len(found) > size(text, "num_hidden_layers"):
        raise ConfigError(
            f"deepstack_visual_indexes must be at most as many as decoder layers, {text['num_hidden_layers']}, "
            f"got {len(found)}"
        )
    return found


def _embedding(config: Config, vision: Config) -> LayerRecord:
    hidden, is_third = _width(config, vision), config["model_type"] in THIRD_TYPES
    values = size(vision, "patch_size") ** 2 * size(vision, "in_channels", default=3)
    values *= size(vision, "temporal_patch_size", default=2)
    tables = 1 + size(vision, "num_position_embeddings") if is_third else 0  # a bias, and positions
    sizes = {"hidden": hidden, "values_per_patch": values, "parameters": (values + tables) * hidden}
    return LayerRecord("patch_embedding", "patch_embedding", PATCH | sizes, module="vision")


def _blocks(config: Config, vision: Config, deepstack: Sequence[int]) -> Iterator[LayerRecord]:
    hidden, is_gated = _width(config, vision), config["model_type"] == "qwen2_5_vl"
    ratio = vision.get("mlp_ratio", 4)
    intermediate = size(vision, "intermediate_size", default=int(hidden * ratio))
    sizes = PATCH | block_sizes(hidden, intermediate, vision) | {"attended": 0, "rotary": 1}
    if is_gated:
        matrices = 3 * hidden * intermediate + 2 * intermediate + hidden
        attention = 4 * hidden * (hidden + 1)
        sizes |= {"rms_norms": 2, "mlp_matrices": 3, "kept_in_mlp": 4, "parameters": attention + 2 * hidden + matrices}
    window = {"attended": (size(vision, "window_size", default=112) // size(vision, "patch_size")) ** 2}
    merger = _merger(config, vision, norm_of=size(vision, "spatial_merge_size", default=2) ** 2)
    for number in range(size(vision, "depth")):
        kind, own = "vision_block", sizes
        if is_gated and number not in vision.get("fullatt_block_indexes", ()):
            kind, own = "window_block", sizes | window
        if number in deepstack:
            total = {"parameters": sizes["parameters"] + merger["parameters"]}
            kind, own = "deepstack_block", sizes | {"shuffled": merger["shuffled"]} | total
        yield LayerRecord(f"vision_block.{number}", kind, own, module="vision")


def _merger(config: Config, vision: Config, *, norm_of: int) -> dict[str, int]:
    """Sizes of the two matrices that make a token of a few patches, behind a norm as wide as ``norm_of`` patches."""
    hidden, text_hidden = _width(config, vision), size(section(config, "text_config"), "hidden_size")
    patches = size(vision, "spatial_merge_size", default=2) ** 2
    merged = hidden * patches
    has_rms_norm = config["model_type"] == "qwen2_5_vl"
    norm = norm_of * hidden * (1 if has_rms_norm else 2)
    return {
        "units_per_token": patches,
        "shuffled": merged,
        "inner": merged,
        "rms_norms": int(has_rms_norm),
        "hidden": text_hidden,
        "parameters": norm + (merged + 1) * (merged + text_hidden),
    }


def _width(config: Config, vision: Config) -> int:
    return size(vision, "embed_dim" if config["model_type"] == "qwen2_vl" else "hidden_size")


def _carrying(records: Sequence[LayerRecord], deepstack: Sequence[int]) -> tuple[LayerRecord, ...]:
    """The records with what passes on beside hidden states."""
    projector = next(record for record in records if record.kind == "projector").sizes
    made = read = 0  # each output is added behind the next decoder layer, in their order
    found = []
    for record in records:
        made += record.kind == "deepstack_block"
        read += record.kind == "decoder_block"
        sizes = {"carried": max(made - read, 0), "carried_hidden": projector["hidden"]}
        sizes["units_per_token"] = projector["units_per_token"]
        found.append(replace(record, sizes={**record.sizes, **sizes}))
    return tuple(found)


CUTS = {
    **attention_and_mlp(
        "visual.blocks.*",
        "attn.qkv",
        "attn.proj",
        ("mlp.fc1", "mlp.linear_fc1", "mlp.gate_proj", "mlp.up_proj"),
        "mlp.*fc2",
    ),
    "visual.blocks.*.attn.qkv": Cut("heads", parts=3),
    "visual.blocks.*.mlp.down_proj": Cut("intermediate", 1),
    "visual.merger.mlp.0": Cut("inner"),
    "visual.merger.mlp.2": Cut("inner", 1),
    "visual.merger.linear_fc1": Cut("inner"),
    "visual.merger.linear_fc2": Cut("inner", 1),
    "visual.deepstack_merger_list.*.linear_fc1": Cut("shuffled"),
    "visual.deepstack_merger_list.*.linear_fc2": Cut("shuffled", 1),
    **TEXT_CUTS,
}
SECOND = Family(
    model_types=("qwen2_vl", "qwen2_5_vl"),
    image_rule=image_rule,
    layer_records=qwen_records,
    layers="omnibal.vlm.qwen_vl:qwen_vl",
    video_rule=video_rule,
    video_processor="transformers.models.qwen2_vl.video_processing_qwen2_vl:Qwen2VLVideoProcessor",
    video_settings=partial(video_settings, SECOND_VIDEOS),
    disk_prefixes={"model.visual.": "visual.", "model.language_model.": "model."},
    cuts=CUTS,
)
THIRD = replace(
    SECOND,
    model_types=("qwen3_vl",),
    video_processor="transformers.models.qwen3_vl.video_processing_qwen3_vl:Qwen3VLVideoProcessor",
    video_settings=partial(video_settings, THIRD_VIDEOS),
    disk_prefixes={},
)
THIRD_WITH_EXPERTS = replace(THIRD, model_types=("qwen3_vl_moe",), layers=None, cuts={})  # planned for, not trained
