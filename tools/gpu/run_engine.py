"""One process of a short real run through omnibal.initialize; writes what it saw as JSON. Started by engine.py."""

import argparse
import json
import os
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from omnibal import SampleLengths
from tools.gpu.models import IMAGE_TOKEN, models


class Samples:
    """Random tiles and tokens; the first half of a sample is its image."""

    def __init__(self, count: int, tiles: int, tokens: int, pixels: int, tokens_per_tile: int) -> None:
        self.count, self.tiles, self.tokens, self.pixels, self.per_tile = count, tiles, tokens, pixels, tokens_per_tile

    def __len__(self) -> int:
        """Number of samples."""
        return self.count

    def text(self, index: int) -> dict[str, Any]:
        """Tokens without pixels."""
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(4, 500, (self.tokens - self.tiles * self.per_tile,), generator=generator)
        image = torch.full((self.tiles * self.per_tile,), IMAGE_TOKEN)
        labels = torch.cat([torch.full_like(image, -100), words])
        labels[0] = -100
        return {"input_ids": torch.cat([image, words]), "labels": labels, "pixel_values": None}

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A sample."""
        generator = torch.Generator().manual_seed(index)
        pixels = torch.randn(self.tiles, 3, self.pixels, self.pixels, generator=generator)
        return self.text(index) | {"pixel_values": pixels}

    def lengths(self) -> SampleLengths:
        """All alike."""
        words = self.tokens - self.tiles * self.per_tile
        return SampleLengths([self.tiles] * self.count, [self.tokens] * self.count, target_tokens=[words] * self.count)


def main() -> None:
    """Two steps to warm up, some timed ones, one whose memory is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", type=Path, required=True)
    arguments = parser.parse_args()
    task = json.loads(arguments.task.read_text())
    import omnibal
    from omnibal.engine import table

    if not task["early"]:
        table.exchange_of = lambda *given: None  # type: ignore[assignment]  # DeepSpeed's own then

    model = models(small=task["small"])[task["model"]]
    engine, *_ = omnibal.initialize(config=task["config"], model=model.config, dataset=Samples(**task["samples"]))
    losses, seconds = [], []
    for _ in range(task["steps"]):
        start = perf_counter()
        losses.append(float(engine.train_batch()))
        seconds.append(perf_counter() - start)
    loss, measured = engine.measured_batch()
    losses.append(float(loss))
    if int(os.environ["RANK"]) == 0:
        found = {"losses": losses, "seconds": seconds}
        found |= {"peak_bytes": measured.step, "overhead_bytes": measured.overhead}
        Path(task["output"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
