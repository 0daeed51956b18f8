"""Trains for thousands of steps in each layout and says what grows: python -m tools.longrun.run. See README.md."""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median as median_of
from typing import Annotated, Any, Final

import typer
from scipy.stats import theilslopes

from omnibal.demo import write_demo
from omnibal.processes import free_port
from tools.bench import machine, print_table
from tools.longrun.rank import LAYOUTS

RANKS: Final = 2
WARM_UP: Final = 0.25
"""Share of the run that the slopes leave out: allocators and caches fill up."""
BOUNDS: Final = {"bytes": 4096.0, "objects": 0.05, "threads": 0.0, "handles": 0.0, "children": 0.0, "seconds": 1e-4}
"""The most that a step may add. Processor seconds are a share of the median: 2,000 steps at the bound add a fifth."""
COLUMNS: Final = ("layout", "steps", "epochs", "MiB", "bytes/step", "objects/step", "threads", "handles", "children")


@dataclass(frozen=True)
class Grown:
    """What grew in a run: slopes per step of the rank where they are largest, and ranges of what must stay."""

    layout: str
    steps: int
    epochs: float
    mib: float
    slopes: dict[str, float]
    ranges: dict[str, tuple[int, int]]
    step_seconds: float

    @property
    def excesses(self) -> list[str]:
        """The quantities that grow faster than ``BOUNDS`` allow."""
        return [name for name, slope in self.slopes.items() if slope > BOUNDS[name]]

    def cells(self) -> list[str]:
        """A row of the table."""
        counts = ["–".join(map(str, dict.fromkeys(self.ranges[name]))) for name in ("threads", "handles", "children")]
        return [
            self.layout,
            f"{self.steps:,}",
            f"{self.epochs:.0f}",
            f"{self.mib:.0f}",
            f"{self.slopes['bytes']:.0f}",
            f"{self.slopes['objects']:.3f}",
            *counts,
            f"{1000 * self.step_seconds:.0f}",
            f"{100_000 * self.slopes['seconds']:+.1f} %",
            ", ".join(self.excesses) or "flat",
        ]


def measure(layout: str, steps: int, folder: Path) -> Grown:
    """Train in a layout on two processes; what grew."""
    data, own = folder / "data", folder / layout.replace(" ", "-").replace(",", "")
    if not data.exists():
        write_demo(data, samples=400, held_out=20)
        _shrink(data / "model" / "config.json")
    own.mkdir()
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(RANKS), "--master_port", str(free_port())]
    command = [sys.executable, *launcher, "-m", "tools.longrun.rank", layout, str(steps), str(data), str(own)]
    with (own / "log.txt").open("w") as log:
        done = subprocess.run(command, cwd=Path(__file__).parents[2], stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise RuntimeError(f"{layout} failed:\n{(own / 'log.txt').read_text()[-6000:]}")
    return read(layout, own)


def _shrink(config: Path) -> None:
    """Let the demo's model have two narrow layers of each kind: what grows does not depend on its size."""
    content = json.loads(config.read_text())
    for part in ("vision_config", "text_config"):
        content[part] |= {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 96}
    content["text_config"].pop("layer_types", None)
    config.write_text(json.dumps(content))


def read(layout: str, folder: Path) -> Grown:
    """What the notes of a run say."""
    ranks = [
        [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()] for rank in range(RANKS)
    ]
    kept = [notes[int(len(notes) * WARM_UP) :] for notes in ranks]
    slopes = {name: max(_slope(notes, name) for notes in kept) for name in BOUNDS}
    step = ranks[0][1]["step"] - ranks[0][0]["step"]
    median = median_of(note["seconds"] for note in kept[0])
    slopes["seconds"] /= median
    ranges = {
        name: (min(n[name] for notes in kept for n in notes), max(n[name] for notes in kept for n in notes))
        for name in ("threads", "handles", "children")
    }
    mib = max(notes[-1]["bytes"] for notes in ranks) / 2**20
    epochs = json.loads((folder / "epochs.json").read_text())
    return Grown(layout, ranks[0][-1]["step"], epochs, mib, slopes, ranges, median / step)


def _slope(notes: list[dict[str, Any]], name: str) -> float:
    """Median of the slopes between all pairs of notes: a single jump, as of an allocator's pool, does not count."""
    return float(theilslopes([note[name] for note in notes], [note["step"] for note in notes]).slope)


def main(
    steps: Annotated[int, typer.Option(help="Steps in each layout.", min=100)] = 2000,
    layouts: Annotated[list[str] | None, typer.Option("--layout", help="By default all.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where notes stay; by default they are removed.")] = None,
) -> None:
    """Print a row for each layout; exit with 1 if anything grows."""
    with tempfile.TemporaryDirectory() as name:
        base = folder or Path(name)
        found = [measure(layout, steps, base) for layout in layouts or LAYOUTS]
    print(machine("torch", "deepspeed", "transformers", "accelerate"), end="\n\n")
    print_table([*COLUMNS, "processor ms/step", "in 1,000 steps", "verdict"], [grown.cells() for grown in found])
    sys.exit(any(grown.excesses for grown in found))


if __name__ == "__main__":
    typer.run(main)
