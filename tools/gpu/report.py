"""Results of a GPU: rows that are on disk as soon as they are measured, and the report that is made of them.

python -m tools.gpu.report FOLDER makes FOLDER/REPORT.md anew from FOLDER/results.jsonl, also if a part was cut off.
"""

import json
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from tools.bench import head, line

Row = Mapping[str, Any]
RESULTS, REPORT, FAILED = "results.jsonl", "REPORT.md", "failed"
RATIOS = {"times random": "random", "times grouped": "group_by_length"}
"""Columns that the report adds to tables of batches: tokens a second over those of other batches."""


@dataclass
class Table:
    """The rows of one question.

    Attributes:
        part: The part of run.sh that measured it.
        title, explanation: The heading and the text below it.
        made: On which card, when, with which versions.
        rows: In the order in which they were measured.
        notes: What ended the table, and how long it took.
    """

    part: str
    title: str
    explanation: str
    made: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """The table as a chapter."""
        text = [f"## {self.title}", "", self.explanation, "", self.made, "", *_lines(with_ratios(self.rows))]
        return "\n".join([*text, *(f"\n{note}" for note in self.notes)])


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Rows with the columns of ``RATIOS``, wherever the batches that they are ratios to were measured."""
    rates = {row.get("batches"): row["tokens/s"] for row in reversed(rows) if "tokens/s" in row}
    known = {column: rates[batches] for column, batches in RATIOS.items() if batches in rates}
    return [
        row | {column: row["tokens/s"] / rate for column, rate in known.items()} if "tokens/s" in row else row
        for row in rows
    ]


def _lines(rows: Sequence[Row]) -> list[str]:
    # Lists are kept for later arithmetic, and are too long for a cell.
    names = list(dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list)))
    cells = [[_cell(row.get(name, "")) for name in names] for row in rows]
    return [head(names), *map(line, cells)] if rows else ["Nothing."]


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "/").split())


class Report:
    """Writes the rows of one part as they come, and the report of the whole folder behind each.

    Args:
        folder: Holds the results of all parts, those of earlier calls among them.
        part: The part's name.
        made: On which card, when, with which versions.
        seconds: The time of the whole part. Tables for which none is left say so.
    """

    def __init__(self, folder: Path, part: str, made: str, seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._part, self._made = folder, part, made
        self._end, self.failures = monotonic() + seconds, 0

    @property
    def seconds_left(self) -> float:
        """Seconds until the part must end."""
        return self._end - monotonic()

    def add(self, title: str, explanation: str, rows: Callable[[], Iterable[Row]]) -> None:
        """Take a table's rows one by one; an error is noted, and the next table begins."""
        began, found = monotonic(), iter(())
        print(f"== {title}", flush=True)
        self._write(title, explanation=explanation, made=self._made)
        if self.seconds_left <= 0:
            self._write(title, note="Left out: the time was up.")
            return
        try:
            found = iter(rows())
            for row in found:
                self.failures += FAILED in row
                self._write(title, row=row)
                print("  ", ", ".join(f"{name} {_cell(value)[:200]}" for name, value in row.items()), flush=True)
                if self.seconds_left <= 0:
                    self._write(title, note="Ended here: the time was up.")
                    break
        except Exception:  # the tables behind this one are worth having all the same
            self.failures += 1
            self._write(title, note=f"Ended here:\n\n```\n{traceback.format_exc(limit=-6)}```")
            traceback.print_exc()
        finally:
            getattr(found, "close", lambda: None)()  # a generator ends its processes
        self._write(title, note=f"Took {monotonic() - began:.0f} s.")

    def _write(self, title: str, **entry: Any) -> None:
        with (self._folder / RESULTS).open("a") as file:
            file.write(json.dumps({"part": self._part, "title": title, **entry}, default=str) + "\n")
        rebuild(self._folder)


def tables_of(folder: Path) -> list[Table]:
    """All tables of a folder; one that was measured again has its last rows."""
    found: dict[tuple[str, str], Table] = {}
    path = folder / RESULTS
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(text)
        except json.JSONDecodeError:  # a process was killed as it wrote
            continue
        key = entry["part"], entry["title"]
        if "explanation" in entry:
            found[key] = Table(*key, entry["explanation"], entry["made"])
        elif "row" in entry:
            found[key].rows.append(entry["row"])
        else:
            found[key].notes.append(entry["note"])
    return list(found.values())


def rebuild(folder: Path) -> None:
    """Write the report of all results that the folder has."""
    tables = tables_of(folder)
    chapters = []
    for part in dict.fromkeys(table.part for table in tables):
        chapters += [f"# {part}", *(table.markdown() for table in tables if table.part == part)]
    (folder / REPORT).write_text("\n\n".join(chapters) + "\n")


if __name__ == "__main__":
    rebuild(Path(sys.argv[1]))
