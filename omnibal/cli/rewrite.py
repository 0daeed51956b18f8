"""Set keys of a user's JSON file, and leave all else of its text as it is."""

import json
import re
from collections.abc import Mapping, Sequence
from json.decoder import scanstring  # type: ignore[attr-defined]  # it is there, undocumented
from typing import Any, Final, NamedTuple

_SPACE: Final = re.compile(r"[ \t\n\r]*")
_DECODER: Final = json.JSONDecoder()


class _Member(NamedTuple):
    """A key of an object and where its value stands in the text."""

    key: str
    start: int
    stop: int


def set_keys(text: str, values: Mapping[tuple[str, ...], Any]) -> str:
    r"""The text of a JSON object with some keys set.

    A value that is there is replaced where it stands. A new key goes behind the last one of its object: on a line of
    its own where that one has a line of its own, else beside it. Objects that are missing on the way are made.

    Args:
        text: JSON, an object.
        values: From keys, outermost first, to what they shall hold.

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
    """The members of the object that begins there."""
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
