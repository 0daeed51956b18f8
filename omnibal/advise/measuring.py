"""Lengths of somebody's data under a model, and in words where they come from."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from omnibal.advise.models import Model
from omnibal.advise.present import Present
from omnibal.advise.reading import NamedModel
from omnibal.data.lengths import SampleLengths
from omnibal.data.mixture import Mixture
from omnibal.errors import DataError
from omnibal.families.base import ImageLoad, ImageRule, Size
from omnibal.formats.drawn import (
    ESTIMATE_ERROR,
    Drawn,
    DrawnLengths,
    Opened,
    draw_lengths,
    estimated_tokens,
    measure_items,
)
from omnibal.formats.head import STANDARD_INPUT, is_stream, stream_items

FIXED_TOKENS: Final = ("internvl", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Families whose vision units bring so many tokens each."""
HEAD_BYTES: Final = 1 << 12
HEAD: Final = 1000
"""Items of a stream that are measured."""
DRIFT: Final = 4
"""Standard errors by which the halves of a stream's head may differ."""
Loads = tuple[int, int, int]


@dataclass(frozen=True)
class Measured:
    """Lengths of the data or of a part of it.

    Attributes:
        lengths: Of the samples.
        said: In words where they come from.
        is_whole: Whether they are of all samples, counted before.
        is_stream: Whether they are of the head of a stream, whose samples are never measured all.
    """

    lengths: SampleLengths
    said: str
    is_whole: bool = False
    is_stream: bool = False


def measure(
    data: Sequence[Path],
    named: NamedModel,
    present: Present,
    *,
    images: Path | None = None,
    max_image: int | None = None,
) -> Measured:
    """Measure data as a model takes it and the present way keeps it.

    Args:
        data: Annotations (one file or folder), lengths (a folder, or JSON lists of ``{"vit_num", "token_num"}``), or a
            stream: webdataset shards, or ``-`` for JSON lines on standard input.
        named: The model.
        present: Its mixture, its cutoff and its largest image count.
        images: What the paths of images are relative to; by default the folder of the annotations.
        max_image: Most tiles of an image, or most pixels at native resolution.

    Raises:
        DataError: There is no data, its lengths cannot be told, or they are of another model.
    """
    streams = [is_stream(path) for path in data]
    for path in data:
        if path != STANDARD_INPUT and not path.exists():
            raise DataError(f"data must be a file or a folder, got {path}, which does not exist")
    if all(streams):
        found = _of_head(stream_items(data, images), data, named, _rule(named, present, max_image))
    elif any(streams):
        raise DataError(f"data must be shards alone where there are some, got {data[streams.index(False)]} beside them")
    elif all(_holds_lengths(path) for path in data):
        found = _measured_before(data, named.model)
    elif len(data) > 1:
        raise DataError(f"data must be lengths where there are several files, got {data[1]}; name a meta file of all")
    else:
        found = _drawn(data[0], named, _rule(named, present, max_image), images, of_each=present.mixture is not None)
    if present.mixture is not None:
        found = _mixed(found, present.mixture)
    if named.model.config["model_type"].startswith("qwen"):
        found = _with_squares(found)
    return found if present.cutoff is None or present.batching == "packed" else _cut(found, present.cutoff)


def _mixed(found: Measured, mixture: Mixture) -> Measured:
    from omnibal.data.source_draws import typical_lengths  # compiled, which no other advice needs

    lengths = typical_lengths(found.lengths, mixture)
    return replace(found, lengths=lengths, said=f"{found.said}; drawn with the mixture's first shares")


def _with_squares(found: Measured) -> Measured:
    """With what attention within images takes, where nobody counted it."""
    lengths = found.lengths
    if lengths.vision_squared is not None or not lengths.vision_units.any():
        return found
    squared = lengths.vision_units.astype(np.int64) ** 2
    alone = SampleLengths(**{**lengths.columns(), "vision_squared": squared})
    return replace(found, lengths=alone, said=f"{found.said}; each taken to have one image")


def _holds_lengths(data: Path) -> bool:
    if data.is_dir():
        return (data / "lengths.json").is_file()
    with data.open("rb") as file:
        return b'"vit_num"' in file.read(HEAD_BYTES)


def holds_conversations(data: Path) -> bool:
    """Whether all commands read it: InternVL's meta file, or conversations as InternVL and LLaVA have them."""
    if not data.is_file():
        return False
    with data.open("rb") as file:
        head = file.read(HEAD_BYTES)
    return b'"conversations"' in head or b'"annotation"' in head


def _measured_before(data: Sequence[Path], model: Model) -> Measured:
    folder = next((path for path in data if path.is_dir()), None)
    if folder is not None and len(data) > 1:
        raise DataError(f"data must be one folder of lengths or lists of them, got the folder {folder} among others")
    lengths = SampleLengths.from_token_lengths(data) if folder is None else SampleLengths.load(folder)
    if not len(lengths):
        raise DataError(f"lengths must hold at least one sample, got none in {', '.join(map(str, data))}")
    _check_tokens(lengths, model)
    return Measured(lengths, f"{len(lengths):,} samples of measured lengths", is_whole=True)


def _drawn(data: Path, named: NamedModel, rule: ImageRule, images: Path | None, *, of_each: bool) -> Measured:
    counter = _tokenizer(named.folder)
    drawn = draw_lengths(
        data, rule, of_each_source=of_each, image_folder=images, count_tokens=counter or estimated_tokens
    )
    return _told(drawn, f"{len(drawn.lengths):,} of {drawn.num_samples:,} samples measured", counter is None)


def _of_head(items: Iterable[Drawn], data: Sequence[Path], named: NamedModel, rule: ImageRule) -> Measured:
    counter = _tokenizer(named.folder)
    drawn = measure_items(Opened(islice(items, HEAD)), rule, counter or estimated_tokens, ", ".join(map(str, data)))
    drift = _drift(drawn.lengths, named.model.units)
    text = f"the first {len(drawn.lengths):,} samples of a stream measured{drift}"
    return replace(_told(drawn, text, counter is None), is_stream=True)


def measured_head(items: Iterable[Any], loads: Callable[[Any], Loads]) -> Measured:
    """Measure the first thousand items of a stream, for a ``Question``.

    Args:
        items: As a rank would draw them.
        loads: Vision units, LLM tokens and target tokens of an item.

    Raises:
        DataError: It yields nothing.
    """
    found = np.array([loads(item) for item in islice(items, HEAD)], dtype=np.int64).reshape(-1, 3).T
    if not found.size:
        raise DataError("a stream must yield items to measure, got none")
    lengths = SampleLengths(found[0], found[1], target_tokens=found[2])
    said = f"the first {len(lengths):,} samples of a stream measured{_drift(lengths)}"
    return Measured(lengths, said, is_stream=True)


def _drift(lengths: SampleLengths, units: str = "vision units") -> str:
    """Whether a stream's head changes on the way, so that it cannot stand for what follows."""
    half = len(lengths) // 2
    for name, load in ((units, lengths.vision_units), ("tokens", lengths.llm_tokens)):
        first, second = load[:half], load[half:]
        if half and abs(first.mean() - second.mean()) > DRIFT * np.hypot(first.std(), second.std()) / half**0.5:
            means = f"{first.mean():,.1f} and {second.mean():,.1f} {name} a sample"
            return f", whose halves differ by more than chance ({means}): shuffle it, or what follows may differ, too"
    return ""


def _told(drawn: DrawnLengths, text: str, is_estimated: bool) -> Measured:
    if is_estimated:
        share = ESTIMATE_ERROR * drawn.text_tokens / max(float(drawn.lengths.llm_tokens.mean()), 1)
        text += f"; tokens of text estimated (±{ESTIMATE_ERROR:.0%}, ±{share:.0%} of all), for want of a tokenizer"
    if drawn.problems:
        text += f"; {len(drawn.problems)} could not be read, the first: {drawn.problems[0]}"
    return Measured(drawn.lengths, text)


def _tokenizer(folder: Path | None) -> Callable[[str], int] | None:
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


def _rule(named: NamedModel, present: Present, max_image: int | None) -> ImageRule:
    """What images bring; hosts make those of too many pixels smaller before the image processor gets them."""
    rule, most = named.model.image_rule(**named.image_options(max_image)), present.max_pixels
    if most is None or max_image is not None:
        return rule

    def smaller(size: Size) -> Size:
        factor = min((most / (size[0] * size[1])) ** 0.5, 1.0)
        return max(int(size[0] * factor), 1), max(int(size[1] * factor), 1)

    def of_smaller(sizes: Sequence[Size]) -> tuple[ImageLoad, ...]:
        return rule([smaller(size) for size in sizes])

    return of_smaller


def _cut(found: Measured, cutoff: int) -> Measured:
    over = found.lengths.llm_tokens > cutoff
    if not over.any():
        return found
    changed = {"llm_tokens": np.minimum(found.lengths.llm_tokens, cutoff)}
    if found.lengths.target_tokens is not None:  # the answers, which stand behind the rest, are cut first
        beyond = found.lengths.llm_tokens - changed["llm_tokens"]
        changed["target_tokens"] = np.maximum(found.lengths.target_tokens - beyond, 0)
    lengths = SampleLengths(**{**found.lengths.columns(), **changed})
    return replace(found, lengths=lengths, said=f"{found.said}; {over.mean():.1%} are cut at {cutoff:,} tokens")


def _check_tokens(lengths: SampleLengths, model: Model) -> None:
    """Refuse lengths whose image tokens cannot be the model's.

    Raises:
        DataError: A sample has fewer tokens than its images bring, or no whole number of them.
    """
    if model.config["model_type"] not in FIXED_TOKENS:
        return
    projector = next(record.sizes for record in model.records if record.kind == "projector")
    group, per_tile = projector.get("units_per_token", 1), projector.get("image_tokens_per_tile", 1)
    least = lengths.vision_units.astype(np.int64) * per_tile // group
    wrong = (lengths.llm_tokens < least) | (lengths.vision_units % group != 0)
    if wrong.any():
        first = int(np.argmax(wrong))
        rule = f"{group} patches for each image token" if group > 1 else f"{per_tile} LLM tokens for each tile"
        raise DataError(
            f"lengths must be of {model.name}, with {rule}, got sample {first} of "
            f"{lengths.vision_units[first]} {model.units} and {lengths.llm_tokens[first]} tokens "
            f"({int(wrong.sum())} such samples); they are of another model or tokenizer"
        )
