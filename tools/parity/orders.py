"""What a model learns where samples share steps by chance, by length, by vision, or in our packs; see README.md."""

import json
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import InternVLForConditionalGeneration
from transformers.trainer_pt_utils import LengthGroupedSampler

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.demo import write_demo
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.formats.conversations import ConversationDataset, open_dataset
from tools.parity.run import answers, initial_model, padded_batch, standard_error

RESULTS, MIXED = (Path(__file__).parent / name for name in ("orders.json", "orders_mixed.json"))
LIMITS, RANKS = PackLimits(16, 320), 4
METHODS = ("random", "group_by_length", "vision_sorted", "omnibal")
SAMPLES, HELD_OUT, EPOCHS = 6000, 1000, 2
MIXTURE = {"stories": 0.4, "shapes": 0.3, "pairs": 0.2, "scenes": 0.1}  # as they are: 0.18, 0.6, 0.12, 0.1
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LEARNING_RATE, LEAST_RATE, WARMUP = 1e-3, 0.05, 0.03


def main(
    seeds: Annotated[int, typer.Option(help="How many runs of each method.", min=1)] = 8,
    workers: Annotated[int, typer.Option(help="How many runs at a time; a GPU is shared by all.", min=1)] = 1,
    mixture: Annotated[bool, typer.Option(help="Draw sources in shares of MIXTURE.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where runs are kept; by default beside this file.")] = None,
) -> None:
    """Train a model for each seed and method; runs that the file holds are not made again."""
    out = out or (MIXED if mixture else RESULTS)
    found = json.loads(out.read_text()) if out.exists() else {"made_with": made_with(), "runs": []}
    done = {(run["seed"], run["method"]) for run in found["runs"]}
    left = [pair for pair in product(range(seeds), METHODS) if pair not in done]
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        shares = MIXTURE if mixture else None
        runs = {pool.submit(trained, method, seed, shares): (seed, method) for seed, method in left}
        for run in as_completed(runs):
            seed, method = runs[run]
            found["runs"].append({"seed": seed, "method": method, **run.result()})
            out.write_text(json.dumps(found, indent=2) + "\n")
    Console(width=130).print(table_of(found["runs"]))


def made_with() -> dict[str, str]:
    """When and with what results are made."""
    packages = {name: version(name) for name in ("torch", "transformers", "numpy")}
    machine = f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores" if torch.cuda.is_available() else "1 CPU core"
    return {"date": time.strftime("%Y-%m-%d"), "machine": machine, **packages}


def trained(method: str, seed: int, mixture: dict[str, float] | None = None) -> dict[str, Any]:
    """Held-out accuracy and loss of a seed's model behind training, and how many steps it took."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        paths = write_demo(folder / "data", samples=SAMPLES, held_out=HELD_OUT, seed=seed)
        start = initial_model(paths.model, folder / "start", seed)
        dataset, held_out = open_dataset(paths.meta, start), open_dataset(paths.held_out_meta, start)
        lengths = dataset.lengths()
        sampler = BalancedBatchSampler(lengths, LIMITS, num_replicas=RANKS, rank=0, seed=seed, mixture=mixture)
        steps = [step for epoch in range(EPOCHS) for step in steps_of(method, lengths, sampler, seed, epoch)]
        if mixture is None:
            assert sorted(np.concatenate(steps)) == sorted([*range(len(dataset))] * EPOCHS), "each sample once an epoch"
        model = InternVLForConditionalGeneration.from_pretrained(start).to(DEVICE)
        train(model, dataset, steps, f"{method}, seed {seed}")
        accuracy, loss = answers(model, held_out)
        return {"steps": len(steps), "accuracy": accuracy, "loss": loss}


def steps_of(
    method: str, lengths: SampleLengths, sampler: BalancedBatchSampler, seed: int, epoch: int
) -> list[np.ndarray]:
    """The samples of each step of an epoch: as many steps by each method, of the samples that our packs have."""
    sampler.set_epoch(epoch)
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    packs = (sampler.step(index) for index in range(sampler.num_steps))
    ours = [np.concatenate([step.pack(rank, 0) for rank in range(RANKS)]).astype(int) for step in packs]
    samples = np.sort(np.concatenate(ours))
    match method:
        case "omnibal":
            return ours
        case "group_by_length":
            size, tokens = round(len(samples) / len(ours)), lengths.llm_tokens[samples].tolist()
            order = np.array([*LengthGroupedSampler(size, lengths=tokens, generator=generator)])
        case _:
            order = torch.randperm(len(samples), generator=generator).numpy()
    order = samples[order]
    if method == "vision_sorted":  # as packs that are sorted by vision before they are dealt: from text to images
        order = order[np.argsort(lengths.vision_units[order], kind="stable")]
    return np.array_split(order, len(ours))


def train(
    model: InternVLForConditionalGeneration, dataset: ConversationDataset, steps: list[np.ndarray], told: str
) -> None:
    """Train with plain transformers: AdamW, warm-up and a cosine; the loss is the mean over a step's target tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.01)
    warm = round(WARMUP * len(steps))

    def rate(step: int) -> float:
        done = (step - warm) / (len(steps) - warm)
        return (step + 1) / warm if step < warm else LEAST_RATE + (1 - LEAST_RATE) * (1 + np.cos(np.pi * done)) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model.train()
    for step in tqdm(steps, desc=told, unit="step", mininterval=10):
        batch = padded_batch([dataset[int(sample)] for sample in step])
        model(**{name: None if value is None else value.to(DEVICE) for name, value in batch.items()}).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def table_of(runs: list[dict[str, Any]]) -> Table:
    """Accuracy and loss by method, their standard errors, and their difference from random steps, seed by seed."""
    table = Table("method", "runs", "steps", "accuracy", "minus random", "held-out loss", "minus random")
    by_method = {method: {run["seed"]: run for run in runs if run["method"] == method} for method in METHODS}
    for method, of_seed in by_method.items():
        cells = []
        for name, form in (("accuracy", ".1%"), ("loss", ".4f")):
            values = [run[name] for run in of_seed.values()]
            differences = [run[name] - by_method["random"][seed][name] for seed, run in of_seed.items()]
            cells += [told(values, form), "" if method == "random" else told(differences, form)]
        table.add_row(method, str(len(of_seed)), str(round(mean(run["steps"] for run in of_seed.values()))), *cells)
    return table


def told(values: list[float], form: str) -> str:
    """A mean and its standard error."""
    error = f" ± {standard_error(values):{form}}" if len(values) > 1 else ""
    return f"{mean(values):{form}}{error}"


if __name__ == "__main__":
    typer.run(main)
