"""Tables as RESULTS.md keeps them."""

from collections.abc import Iterable, Sequence


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are aligned to the right.

    >>> print(table(["a", "b"], [["x", "1"]]))
    | a | b |
    |---|---:|
    | x | 1 |
    """
    lines = [names, ["---", *["---:"] * (len(names) - 1)], *rows]
    marks = ("| {} |", "|{}|")
    return "\n".join(marks[place == 1].format((" | ", "|")[place == 1].join(line)) for place, line in enumerate(lines))
