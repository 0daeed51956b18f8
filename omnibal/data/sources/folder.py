"""Parts of a Hugging Face folder, read by transformers' Auto classes."""

from pathlib import Path
from typing import Any

from omnibal.errors import ConfigError


def load_part(auto_class: Any, folder: Path, **options: Any) -> Any:
    """What one of transformers' Auto classes makes of a folder.

    Raises:
        ConfigError: It is no folder, or does not hold what the class reads.
    """
    if not folder.is_dir():  # transformers would look for it on the hub
        raise ConfigError(f"model's folder must be one with configuration and tokenizer, got {folder}")
    try:
        return auto_class.from_pretrained(folder, **options)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # files are checked by nobody: what they trip varies with what they hold
        kind = auto_class.__name__
        raise ConfigError(f"model's folder must hold what {kind} reads, got {folder}: {said(error)}") from error


def said(error: Exception) -> str:
    r"""What a foreign error says, in one line; its kind where that is all it has to say.

    >>> said(KeyError("added_tokens")), said(ValueError("no\n  such key"))
    ("KeyError: 'added_tokens'", 'no such key')
    """
    text = " ".join(str(error).split())
    return text if isinstance(error, OSError | ValueError) and text else f"{type(error).__name__}: {text}"
