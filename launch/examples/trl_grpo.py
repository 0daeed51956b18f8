"""TRL's GRPOTrainer with rollouts exchanged between ranks, so that no rank waits for another's images or long answers.

GRPOTrainer trains each rank on the rollouts that the rank made, in micro-batches of equally many rollouts that are
padded to the longest rollout of the rank. Here ranks exchange rollouts behind generation: a micro-batch holds rollouts
of nearly one length on all ranks, is padded to the longest of them, and brings all ranks the same images to encode.
The number of rollouts in each micro-batch stays, and so does the loss of every ``loss_type`` but ``"bnpo"``, whose
mean over a micro-batch's tokens depends on what the micro-batch holds.
"""

from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import pad
from trl import GRPOTrainer
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from omnibal import SampleLengths, balanced_rows
from omnibal.ranks import gather, gloo_group

Rollout = dict[str, Any]
OF_IMAGES: Final = (
    *("pixel_values", "image_grid_thw", "image_position_ids", "pixel_attention_mask", "spatial_shapes", "image_sizes"),
    *("num_images", "num_tiles"),
)
"""Fields of which a rollout has rows for its images, and not for its tokens."""


class BalancedGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose rollouts are divided over all ranks."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        # Rollouts were made in this call, and other ranks made theirs.
        if self.model.training and self._buffered_inputs is not before and self.accelerator.num_processes > 1:
            self._buffered_inputs = divided(
                self._buffered_inputs, self.model, self.args.gradient_accumulation_steps, seed=self._step
            )
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs


def divided(batches: list[Rollout], model: Any, accumulated: int, *, seed: int) -> list[Rollout]:
    """This rank's micro-batches after all ranks have exchanged rollouts.

    Args:
        batches: The micro-batches that this rank has, of equally many rollouts.
        model: Its configuration sets the costs.
        accumulated: Micro-batches of an optimizer step. Rollouts are shuffled over the optimizer steps first.
        seed: Of the shuffle, the same on all ranks.
    """
    own = [rollout for batch in batches for rollout in rollouts_of(batch)]
    vision, squared, tokens = np.array([size for of_rank in gather(list(map(sizes, own))) for size in of_rank]).T
    lengths = SampleLengths(vision, tokens, vision_squared=squared)
    order = np.random.default_rng(seed).permutation(len(lengths))
    in_row = len(lengths) // len(batches)
    steps = [order[start : start + accumulated * in_row] for start in range(0, len(order), accumulated * in_row)]
    # Padded micro-batches cost their longest rollout, so neighbours in length run at the same time.
    sorted_steps = [step[np.argsort(-tokens[step], kind="stable")] for step in steps]
    rows = [row for step in sorted_steps for row in np.split(step, len(step) // in_row)]
    per_rank = dealt(rows, lengths, model)
    arrived = exchanged(own, per_rank)
    shared = {name: value for name, value in batches[0].items() if is_shared(value)}
    device = batches[0]["prompt_ids"].device
    parts = per_rank[dist.get_rank()]
    return [shared | on(micro_batch([arrived[number] for number in part]), device) for part in parts]


def dealt(rows: list[np.ndarray], lengths: SampleLengths, model: Any) -> list[list[list[int]]]:
    """Each rank's part of each row of rollouts that run at the same time: even in images, row by row and in all."""
    ranks = dist.get_world_size()
    per_rank: list[list[list[int]]] = [[] for _ in range(ranks)]
    held = np.zeros(ranks)
    for row in rows:
        of_row = lengths.take(row)
        found = balanced_rows(of_row, model, ranks, int(of_row.llm_tokens.sum()), equal_counts=True)
        units = np.array([of_row.vision_units[places].sum() for (places,) in found])
        # Most images go to the rank with fewest so far.
        for rank, part in zip(np.argsort(held, kind="stable"), np.argsort(-units), strict=True):
            per_rank[rank].append(row[found[part][0]].tolist())
            held[rank] += units[part]
    return per_rank


def exchanged(own: list[Rollout], per_rank: list[list[list[int]]]) -> dict[int, Rollout]:
    """The rollouts that this rank trains on, by number; rollouts are numbered rank after rank."""
    rank = dist.get_rank()
    first = rank * len(own)
    arrived: dict[int, Rollout] = {}
    for source in range(dist.get_world_size()):  # each rank in turn sends its rollouts to where they are trained
        sent = None
        if source == rank:
            wanted = [[n for part in parts for n in part if 0 <= n - first < len(own)] for parts in per_rank]
            sent = [{n: on(own[n - first], "cpu") for n in numbers} for numbers in wanted]
        received: list[Any] = [None]
        dist.scatter_object_list(received, sent, src=source, group=gloo_group(dist.group.WORLD))
        arrived |= received[0]
    return arrived


def rollouts_of(batch: Rollout) -> list[Rollout]:
    """The rollouts of a micro-batch without the padding."""
    batch = split_pixel_values_by_grid(batch)
    if isinstance(batch.get("pixel_values"), torch.Tensor):
        raise ValueError(
            "pixel_values must be split by rollouts, got those of a model that pads images, as Idefics does"
        )
    width = batch["prompt_ids"].shape[1]
    rollouts = []
    for number, (prompt, answer) in enumerate(zip(batch["prompt_mask"], batch["completion_mask"], strict=True)):
        start = width - int(prompt.sum())  # prompts are padded on the left
        end = int(answer.nonzero().max()) + 1 if answer.any() else 1
        rollout = {}
        for name, value in batch.items():
            if is_shared(value) or value is None:
                continue
            row = value[number]
            if name.startswith("prompt_"):
                row = row[start:]
            elif name.endswith("token_type_ids"):
                row = row[start : width + end]
            elif name not in OF_IMAGES and row.ndim:
                row = row[:end]
            rollout[name] = row
        rollouts.append(rollout)
    return rollouts


def micro_batch(rollouts: list[Rollout]) -> Rollout:
    """Rollouts as TRL has them: prompts padded on the left, answers on the right."""
    prompt, answer = (max(len(rollout[name]) for rollout in rollouts) for name in ("prompt_ids", "completion_ids"))
    batch: Rollout = {}
    for name in {name: None for rollout in rollouts for name in rollout}:
        if name in ("num_images", "num_tiles"):
            batch[name] = [rollout.get(name, 0) for rollout in rollouts]
        elif name in OF_IMAGES:
            batch[name] = [rollout[name] for rollout in rollouts if name in rollout]
        else:
            left = name.startswith(("prompt_", "token_type", "mm_token_type"))
            batch[name] = torch.stack([padded(rollout, name, prompt * left, answer) for rollout in rollouts])
    if not any(batch.get("num_images", ())):  # encoders take no empty list of images
        batch = {name: rows for name, rows in batch.items() if name not in OF_IMAGES}
    return unsplit_pixel_values_by_grid(batch)


def padded(rollout: Rollout, name: str, prompt: int, answer: int) -> torch.Tensor:
    """A field of a rollout in a micro-batch with so long prompts and answers."""
    row = rollout.get(name)
    if row is None:  # types of tokens, where the rank that made the rollout had no image
        row = torch.zeros(len(rollout["prompt_ids"]) + len(rollout["completion_ids"]), dtype=torch.long)
    if not row.ndim:
        return row
    left = max(prompt - len(rollout["prompt_ids"]), 0)
    right = 0 if name.startswith("prompt_") else answer - len(rollout["completion_ids"])
    return pad(row, (left, right))


def sizes(rollout: Rollout) -> tuple[int, int, int]:
    """Patches or tiles, the squares of each image's patches, and tokens."""
    grid, pixels = rollout.get("image_grid_thw"), rollout.get("pixel_values")
    tokens = len(rollout["prompt_ids"]) + len(rollout["completion_ids"])
    if grid is not None:
        patches = grid.prod(dim=1)
        return int(patches.sum()), int(patches.square().sum()), tokens
    return 0 if pixels is None else len(pixels), 0, tokens


def is_shared(value: Any) -> bool:
    """Whether a field belongs to the whole batch, such as the number of all ranks' tokens."""
    return isinstance(value, torch.Tensor) and value.ndim == 0


def on(rollout: Rollout, device: Any) -> Rollout:
    """The rollout with its tensors on a device, copied: to pickle a view takes all that it is a view of."""
    return {name: row.to(device, copy=True) if isinstance(row, torch.Tensor) else row for name, row in rollout.items()}
