"""Lengths of a few items drawn from a dataset, in whatever form conversations about images come, without torch.

Read are InternVL's and LLaVA's annotations, ShareGPT-like ones (``messages`` or ``conversations``, ``images``), those
of Qwen and ms-swift (images within a message's content), questions with answers (``query``, ``response``), as JSON or
JSON lines, and folders that Hugging Face ``datasets`` saved. Nothing is checked beyond what lengths need: training
checks the rest.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.errors import DataError, said
from omnibal.families.base import ImageRule, Size
from omnibal.formats.images import image_size
from omnibal.formats.shards import Shards, names_of, open_shards

MOST_UNREAD: Final = 0.1
"""Share of items that may be unreadable."""
TURN_TOKENS: Final = 5
"""What ChatML adds to a turn."""
END_TOKENS: Final = 2
"""Of these, those that end a turn: of an answer they are targets."""
IMAGE_TOKENS: Final = 2
"""What stands before and behind an image."""
TOKENS_OF: Final = {"word": 1.2, "digit": 1.0, "marks": 0.9, "ideograph": 0.6, "other": 0.5}
"""Of Qwen's vocabulary per word of Latin letters, digit, run of other marks, ideograph, and letter of other scripts.

On 5,800 paragraphs of English prose, Markdown and code they are 5 % below to 5 % above what its tokenizer counts, a
paragraph by itself 10 % (standard deviation).
"""
ESTIMATE_ERROR: Final = 0.1
"""Share by which a text's estimated tokens may be off."""
MARKS: Final = re.compile(r"<image>|<\|?image_pad\|?>|<img>|</img>")
NAMED_IMAGE: Final = re.compile(r"<img>([^<>]+)</img>")
"""Qwen-VL's way to name an image within the text."""
ASKED_KEYS: Final = ("system", "instruction", "input", "prompt", "query", "question")
ANSWER_KEYS: Final = ("output", "response", "answer", "completion")
PREFERENCE_KEYS: Final = ("chosen", "rejected", "rejected_response", "rejected_messages", "kto_tag")
"""Of records for training on preferences, whose batches hold other sequences than a conversation."""
ASKERS: Final = ("system", "user", "human", "tool", "observation", "tool_response", "function_response")
"""Whose turns carry no loss; all others' do."""
TURN_KEYS: Final = ("conversations", "messages", "conversation")
IMAGE_KEYS: Final = ("images", "image", "image_path", "img")
SAVED: Final = ("dataset_dict.json", "dataset_info.json", "state.json")
"""One of these lies where Hugging Face ``datasets`` saved something."""
VIDEO_KEYS: Final = ("videos", "video")
Image = str | Mapping[str, Any]
Count = Callable[[str], int]
_PARTS: Final = re.compile(
    r"(?P<word>[A-Za-zÀ-ɏ]+)|(?P<digit>\d)|(?P<ideograph>[⺀-鿿가-힯豈-﫿＀-￯])|(?P<other>[^\W\d_])|(?P<marks>[^\w\s]+|_+)"
)


def estimated_tokens(text: str) -> int:
    """About how many tokens a text has, where no tokenizer is at hand.

    >>> estimated_tokens("What is shown in this picture, and where was it taken?")
    15
    """
    return round(sum(TOKENS_OF[str(part.lastgroup)] for part in _PARTS.finditer(text)))


@dataclass(frozen=True)
class Item:
    """A sample: its turns that ask, its answers, and its images (paths, or records of bytes or sizes)."""

    asked: tuple[str, ...]
    answers: tuple[str, ...]
    images: tuple[Image, ...]
    sizes: tuple[Size, ...] | None
    root: Path

    @property
    def turns(self) -> int:
        """How many."""
        return len(self.asked) + len(self.answers)


Drawn = tuple[str, Callable[[], Item]]
"""Where an item stands, and what reads it."""


class Opened(NamedTuple):
    """Items to be measured."""

    items: Iterable[Drawn]
    num_samples: int | None = None
    """Of the whole dataset; by default as many as these."""
    source: IntArray | None = None
    """Of each item."""
    names: Sequence[str] | None = None
    """Of the sources."""


@dataclass(frozen=True)
class DrawnLengths:
    """What a few items hold.

    Attributes:
        lengths: Of the items that could be measured.
        num_samples: Of the whole dataset; as many as were read of a stream.
        problems: Why the others could not.
        text_tokens: Mean tokens of an item that are text.
    """

    lengths: SampleLengths
    num_samples: int
    problems: tuple[str, ...]
    text_tokens: float


def draw_lengths(
    path: Path,
    rule: ImageRule,
    *,
    count: int = 1000,
    of_each_source: bool = False,
    seed: int = 0,
    image_folder: Path | None = None,
    count_tokens: Count = estimated_tokens,
) -> DrawnLengths:
    """Measure items drawn at random.

    Args:
        path: A file of annotations, InternVL's meta file, or a folder of Hugging Face ``datasets``.
        rule: What images bring.
        count: Of items to draw; all where there are fewer.
        of_each_source: Whether as many are drawn of each source, for those who mix them: else some may have none.
        seed: Of the draw.
        image_folder: What the paths of images are relative to; by default each file's own folder.
        count_tokens: How many tokens a text has.

    Raises:
        DataError: More than a tenth cannot be measured; the message says why the first one cannot.
    """
    return measure_items(_open(path, count, of_each_source, seed, image_folder), rule, count_tokens, str(path))


def measure_items(opened: Opened, rule: ImageRule, count_tokens: Count, named: str) -> DrawnLengths:
    """Measure some items; arguments and errors as of ``draw_lengths``, and what the data is called in a message."""
    measured, text, problems, usable = [], 0, list[str](), []
    for number, (place, read) in enumerate(opened.items):
        try:
            item = read()
            loads = rule(_sizes(item))
        except Exception as error:  # records in forms of others may hold anything
            problems.append(f"{place}: {said(error)}")
            continue
        asked, answered = (count_tokens(MARKS.sub("", "\n".join(turns))) for turns in (item.asked, item.answers))
        tokens = asked + answered + TURN_TOKENS * item.turns + IMAGE_TOKENS * len(loads)
        text += tokens
        sums = np.array(loads, dtype=np.int64).reshape(-1, 3).sum(axis=0).tolist()
        measured.append((sums[0], sums[1] + tokens, sums[2], answered + END_TOKENS * len(item.answers)))
        usable.append(number)
    num_items = len(problems) + len(measured)
    if not measured or len(problems) > MOST_UNREAD * num_items:  # the others may be of another kind: texts, say
        where = "; records may state width and height, and --images says where images lie"
        first = problems[0] if problems else "it is empty"
        hint = where if "image must" in first else ""
        raise DataError(
            f"data must have items whose lengths can be told, got {len(problems):,} of {num_items:,} that have none in "
            f"{named}; {first}{hint}"
        )
    units, all_tokens, squared, targets = np.array(measured, dtype=np.int64).T
    lengths = SampleLengths(
        units,
        all_tokens,
        target_tokens=targets,
        vision_squared=squared if squared.any() else None,
        source=None if opened.source is None else opened.source[usable],
        source_names=opened.names,
    )
    num_samples = opened.num_samples or len(usable) + len(problems)
    return DrawnLengths(lengths, num_samples, tuple(problems), text / len(measured))


def _open(path: Path, count: int, of_each_source: bool, seed: int, image_folder: Path | None) -> Opened:
    """Items drawn at random."""
    generator = np.random.default_rng(seed)
    if path.is_dir():
        if not any((path / name).is_file() for name in SAVED):
            raise DataError(f"data must be a file, lengths, or a folder that datasets saved (save_to_disk), got {path}")
        table = _saved_dataset(path)
        chosen = np.sort(generator.permutation(len(table))[:count]).tolist()
        root = image_folder or path
        items = ((f"{path}, item {place}", partial(_read, table, place, root)) for place in chosen)
        return Opened(items, len(table), np.zeros(len(chosen), dtype=np.int64))
    opened = open_shards(path, image_folder=image_folder)
    shards = Shards(opened)
    sizes = [shard.num_samples for shard in opened] if of_each_source else [shards.num_samples]
    firsts, of_each = np.cumsum([0, *sizes]), -(-count // len(sizes))
    parts = [first + generator.permutation(size)[:of_each] for first, size in zip(firsts, sizes, strict=False)]
    some = np.sort(np.concatenate(parts))
    drawn, names = _of_shards(shards, shards.item_of(some).tolist()), names_of(opened)
    return Opened(drawn, shards.num_samples, shards.source_of(some), names)


def _of_shards(shards: Shards, items: list[int]) -> Iterator[Drawn]:
    for item in items:
        shard, place = shards.locate(item)
        where = f"{shard.records.path}, line {shard.records.line(place)}"
        yield where, partial(_read, shard.records, place, shard.root)


def _read(records: Any, place: int, root: Path) -> Item:
    return parse_item(records[place], root)


def _saved_dataset(path: Path) -> Any:
    """A folder of Hugging Face ``datasets``, whose images stay as they are."""
    try:
        from datasets import DatasetDict, Features, Image, load_from_disk
    except ModuleNotFoundError as error:
        raise DataError(f"datasets must be installed to read {path}, got none; run pip install datasets") from error
    try:
        table = load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"data must be a folder that datasets can load, got {path}: {said(error)}") from error
    if isinstance(table, DatasetDict):
        table = table["train"] if "train" in table else next(iter(table.values()))
    plain = Features({name: _undecoded(feature, Image) for name, feature in table.features.items()})
    return table if plain == table.features else _cast_quietly(table, plain)


def _cast_quietly(table: Any, features: Any) -> Any:
    """Without the bar that would stand between the lines of an answer."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    was_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        return table.cast(features)
    finally:
        if not was_disabled:
            enable_progress_bars()


def _undecoded(feature: Any, image: Any) -> Any:
    inner = getattr(feature, "feature", None)
    if isinstance(feature, image):
        return image(decode=False)
    return type(feature)(image(decode=False)) if isinstance(inner, image) else feature


def parse_item(record: Mapping[str, Any], root: Path) -> Item:
    """What lengths need of a record, whatever its form.

    >>> item = parse_item({"messages": [{"role": "user", "content": "<image>What?"}], "images": ["a.jpg"]}, Path("."))
    >>> item.asked, item.answers, item.images
    (('<image>What?',), (), ('a.jpg',))

    Raises:
        DataError: It holds no conversation, preferences, or a video.
    """
    if any(record.get(key) for key in VIDEO_KEYS):
        raise DataError("samples must hold images and text, got a video, which is not supported")
    preferred = next((key for key in PREFERENCE_KEYS if record.get(key) is not None), None)
    if preferred is not None:
        raise DataError(f"samples must be for supervised training, got preferences ({preferred!r})")
    turns = next((record[key] for key in TURN_KEYS if isinstance(record.get(key), list)), None)
    images = [image for key in IMAGE_KEYS for image in _listed(record.get(key))]
    said = _pairs(record) if turns is None else [("system", record.get("system")), *map(_turn, turns)]
    asked, answers = list[str](), list[str]()
    for role, content in said:
        text, more = _content(content)
        images += more
        if text or more:
            (asked if role in ASKERS else answers).append(text)
    if not asked and not answers:
        raise DataError(
            f"samples must hold a conversation ({', '.join(TURN_KEYS[:2])}) or {ASKED_KEYS[4]} and {ANSWER_KEYS[1]}, "
            f"got the keys {', '.join(record)}"
        )
    return Item(tuple(asked), tuple(answers), tuple(images), _stated_sizes(record, len(images)), root)


def _pairs(record: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Who says what in a record of a question and its answer, and of those before them in ``history``."""
    before = [
        turn for pair in _listed(record.get("history")) for turn in zip(("user", "assistant"), pair, strict=False)
    ]
    asked = [turn for key in ASKED_KEYS if record.get(key) for turn in _turns(record[key], "user")]
    return (
        before + asked + [turn for key in ANSWER_KEYS if record.get(key) for turn in _turns(record[key], "assistant")]
    )


def _turns(value: Any, role: str) -> list[tuple[str, Any]]:
    """What one key of a record says: a text or its parts, or turns as TRL's ``prompt`` and ``completion`` have them."""
    is_conversation = isinstance(value, list) and all(isinstance(turn, Mapping) and "role" in turn for turn in value)
    return [_turn(turn) for turn in value] if is_conversation else [(role, value)]


def _turn(turn: Any) -> tuple[str, Any]:
    """Who says what in a turn."""
    if not isinstance(turn, Mapping):
        return "", turn
    return str(turn.get("from", turn.get("role"))), turn.get("value", turn.get("content", ""))


def _content(content: Any) -> tuple[str, list[Image]]:
    """Text and images of a turn, which may be a list of parts, or name images within the text."""
    if content is None:
        return "", []
    if not isinstance(content, list):
        return NAMED_IMAGE.sub("", str(content)), NAMED_IMAGE.findall(str(content))
    texts, images = [], []
    for part in content:
        if not isinstance(part, Mapping):
            texts.append(str(part))
        elif part.get("type", "").startswith("image"):
            named = part.get("image") or part.get("path") or part.get("image_url")
            images += _listed(named.get("url") if isinstance(named, Mapping) and "url" in named else named)
        elif part.get("text"):
            texts.append(str(part["text"]))
    return "\n".join(texts), images


def _listed(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _stated_sizes(record: Mapping[str, Any], count: int) -> tuple[Size, ...] | None:
    """Sizes that the record itself states, as InternVL's annotations do."""
    widths, heights = (_listed(record.get(side)) for side in ("width", "height"))
    if not count or len(widths) != count or len(heights) != count:
        return None
    whole = all(isinstance(side, int) and side > 0 for side in (*widths, *heights))
    return tuple(zip(widths, heights, strict=True)) if whole else None


def _sizes(item: Item) -> tuple[Size, ...]:
    if item.sizes is not None:
        return item.sizes
    return tuple(_size(image, item.root) for image in item.images)


def _size(image: Image, root: Path) -> Size:
    if isinstance(image, Mapping):
        if image.get("bytes"):
            return image_size(BytesIO(image["bytes"]))
        image = str(image.get("path"))
    if image.startswith(("http://", "https://", "data:")):
        raise ValueError(f"image must be a file to know its size, got {image[:60]}")
    path = Path(image.removeprefix("file://"))
    return image_size(path if path.is_absolute() else root / path)
