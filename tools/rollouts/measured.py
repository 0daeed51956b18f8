"""One learner's step on two CPU ranks: a tiny InternVL, gradients of each division against plain sums."""

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import InternVLConfig, InternVLForConditionalGeneration

from omnibal import SampleLengths, balanced_rows
from omnibal.processes import free_port

RANKS, IMAGE, TOKENS_PER_TILE = 2, 5, 16
TOKEN_BUDGET, OURS = 16384, "**omnibal balanced_rows**"
STEPS = 2
"""Of which the fastest counts."""


def measured_row(methods: dict[str, Callable[[SampleLengths, int], Any]]) -> list[dict[str, Any]]:
    """Processor seconds of the slowest rank by each method and by ours, and the largest difference of a gradient."""
    lengths = rollouts()
    divisions = {name: divide(lengths, RANKS) for name, divide in methods.items()}
    plain = model_of()
    divisions[OURS] = balanced_rows(lengths, plain, RANKS, TOKEN_BUDGET)
    run(plain, lengths, range(len(lengths)))
    expected = [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(rank_main, (free_port(), lengths, divisions, expected, queue), RANKS)
    rows: list[dict[str, Any]] = queue.get()
    return rows


def rollouts() -> SampleLengths:
    """32 rollouts: no image, one of 1 to 12 tiles, each prompt with four answers."""
    generator = np.random.default_rng(0)
    tiles = np.repeat(generator.choice([0, 0, 1, 4, 12], 8), 4)
    return SampleLengths(tiles, TOKENS_PER_TILE * tiles + generator.lognormal(5, 0.8, 32).astype(int).clip(8, 800))


def model_of() -> InternVLForConditionalGeneration:
    """The same small model each time."""
    torch.manual_seed(0)
    vision = {
        "hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 3,
        "image_size": [112, 112], "patch_size": [14, 14],
    }  # fmt: skip
    text = {
        "model_type": "qwen2", "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 512,
    }  # fmt: skip
    config = InternVLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE)
    return InternVLForConditionalGeneration(config)


def run(model: InternVLForConditionalGeneration, lengths: SampleLengths, rollouts: Any) -> None:
    """Forward and backward of rollouts one by one: a sum over their tokens, divided by those of all."""
    total = int(lengths.llm_tokens.sum())
    for rollout in rollouts:
        generator = torch.Generator().manual_seed(int(rollout))
        tiles, tokens = int(lengths.vision_units[rollout]), int(lengths.llm_tokens[rollout])
        ids = torch.randint(10, 500, (1, tokens), generator=generator)
        ids[0, : TOKENS_PER_TILE * tiles] = IMAGE
        pixels = torch.randn(tiles, 3, 112, 112, generator=generator) if tiles else None
        logits = model(input_ids=ids, pixel_values=pixels).logits[0]
        torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum").div(total).backward()


def rank_main(rank: int, port: int, lengths: SampleLengths, divisions: Any, expected: Any, queue: Any) -> None:
    """What each rank runs."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    model, rows = model_of(), []
    run(model, lengths, [0])  # what happens once, happens before
    for name, division in divisions.items():
        own = [int(rollout) for part in division[rank] for rollout in part]
        seconds = []
        for _ in range(STEPS):
            model.zero_grad(set_to_none=False)
            started = time.process_time()
            run(model, lengths, own)
            seconds.append(time.process_time() - started)
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        for gradient in found:
            dist.all_reduce(gradient)
        both = torch.tensor([min(seconds) if number == rank else 0.0 for number in range(RANKS)])
        dist.all_reduce(both)
        off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))
        slowest = float(both.max())
        rows.append(
            {
                "method": name, "slowest_seconds": slowest, "over_mean": slowest / float(both.mean()),
                "largest_difference": off,
            }
        )  # fmt: skip
    if rank == 0:
        queue.put(rows)
    dist.barrier()
    dist.destroy_process_group()
