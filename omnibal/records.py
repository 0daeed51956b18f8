"""JSON that users name: read, or refused with the file's name, whatever the file holds."""

import json
from pathlib import Path
from typing import Any

from omnibal.errors import ConfigError


def parse_json(text: str | bytes, **options: Any) -> Any:
    r"""The content of a JSON text.

    Args:
        text: Bytes in UTF-8, a byte-order mark before them or not, or a string.
        options: For ``json.loads``.

    Raises:
        ValueError: With the reason; a ``JSONDecodeError`` where the text is no JSON, a ``UnicodeDecodeError`` where it
            is no UTF-8.

    >>> parse_json(b'{"a": 1}')
    {'a': 1}
    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: brackets nest too deeply
    """
    string = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    try:
        content = json.loads(string, **options)
        if "\\ud" in string or "\\uD" in string:  # half of a character: no file, terminal or tokenizer takes it
            json.dumps(content, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("brackets nest too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"half of a character stands alone: {error.object[error.start]!r}") from None
    return content


def load_json(path: Path, **options: Any) -> Any:
    """The content of a JSON file; arguments and errors as of ``parse_json``, and ``OSError`` of a missing file."""
    return parse_json(path.read_bytes(), **options)


def read_json(path: str | Path, name: str) -> Any:
    """The content of a JSON file that a user named as ``name``.

    Raises:
        ConfigError: It cannot be read or is no JSON; the message names the file, and the line where there is one.
    """
    try:
        return load_json(Path(path))
    except OSError as error:
        raise ConfigError(f"{name} must be a readable file, got {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} must be JSON, got {path}, line {error.lineno}: {error.msg}") from error
    except ValueError as error:
        raise ConfigError(f"{name} must be JSON, got {path}: {error}") from error
