"""Conversations as entries of annotation files have them, in the format of InternVL and LLaVA."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

IMAGE_MARK = "<image>"
LONGEST_PATH: Final = 4096
"""Linux opens no longer one (PATH_MAX): what is longer is the picture itself."""
AS_FILES: Final = "write pictures that stand in the data to files, and name those"
ROLES = {"system": "system", "human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Turn:
    """What one side says; ``role`` is ``system``, ``user`` or ``assistant``."""

    role: str
    text: str


@dataclass(frozen=True)
class Conversation:
    """Turns of alternating sides that end with an answer; the users' turns hold one `IMAGE_MARK` per image."""

    turns: tuple[Turn, ...]
    images: tuple[Path, ...]


def parse_conversation(record: Mapping[str, Any], root: Path) -> Conversation:
    """Reads ``{"image": path or list or absent, "conversations": [{"from": "human" | "gpt" | "system", "value"}]}``.

    Args:
        record: One entry of an annotation file.
        root: Folder that image paths are relative to.

    Raises:
        ValueError: With the reason, if the record is not such a conversation.
    """
    turns = _parse_turns(record)
    images = _parse_images(record, root)
    marks = sum(turn.text.count(IMAGE_MARK) for turn in turns if turn.role == "user")
    if marks != len(images):
        raise ValueError(f"conversations must hold one {IMAGE_MARK} per image, got {marks} for {len(images)} image(s)")
    return Conversation(turns, images)


def _parse_turns(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    turns = record.get("conversations")
    if not isinstance(turns, list):
        raise ValueError(
            f"conversations must be a list of turns, got {turns!r:.80}" if turns else "conversations is missing"
        )
    parsed = [_parse_turn(turn, number) for number, turn in enumerate(turns)]
    sides = [turn.role for turn in parsed]
    asked = sides[1:] if sides[:1] == ["system"] else sides
    if not asked or asked != ["user", "assistant"] * (len(asked) // 2):
        raise ValueError(f"conversations must alternate human, gpt and end with gpt, got {sides!s:.200}")
    return tuple(parsed)


def _parse_turn(turn: Any, number: int) -> Turn:
    if not isinstance(turn, dict) or str(turn.get("from")) not in ROLES or not isinstance(turn.get("value"), str):
        raise ValueError(f"conversations[{number}] must have from ({', '.join(ROLES)}) and value, got {turn!r:.80}")
    role = ROLES[str(turn["from"])]
    if role == "assistant" and not turn["value"].strip():
        raise ValueError(f"conversations[{number}] must hold an answer, got an empty one")
    return Turn(role, turn["value"])


def _parse_images(record: Mapping[str, Any], root: Path) -> tuple[Path, ...]:
    if "video" in record:
        raise ValueError("sample must hold images and text only, got a video")
    images: Sequence[Any] = record.get("image") or []
    images = [images] if isinstance(images, str) else images
    if not isinstance(images, list) or not all(isinstance(image, str) and image for image in images):
        raise ValueError(f"image must be a path or a list of paths, got {images!r:.80}; {AS_FILES}")
    for image in images:
        if image.startswith("data:") or len(image) > LONGEST_PATH:
            raise ValueError(f"image must be a path, got {len(image)} characters of data, {image:.30}…; {AS_FILES}")
    return tuple(root / image for image in images)
