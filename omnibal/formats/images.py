"""Image files: their size from the header alone, and their pixels, upright and in 8 bits in both cases."""

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import SEEK_CUR, BytesIO
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from omnibal.errors import said

# EXIF's tag, and its values that swap width and height
ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)
# the TIFF tag that says which end of the values is white
PHOTOMETRIC, WHITE_IS_ZERO = 262, 0
# formats whose integers of mode ``I`` have 16 bits
IN_16_BITS: Final = ("PNG", "PPM")
MOST_PIXELS: Final = 89_478_485  # Pillow's own limit, behind which it warns of decompression bombs: 256 MiB decoded
PNG_START: Final = b"\x89PNG\r\n\x1a\n"
PNG_NOTES: Final = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")  # chunks of a PNG that may say how it is turned


def image_size(image: Path | bytes, most_pixels: int = MOST_PIXELS) -> tuple[int, int]:
    """Width and height in pixels as a viewer shows the image, a file or its content, without decoding it."""
    with _opened(image, most_pixels) as opened:
        width, height = opened.size
        # A TIFF's size is upright already.
        turned = opened.format != "TIFF" and _exif_of(opened).get(ORIENTATION) in SIDEWAYS
    return (height, width) if turned else (width, height)


def _exif_of(opened: Any) -> Image.Exif:
    """What an image's metadata say once it is decoded, without decoding it."""
    notes = _notes_of_png(opened.fp) if opened.format == "PNG" else None
    # The base class is asked because a PNG's own method decodes the image to come to what stands behind its pixels.
    if notes is None:
        return Image.Image.getexif(opened)
    with Image.open(notes) as without_pixels:
        return Image.Image.getexif(without_pixels)


def _notes_of_png(file: IO[bytes]) -> BytesIO | None:
    """A PNG without pixels, its metadata in front of where they were; None if nothing stands behind the pixels."""
    place = file.tell()
    file.seek(0)
    kept, is_behind, notes_behind = [file.read(len(PNG_START))], False, False
    while len(head := file.read(8)) == 8 and (kind := head[4:]) != b"IEND":
        length = int.from_bytes(head[:4])
        is_behind |= kind == b"IDAT"
        notes_behind |= is_behind and kind in PNG_NOTES
        if kind == b"IHDR" or kind in PNG_NOTES:
            kept.append(head + file.read(length + 4))  # with its checksum
        else:
            file.seek(length + 4, SEEK_CUR)
    file.seek(place)
    return BytesIO(b"".join([*kept, bytes(4), b"IDAT"])) if notes_behind else None


def load_image(image: Path | bytes, most_pixels: int = MOST_PIXELS) -> Image.Image:
    """The decoded image, upright and in RGB, as transformers' ``load_image`` gives it.

    Unlike there, 16 bits are scaled to 8, by their upper half as Pillow and OpenCV scale colours, and floats from 0 … 1
    to 0 … 255: Pillow's own conversion cuts them off, which makes 16-bit greys white and floats black.
    """
    with _opened(image, most_pixels) as opened:
        upright = ImageOps.exif_transpose(opened)
        if upright.mode[0] in "IF":
            upright = Image.fromarray(_in_8_bits(np.asarray(upright), opened, named(image)))
        return upright.convert("RGB")


def named(image: Path | bytes) -> str:
    return str(image) if isinstance(image, Path) else f"one of {len(image):,} bytes within the data"


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


class RefusedError(ValueError):
    """What is wrong with an image or a video, in the words of a message."""


@contextmanager
def _opened(image: Path | bytes, most_pixels: int) -> Iterator[Image.Image]:
    """An image; whatever is wrong with it, here or where it is used, is a ``ValueError`` that names it."""
    stage, name = "readable", named(image)
    if Image.MAX_IMAGE_PIXELS is not None and most_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = most_pixels  # or Pillow would warn of what the user allows, and refuse twice as much
    try:
        # A pipe that nobody writes to would be waited for without end.
        if isinstance(image, Path) and not stat.S_ISREG(image.stat().st_mode):
            raise RefusedError(f"image must be readable, got {name}, which is no file")
        # By its content: of a path, Pillow 13 maps uncompressed TIFFs into memory and takes their sides for each other
        # where they are turned.
        with BytesIO(image) if isinstance(image, bytes) else image.open("rb") as file, Image.open(file) as opened:
            if opened.width * opened.height > most_pixels:
                raise _too_large(most_pixels, f"{opened.width:,} x {opened.height:,}", name)
            stage = "decodable"
            yield opened
    except (RefusedError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise _too_large(most_pixels, said(error), name) from error
    except FileNotFoundError as error:
        raise ValueError(f"image must exist, got {name}") from error
    except UnidentifiedImageError as error:
        raise ValueError(f"image must have a readable header, got {name}") from error
    except OSError as error:
        raise ValueError(f"image must be {stage}, got {name} ({error.strerror or said(error)})") from error
    except Exception as error:  # decoders fail in any way that damaged bytes lead them to
        raise ValueError(f"image must be {stage}, got {name} ({said(error)})") from error


def _too_large(most_pixels: int, size: str, name: str) -> RefusedError:
    return RefusedError(
        f"image must have at most {most_pixels:,} pixels, got {size} in {name}; "
        "omnibal.data.max_image_pixels says how many"
    )
