"""Options that several verbs have."""

import shlex
from pathlib import Path
from typing import Annotated, Final

import typer

from omnibal.errors import ConfigError

MOST_DIGITS: Final = 20

ClusterOption = Annotated[
    str | None,
    typer.Option(
        help="The machines, such as 4x8xA100-80GB, or a JSON record; by default what the ds_config or the plan says, "
        "or the CUDA devices at hand.",
        show_default=False,
    ),
]
LengthsOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="A folder of lengths, or JSON lists of them (repeatable), in place of the ds_config's data.",
        show_default=False,
    ),
]
ProfileOption = Annotated[
    Path | None, typer.Option(help="A profile, in place of what is kept or counted.", show_default=False)
]
LimitsOption = Annotated[
    str | None,
    typer.Option(help="Most vision units and LLM tokens in a pack, such as 16,4096.", show_default=False),
]
PresentOption = Annotated[
    bool, typer.Option("--present", help="What the ds_config spells out, and not the plan made for it.")
]
StagesOption = Annotated[int | None, typer.Option(help="Pipeline stages.", min=1, show_default=False)]
PictureOption = Annotated[Path | None, typer.Option(help="Draw a picture, a PNG.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


def read_limits(text: str | None) -> tuple[int, int] | None:
    """Vision units and LLM tokens.

    Raises:
        ConfigError: The text is not two numbers.

    >>> read_limits("16,4096")
    (16, 4096)
    """
    if text is None:
        return None
    words = text.replace(",", " ").split()
    if len(words) != 2 or not all(word.isdecimal() and len(word) < MOST_DIGITS for word in words):
        raise ConfigError(f"--limits must be vision units and LLM tokens such as 16,4096, got {text!r}")
    return int(words[0]), int(words[1])


def _check_quotes(options: str | None) -> str | None:
    try:
        shlex.split(options or "")
    except ValueError as error:
        raise typer.BadParameter(f"must be options as on a command line, got {options!r}: {error}") from error
    return options


LauncherOption = Annotated[
    str | None,
    typer.Option(
        help="Options of the deepspeed launcher for trials; by default a process here for each device.",
        callback=_check_quotes,
        show_default=False,
    ),
]
