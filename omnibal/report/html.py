"""The parts of a self-contained HTML page: sections, tables, and pictures inline."""

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

from omnibal.report.style import DOTS_PER_INCH

_PNG_WIDTH: Final = slice(16, 20)
_CSS_DOTS_PER_INCH: Final = 96
STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2433; max-width: 62rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.7rem; margin-bottom: 0; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 0.4rem; border-top: 1px solid #d9dde5; padding-top: 1.2rem; }
p.lead { color: #5f6368; margin-top: 0.2rem; }
div.scroll { overflow-x: auto; margin: 0.8rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.8rem; text-align: right; border-bottom: 1px solid #eceff4; }
th { font-weight: 600; color: #5f6368; vertical-align: bottom; }
pre { margin: 0; font-size: 0.9rem; }
th:first-child, td:first-child { text-align: left; }
td { white-space: nowrap; }
tr.mark td { font-weight: 700; }
figure { margin: 1rem 0; }
figure div.scroll { margin: 0; }
figure img { display: block; height: auto; max-width: 100%; min-width: min(40rem, var(--drawn)); }
figcaption { color: #5f6368; font-size: 0.9rem; }
"""


def page(title: str, lead: str, sections: Sequence[str]) -> str:
    """The whole document; nothing in it points elsewhere."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n' + "\n".join(sections) + "\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A heading and what stands under it."""
    return "\n".join([f"<section>\n<h2>{escape(title)}</h2>", *parts, "</section>"])


def paragraph(text: str) -> str:
    """Plain text; what stands between backticks is code."""
    content = re.sub("`(.*?)`", r"<code>\1</code>", escape(text))
    return f"<p>{content}</p>"


def code(lines: Sequence[str]) -> str:
    """Lines as they are, to be pasted."""
    text = escape("\n".join(lines))
    return _scrolled(f"<pre>{text}</pre>")


def table(names: Sequence[str], rows: Sequence[Sequence[str]], *, marked: int | None = None) -> str:
    """A table, one of its rows marked."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = []
    for number, row in enumerate(rows):
        mark = ' class="mark"' if number == marked else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    rows_of = "\n".join(lines)
    return _scrolled(f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows_of}\n</tbody>\n</table>")


def picture(path: Path, caption: str) -> str:
    """A PNG within the page, as large as it was drawn: its text is as large as that of all others.

    Where the page is narrower it shrinks, but only as far as its text can be read, and scrolls then.
    """
    content = path.read_bytes()
    width = int.from_bytes(content[_PNG_WIDTH]) * _CSS_DOTS_PER_INCH // DOTS_PER_INCH
    text, source = escape(caption), f"data:image/png;base64,{base64.b64encode(content).decode()}"
    shown = _scrolled(f'<img alt="{text}" width="{width}" style="--drawn: {width}px" src="{source}">')
    return f"<figure>{shown}<figcaption>{text}</figcaption></figure>"


def _scrolled(content: str) -> str:
    """What scrolls by itself where it is wider than the page."""
    return f'<div class="scroll">{content}</div>'
