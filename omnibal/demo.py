"""Data and a model to try everything on: questions about coloured shapes, written as users have their own."""

from omnibal.errors import ConfigError, require

require("tokenizers", "transformers")

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import InternVLConfig, InternVLVisionConfig, PreTrainedTokenizerFast, Qwen2Config

__all__ = ["DemoPaths", "majority_accuracy", "write_demo"]

# Pictures of coloured shapes, questions about them, each with the one answer it has, and datasets made of them.
COLOURS = {
    "red": (220, 40, 40), "green": (40, 170, 60), "blue": (40, 80, 220),
    "yellow": (235, 215, 40), "purple": (150, 50, 190), "orange": (245, 140, 30),
}  # fmt: skip
# A white rim shows a shape whatever its colour: without it, telling shapes takes several times as long to learn as
# telling colours.
RIM = (255, 255, 255)
SHAPES = ("ring", "box", "triangle", "cross")
PLACES = ("top left", "top right", "bottom left", "bottom right")

SHORTEST_SIDE, LONGEST_SIDE = 40, 208
MAX_ASPECT = 4.5


@dataclass(frozen=True)
class ColouredShape:
    colour: str
    shape: str
    place: str


@dataclass(frozen=True)
class Scene:
    """A picture: its size in pixels and one to four figures in different quarters, in reading order."""

    width: int
    height: int
    figures: tuple[ColouredShape, ...]


def random_scene(rng: np.random.Generator, num_figures: int) -> Scene:
    ratio = MAX_ASPECT ** (rng.random() ** 2)  # long over short side: squares are most frequent
    short = SHORTEST_SIDE * (LONGEST_SIDE / ratio / SHORTEST_SIDE) ** rng.random()
    width, height = (short * ratio, short) if rng.random() < 0.5 else (short, short * ratio)
    places = sorted(rng.choice(len(PLACES), size=num_figures, replace=False).tolist())
    figures = (
        ColouredShape(str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES)), PLACES[place]) for place in places
    )
    return Scene(round(width), round(height), tuple(figures))


def draw_scene(rng: np.random.Generator, scene: Scene) -> Image.Image:
    """Draw a scene on a dark background; shapes vary in size, lie off centre and stretch with the picture."""
    background = (int(rng.integers(0, 40)),) * 3
    image = Image.new("RGB", (scene.width, scene.height), background)
    canvas = ImageDraw.Draw(image)
    for figure in scene.figures:
        row, column = divmod(PLACES.index(figure.place), 2)
        x, y = (column + rng.uniform(0.48, 0.52)) * scene.width / 2, (row + rng.uniform(0.48, 0.52)) * scene.height / 2
        size = rng.uniform(0.40, 0.46) / 2
        for scale, fill in ((1.0, RIM), (0.82, COLOURS[figure.colour])):
            _fill(canvas, figure.shape, (x, y), (scale * size * scene.width, scale * size * scene.height), fill)
        if figure.shape == "ring":
            _fill(canvas, figure.shape, (x, y), (0.3 * size * scene.width, 0.3 * size * scene.height), background)
    return image


def _fill(
    canvas: ImageDraw.ImageDraw,
    shape: str,
    centre: tuple[float, float],
    reach: tuple[float, float],
    fill: tuple[int, ...],
) -> None:
    (x, y), (a, b) = centre, reach
    if shape == "ring":
        canvas.ellipse((x - a, y - b, x + a, y + b), fill=fill)
    elif shape == "box":
        canvas.rectangle((x - a, y - b, x + a, y + b), fill=fill)
    elif shape == "triangle":
        canvas.polygon([(x, y - b), (x + a, y + b), (x - a, y + b)], fill=fill)
    else:
        canvas.rectangle((x - a, y - b / 3, x + a, y + b / 3), fill=fill)
        canvas.rectangle((x - a / 3, y - b, x + a / 3, y + b), fill=fill)


NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")
NAMES = ("Anna", "Tom", "Mia", "Ben")
THINGS = ("ball", "bag", "hat", "cup")
SHORT = " Answer briefly."


class Exchange(NamedTuple):
    question: str
    answer: str


Ask = Callable[[np.random.Generator, Scene], Exchange | None]
"""Asks about a picture; None where it leaves the question without a clear answer."""


class DemoSample(NamedTuple):
    """Pictures and a conversation about them; ``kinds`` names what is asked, joined by ``+``."""

    kinds: str
    scenes: list[Scene]
    exchanges: list[Exchange]


class DemoDataset(NamedTuple):
    make: Callable[[np.random.Generator, int], DemoSample]  # makes a sample from a generator and the most turns
    share: float  # share of all samples, repetitions included
    repeat: int = 1


def _ask_about_one(known_by: str, asked: str, question: str, sentence: str) -> Ask:
    """Ask for one attribute of a figure that another one tells apart from all others; both are named in the texts."""

    def ask(rng: np.random.Generator, scene: Scene) -> Exchange | None:
        counts = Counter(getattr(figure, known_by) for figure in scene.figures)
        alone = [vars(figure) for figure in scene.figures if counts[getattr(figure, known_by)] == 1]
        if not alone:
            return None
        words = alone[rng.integers(len(alone))]
        return _short_or_long(rng, question.format(**words), words[asked], sentence.format(**words))

    return ask


def ask_count(rng: np.random.Generator, scene: Scene) -> Exchange:
    count = NUMBERS[len(scene.figures)]
    return _short_or_long(rng, "How many shapes are there?", count, f"The number of shapes is {count}.")


def ask_description(_: np.random.Generator, scene: Scene) -> Exchange:
    parts = [f"{_with_article(figure.colour)} {figure.shape} at the {figure.place}" for figure in scene.figures]
    return Exchange("Describe the image.", f"I see {' and '.join(parts)}.")


# Questions about one picture by kind.
ABOUT_ONE: Mapping[str, Ask] = {
    "colour": _ask_about_one("shape", "colour", "What colour is the {shape}?", "The {shape} is {colour}."),
    "shape": _ask_about_one("colour", "shape", "Which shape is {colour}?", "The {colour} shape is a {shape}."),
    "count": ask_count,
    "place": _ask_about_one("shape", "place", "Where is the {shape}?", "The {shape} is at the {place}."),
    "description": ask_description,
}


def vocabulary() -> list[str]:
    """Words that may be missing in a few random samples, each at the start of a text and within one, twice."""
    words = (*COLOURS, *SHAPES, *PLACES, *NUMBERS, *NAMES, *THINGS, "user", "assistant", "system")
    return [f"{word} {word}" for word in words] * 2


def _short_or_long(rng: np.random.Generator, question: str, word: str, sentence: str) -> Exchange:
    return Exchange(question + SHORT, word) if rng.random() < 0.5 else Exchange(question, sentence)


def _with_article(colour: str) -> str:
    return f"an {colour}" if colour[0] in "aeiou" else f"a {colour}"


def shapes(rng: np.random.Generator, max_turns: int) -> DemoSample:
    scene, turns = _scene(rng, (0.7, 0.2, 0.07, 0.03)), int(rng.integers(max_turns)) + 1
    asked = {kind: ABOUT_ONE[kind](rng, scene) for kind in rng.permutation(list(ABOUT_ONE)).tolist()}
    answered = {kind: exchange for kind, exchange in asked.items() if exchange is not None}
    kinds = list(answered)[:turns]
    return DemoSample("+".join(kinds), [scene], [answered[kind] for kind in kinds])


def scenes(rng: np.random.Generator, _: int) -> DemoSample:
    scene = _scene(rng, (0.0, 0.5, 0.3, 0.2))
    return DemoSample("description", [scene], [ask_description(rng, scene)])


def pairs(rng: np.random.Generator, _: int) -> DemoSample:
    """Two pictures with one shape each: the colour or the shape in one of them."""
    both = [random_scene(rng, 1), random_scene(rng, 1)]
    number = int(rng.integers(2))
    figure, ordinal = both[number].figures[0], ("first", "second")[number]
    colour = f"What colour is the shape in the {ordinal} image?{SHORT}", figure.colour
    shape = f"Which shape is in the {ordinal} image?{SHORT}", figure.shape
    return DemoSample("pair", both, [Exchange(*(colour if rng.random() < 0.5 else shape))])


def stories(rng: np.random.Generator, _: int) -> DemoSample:
    """No picture: one to three sentences tell the answer."""
    count = int(rng.integers(1, 4))
    names, things, colours = (rng.permutation(words)[:count] for words in (NAMES, THINGS, list(COLOURS)))
    story = " ".join(f"{n} has {_with_article(c)} {t}." for n, c, t in zip(names, colours, things, strict=True))
    asked = int(rng.integers(count))
    exchange = Exchange(f"{story} What colour is the {things[asked]}?{SHORT}", str(colours[asked]))
    return DemoSample("text", [], [exchange])


DATASETS: Mapping[str, DemoDataset] = {
    "shapes": DemoDataset(shapes, share=0.6),
    "scenes": DemoDataset(scenes, share=0.1, repeat=2),
    "pairs": DemoDataset(pairs, share=0.12),
    "stories": DemoDataset(stories, share=0.18),
}


def _scene(rng: np.random.Generator, chances: tuple[float, ...]) -> Scene:
    return random_scene(rng, int(rng.choice([1, 2, 3, 4], p=chances)))


# What is written: images, annotations, a model's folder.
MAX_TURNS = 4  # questions about one picture
Record = dict[str, Any]
TILE_SIZE, PATCH_SIZE = 56, 14
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>")
MAX_VOCABULARY = 1024
PREPROCESSOR = {
    "image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": True, "min_patches": 1, "max_patches": 4,
    "size": {"height": TILE_SIZE, "width": TILE_SIZE}, "image_mean": [0.1, 0.1, 0.1], "image_std": [0.3, 0.3, 0.3],
}  # fmt: skip

# ChatML as InternVL's own checkpoints write it: an image is its token and a line break.
CHAT_TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}
{%- for part in message['content'] -%}
{{- '<IMG_CONTEXT>\\n' if part['type'] == 'image' else part['text'] -}}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


@dataclass(frozen=True)
class DemoPaths:
    """Where `write_demo` wrote: two meta files, a model folder without weights, and the annotations they name."""

    meta: Path
    held_out_meta: Path
    model: Path
    train_annotations: tuple[Path, ...]
    held_out_annotations: tuple[Path, ...]


def write_demo(folder: str | Path, *, samples: int = 8000, held_out: int = 400, seed: int = 0) -> DemoPaths:
    """Write questions about coloured shapes and a small InternVL to learn them; equal seeds write equal bytes.

    ``samples`` are for training, repetitions included, to within rounding; ``held_out`` have one question each.
    """
    for name, count in (("samples", samples), ("held_out", held_out)):
        if count < 20:
            raise ConfigError(f"{name} must be at least 20, got {count}")
    folder = Path(folder)
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
            "root": str(images.relative_to(folder)),
            "annotation": str(annotation.relative_to(folder)),
            "repeat_time": repeat,
            "length": lines,
            "data_augment": False,
        }
    (folder / f"{part}.json").write_text(json.dumps(meta, indent=2) + "\n")
    return tuple(folder / entry["annotation"] for entry in meta.values())


def _record(name: str, images: Sequence[str], exchanges: Sequence[Exchange]) -> Record:
    marks = "<image>\n" * len(images)
    turns = [
        {"from": side, "value": (marks if (number, side) == (0, "human") else "") + value}
        for number, exchange in enumerate(exchanges)
        for side, value in zip(("human", "gpt"), exchange, strict=True)
    ]
    image = {} if not images else {"image": images[0] if len(images) == 1 else list(images)}
    return {"id": name, **image, "conversations": turns}


def _save(rng: np.random.Generator, scene: Scene, folder: Path, name: str) -> str:
    file = f"{name}.png" if rng.random() < 0.5 else f"{name}.jpg"
    draw_scene(rng, scene).save(folder / file, quality=92, compress_level=1)  # each format takes the one it knows
    return file


def write_model_folder(folder: Path, texts: Iterable[str]) -> None:
    """Write ``config.json``, ``preprocessor_config.json`` and a tokenizer whose merges are learned from the texts."""
    tokenizer = train_tokenizer(texts)
    tokenizer.save_pretrained(folder)
    small_config(tokenizer).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2) + "\n")


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer like Qwen2's, which knows any text, and the words of ``texts`` as single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrap: Any = PreTrainedTokenizerFast  # untyped in transformers
    return wrap(  # type: ignore[no-any-return]
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        extra_special_tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    )


def small_config(tokenizer: PreTrainedTokenizerFast) -> InternVLConfig:
    """A small InternVL, 0.8 million parameters, that learns the demo's questions in minutes on a CPU."""
    # Matrices so small need larger initial weights than the usual 0.02, with which nothing is learned for many hundred
    # steps; ViT blocks that begin close to the identity (layer scale 0.1) let the projector see the patches at once.
    vision = InternVLVisionConfig(
        hidden_size=96, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4, image_size=TILE_SIZE,
        patch_size=PATCH_SIZE, attention_bias=True, layer_scale_init_value=0.1, initializer_range=0.1,
    )  # fmt: skip
    text = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=6, max_position_embeddings=2048, initializer_range=0.06, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return InternVLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.get_vocab()["<IMG_CONTEXT>"],
        # pixel shuffle makes one token of two by two patches
        image_seq_length=(TILE_SIZE // PATCH_SIZE // 2) ** 2,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
        architectures=["InternVLForConditionalGeneration"],
    )


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
