"""Real sample lengths, where they lie beside the repository."""

from pathlib import Path

import pytest

from omnibal.data.lengths import SampleLengths

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "internvl_lengths"
FILES = tuple(sorted(FOLDER.glob("*.json")))

needs_real_lengths = pytest.mark.skipif(not FILES, reason=f"no real lengths in {FOLDER}")


def real_lengths() -> SampleLengths:
    """The samples of all files; ``source`` numbers the files by name."""
    return SampleLengths.from_token_lengths(FILES)
