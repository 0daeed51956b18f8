"""What opening a data file takes, by our index and by Hugging Face datasets, as a Markdown table."""

import io
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import datasets
import numpy as np
import typer
from PIL import Image

from omnibal.formats.files import open_rows

BATCH = 64
TURNS = [{"from": "human", "value": "<image>\nWhat is shown?"}, {"from": "gpt", "value": "A cat on a sofa."}]
LINE = {"id": 0, "image": "coco/train2017/000000000000.jpg", "conversations": TURNS}
WRITTEN_AT_ONCE = 100_000

app = typer.Typer()


@app.command()
def main(
    lines: Annotated[int, typer.Option(help="JSON lines.")] = 10_000_000,
    samples: Annotated[int, typer.Option(help="Samples of the tar shard, each with a picture.")] = 5000,
    folder: Annotated[Path | None, typer.Option(help="Where 600 bytes a line have room; removed at the end.")] = None,
) -> None:
    """Open each kind of file in a fresh process, first without a cache, then with it; print what it took."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        files = {
            f"{lines:,} JSON lines": (write_lines(Path(name) / "a.jsonl", lines), "json"),
            f"tar shard of {samples:,} pictures": (write_tar(Path(name) / "a.tar", samples), "webdataset"),
            "the same pictures in Parquet": (write_parquet(Path(name) / "a.parquet", samples), "parquet"),
        }
        typer.echo(f"{date.today()}; datasets {datasets.__version__}\n")
        typer.echo(
            "| file | GB | read by | first start, seconds | later start, seconds | own memory, MB "
            f"| first {BATCH} rows, ms | kept on disk, MB |"
        )
        typer.echo("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for kind, (path, builder) in files.items():
            for reader in ("omnibal", "datasets"):
                cache = Path(name) / f"{path.name}-{reader}"
                first, later = (_part(reader, path, builder, cache) for _ in range(2))
                kept = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
                opened = f"{first['seconds']:.2f} | {later['seconds']:.2f} | {later['own'] / 1e6:.0f}"
                typer.echo(
                    f"| {kind} | {path.stat().st_size / 1e9:.2f} | {reader} | {opened} | {1e3 * later['batch']:.1f} "
                    f"| {kept / 1e6:,.0f} |"
                )


def write_lines(path: Path, count: int) -> Path:
    with path.open("w") as file:
        for first in range(0, count, WRITTEN_AT_ONCE):
            numbers = range(first, min(first + WRITTEN_AT_ONCE, count))
            file.write("".join(f"{json.dumps(LINE | {'id': number})}\n" for number in numbers))
    return path


def picture() -> bytes:
    held = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (200, 260, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(held, "JPEG", quality=92)
    return held.getvalue()


def write_tar(path: Path, count: int) -> Path:
    record, content = json.dumps({"conversations": TURNS}).encode(), picture()
    with tarfile.open(path, "w") as shard:
        for number in range(count):
            for kind, held in (("json", record), ("jpg", content)):
                entry = tarfile.TarInfo(f"{number:06}.{kind}")
                entry.size = len(held)
                shard.addfile(entry, io.BytesIO(held))
    return path


def write_parquet(path: Path, count: int) -> Path:
    rows = {"conversations": [TURNS] * count, "image": [{"bytes": picture(), "path": None}] * count}
    datasets.Dataset.from_dict(rows).to_parquet(path)
    return path


def _part(reader: str, path: Path, builder: str, cache: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "part", reader, str(path), builder, str(cache)]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout
    result: dict[str, float] = json.loads(found)
    return result


@app.command(hidden=True)
def part(reader: str, path: Path, builder: str, cache: Path) -> None:
    """Open a file and read a batch of random rows; print what it took."""
    datasets.config.HF_DATASETS_CACHE = str(cache)  # where omnibal's Parquet is kept, too
    before, begun = _own_memory(), time.process_time()
    rows: Any = (
        open_rows(path, cache)
        if reader == "omnibal"
        else datasets.load_dataset(builder, data_files=str(path), split="train", cache_dir=str(cache))
    )
    read: Callable[[int], Any] = (lambda index: rows[index].read()) if reader == "omnibal" else rows.__getitem__
    seconds, places = time.process_time() - begun, np.random.default_rng(0).integers(0, len(rows), BATCH)
    begun = time.process_time()
    for place in places.tolist():
        read(place)
    batch = time.process_time() - begun
    typer.echo(json.dumps({"seconds": seconds, "batch": batch, "own": _own_memory() - before}))


def _own_memory() -> int:
    status = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return next(int(words[1]) * 1024 for words in status if words[0] == "RssAnon:")


if __name__ == "__main__":
    app()
