"""The parts of the site that are generated: the keys of a ds_config, the commands, docstrings, the contents.

Each takes the place of a comment or a list in a page, so that the page reads well where no site is built.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import BaseModel
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

from omnibal.config.section import OmnibalSection
from tools.results import as_json

KEYS: Final = "<!-- generated: keys -->"
COMMANDS: Final = "<!-- generated: commands -->"
EXAMPLE: Final = re.compile(r"^((?:Example|Then)[^:\n]*): (omnibal (?:.+\n)+)", re.MULTILINE)
"""A call within a command's help, broken into lines."""
NAME: Final = re.compile(r"^- `(omnibal[\w.]*)`: .*$", re.MULTILINE)
"""An entry of the list of names."""
OUTSIDE: Final = re.compile(r"\]\((\.\./[^)#]+\.md)\)")
"""Links to reports outside docs/: pages where no site is built, files beside the site."""


MOVED: Final = {
    "index": "start.html",
    "running": "pipeline.html",
    "memory": "pipeline.html#memory",
    "lora": "pipeline.html#lora",
    "tensor": "layouts.html#tensor-ranks",
    "video": "data.html#videos",
    "sound": "data.html#sounds",
    "mixtures": "streams.html",
    "compared": "advise.html#omnibal-or-what-your-trainer-has",
    "families": "models.html#a-family-of-your-own",
    "nodes": "checkpoints.html#many-nodes",
    "hang": "troubleshooting.html#a-hang",
    "slow_rank": "troubleshooting.html#one-slow-rank",
    "out_of_memory": "troubleshooting.html#out-of-memory-on-one-rank",
    "lost_samples": "troubleshooting.html#samples-that-are-lost-or-seen-twice",
    "bad_input": "troubleshooting.html#bad-input",
}
"""Pages of earlier versions, and where their text is."""


def keys() -> str:
    """Every key of the "omnibal" section as Markdown: its type, its default, and what the code says of it."""
    return "\n".join(_section(OmnibalSection, "omnibal"))


def _section(section: type[BaseModel], name: str) -> Iterator[str]:
    documented = ModuleAnalyzer.for_module(section.__module__).find_attr_docs()
    schema = section.model_json_schema()
    parts = {key: _section_in(field.annotation) for key, field in section.model_fields.items()}
    plain = [key for key, kind in parts.items() if kind is None]
    if plain:
        yield f"### `{name}`\n\n{_text(section.__doc__ or '')}\n"
        yield "| key | value | left out | meaning |\n|---|---|---|---|"
        for key in plain:
            entry = schema["properties"][key]
            default = "" if entry.get("default") is None else f"`{_json(entry['default'])}`"
            meaning = " ".join(documented.get((section.__name__, key), []))
            yield f"| `{key}` | {_values(entry, schema)} | {default} | {_text(meaning)} |"
        yield ""
    for key, kind in parts.items():
        if kind is not None:
            yield from _section(kind, key if name == "omnibal" else f"{name}.{key}")


def _section_in(kind: Any) -> type[BaseModel] | None:
    """The section that a key may hold, one that may be left out among them."""
    return next((k for k in (kind, *get_args(kind)) if isinstance(k, type) and issubclass(k, BaseModel)), None)


def _values(entry: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """What a key may be, in words, from its JSON schema."""
    if "$ref" in entry:
        named = schema["$defs"][entry["$ref"].rpartition("/")[2]]
        return "text or record" if "properties" in named else _values(named, schema)
    if "anyOf" in entry:
        return " or ".join(dict.fromkeys(_values(e, schema) for e in entry["anyOf"] if e.get("type") != "null"))
    if "enum" in entry or "const" in entry:
        return ", ".join(f"`{_json(value)}`" for value in entry.get("enum", [entry.get("const")]))
    if entry.get("type") == "array":
        return f"list of {_values(entry['items'], schema)}"
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f" {sign} {entry[bound]}" for bound, sign in bounds.items() if bound in entry]
    words = {"string": "text", "boolean": "`true` or `false`", "object": "record", None: "any"}
    return words.get(entry.get("type"), str(entry.get("type"))) + " and".join(limits)


def _json(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else f"{value}"


def _text(text: str) -> str:
    """A docstring as a cell of Markdown."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def commands() -> str:
    """Every command as Markdown, as typer tells it."""
    tell = [sys.executable, "-m", "typer", "omnibal.cli.main", "utils", "docs", "--name", "omnibal"]
    text = subprocess.run(tell, capture_output=True, text=True, check=True).stdout
    return EXAMPLE.sub(_as_code, text[text.index("## ") :])


def _as_code(example: re.Match[str]) -> str:
    return f"{example[1]}:\n\n```console\n$ {' '.join(example[2].split())}\n```\n"


def documented(entry: re.Match[str]) -> str:
    """An entry of the list of names as what autodoc makes of its docstring."""
    module, _, name = entry[1].rpartition(".")
    kind = "autoclass" if isinstance(getattr(import_module(module), name), type) else "autofunction"
    return f"```{{eval-rst}}\n.. {kind}:: {entry[1]}\n```\n"


def contents(start: str) -> str:
    """The pages that the first one lists, in its order, as Sphinx wants to know them."""
    listed = start[start.index("## All pages") :]
    return "\n```{toctree}\n:hidden:\n\n" + "\n".join(re.findall(r"\]\((\w+)\.md\)", listed)) + "\n```\n"


def setup(app: Sphinx) -> dict[str, Any]:
    """Fill in what is generated and link what lies outside when a page is read; keep docstrings as they are."""

    def fill(_: Sphinx, page: str, source: list[str]) -> None:
        text = source[0]
        if page == "start":
            text += contents(text)
        elif page == "api":
            text = NAME.sub(documented, text)
        elif page == "pipeline":
            text = text.replace(KEYS, keys())
        elif page == "cli":
            text = text.replace(COMMANDS, commands())
        source[0] = OUTSIDE.sub(r"](path:\1)", text)

    def keep_colon(_: Sphinx, what: str, *given: Any) -> None:
        lines = given[-1]
        if what in ("attribute", "property", "data") and lines:  # napoleon would take what stands before it for a type
            lines[0] = lines[0].replace(": ", " – ", 1)

    def save_results(built: Sphinx, error: Exception | None) -> None:
        if error is None:
            (Path(built.outdir) / "results.json").write_text(as_json())
            for old, new in MOVED.items():
                page = f'<meta http-equiv="refresh" content="0; url={new}">'
                (Path(built.outdir) / f"{old}.html").write_text(page)

    app.connect("source-read", fill)
    app.connect("build-finished", save_results)
    app.connect("autodoc-process-docstring", keep_colon, priority=400)
    return {"parallel_read_safe": True}
