"""Options that say how a dataset is read; `omnibal.cli.inputs` reads it."""

from pathlib import Path
from typing import Annotated, Literal

import typer

ImagesOption = Annotated[Path | None, typer.Option(help="The images' folder; that of the annotations.")]
MaxTilesOption = Annotated[int | None, typer.Option(help="Most tiles of an image; what the model says.", min=1)]
BrokenOption = Annotated[
    Literal["error", "skip"],
    typer.Option(help="Samples that cannot be read: refuse them all in one report, or leave them out."),
]
CacheOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder that keeps what was measured: the same data is not measured again, and an interrupted pass "
        "goes on where it was."
    ),
]
