"""How commands answer: to people on a console, to programs as JSON, and beside either on stderr."""

import json
from typing import Any

import typer
from rich.console import Console
from rich.table import Table


def say(*lines: str) -> None:
    """Tell the user, beside what a command prints."""
    for line in lines:
        Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def answer(record: Any, *parts: str | Table, as_json: bool) -> None:
    """Print what a command found.

    Args:
        record: JSON values, paths among them, for programs.
        parts: Lines and tables for people; long lines are broken on a terminal only, so that scripts read whole paths.
        as_json: Which of them.
    """
    if as_json:
        typer.echo(json.dumps(record, indent=2, default=str))
        return
    console = Console(markup=False)  # also of cells: what users call things may look like tags
    for part in parts:
        console.print(part, highlight=False, soft_wrap=isinstance(part, str) and not console.is_terminal)
