"""A plain loop under DistributedDataParallel: torchrun --nproc-per-node 2 launch/examples/ddp.py runs/ddp."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny import ADAM, LIMITS, collate, demo, own_device
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from omnibal import PackLimits
from omnibal.integrations.loops import balanced_loader, pack_loss


def train(
    model: Any, dataset: Any, collate: Any, limits: PackLimits, folder: Path, *, epochs: int = 2, micro_batches: int = 2
) -> Iterator[Tensor]:
    """Yields this rank's part of each step's loss: their mean over ranks is the mean over the step's target tokens."""
    device = own_device()
    model = model.to(device)
    loader = balanced_loader(dataset, collate, limits, model=model, micro_batches=micro_batches)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), **ADAM)
    path = folder / "checkpoint.pt"
    if path.exists():
        saved = torch.load(path, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])

    for epoch in range(loader.epoch, epochs):
        loader.set_epoch(epoch)
        losses = []
        for batch in loader:
            ends = len(losses) == micro_batches - 1
            with nullcontext() if ends else ddp.no_sync():  # gradients meet once a step
                loss = pack_loss(ddp, batch, device=device)
                loss.backward()
            losses.append(loss.detach())
            if ends:
                optimizer.step()
                optimizer.zero_grad()
                if dist.get_rank() == 0:
                    parts = {"model": model, "optimizer": optimizer, "loader": loader}
                    torch.save({name: part.state_dict() for name, part in parts.items()}, path)
                yield torch.stack(losses).sum()
                losses = []


if __name__ == "__main__":
    own_device()
    dist.init_process_group()
    folder = Path(sys.argv[1])
    for step, loss in enumerate(train(*demo(folder), collate, LIMITS, folder)):
        print(f"rank {dist.get_rank()}, step {step}: {loss.item():.3f}")
