"""A loop with Accelerate: accelerate launch --num_processes 2 launch/examples/accelerate_loop.py runs/accelerate."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tiny import ADAM, LIMITS, collate, demo
from torch import Tensor

from omnibal import PackLimits
from omnibal.integrations.loops import balanced_loader, pack_loss


def train(
    model: Any, dataset: Any, collate: Any, limits: PackLimits, folder: Path, *, epochs: int = 2, micro_batches: int = 2
) -> Iterator[Tensor]:
    """Yields this rank's part of each step's loss: their mean over ranks is the mean over the step's target tokens."""
    accelerator = Accelerator(gradient_accumulation_steps=micro_batches)
    loader = balanced_loader(dataset, collate, limits, model=model, micro_batches=micro_batches)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # the loader stays as it is
    accelerator.register_for_checkpointing(loader)
    path = folder / "checkpoint"
    if path.exists():
        accelerator.load_state(str(path))

    for epoch in range(loader.epoch, epochs):
        loader.set_epoch(epoch)
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = pack_loss(model, batch, device=accelerator.device)
                accelerator.backward(loss * micro_batches)  # it divides by them
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            if accelerator.sync_gradients:
                accelerator.save_state(str(path))
                yield torch.stack(losses).sum()
                losses = []


if __name__ == "__main__":
    Accelerator()  # ranks meet
    folder = Path(sys.argv[1])
    for step, loss in enumerate(train(*demo(folder), collate, LIMITS, folder)):
        print(f"rank {Accelerator().process_index}, step {step}: {loss.item():.3f}")
