"""A report that is on disk after every row: what was measured stays when a later part fails or time runs out."""

import json
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from tools.bench import head, line

Row = Mapping[str, Any]


@dataclass
class Part:
    """A measurement: rows of a table, added one at a time."""

    title: str
    explanation: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """The part as a chapter."""
        lines = [f"## {self.title}", "", self.explanation, "", *_table(self.rows)]
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)])


def _table(rows: Sequence[Row]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name, "")) for name in names] for row in rows]
    return [head(names), *map(line, cells)] if rows else ["Nothing."]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Report:
    """All parts, written anew after each row.

    Args:
        folder: Where ``REPORT.md`` and ``report.json`` go.
        heading: What was measured where.
        seconds: What all parts together may take; a part begins, and goes on with its next row, only before that.
    """

    def __init__(self, folder: Path, heading: str, seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._heading = folder, heading
        self._end = monotonic() + seconds
        self.parts: list[Part] = []

    def add(self, title: str, explanation: str, rows: Callable[[], Iterable[Row]]) -> None:
        """Take a part's rows one by one; what goes wrong is written down, and the next part begins."""
        part = Part(title, explanation)
        self.parts.append(part)
        began = monotonic()
        print(f"== {title}", flush=True)
        try:
            for row in rows():
                part.rows.append(row)
                print("  ", ", ".join(f"{name} {_cell(value)}" for name, value in row.items()), flush=True)
                self.write()
                if monotonic() > self._end:
                    part.notes.append("Ended here: the time was up.")
                    break
        except Exception:  # any failure: the parts behind this one are worth having all the same
            part.notes.append(f"Ended here:\n\n```\n{traceback.format_exc(limit=-6)}```")
            print(traceback.format_exc(), flush=True)
        part.notes.append(f"Took {monotonic() - began:.0f} s.")
        self.write()

    @property
    def failed(self) -> bool:
        """Whether a part ended with an error."""
        return any("```" in note for part in self.parts for note in part.notes)

    def write(self) -> None:
        """Put on disk what there is."""
        chapters = [self._heading, *(part.markdown() for part in self.parts)]
        (self._folder / "REPORT.md").write_text("\n\n".join(chapters) + "\n")
        content = [{"title": part.title, "rows": part.rows, "notes": part.notes} for part in self.parts]
        (self._folder / "report.json").write_text(json.dumps(content, indent=1, default=str) + "\n")
