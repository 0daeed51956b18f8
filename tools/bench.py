"""What benchmarks share: tables for their RESULTS, and the line that names the machine."""

import os
import platform
from collections.abc import Iterable, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version


def line(cells: Iterable[object]) -> str:
    """A row of a Markdown table.

    >>> line(["a", 1])
    '| a | 1 |'
    """
    return f"| {' | '.join(map(str, cells))} |"


def head(names: Sequence[object]) -> str:
    """The names of a Markdown table's columns; all columns but the first are aligned to the right.

    >>> print(head(["a", "b"]))
    | a | b |
    |---|---:|
    """
    return f"{line(names)}\n|{'|'.join(['---', *['---:'] * (len(names) - 1)])}|"


def table(names: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table as text."""
    return "\n".join([head(names), *map(line, rows)])


def print_table(names: Sequence[object], rows: Iterable[Iterable[object]]) -> None:
    """Print a Markdown table, each row as soon as it is measured."""
    print(head(names))
    for row in rows:
        print(line(row), flush=True)


def machine(*packages: str) -> str:
    """The date, the processor, Python, and the versions of packages, as RESULTS name them."""
    found = ", ".join(f"{package} {_version(package)}" for package in packages)
    system = f"{date.today()}, {os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    return f"{system}, {found}" if packages else system


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is missing"
