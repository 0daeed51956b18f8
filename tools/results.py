"""Every table of every report as one JSON list: python -m tools.results > results.json.

An entry has the ``report``, the ``section``, ``made`` (what the report and then the section say of when, where and with
what: headings and paragraphs that have a date), ``columns`` and ``rows``. Cells that are a number are one; others stay
text.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
SAMPLING = [ROOT / f"tools/sampling/{name}.md" for name in ("VISION", "MIXTURES", "STREAMS", "PLANNER")]
REPORTS = sorted([*ROOT.glob("tools/*/RESULTS.md"), *SAMPLING, ROOT / "docs/leaks.md"])
NUMBER = re.compile(r"[+−-]?\d[\d,]*(\.\d+)?(e[+-]\d+)?")
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")


def as_json() -> str:
    """The tables of all reports, each on a line."""
    tables = (json.dumps(table, ensure_ascii=False) for report in REPORTS for table in tables_of(report))
    return "[\n" + ",\n".join(tables) + "\n]"


def tables_of(report: Path) -> Iterator[dict[str, Any]]:
    """The tables of a report, in its order."""
    headings: dict[int, str] = {}
    dated: dict[int, list[str]] = {}
    rows: list[list[float | str]] = []
    holder = ""
    for token in MarkdownIt("commonmark").enable("table").parse(report.read_text()):
        if token.type in ("heading_open", "paragraph_open", "tr_open"):
            holder = token.type
        if token.type == "heading_open":
            level = int(token.tag[1:])
            headings = {at: text for at, text in headings.items() if at < level} | {level: ""}
            dated = {at: texts for at, texts in dated.items() if at < level} | {level: []}
        elif token.type == "tr_open":
            rows.append([])
        elif token.type == "inline" and holder == "tr_open":
            rows[-1].append(cell(token.content))
        elif token.type == "inline":
            text = " ".join(token.content.split())
            if holder == "heading_open":
                headings[level] = text
            if DATE.search(text):
                dated[level].append(text)
        elif token.type == "table_close":
            columns, *rest = rows
            where = {"report": str(report.relative_to(ROOT)), "section": " / ".join(headings.values())}
            yield where | {"made": [text for of in dated.values() for text in of], "columns": columns, "rows": rest}
            rows = []


def cell(text: str) -> float | str:
    """A number as one, without the signs that thousands and bold figures have.

    >>> cell("**1,775**"), cell("−0.5"), cell("+2.7 %")
    (1775.0, -0.5, '+2.7 %')
    """
    plain = text.strip("* ")
    return float(plain.replace(",", "").replace("−", "-")) if NUMBER.fullmatch(plain) else plain


if __name__ == "__main__":
    print(as_json())
