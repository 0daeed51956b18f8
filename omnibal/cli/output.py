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


def show(*parts: str | Table) -> None:
    """Print lines and tables; long lines are broken on a terminal only, so that programs read whole paths."""
    console = Console()
    for part in parts:
        console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str) and not console.is_terminal)


def show_json(record: Any) -> None:
    """Print JSON values; paths as strings."""
    typer.echo(json.dumps(record, indent=2, default=str))
