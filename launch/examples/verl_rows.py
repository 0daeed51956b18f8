"""verl's batches and micro-batches divided by vision and text; verl itself looks at 24576·L + L² of the text alone.

    # own.py
    import verl_rows
    verl_rows.install("Qwen2.5-VL-7B")

    VERL_USE_EXTERNAL_MODULES=own python -m verl.trainer.main_ppo …

verl imports ``own`` in every process. Two of its functions are replaced: ``RayPPOTrainer._balance_batch``, by which the
driver deals rollouts to ranks, as many to each; and ``rearrange_micro_batches``, by which each rank cuts its part into
micro-batches, as many on each rank.
"""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from verl.utils import seqlen_balancing
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

from omnibal import SampleLengths, balanced_rows
from omnibal.errors import InfeasibleError, OmnibalError

verls_own = seqlen_balancing.rearrange_micro_batches


def install(model: Any) -> None:
    """Replace verl's division in this process; ``model`` as in ``omnibal.balanced_rows``."""

    def rearrange(batch: Any, max_token_len: int, *arguments: Any, **options: Any) -> tuple[list[Any], list[list[int]]]:
        if options.get("force_group_size", 1) > 1:  # pairs of a reward model stay together
            return verls_own(batch, max_token_len, *arguments, **options)
        return rearrange_micro_batches(model, batch, max_token_len, *arguments, **options)

    seqlen_balancing.rearrange_micro_batches = rearrange
    # Both import the function by its name, and only after this has run where verl itself imports this module.
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.workers.engine import utils

    utils.rearrange_micro_batches = rearrange
    verls_balance = RayPPOTrainer._balance_batch

    def balance(trainer: Any, batch: Any, metrics: dict[str, Any], **options: Any) -> None:
        if getattr(trainer, "use_prefix_grouper", False):  # groups share their prompt's attention on one rank
            return verls_balance(trainer, batch, metrics, **options)
        return balance_batch(model, trainer, batch, metrics, **options)

    RayPPOTrainer._balance_batch = balance


def balance_batch(
    model: Any,
    trainer: Any,
    batch: Any,
    metrics: dict[str, Any],
    logging_prefix: str = "global_seqlen",
    keep_minibatch: bool = False,
) -> None:
    """Reorder the driver's batch so that its equal parts, one a rank, take equally long."""
    tokens = batch.batch["attention_mask"].flatten(1).sum(dim=1)
    lengths = lengths_of(tokens, batch.non_tensor_batch.get("multi_modal_inputs", ()))
    ranks = trainer._get_dp_size(trainer.actor_rollout_wg, "actor")
    size = trainer.config.actor_rollout_ref.actor.get("ppo_mini_batch_size") if keep_minibatch else len(lengths)
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for block in np.split(np.arange(len(lengths)), range(size, len(lengths), size)):
        rows = balanced_rows(lengths.take(block), model, ranks, int(tokens.sum()), equal_counts=True)
        for part, (row,) in zip(parts, rows, strict=True):
            part.extend(block[row].tolist())
    batch.reorder(torch.tensor([rollout for part in parts for rollout in part]))
    metrics.update(seqlen_balancing.log_seqlen_unbalance(tokens.tolist(), parts, logging_prefix))


def rearrange_micro_batches(
    model: Any,
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """A rank's micro-batches, as many on all ranks of ``dp_group``; dearest first, as on the other ranks."""
    ids = batch["input_ids"]
    tokens = ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(dim=1)
    lengths = lengths_of(tokens, batch.get("multi_modal_inputs", ()))
    multiple = num_batches_divided_by or 1
    wanted = seqlen_balancing.roundup_divisible(min_num_micro_batch or 1, multiple)
    while True:
        rows, wrong = [], ""
        try:
            (rows,) = balanced_rows(lengths, model, 1, int(max_token_len), micro_batches=wanted)
            if not all(map(len, rows)):
                wrong = f"rollouts must be at least {len(rows)}, one for each micro-batch, got {len(lengths)}"
        except OmnibalError as error:
            wrong = str(error)
        agreed = torch.tensor([len(rows), bool(wrong)], device=get_device_name())
        if dist.is_initialized() and same_micro_num_in_dp and dp_group is not None:
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=dp_group)
        most, fails = agreed.tolist()
        if fails:  # on one rank, so on all: none is left waiting
            raise InfeasibleError(wrong or "another rank's rollouts do not divide; see its message")
        if most == wanted:
            parts = [row.tolist() for row in rows]
            return [tu.index_select_tensor_dict(batch, part) for part in parts], parts
        wanted = seqlen_balancing.roundup_divisible(most, multiple)


def lengths_of(tokens: torch.Tensor, images: Any) -> SampleLengths:
    """Lengths of verl's rollouts: tokens, and patches or tiles of ``multi_modal_inputs`` where there are any."""
    units, squared = np.zeros(len(tokens), dtype=np.int64), np.zeros(len(tokens), dtype=np.int64)
    for rollout, wrapped in enumerate(images):
        inputs = getattr(wrapped, "data", wrapped) or {}
        if (grid := inputs.get("image_grid_thw")) is not None:
            patches = grid.prod(dim=1)
            units[rollout], squared[rollout] = int(patches.sum()), int(patches.square().sum())
        elif (pixels := inputs.get("pixel_values")) is not None:
            units[rollout] = len(pixels)
    return SampleLengths(units, tokens.cpu().numpy(), vision_squared=squared)
