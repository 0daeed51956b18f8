"""Videos: size, frames and rate from a container's header, and the frames that are sampled.

A list of images is a video whose frames they are. Rotation that a container asks viewers for is not applied, as in
transformers' own reader.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from PIL import Image

from omnibal.errors import OmnibalError, missing_extra, said
from omnibal.families.base import VideoHeader
from omnibal.formats.chat import Video
from omnibal.formats.images import MOST_PIXELS, RefusedError, image_size, load_image, named

REMEMBERED: Final = 1 << 16
"""Files whose header a process remembers: to count the frames of one without a count, all of it is read."""

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
    """What a message calls a video."""
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
