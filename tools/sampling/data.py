"""The lengths that samplers are compared on."""

from pathlib import Path

from omnibal.data.lengths import SampleLengths
from tools.synthetic import INTERNVL_MIX, tiled_lengths

REAL = Path(__file__).parents[3] / "shared" / "data" / "internvl_lengths"
"""Where real lengths lie, if any do: beside the repository."""


def real_lengths(folder: Path = REAL) -> tuple[SampleLengths, str]:
    """Real lengths and what to call them; made-up ones where there are none."""
    files = sorted(folder.glob("*.json"))
    if not files:
        return tiled_lengths(60_000), "60,000 made-up samples of the InternVL-1.2 mix"
    lengths = SampleLengths.from_token_lengths(files)
    return lengths, f"{len(lengths):,} real samples of the InternVL-1.2 mix ({', '.join(file.stem for file in files)})"


def mixed_lengths() -> tuple[SampleLengths, str]:
    """As many samples as the paper's mix has, of all its sources, made up to follow its statistics."""
    count = sum(source.samples for source in INTERNVL_MIX)
    return tiled_lengths(count), f"{count:,} made-up samples of all nine sources of the InternVL-1.2 mix"
