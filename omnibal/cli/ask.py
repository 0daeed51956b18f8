"""omnibal ask: what a trained model says about images."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from omnibal.cli.export import files_of, newest_model
from omnibal.cli.files import expect
from omnibal.errors import ConfigError
from omnibal.report.style import make_table


def ask(
    source: Annotated[Path, typer.Argument(help="A ds_config, for its newest checkpoint; or a Hugging Face folder.")],
    question: Annotated[str, typer.Argument(help="What to ask.")] = "",
    image: Annotated[list[Path] | None, typer.Option(help="An image of the question; repeatable.")] = None,
    meta: Annotated[
        Path | None,
        typer.Option(
            help="Data to take questions, images and right answers from; by default, where no question is given, the "
            "ds_config's held-out data."
        ),
    ] = None,
    count: Annotated[int, typer.Option(help="How many questions to take from data.", min=1)] = 5,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, …")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per answer.")] = False,
) -> None:
    """Ask a model about images, or about data it has not seen.

    The model is loaded by transformers alone, as anybody else would load it.

    Example: omnibal ask ds_configs/quickstart.json --count 6

    Example: omnibal ask my-model "What colour is the ring?" --image photo.png
    """
    kind = expect("source", source, ("ds_config", "model"))
    if kind == "ds_config" and not question and meta is None:
        meta = _held_out(source)
    if bool(question) == (meta is not None):
        raise ConfigError("ask must get a question or --meta, got both or neither")
    from omnibal.formats.images import named
    from omnibal.vlm.answer import Answerer

    model = newest_model(files_of(source)) if kind == "ds_config" else source
    asked = [(question, tuple(image or ()), None)] if meta is None else list(_questions(meta, count))
    answerer = Answerer(model, device=device)
    answers = [(*entry, answerer.answer(entry[0], entry[1])) for entry in asked]
    if as_json:
        for text, images, right, answer in answers:
            typer.echo(
                json.dumps({"question": text, "images": [*map(named, images)], "right": right, "answer": answer})
            )
        return
    rows = (
        (
            text.replace("<image>", "").strip(),
            " ".join(Path(named(image)).name for image in images),
            answer,
            right or "",
        )
        for text, images, right, answer in answers
    )
    table = make_table(("question", "images", "answer", "right answer"), rows, words=4)
    Console(markup=False).print(f"{model} answers", table)  # an answer may hold [/INST]


def _held_out(source: Path) -> Path | None:
    from omnibal.config import read_config

    named = read_config(source)[1].data.held_out
    return None if named is None else Path(named)


def _questions(meta: Path, count: int) -> Iterator[tuple[str, tuple[Path | bytes, ...], str]]:
    """The first exchange of ``count`` samples, spread evenly over the data."""
    from omnibal.formats.shards import open_shards

    shards = open_shards(meta)
    entries = [(shard, item) for shard in shards for item in range(len(shard.rows))]
    for number in range(min(count, len(entries))):
        shard, item = entries[number * len(entries) // min(count, len(entries))]
        conversation = shard.conversation(item)
        turns = [turn for turn in conversation.turns if turn.role != "system"]
        marks = turns[0].text.count("<image>")
        yield turns[0].text, conversation.images[:marks], turns[1].text
