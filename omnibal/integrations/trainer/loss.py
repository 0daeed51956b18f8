"""The loss of a transformers.Trainer's step: the mean over all of its target tokens, on all ranks and in all packs."""

from collections import deque
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from omnibal.errors import ConfigError
from omnibal.formats.collate import IGNORED
from omnibal.integrations.trainer.settings import TrainerSettings, model_of
from omnibal.packs.collator import vary_lengths, without_adapters
from omnibal.packs.losses import (
    POWERS,
    Reduction,
    cross_entropy,
    head_on_targets,
    routed_tokens,
    router_loss,
    token_weights,
)

ROUTED: Final = ("qwen3_vl_moe",)
"""Model types whose router's loss is known to be ``router_loss``."""
LEAST: Final = 1e-8
"""Divisor of a step without any target, whose loss is then 0 rather than not a number."""


class StepLoss:
    """The loss of a Trainer's step: Σ weight · loss / Σ weight over target tokens of all ranks and packs."""

    # A router's loss is that of each pack, times the pack's share of the step's tokens that count. It is not taken over
    # the whole step: the first backward pass would wait for the last forward pass.

    def __init__(self, trainer: Any, settings: TrainerSettings, reduction: Reduction) -> None:
        if reduction not in POWERS:
            raise ConfigError(f"loss_reduction must be one of {', '.join(POWERS)}, got {reduction!r}")
        config = settings.model.config
        text = config.get_text_config()
        self.routes = bool(getattr(text, "output_router_logits", False))
        self._keeps_loss = settings.keeps_sft_loss
        if self._keeps_loss and (self.routes or reduction != "token"):
            name, found = ("loss_reduction", reduction) if reduction != "token" else ("output_router_logits", True)
            expected = "'token'" if reduction != "token" else "False (router_aux_loss_coef=0)"
            raise ConfigError(f"{name} must be {expected} for an SFTTrainer, which keeps its own loss, got {found!r}")
        if self.routes:
            if config.model_type not in ROUTED:
                raise ConfigError(
                    f"output_router_logits must be False for a model_type other than {', '.join(ROUTED)}, got True for "
                    f"{config.model_type!r}; nobody has shown that its router's loss is the one of Switch Transformers"
                )
            self._top_k, self._factor = text.num_experts_per_tok, text.router_aux_loss_coef
        self._trainer, self._settings, self._reduction = trainer, settings, reduction
        self._draw, self._compute = trainer.get_batch_samples, trainer.compute_loss
        # Filled by draw, a tensor for each micro-batch of the step, and emptied by the loss in the same order.
        self._weights, self._routed = deque[Tensor](), deque[Tensor]()
        self._routed_of_step = torch.zeros(())
        self._tokens = 0  # of all steps that were drawn, on all ranks
        self._head: Any = None  # of the micro-batch that is computed, where it works on target rows alone

    def install(self) -> None:
        vars(self._trainer).update(get_batch_samples=self.draw, compute_loss=self.compute)
        if self._keeps_loss:
            self._trainer.loss_is_scaled_for_ga = True  # by the target tokens of the step
        else:
            self._trainer.compute_loss_func = self

    def compute(self, model: Any, inputs: dict[str, Any], *others: Any, **options: Any) -> Any:
        """In the place of ``compute_loss``: in training the model's head works on target rows alone, if it can."""
        if self._trainer.args.torch_compile:
            vary_lengths(inputs)
        if self._keeps_loss:
            loss = self._compute(model, inputs, *others, **options)
            if self._trains():  # SFTTrainer counts a token once where its positions have several rows
                self._trainer._total_train_tokens = self._tokens
                self._trainer._metrics["train"]["num_tokens"] = [self._tokens]
            return loss
        if not self._trains():
            self._trainer.compute_loss_func = None  # evaluation is Trainer's own, with the model's own loss
            try:
                return self._compute(model, inputs, *others, **options)
            finally:
                self._trainer.compute_loss_func = self
        if not self._settings.on_targets:
            return self._compute(model, inputs, *others, **options)
        base = without_adapters(model_of(self._trainer))  # a search of hyperparameters makes new models
        weights = None if self._reduction == "token" else functional.pad(self._weights[0], (0, 1))
        targets = functional.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED), weights
        # Outside of the block the model is what it was: to be copied, saved, evaluated or given to another trainer.
        with head_on_targets(base, targets) as self._head:
            return self._compute(model, inputs, *others, **options)

    def _trains(self) -> bool:
        # Trainer may evaluate within a step, or end before all micro-batches that were drawn are computed.
        return bool(self._weights) and torch.is_grad_enabled()

    def draw(self, iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """In the place of ``get_batch_samples``: a step's micro-batches, and Σ weight of all ranks as their tokens."""
        batches, _ = self._draw(iterator, num_batches, device)
        self._weights = deque(token_weights(batch, self._reduction)[:, 1:].to(device) for batch in batches)
        self._routed = deque(routed_tokens(batch).flatten().to(device) for batch in batches if self.routes)
        tokens = [batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum() for batch in batches]
        totals = torch.zeros(3, device=device)
        for step in zip_longest(self._weights, self._routed, tokens, fillvalue=totals.new_zeros(())):
            totals += torch.stack([of_batch.sum().to(device) for of_batch in step])
        if self._trainer.args.world_size > 1:
            totals = self._trainer.accelerator.gather(totals[None]).sum(0) / self._trainer.get_tp_size()
        total, self._routed_of_step, tokens_of_step = totals
        self._tokens += int(tokens_of_step)
        return batches, total

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        """In the place of ``compute_loss_func``, in training."""
        weights, head = self._weights.popleft()[labels[:, 1:] != IGNORED], self._head
        sums = head is not None and head.is_used
        losses = outputs["logits"] if sums else cross_entropy(outputs, labels) * weights
        loss: Tensor = losses.sum() / num_items_in_batch.clamp(min=LEAST)
        if self.routes:
            counted = self._routed.popleft()
            if counted.any():
                share = counted.sum() / self._routed_of_step
                loss = loss + self._factor * share * router_loss(outputs["router_logits"], counted, self._top_k)
        return loss
