"""Image files: their size from the header alone, and their pixels, upright in both cases."""

from io import BytesIO
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

ORIENTATION = 0x0112
SIDEWAYS = (5, 6, 7, 8)
"""EXIF orientations that swap width and height."""


def image_size(path: Path | BytesIO) -> tuple[int, int]:
    """Width and height in pixels as a viewer shows the image, a file or its content, without decoding it.

    Raises:
        ValueError: With the reason, if there is no file or its header cannot be read.
    """
    with _open(path) as image:
        width, height = image.size
        # A TIFF's size is upright already. The base class is asked because a PNG's own method decodes the image.
        turned = image.format != "TIFF" and Image.Image.getexif(image).get(ORIENTATION) in SIDEWAYS
    return (height, width) if turned else (width, height)


def load_image(path: Path) -> Image.Image:
    """The decoded image, upright and in RGB, as transformers' ``load_image`` gives it.

    Raises:
        ValueError: With the reason, if there is no file or it cannot be decoded.
    """
    with _open(path) as image:
        try:
            return ImageOps.exif_transpose(image).convert("RGB")
        except (OSError, ValueError, SyntaxError) as error:
            raise ValueError(f"image must be decodable, got {path} ({error})") from error


def _open(path: Path | BytesIO) -> Image.Image:
    try:
        return Image.open(path)
    except FileNotFoundError as error:
        raise ValueError(f"image must exist, got {path}") from error
    except UnidentifiedImageError as error:
        raise ValueError(f"image must have a readable header, got {path}") from error
    except OSError as error:
        raise ValueError(f"image must be readable, got {path} ({error.strerror or error})") from error
    except (ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"image must be readable, got {path} ({error})") from error
