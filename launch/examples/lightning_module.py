"""Lightning with a module and a data module: python launch/examples/lightning_module.py runs/lightning."""

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import ADAM, LIMITS, collate, demo
from torch import Tensor

from omnibal import PackLimits
from omnibal.integrations.loops import balanced_loader, pack_loss


class Module(lightning.LightningModule):
    """A vision-language model that trains on packs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Any], _: int) -> Tensor:
        """The loss of a pack."""
        loss = pack_loss(self.model, batch)
        self.log("loss", loss, reduce_fx="sum")
        return loss * self.trainer.accumulate_grad_batches  # Lightning divides by them

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Of all parameters."""
        return torch.optim.AdamW(self.parameters(), **ADAM)


class Data(lightning.LightningDataModule):
    """Balanced packs. Lightning tells them the epoch, and saves where they stand with its checkpoints."""

    def __init__(self, dataset: Any, collate: Any, limits: PackLimits) -> None:
        super().__init__()
        self.given = dataset, collate, limits

    def train_dataloader(self) -> Any:
        """This rank's packs."""
        assert self.trainer is not None
        micro_batches = self.trainer.accumulate_grad_batches
        return balanced_loader(*self.given, model=self.trainer.lightning_module.model, micro_batches=micro_batches)


def train(
    model: Any,
    dataset: Any,
    collate: Any,
    limits: PackLimits,
    folder: Path,
    *,
    epochs: int = 2,
    micro_batches: int = 2,
    max_steps: int = -1,
    **options: Any,
) -> None:
    """Goes on from the last checkpoint in the folder, if there is one."""
    trainer = lightning.Trainer(
        default_root_dir=folder,
        max_epochs=epochs,
        max_steps=max_steps,
        accumulate_grad_batches=micro_batches,
        use_distributed_sampler=False,  # packs are each rank's already
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=1, save_last=True, save_top_k=0)],
        log_every_n_steps=1,
        **options,
    )
    trainer.fit(Module(model), Data(dataset, collate, limits), ckpt_path="last")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    train(*demo(folder), collate, LIMITS, folder, devices=2, strategy="ddp")
