"""omnibal export: from a checkpoint to a Hugging Face model folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from omnibal.cli.files import check_new_folder, expect
from omnibal.cli.options import JsonOption
from omnibal.cli.output import answer
from omnibal.errors import ConfigError

if TYPE_CHECKING:
    from omnibal.config import RunFiles


def export(
    source: Annotated[
        Path, typer.Argument(help="A ds_config or a folder of checkpoints, for the newest one; or one checkpoint.")
    ],
    folder: Annotated[
        Path | None, typer.Argument(help="Where the model goes; by default in the ds_config's run.output.")
    ] = None,
    merged: Annotated[
        bool,
        typer.Option("--merged", help="Add LoRA adapters to the weights of their model, and write the whole of it."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint as an ordinary Hugging Face folder.

    Config, weights, tokenizer and preprocessor: what AutoModelForImageTextToText.from_pretrained loads. Of LoRA
    adapters, what PeftModel.from_pretrained loads onto the original model. Layers are read one at a time; no GPU and
    no second process is needed.

    Example: omnibal export ds_configs/mine.json my-model

    Example: omnibal export runs/quickstart/checkpoints/global_step300 model
    """
    from omnibal.engine.checkpoint import export as export_checkpoint
    from omnibal.engine.saved_files import latest_checkpoint

    kind = expect("source", source, ("ds_config", "checkpoints", "checkpoint", "run"))
    if folder is not None:
        check_new_folder("folder", folder)
    elif merged or kind != "ds_config":
        reason = "--merged writes the whole model" if merged else f"{source} is no ds_config"
        raise ConfigError(f"folder must say where the model goes, got none: {reason}")
    if kind == "ds_config":
        files = files_of(source)
        checkpoint = latest_checkpoint(files.checkpoints)
        if folder is None:
            folder = newest_model(files)
        else:
            export_checkpoint(checkpoint, folder, merged=merged)
    else:
        found = {"checkpoints": source, "run": source / "checkpoints"}.get(kind)
        checkpoint = source if found is None else latest_checkpoint(found)
        assert folder is not None
        export_checkpoint(checkpoint, folder, merged=merged)
    answer({"checkpoint": checkpoint, "model": folder}, f"{checkpoint} → {folder}", as_json=as_json)


def files_of(source: Path) -> "RunFiles":
    """Where the run of a ds_config keeps things."""
    from omnibal.config import read_config

    return read_config(source)[1].run.files


def newest_model(files: "RunFiles") -> Path:
    """A run's newest checkpoint as a Hugging Face folder: exported before, or now.

    Raises:
        ConfigError: There is no checkpoint, or it is not whole.
    """
    from omnibal.engine.checkpoint import export_newest

    with Console(stderr=True).status("exporting the newest checkpoint"):
        return export_newest(files)
