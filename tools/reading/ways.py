"""The same packs read by local workers and by a Ray cluster of this machine, in turn: see README.md."""

import tempfile
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, Final

import ray
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from omnibal.engine.reading import RayPacks
from tools.bench import machine, print_table
from tools.reading.bench import KINDS, picture, tiles_of

READERS: Final = 2
PACKS: Final = 8
"""Packs that are read ahead, as those of a step."""
SIZE: Final = 4
"""Pictures in a pack, 13 tiles each."""
ROUNDS: Final = 4


class Pictures(Dataset[dict[str, Tensor]]):
    """A file read again and again, each time from the disk."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": tiles_of(self._file.read_bytes())}


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tiles of all samples, one after another."""
    return {"pixel_values": torch.cat([sample["pixel_values"] for sample in samples])}


def main() -> None:
    """Print the table of RESULTS.md."""
    torch.set_num_threads(1)
    print(machine("torch", "ray"), end="\n\n")
    ray.init(address="local", num_cpus=READERS, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "photograph.jpg"
        file.write_bytes(picture(*KINDS["photograph, 1024 × 768 JPEG"]))
        packs = [[SIZE * number + each for each in range(SIZE)] for number in range(PACKS * (ROUNDS + 2))]
        local: Iterable[Any] = DataLoader(
            Pictures(file),
            batch_sampler=packs,
            collate_fn=collate,
            num_workers=READERS,
            prefetch_factor=PACKS // READERS,
        )
        remote = RayPacks(Pictures(file), packs, collate, address="auto", count=PACKS, pin=False)
        first: dict[str, float] = {}
        later: dict[str, list[float]] = {"local workers": [], "Ray": []}
        for name, source in (("local workers", local), ("Ray", remote)):
            start = time.perf_counter()
            batches = iter(source)
            next(batches)
            first[name] = time.perf_counter() - start
            for _ in islice(batches, PACKS * 2 - 1):  # what was read ahead meanwhile
                pass
            for _ in range(ROUNDS):
                start = time.perf_counter()
                for _ in islice(batches, PACKS - 2):
                    pass
                later[name].append((time.perf_counter() - start) / (PACKS - 2))
            del batches  # the readers of the one end before those of the other begin
    rows = (
        (name, f"{first[name]:.1f}", f"{1e3 * min(times):.0f} … {1e3 * max(times):.0f}")
        for name, times in later.items()
    )
    print_table(("read by", "first pack, s", "each pack once warm, ms"), rows)


if __name__ == "__main__":
    main()
