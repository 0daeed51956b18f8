"""Samples that cannot be used: where each stands and why, in one report."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from omnibal.errors import DataError

Broken = Literal["error", "skip"]
SHOWN = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problem:
    """One unusable item: the annotation file, its line or entry (from 1), and the reason."""

    file: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


def settle_problems(problems: Sequence[Problem], num_items: int, broken: Broken) -> None:
    """Refuses unusable items, or warns that they are left out.

    Raises:
        DataError: If ``broken`` is ``"error"`` and there are problems; lists the first few and says how many.
    """
    if not problems:
        return
    listed = "\n  ".join(str(problem) for problem in problems[:SHOWN])
    hidden = f"\n  … and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    summary = f"{len(problems)} of {num_items} items cannot be used:\n  {listed}{hidden}"
    if broken == "error":
        raise DataError(f'{summary}\nCorrect them, or leave them out: broken="skip", `omnibal lengths --broken skip`.')
    if len(problems) == num_items:
        raise DataError(f"items must hold at least one usable, got none; {summary}")
    logger.warning("Left out: %s", summary)
