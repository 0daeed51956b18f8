"""Options that say what the packs of a step hold."""

from pathlib import Path
from typing import Annotated, Final

import typer

VISION_UNITS: Final = 9
LLM_TOKENS: Final = 4096
"""What a pack holds where nothing is said: the OmniBal paper's limits for InternVL."""

LengthsOption = Annotated[
    list[Path] | None,
    typer.Option(help="Real packs: a folder of `omnibal lengths` or JSON lists of lengths; repeatable."),
]
VisionUnitsOption = Annotated[
    int | None,
    typer.Option(
        help=f"Vision units in every pack ({VISION_UNITS}); with --lengths the most in a pack (the paper's rule).",
        min=0,
    ),
]
LlmTokensOption = Annotated[
    int | None, typer.Option(help=f"LLM tokens, alike ({LLM_TOKENS} in every pack, as one sample).", min=1)
]
ReplicasOption = Annotated[int, typer.Option(help="Data-parallel ranks.", min=1)]
MicroBatchesOption = Annotated[int | None, typer.Option(help="Packs per replica and step; 4 per stage.", min=1)]
StepOption = Annotated[
    int | None, typer.Option(help="Which step of an epoch of --lengths; the median one of those planned first.", min=0)
]
