"""Tables as they are printed."""

from rich.console import Console


def text_of(table, width=80):
    """Its text on a terminal of so many columns."""
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def rows_of(table, width=100):
    """The words of each line below the heads."""
    lines = [line.split() for line in text_of(table, width).splitlines()]
    rule = next(place for place, words in enumerate(lines) if words and set(words[0]) == {"─"})
    return [words for words in lines[rule + 1 :] if words]
