"""Losses of packs: of target tokens, weighed or not; of a router; and from the rows alone that predict a target."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

from omnibal.errors import ConfigError
from omnibal.formats.collate import IGNORED
from omnibal.loss import summed_loss
from omnibal.packs.collator import without_adapters

Reduction = Literal["token", "sample", "square"]
POWERS: Final[Mapping[Reduction, float]] = MappingProxyType({"token": 0.0, "sample": 1.0, "square": 0.5})
"""A target token of a sample with n targets weighs n^-power; named as InternVL's ``loss_reduction``."""
BEHIND_HEADS: Final = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Settings by which models change logits between head and loss."""


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
    return cross_entropy(outputs, labels).sum() / max(total, 1)


def cross_entropy(outputs: Any, labels: Tensor) -> Tensor:
    """Cross entropy of each target token, in the order of tokens."""
    targets = labels[:, 1:]
    counted = targets != IGNORED
    return functional.cross_entropy(outputs["logits"][:, :-1][counted].float(), targets[counted], reduction="none")


def router_loss(router_logits: Sequence[Tensor], counted: Tensor, top_k: int) -> Tensor:
    """Imbalance of experts: experts · Σ over experts (share of tokens sent · mean probability); at least ``top_k``."""
    # ``router_logits`` are (tokens, experts) of each layer, whose tokens are taken together as in transformers;
    # ``counted`` says which tokens count. Source: Fedus et al., Switch Transformers, JMLR 2022, equations 4 to 6.
    experts = router_logits[0].shape[-1]
    chosen, probability = counted.new_zeros(experts, dtype=torch.float32), router_logits[0].new_zeros(experts).float()
    for logits in router_logits:  # layer by layer: all at once would take layers x tokens x experts numbers
        probabilities = logits[counted].float().softmax(-1)
        chosen += torch.bincount(probabilities.topk(top_k).indices.flatten(), minlength=experts)
        probability = probability + probabilities.sum(0)
    rows = len(router_logits) * counted.sum()
    loss: Tensor = experts * (chosen / rows * probability / rows).sum()
    return loss


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
    labels = batch["labels"]
    # In a pack positions restart at each sample, in the first row of several; else each row is a sample.
    if "position_ids" in batch and not batch.get("use_cache", True):
        sample = (batch["position_ids"].flatten(0, -2)[0] == 0).cumsum(0)[None]
    else:
        sample = torch.arange(len(labels), device=labels.device)[:, None].expand_as(labels)
    return torch.bincount(sample[labels != IGNORED], minlength=int(sample.max()) + 1)[sample]


def target_rows(model: Any) -> None:
    """Let a model compute its training loss from target rows alone: less time in its head, and never all logits.

    Call it once, after adapters have been put into the model and before the model is wrapped or sharded. What the
    model gets and the loss it gives stay, gradients and ``num_items_in_batch`` included, so a ``Trainer`` or a loop
    goes on as it is. It gives no ``logits`` where it trains and has labels; without labels, and in evaluation, it does
    as ever. ``balance`` does the like by itself.

    Args:
        model: A causal language model or an image-text model of transformers, or peft's model of one.

    Raises:
        ConfigError: Its head, or its loss, is not one that this can stand for; in the first step where only the step
            shows it.
    """
    base = without_adapters(model)
    _check_head(base)
    rows = _TargetRows(base)
    base.loss_function = rows.loss
    base.register_forward_pre_hook(rows.begin, with_kwargs=True)
    base.register_forward_hook(rows.end)


def _check_head(model: Any) -> None:
    """Check that the loss gets what the head gives, as far as can be seen without a step."""
    from transformers import PreTrainedModel  # hosts may lack transformers
    from transformers.loss.loss_utils import ForCausalLMLoss

    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"model must be one of transformers' for target_rows, got {type(model).__name__}")
    # The names that the code of forward uses: transformers' decorators wrap it.
    name, used = type(model).__name__, inspect.unwrap(type(model).forward).__code__.co_names
    if not {"lm_head", "loss_function"} <= set(used) or not hasattr(model, "lm_head"):
        raise ConfigError(f"model must hand what lm_head gives to loss_function, got {name}, which does not")
    if "forward" in vars(model.lm_head):
        raise ConfigError("lm_head must have its own forward, got one that is replaced; call target_rows once")
    if model.loss_function is not ForCausalLMLoss:
        raise ConfigError(f"loss_function must be transformers' ForCausalLMLoss, got {model.loss_function} of {name}")
    for config in (model.config, model.config.get_text_config()):
        for setting in BEHIND_HEADS:
            value = getattr(config, setting, None)
            if value not in (None, 1, 1.0):
                raise ConfigError(f"{setting} must be None or 1, got {value}; {name} changes logits behind its head")


class HeadOnTargets:
    """Takes the place of a model's head: where there are targets, it gives the sum of their losses for logits.

    Args:
        targets: Called with each forward pass of the head: (the token that each row predicts, ``IGNORED`` for none,
            shape (batch, tokens); how much each counts, or None for once), or None for logits as ever.
    """

    def __init__(self, model: Any, targets: Callable[[], tuple[Tensor, Tensor | None] | None]) -> None:
        self._head, self._logits, self._targets = model.lm_head, model.lm_head.forward, targets
        self._given: tuple[int, int] | None = None  # (data_ptr, version) of the sum that was given last
        self.is_used = False  # whether the output that ``look`` saw last has such a sum for its logits
        vars(model.lm_head)["forward"] = self

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits, or the sum of losses as logits of one row and one word."""
        targets, self._given = self._targets(), None
        if targets is None:
            logits: Tensor = self._logits(hidden)
            return logits
        labels = targets[0].to(hidden.device)
        if hidden.shape[:-1] != labels.shape:
            raise ConfigError(
                f"labels must be of all rows, {tuple(hidden.shape[:-1])}, got {tuple(labels.shape)}; "
                "leave logits_to_keep out"
            )
        wanted = labels != IGNORED
        weights = None if targets[1] is None else targets[1].to(hidden.device)[wanted]
        parameters = list(self._head.parameters())
        loss = summed_loss(self._logits, parameters, hidden[wanted], labels[wanted], weights).view(1, 1, 1)
        self._given = loss.data_ptr(), loss._version
        return loss

    def has_given(self, logits: Any) -> bool:
        """Whether logits are a sum of losses; refuses logits that were changed since the head gave a sum."""
        if self._given is None:
            return False
        if not isinstance(logits, Tensor) or (logits.data_ptr(), logits._version) != self._given:
            raise ConfigError("lm_head's logits must reach the loss unchanged under target_rows, got changed ones")
        return True

    def look(self, model: Any, args: tuple[Any, ...], output: Any) -> None:
        self.is_used = self.has_given(getattr(output, "logits", None))


@contextmanager
def head_on_targets(model: Any, targets: tuple[Tensor, Tensor | None]) -> Iterator[HeadOnTargets]:
    """Within the block, a model's head gives the sum of its targets' losses; then the model is what it was."""
    # ``is_used`` of the head tells, when the model's forward pass is done, whether the output's logits are that sum.
    own = vars(model.lm_head)
    before = {name: value for name, value in own.items() if name == "forward"}
    head = HeadOnTargets(model, lambda: targets)
    # prepend: before other hooks, which may copy the output.
    seen = model.register_forward_hook(head.look, prepend=True)
    try:
        yield head
    finally:
        seen.remove()
        del own["forward"]
        own.update(before)


class _TargetRows:
    """Takes labels to the head, and the sum from the head to the loss, in each forward pass of a model."""

    def __init__(self, model: Any) -> None:
        self._signature, self._plain_loss = inspect.signature(type(model).forward), model.loss_function
        self._labels: Tensor | None = None
        self._is_used = False
        self._head = HeadOnTargets(model, self._targets)

    def _targets(self) -> tuple[Tensor, None] | None:
        # No lambda in __init__: a copy of the model would share it with the original.
        return None if self._labels is None else (self._labels, None)

    def begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook before the model's forward pass: keep its labels, shifted."""
        given = self._signature.bind_partial(model, *args, **kwargs).arguments
        given |= given.get("kwargs", {})
        labels, self._labels, self._is_used = given.get("labels"), None, False
        if labels is None or not model.training or not torch.is_grad_enabled():
            return
        shifted = given.get("shift_labels")
        self._labels = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:] if shifted is None else shifted

    def loss(
        self, logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **options: Any
    ) -> Tensor:
        """In the place of the model's loss, which stays where the head gave logits."""
        if self._labels is None or not self._head.has_given(logits):
            plain: Tensor = self._plain_loss(logits, labels, vocab_size, num_items_in_batch, **options)
            return plain
        if options.get("ignore_index", IGNORED) != IGNORED:
            raise ConfigError(f"ignore_index must be {IGNORED} under target_rows, got {options['ignore_index']}")
        self._is_used = True
        total = (self._labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return logits.sum() / (total.to(logits.device) if isinstance(total, Tensor) else total)

    def end(self, model: Any, args: tuple[Any, ...], output: Any) -> Any:
        """Hook behind the model's forward pass: drop the sum that stands for logits from the output."""
        if self._labels is None:
            return None
        self._labels = None
        if not self._is_used or not isinstance(output, dict):
            raise ConfigError(
                "model must compute its loss by loss_function from lm_head, and return a dict, under target_rows, "
                f"got {type(output).__name__} of {type(model).__name__}"
            )
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})
