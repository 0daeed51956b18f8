"""Images, videos and sounds that stand in the data themselves: bytes, base64, data URIs, as exports have them."""

import re
from base64 import b64decode
from binascii import Error
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from omnibal.errors import DataError

LONGEST_PATH: Final = 4096
"""Linux opens no longer one (PATH_MAX): what is longer is the content itself."""
SHORTEST_CONTENT: Final = 48
"""Characters of base64 below which no picture fits."""
ADDRESSES: Final = ("http://", "https://", "s3://", "gs://", "hf://", "ftp://")
CONTENT_KEYS: Final = ("bytes", "base64", "b64_json", "data")
"""Of a record in place of a file: what holds its content."""
PLACE_KEYS: Final = ("url", "image_url", "path", "image", "source", "file")
"""Of such a record: what names the file, or is a record in turn."""
STARTS: Final = (
    *("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR", "Qk", "SUkq", "TU0AK"),
    *("ZkxhQ", "T2dnU", "SUQz", "GkXfo", "AAAA"),
)
"""How base64 of images (JPEG, PNG, GIF, WebP, BMP, TIFF), sounds and videos (FLAC, Ogg, MP3, Matroska, MP4) begins."""
_BASE64: Final = re.compile(r"[A-Za-z0-9+/_\-\s]+={0,2}\s*")


def unwrapped(value: Any) -> Any:
    """The content or the name of a file out of records around it, such as ``{"bytes": …, "path": …}``."""
    while isinstance(value, Mapping):
        content = next((value[key] for key in CONTENT_KEYS if value.get(key)), None)
        if content is not None:
            return content if isinstance(content, str) and content.startswith("data:") else _decoded_value(content)
        inner = next((value[key] for key in PLACE_KEYS if value.get(key)), None)
        if inner is None:
            return value
        value = inner
    return value


def content_of(value: Any, what: str) -> bytes | None:
    """The bytes of a file that stands in the data; None of what is no content. A ``DataError`` if it is damaged.

    >>> content_of("data:image/gif;base64,R0lGODlh", "image"), content_of("a/R0lGODlh.gif", "image")
    (b'GIF89a', None)
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str):
        return None
    if value[:5].lower() == "data:":
        head, comma, content = value.partition(",")
        if not comma:
            raise DataError(f"{what} must be a data URI with a comma before its content, got {value:.60}")
        return _decoded(content, what) if head.lower().rstrip().endswith(";base64") else unquote_to_bytes(content)
    is_long = len(value) > LONGEST_PATH and not value.startswith(ADDRESSES)
    is_content = len(value) >= SHORTEST_CONTENT and value.startswith(STARTS) and _BASE64.fullmatch(value) is not None
    return _decoded(value, what) if is_long or is_content else None


def _decoded_value(content: Any) -> Any:
    return _decoded(content, "bytes") if isinstance(content, str) else content


def _decoded(text: str, what: str) -> bytes:
    """The bytes of base64, also with the letters of addresses, with line breaks, or without its end."""
    plain = "".join(text.split()).replace("%2B", "+").replace("%2F", "/").replace("%3D", "=")
    plain = plain.replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (Error, ValueError) as error:
        raise DataError(
            f"{what} must be a path or base64 that can be decoded, got {len(text)} characters, {text:.30}…: {error}"
        ) from error
