"""Where the entries of JSON files begin and end, in one pass over their bytes in blocks of any size."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from omnibal.compiled import compiled

Block = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]

NEWLINE, QUOTE, BACKSLASH, COMMA = (ord(character) for character in '\n"\\,')
OPENING, CLOSING = (ord("["), ord("{")), (ord("]"), ord("}"))
SPACES = (ord(" "), ord("\t"), ord("\r"), NEWLINE)

# What the scan of an array carries from block to block.
DEPTH, IN_STRING, ESCAPED, LINE, POSITION, START, START_LINE, ENDED, EXTRA_LINE = range(9)
NOTHING = -1


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
    """Finds the entries of a JSON array, whatever they are; they are not checked to be JSON."""

    def __init__(self) -> None:
        self._state = np.array([0, 0, 0, 1, 0, NOTHING, NOTHING, 0, NOTHING], dtype=np.int64)
        self._found: list[Offsets] = []

    def feed(self, block: Block) -> None:
        """Take the next bytes of the file."""
        found = np.empty((len(block) + 1, 3), dtype=np.int64)
        self._found.append(found[: _scan_array(block, self._state, found)].copy())

    def finish(self) -> Entries:
        """The entries of what was fed.

        Raises:
            ValueError: If the array did not end, or did and more followed.
        """
        if self._state[EXTRA_LINE] != NOTHING:
            raise ValueError(f"the array has ended, and more follows on line {self._state[EXTRA_LINE]}")
        if self._state[DEPTH]:
            line = self._state[START_LINE] if self._state[START] != NOTHING else self._state[LINE]
            raise ValueError(f"the file ends within the entry that begins on line {line}")
        starts, stops, lines = np.concatenate(self._found).T
        return Entries(starts, stops, lines)


@compiled
def _scan_array(block: Block, state: Offsets, found: npt.NDArray[Any]) -> int:
    """Writes (start, stop, line) of the entries that end in a block; returns how many."""
    count = 0
    for byte in block:
        if byte == NEWLINE:
            state[LINE] += 1
        if state[ENDED]:
            if byte not in SPACES and state[EXTRA_LINE] == NOTHING:
                state[EXTRA_LINE] = state[LINE]
        elif state[IN_STRING]:
            if state[ESCAPED]:
                state[ESCAPED] = 0
            elif byte == BACKSLASH:
                state[ESCAPED] = 1
            elif byte == QUOTE:
                state[IN_STRING] = 0
        elif byte in CLOSING or (byte == COMMA and state[DEPTH] == 1):
            state[DEPTH] -= byte != COMMA
            state[ENDED] = state[DEPTH] == 0
            if state[START] != NOTHING and (byte == COMMA or state[DEPTH] == 0):
                found[count] = state[START], state[POSITION], state[START_LINE]
                count += 1
                state[START] = NOTHING
        elif byte not in SPACES:
            if state[DEPTH] == 1 and state[START] == NOTHING:
                state[START] = state[POSITION]
                state[START_LINE] = state[LINE]
            state[IN_STRING] = byte == QUOTE
            state[DEPTH] += byte in OPENING
        state[POSITION] += 1
    return count
