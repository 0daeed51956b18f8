"""The loss of a step, exact over all of its packs: of target tokens, weighed or not, and of a router."""

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from packaging.version import Version
from torch import Tensor
from torch.nn import functional

from omnibal.errors import ConfigError
from omnibal.formats.collate import IGNORED
from omnibal.packs.collator import FAMILIES, vary_lengths

Reduction = Literal["token", "sample", "square"]
POWERS: Final[Mapping[Reduction, float]] = MappingProxyType({"token": 0.0, "sample": 1.0, "square": 0.5})
"""A target token of a sample with n targets weighs n^-power; named as InternVL's ``loss_reduction``."""
ROUTED: Final = ("qwen3_vl_moe",)  # model types whose router's loss is known to be router_loss
SFT_FLOOR: Final = "1.16"  # the oldest TRL in the tests: its loss is called with the target tokens of the whole step
LEAST: Final = 1e-8  # divisor of a step without any target, whose loss is then 0 rather than not a number


def loss_per_target(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Cross entropy of all target tokens over their number in the whole step: what Trainer calls ``compute_loss_func``.

    Args:
        num_items_in_batch: Target tokens of all ranks and micro-batches of the step; by default those at hand.
    """
    if outputs.get("aux_loss") is not None:
        raise ConfigError(
            "output_router_logits must be False where the loss is that of the tokens alone, got True; "
            "omnibal.integrations.transformers.balance adds the router's"
        )
    total = (labels[:, 1:] != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    return _cross_entropy(outputs, labels).sum() / max(total, 1)


def _cross_entropy(outputs: Any, labels: Tensor) -> Tensor:
    """Cross entropy of each target token, in the order of tokens."""
    targets = labels[:, 1:]
    counted = targets != IGNORED
    return functional.cross_entropy(outputs["logits"][:, :-1][counted].float(), targets[counted], reduction="none")


def router_loss(router_logits: Sequence[Tensor], counted: Tensor, top_k: int) -> Tensor:
    """Imbalance of experts: experts · Σ over experts (share of tokens sent · mean probability); at least ``top_k``.

    ``router_logits`` are (tokens, experts) of each layer, whose tokens are taken together as in transformers;
    ``counted`` says which tokens count. Source: Fedus et al., Switch Transformers, JMLR 2022, equations 4 to 6.
    """
    experts = router_logits[0].shape[-1]
    chosen, probability = counted.new_zeros(experts, dtype=torch.float32), router_logits[0].new_zeros(experts).float()
    for logits in router_logits:  # layer by layer: all at once would take layers x tokens x experts numbers
        probabilities = logits[counted].float().softmax(-1)
        chosen += torch.bincount(probabilities.topk(top_k).indices.flatten(), minlength=experts)
        probability = probability + probabilities.sum(0)
    rows = len(router_logits) * counted.sum()
    loss: Tensor = experts * (chosen / rows * probability / rows).sum()
    return loss


def sample_of_tokens(batch: Mapping[str, Any]) -> Tensor:
    """The number of the sample that each token belongs to, shape (rows, tokens), as ``labels``."""
    rows = batch["labels"]
    # In a pack positions restart at each sample, in the first row of several; else each row is a sample.
    if "position_ids" in batch and not batch.get("use_cache", True):
        text = batch["position_ids"].flatten(0, -2)[0]
        starts: Tensor = text == 0
        return starts.cumsum(0)[None]
    return torch.arange(len(rows), device=rows.device)[:, None].expand_as(rows)


def token_weights(batch: Mapping[str, Any], reduction: Reduction) -> Tensor:
    """How much each token's loss counts, 0 without a target; shape (rows, tokens), as ``labels``.

    >>> labels = torch.tensor([[-100, 1, 2, 3, 4, -100, 5]])
    >>> batch = {"labels": labels, "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1]]), "use_cache": False}
    >>> token_weights(batch, "square").tolist()
    [[0.0, 0.5, 0.5, 0.5, 0.5, 0.0, 1.0]]
    """
    counts = _targets_of_sample(batch)
    weights = counts.clamp(min=1).double() ** -POWERS[reduction]
    return torch.where(batch["labels"] != IGNORED, weights, 0.0).float()


def routed_tokens(batch: Mapping[str, Any]) -> Tensor:
    """Which tokens count in a router's loss: those of samples with a target, so neither fillers' nor padding's.

    >>> labels = torch.tensor([[-100, 1, -100, -100]])
    >>> batch = {"labels": labels, "position_ids": torch.tensor([[0, 1, 0, 1]]), "use_cache": False}
    >>> routed_tokens(batch).tolist()
    [[True, True, False, False]]
    """
    counted, mask = _targets_of_sample(batch) > 0, batch.get("attention_mask")
    return counted if mask is None else counted & mask.bool()


def _targets_of_sample(batch: Mapping[str, Any]) -> Tensor:
    """For each token, how many targets its sample has; shape (rows, tokens)."""
    sample = sample_of_tokens(batch)
    return torch.bincount(sample[batch["labels"] != IGNORED], minlength=int(sample.max()) + 1)[sample]


def works_on_targets(trainer: Any) -> bool:
    """Whether the head of a transformers.Trainer's model works on target rows alone under ``StepLoss``."""
    # A compiled graph cannot hold gradients that are made in a forward pass; a tensor-parallel rank has a part of the
    # words and knows no loss; of models outside of FAMILIES nobody has shown that the loss gets what the head gives;
    # Gemma 4 bounds it before.
    config = trainer.accelerator.unwrap_model(trainer.model).config
    known = config.model_type in FAMILIES and getattr(config.get_text_config(), "final_logit_softcapping", None) is None
    return not trainer.args.torch_compile and trainer.get_tp_size() == 1 and known


def keeps_sft_loss(trainer: Any) -> bool:
    """Whether a trainer is TRL's SFTTrainer with its own loss, which divides by the target tokens of the step."""
    module = sys.modules.get("trl.trainer.sft_trainer")  # not imported for trainers of other kinds
    if module is None or not isinstance(trainer, module.SFTTrainer):
        return False
    methods = ("compute_loss", "training_step", "log")
    is_own = all(getattr(type(trainer), name) is getattr(module.SFTTrainer, name) for name in methods)
    # Older versions hand the loss to the model.
    return is_own and Version(version("trl")) >= Version(SFT_FLOOR)


class StepLoss:
    """The loss of a transformers.Trainer's step: Σ weight · loss / Σ weight over target tokens of all ranks and packs.

    A router's loss is that of each pack, times the pack's share of the step's tokens that count. It is not taken over
    the whole step: the first backward pass would wait for the last forward pass.
    """

    def __init__(self, trainer: Any, reduction: Reduction) -> None:
        if reduction not in POWERS:
            raise ConfigError(f"loss_reduction must be one of {', '.join(POWERS)}, got {reduction!r}")
        config = trainer.accelerator.unwrap_model(trainer.model).config
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
        from omnibal.packs.target_rows import base_of, head_on_targets  # hosts may lack transformers

        base = base_of(self._trainer.accelerator.unwrap_model(self._trainer.model))
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
        losses = outputs["logits"] if sums else _cross_entropy(outputs, labels) * weights
        loss: Tensor = losses.sum() / num_items_in_batch.clamp(min=LEAST)
        if self.routes:
            counted = self._routed.popleft()
            if counted.any():
                share = counted.sum() / self._routed_of_step
                loss = loss + self._factor * share * router_loss(outputs["router_logits"], counted, self._top_k)
        return loss
