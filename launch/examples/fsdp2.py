"""A plain loop under FSDP2 (fully_shard): torchrun --nproc-per-node 2 launch/examples/fsdp2.py runs/fsdp2."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny import ADAM, LIMITS, collate, demo, own_device
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from omnibal import PackLimits
from omnibal.integrations.loops import balanced_loader, pack_loss


def train(
    model: Any, dataset: Any, collate: Any, limits: PackLimits, folder: Path, *, epochs: int = 2, micro_batches: int = 2
) -> Iterator[Tensor]:
    """Yields this rank's part of each step's loss: their mean over ranks is the mean over the step's target tokens."""
    device = own_device()
    model = model.to(device)
    loader = balanced_loader(dataset, collate, limits, model=model, micro_batches=micro_batches)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in model.modules():
        if type(module).__name__ in model._no_split_modules:  # transformer layers, of the ViT and of the LLM
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    path = folder / "checkpoint"
    if path.exists():
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments, "loader": loader}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

    for epoch in range(loader.epoch, epochs):
        loader.set_epoch(epoch)
        losses = []
        for batch in loader:
            ends = len(losses) == micro_batches - 1
            model.set_requires_gradient_sync(ends)  # gradients meet once a step
            loss = pack_loss(model, batch, device=device)
            loss.backward()
            losses.append(loss.detach())
            if ends:
                optimizer.step()
                optimizer.zero_grad()
                weights, moments = get_state_dict(model, optimizer)
                dcp.save({"model": weights, "optimizer": moments, "loader": loader}, checkpoint_id=path)
                yield torch.stack(losses).sum()
                losses = []


if __name__ == "__main__":
    own_device()
    dist.init_process_group()
    folder = Path(sys.argv[1])
    for step, loss in enumerate(train(*demo(folder), collate, LIMITS, folder)):
        print(f"rank {dist.get_rank()}, step {step}: {loss.item():.3f}")
