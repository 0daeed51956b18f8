"""What a process of a large run reads and holds until its first step, as a Markdown table."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from omnibal import BalancedBatchSampler, PackLimits, SampleLengths
from omnibal.demo import vocabulary, write_model_folder
from omnibal.formats.conversations import ConversationDataset, open_dataset
from omnibal.formats.measured import Measured
from tools.synthetic import tiled_lengths

LINE = b'{"id": "a made-up sample, never parsed"}\n'
BLOCK = 1_000_000
REPLICAS, MICRO_BATCHES, NODE_RANKS = 512, 8, 8
LIMITS = PackLimits(16, 5120)

app = typer.Typer()


@app.command()
def main(
    samples: Annotated[int, typer.Option(help="Samples, a multiple of a million.")] = 100_000_000,
    folder: Annotated[Path | None, typer.Option(help="Where 90 bytes a sample have room; removed at the end.")] = None,
) -> None:
    """Start each kind of process once, and print what it read and held."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        _write(Path(name), samples)
        typer.echo(
            f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}; "
            f"{samples:,} samples, {REPLICAS} replicas\n"
        )
        typer.echo(
            "| process | processor seconds | read, GB | mapped and touched, GB | own memory at the end, GB | at most |"
        )
        typer.echo("| --- | --- | --- | --- | --- | --- |")
        for kind in (*PARTS, "any other"):  # the first of the others may have compiled what it runs
            found = json.loads(
                subprocess.run(
                    [sys.executable, "-m", "tools.start.bench", "part", kind, name], stdout=subprocess.PIPE, check=True
                ).stdout
            )
            sizes = (f"{found[key] / 1e9:.2f}" for key in ("read", "mapped", "own", "most"))
            typer.echo(f"| {kind} | {found['seconds']:.1f} | {' | '.join(sizes)} |")


def _write(folder: Path, samples: int) -> None:
    """One annotation file, a meta file that names it, and a model's folder."""
    with (folder / "made_up.jsonl").open("wb") as file:
        for _ in range(samples // BLOCK):
            file.write(LINE * BLOCK)
    (folder / "meta.json").write_text(json.dumps({"made-up": {"root": ".", "annotation": "made_up.jsonl"}}))
    write_model_folder(folder / "model", vocabulary())


def _opened(folder: Path, **options: Any) -> ConversationDataset:
    return open_dataset(folder / "meta.json", folder / "model", **options)


def without_index(folder: Path) -> object:
    """What every process did before there was an index, and does without a cache."""
    return _opened(folder)


def first_process(folder: Path) -> object:
    """Indexes the annotations; keeps made-up lengths, since no images are there to be measured."""
    dataset = _opened(folder, cache=folder / "cache")
    part = tiled_lengths(BLOCK)
    columns = {name: np.tile(column, len(dataset) // BLOCK) for name, column in part.columns().items()}
    assert dataset._cache is not None
    dataset._cache.save(Measured(SampleLengths(**columns), (), np.empty(0, dtype=np.int64)))
    return dataset


def other_process(folder: Path) -> object:
    """Opens the dataset, and arranges the first step of one replica."""
    dataset = _opened(folder, cache=folder / "cache", measured=True)
    sampler = BalancedBatchSampler(
        dataset.lengths(), LIMITS, num_replicas=REPLICAS, rank=REPLICAS // 2, micro_batches=MICRO_BATCHES
    )
    sampler.state_dict()
    next(iter(sampler))
    return dataset, sampler


PARTS = {"any, without an index": without_index, "rank 0, the first start": first_process, "any other": other_process}


@app.command(hidden=True)
def part(kind: str, folder: Path) -> None:
    """Run one kind of process, and print its figures as JSON."""
    worked, before, read = time.process_time(), _memory(), _read_bytes()
    kept = PARTS[kind](folder)
    after = _memory()
    del kept
    found = {
        "seconds": time.process_time() - worked,
        "read": _read_bytes() - read,
        "mapped": after["RssFile"] - before["RssFile"],
        "own": after["RssAnon"] - before["RssAnon"],
        "most": after["VmHWM"] - before["VmRSS"],
    }
    typer.echo(json.dumps(found))


def _memory() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {
        words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[0].startswith(("Rss", "VmHWM", "VmRSS"))
    }


def _read_bytes() -> int:
    """By calls that read; what is touched of mapped files is not in it."""
    return int(Path("/proc/self/io").read_text().split()[1])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    app()
