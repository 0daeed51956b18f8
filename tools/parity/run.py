"""Accuracy after training on balanced packs and on padded batches, side by side; see README.md."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any

import torch
import typer
from deepspeed.runtime.lr_schedules import WarmupCosineLR
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import InternVLForConditionalGeneration

from omnibal.config import complete_deepspeed_config, fill_in_steps, layout_of
from omnibal.data.limits import PackLimits
from omnibal.demo import write_demo
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.formats.conversations import ConversationDataset, open_dataset
from omnibal.processes import free_port
from omnibal.report.training import read_metrics
from omnibal.vlm import load_model
from omnibal.vlm.weights import save_model

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results.json"
HELD_OUT = 2000
IGNORED = -100


def main(
    seeds: Annotated[int, typer.Option(help="How many pairs of runs.", min=1)] = 4,
    epochs: Annotated[int, typer.Option(help="Times through the data; 0: as the quickstart.", min=0)] = 0,
) -> None:
    """Train pairs of models and compare what they know; pairs that results.json holds are not trained again."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for seed in range(seeds):
        if all(row["seed"] != seed for row in rows):
            rows.append(compare(seed, epochs))
            RESULTS.write_text(json.dumps(rows, indent=2) + "\n")
    Console().print(table_of(rows))


def compare(seed: int, epochs: int) -> dict[str, Any]:
    """Held-out accuracy of both models of a seed, which train side by side."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = write_demo(folder / "data", samples=6000, held_out=HELD_OUT, seed=seed)
        start = initial_model(paths.model, folder / "start", seed)
        config = run_config(folder, start, seed, epochs)
        dataset = open_dataset(paths.meta, start)
        steps = steps_per_epoch(dataset, config)
        with training_on_packs(folder):
            padded = train_on_padded_batches(start, dataset, config, steps, seed)
        taken = read_metrics(folder / "run" / "metrics.jsonl").steps
        assert len(taken) == steps * config["omnibal"]["run"]["epochs"], "both take as many steps"
        packed = InternVLForConditionalGeneration.from_pretrained(folder / "run" / "model")
        held_out = open_dataset(paths.held_out_meta, start)
        return {
            "seed": seed,
            "steps": len(taken),
            "samples": sum(step["samples"] for step in taken),
            "packed": answers(packed, held_out)[0],
            "padded": answers(padded, held_out)[0],
        }


def initial_model(source: Path, folder: Path, seed: int) -> Path:
    """A Hugging Face folder with the weights that a run from random weights begins with."""
    shutil.copytree(source, folder)
    model = load_model(source)
    save_model(model, lambda index: dict(model.build_layer(index, seed=seed).state_dict()), folder)
    return folder


def run_config(folder: Path, start: Path, seed: int, epochs: int) -> dict[str, Any]:
    """The quickstart's ds_config for this seed's data and weights."""
    config: dict[str, Any] = json.loads((ROOT / "ds_configs" / "quickstart.json").read_text())
    del config["csv_monitor"]
    section = config["omnibal"]
    section["model"] |= {"path": str(start), "weights": "load", "seed": seed}
    section["packing"]["seed"] = seed
    section["data"] |= {"train": str(folder / "data" / "train.json"), "held_out": None}
    section["run"] |= {"output": str(folder / "run"), "save_every": 0, "evaluate_every": 0}
    section["run"]["epochs"] = epochs or section["run"]["epochs"]
    (folder / "config.json").write_text(json.dumps(config))
    return config


def steps_per_epoch(dataset: ConversationDataset, config: dict[str, Any]) -> int:
    """How many steps the packs of an epoch make."""
    packing = config["omnibal"]["packing"]
    sampler = BalancedBatchSampler(
        dataset.lengths(),
        PackLimits(packing["vision_units"], packing["llm_tokens"]),
        num_replicas=1,
        rank=0,
        micro_batches=config["gradient_accumulation_steps"],
        seed=packing["seed"],
    )
    return sampler.num_steps


@contextmanager
def training_on_packs(folder: Path) -> Iterator[None]:
    """launch/train.py in a process beside this one, which has ended when the context does."""
    launcher = ["deepspeed", "--num_gpus", "1", "--master_port", str(free_port())]
    command = [*launcher, "launch/train.py", "--deepspeed_config", str(folder / "config.json")]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
        if process.wait() != 0:
            raise RuntimeError(f"training on packs failed:\n{(folder / 'log.txt').read_text()[-4000:]}")
    finally:
        process.terminate()


def train_on_padded_batches(
    start: Path, dataset: ConversationDataset, config: dict[str, Any], steps_per_epoch: int, seed: int
) -> InternVLForConditionalGeneration:
    """Train with plain transformers: as many steps, as many samples, padded."""
    model = InternVLForConditionalGeneration.from_pretrained(start)
    epochs = config["omnibal"]["run"]["epochs"]
    total_steps = epochs * steps_per_epoch
    complete = complete_deepspeed_config(config, layout_of(config, 1, 1))
    fill_in_steps(complete["scheduler"]["params"], total_steps)
    settings = {key: value for key, value in config["optimizer"]["params"].items() if key != "torch_adam"}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    schedule = WarmupCosineLR(optimizer, **complete["scheduler"]["params"])
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(dataset), generator=generator) for _ in range(epochs)]
    steps = [step for order in orders for step in order.tensor_split(steps_per_epoch)]
    model.train()
    for step in tqdm(steps, desc="padded batches", unit="step"):
        model(**padded_batch([dataset[index] for index in step.tolist()])).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def padded_batch(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Samples side by side, padded to the longest."""
    pixels = [item["pixel_values"] for item in items if item["pixel_values"] is not None]
    ids = [item["input_ids"] for item in items]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence([item["labels"] for item in items], batch_first=True, padding_value=IGNORED),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "pixel_values": torch.cat(pixels) if pixels else None,
    }


@torch.no_grad()
def answers(model: InternVLForConditionalGeneration, dataset: ConversationDataset) -> tuple[float, float]:
    """Share of held-out samples whose answer greedy decoding would give exactly; mean loss over their target tokens."""
    model.eval()
    device = model.device
    right, total, count = 0, 0.0, 0
    for number in tqdm(range(len(dataset)), desc="held out", mininterval=10):
        item = dataset[number]
        pixels = None if item["pixel_values"] is None else item["pixel_values"].to(device)
        logits = model(input_ids=item["input_ids"][None].to(device), pixel_values=pixels).logits[0, :-1].cpu()
        targets = item["labels"][1:]
        right += bool(((logits.argmax(-1) == targets) | (targets == IGNORED)).all())
        total += float(cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum"))
        count += int((targets != IGNORED).sum())
    return right / len(dataset), total / count


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Accuracies and their difference by seed; their means, deviations and standard errors over the seeds."""
    columns = {"packs": [row["packed"] for row in rows], "padded batches": [row["padded"] for row in rows]}
    columns["difference"] = [row["packed"] - row["padded"] for row in rows]
    table = Table("seed", "steps", "samples", *columns)
    for number, row in enumerate(rows):
        shown = [f"{values[number]:.1%}" for values in columns.values()]
        table.add_row(str(row["seed"]), str(row["steps"]), str(row["samples"]), *shown)
    if len(rows) > 1:
        for name, value_of in (("mean", mean), ("deviation", stdev), ("standard error", standard_error)):
            table.add_row(name, "", "", *(f"{value_of(values):.1%}" for values in columns.values()))
    return table


def standard_error(values: list[float]) -> float:
    """How far the mean is off, in its own unit."""
    return stdev(values) / len(values) ** 0.5


if __name__ == "__main__":
    typer.run(main)
