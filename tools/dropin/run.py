"""Trains in every way in turn, on two processes of one thread, and prints tables: python -m tools.dropin.run.

Seconds are processor time of a rank's forward and backward passes, so other work on the machine hardly counts; a step
takes as long as its slowest rank. Gradients are exchanged and weights updated untimed: both are the same for all. Ways
do not train the same samples in the same steps, so samples are counted by their work: 1 is a sample of average work.

All ways train as many samples a step, in as few micro-batches as the default's memory allows. Their losses are compared
on samples that none of them trains.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    AutoModelForImageTextToText,
    InternVLConfig,
    InternVLVisionConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
)

from omnibal.cost import CostModel
from omnibal.data.lengths import SampleLengths
from omnibal.packs.collator import PackCollator, positions_of
from omnibal.packs.loading import PackItems
from omnibal.packs.losses import loss_per_target
from omnibal.processes import free_port
from omnibal.vlm.attention import PACKED_ATTENTION
from tools.dropin.ways import Task, Way, default, group_by_length, knapsack, limits_of, ours, rebalance
from tools.sampling.data import real_lengths
from tools.synthetic import patch_lengths, tiled_lengths

RANKS, SAMPLES, SHORTER, BATCH = 2, 4000, 16, 4
"""SHORTER: so many times fewer patches in a tile, and tokens in a text, than in the data. BATCH: the default's."""
HELD_OUT, LOOKS = 40, 4
"""Samples that nobody trains, and how often in a run their loss is looked at."""
FITTED, LARGEST, ROOM, FAR = 24, 4, 1.02, 2
"""Micro-batches that tell what a load keeps; of a way, those that are run; how far above the default it may be, and by
what the fit may be wrong."""
IMAGE_TOKEN, PAD_TOKEN, VOCABULARY, WORDS = 3, 0, 512, 32
TILE, PATCH, TILE_TOKENS = 56, 7, 16


def model_of(kind: str, *, packed: bool = False) -> Any:
    """A tiny InternVL or Qwen2.5-VL; the language model of packs computes attention within samples only."""
    language = {
        "vocab_size": VOCABULARY, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 4096,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "native":
        vision = {
            "depth": 4, "hidden_size": 96, "num_heads": 3, "intermediate_size": 256, "patch_size": PATCH,
            "out_hidden_size": 192, "window_size": 56, "fullatt_block_indexes": [3],
        }  # fmt: skip
        rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}}
        config: Any = Qwen2_5_VLConfig(
            vision_config=vision, text_config=language | rope, image_token_id=IMAGE_TOKEN, tie_word_embeddings=False
        )
    else:
        tower = InternVLVisionConfig(
            hidden_size=96, intermediate_size=384, num_hidden_layers=5, num_attention_heads=3, image_size=TILE,
            patch_size=PATCH,
        )  # fmt: skip
        config = InternVLConfig(
            vision_config=tower, text_config=Qwen2Config(**language), image_token_id=IMAGE_TOKEN,
            image_seq_length=TILE_TOKENS, downsample_ratio=0.5, tie_word_embeddings=False,
        )  # fmt: skip
    attention = {"vision_config": "sdpa", "text_config": PACKED_ATTENTION if packed else "sdpa"}
    return AutoModelForImageTextToText.from_config(config, attn_implementation=attention)


def lengths_of(kind: str) -> SampleLengths:
    """A few thousand samples, as long as the model is small."""
    if kind == "native":
        drawn = patch_lengths(SAMPLES, seed=2)
        images = np.maximum(drawn.vision_units // SHORTER // 4, drawn.vision_units > 0)
        text = drawn.llm_tokens - drawn.vision_units // 4
        return SampleLengths(images * 4, images + np.maximum(text // SHORTER, 4), vision_squared=(images * 4) ** 2)
    drawn = tiled_lengths(SAMPLES, seed=2)
    if kind == "real":
        everything, _ = real_lengths()
        drawn = everything.take(np.random.default_rng(2).permutation(len(everything))[:SAMPLES])
    text = np.maximum(drawn.llm_tokens.astype(np.int64) - 256 * drawn.vision_units, 0)
    return SampleLengths(drawn.vision_units, drawn.vision_units * TILE_TOKENS + np.maximum(text // SHORTER, 4))


class Samples:
    """Random pixels, and texts in which every token follows from the one before."""

    def __init__(self, kind: str, lengths: SampleLengths) -> None:
        self.kind, self.lengths = kind, lengths
        work = work_of(kind, lengths)
        self.work = work / work.mean()

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        units, tokens = int(self.lengths.vision_units[number]), int(self.lengths.llm_tokens[number])
        generator = torch.Generator().manual_seed(number)
        image_tokens = units // 4 if self.kind == "native" else units * TILE_TOKENS
        first = int(torch.randint(WORDS, (1,), generator=generator))
        words = IMAGE_TOKEN + 1 + (first + torch.arange(tokens - image_tokens)) % WORDS
        ids = torch.cat([torch.full((image_tokens,), IMAGE_TOKEN), words])
        item = {"input_ids": ids, "labels": torch.where(ids == IMAGE_TOKEN, -100, ids)}
        item["labels"][0] = -100
        if units and self.kind == "native":
            item["pixel_values"] = torch.randn(units, 3 * 2 * PATCH**2, generator=generator)
            item["image_grid_thw"] = torch.tensor([[1, 2, units // 2]])
        elif units:
            item["pixel_values"] = torch.randn(units, 3, TILE, TILE, generator=generator)
        return item

    def collate(self, items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """As people's collators do: padded to the longest."""
        longest = max(len(item["input_ids"]) for item in items)
        batch = {
            name: torch.stack([pad(item[name], (0, longest - len(item[name])), value=value) for item in items])
            for name, value in (("input_ids", PAD_TOKEN), ("labels", -100))
        }
        sizes = torch.tensor([len(item["input_ids"]) for item in items])
        batch["attention_mask"] = (torch.arange(longest) < sizes[:, None]).long()
        if self.kind == "native":
            batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE_TOKEN).long()
        for name in ("pixel_values", "image_grid_thw"):
            found = [item[name] for item in items if name in item]
            if found:
                batch[name] = torch.cat(found)
        return batch


def work_of(kind: str, lengths: SampleLengths) -> np.ndarray:
    """Multiplications of each sample with weights: patches through the ViT, tokens through the language model."""
    sizes = {"vision": 0, "language": 0}
    for name, parameter in model_of(kind).named_parameters():
        if "embed" not in name:
            sizes["vision" if "vis" in name else "language"] += parameter.numel()
    patches = lengths.vision_units * (1 if kind == "native" else (TILE // PATCH) ** 2)
    return patches * float(sizes["vision"]) + lengths.llm_tokens * float(sizes["language"])


@dataclass
class Trained:
    """A way, its model, and what was measured: by step, of all ranks."""

    way: Way
    model: Any
    optimizer: Any
    seconds: list[list[float]] = field(default_factory=list)
    kept: list[list[float]] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)


@contextmanager
def kept_bytes(model: Any) -> Iterator[Callable[[], int]]:
    """Count what autograd keeps, each storage once, beside the model's parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # itself, an output would keep its own graph alive where nobody runs backward

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield lambda: sum(found.values())


def step(trained: Trained, number: int, samples: Samples, collator: PackCollator) -> None:
    """A step on this rank."""
    groups = trained.way.steps[number][dist.get_rank()]
    batches = [batch_of(group, trained.way, samples, collator) for group in groups]
    targets = torch.tensor(sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches))
    dist.all_reduce(targets)
    work = sum(float(samples.work[group].sum()) for group in groups)
    own = {"seconds": 0.0, "kept": 0.0, "loss": 0.0, "samples": sum(map(len, groups)), "work": work}
    for batch in batches:
        labels = batch.pop("labels")
        before = time.process_time()
        with kept_bytes(trained.model) as kept:
            loss = loss_per_target(trained.model(**batch), labels, num_items_in_batch=targets)
            own["kept"] = max(own["kept"], kept())
        loss.backward()
        own["seconds"] += time.process_time() - before
        own["loss"] += loss.item()
    add_up(trained.model)
    trained.optimizer.step()
    trained.optimizer.zero_grad()
    ranks: list[Any] = [None] * RANKS
    dist.all_gather_object(ranks, own)
    trained.seconds.append([rank["seconds"] for rank in ranks])
    trained.kept.append([rank["kept"] for rank in ranks])
    trained.samples.append(sum(rank["samples"] for rank in ranks))
    trained.work.append(sum(rank["work"] for rank in ranks))
    trained.losses.append(sum(rank["loss"] for rank in ranks))


def add_up(model: Any) -> None:
    """Add the gradients of all ranks; a rank without an image has none of the ViT."""
    parameters = list(model.parameters())
    flat = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    for parameter, gradient in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = gradient.view_as(parameter)


def batch_of(group: list[int], way: Way, samples: Samples, collator: PackCollator) -> dict[str, Any]:
    """What the model gets for a micro-batch."""
    items = [samples[number] for number in group]
    if way.padded:
        return samples.collate(items) | {"use_cache": False}
    return collator(PackItems(tuple(group), tuple(items)))


class Memory:
    """What micro-batches keep: the largest of a way are run, as far as a fit to some of the default's tells them."""

    def __init__(self, kind: str, samples: Samples, task: Task) -> None:
        self._samples, self._models, self._fits = samples, {}, {}
        groups = [group for step in default(task).steps for rank in step for group in rank][:FITTED]
        groups = [group[: 1 + number % len(group)] for number, group in enumerate(groups)]
        for padded in (True, False):
            self._models[padded] = model_of(kind, packed=not padded)
            way = Way("", padded, [[groups]])
            values = [self._kept(group, way) for group in groups]
            self._fits[padded] = CostModel.fit(way.load(samples.lengths).ravel(), values)

    def _kept(self, group: list[int], way: Way) -> float:
        model = self._models[way.padded]
        batch = batch_of(group, way, self._samples, PackCollator(self._samples.collate, positions_of(model.config)))
        labels = batch.pop("labels")
        with kept_bytes(model) as kept:
            loss_per_target(model(**batch), labels)
            return float(kept())

    def fullest(self, way: Way, most: float = np.inf) -> float:
        """Bytes that its largest micro-batch keeps; infinity where the fit says that they are far above the most."""
        groups = [group for step in way.steps for rank in step for group in rank]
        fitted = self._fits[way.padded](way.load(self._samples.lengths).ravel())
        if fitted.max() > FAR * most:  # running it might take more than the machine has
            return np.inf
        return max(self._kept(groups[number], way) for number in np.argsort(-fitted)[:LARGEST])

    def within(self, most: float, build: Callable[[Task], Way], task: Task) -> Way:
        """A way with as few micro-batches a step as so many bytes allow, and as many samples."""
        samples = task.batch * task.micro_batches
        for micro_batches in (number for number in range(1, samples + 1) if samples % number == 0):
            way = build(replace(task, micro_batches=micro_batches, batch=samples // micro_batches))
            if self.fullest(way, most) <= most * ROOM:
                return way
        raise SystemExit(f"{way.name} must fit into {most / 2**20:.0f} MiB, got more with one sample at a time")


def look(trained: Trained, samples: Samples, collator: PackCollator) -> None:
    """Note the loss of a target token of the samples that were held out; ranks share them."""
    count = len(samples.lengths)
    own = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for number in range(count - HELD_OUT + dist.get_rank(), count, RANKS):
            batch = batch_of([number], trained.way, samples, collator)
            labels = batch.pop("labels")
            targets = int((labels[:, 1:] != -100).sum())
            own += torch.tensor([loss_per_target(trained.model(**batch), labels).item() * targets, targets])
    dist.all_reduce(own)
    trained.held_out.append(float(own[0] / own[1]))


def compare(rank: int, port: int, kind: str, micro_batches: int, steps: int, out: str) -> None:
    """A process: all ways in turn, a step of each in every round; the first round warms up."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    everything = lengths_of(kind)
    lengths, samples = everything.take(np.arange(len(everything) - HELD_OUT)), Samples(kind, everything)
    task = Task(lengths, RANKS, micro_batches, BATCH)
    memory, first = Memory(kind, samples, task), default(task)
    fit = partial(memory.within, memory.fullest(first), task=task)
    ways = [
        first, fit(group_by_length), fit(rebalance), fit(lambda one: knapsack(one, limits_of(one))), fit(ours),
        fit(partial(ours, padded=True, name="omnibal, padded")),
    ]  # fmt: skip
    trained = []
    for way in ways:
        model = model_of(kind, packed=not way.padded)
        trained.append(Trained(way, model, torch.optim.AdamW(model.parameters(), lr=1e-3)))
    collator = PackCollator(samples.collate, positions_of(trained[0].model.config))
    looks = {round(steps * part / LOOKS) for part in range(1, LOOKS + 1)}
    for number in range(steps + 1):
        for one in trained:
            step(one, number, samples, collator)
            if number in looks:
                look(one, samples, collator)
    if rank == 0:
        Path(out).write_text(json.dumps([record(one) for one in trained]))
    dist.destroy_process_group()


def record(trained: Trained) -> dict[str, Any]:
    """What is kept of a way, as JSON values; the first step warms up."""
    steps = {name: getattr(trained, name)[1:] for name in ("seconds", "kept", "samples", "work", "losses")}
    micro_batches = len(trained.way.steps[0][0])
    return {"name": trained.way.name, "micro_batches": micro_batches, "held_out": trained.held_out, **steps}


def table(found: list[dict[str, Any]]) -> str:
    """Markdown: speed and memory, and the loss over samples seen."""
    lines = [
        "| way | micro-batches | samples/s | gain | over group_by_length | ranks' spread | MiB kept, fullest "
        "| mean rank | samples a step |",
        "|---|" + "---:|" * 8,
    ]
    rates = [sum(way["work"]) / np.array(way["seconds"]).max(axis=1).sum() for way in found]
    for way, rate in zip(found, rates, strict=True):
        seconds, kept = np.array(way["seconds"]), np.array(way["kept"]) / 2**20
        spread = 1 - seconds.min(axis=1).sum() / seconds.max(axis=1).sum()
        lines.append(
            f"| {way['name']} | {way['micro_batches']} | {rate:.1f} | {rate / rates[0]:.2f} | {rate / rates[1]:.2f} "
            f"| {spread:.0%} | {kept.max():.0f} | {kept.max(axis=0).mean():.0f} | {np.mean(way['samples']):.1f} |"
        )
    looks = range(1, LOOKS + 1)
    lines += ["", "| loss of samples held out, after | " + " | ".join(f"{part}/{LOOKS} of the run" for part in looks)
              + " | samples seen |", "|---|" + "---:|" * (LOOKS + 1)]  # fmt: skip
    for way in found:
        losses = " | ".join(f"{loss:.3f}" for loss in way["held_out"])
        lines.append(f"| {way['name']} | {losses} | {sum(way['samples'])} |")
    return "\n".join(lines) + f"\n\n{len(found[0]['seconds'])} steps of each, in turn."


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=["real", "mix", "native"])
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--samples", type=int, default=400, help="that every way trains in each table, about")
    parser.add_argument("--out", type=Path, default=Path("runs/dropin.json"), help="where measured steps are kept")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    kept = {}
    for kind in arguments.kinds:
        for micro_batches in arguments.accumulation:
            steps = max(arguments.samples // (RANKS * BATCH * micro_batches), LOOKS)
            given = (free_port(), kind, micro_batches, steps, str(arguments.out))
            torch.multiprocessing.spawn(compare, args=given, nprocs=RANKS)
            found = json.loads(arguments.out.read_text())
            kept[f"{kind}, accumulation {micro_batches}"] = found
            print(f"\n### {kind}, accumulation {micro_batches}\n\n{table(found)}", flush=True)
    arguments.out.write_text(json.dumps(kept) + "\n")


if __name__ == "__main__":
    main()
