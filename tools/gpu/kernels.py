"""Where the seconds of a trainer's step go: by kind of kernel, and where the device waits for the host."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from omnibal.integrations.trainer.clock import Kernel, busy_seconds, kernels_of
from omnibal.integrations.trainer.compare import begin
from omnibal.integrations.transformers import balance
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
        trainer.args.max_steps = 2 * STEPS
        begin(trainer, run.batches, 2 * STEPS, balance=balance, lengths=run.dataset.lengths)
        watching = Watching(run.device)
        trainer.add_callback(watching)
        trainer.train()
    yield by_kind(watching.kernels, watching.seconds, STEPS)
    yield from longest(watching.kernels, STEPS)


def by_kind(kernels: Sequence[Kernel], seconds: float, steps: int) -> Row:
    """Seconds of a step: of each kind, and those in which no kernel runs.

    Args:
        kernels: Of all steps; some may run at the same time.
        seconds: What all steps took.
        steps: How many they are.
    """
    found = dict.fromkeys([*KINDS, OTHER], 0.0)
    for kernel in kernels:
        found[kind_of(kernel.name)] += (kernel.end - kernel.begin) / steps
    return {"step s": seconds / steps, **found, "host gaps": max(seconds - busy_seconds(kernels), 0.0) / steps}


def longest(kernels: Sequence[Kernel], steps: int) -> list[Row]:
    """The kernels that take most, all calls together."""
    seconds: dict[str, list[float]] = {}
    for kernel in kernels:
        seconds.setdefault(kernel.name[:NAME_LENGTH], []).append(kernel.end - kernel.begin)
    first = sorted(seconds, key=lambda name: -sum(seconds[name]))[:SHOWN]
    return [
        {"kernel": name, "kind": kind_of(name), "calls": len(seconds[name]) // steps, "s": sum(seconds[name]) / steps}
        for name in first
    ]


def seen(watched: profile, device: torch.device) -> list[Kernel]:
    """What torch's profiler saw a device do; on a CPU the outermost operators that have a kind."""
    found = kernels_of(watched, device)
    if device.type == "cpu":
        outermost, until = list[Kernel](), float("-inf")
        for kernel in sorted(found, key=lambda kernel: kernel.begin):
            if kernel.begin >= until and kind_of(kernel.name) != OTHER:
                outermost.append(kernel)
                until = kernel.end
        found = outermost
    if not found:
        raise RuntimeError(f"torch's profiler must see work of {device}, got none")
    return found


class Watching(TrainerCallback):  # type: ignore[misc]
    """Profiles the steps of a training behind its first ones, and ends it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._steps = device, 0
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
        self.kernels = seen(self._profile, self._device)
        control.should_training_stop = True
