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
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import InternVLConfig, InternVLVisionConfig, PreTrainedTokenizerFast, Qwen2Config

from omnibal.demo.questions import DATASETS, Exchange, Scene, draw_scene, vocabulary

__all__ = ["DemoPaths", "majority_accuracy", "write_demo"]

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
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        extra_special_tokens={
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    )  # fmt: skip


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
