"""Videos: size, frames and rate from a header, the frames that are sampled, and what a model's folder makes of them.

A list of images is a video whose frames they are. Rotation that a container asks viewers for is not applied, as in
transformers' own reader. transformers' video processors need torchvision: their settings are read, sampling and sizes
are the family's rule, and pixels are Pillow's, as images' are.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from PIL import Image

from omnibal.errors import ConfigError, OmnibalError, missing_extra, said
from omnibal.families.base import Config, Family, VideoHeader, VideoLoad, VideoRule
from omnibal.formats.chat import Video
from omnibal.formats.images import MOST_PIXELS, RefusedError, image_size, load_image, named

REMEMBERED: Final = 1 << 16  # files whose header a process remembers: without a count, all of a file is read
# Headers by which the rule is compared with the processor of the transformers that is installed.
PROBES: Final = (
    VideoHeader(640, 360, 300, 29.97), VideoHeader(64, 48, 9, 25.0), VideoHeader(1920, 1080, 5000, 30.0),
)  # fmt: skip

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


def video_header(video: Video, most_pixels: int = MOST_PIXELS) -> VideoHeader:
    """Size of a frame, frames and frames a second, without decoding any; a ``ValueError`` says what is wrong."""
    if isinstance(video, tuple):
        sizes = {image_size(frame, most_pixels) for frame in video}
        if len(sizes) != 1:
            raise ValueError(f"frames of a video must be of one size, got {sorted(sizes)!s:.80} in {name_of(video)}")
        return VideoHeader(*sizes.pop(), len(video), None)
    if isinstance(video, bytes):
        header = _read_header(video)
    else:
        try:
            stat = video.stat()
        except OSError as error:
            raise ValueError(f"video must exist, got {video} ({error.strerror})") from error
        header = _remembered(video, stat.st_mtime_ns, stat.st_size)
    if header.width * header.height > most_pixels:
        raise ValueError(
            f"video must have at most {most_pixels:,} pixels a frame, got {header.width:,} x {header.height:,} in "
            f"{name_of(video)}; omnibal.data.max_image_pixels says how many"
        )
    return header


def load_frames(video: Video, numbers: Sequence[int]) -> list[Image.Image]:
    """The frames of ascending numbers, decoded, in RGB."""
    if isinstance(video, tuple):
        return [load_image(video[number]) for number in numbers]
    wanted, found = set(numbers), dict[int, Image.Image]()
    with _opened(video) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number in wanted:
                found[number] = frame.to_image()
                if len(found) == len(wanted):
                    break
    if len(found) < len(wanted):
        raise ValueError(f"video must hold frame {max(wanted)}, as its header says, got fewer in {name_of(video)}")
    return [found[number] for number in numbers]


def name_of(video: Video) -> str:
    return f"{len(video)} frames from {named(video[0])}" if isinstance(video, tuple) else named(video)


@lru_cache(REMEMBERED)
def _remembered(path: Path, _changed: int, _size: int) -> VideoHeader:
    return _read_header(path)


def _read_header(video: Path | bytes) -> VideoHeader:
    with _opened(video) as container:
        stream = container.streams.video[0]
        rate, frames = stream.average_rate, stream.frames
        if not frames:  # Matroska and WebM have no count
            _tell_of_counting(named(video))
            frames = sum(packet.size > 0 for packet in container.demux(stream))
        if not (frames and rate and stream.width and stream.height):
            raise RefusedError(
                f"video must say its size, frames and rate, got {stream.width} x {stream.height}, {frames} frames, "
                f"{rate} a second in {named(video)}"
            )
        return VideoHeader(stream.width, stream.height, int(frames), float(rate))


@lru_cache(1)
def _tell_of_counting(name: str) -> None:
    logger.warning("Frames are counted where a container has no count, by reading all of it once: %s", name)


@contextmanager
def _opened(video: Path | bytes) -> Iterator[Any]:
    try:
        import av
    except ModuleNotFoundError as error:
        raise missing_extra("av") from error
    try:
        with av.open(BytesIO(video) if isinstance(video, bytes) else str(video)) as container:
            if not container.streams.video:
                raise RefusedError(f"video must hold a video stream, got none in {named(video)}")
            yield container
    except (RefusedError, OmnibalError, MemoryError):
        raise
    except Exception as error:  # decoders fail in any way that damaged bytes lead them to
        raise ValueError(f"video must be decodable, got {named(video)} ({said(error)})") from error


class VideoFormat:
    """A folder's video processor, the rule that follows from it, and the token of a piece of a video."""

    def __init__(self, folder: Path, family: Family, config: Config, tokenizer: Any) -> None:
        from transformers.video_processing_utils import VideoProcessorMixin

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
    ) -> "dict[str, Tensor]":
        """The videos of a sample as the model takes them, by the names of its arguments.

        ``pixel_values_videos`` (patches, values) float32, ``video_grid_thw`` (videos, 3) int64 and, for Qwen2.5-VL,
        ``second_per_grid_ts`` (videos,) float32.
        """
        import torch

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

    def _patches(self, video: Video, header: VideoHeader, load: VideoLoad) -> "Tensor":
        import torch

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
        import transformers
        from transformers.video_utils import VideoMetadata

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
