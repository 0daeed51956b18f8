"""What packs save, measured: torchrun --nproc-per-node 2 launch/gain.py runs/quickstart/ds_config.json.

A run's model computes padded random batches and balanced packs of the same dataset, in turn on the same processes. A
step takes as long as its slowest rank computes: forward and backward of one micro-batch. Gradients are not exchanged
and weights stay, since both cost the same either way. Rank 0 writes gain.json and gain.png into the run.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from examples.tiny import collate, own_device
from transformers import AutoModelForImageTextToText
from transformers.utils import logging

from omnibal import Plan
from omnibal.config import read_config
from omnibal.formats.conversations import ConversationDataset, open_dataset
from omnibal.integrations.loops import balanced_loader, pack_loss
from omnibal.passes import device_name
from omnibal.ranks import gather
from omnibal.report.style import BLUE, GREY, drawing

STEPS, WARM_UP = 24, 4
DRAWN = 8
"""Steps that the picture shows: as many samples either way, to within a step."""
Batch = dict[str, Any]


def padded_batches(dataset: ConversationDataset, size: int) -> Iterator[tuple[Batch, int, float]]:
    """Yield this rank's random batches as most loaders make them: their samples and share of real tokens beside."""
    order = np.random.default_rng(0).permutation(len(dataset))[dist.get_rank() :: dist.get_world_size()]
    for start in range(0, len(order) - size + 1, size):
        batch = collate([dataset[int(sample)] for sample in order[start : start + size]])
        yield batch, size, float(batch["attention_mask"].float().mean())


def packs(loader: Any) -> Iterator[tuple[Batch, int, float]]:
    """Yield this rank's packs in the same form; a pack has no padding."""
    for batch, samples in zip(loader, loader.batch_sampler, strict=False):
        yield batch, len(samples), 1.0


def timed(run: Callable[[Batch], torch.Tensor], batch: Batch, device: torch.device) -> float:
    """Seconds of this rank's forward and backward pass, which all ranks begin together."""
    dist.barrier()
    started = perf_counter()
    run(batch).backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - started


def measure(config: Path, device: torch.device) -> None:
    """Measure both ways step by step, and let rank 0 write what was found; all ranks together, which have met."""
    run = read_config(config)[1]
    plan, files = Plan.load(run.run.files.plan), run.run.files
    model = AutoModelForImageTextToText.from_pretrained(files.model).to(device)
    dataset = open_dataset(run.data.train, files.model, max_tiles=run.data.max_tiles)
    loader = balanced_loader(dataset, collate, plan.limits, model=model)
    samples = round(len(dataset) / len(loader) / dist.get_world_size())
    ways: dict[str, tuple[Callable[[Batch], torch.Tensor], Iterator[tuple[Batch, int, float]]]] = {
        "padded": (
            lambda batch: model(**{name: value.to(device) for name, value in batch.items()}).loss,
            padded_batches(dataset, samples),
        ),
        "packs": (lambda batch: pack_loss(model, batch, device=device), packs(loader)),
    }
    measured: dict[str, list[tuple[float, int, float]]] = {name: [] for name in ways}
    for _ in range(WARM_UP + STEPS):
        for name, (forward, batches) in ways.items():
            batch, count, real = next(batches)
            measured[name].append((timed(forward, batch, device), count, real))
    by_rank = gather({name: rows[WARM_UP:] for name, rows in measured.items()})
    if dist.get_rank() == 0:
        tables = {name: np.array([rank[name] for rank in by_rank]) for name in ways}  # (ranks, steps, 3)
        found = summary(tables) | {"device": device_name(device), "ranks": len(by_rank), "steps": STEPS}
        (files.folder / "gain.json").write_text(json.dumps(found, indent=2) + "\n")
        draw(tables, found, files.folder / "gain.png")


def summary(tables: dict[str, np.ndarray]) -> dict[str, Any]:
    """Seconds a sample, the share of time that ranks wait and of LLM tokens that are padding, for each way."""
    found: dict[str, Any] = {}
    for name, (seconds, samples, real) in ((name, np.moveaxis(table, 2, 0)) for name, table in tables.items()):
        found[name] = {
            "seconds_per_sample": seconds.max(axis=0).sum() / samples.sum(),
            "waiting": 1 - seconds.sum() / (seconds.max(axis=0).sum() * len(seconds)),
            "padding": 1 - real.mean(),
        }
    return found | {"gain": found["padded"]["seconds_per_sample"] / found["packs"]["seconds_per_sample"]}


def draw(tables: dict[str, np.ndarray], found: dict[str, Any], path: Path) -> None:
    """Draw what each rank does in the first steps, on one time axis."""
    titles = {"padded": "padded random batches", "packs": "balanced packs"}
    with drawing(path, 9, 3.6) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True)
        for axes, (name, table) in zip((upper, lower), tables.items(), strict=True):
            seconds = table[:, :DRAWN, 0] * 1e3
            ends = np.cumsum(seconds.max(axis=0))
            starts = np.concatenate([[0], ends[:-1]])
            for rank, computed in enumerate(seconds):
                axes.barh(rank, computed, left=starts, color=BLUE, edgecolor="white")
                waits = ends - starts - computed
                axes.barh(rank, waits, left=starts + computed, color=GREY, alpha=0.3, hatch="//", edgecolor="white")
            figures = found[name]
            axes.set_title(
                f"{titles[name]}: {table[:, :DRAWN, 1].sum():.0f} samples in {ends[-1]:,.0f} ms; "
                f"{figures['padding']:.0%} of LLM tokens are padding, ranks wait {figures['waiting']:.0%} of the time",
                loc="left",
                fontsize=9,
            )
            axes.set_yticks(range(len(seconds)), [f"rank {rank}" for rank in range(len(seconds))])
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
        lower.set_xlabel("milliseconds; blue: forward and backward, hatched: waiting for the slowest rank")


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    own = own_device()
    dist.init_process_group()
    measure(Path(sys.argv[1]), own)
    dist.destroy_process_group()
