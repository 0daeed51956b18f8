"""The evaluation loss of a transformers.Trainer on several ranks, where transformers' own counts some ranks twice.

If a model accepts ``num_items_in_batch``, transformers 5.23 evaluates a batch to ranks · (sum of its losses) / (target
tokens of all ranks' batches), and then drops the ranks' repeated samples. The mean is right only where the held-out set
divides by ranks times batch; a model that ignores ``num_items_in_batch`` (Qwen2-Audio) gets ranks times its loss.
"""

from math import isfinite
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch import Tensor

from omnibal.formats.collate import IGNORED
from omnibal.integrations.trainer.settings import layout_of, replicas_of

TARGETS = ("labels", "shift_labels")
"""Fields of a batch that name target tokens; ``shift_labels``, if given, are what the loss takes."""


class ExactEvaluation:
    """Lets a Trainer's ``evaluate`` and ``predict`` report Σ loss / Σ target tokens, each held-out sample once."""

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
        rank, num_replicas = replicas_of(self._trainer)
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
        if layout_of(self._trainer) == "ddp" and self._trainer.model_wrapped is model:
            # Marked so by an evaluation, Accelerate would not wrap the model to train, and ranks would train apart.
            vars(model).pop("_is_accelerate_prepared", None)
        own = torch.tensor([[self._loss, self._targets]], dtype=torch.float64, device=self._trainer.args.device)
        loss, targets = self._trainer.accelerator.gather(own).sum(0).tolist()
        if targets:
            output.metrics[f"{options.get('metric_key_prefix', 'eval')}_loss"] = loss / targets
        return output
