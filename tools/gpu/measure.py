"""What a GPU says to what is counted and predicted: one dated report. See README.md; run.sh calls this.

python -m tools.gpu.measure --out FOLDER [--minutes 7] [--small]
"""

import argparse
import platform
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from omnibal.device import Device
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.vlm.measure import image_tokens_per_tile
from tools.bench import machine
from tools.gpu.cluster import cluster_rows, trainer_rows
from tools.gpu.engine import Runs
from tools.gpu.layers import LayerBench, attention_rows, counted_device, peak_rows
from tools.gpu.models import models
from tools.gpu.report import Report, Row
from tools.head.bench import SHARES, VOCABULARIES, compared
from tools.replay.bench import Bench, shorter
from tools.replay.replay import drawn

PACKAGES = ("torch", "transformers", "deepspeed", "triton", "numpy", "numba")


def main() -> None:
    """Measure part by part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for REPORT.md and report.json")
    parser.add_argument("--minutes", type=float, default=7, help="what all parts together may take")
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU: does everything run at all?")
    arguments = parser.parse_args()
    small = arguments.small
    if not small and not torch.cuda.is_available():
        parser.error("a CUDA device must be there, got none; --small tries the measurements without one")
    device = torch.device("cpu" if small else "cuda:0")
    name = platform.machine() if small else torch.cuda.get_device_name(device)
    report = Report(arguments.out, heading(name), 60 * arguments.minutes)
    measure(report, device, name, small=small)
    print(f"written: {arguments.out / 'REPORT.md'}")
    sys.exit(1 if report.failed else 0)


def measure(report: Report, device: torch.device, name: str, *, small: bool) -> None:
    """All parts, the ones that everything else leans on first."""
    counted = counted_device(name)
    bench = LayerBench(models(small=small), device, counted, *((4, 256) if small else (16, 8192)))
    report.add("The device", "What plain work reaches.", lambda: peak_rows(device, 256 if small else 8192, counted))
    if device.type == "cuda":
        report.add("Memory", "What a process takes before it does anything, in MiB.", memory_rows)
    report.add("Attention", "Forward and backward, 28 heads of 128, 4 of keys, bf16.",
               lambda: attention_rows(device, 512 if small else 8192))  # fmt: skip
    first, model = next(iter(bench.models.items()))
    rows = partial(trainer_rows, model.config, small=small)
    report.add("A trainer", f"transformers.Trainer on one device, {first}, 16 samples a step, bf16.", rows)
    add_cluster(report, model, *((2, 2, 1) if small else (8, 4, 3)), small=small)
    add_layers(report, bench, counted)
    sample = (1, 64) if small else (4, 2048)
    runs = Runs(first, model, counted, *sample, small=small)
    report.add("Peaks", f"{first} on one device, bf16, ZeRO 1, sums in float32; counted costs.", runs.peaks)
    add_cluster(report, model, *((4, 1, 1) if small else (64, 1, 2)), small=small)
    sizes = ((1000,), SHARES, 32, 64) if small else (VOCABULARIES, SHARES, 4096, 8192)
    report.add("Head and loss", "Logits of all rows, and of target rows alone; bf16, forward and backward.",
               lambda: compared(*sizes, torch.bfloat16, 3))  # fmt: skip
    num_devices = 0 if small else torch.cuda.device_count()
    report.add(
        "Two stages",
        "The same in two stages; on one device transfers pass through the host, and the stages share it.",
        lambda: runs.pipelines(num_devices),
    )
    report.add(
        "Two replicas",
        "The same in one stage of two replicas: gradients and weights layer by layer, and as DeepSpeed sends them.",
        lambda: runs.replicas(num_devices),
    )


def add_layers(report: Report, bench: LayerBench, counted: Device) -> None:
    """Layers beside what is counted for them, and what else was measured meanwhile."""
    explanation = f"Times beside those counted for {counted.name} at {counted.fraction:.0%} of its peak; bf16."
    report.add("Layers", explanation, bench.times)
    parts: dict[str, tuple[str, Iterable[Row]]] = {
        "The affine model": ("Its error against what it was fitted to, by share of the largest pack.", bench.fits),
        "Recompute": ("The largest pack.", bench.recomputed),
        "The host": ("To start a forward pass of the largest pack.", bench.hosts),
    }
    for title, (text, rows) in parts.items():
        report.add(title, text, lambda rows=rows: rows)  # type: ignore[misc]


def add_cluster(
    report: Report, model: VisionLanguageModel, ranks: int, micro_batches: int, steps: int, *, small: bool
) -> None:
    """What batches of all ranks of a cluster take, one after another."""
    bench = Bench(model.config, torch.float32 if small else torch.bfloat16)
    lengths = drawn("mix", ranks, micro_batches)
    if small:
        lengths = shorter(lengths, tokens_per_tile=image_tokens_per_tile(model))
    text = f"{steps} steps of {ranks} ranks, each micro-batch alone; waits by omnibal.advise.wait, no talk."
    report.add(f"Batches of {ranks} ranks", text, partial(cluster_rows, bench, lengths, ranks, micro_batches, steps))


def memory_rows() -> Iterable[Row]:
    """What the context takes."""
    torch.ones(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    taken = total - free - torch.cuda.memory_reserved()
    yield {"total": total / 2**20, "free": free / 2**20, "context and what else runs": taken / 2**20}


def heading(name: str) -> str:
    """Where and with what."""
    return f"# Measured on {name}\n\n{torch.cuda.device_count()} CUDA device(s), {machine(*PACKAGES)}"


if __name__ == "__main__":
    main()
