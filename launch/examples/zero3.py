"""deepspeed.initialize with ZeRO 3: deepspeed --num_gpus 2 launch/examples/zero3.py runs/zero3."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from tiny import ADAM, LIMITS, collate, demo, own_device
from torch import Tensor

from omnibal import PackLimits
from omnibal.integrations.loops import balanced_loader, pack_loss


def train(
    model: Any, dataset: Any, collate: Any, limits: PackLimits, folder: Path, *, epochs: int = 2, micro_batches: int = 2
) -> Iterator[Tensor]:
    """Yields this rank's part of each step's loss: their mean over ranks is the mean over the step's target tokens."""
    device = own_device()
    loader = balanced_loader(dataset, collate, limits, model=model, micro_batches=micro_batches)
    config = {
        "train_micro_batch_size_per_gpu": 1,  # packs
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": device.type == "cuda"},
    }
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if (folder / "latest").exists():
        _, saved = engine.load_checkpoint(str(folder))
        loader.load_state_dict(saved["loader"])

    for epoch in range(loader.epoch, epochs):
        loader.set_epoch(epoch)
        losses = []
        for batch in loader:
            ends = engine.is_gradient_accumulation_boundary()
            loss = pack_loss(engine, batch, device=device)
            engine.backward(loss * micro_batches)  # it divides by them
            engine.step()
            losses.append(loss.detach())
            if ends:
                engine.save_checkpoint(str(folder), client_state={"loader": loader.state_dict()})
                yield torch.stack(losses).sum()
                losses = []


if __name__ == "__main__":
    own_device()
    deepspeed.init_distributed()
    folder = Path(sys.argv[1])
    for step, loss in enumerate(train(*demo(folder), collate, LIMITS, folder)):
        print(f"rank {dist.get_rank()}, step {step}: {loss.item():.3f}")
