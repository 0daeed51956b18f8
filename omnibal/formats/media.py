"""Images, videos and sounds: what headers say, the decoded files, and what a model's folder makes of clips.

A list of images is a video whose frames they are. Rotation that a container asks viewers for is not applied, as in
transformers' own reader. transformers' video processors need torchvision: their settings are read, sampling and sizes
are the family's rule, and pixels are Pillow's, as images' are.
"""

import logging
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from io import BytesIO
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from omnibal.errors import ConfigError, OmnibalError, require, said
from omnibal.families.base import Config, Family, SoundHeader, SoundRule, VideoHeader, VideoLoad, VideoRule
from omnibal.families.sounds import resampled
from omnibal.formats.chat import Picture, Video

# EXIF's tag, and its values that swap width and height
ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)
# the TIFF tag that says which end of the values is white
PHOTOMETRIC, WHITE_IS_ZERO = 262, 0
# formats whose integers of mode ``I`` have 16 bits
IN_16_BITS: Final = ("PNG", "PPM")
MOST_PIXELS: Final = 89_478_485  # Pillow's own limit, behind which it warns of decompression bombs: 256 MiB decoded
REMEMBERED: Final = 1 << 16  # videos whose header a process remembers: without a count, all of a file is read
# Headers by which the rule is compared with the processor of the transformers that is installed.
PROBES: Final = (
    VideoHeader(640, 360, 300, 29.97), VideoHeader(64, 48, 9, 25.0), VideoHeader(1920, 1080, 5000, 30.0),
)  # fmt: skip

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class RefusedError(ValueError):
    """What is wrong with a file, in the words of a message."""


def named(file: Video) -> str:
    if isinstance(file, tuple):
        return f"{len(file)} frames from {named(file[0])}"
    return str(file) if isinstance(file, Path) else f"one of {len(file):,} bytes within the data"


@contextmanager
def _opened(what: str, file: Picture, reader: Callable[..., Any]) -> Iterator[Any]:
    """A file as ``reader`` opens it; whatever is wrong with it, here or where it is used, is a ``ValueError``."""
    rule, name = "have a readable header", named(file)
    try:
        # A pipe that nobody writes to would be waited for without end.
        if isinstance(file, Path) and not stat.S_ISREG(file.stat().st_mode):
            raise RefusedError(f"{what} must be a file, got {name}")
        # By its content: of a path, Pillow 13 maps uncompressed TIFFs into memory and takes their sides for each other
        # where they are turned.
        with BytesIO(file) if isinstance(file, bytes) else file.open("rb") as content, reader(content) as opened:
            rule = "be decodable"
            yield opened
    except (RefusedError, OmnibalError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        allow = "omnibal.data.max_image_pixels allows more"
        raise RefusedError(f"{what} must have fewer pixels, got {name} ({said(error)}); {allow}") from error
    except FileNotFoundError as error:
        raise ValueError(f"{what} must exist, got {name}") from error
    except Exception as error:  # decoders fail in any way that damaged bytes lead them to
        raise ValueError(f"{what} must {rule}, got {name} ({said(error)})") from error


def _check_pixels(what: str, file: Video, most: int, width: int, height: int) -> None:
    if width * height > most:
        raise RefusedError(
            f"{what} must have at most {most:,} pixels, got {width:,} x {height:,} in {named(file)}; "
            "omnibal.data.max_image_pixels says how many"
        )


# Images ------------------------------------------------------------------------------------------------------------


@contextmanager
def _image(image: Picture, most_pixels: int) -> Iterator[Image.Image]:
    if Image.MAX_IMAGE_PIXELS is not None and most_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = most_pixels  # or Pillow would warn of what the user allows, and refuse twice as much
    with _opened("image", image, Image.open) as opened:
        _check_pixels("image", image, most_pixels, opened.width, opened.height)
        yield opened


def image_size(image: Picture, most_pixels: int = MOST_PIXELS) -> tuple[int, int]:
    """Width and height in pixels as a viewer shows the image, a file or its content, without decoding it."""
    with _image(image, most_pixels) as opened:
        width, height = opened.size
        # A TIFF's size is upright already. The base class is asked because a PNG's own method decodes the image, to
        # come to notes behind its pixels: if they turn it, decoding refuses it.
        turned = opened.format != "TIFF" and Image.Image.getexif(opened).get(ORIENTATION) in SIDEWAYS
    return (height, width) if turned else (width, height)


def load_image(image: Picture, most_pixels: int = MOST_PIXELS) -> Image.Image:
    """The decoded image, upright and in RGB, as transformers' ``load_image`` gives it.

    Unlike there, 16 bits are scaled to 8, by their upper half as Pillow and OpenCV scale colours, and floats from 0 … 1
    to 0 … 255: Pillow's own conversion cuts them off, which makes 16-bit greys white and floats black.
    """
    with _image(image, most_pixels) as opened:
        upright = ImageOps.exif_transpose(opened)
        if upright.mode[0] in "IF":
            upright = Image.fromarray(_in_8_bits(np.asarray(upright), opened, named(image)))
        return upright.convert("RGB")


def _in_8_bits(values: npt.NDArray[Any], image: Any, name: str) -> npt.NDArray[np.uint8]:
    if image.mode == "F":
        if not (values.min() >= 0 and values.max() <= 1):  # which NaN does not fulfil, either
            raise RefusedError(f"image must have floats from 0 to 1, got {values.min():g} … {values.max():g} in {name}")
        return np.asarray(np.rint(255 * values), dtype=np.uint8)
    if image.mode == "I" and image.format not in IN_16_BITS:
        raise RefusedError(f"image must have 8 or 16 bits a value, or floats, got 32-bit integers in {name}")
    upper: npt.NDArray[np.uint8] = (values >> 8).astype(np.uint8)
    is_inverted = image.format == "TIFF" and image.tag_v2.get(PHOTOMETRIC) == WHITE_IS_ZERO
    return np.invert(upper) if is_inverted else upper


# Videos ------------------------------------------------------------------------------------------------------------


def video_header(video: Video, most_pixels: int = MOST_PIXELS) -> VideoHeader:
    """Size of a frame, frames and frames a second, without decoding any; a ``ValueError`` says what is wrong."""
    if isinstance(video, tuple):
        sizes = {image_size(frame, most_pixels) for frame in video}
        if len(sizes) != 1:
            raise ValueError(f"frames of a video must be of one size, got {sorted(sizes)!s:.80} in {named(video)}")
        return VideoHeader(*sizes.pop(), len(video), None)
    if isinstance(video, Path) and video.exists():
        header = _remembered(video, video.stat().st_mtime_ns)
    else:
        header = _read_header(video)
    _check_pixels("a frame of a video", video, most_pixels, header.width, header.height)
    return header


def load_frames(video: Video, numbers: Sequence[int]) -> list[Image.Image]:
    if isinstance(video, tuple):
        return [load_image(video[number]) for number in numbers]
    wanted, found = set(numbers), dict[int, Image.Image]()
    with _video(video) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number in wanted:
                found[number] = frame.to_image()
                if len(found) == len(wanted):
                    break
    if len(found) < len(wanted):
        raise ValueError(f"video must hold frame {max(wanted)}, as its header says, got fewer in {named(video)}")
    return [found[number] for number in numbers]


@lru_cache(REMEMBERED)
def _remembered(path: Path, _changed: int) -> VideoHeader:
    return _read_header(path)


def _read_header(video: Picture) -> VideoHeader:
    with _video(video) as container:
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
def _video(video: Picture) -> Iterator[Any]:
    require("av")
    import av

    with _opened("video", video, av.open) as container:
        if not container.streams.video:
            raise RefusedError(f"video must hold a video stream, got none in {named(video)}")
        yield container


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
            raise ValueError(f"video must decode to the size that its header says, got another: {named(video)}")
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
            patches = found.get_num_of_video_patches(frames, header.height, header.width, {})
            if (frames, patches) != (len(load.numbers), load.vision_units):
                raise ConfigError(
                    f"transformers must sample and resize videos as 5.23 does, got {transformers.__version__}, whose "
                    f"{name} makes {frames} frames and {patches} patches of {header}, not {len(load.numbers)} and "
                    f"{load.vision_units}"
                )


# Sounds ------------------------------------------------------------------------------------------------------------


def sound_header(sound: Picture) -> SoundHeader:
    """Samples of a channel and samples a second, of a file or its content, without decoding it."""
    with _sound(sound) as opened:
        header = SoundHeader(len(opened), int(opened.samplerate))
    if header.samples < 1:  # a pipe's or a damaged header states none
        raise ValueError(f"sound must have samples, got none in {named(sound)}")
    return header


def load_sound(sound: Picture, rate: int) -> npt.NDArray[np.float32]:
    """The decoded sound, its channels averaged, at ``rate`` samples a second; as many samples as `resampled` says."""
    from scipy.signal import resample_poly  # which takes a second to load

    with _sound(sound) as opened:
        samples = opened.read(dtype="float32", always_2d=True).mean(axis=1)
        given = int(opened.samplerate)
    if given == rate:
        return np.asarray(samples, dtype=np.float32)
    common = gcd(given, rate)
    return np.asarray(resample_poly(samples, rate // common, given // common), dtype=np.float32)


@contextmanager
def _sound(sound: Picture) -> Iterator[Any]:
    require("soundfile")
    import soundfile

    with _opened("sound", sound, soundfile.SoundFile) as opened:
        yield opened


class SoundFormat:
    """The feature extractor of a model's folder, the rule that follows from it, and the token of a piece of a sound."""

    def __init__(self, extractor: Any, rule: SoundRule, token: str) -> None:
        self._extractor, self.rule, self.token = extractor, rule, token

    def features(self, sounds: Sequence[Picture], headers: Sequence[SoundHeader]) -> "dict[str, Tensor]":
        """The sounds of a sample as the model takes them, by the names of its arguments.

        ``input_features`` (sounds, mel bins, frames) float32 and ``feature_attention_mask`` (sounds, frames) int32,
        padded to the longest sound that the extractor knows.
        """
        samples = [self.decoded(sound, header) for sound, header in zip(sounds, headers, strict=True)]
        rate = self._extractor.sampling_rate
        made = self._extractor(
            samples, sampling_rate=rate, padding="max_length", return_attention_mask=True, return_tensors="pt"
        )
        return {"input_features": made["input_features"], "feature_attention_mask": made["attention_mask"]}

    def decoded(self, sound: Picture, header: SoundHeader) -> npt.NDArray[np.float32]:
        rate = self._extractor.sampling_rate
        samples = load_sound(sound, rate)
        if len(samples) != resampled(header, rate):
            raise ValueError(f"sound must decode to the length that its header says, got another: {named(sound)}")
        return samples
