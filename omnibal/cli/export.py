"""omnibal export: from a checkpoint to a Hugging Face model folder."""

import json
from pathlib import Path
from typing import Annotated

import typer


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="One checkpoint, or a folder of checkpoints (then its newest).", show_default=False)
    ],
    folder: Annotated[Path, typer.Argument(help="Where the model goes.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write a checkpoint as an ordinary Hugging Face folder.

    Config, weights, tokenizer and preprocessor: what AutoModelForImageTextToText.from_pretrained loads. Layers are
    read one at a time; no GPU and no second process is needed.

    Example: omnibal export runs/quickstart/checkpoints my-model
    """
    from omnibal.cli.outputs import check_new_folder
    from omnibal.engine.checkpoint import export as export_checkpoint
    from omnibal.engine.saved_files import latest_checkpoint

    check_new_folder("folder", folder)
    source = latest_checkpoint(checkpoint) if (checkpoint / "latest").is_file() else checkpoint
    export_checkpoint(source, folder)
    if as_json:
        typer.echo(json.dumps({"checkpoint": str(source), "model": str(folder)}))
    else:
        typer.echo(f"{source} → {folder}")
