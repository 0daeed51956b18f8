"""The errors that omnibal raises on purpose, and checks of arguments that raise them.

Messages follow one form: ``<name> must <rule>, got <value>[; <remedy>]``.
"""

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from numbers import Integral
from types import TracebackType
from typing import Any, Final, TypeVar

T = TypeVar("T")
LOG: Final = logging.getLogger(__name__)

# What setup.cfg's extras bring, by the names they are imported by.
_EXTRAS: Final = {
    "matplotlib": "plots",
    "torch": "train",
    "deepspeed": "train",
    "transformers": "train",
    "tokenizers": "train",
    "safetensors": "train",
    "accelerate": "trainer",
    "peft": "lora",
    "datasets": "data",
    "av": "video",
    "soundfile": "audio",
}
ENGINE_MODULES: Final = ("torch", "transformers", "safetensors", "deepspeed")  # needed to run a pipeline
# Of a message; what it repeats of a file or an argument may be of any length.
MOST_CHARACTERS: Final = 4000
MOST_OF_A_WORD: Final = 500


def shortened(text: str) -> str:
    """A message in which overlong values are cut in their middle.

    >>> len(shortened("seed must be an integer, got " + "7" * 100_000))
    332
    """
    text = re.sub(rf"\S{{{MOST_OF_A_WORD},}}", lambda word: f"{word[0][:200]} … {word[0][-100:]}", text)
    cut = f"{text[: MOST_CHARACTERS * 3 // 4]} … {text[-MOST_CHARACTERS // 4 :]}"
    return text if len(text) <= MOST_CHARACTERS else cut


class OmnibalError(Exception):
    """Base of every error that omnibal raises on purpose."""

    def __init__(self, *args: object, **of_import_errors: Any) -> None:
        super().__init__(*(shortened(part) if isinstance(part, str) else part for part in args), **of_import_errors)


class ConfigError(OmnibalError, ValueError):
    """A setting is wrong: an argument, a key of a configuration file, a plan that does not fit."""


class DataError(OmnibalError, ValueError):
    """A dataset or one of its samples is wrong; the message names the file and the line or the sample."""


class InfeasibleError(OmnibalError):
    """No solution exists under the given limits; the message says by how much they are missed."""

    def __init__(self, *args: object, missing_bytes: int = 0) -> None:
        super().__init__(*args)
        self.missing_bytes = missing_bytes
        """Of a device, where memory is what lacks."""


class MissingExtraError(OmnibalError, ModuleNotFoundError):
    """Something needs a package that the base install does not bring; the message says which extra does."""


def message_alone(error: OmnibalError) -> str:
    """The message without the traceback that torch puts before what a worker of a DataLoader raised."""
    kind = f"\n{type(error).__module__}.{type(error).__name__}: "
    return str(error).rpartition(kind)[2].strip()


def end_in_one_line() -> None:
    """Let an error of omnibal that ends this process print its message alone, from now on.

    For scripts that call `balance`, `balanced_loader` or `initialize`: what these refuse is explained by its message.
    Every other error keeps its traceback, and who catches errors sees no change.
    """
    if not (isinstance(sys.excepthook, partial) and sys.excepthook.func is _show_message):
        sys.excepthook = partial(_show_message, sys.excepthook)


def _show_message(
    show: Callable[..., Any], kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if isinstance(error, OmnibalError):
        error, traceback = type(error)(message_alone(error)), None
    show(kind, error, traceback)


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """The value as a plain integer, which JSON can hold; numpy's integers are integers, too.

    >>> integer("rank", 1, 0, 3)
    1
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    number = int(value)
    if number < least or (most is not None and number > most):
        rule = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ConfigError(f"{name} must be {rule}, got {number}")
    return number


def kind(name: str, value: Any, expected: type[T]) -> T:
    """The value, which must be of a kind.

    >>> kind("name", "a", str)
    'a'
    """
    if not isinstance(value, expected):
        raise ConfigError(f"{name} must be {expected.__name__}, got {value!r:.80}")
    return value


def require(*modules: str) -> None:
    """Check that modules of an extra are installed, and load none."""
    for name in modules:
        if find_spec(name) is None:
            raise missing_extra(name)


def missing_extra(module: str) -> MissingExtraError:
    return MissingExtraError(
        f"{module} must be installed for this, got no such module; run pip install 'omnibal[{_EXTRAS[module]}]'",
        name=module,
    )


def explain_import(error: ModuleNotFoundError) -> MissingExtraError | None:
    """The error to show in place of a failed import, if an extra would bring what is missing."""
    module = (error.name or "").partition(".")[0]
    return missing_extra(module) if module in _EXTRAS else None


def said(error: Exception) -> str:
    r"""What a foreign error says, in one line; its kind where that is all it has to say; and what a package hid in it.

    >>> said(KeyError("added_tokens")), said(ValueError("no\n  such key"))
    ("KeyError: 'added_tokens'", 'no such key')
    """
    text = shortened(" ".join(str(error).split()))
    told = text if isinstance(error, OSError | ValueError) and text else f"{type(error).__name__}: {text}"
    # Classes of other packages often say no more than that something failed, and keep the reason as their cause.
    is_ours = isinstance(error, OmnibalError) or type(error).__module__ == "builtins"
    cause = None if is_ours or not isinstance(error.__cause__, Exception) else said(error.__cause__)
    return told if cause is None or cause in told else f"{told}: {cause}"


@contextmanager
def reporting(what: str) -> Iterator[None]:
    """Log what fails inside, once, and go on: around all that only measures or reports, which may not end a run.

    Nothing inside may communicate: one rank that leaves early would keep the others waiting. Ranks compute inside, and
    meet outside.
    """
    try:
        yield
    except Exception as error:  # whatever it is, training does not need it
        _warn_once(f"{what} failed, and the run goes on without: {said(error)}")


@cache
def _warn_once(text: str) -> None:
    LOG.warning(text)


def bytes_in_words(size: int) -> str:
    """Bytes as people read them.

    >>> bytes_in_words(5 * 2**29), bytes_in_words(3 * 2**19), bytes_in_words(0)
    ('2.50 GiB', '1.50 MiB', '0.00 MiB')
    """
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
