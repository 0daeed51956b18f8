"""How a model's folder turns videos into what the model reads: which frames, their patches, and their text.

transformers' video processors need torchvision: their settings are read, sampling and sizes are the family's rule, and
pixels are Pillow's, as images' are.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers.video_processing_utils import VideoProcessorMixin
from transformers.video_utils import VideoMetadata

from omnibal.errors import ConfigError, said
from omnibal.families.base import Config, Family, VideoHeader, VideoLoad, VideoRule
from omnibal.formats.chat import Video
from omnibal.formats.videos import load_frames, name_of

PROBES: Final = (
    VideoHeader(640, 360, 300, 29.97), VideoHeader(64, 48, 9, 25.0), VideoHeader(1920, 1080, 5000, 30.0),
)  # fmt: skip
"""Headers by which the rule is compared with the processor of the transformers that is installed."""


class VideoFormat:
    """A folder's video processor, the rule that follows from it, and the token of a piece of a video."""

    def __init__(self, folder: Path, family: Family, config: Config, tokenizer: Any) -> None:
        if family.video_rule is None:
            raise ConfigError(f"model_type must be one whose videos are known, got {config['model_type']!r}")
        try:
            given, _ = VideoProcessorMixin.get_video_processor_dict(folder)
        except OSError as error:
            raise ConfigError(f"model's folder must hold what a video processor reads, got {said(error)}") from error
        name = family.video_processor.partition(":")[2]
        if given.get("video_processor_type", name) != name:
            raise ConfigError(f"video_processor_type must be {name}, got {given['video_processor_type']!r}")
        self._settings = family.video_settings(given)
        self.rule: VideoRule = family.video_rule(config, self._settings)
        self._has_rate = config["model_type"] == "qwen2_5_vl"
        self.token: str = tokenizer.convert_ids_to_tokens(config["video_token_id"])
        ends = (getattr(tokenizer, f"vision_{side}_token", f"<|vision_{side}|>") for side in ("start", "end"))
        self._start, self._end = map(str, ends)
        self._check_rule(family.video_processor)

    def text(self, load: VideoLoad) -> str:
        """What stands for a video: one token for each of its runs, behind the time that it begins at."""
        if not load.seconds:
            return self.token
        return "".join(f"<{seconds:.1f} seconds>{self._start}{self.token}{self._end}" for seconds in load.seconds)

    def pixels(
        self, videos: Sequence[Video], headers: Sequence[VideoHeader], loads: Sequence[VideoLoad]
    ) -> dict[str, Tensor]:
        """The videos of a sample as the model takes them, by the names of its arguments.

        ``pixel_values_videos`` (patches, values) float32, ``video_grid_thw`` (videos, 3) int64 and, for Qwen2.5-VL,
        ``second_per_grid_ts`` (videos,) float32.
        """
        each = list(zip(videos, headers, loads, strict=True))
        fields = {
            "pixel_values_videos": torch.cat([self._patches(*facts) for facts in each]),
            "video_grid_thw": torch.tensor([load.grid for load in loads]),
        }
        if self._has_rate:  # transformers takes frames without a rate for 24 a second
            rates = [len(load.numbers) / header.frames * (header.fps or 24) for _, header, load in each]
            fields["second_per_grid_ts"] = torch.tensor([self._settings["temporal_patch_size"] / r for r in rates])
        return fields

    def decoded(self, video: Video, header: VideoHeader, load: VideoLoad) -> list[Image.Image]:
        """The frames that the model reads of a video; a ``ValueError`` where they are not as its header says."""
        frames = load_frames(video, load.numbers)
        if {frame.size for frame in frames} != {(header.width, header.height)}:
            raise ValueError(f"video must decode to the size that its header says, got another: {name_of(video)}")
        return frames

    def _patches(self, video: Video, header: VideoHeader, load: VideoLoad) -> Tensor:
        settings, (slices, rows, columns) = self._settings, load.grid
        frames = self.decoded(video, header, load)
        side, merge, depth = (settings[key] for key in ("patch_size", "merge_size", "temporal_patch_size"))
        frames += frames[-1:] * (slices * depth - len(frames))
        size, resample = (columns * side, rows * side), Image.Resampling(settings["resample"])
        pixels = torch.from_numpy(np.stack([np.asarray(frame.resize(size, resample)) for frame in frames])).float()
        mean, std = (torch.tensor(settings[f"image_{key}"]) for key in ("mean", "std"))
        pixels = (pixels * settings["rescale_factor"] - mean) / std
        # Axes: slice, frame of the slice, then rows and columns of merged squares, of patches in one, of pixels.
        parts = pixels.view(slices, depth, rows // merge, merge, side, columns // merge, merge, side, 3)
        patches: Tensor = parts.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(slices * rows * columns, -1)
        return patches

    def _check_rule(self, processor: str) -> None:
        """Refuse a transformers that samples or resizes otherwise than the rule; without torchvision it may be mute."""
        module, _, name = processor.partition(":")
        try:
            found: Any = getattr(import_module(module), name)(**self._settings)
        except ImportError:
            return
        sampling = {key: getattr(found, key, None) for key in ("fps", "num_frames")}
        for header in PROBES:
            load, metadata = self.rule(header), VideoMetadata(total_num_frames=header.frames, fps=header.fps)
            frames = len(found.sample_frames(metadata, **sampling)) if found.do_sample_frames else header.frames
            patches = load.vision_units  # the classes' own count leaves out what cap_pixels_per_frame says
            if not self._settings.get("cap_pixels_per_frame"):
                patches = found.get_num_of_video_patches(frames, header.height, header.width, {})
            if (frames, patches) != (len(load.numbers), load.vision_units):
                raise ConfigError(
                    f"transformers must sample and resize videos as 5.23 does, got {transformers.__version__}, whose "
                    f"{name} makes {frames} frames and {patches} patches of {header}, not {len(load.numbers)} and "
                    f"{load.vision_units}"
                )
