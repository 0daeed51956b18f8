"""Conversations about images in the records of other code bases, all read into one form.

Read are InternVL's and LLaVA's records (``conversations``, ``image``), ShareGPT-like ones (``messages``, ``images``),
Qwen-VL's (images within messages or within their text), ms-swift's and LLaMA-Factory's (``query``, ``response``,
``history``; ``instruction``, ``input``, ``output``) and plain questions with answers. Videos and sounds stand where
images do.
"""

import re
from base64 import b64decode
from binascii import Error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote_to_bytes

from omnibal.errors import DataError
from omnibal.families.base import Size

IMAGE_MARK: Final = "<image>"
VIDEO_MARK: Final = "<video>"
SOUND_MARK: Final = "<audio>"
ROLES: Final = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
# Roles that advice counts as users': turns of tools carry no loss. Training does not take them.
OTHER_ASKERS: Final = ("tool", "observation", "tool_response", "function_response")
TURN_KEYS: Final = ("conversations", "messages", "conversation")
QUESTION_KEYS: Final = ("instruction", "input", "prompt", "query", "question")
ANSWER_KEYS: Final = ("output", "response", "answer", "completion")
IMAGE_KEYS: Final = ("image", "images", "image_path", "img")
PICTURE_WORDS: Final = ("image", "img", "picture", "photo")  # of keys that may hold pictures
# Key of the files that a tar shard holds beside a record, by their marks; they replace those that the record names.
BESIDE: Final = "__beside__"
# Where a part of a message holds an image, by name or by content.
PART_KEYS: Final = ("image", "image_url", "path", "url", "source", "base64", "data", "bytes")
VIDEO_KEYS: Final = ("video", "videos")
SOUND_KEYS: Final = ("audio", "audios")
FRAME_FILES: Final = (".jpg", ".jpeg", ".png", ".webp", ".bmp")  # frames of one video if a record's video lists them
# What qwen-vl-utils and qwen-omni-utils read beside a video or a sound.
OWN_SAMPLING: Final = (
    *("fps", "sample_fps", "nframes", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels"),
    *("video_start", "video_end", "resized_height", "resized_width", "audio_start", "audio_end"),
)
LONGEST_PATH: Final = 4096  # Linux opens no longer one (PATH_MAX): what is longer is the content itself
SHORTEST_CONTENT: Final = 48  # characters of base64, below which no picture fits
ADDRESSES: Final = ("http://", "https://", "s3://", "gs://", "hf://", "ftp://")
# Keys of a record in place of a file: what holds its content, and what names the file or is a record again.
CONTENT_KEYS: Final = ("bytes", "base64", "b64_json", "data")
PLACE_KEYS: Final = ("url", "image_url", "path", "image", "source", "file")
# How base64 of images (JPEG, PNG, GIF, WebP, BMP, TIFF), sounds and videos (FLAC, Ogg, MP3, Matroska, MP4) begins.
STARTS: Final = (
    *("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR", "Qk", "SUkq", "TU0AK"),
    *("ZkxhQ", "T2dnU", "SUQz", "GkXfo", "AAAA"),
)
_BASE64: Final = re.compile(r"[A-Za-z0-9+/_\-\s]+={0,2}\s*")
PREFERENCE_KEYS: Final = ("chosen", "rejected", "rejected_response", "rejected_messages", "kto_tag")
NAMED_IMAGE: Final = re.compile(r"<img>([^<>]+)</img>")  # Qwen-VL's way to name an image within the text

Picture = Path | bytes  # an image file, or the content of one
Video = Picture | tuple[Picture, ...]  # a video file, the content of one, or images that are its frames
Named = dict[str, list[Any]]  # what a record or a turn names, by the mark that stands for each


class Turn(NamedTuple):
    """What one side says; ``role`` is ``system``, ``user`` or ``assistant``."""

    role: str
    text: str


@dataclass(frozen=True)
class Conversation:
    turns: tuple[Turn, ...]  # read strictly, they alternate, end with an answer, and hold one `IMAGE_MARK` per image
    images: tuple[Picture, ...]  # in the order of their marks
    # Width and height of each image where the record states them; a lenient reading then leaves out ``images``.
    sizes: tuple[Size, ...] | None = None
    # In the order of `VIDEO_MARK` and `SOUND_MARK`, which are text where there is no video or no sound.
    videos: tuple[Video, ...] = ()
    sounds: tuple[Picture, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        clips = {VIDEO_MARK: self.videos, SOUND_MARK: self.sounds}
        return (IMAGE_MARK, *(mark for mark, held in clips.items() if held))


def read_conversation(record: Mapping[str, Any], root: Path, *, strict: bool = True) -> Conversation:
    r"""Read a record of any of the forms above.

    ``strict`` is for training. Advice, which wants lengths alone, takes any order of turns, any role and any number of
    marks, and images whose sizes are stated need not exist.

    >>> record = {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A cat."}]}
    >>> read_conversation(record | {"images": ["a.jpg"]}, Path("data")).turns[0]
    Turn(role='user', text='<image>\nWhat?')
    """
    for key in PREFERENCE_KEYS:
        if record.get(key) is not None:
            raise DataError(f"sample must be for supervised training, got preferences ({key!r})")
    videos = _named(record, VIDEO_KEYS)
    is_frames = len(videos) > 1 and all(str(name).lower().endswith(FRAME_FILES) for name in videos)
    named: Named = {
        VIDEO_MARK: [videos] if is_frames else videos,
        SOUND_MARK: _named(record, SOUND_KEYS),
        IMAGE_MARK: _named(record, IMAGE_KEYS),
    }
    names_images = bool(named[IMAGE_MARK])
    turns = []
    for where, role, content in _said(record, strict=strict):
        text, within = _content(content, where, names_in_text=role == "user" and not names_images, strict=strict)
        if strict and role == "assistant" and not text.strip():
            raise DataError(f"{where} must hold an answer, got an empty one")
        turns.append(Turn(role, text))
        for mark, found in within.items():
            named[mark] += found
    if not turns:
        raise DataError(
            f"sample must hold a conversation ({', '.join(TURN_KEYS[:2])}) or a question and its answer (query, "
            f"response), got the keys {', '.join(map(str, record))}"
        )
    beside = record.get(BESIDE, {})
    for mark, files in beside.items() if strict else ():
        if len(named[mark]) > len(files):
            kind = mark.strip("<>")
            raise DataError(f"sample must hold each {kind} that it names, got {len(files)} of {len(named[mark])}")
    named |= beside
    if strict and not named[IMAGE_MARK]:
        _refuse_other_names(record)
    if strict:
        _check_order([turn.role for turn in turns])
    for mark, files in named.items():
        if files or mark == IMAGE_MARK:
            turns = _marked(turns, mark, len(files), strict=strict)
    given = named[IMAGE_MARK]
    sizes = None if IMAGE_MARK in beside else _stated_sizes(record, len(given))
    return Conversation(
        tuple(turns),
        images=() if sizes and not strict else tuple(_picture(image, root) for image in given),
        sizes=sizes,
        videos=tuple(_video(video, root) for video in named[VIDEO_MARK]),
        sounds=tuple(_picture(sound, root, "audio") for sound in named[SOUND_MARK]),
    )


def _marked(turns: list[Turn], mark: str, count: int, *, strict: bool) -> list[Turn]:
    """Turns with ``count`` marks; where the record has none, they come before its first question."""
    # As in InternVL's and ms-swift's code.
    marks = sum(turn.text.count(mark) for turn in turns if turn.role == "user")
    first = next((number for number, turn in enumerate(turns) if turn.role == "user"), None)
    if count and not marks and first is not None:
        marks, turns = count, [*turns]
        turns[first] = Turn("user", f"{mark}\n" * marks + turns[first].text)
    if strict and marks != count:
        kind = mark.strip("<>")
        raise DataError(f"turns must hold one {mark} per {kind}, got {marks} for {count} {kind}(s)")
    return turns


def _named(record: Mapping[str, Any], keys: Sequence[str]) -> list[Any]:
    given = {key: _listed(record[key]) for key in keys if record.get(key)}
    named = next(iter(given.values()), [])
    if any(other != named for other in given.values()):
        raise DataError(f"sample must name its {keys[1]} under one key, got different ones under {' and '.join(given)}")
    return list(named)


def _refuse_other_names(record: Mapping[str, Any]) -> None:
    """Refuse a record whose pictures stand under keys that nobody reads: it would be trained without them."""
    for key, value in record.items():
        if key in IMAGE_KEYS or not any(word in str(key).lower() for word in PICTURE_WORDS):
            continue
        held = unwrapped(next(iter(_listed(value)), None))
        text = held.lower() if isinstance(held, str) and not re.search(r"\s", held) else ""
        if isinstance(held, bytes) or text.startswith("data:") or text.endswith(FRAME_FILES):
            raise DataError(f"sample must name its images under {' or '.join(IMAGE_KEYS[:2])}, got them under {key!r}")


def _said(record: Mapping[str, Any], *, strict: bool) -> list[tuple[str, str, Any]]:
    """Who says what: where each turn stands, for messages, its role and its content."""
    # Tables that unite columns have empty turns beside a question and its answer.
    key = next((key for key in TURN_KEYS if record.get(key)), None)
    said = [("system", "system", record["system"])] if record.get("system") else []
    if key is not None:
        return said + _turns(record[key], key, strict=strict)
    for number, pair in enumerate(_listed(record.get("history"))):
        said += [
            (f"history[{number}]", role, text) for role, text in zip(("user", "assistant"), _listed(pair), strict=False)
        ]
    asked = []
    for key in QUESTION_KEYS:
        if _is_turns(record.get(key)):  # as TRL's prompts may be
            said += _turns(record[key], key, strict=strict)
        elif record.get(key):
            asked.append((key, record[key]))
    if asked:  # an instruction and its input are one question, as in Alpaca
        of_one = "\n".join(text for _, text in asked) if all(isinstance(text, str) for _, text in asked) else None
        said += [(asked[0][0], "user", of_one)] if of_one else [(key, "user", text) for key, text in asked]
    for key in ANSWER_KEYS:
        if _is_turns(record.get(key)):
            said += _turns(record[key], key, strict=strict)
        elif record.get(key):
            said.append((key, "assistant", record[key]))
    return said


def _is_turns(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(turn, Mapping) and "role" in turn for turn in value)


def _turns(turns: Any, key: str, *, strict: bool) -> list[tuple[str, str, Any]]:
    if isinstance(turns, Mapping) and all(isinstance(column, list) for column in turns.values()):
        turns = [dict(zip(turns, row, strict=True)) for row in zip(*turns.values(), strict=False)]  # a table's columns
    if not isinstance(turns, list):
        raise DataError(f"{key} must be a list of turns, got {turns!r:.80}")
    return [_turn(turn, f"{key}[{number}]", strict=strict) for number, turn in enumerate(turns)]


def _turn(turn: Any, where: str, *, strict: bool) -> tuple[str, str, Any]:
    if not isinstance(turn, Mapping):
        if strict:
            raise DataError(f"{where} must be a turn, got {turn!r:.80}")
        return where, "assistant", turn
    who, what = ("from", "value") if turn.get("from") is not None else ("role", "content")
    role, content = str(turn.get(who)), turn.get(what)
    if strict and (role not in ROLES or not isinstance(content, str | list)):
        raise DataError(f"{where} must have {who} ({', '.join(ROLES)}) and {what}, got {turn!r:.80}")
    return where, ROLES.get(role, "user" if role in OTHER_ASKERS else "assistant"), content


def _content(content: Any, where: str, *, names_in_text: bool, strict: bool) -> tuple[str, Named]:
    """Text with a mark for each file that the turn itself names, and these files."""
    found: Named = {IMAGE_MARK: [], VIDEO_MARK: [], SOUND_MARK: []}
    if isinstance(content, str):
        found[IMAGE_MARK] = NAMED_IMAGE.findall(content) if names_in_text else []
        return NAMED_IMAGE.sub(IMAGE_MARK, content) if found[IMAGE_MARK] else content, found
    if not isinstance(content, list):
        if strict:
            raise DataError(f"{where} must be a text, got {content!r:.80}")
        return "" if content is None else str(content), found
    text = ""
    for part in content:
        if not isinstance(part, Mapping):
            if strict:
                raise DataError(f"{where} must be a text or a list of parts, got the part {part!r:.80}")
            text += str(part)
            continue
        form = str(part.get("type")).removeprefix("input_")
        kind = next((k for k in ("video", "audio") if form.startswith(k) or part.get(k)), None)
        if kind is not None:
            text += f"<{kind}>"
            found[f"<{kind}>"] += _clip_of(part, kind, where)
            continue
        image = next((part[key] for key in PART_KEYS if part.get(key)), None)
        if form.startswith("image") or (image is not None and not part.get("text")):
            text += IMAGE_MARK
            found[IMAGE_MARK] += _listed(image)
        elif isinstance(part.get("text"), str):
            text += part["text"]
        elif strict:
            raise DataError(f"{where} must have parts of text, images, videos and sounds, got {part!r:.80}")
    return text, found


def _clip_of(part: Mapping[str, Any], kind: str, where: str) -> list[Any]:
    own = [key for key in OWN_SAMPLING if part.get(key) is not None]
    if own:
        remedy = "cut the file" if kind == "audio" else "video_preprocessor_config.json says how all videos are sampled"
        raise DataError(
            f"{where} must leave {own[0]} to the {kind} processor of the model's folder, got {part[own[0]]!r}; {remedy}"
        )
    keys = (kind, f"{kind}_url", f"input_{kind}", *PART_KEYS)
    clip = next((part[key] for key in keys if part.get(key)), None)
    return [] if clip is None else [clip]


def _check_order(roles: Sequence[str]) -> None:
    asked = roles[1:] if roles[:1] == ["system"] else roles
    if not asked or asked != ["user", "assistant"] * (len(asked) // 2):
        raise DataError(
            f"turns must alternate user (human) and assistant (gpt) and end with an answer, got {roles!s:.200}"
        )


def _listed(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _video(video: Any, root: Path) -> Video:
    if isinstance(video, list | tuple):
        return tuple(_picture(frame, root) for frame in video)
    return _picture(video, root, "video")


def _picture(image: Any, root: Path, what: str = "image") -> Picture:
    held = unwrapped(image)
    content = content_of(held, what)
    if content is not None:
        return content
    if not isinstance(held, str) or not held:
        raise DataError(f"{what} must be a path, bytes, base64, a data URI, or a list of these, got {held!r:.80}")
    if held.startswith(ADDRESSES):
        raise DataError(f"{what} must be a path or content, got an address, {held:.60}; download it, and name the file")
    return root / held.removeprefix("file://")


def _stated_sizes(record: Mapping[str, Any], count: int) -> tuple[Size, ...] | None:
    widths, heights = (_listed(record.get(side)) for side in ("width", "height"))
    if not count or len(widths) != count or len(heights) != count:
        return None
    whole = all(type(side) is int and side > 0 for side in (*widths, *heights))
    return tuple(zip(widths, heights, strict=True)) if whole else None


# Files whose content stands in the data: bytes, base64, data URIs, as exports have them ------------------------------


def unwrapped(value: Any) -> Any:
    """The content or the name of a file out of records around it, such as ``{"bytes": …, "path": …}``."""
    while isinstance(value, Mapping):
        content = next((value[key] for key in CONTENT_KEYS if value.get(key)), None)
        if content is not None:
            is_base64 = isinstance(content, str) and not content.startswith("data:")
            return _decoded(content, "bytes") if is_base64 else content
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
