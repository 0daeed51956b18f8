"""Data and a model to try everything on: questions about coloured shapes, written as users have their own."""

from omnibal.errors import ConfigError, require

require("tokenizers", "transformers")

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from omnibal.demo.model import write_model_folder
from omnibal.demo.questions import DATASETS, Exchange, Scene, draw_scene, vocabulary

__all__ = ["DemoPaths", "majority_accuracy", "write_demo"]

MAX_TURNS = 4  # questions about one picture
Record = dict[str, Any]


@dataclass(frozen=True)
class DemoPaths:
    """Where `write_demo` wrote: two meta files, a model folder without weights, and the annotations they name."""

    meta: Path
    held_out_meta: Path
    model: Path
    train_annotations: tuple[Path, ...]
    held_out_annotations: tuple[Path, ...]


def write_demo(folder: str | Path, *, samples: int = 8000, held_out: int = 400, seed: int = 0) -> DemoPaths:
    """Write questions about coloured shapes and a small InternVL to learn them.

    Args:
        folder: Made where missing; files of the same names are replaced.
        samples: Training samples, repetitions included, to within rounding; at least 20.
        held_out: Samples to measure accuracy on, one question each; at least 20.
        seed: Seed of all random choices; equal seeds write equal bytes.
    """
    for name, count in (("samples", samples), ("held_out", held_out)):
        if count < 20:
            raise ConfigError(f"{name} must be at least 20, got {count}")
    if seed < 0:
        raise ConfigError(f"seed must not be negative, got {seed}")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"folder must be a folder or not exist yet, got the file {folder}")
    train = _write_part(folder, "train", samples, seed, max_turns=MAX_TURNS)
    check = _write_part(folder, "held_out", held_out, seed, max_turns=1)
    texts = [turn["value"] for path in train for line in path.open() for turn in json.loads(line)["conversations"]]
    write_model_folder(folder / "model", [*texts, *vocabulary()])
    return DemoPaths(folder / "train.json", folder / "held_out.json", folder / "model", train, check)


def _write_part(folder: Path, part: str, samples: int, seed: int, *, max_turns: int) -> tuple[Path, ...]:
    """Write ``<part>.json`` with its annotations and images; the paths of the annotations."""
    (folder / part).mkdir(parents=True, exist_ok=True)
    meta: dict[str, Record] = {}
    for number, (name, (make, share, repeat)) in enumerate(DATASETS.items()):
        rng = np.random.default_rng([seed, number, *part.encode()])
        images, annotation = folder / "images" / part / name, folder / part / f"{name}.jsonl"
        images.mkdir(parents=True, exist_ok=True)
        lines = round(samples * share / repeat)
        with annotation.open("w") as file:
            for index in range(lines):
                sample = make(rng, max_turns)
                files = [_save(rng, scene, images, f"{index:06}-{side}") for side, scene in enumerate(sample.scenes)]
                file.write(json.dumps(_record(f"{sample.kinds}-{index}", files, sample.exchanges)) + "\n")
        meta[name] = {
            "root": str(images.relative_to(folder)), "annotation": str(annotation.relative_to(folder)),
            "repeat_time": repeat, "length": lines, "data_augment": False,
        }  # fmt: skip
    (folder / f"{part}.json").write_text(json.dumps(meta, indent=2) + "\n")
    return tuple(folder / entry["annotation"] for entry in meta.values())


def _record(name: str, images: Sequence[str], exchanges: Sequence[Exchange]) -> Record:
    """A line in InternVL's format; images stand before the first question."""
    marks = "<image>\n" * len(images)
    turns = [
        {"from": side, "value": (marks if (number, side) == (0, "human") else "") + value}
        for number, exchange in enumerate(exchanges)
        for side, value in zip(("human", "gpt"), exchange, strict=True)
    ]
    image = {} if not images else {"image": images[0] if len(images) == 1 else list(images)}
    return {"id": name, **image, "conversations": turns}


def _save(rng: np.random.Generator, scene: Scene, folder: Path, name: str) -> str:
    """Draw a picture and save it as PNG or JPEG; the name of the file."""
    file = f"{name}.png" if rng.random() < 0.5 else f"{name}.jpg"
    draw_scene(rng, scene).save(folder / file, quality=92, compress_level=1)  # each format takes the one it knows
    return file


def majority_accuracy(train: Iterable[Path], held_out: Iterable[Path]) -> float:
    """Share of right answers of a model without eyes: the most frequent answer to each question in training.

    A question never asked in training gets the most frequent answer of all; of equally frequent answers the one that
    comes first in training is given. Both arguments are JSONL files of conversations.
    """
    answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for question, answer in _exchanges(train):
        answers[question][answer] += 1
    most_frequent = {question: counts.most_common(1)[0][0] for question, counts in answers.items()}
    fallback = sum(answers.values(), Counter()).most_common(1)[0][0]
    hits = [most_frequent.get(question, fallback) == answer for question, answer in _exchanges(held_out)]
    return sum(hits) / len(hits)


def _exchanges(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for file in files:
        with file.open() as lines:
            for line in lines:
                turns = [turn for turn in json.loads(line)["conversations"] if turn["from"] != "system"]
                yield from ((q["value"], a["value"]) for q, a in zip(turns[::2], turns[1::2], strict=True))
