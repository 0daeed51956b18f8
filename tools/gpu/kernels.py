"""Where the seconds of a trainer's step go: by kind of kernel, and where the device waits for the host."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from tools.gpu.jobs import Jobs
from tools.gpu.ladder import Run, Setting, Way, ways
from tools.gpu.models import TINY
from tools.gpu.report import Report, Row

STEPS = 3  # that are profiled, behind as many that are not
SHOWN, NAME_LENGTH = 12, 120
EXPLAINED = (
    "Steps of packs by `balance`, seen by torch.profiler. Kernels are told apart by their "
    "names; host gaps are the seconds in which the device runs nothing. Seconds are of one step."
)
# The first that fits counts: a fused optimizer and a fused attention have products and elementwise work in their names.
KINDS = {
    "optimizer": r"adam|multi_tensor|LpNorm|_foreach",
    "attention": r"flash|fmha|attention|sdpa|mha_",
    "loss": r"softmax|nll_loss|cross_entropy",
    "products": (
        r"gemm|gemv|cutlass|cublas|nvjet|xmma|splitK|convolution|conv2d|implicit_conv|aten::(mm|addmm|bmm|linear)$"
    ),
    "copies": r"memcpy|memset|direct_copy|FillFunctor|CatArray|aten::(copy_|cat|to|_to_copy|clone|fill_|zero_)$",
    "elementwise and norms": (
        r"elementwise|vectorized|reduce|norm|silu|gelu|rotary|index|gather|scatter|embedding|triton_|"
        r"aten::(mul|add|sub|div|neg|pow|mean|sum|rsqrt|sin|cos|where)_?$"
    ),
}
OTHER = "other"


class Kernel(NamedTuple):
    """Work of the device, in seconds."""

    name: str
    begin: float
    end: float


def kind_of(name: str) -> str:
    """The kind of a kernel by its name.

    >>> kind_of("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n"), kind_of("Memcpy HtoD (Pinned -> Device)")
    ('products', 'copies')
    """
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def add_profile(report: Report, *, small: bool) -> None:
    """Two tables of each model: by kind of kernel for each way, and the longest kernels of the first way."""
    settings = (
        [Setting(TINY, batch=2, accumulation=2)] if small else [Setting("8B"), Setting("2B", checkpointing=False)]
    )
    jobs = Jobs(f"{__name__}:profiled")
    try:
        for number, setting in enumerate(settings):
            seconds, kernels = report.seconds_left / (len(settings) - number), list[Row]()
            report.add(str(setting), EXPLAINED, partial(_rows, jobs, setting, seconds, kernels, small))
            report.add(f"{setting}, longest kernels of `balance`", "Calls and seconds of one step.", kernels.copy)
    finally:
        jobs.end()


def _rows(jobs: Jobs, setting: Setting, seconds: float, kernels: list[Row], small: bool) -> Iterator[Row]:
    turns = [way for way in ways(setting) if way.name.startswith("balance")]
    end = monotonic() + seconds
    for number, way in enumerate(turns):
        # Those that come later get what earlier ones leave.
        limit = end - monotonic() if number else seconds / 2
        for row in jobs.rows((setting, way, small), max(limit, 1), batches=way.name):
            if "kernel" not in row:
                yield row
            elif number == 0:
                kernels.append({name: value for name, value in row.items() if name != "batches"})


def profiled(job: tuple[Setting, Way, bool]) -> Iterator[Row]:
    """Seconds of each kind of kernel in the steps of a way; then its longest kernels."""
    setting, way, small = job
    run = Run(setting, way, 0, small=small)
    with TemporaryDirectory() as folder:
        trainer = run.trainer(folder)
        watching = Watching(run.device, Path(folder) / "trace.json")
        trainer.add_callback(watching)
        trainer.train()
    yield by_kind(watching.kernels, watching.seconds, STEPS)
    yield from longest(watching.kernels, STEPS)


def by_kind(kernels: Iterable[Kernel], seconds: float, steps: int) -> Row:
    """Seconds of a step: of each kind, and those in which no kernel runs.

    Args:
        kernels: Of all steps; some may run at the same time.
        seconds: What all steps took.
        steps: How many they are.
    """
    found = dict.fromkeys([*KINDS, OTHER], 0.0)
    busy, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.begin):
        found[kind_of(kernel.name)] += (kernel.end - kernel.begin) / steps
        busy += max(kernel.end - max(kernel.begin, until), 0.0)
        until = max(until, kernel.end)
    return {"step s": seconds / steps, **found, "host gaps": max(seconds - busy, 0.0) / steps}


def longest(kernels: Iterable[Kernel], steps: int) -> list[Row]:
    """The kernels that take most, all calls together."""
    seconds: dict[str, list[float]] = {}
    for kernel in kernels:
        seconds.setdefault(kernel.name[:NAME_LENGTH], []).append(kernel.end - kernel.begin)
    first = sorted(seconds, key=lambda name: -sum(seconds[name]))[:SHOWN]
    return [
        {"kernel": name, "kind": kind_of(name), "calls": len(seconds[name]) // steps, "s": sum(seconds[name]) / steps}
        for name in first
    ]


def kernels_of(trace: Path, device: torch.device) -> list[Kernel]:
    """The kernels of a trace that torch's profiler wrote; on a CPU the outermost operators that have a kind."""
    wanted = ("cpu_op",) if device.type == "cpu" else ("kernel", "gpu_memcpy", "gpu_memset")
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") in wanted]
    found = [Kernel(e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events]
    found.sort(key=lambda kernel: kernel.begin)
    if device.type == "cpu":
        outermost, until = list[Kernel](), float("-inf")
        for kernel in found:
            if kernel.begin >= until and kind_of(kernel.name) != OTHER:
                outermost.append(kernel)
                until = kernel.end
        found = outermost
    if not found:
        raise RuntimeError(f"torch's profiler must see work of {device}, got none")
    return found


class Watching(TrainerCallback):  # type: ignore[misc]
    """Profiles the steps of a training behind its first ones, and ends it."""

    def __init__(self, device: torch.device, trace: Path) -> None:
        self._device, self._trace, self._steps = device, trace, 0
        # Without the host's operators, which take long to note: they would be gaps of the device.
        activity = ProfilerActivity.CPU if device.type == "cpu" else ProfilerActivity.CUDA
        self._profile = profile(activities=[activity])
        self.kernels: list[Kernel] = []
        self.seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Begin, or end, between two steps."""
        self._steps += 1
        if self._steps not in (STEPS, 2 * STEPS):
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        if self._steps == STEPS:
            self._profile.start()
            self.seconds = -perf_counter()
            return
        self.seconds += perf_counter()
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._trace))
        self.kernels = kernels_of(self._trace, self._device)
        control.should_training_stop = True
