"""JSON that users name: read as a record, or refused with the file's name and the key, whatever the file holds."""

import difflib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, get_args

import hjson
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from omnibal.errors import ConfigError

M = TypeVar("M", bound=BaseModel)


class Record(BaseModel):
    """What a JSON file of ours holds: values of just these kinds, no other keys, also in dataclasses within it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


def parse_json(text: str | bytes, **options: Any) -> Any:
    """The content of a JSON text (bytes in UTF-8, with or without a byte-order mark); a ValueError has the reason.

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


def parse_relaxed(text: str | bytes) -> Any:
    r"""The content of a ds_config: JSON, or Hjson as DeepSpeed reads it: with comments, say.

    >>> parse_relaxed('{"stage": 3, # of ZeRO\n}')
    {'stage': 3}
    """
    try:
        return parse_json(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        string = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        try:
            return hjson.loads(string, object_pairs_hook=once)
        except (hjson.HjsonDecodeError, IndexError):  # IndexError: a comment that begins with /* and does not end
            raise error from None
        except RecursionError:
            raise ValueError("brackets nest too deeply") from None


def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON (``object_pairs_hook``); of equal keys all but the last would be lost."""
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"the key {twice[0]!r} stands twice")
    return dict(pairs)


def load_json(path: Path, **options: Any) -> Any:
    return parse_json(path.read_bytes(), **options)


def read_json(path: str | Path, name: str, parse: Callable[[bytes], Any] = parse_json) -> Any:
    """The content of a JSON file that a user named as ``name``, read by ``parse``."""
    try:
        return parse(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{name} must be a readable file, got {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} must be JSON, got {path}, line {error.lineno}: {error.msg}") from error
    except ValueError as error:
        raise ConfigError(f"{name} must be JSON, got {path}: {error}") from error


def read_record(path: str | Path, kind: type[M], name: str, *, version: int) -> M:
    """Read a JSON file of this version that a user named as ``name``; errors name the file and the key."""
    content = read_json(path, name)
    if not isinstance(content, dict):
        raise ConfigError(f"{name} must be a JSON object, got {path} with a {type(content).__name__}")
    # A file of another kind has a version, too: say that keys are missing rather than that it is too old.
    required = [key for key, known in kind.model_fields.items() if known.is_required()]
    missing = [key for key in required if key not in content]
    is_other_kind = 2 * len(missing) > len(required)
    if content.get("version", version) != version and not is_other_kind:
        raise ConfigError(f"{path}: {name} must be of version {version}, got {content['version']!r}; make it again")
    if missing:
        raise ConfigError(f"{name} must have the key {missing[0]!r}, got none in {path}")
    try:
        return kind.model_validate_json(json.dumps(content))  # by JSON's rules: a list serves as a tuple
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(kind, error, name)}") from error


def explain(kind: type, error: ValidationError, name: str) -> str:
    """Every wrong key of a record, as ``<key> must <rule>, got <value>``; ``name`` stands before each key."""
    by_key = [
        (keys, list(problems))
        for keys, problems in groupby(error.errors(), key=lambda problem: _keys(kind, problem["loc"]))
    ]
    # Where a record or a word is possible, a record with a wrong key is no such word either: the key says it.
    outer = {keys[:depth] for keys, _ in by_key for depth in range(len(keys))}
    return "; ".join(_explain_key(kind, keys, problems, name) for keys, problems in by_key if keys not in outer)


def _keys(kind: Any, location: Sequence[str | int]) -> tuple[str, ...]:
    keys: list[str] = []
    for key in map(str, location):
        if key not in _known_keys(kind) and key == getattr(kind, "__name__", None):
            continue  # the name of the record that was tried
        if key.startswith("literal["):  # words that were tried
            break
        keys.append(key)
        kind = _kind_of(kind, key)
        if kind is None:
            break
    return tuple(keys)


def _known_keys(kind: Any) -> dict[str, Any]:
    """From the keys of a record to what is declared for each; nothing for other kinds of values."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {key: known.annotation for key, known in kind.model_fields.items()}
    return {field.name: field.type for field in fields(kind)} if is_dataclass(kind) else {}


def _kind_of(kind: Any, key: str) -> Any:
    """The record below a key, itself or in a list; None where there is none."""
    declared = kind if key.isdecimal() else _known_keys(kind).get(key)
    kinds = [declared, *get_args(declared)]
    return next((found for found in kinds if _known_keys(found)), None)


def _explain_key(kind: Any, keys: tuple[str, ...], problems: Sequence[ErrorDetails], name: str) -> str:
    place = ".".join([name, *keys])
    first = problems[0]
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        for key in keys[:-1]:
            kind = _kind_of(kind, key)
        known = _known_keys(kind)
        nearest = difflib.get_close_matches(keys[-1], known, n=1, cutoff=0.5)
        remedy = f"did you mean {nearest[0]!r}?" if nearest else f"known keys are {', '.join(known)}"
        return f"{place} must be a known key, got {keys[-1]!r}; {remedy}"
    if first["type"] == "missing":
        return f"{'.'.join([name, *keys[:-1]])} must have the key {keys[-1]!r}, got none"
    if first["type"] == "value_error":  # a record's own rule
        rule = first["msg"].removeprefix("Value error, ")
        rest = rule.removeprefix(keys[-1]) if keys else rule  # a rule may begin with the key
        return f"{place}{rest}" if rest != rule and rest[:1] in (" ", ":", ".") else f"{place}: {rule}"
    entries = [problem for problem in problems if keys and isinstance(problem["loc"][-1], int)]
    if entries and not keys[-1].isdecimal():  # a list was meant
        place, problems = f"{place}[{entries[0]['loc'][-1]}]", entries[:1]
    rules = [problem["msg"].removeprefix("Input should be ") for problem in problems]
    rules = ["an object" if rule.startswith("a valid dictionary or instance of ") else rule for rule in rules]
    return f"{place} must be {' or '.join(rules)}, got {problems[0]['input']!r:.200}"
