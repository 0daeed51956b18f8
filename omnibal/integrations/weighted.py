"""A loss in which long answers do not outweigh short ones, as InternVL's published scripts have it."""

from collections import deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Trainer

from omnibal.data.collate import IGNORED
from omnibal.errors import ConfigError
from omnibal.integrations.packing import loss_per_target

Reduction = Literal["token", "sample", "square"]
POWERS: Final[Mapping[Reduction, float]] = MappingProxyType({"token": 0.0, "sample": 1.0, "square": 0.5})
"""A target token of a sample with n of them weighs 1 / n to this power; named as InternVL's ``loss_reduction``."""
LEAST: Final = 1e-8
"""A step without any target has no loss, rather than none that is a number."""


def check_reduction(reduction: str) -> None:
    """Refuse an unknown one.

    Raises:
        ConfigError: The message names those there are.
    """
    if reduction not in POWERS:
        raise ConfigError(f"loss_reduction must be one of {', '.join(POWERS)}, got {reduction!r}")


def token_weights(batch: Mapping[str, Any], reduction: Reduction) -> Tensor:
    """How much each token's loss counts, 0 without a target; shape (rows, tokens), as ``labels``.

    Args:
        batch: A pack, whose positions restart at each sample, or a padded batch of one sample a row.
        reduction: How.

    >>> labels = torch.tensor([[-100, 1, 2, 3, 4, -100, 5]])
    >>> batch = {"labels": labels, "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1]]), "use_cache": False}
    >>> token_weights(batch, "square").tolist()
    [[0.0, 0.5, 0.5, 0.5, 0.5, 0.0, 1.0]]
    """
    targets = batch["labels"] != IGNORED
    if "position_ids" in batch and not batch.get("use_cache", True):  # a pack; the first row tells samples apart
        text = batch["position_ids"].flatten(0, -2)[0]
        sample = (text == 0).cumsum(0)[None]
    else:
        sample = torch.arange(len(targets))[:, None].expand_as(targets)
    counts = torch.bincount(sample[targets], minlength=int(sample.max()) + 1)
    return torch.where(targets, counts[sample].clamp(min=1).double() ** -POWERS[reduction], 0.0).float()


class WeightedLoss:
    """Losses of a step's target tokens by their weights, over the sum of the weights, on all ranks and in all packs.

    Args:
        trainer: Is to train with it.
        reduction: How tokens are weighed.
    """

    def __init__(self, trainer: Trainer, reduction: Reduction) -> None:
        self._trainer, self._reduction, self._draw = trainer, reduction, trainer.get_batch_samples
        self._weights = deque[Tensor]()  # of the step's micro-batches, in their order
        vars(trainer)["get_batch_samples"] = self.draw

    def draw(self, iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """A step's micro-batches in training, and the sum of all ranks' weights in place of their tokens' number."""
        batches, _ = self._draw(iterator, num_batches, device)
        self._weights = deque(token_weights(batch, self._reduction)[:, 1:].to(device) for batch in batches)
        total = torch.stack([weights.sum() for weights in self._weights]).sum()
        if self._trainer.args.world_size > 1:
            total = self._trainer.accelerator.gather(total).sum() / self._trainer.get_tp_size()
        return batches, total

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        """In evaluation, whose batches have no weights, as ``loss_per_target``."""
        if not self._weights:
            return loss_per_target(outputs, labels, num_items_in_batch)
        weights, targets = self._weights.popleft(), labels[:, 1:]
        counted = targets != IGNORED
        losses = functional.cross_entropy(
            outputs["logits"][:, :-1][counted].float(), targets[counted], reduction="none"
        )
        loss: Tensor = (losses * weights[counted]).sum() / num_items_in_batch.clamp(min=LEAST)
        return loss
