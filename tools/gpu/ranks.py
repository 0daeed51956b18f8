"""Batches of many ranks, run one after another on one device: what ranks would wait for each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnibal.advise.wait import PHASES
from omnibal.integrations.trainer.calibration import PassTimer, passes_of
from omnibal.integrations.trainer.steps import counted_profile
from omnibal.packs.apart import attend_by_bounds
from omnibal.packs.collator import PackCollator, arguments_of, positions_of
from omnibal.profile.calibration import PARTS
from tools.dropin.ways import Task, Way, by_tokens, default, group_by_length, ours
from tools.gpu.jobs import Jobs
from tools.gpu.models import TINY, TiledDataset, random_model
from tools.gpu.report import FAILED, Report, Row
from tools.parity.run import padded_batch
from tools.replay.replay import composed

GIB = 2**30
CLUSTERS, SMALL = ((8, 4, 2), (64, 1, 2)), ((2, 2, 1), (3, 1, 1))
"""Ranks, micro-batches of a rank's step, steps."""
SAMPLES_A_BATCH, TRAINERS = 4, {"ZeRO 3": "zero3", "DDP": "ddp"}
EXPLAINED = (
    "Each micro-batch of each rank runs alone, forward and backward with gradient checkpointing, padded ones under the "
    "mask that transformers makes. Ranks wait by omnibal.advise.wait: under ZeRO 3 in each phase of each micro-batch, "
    "under DDP once a step. No talk between ranks and no optimizer is counted."
)


def add_ranks(report: Report, *, small: bool) -> None:
    """A table of each cluster."""
    name, clusters = (TINY, SMALL) if small else ("8B", CLUSTERS)
    jobs = Jobs(f"{__name__}:measured", keeps=True)
    try:
        for number, cluster in enumerate(clusters):
            # A step of all ranks takes as long as its micro-batches are many; what one cluster leaves is for the next.
            passes = [ranks * micro_batches for ranks, micro_batches, _ in clusters[number:]]
            seconds = report.seconds_left * passes[0] / sum(passes)
            title = "{}, {} ranks, {} micro-batches of each a step".format(name, *cluster[:2])
            report.add(title, EXPLAINED, partial(cluster_rows, jobs, name, cluster, seconds))
    finally:
        jobs.end()


def cluster_rows(jobs: Jobs, name: str, cluster: tuple[int, int, int], seconds: float) -> Iterator[Row]:
    """Rows of single steps, all ways in turns, and what they compose to."""
    ranks, micro_batches, steps = cluster
    count, end = samples_of(ranks, micro_batches), monotonic() + seconds
    ways = ways_of(name, ranks, micro_batches)
    rows: dict[str, list[Row]] = {way.name: [] for way in ways}
    for step in range(steps):
        began = monotonic()
        for way in ways:
            job = name, count, way.padded, way.steps[step]
            for row in jobs.rows(job, max(end - monotonic(), 1), batches=way.name, step=step):
                if FAILED not in row:
                    rows[way.name].append(row)
                yield row
        if 2 * monotonic() - began > end:
            break
    yield from composed_rows(rows)


def ways_of(name: str, ranks: int, micro_batches: int) -> list[Way]:
    """Random, grouped and packed batches of the same samples, with the names that the ladder has for them."""
    lengths = TiledDataset.of(name, samples_of(ranks, micro_batches)).lengths
    task = Task(lengths, ranks, micro_batches, SAMPLES_A_BATCH)
    # A few steps stand for all: those that hold about as many tokens, padding among them, as steps do on average.
    names = {"random": default, "balance": ours, "packed by tokens": by_tokens, "group_by_length": group_by_length}
    found = []
    for title, make in names.items():
        way = make(task)
        tokens = way.load(lengths).llm_tokens.sum(axis=(1, 2))
        order = np.argsort(abs(tokens - tokens.mean()), kind="stable")
        found.append(Way(title, way.padded, [way.steps[step] for step in order]))
    return found


def samples_of(ranks: int, micro_batches: int) -> int:
    """Samples of some steps: of many, as an order by length must have many to be one."""
    return max(12 * SAMPLES_A_BATCH * ranks * micro_batches, 400)


def composed_rows(measured: dict[str, list[Row]]) -> Iterator[Row]:
    """What ranks would wait, by the steps that were measured of all ways."""
    common = min(filter(None, map(len, measured.values())), default=0)
    base: dict[str, float] = {}
    for way, rows in measured.items():
        if not rows:
            continue
        kept = rows[:common]
        seconds = np.array([row["seconds"] for row in kept])  # steps, ranks, micro-batches, phases
        tokens = sum(row["tokens"] for row in kept)
        found: dict[str, Any] = {"batches": way, "step": f"all {common}", "busy s": float(seconds.sum())}
        rates = composed(seconds, tokens)
        for title, trainer in TRAINERS.items():
            rate, waits = rates[trainer]
            found |= {f"{title}, times random": rate / base.setdefault(title, rate), f"{title} waits": waits}
        held = [peak for row in kept for peak in row["peaks"]]
        yield found | {"fullest rank GiB": max(held), "mean rank GiB": sum(held) / len(held)}


class Bench:
    """A model of transformers whose passes are timed, ViT and LLM apart."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.device, self._model = device, random_model(name, device)
        self._model.train()
        self._model.gradient_checkpointing_enable()
        kind = None if device.type == "cpu" else torch.cuda.get_device_name()
        self._profile = counted_profile(self._model, kind)
        self._timer = PassTimer(self._model, device)
        self._undo: Any = None
        positions, arguments = positions_of(self._model.config), arguments_of(self._model)
        self._collator = PackCollator(padded_batch, positions, arguments=arguments)

    def attend(self, *, padded: bool) -> None:
        """Let the LLM attend as batches, or as packs, need it."""
        if padded and self._undo is not None:
            self._undo()
            self._undo = None
        if not padded and self._undo is None:
            self._undo = attend_by_bounds(self._model)

    def collated(self, items: Sequence[Any], *, padded: bool) -> dict[str, Any]:
        """What the model gets, in the host's memory."""
        if padded:
            return padded_batch(list(items))
        return self._collator.pack([self._collator.sample(item) for item in items])

    def seconds(self, batch: dict[str, Any]) -> list[float]:
        """Seconds of ``PHASES``: of the forward pass, and of the backward pass with its recomputation."""
        given = {name: each.to(self.device) if isinstance(each, Tensor) else each for name, each in batch.items()}
        loss = self._model(**given).loss
        loss.backward()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        (marks,) = self._timer.marks
        self._timer.marks = []
        passes = passes_of(marks, (1.0,) * 5, self._profile)
        found = {part: each.seconds for part, each in zip(PARTS, passes, strict=True)}
        return [found[phase] for phase in PHASES]


@cache
def bench_of(name: str) -> Bench:
    """A model that is made once, and whose kernels are loaded."""
    bench, dataset = Bench(name, device_of(name)), TiledDataset.of(name, 8)
    for padded in (True, False):
        bench.attend(padded=padded)
        bench.seconds(bench.collated([dataset[sample] for sample in range(4)], padded=padded))
    return bench


def device_of(name: str) -> torch.device:
    """The tiny model runs on a CPU."""
    return torch.device("cpu" if name == TINY else "cuda:0")


def measured(job: tuple[str, int, bool, list[list[list[int]]]]) -> Iterator[Row]:
    """The row of one step: seconds of all passes of all ranks, and the fullest moment of each rank."""
    name, count, padded, step = job
    bench, dataset, on_gpu = bench_of(name), TiledDataset.of(name, count), device_of(name).type == "cuda"
    bench.attend(padded=padded)
    seconds, peaks = list[list[list[float]]](), list[float]()
    for rank in step:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds.append([bench.seconds(bench.collated([dataset[s] for s in batch], padded=padded)) for batch in rank])
        peaks.append(torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0)
    tokens = sum(int(dataset.lengths.llm_tokens[batch].sum()) for rank in step for batch in rank)
    yield {"tokens": tokens, "busy s": float(np.sum(seconds)), "seconds": seconds, "peaks": peaks}
