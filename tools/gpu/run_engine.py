"""One process of a short real run through omnibal.initialize; writes what it saw as JSON. Started by engine.py.

With ``--staged`` two processes share one device, which NCCL refuses: gloo carries transfers through the host's memory.
"""

import argparse
import json
import os
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from omnibal import SampleLengths

IMAGE_TOKEN = 3


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


class StagedWork:
    """A transfer whose end lies in the host's memory until it is waited for."""

    def __init__(self, work: Any, host: Tensor, target: Tensor | None) -> None:
        self.work, self.host, self.target = work, host, target

    def wait(self, *arguments: Any) -> bool:
        """Until the tensor is where it belongs."""
        self.work.wait(*arguments)
        if self.target is not None:
            self.target.copy_(self.host)
        return True

    def is_completed(self) -> bool:
        """Whether waiting takes no time."""
        return bool(self.work.is_completed())


def stage_transfers() -> None:
    """Let gloo send, receive and reduce a device's tensors."""
    isend, irecv, reduce = dist.isend, dist.irecv, dist.reduce

    def staged_isend(tensor: Tensor, *arguments: Any, **options: Any) -> StagedWork:
        host = tensor.detach().cpu()
        return StagedWork(isend(host, *arguments, **options), host, None)

    def staged_irecv(tensor: Tensor, *arguments: Any, **options: Any) -> StagedWork:
        host = torch.empty_like(tensor, device="cpu")
        return StagedWork(irecv(host, *arguments, **options), host, tensor)

    def staged_reduce(tensor: Tensor, *arguments: Any, **options: Any) -> StagedWork:
        host = tensor.detach().cpu()
        return StagedWork(reduce(host, *arguments, **options), host, tensor)

    dist.isend, dist.irecv, dist.reduce = staged_isend, staged_irecv, staged_reduce
    dist.send = lambda *arguments, **options: staged_isend(*arguments, **options).wait()
    dist.recv = lambda *arguments, **options: staged_irecv(*arguments, **options).wait()


def main() -> None:
    """Two steps to warm up, some timed ones, one whose memory is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", type=Path, required=True)
    parser.add_argument("--staged", action="store_true")
    arguments = parser.parse_args()
    task = json.loads(arguments.task.read_text())
    if arguments.staged:
        import deepspeed

        stage_transfers()
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)

    import omnibal
    from omnibal.engine import table
    from tools.gpu.models import models

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
