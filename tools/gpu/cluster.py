"""A cluster's micro-batches on one GPU, one after another, and a `transformers.Trainer` alone on it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import Trainer, TrainerCallback

from omnibal.data.lengths import SampleLengths
from omnibal.data.synthetic import tiled_lengths
from omnibal.integrations import packing
from omnibal.integrations.transformers import balance
from tools.gpu.report import Row
from tools.gpu.run_engine import IMAGE_TOKEN
from tools.parity.run import padded_batch
from tools.replay.bench import Bench, pack_of
from tools.replay.replay import composed, ways_of

GIB = 2**30
BATCH, ACCUMULATED, STEPS, TIMED_FROM, PADDING = 4, 4, 26, 6, 0
"""Of the trainer: samples of a micro-batch, micro-batches of a step, steps, how many of them do not count; a token."""


def cluster_rows(bench: Bench, lengths: SampleLengths, ranks: int, micro_batches: int, steps: int) -> Iterator[Row]:
    """Every way's steps on all ranks: samples a second in multiples of random batches, by what ranks wait for."""
    base: dict[str, float] = {}
    bench.warm_up()
    for way in ways_of(lengths, ranks, micro_batches):
        chosen = way.steps[:steps]
        packs = [[[pack_of(lengths, group, padded=way.padded) for group in rank] for rank in step] for step in chosen]
        measured = [[bench.measured(of_rank) for of_rank in step] for step in packs]
        seconds = np.array([[of_rank for of_rank, _ in step] for step in measured])  # steps, ranks, batches, phases
        samples = sum(len(group) for step in chosen for rank in step for group in rank)
        row: dict[str, Any] = {"ranks": ranks, "batches": way.name, "samples": samples, "busy s": float(seconds.sum())}
        for trainer, (rate, waits) in composed(seconds, samples).items():
            row |= {f"{trainer}, times": rate / base.setdefault(trainer, rate), f"{trainer} waits": waits}
        held = [most / GIB for step in measured for _, most in step]
        yield row | {"fullest rank GiB": max(held), "mean rank GiB": sum(held) / len(held)}


@dataclass
class TiledDataset(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Samples of given lengths, whose pixels are shared noise: reading them takes little time."""

    lengths: SampleLengths
    noise: torch.Tensor  # (tiles, 3, height, width)
    tokens_per_tile: int

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.lengths)

    def __getitem__(self, sample: int) -> dict[str, Any]:
        """Tokens, labels and tiles of a sample."""
        tiles, tokens = int(self.lengths.vision_units[sample]), int(self.lengths.llm_tokens[sample])
        generator = torch.Generator().manual_seed(sample)
        ids = torch.randint(4, 500, (tokens,), generator=generator)
        ids[: tiles * self.tokens_per_tile] = IMAGE_TOKEN
        labels = torch.where(ids == IMAGE_TOKEN, -100, ids)
        return {"input_ids": ids, "labels": labels, "pixel_values": self.noise[:tiles] if tiles else None}


def trainer_rows(config: Any, *, small: bool) -> Iterator[Row]:
    """Steps, tokens and memory of a trainer's own random batches and of ours, in about as many samples a step."""
    import transformers

    tile, per_tile = config.vision_config.image_size[0], config.image_seq_length
    drawn = tiled_lengths(2000, seed=3)
    text = drawn.llm_tokens - 256 * drawn.vision_units.astype(int)
    own = np.maximum(text // 16 if small else text, 2)
    lengths = SampleLengths(
        drawn.vision_units, drawn.vision_units * per_tile + own, target_tokens=own - (drawn.vision_units == 0)
    )
    dataset = TiledDataset(lengths, torch.randn(int(lengths.vision_units.max()), 3, tile, tile), per_tile)
    first: float | None = None
    for name in ("random", "packs, attention with a mask", "packs"):
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(
            config, attn_implementation="sdpa", dtype=torch.bfloat16
        )
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder, max_steps=STEPS, per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATED,
                bf16=not small, use_cpu=small, report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=STEPS,
                remove_unused_columns=False, learning_rate=1e-5, dataloader_num_workers=0 if small else 4,
            )  # fmt: skip
            trainer = transformers.Trainer(model, arguments, train_dataset=dataset, data_collator=padded_batch)
            if name != "random":
                balance(trainer, lengths=lengths)
            clock = Clock(trainer)
            kept = mock.patch.object(packing, "attend_by_bounds", return_value=None)
            with kept if name.endswith("a mask") else nullcontext():
                trainer.train()
        tokens = clock.tokens_a_second()
        first = first or tokens
        yield {
            "batches": name, "steps timed": STEPS - TIMED_FROM, "tokens/s": tokens, "times random": tokens / first,
            "peak GiB": clock.peak / GIB,
        }  # fmt: skip
        del trainer, model, clock
        if not small:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


class Clock(TrainerCallback):
    """When a trainer's steps end, and how many tokens they held, padding aside."""

    def __init__(self, trainer: Trainer) -> None:
        self._marks: list[tuple[float, int]] = []
        self._tokens, self.peak = 0, 0
        trainer.add_callback(self)
        trainer.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if model.training:
            self._tokens += (kwargs["input_ids"] != PADDING).sum()

    def on_step_end(self, *arguments: Any, **others: Any) -> None:
        """Wait for the device, and look at the clock."""
        tokens = int(self._tokens)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.peak = torch.cuda.max_memory_allocated()
        self._marks.append((perf_counter(), tokens))

    def tokens_a_second(self) -> float:
        """Of the steps that count."""
        (start, before), (end, behind) = self._marks[TIMED_FROM - 1], self._marks[-1]
        return (behind - before) / (end - start)
