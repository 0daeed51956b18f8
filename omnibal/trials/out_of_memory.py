"""How much memory a process was short of when its device ran out, passed on to who started it."""

import re
from pathlib import Path

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"


def missing_bytes(message: str) -> int:
    """What torch's allocator says is missing: what was asked for beyond what was free; 1 where it does not say.

    >>> missing_bytes("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of "
    ...               "which 1.50 GiB is free. Including non-PyTorch memory, this process has 77.65 GiB in use.")
    536870912
    """
    asked = re.search(f"Tried to allocate {_SIZE}", message)
    free = re.search(f"of which {_SIZE} is free", message)
    return max(_bytes(asked) - _bytes(free), 1)


def write_missing(folder: Path, stage: int, rank: int, message: str) -> None:
    """Leave word of an allocator's message on this rank."""
    (folder / f"missing.{stage}.{rank}").write_text(str(missing_bytes(message)))


def read_missing(folder: Path, num_stages: int) -> tuple[int, ...]:
    """The bytes that each stage was short of, the most of its ranks; zeros where it was not."""
    return tuple(
        max((int(path.read_text()) for path in folder.glob(f"missing.{stage}.*")), default=0)
        for stage in range(num_stages)
    )


def _bytes(found: re.Match[str] | None) -> int:
    return int(float(found[1]) * UNITS[found[2]]) if found else 0
