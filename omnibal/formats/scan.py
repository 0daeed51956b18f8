"""Where the entries of JSON files begin and end, in one pass over their bytes in blocks of any size."""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Block = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]

NEWLINE, BACKSLASH = ord("\n"), ord("\\")
OPENING, CLOSING, COMMA, QUOTE = 1, -1, 2, 3
_KINDS: Final = {"[": OPENING, "{": OPENING, "]": CLOSING, "}": CLOSING, ",": COMMA, '"': QUOTE}
KINDS: Final = bytes(_KINDS.get(chr(byte), 0) % 256 for byte in range(256))
"""Of each byte; 0 for those that tell nothing of where entries end."""
IS_SPACE: Final = np.zeros(256, dtype=np.bool_)
IS_SPACE[list(b" \t\r\n")] = True
NOTHING: Final = -1


class Entries(NamedTuple):
    """Byte offsets of entries, [start, stop), and the lines, from 1, on which they begin."""

    starts: Offsets
    stops: Offsets
    lines: Offsets


class LineScanner:
    """Finds lines; blank ones at the end are left out."""

    def __init__(self) -> None:
        self._stops: list[Offsets] = []
        self._position = self._last_text = 0

    def feed(self, block: Block) -> None:
        """Take the next bytes of the file."""
        self._stops.append(np.flatnonzero(block == NEWLINE) + self._position)
        text = len(block.tobytes().rstrip())
        if text:
            self._last_text = self._position + text
        self._position += len(block)

    def finish(self) -> Entries:
        """The lines of what was fed."""
        stops = np.concatenate([*self._stops, [self._position]]).astype(np.int64)
        starts = np.concatenate([np.zeros(1, dtype=np.int64), stops[:-1] + 1])
        kept = int(np.searchsorted(starts, self._last_text))
        return Entries(starts[:kept], stops[:kept], np.arange(1, kept + 1))


class ArrayScanner:
    """Finds the entries of a JSON array, whatever they are; they are not checked to be JSON.

    All bytes of a block are looked at together. What is carried to the next block: how deep it begins within brackets,
    whether within a string or behind a backslash, and where the entry began that it goes on with.
    """

    def __init__(self) -> None:
        self._found: list[Offsets] = []
        self._position, self._line, self._depth = 0, 1, 0
        self._in_string = self._escaped = self._ended = False
        self._start = self._start_line = self._extra_line = NOTHING

    def feed(self, block: Block) -> None:
        """Take the next bytes of the file."""
        newlines, begin = np.flatnonzero(block == NEWLINE), 0
        if not self._ended:
            edges, opens = self._edges(block)
            self._take(block, edges, opens, newlines)
            begin = int(edges[-1]) + 1 if self._ended else len(block)
        extra = np.flatnonzero(~IS_SPACE[block[begin:]])
        if len(extra) and self._extra_line == NOTHING:
            self._extra_line = self._line + int(np.searchsorted(newlines, begin + extra[0]))
        self._line += len(newlines)
        self._position += len(block)

    def finish(self) -> Entries:
        """The entries of what was fed.

        Raises:
            ValueError: If the array did not end, or did and more followed.
        """
        if self._extra_line != NOTHING:
            raise ValueError(f"the array has ended, and more follows on line {self._extra_line}")
        if not self._ended:
            line = self._start_line if self._start != NOTHING else self._line
            raise ValueError(f"the file ends within the entry that begins on line {line}")
        starts, stops, lines = np.concatenate(self._found, axis=1)
        return Entries(starts, stops, lines)

    def _edges(self, block: Block) -> tuple[Offsets, npt.NDArray[np.bool_]]:
        """Places of the array's own brackets and of commas between its entries, and which is the bracket that opens."""
        kinds = np.frombuffer(bytearray(block).translate(KINDS), dtype=np.int8)  # faster than numpy's own look-up
        kinds[self._behind_backslashes(block)] = 0
        places = np.flatnonzero(kinds != 0)
        kinds = kinds[places]
        quotes = np.cumsum(kinds == QUOTE) + self._in_string
        self._in_string = bool(quotes[-1] % 2) if len(quotes) else self._in_string
        outside = (quotes % 2 == 0) & (kinds != QUOTE)
        places, kinds = places[outside], kinds[outside]
        depths = self._depth + np.cumsum(np.where(kinds == COMMA, 0, kinds))
        self._depth = int(depths[-1]) if len(depths) else self._depth
        ends = np.flatnonzero(depths == 0)[:1]
        self._ended = len(ends) > 0
        is_edge = (depths == 0) | ((depths == 1) & (kinds != CLOSING))
        is_edge[ends.sum() + 1 if self._ended else len(depths) :] = False
        return places[is_edge], kinds[is_edge] == OPENING

    def _behind_backslashes(self, block: Block) -> Offsets:
        """Places that an odd number of backslashes stands before."""
        slashes = np.flatnonzero(block == BACKSLASH)
        if self._escaped and len(slashes) and slashes[0] == 0:
            slashes = slashes[1:]
        first = np.flatnonzero(np.diff(slashes, prepend=-2) != 1)
        runs = np.diff(first, append=len(slashes))
        behind = np.append(np.zeros(int(self._escaped), dtype=np.int64), (slashes[first] + runs)[runs % 2 == 1])
        self._escaped = len(behind) > 0 and bool(behind[-1] == len(block))
        return behind[: len(behind) - self._escaped]

    def _take(self, block: Block, edges: Offsets, opens: npt.NDArray[np.bool_], newlines: Offsets) -> None:
        """Note the entries that end at edges, and where the one behind the last edge begins."""
        stops = np.append(edges, len(block))
        starts = np.append(0, edges + 1)
        while (spaces := (starts < stops) & IS_SPACE[block[np.minimum(starts, len(block) - 1)]]).any():
            starts += spaces
        lines = self._line + np.searchsorted(newlines, starts)
        has_text = starts < stops
        starts += self._position
        if self._start != NOTHING:
            starts[0], lines[0], has_text[0] = self._start, self._start_line, True
        self._start, self._start_line = (int(starts[-1]), int(lines[-1])) if has_text[-1] else (NOTHING, NOTHING)
        kept = has_text[:-1] & ~opens
        self._found.append(np.stack([starts[:-1], edges + self._position, lines[:-1]])[:, kept])
