"""How `omnibal plan --write` enters a plan in a ds_config: its keys are set, and all else of the text stays."""

import json
import re
from collections.abc import Mapping, Sequence
from json.decoder import scanstring  # type: ignore[attr-defined]  # it is there, undocumented
from pathlib import Path
from shutil import copymode
from typing import Any, Final, NamedTuple

from omnibal.config import keys_of_plan, read_config
from omnibal.errors import ConfigError
from omnibal.plan import Plan

_SPACE: Final = re.compile(r"[ \t\n\r]*")
_DECODER: Final = json.JSONDecoder()


def check_alone(config: Path, path: Path) -> None:
    """Refuse to replace the file of a plan that was made for another ds_config, which still follows it."""
    try:
        other = Path(Plan.load(path).made_from.get("ds_config", config))
        if not other.is_file() or other.samefile(config):
            return
        followed = read_config(other)[1].pipeline.plan
    except ConfigError:  # training cannot read such a ds_config either, so nothing follows the plan
        return
    if followed is not None and Path(followed).resolve() == path.resolve():
        raise ConfigError(
            f"omnibal.run.output must be another folder than that of {other}, which follows {path}, got "
            f"{path.parent} for {config}; leave it out (the folder is then runs/{config.stem}), or name one"
        )


def enter(config: Path, plan: Plan, path: Path) -> None:
    """Enter a plan in a ds_config: where it is, and what else must be as it says."""
    text = config.read_text(encoding="utf-8-sig")
    content, section = read_config(config)
    # In its usual place the plan is entered as "auto": a copy of the ds_config then looks in a folder of its own.
    values = keys_of_plan(content, section, plan, "auto" if path == section.run.files.plan else str(path))
    if section.pipeline.schedule not in ("auto", plan.schedule):
        values["omnibal", "pipeline", "schedule"] = "auto"
    try:
        json.loads(text)
    except ValueError as error:
        wanted = ", ".join(f"{'.'.join(keys)} {json.dumps(value)}" for keys, value in values.items())
        raise ConfigError(
            f"ds_config must be JSON without comments for --write, got {config} ({error}); set {wanted}"
        ) from error
    _rewrite(config.resolve(), set_keys(text, values))
    read_config(config)  # raises if the file could not be read any more


def _rewrite(path: Path, text: str) -> None:
    """Replace a file of the user's, which stays as it is if that fails: the disk may be full."""
    beside = path.with_name(f".{path.name}.partial")
    try:
        beside.write_text(text, encoding="utf-8")
        copymode(path, beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


class _Member(NamedTuple):
    """A key of an object and where its value stands in the text."""

    key: str
    start: int
    stop: int


def set_keys(text: str, values: Mapping[tuple[str, ...], Any]) -> str:
    r"""The text of a JSON object with some keys set.

    A value that is there is replaced where it stands. A new key goes behind the last one of its object: on a line of
    its own where that one has a line of its own, else beside it. Objects that are missing on the way are made.

    >>> print(set_keys('{\n  "a": 1,\n  "b": {"c": [2,  3]}\n}', {("b", "d"): None, ("a",): 4, ("e",): {"f": 5}}))
    {
      "a": 4,
      "b": {"c": [2,  3], "d": null},
      "e": {"f": 5}
    }
    """
    for keys, value in values.items():
        text = _set(text, _start_of(text), list(keys), value)
    return text


def _start_of(text: str) -> int:
    """Where the outermost object begins."""
    return text.index("{")


def _set(text: str, start: int, keys: list[str], value: Any) -> str:
    """The text with one key set, by its path from the object that begins at ``start``."""
    members = _members(text, start)
    key, *rest = keys
    found = next((member for member in reversed(members) if member.key == key), None)  # the last one counts
    if found is not None and rest and text[found.start] == "{":
        return _set(text, found.start, rest, value)
    for inner in reversed(rest):
        value = {inner: value}
    if found is not None:
        return text[: found.start] + json.dumps(value) + text[found.stop :]
    member = f"{json.dumps(key)}: {json.dumps(value)}"
    if not members:
        return text[: start + 1] + member + text[_skip(text, start + 1) :]
    end = members[-1].stop
    return f"{text[:end]},{_gap(text, start, members)}{member}{text[end:]}"


def _gap(text: str, start: int, members: Sequence[_Member]) -> str:
    """What stands before the last key of an object: a line break with its indentation, or a space."""
    before = start + 1 if len(members) == 1 else text.index(",", members[-2].stop) + 1
    gap = text[before : _skip(text, before)]
    return gap if "\n" in gap else " "


def _members(text: str, start: int) -> list[_Member]:
    """The members of the object that begins at ``start``."""
    members = []
    position = _skip(text, start + 1)
    while text[position] == '"':
        key, position = scanstring(text, position + 1, True)
        value = _skip(text, _skip(text, position) + 1)  # behind the colon
        _, stop = _DECODER.raw_decode(text, value)
        members.append(_Member(key, value, stop))
        position = _skip(text, stop)
        if text[position] == ",":
            position = _skip(text, position + 1)
    return members


def _skip(text: str, position: int) -> int:
    """Where the next character that is no space stands."""
    found = _SPACE.match(text, position)
    assert found is not None
    return found.end()
