"""The loss of next-token prediction from the rows that predict a target, and what held-out packs are judged by.

Logits are made a chunk of rows at a time, and with them the gradients, while they are there: nothing that has a number
for every token and every word is ever kept.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from omnibal.formats.collate import IGNORED
from omnibal.memory.footprint import LOSS_ROWS

# Sums over held-out packs: of losses; target tokens; samples whose every target is the likeliest token; samples.
EVALUATION_STATISTICS = ("loss", "target_tokens", "exact_samples", "samples")
LogitsOf = Callable[[Tensor], Tensor]  # from rows (rows, width) to logits (rows, vocab), each row by itself


class Vocabulary:
    """The words that a head has logits of: here all of them. Logits are (rows, words), targets (rows,)."""

    def log_probabilities(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the head's words in float32, and of each row's target, (rows, 1)."""
        logs = functional.log_softmax(logits, -1, dtype=torch.float32)
        return logs, logs.gather(1, targets[:, None])

    def gradient(self, logs: Tensor, targets: Tensor, chosen: Tensor) -> Tensor:
        """The loss's gradient of the logits, from ``log_probabilities``, in the memory of ``logs``."""
        # The probabilities, less one for the target.
        return logs.exp_().scatter_(1, targets[:, None], chosen.expm1())

    def likeliest(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)


WHOLE: Final = Vocabulary()


def targets_of(labels: Tensor) -> dict[str, Tensor]:
    """What the last layer needs to know of labels, (1, tokens), which are shifted here and nowhere else.

    ``target_rows`` are the rows that predict a target, ascending, ``targets`` the tokens that they should predict; both
    are (targets,), int64. Labels are ``IGNORED`` where there is no target.

    >>> targets_of(torch.tensor([[-100, 7, -100, 9]]))
    {'target_rows': tensor([0, 2]), 'targets': tensor([7, 9])}
    """
    # Since each sample's first label is IGNORED, no sample predicts the next one's first token. On a GPU the host waits
    # here to learn how many targets there are.
    rows = torch.where(labels[0, 1:] != IGNORED)[0]
    return {"target_rows": rows, "targets": labels[0, rows + 1]}


def summed_loss(
    head: LogitsOf,
    parameters: Sequence[nn.Parameter],
    rows: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> Tensor:
    """Sum of the cross entropies of rows (targets, width), as of plain logits in float32; 0 of no rows.

    ``parameters`` are those of the head; ``weights`` are those of the rows' losses, by default 1.
    """
    # Where gradients are wanted, they are computed here, of the sum; the backward pass only scales them. That takes
    # three products where a backward pass that makes the logits again takes four, and a stage of a pipeline that ends
    # with a loss runs backward right after it ran forward.
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (rows, *parameters))):
        judged = (vocabulary.log_probabilities(head(part), wanted)[1] for part, wanted in _chunks(rows, targets))
        chosen = torch.cat([logs[:, 0] for logs in judged])
        return -(chosen if weights is None else chosen * weights).sum()
    total: Tensor = _SummedLoss.apply(head, vocabulary, targets, weights, rows, *parameters)  # type: ignore[no-untyped-call]
    return total


def evaluation_statistics(
    head: LogitsOf, rows: Tensor, integers: Mapping[str, Tensor], vocabulary: Vocabulary = WHOLE
) -> Tensor:
    """EVALUATION_STATISTICS of a pack, a float64 vector; ``integers`` are its ``targets_of`` and sample bounds."""
    # A sample is exact if greedy decoding would give its answer: each target token is then predicted from a prefix that
    # greedy decoding would have produced itself.
    places, targets, bounds = (integers[name] for name in ("target_rows", "targets", "cu_seq_lens"))
    loss, wrong = torch.zeros((), device=rows.device), []
    for part, wanted in _chunks(rows, targets):
        logits = head(part)
        loss = loss - vocabulary.log_probabilities(logits, wanted)[1].sum()
        wrong.append(vocabulary.likeliest(logits) != wanted)
    # The sample that each target belongs to: it stands one behind the row that predicts it.
    sample = torch.bucketize(places + 1, bounds[1:], right=True)
    targets_in = torch.zeros(len(bounds) - 1, dtype=torch.int64, device=rows.device)
    wrong_in = targets_in.index_add(0, sample, torch.cat(wrong).long())
    targets_in = targets_in.index_add(0, sample, torch.ones_like(sample))
    counted = targets_in > 0
    sums = (loss, targets_in.sum(), (counted & (wrong_in == 0)).sum(), counted.sum())
    return torch.stack([value.double() for value in sums])


def _chunks(rows: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(torch.split(rows, LOSS_ROWS), torch.split(targets, LOSS_ROWS), strict=True))


class _SummedLoss(torch.autograd.Function):
    """Takes everything that may want a gradient as an argument, and has all gradients when the forward pass ends."""

    @staticmethod
    def forward(
        context: Any,
        head: LogitsOf,
        vocabulary: Vocabulary,
        targets: Tensor,
        weights: Tensor | None,
        rows: Tensor,
        *parameters: nn.Parameter,
    ) -> Tensor:
        total, by_chunk = torch.zeros((), device=rows.device), []
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        sums: list[Tensor] = []
        factors = torch.ones_like(targets, dtype=torch.float32) if weights is None else weights
        for (part, wanted), factor in zip(_chunks(rows, targets), torch.split(factors, LOSS_ROWS), strict=True):
            leaf = part.detach().requires_grad_(rows.requires_grad)
            with torch.enable_grad():
                logits = head(leaf)
            logs, chosen = vocabulary.log_probabilities(logits.detach(), wanted)
            total -= (chosen[:, 0] * factor).sum()
            gradient = vocabulary.gradient(logs, wanted, chosen)
            if weights is not None:
                gradient *= factor[:, None]
            leaves = [leaf, *trained] if rows.requires_grad else trained
            found = list(torch.autograd.grad(logits, leaves, gradient.to(logits.dtype)))
            if rows.requires_grad:
                by_chunk.append(found.pop(0))
            sums = [before.add_(now) for before, now in zip(sums, found, strict=True)] if sums else found
        context.wanted = [rows.requires_grad, *(parameter.requires_grad for parameter in parameters)]
        of_rows = by_chunk if len(by_chunk) < 2 else [torch.cat(by_chunk)]
        context.save_for_backward(*of_rows, *sums)
        return total

    @staticmethod
    def backward(context: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients = iter(context.saved_tensors)
        # In place, as the head's may be as large as the head: a second backward pass is refused by autograd.
        return None, None, None, None, *(next(gradients).mul_(scale) if wanted else None for wanted in context.wanted)
