"""What a GPU says to what is counted and predicted, part by part. See README.md; run.sh calls this.

python -m tools.gpu.measure PART --out FOLDER [--minutes 7.5] [--small]
"""

import argparse
import platform
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from tools.bench import machine
from tools.gpu.cells import add_cluster, add_tests
from tools.gpu.engine import Runs
from tools.gpu.kernels import add_profile
from tools.gpu.ladder import add_ladder
from tools.gpu.layers import LayerBench, attention_rows, counted_device, peak_rows
from tools.gpu.models import models
from tools.gpu.ranks import add_ranks
from tools.gpu.report import REPORT, Report, Row
from tools.head.bench import SHARES, VOCABULARIES, compared

PACKAGES = ("torch", "transformers", "deepspeed", "peft", "triton", "numpy", "numba")


def main() -> None:
    """Measure one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results of all parts")
    parser.add_argument("--minutes", type=float, default=7.5, help="what the part may take")
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU: does everything run at all?")
    given = parser.parse_args()
    if not given.small and not torch.cuda.is_available():
        parser.error("a CUDA device must be there, got none; --small tries the measurements without one")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # processes of the part are ended on the way
    report = Report(given.out, given.part, made(small=given.small), 60 * given.minutes)
    PARTS[given.part](report, small=given.small)
    print(f"written: {given.out / REPORT}; {report.failures} failures")
    sys.exit(1 if report.failures else 0)


def made(*, small: bool) -> str:
    """Where and with what."""
    name = platform.machine() if small else f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{name}, {machine(*PACKAGES)}"


def add_layers(report: Report, *, small: bool) -> None:
    """What plain work reaches, layers and short runs beside what is counted; what everything leans on first."""
    device = torch.device("cpu" if small else "cuda:0")
    counted = counted_device("cpu" if small else torch.cuda.get_device_name(device))
    bench = LayerBench(models(small=small), device, counted, *((4, 256) if small else (16, 8192)))
    report.add("The device", "What plain work reaches.", lambda: peak_rows(device, 256 if small else 8192, counted))
    if device.type == "cuda":
        report.add("Memory", "What a process takes before it does anything, in MiB.", memory_rows)
    report.add("Attention", "Forward and backward, 28 heads of 128, 4 of keys, bf16.",
               lambda: attention_rows(device, 512 if small else 8192))  # fmt: skip
    share = f"products at {counted.fraction:.0%} of its peak"
    explanation = f"Times beside those counted for {counted.name}, {share}; bf16."
    report.add("Layers", explanation, bench.times)
    for title, text, rows in (
        ("The affine model", "Its error against what it was fitted to, by share of the largest pack.", bench.fits),
        ("Recompute", "The largest pack.", bench.recomputed),
        ("The host", "To start a forward pass of the largest pack.", bench.hosts),
    ):
        report.add(title, text, rows.copy)
    first, model = next(iter(bench.models.items()))
    runs = Runs(first, model, counted, *((1, 64) if small else (4, 2048)), small=small)
    report.add("Peaks", f"{first} on one device, bf16, ZeRO 1, sums in float32; counted costs.", runs.peaks)
    sizes = ((1000,), SHARES, 32, 64) if small else (VOCABULARIES, SHARES, 4096, 8192)
    report.add("Head and loss", "Logits of all rows, and of target rows alone; bf16, forward and backward.",
               lambda: compared(*sizes, torch.bfloat16, 3))  # fmt: skip
    num_devices = 0 if small else torch.cuda.device_count()
    shared = "" if num_devices > 1 else "They share one device, over sockets: times mean nothing."
    text = f"The same in two stages. {shared}"
    report.add("Two stages", text, lambda: runs.pipelines(num_devices))
    text = f"Two replicas: gradients and weights layer by layer, and as DeepSpeed sends them. {shared}"
    report.add("Two replicas", text, lambda: runs.replicas(num_devices))


def memory_rows() -> Iterable[Row]:
    """What the context takes."""
    torch.ones(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    taken = total - free - torch.cuda.memory_reserved()
    yield {"total": total / 2**20, "free": free / 2**20, "context and what else runs": taken / 2**20}


PARTS: dict[str, Callable[..., None]] = {
    "cluster": add_cluster,
    "ladder": add_ladder,
    "profile": add_profile,
    "ranks": add_ranks,
    "layers": add_layers,
    "tests": add_tests,
}


if __name__ == "__main__":
    main()
