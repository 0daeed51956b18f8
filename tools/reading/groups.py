"""Tensor ranks that all read a pack's images, or a first one that reads and broadcasts them: see README.md."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tools.bench import machine, print_table
from tools.reading.bench import KINDS, patches_of, picture, tiles_of

SIZES: Final = (2, 4)
"""Tensor ranks of a group."""
PACKS: Final = 3
READERS: Final = {"tiles": tiles_of, "patches": patches_of}
FILES: Final = ("photograph, 1024 × 768 JPEG", "scanned page, 2480 × 3508 JPEG")


def main() -> None:
    """Print the table of RESULTS.md."""
    print(machine("torch", "transformers", "pillow"), end="\n\n")
    heads = (
        "a pack of four",
        "as",
        "ranks",
        "MB",
        "all read: s of processor, s",
        "one reads: s of processor, s",
        "spared",
    )
    print_table(heads, list(rows()))


def rows() -> Iterator[tuple[str, ...]]:
    """A row for each kind of file, family and size of a group; processor seconds are summed over the group."""
    for kind in FILES:
        for name in READERS:
            for size in SIZES:
                with tempfile.TemporaryDirectory() as folder:
                    mp.spawn(work, args=(size, kind, name, folder), nprocs=size)
                    found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(size)]
                sums = {way: sum(each[way][0] for each in found) for way in ("all", "one")}
                waits = {way: max(each[way][1] for each in found) for way in ("all", "one")}
                cells = [f"{sums[way]:.2f}, {waits[way]:.2f}" for way in ("all", "one")]
                spared = f"{1 - sums['one'] / sums['all']:.0%}"
                yield kind, name, str(size), f"{found[0]['bytes'] / 1e6:.0f}", *cells, spared


def work(rank: int, size: int, kind: str, name: str, folder: str) -> None:
    """Processor seconds and seconds of a pack on a rank, read by all or by rank 0 alone; the least of some packs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    file, read = picture(*KINDS[kind]), READERS[name]
    shape = read(file).shape

    def pack(reads: bool) -> Tensor:
        images = [read(file) if reads else torch.empty(shape, dtype=torch.bfloat16) for _ in range(4)]
        return torch.cat(images)

    found: dict[str, Any] = {"bytes": pack(reads=False).nbytes}
    for way in ("all", "one"):
        times = []
        for _ in range(PACKS):
            dist.barrier()
            processor, begun = time.process_time(), time.perf_counter()
            images = pack(reads=way == "all" or rank == 0)
            if way == "one":
                dist.broadcast(images, 0)
            dist.barrier()
            times.append((time.process_time() - processor, time.perf_counter() - begun))
        found[way] = min(times)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
