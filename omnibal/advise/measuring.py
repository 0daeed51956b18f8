"""Lengths of somebody's data under a model, and in words where they come from; without torch.

Of a dataset a thousand samples are drawn at random, of a stream the first thousand are read. Records are read leniently
(`omnibal.formats.chat`): only what lengths need is checked, the rest when the data are trained on.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from re import compile as pattern
from typing import Any, Final

import numpy as np

from omnibal.advise.models import Model
from omnibal.advise.present import Overlong, Present
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.errors import DataError
from omnibal.families.base import ImageLoad, ImageRule, Size, VideoHeader, VideoLoad
from omnibal.formats.chat import IMAGE_MARK, Conversation, read_conversation
from omnibal.formats.files import stream_rows
from omnibal.formats.measured import lengths_of, summed
from omnibal.formats.media import image_size, sound_header, video_header
from omnibal.formats.rows import Row, is_tar, parse_entry
from omnibal.formats.shards import Shards, names_of, open_shards

FIXED_TOKENS: Final = ("internvl", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Families whose vision units bring so many tokens each."""
HEAD_BYTES: Final = 1 << 12
DRAWN: Final = 1000  # samples that are drawn of a dataset, or read of a stream
STANDARD_INPUT: Final = Path("-")
MOST_OPEN: Final = 64
"""Shards that are read at the same time; of more, so many are taken, evenly spaced."""
FRAMES: Final = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4)  # of a video, tried as its limit
MOST_UNREAD: Final = 0.1  # share of samples that may be unreadable
# What ChatML adds to a turn, and which of it is a target: the token that ends an answer; what stands around an image.
TURN_TOKENS, END_TOKENS, IMAGE_TOKENS = 5, 1, 2
TOKENS_OF: Final = {"word": 1.2, "digit": 1.0, "marks": 0.9, "ideograph": 0.6, "other": 0.5}
"""Tokens of Qwen's vocabulary per Latin word, digit, run of other marks, ideograph, and letter of other scripts.

On 5,800 paragraphs of English prose, Markdown and code these estimates are 5 % below to 5 % above the count of Qwen's
tokenizer, for a single paragraph 10 % (standard deviation).
"""
ESTIMATE_ERROR: Final = 0.1  # share by which a text's estimated tokens may be off
MARKS: Final = pattern(r"<image>|<\|?video_pad\|?>|<\|?image_pad\|?>|<img>|</img>")
_PARTS: Final = pattern(
    r"(?P<word>[A-Za-zÀ-ɏ]+)|(?P<digit>\d)|(?P<ideograph>[⺀-鿿가-힯豈-﫿＀-￯])|(?P<other>[^\W\d_])|(?P<marks>[^\w\s]+|_+)"
)

Count = Callable[[str], int]


def estimated_tokens(text: str) -> int:
    """About how many tokens a text has, where no tokenizer is at hand.

    >>> estimated_tokens("What is shown in this picture, and where was it taken?")
    15
    """
    return round(sum(TOKENS_OF[str(part.lastgroup)] for part in _PARTS.finditer(text)))


@dataclass(frozen=True)
class MeasuredLengths:
    lengths: SampleLengths
    said: str  # where the lengths come from, in words
    is_whole: bool = False  # whether every sample was counted before
    is_stream: bool = False  # whether only the head of a stream was measured
    videos: Mapping[int, tuple[VideoHeader, ...]] = field(default_factory=dict)  # of the samples that have some
    image_tokens: IntArray | None = None
    """Tokens of each sample that stand for images, videos or sounds; None if vision units tell them."""
    images: str = ""  # how large images were taken to be, and who says so; empty if nothing was assumed


def measure(
    data: Sequence[Path],
    model: Model,
    present: Present,
    *,
    images: Path | None = None,
    max_image: int | None = None,
) -> MeasuredLengths:
    """Measure data as a model takes it and the present way keeps it.

    Args:
        data: Annotations (one file or folder), lengths (a folder, or JSON lists of ``{"vit_num", "token_num"}``), or a
            stream: webdataset shards, or ``-`` for JSON lines on standard input.
        present: Today's training: its mixture, its cutoff and its largest image change what samples bring.
        images: What the paths of images are relative to; by default the folder of the annotations.
        max_image: Most tiles of an image, or most pixels at native resolution.
    """
    streams = [path == STANDARD_INPUT or is_tar(path) for path in data]
    for path in data:
        if path != STANDARD_INPUT and not path.exists():
            raise DataError(f"data must be a file or a folder, got {path}, which does not exist")
    if all(streams):
        found = _of_head(head_rows(data, images), data, model, _rule(model, present, max_image))
    elif any(streams):
        raise DataError(f"data must be shards alone where there are some, got {data[streams.index(False)]} beside them")
    elif all(_holds_lengths(path) for path in data):
        found = _measured_before(data, model)
    elif len(data) > 1:
        raise DataError(f"data must be lengths where there are several files, got {data[1]}; name a meta file of all")
    else:
        found = _drawn(data[0], model, _rule(model, present, max_image), images, of_each=present.mixture is not None)
    if not found.is_whole and found.lengths.vision_units.any():
        found = replace(found, images=_largest_image(model, present, max_image))
    found = _cut(found, present, model)
    if present.mixture is not None:
        from omnibal.data.source_draws import typical_lengths  # compiled, which no other advice needs

        said, lengths = f"{found.said}; drawn with the mixture's first shares", found.lengths
        found = replace(found, lengths=typical_lengths(lengths, present.mixture), videos={}, said=said)
    lengths = found.lengths
    if model.units == "patches" and lengths.vision_squared is None and lengths.vision_units.any():
        squared = lengths.vision_units.astype(np.int64) ** 2
        lengths = SampleLengths(**{**lengths.columns(), "vision_squared": squared})
        found = replace(found, lengths=lengths, said=f"{found.said}; each taken to have one image")
    return found


def _holds_lengths(data: Path) -> bool:
    if data.is_dir():
        return (data / "lengths.json").is_file()
    with data.open("rb") as file:
        return b'"vit_num"' in file.read(HEAD_BYTES)


def _measured_before(data: Sequence[Path], model: Model) -> MeasuredLengths:
    folder = next((path for path in data if path.is_dir()), None)
    if folder is not None and len(data) > 1:
        raise DataError(f"data must be one folder of lengths or lists of them, got the folder {folder} among others")
    lengths = SampleLengths.from_token_lengths(data) if folder is None else SampleLengths.load(folder)
    if not len(lengths):
        raise DataError(f"lengths must hold at least one sample, got none in {', '.join(map(str, data))}")
    _check_tokens(lengths, model)
    return MeasuredLengths(lengths, f"{len(lengths):,} samples, lengths known", is_whole=True)


@dataclass(frozen=True)
class DrawnLengths:
    lengths: SampleLengths  # of the samples that could be measured
    problems: tuple[str, ...]  # one for each sample that could not be measured
    text_tokens: float  # mean tokens of a sample that are text
    usable: IntArray  # numbers of the samples that could be measured, in the order in which they were given
    videos: Mapping[int, tuple[VideoHeader, ...]] = field(default_factory=dict)  # of the samples that have some
    image_tokens: IntArray | None = None  # tokens of each sample that are no text


def draw_rows(
    path: Path, images: Path | None, *, of_each: bool, count: int
) -> tuple[Shards, Iterator[tuple[Row, Path]], IntArray]:
    """Draw rows at random: the data, the rows with the folder of their images, and the number of each row's source."""
    # ``of_each`` draws equally many rows of each source: under a mixture a small source may else have none.
    shards = Shards(open_shards(path, image_folder=images))
    sizes = [shard.num_samples for shard in shards.parts] if of_each else [shards.num_samples]
    firsts, number, rng = np.cumsum([0, *sizes]), -(-count // len(sizes)), np.random.default_rng(0)
    drawn = [first + rng.permutation(size)[:number] for first, size in zip(firsts, sizes, strict=False)]
    some = np.sort(np.concatenate(drawn))
    located = map(shards.locate, shards.item_of(some).tolist())
    return shards, ((shard.rows[place], shard.root) for shard, place in located), shards.source_of(some)


def head_rows(paths: Sequence[Path], images: Path | None = None) -> Iterator[tuple[Row, Path]]:
    """The rows of a stream, in its order; of several shards one of each in turn, as ranks and workers read them."""
    streams = [_rows_of(path, images) for path in paths[:: -(-len(paths) // MOST_OPEN)]]
    return (found for found in chain.from_iterable(zip_longest(*streams)) if found is not None)


def _rows_of(path: Path, images: Path | None) -> Iterator[tuple[Row, Path]]:
    if path != STANDARD_INPUT:
        yield from ((row, images or path.parent) for _, row in stream_rows(path))
        return
    for number, line in enumerate(sys.stdin, start=1):
        if line.strip():
            read = partial(parse_entry, line.encode(errors="surrogatepass"))
            yield Row(Path("standard input"), number, read), images or Path()


def measure_rows(
    rows: Iterable[tuple[Row, Path]], rule: ImageRule, count: Count, named: str, model: Model
) -> DrawnLengths:
    """Measure some rows, each with the folder that its files are relative to."""
    loads, problems, texts, usable, number = [], list[str](), list[int](), list[int](), -1
    videos = dict[int, tuple[VideoHeader, ...]]()
    for number, (row, root) in enumerate(rows):
        try:
            conversation = read_conversation(row.read(), root, strict=False)
            of_images: Sequence[Any] = rule(conversation.sizes or tuple(map(image_size, conversation.images)))
            clips = tuple(map(video_header, conversation.videos))
            of_videos: list[Any] = [model.video_rule()(header) for header in clips]
            of_sounds: list[Any] = [model.sound_rule()(sound_header(path)) for path in conversation.sounds]
        except Exception as error:  # records of other code bases may hold anything
            problems.append(str(row.problem(error)))
            continue
        text, targets = _text_tokens(conversation, count)
        text += IMAGE_TOKENS * (len(of_images) + len(of_videos) + len(of_sounds))
        times = sum(tokens_of(load, count) - load.llm_tokens for load in of_videos)
        units, tokens, _, *further = summed(of_images, of_videos, of_sounds)
        loads.append((units, text + tokens + times, targets, *further))
        if clips:
            videos[len(usable)] = clips
        texts.append(text)
        usable.append(number)
    if not loads or len(problems) > MOST_UNREAD * (number + 1):  # the others may be of another kind: texts, say
        first = problems[0] if problems else "it is empty"
        hint = "; records may state width and height, and --images says where images lie"
        raise DataError(
            f"data must have items whose lengths can be told, got {len(problems):,} of {number + 1:,} that have none "
            f"in {named}; {first}{hint if 'image must' in first else ''}"
        )
    lengths = lengths_of(np.array(loads, dtype=np.int64))
    image_tokens = lengths.llm_tokens - np.array(texts)
    return DrawnLengths(lengths, tuple(problems), sum(texts) / len(loads), np.array(usable), videos, image_tokens)


def tokens_of(load: VideoLoad, count: Count) -> int:
    """Tokens of a video, with the times that stand in it."""
    return load.llm_tokens + sum(IMAGE_TOKENS + count(f"<{seconds:.1f} seconds>") for seconds in load.seconds)


def _text_tokens(conversation: Conversation, count: Count) -> tuple[int, int]:
    """Tokens of a conversation's text in ChatML, images left out, and those of them that are targets."""
    tokens = targets = 0
    for role, text in conversation.turns:
        written = text
        for mark in conversation.marks:
            written = written.replace(mark, IMAGE_MARK)
        said_tokens = sum(count(part) for part in MARKS.split(written) if part)
        tokens += said_tokens + TURN_TOKENS
        targets += said_tokens + END_TOKENS if role == "assistant" else 0
    return tokens, targets


def _drawn(data: Path, model: Model, rule: ImageRule, images: Path | None, *, of_each: bool) -> MeasuredLengths:
    counter = _tokenizer(model.folder)
    shards, rows, source = draw_rows(data, images, of_each=of_each, count=DRAWN)
    drawn = measure_rows(rows, rule, counter or estimated_tokens, str(data), model)
    columns, names = drawn.lengths.columns(), names_of(shards.parts)
    lengths = SampleLengths(**{**columns, "source": source[drawn.usable]}, source_names=names)
    text = f"{len(lengths):,} of {shards.num_samples:,} samples measured"
    return _told(replace(drawn, lengths=lengths), text, counter is None)


def _of_head(rows: Iterable[tuple[Row, Path]], data: Sequence[Path], model: Model, rule: ImageRule) -> MeasuredLengths:
    counter, names = _tokenizer(model.folder), ", ".join(map(str, data))
    drawn = measure_rows(islice(rows, DRAWN), rule, counter or estimated_tokens, names, model)
    text = f"the first {len(drawn.lengths):,} samples of a stream measured"
    return replace(_told(drawn, text, counter is None), is_stream=True)


def _told(drawn: DrawnLengths, text: str, is_estimated: bool) -> MeasuredLengths:
    if is_estimated:
        share = ESTIMATE_ERROR * drawn.text_tokens / max(float(drawn.lengths.llm_tokens.mean()), 1)
        text += f"; tokens of text estimated (±{ESTIMATE_ERROR:.0%}, ±{share:.0%} of all), for want of a tokenizer"
    if drawn.problems:
        text += f"; {len(drawn.problems)} could not be read, the first: {drawn.problems[0]}"
    return MeasuredLengths(drawn.lengths, text, videos=drawn.videos, image_tokens=drawn.image_tokens)


def _tokenizer(folder: Path | None) -> Count | None:
    """Counts the tokens of a text, where the model's folder has a tokenizer that can be run."""
    file = None if folder is None else folder / "tokenizer.json"
    if file is None or not file.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return None
    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _rule(model: Model, present: Present, max_image: int | None) -> ImageRule:
    """What images bring; hosts make those of too many pixels smaller before the image processor gets them."""
    rule, most = model.image_rule(max_image), present.max_pixels
    if most is None or max_image is not None:
        return rule

    def of_smaller(sizes: Sequence[Size]) -> tuple[ImageLoad, ...]:
        by = [min((most / (height * width)) ** 0.5, 1.0) for height, width in sizes]
        return rule(
            [(max(int(x * factor), 1), max(int(y * factor), 1)) for (x, y), factor in zip(sizes, by, strict=True)]
        )

    return of_smaller


def _largest_image(model: Model, present: Present, max_image: int | None) -> str:
    """The limit that decides how many vision units an image brings, which is the largest of all assumptions."""
    if model.image_limit is None:
        return ""
    most, unit = model.image_limit
    source = "the model folder's" if model.has_own_images else "the publisher's default"
    if max_image is not None:
        most, source = max_image, ""
    elif present.max_pixels is not None and unit == "pixels" and present.max_pixels < most:
        most, source = present.max_pixels, f"as {present.host} resizes them"
    elif present.max_pixels is not None and unit == "tiles":
        source += f"; {present.host} makes them {present.max_pixels:,} pixels at most"
    return f"images up to {most:,} {unit} ({f'{source}; ' if source else ''}--max-image)"


def _cut(found: MeasuredLengths, present: Present, model: Model) -> MeasuredLengths:
    """Samples as the trainer trains them whose limit of tokens is known; what it leaves out is left out."""
    lengths, rule, limit = found.lengths, present.overlong or Overlong(), present.cutoff
    if limit is None and present.host == "ms-swift":  # it cuts at the most tokens that the model takes
        limit = int(model.config.get("text_config", {}).get("max_position_embeddings", 0)) or None
    tokens = lengths.llm_tokens.astype(np.int64)
    if limit is None or not (tokens > limit).any():
        return found
    over = tokens > limit
    at = f"{limit:,} tokens" + (f" ({rule.setting})" if rule.setting else "")
    if rule.keeps == "nothing":
        said, stay = f"{int(over.sum()):,} of {len(over):,} samples are over {at} and left out", np.flatnonzero(~over)
        if not len(stay):
            raise DataError(f"{rule.setting} must leave samples to train on, got {limit:,}: {said}")
        place = {int(old): new for new, old in enumerate(stay)}
        videos = {place[old]: headers for old, headers in found.videos.items() if old in place}
        return replace(found, lengths=lengths.take(stay), said=f"{found.said}; {said}", videos=videos)
    images = found.image_tokens if found.image_tokens is not None else _image_tokens(lengths, model)
    left, said = np.where(over, np.maximum(limit, images), tokens), f"{over.mean():.1%} are cut at {at}"
    if (images > limit).any():
        said += f"; {(images > limit).mean():.1%} have more image tokens than that, which ends most runs: raise it"
    changed = {"llm_tokens": left}
    if lengths.target_tokens is not None:
        targets = lengths.target_tokens.astype(np.int64)
        kept = rule.targets(tokens - targets, targets, left)
        changed["target_tokens"] = np.where(over, np.clip(kept, 0, targets), targets)
    cut = SampleLengths(**{**lengths.columns(), **changed}, source_names=lengths.source_names)
    return replace(found, lengths=cut, said=f"{found.said}; {said}")


def _unit_tokens(model: Model) -> tuple[int, int]:
    """Vision units of each image token, and image tokens of each unit; one of both is 1."""
    projector = next(record.sizes for record in model.records if record.kind == "projector")
    return projector.get("units_per_token", 1), projector.get("image_tokens_per_tile", 1)


def _image_tokens(lengths: SampleLengths, model: Model) -> IntArray:
    """Tokens that stand for images, by the vision units; none of a model whose images bring no fixed number."""
    if model.config["model_type"] not in FIXED_TOKENS:
        return np.zeros(len(lengths), dtype=np.int64)
    group, per_tile = _unit_tokens(model)
    tokens: IntArray = lengths.vision_units.astype(np.int64) * per_tile // group
    return tokens


def _check_tokens(lengths: SampleLengths, model: Model) -> None:
    """Refuse lengths whose image tokens cannot be the model's."""
    if model.config["model_type"] not in FIXED_TOKENS:
        return
    (group, per_tile), least = _unit_tokens(model), _image_tokens(lengths, model)
    wrong = (lengths.llm_tokens < least) | (lengths.vision_units % group != 0)
    if wrong.any():
        first = int(np.argmax(wrong))
        rule = f"{group} patches for each image token" if group > 1 else f"{per_tile} LLM tokens for each tile"
        raise DataError(
            f"lengths must be of {model.name}, with {rule}, got sample {first} of "
            f"{lengths.vision_units[first]} {model.units} and {lengths.llm_tokens[first]} tokens "
            f"({int(wrong.sum())} such samples); they are of another model or tokenizer"
        )


def frames_that_fit(model: Model, measured: MeasuredLengths, limits: PackLimits) -> str:
    """In words, the ``max_frames`` with which samples of videos are within the limits; empty where they are."""
    lengths, videos, rule = measured.lengths, measured.videos, model.video_rule
    over = [sample for sample in limits.oversized(lengths).tolist() if sample in videos]
    if not over:
        return ""

    def fits(sample: int, frames: int) -> bool:
        units, tokens = int(lengths.vision_units[sample]), int(lengths.llm_tokens[sample])
        for header in videos[sample]:
            fewer, before = rule(max_frames=frames, min_frames=min(frames, 4))(header), rule()(header)
            units += fewer.vision_units - before.vision_units
            tokens += tokens_of(fewer, estimated_tokens) - tokens_of(before, estimated_tokens)
        return units <= limits.vision_units and tokens <= limits.llm_tokens

    told = f"videos: {len(over) / len(lengths):.1%} of the samples exceed these limits"
    found = next((frames for frames in FRAMES if all(fits(sample, frames) for sample in over)), None)
    return f"{told}; max_frames {found} would make them fit" if found else f"{told}, whatever max_frames is"
