"""The loss of next-token prediction over packs, and what held-out packs are judged by."""

import torch
from torch import Tensor
from torch.nn import functional

from omnibal.data.collate import IGNORED

EVALUATION_STATISTICS = ("loss", "target_tokens", "exact_samples", "samples")
"""Sums over held-out packs: of losses; target tokens; samples whose every target is the likeliest token; samples."""


def target_rows(labels: Tensor) -> Tensor:
    """The rows of logits that predict a target; on a GPU the host waits to learn how many they are.

    Args:
        labels: As of ``token_losses``.

    Returns:
        Of shape (targets,), int64, ascending.
    """
    return torch.where(labels[0, 1:] != IGNORED)[0]


def token_losses(logits: Tensor, labels: Tensor, rows: Tensor | None = None) -> Tensor:
    """Cross entropy of each token given the tokens before it; this is the one place where labels are shifted.

    Only the rows that predict a target are turned to float32 and through the softmax, so memory beyond the logits
    grows with the targets, not with the pack. Since each sample's first label is ``IGNORED``, no sample predicts the
    next one's first token.

    Args:
        logits: Of shape (1, tokens, vocab), any floating type.
        labels: Of shape (1, tokens), int64, not shifted, ``IGNORED`` where there is no target.
        rows: ``target_rows(labels)``, where they are known already.

    Returns:
        Of shape (tokens,), float32: at ``t`` the loss of token ``t`` (predicted by row ``t - 1``), 0 without a target.
        Sum it for the pack's loss; a pack without targets still sends (zero) gradients.

    >>> token_losses(torch.zeros(1, 3, 4), torch.tensor([[-100, 2, -100]]))
    tensor([0.0000, 1.3863, 0.0000])
    """
    rows = target_rows(labels) if rows is None else rows
    losses = functional.cross_entropy(logits[0].index_select(0, rows).float(), labels[0, rows + 1], reduction="none")
    return torch.zeros(labels.shape[1], device=losses.device).index_put((rows + 1,), losses)


def evaluation_statistics(logits: Tensor, labels: Tensor, losses: Tensor, cu_seq_lens: Tensor) -> Tensor:
    """EVALUATION_STATISTICS of a pack, whose ``token_losses`` are known; a float64 vector.

    A sample is exact if greedy decoding would give its answer: each target token is then predicted from a prefix
    that greedy decoding would have produced itself.
    """
    has_target = labels[0, 1:] != IGNORED
    wrong = has_target & (logits[0, :-1].argmax(-1) != labels[0, 1:])
    # The sample that each of tokens 1… belongs to.
    sample = torch.bucketize(torch.arange(1, labels.shape[1], device=labels.device), cu_seq_lens[1:], right=True)
    num_samples = len(cu_seq_lens) - 1
    targets_of = torch.zeros(num_samples, dtype=torch.int64, device=labels.device).index_add_(
        0, sample, has_target.long()
    )
    wrong_of = torch.zeros_like(targets_of).index_add_(0, sample, wrong.long())
    counted = targets_of > 0
    sums = (losses.sum(), has_target.sum(), (counted & (wrong_of == 0)).sum(), counted.sum())
    return torch.stack([value.double() for value in sums])
