"""omnibal demo: data and a small model to try everything with."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from omnibal.cli.options import JsonOption
from omnibal.cli.output import answer


def demo(
    folder: Annotated[Path, typer.Argument(help="Where everything goes.")],
    samples: Annotated[int, typer.Option(help="Training samples.", min=20)] = 4000,
    held_out: Annotated[int, typer.Option(help="Samples to measure accuracy on.", min=20)] = 300,
    as_json: JsonOption = False,
) -> None:
    """Write pictures of coloured shapes, questions about them, and a small InternVL to learn them.

    The data has the form of real InternVL data: image files, JSONL conversations, and a meta file that names them.
    The model is a configuration, a tokenizer and a preprocessor; its weights are yours to train.

    Example: omnibal demo runs/quickstart/data
    """
    from omnibal.cli.files import check_new_folder
    from omnibal.demo import majority_accuracy, write_demo

    check_new_folder("folder", folder)
    paths = write_demo(folder, samples=samples, held_out=held_out)
    chance = majority_accuracy(paths.train_annotations, paths.held_out_annotations)
    answer(
        {**asdict(paths), "chance": chance},
        f"data {paths.meta}, held out {paths.held_out_meta}, model {paths.model}",
        f"always the most frequent answer to a question is right for {chance:.1%} of the held-out ones",
        as_json=as_json,
    )
