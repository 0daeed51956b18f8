"""The loss of a transformers.Trainer: of a step, exact over all of its packs; of an evaluation, each sample once."""

from collections import deque
from collections.abc import Iterator
from itertools import zip_longest
from math import isfinite
from typing import Any, Final

import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch import Tensor
from torch.nn import functional

from omnibal.errors import ConfigError
from omnibal.formats.collate import IGNORED
from omnibal.integrations.trainer.settings import data_rank_of, keeps_sft_loss, model_of, sharding_of, works_on_targets
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
TARGETS = ("labels", "shift_labels")
"""Fields of a batch that name target tokens; ``shift_labels``, if given, are what the loss takes."""


class StepLoss:
    """The loss of a transformers.Trainer's step: Σ weight · loss / Σ weight over target tokens of all ranks and packs.

    A router's loss is that of each pack, times the pack's share of the step's tokens that count. It is not taken over
    the whole step: the first backward pass would wait for the last forward pass.
    """

    def __init__(self, trainer: Any, reduction: Reduction) -> None:
        if reduction not in POWERS:
            raise ConfigError(f"loss_reduction must be one of {', '.join(POWERS)}, got {reduction!r}")
        config = model_of(trainer).config
        text = config.get_text_config()
        self.routes = bool(getattr(text, "output_router_logits", False))
        self._keeps_loss = keeps_sft_loss(trainer)
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
        self._trainer, self._reduction = trainer, reduction
        self._draw, self._compute = trainer.get_batch_samples, trainer.compute_loss
        # Filled by draw, a tensor for each micro-batch of the step, and emptied by the loss in the same order.
        self._weights, self._routed = deque[Tensor](), deque[Tensor]()
        self._routed_of_step = torch.zeros(())
        self._tokens = 0  # of all steps that were drawn, on all ranks
        self._head: Any = None  # of the micro-batch that is computed, where it works on target rows alone

    def install(self) -> None:
        """Let the trainer train with this loss."""
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
        if not works_on_targets(self._trainer):
            return self._compute(model, inputs, *others, **options)
        base = without_adapters(model_of(self._trainer))
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


class ExactEvaluation:
    """Lets a Trainer's ``evaluate`` and ``predict`` report Σ loss / Σ target tokens, each held-out sample once.

    If a model accepts ``num_items_in_batch``, transformers 5.23 evaluates a batch to ranks · (sum of its losses) /
    (target tokens of all ranks' batches), and then drops the ranks' repeated samples. The mean is right only if the
    held-out set divides by ranks times batch; a model that ignores ``num_items_in_batch`` (Qwen2-Audio) gets ranks
    times its loss.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._predict, self._loop = trainer.prediction_step, trainer.evaluation_loop
        self._loss, self._targets = 0.0, 0  # of this rank's batches

    def install(self) -> None:
        vars(self._trainer).update(prediction_step=self.prediction_step, evaluation_loop=self.evaluation_loop)

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """In the place of Trainer's: the mean over a batch's own targets, without samples that are there twice."""
        trainer = self._trainer
        if not trainer.model_accepts_loss_kwargs or "labels" not in inputs:  # neither counted nor scaled
            return self._predict(model, inputs, *args, **options)
        inputs = {**inputs, **self._without_repeats(inputs)}
        counted = inputs.get("shift_labels", inputs["labels"][..., 1:])
        targets = int((counted != IGNORED).sum())
        # Without either of these two, Trainer asks the model for its mean over the batch at hand.
        asked = {name: getattr(trainer, name) for name in ("model_accepts_loss_kwargs", "compute_loss_func")}
        trainer.model_accepts_loss_kwargs, trainer.compute_loss_func = False, None
        try:
            found = self._predict(model, inputs, *args, **options)
        finally:
            for name, value in asked.items():
                setattr(trainer, name, value)
        loss = float(found[0])
        if targets and (isfinite(loss) or not trainer.args.logging_nan_inf_filter):  # as Trainer takes its mean
            self._loss, self._targets = self._loss + loss * targets, self._targets + targets
        return found

    def _without_repeats(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """The targets of a batch, none of rows that Accelerate repeats so that the last batches are even."""
        state = self._trainer.accelerator.gradient_state
        if not (state.in_dataloader and state.end_of_dataloader and state.remainder > 0):
            return {}
        # gather_for_metrics keeps the first samples of all ranks' batches, rank after rank.
        rank, num_replicas = data_rank_of(self._trainer)
        if isinstance(state.active_dataloader, DataLoaderDispatcher):  # its last batches may be smaller on all ranks
            share = len(inputs["labels"])
        else:
            share = state.active_dataloader.total_batch_size // num_replicas
        kept = min(max(state.remainder - rank * share, 0), share)
        found = {}
        for name in TARGETS:
            if name in inputs and (len(inputs[name]) == share or kept == 0):  # else rows are no samples
                found[name] = inputs[name].clone()
                found[name][kept:] = IGNORED
        return found

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """In the place of Trainer's; metrics but the loss are Trainer's own."""
        self._loss, self._targets = 0.0, 0
        output = self._loop(*args, **options)
        model = self._trainer.model
        if sharding_of(self._trainer) == "ddp" and self._trainer.model_wrapped is model:
            # Marked so by an evaluation, Accelerate would not wrap the model to train, and ranks would train apart.
            vars(model).pop("_is_accelerate_prepared", None)
        own = torch.tensor([[self._loss, self._targets]], dtype=torch.float64, device=self._trainer.args.device)
        loss, targets = self._trainer.accelerator.gather(own).sum(0).tolist()
        if targets:
            output.metrics[f"{options.get('metric_key_prefix', 'eval')}_loss"] = loss / targets
        return output
