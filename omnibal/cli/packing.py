"""What `omnibal pack` computes and says: an epoch packed by any method with a progress bar, measured, drawn."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.table import Table
from tqdm import tqdm

from omnibal.config import PackingSection
from omnibal.data.epoch import Epoch, arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limit_search import find_trap
from omnibal.data.limits import PackLimits
from omnibal.data.packs import Packs
from omnibal.data.policies import Method, Oversized
from omnibal.report.packing import Arranged, PackingFigures, measure_packing, packing_table

BEFORE: Final[Method] = "random"
"""What a picture sets a method against."""
SAMPLES_TO_COMPILE: Final = 64
"""As many samples go through a method before the clock starts: compiled code is compiled once and then cached."""
FATES: Final[dict[Oversized, str]] = {"alone": "each has a pack of its own", "drop": "they are left out", "error": ""}


def arrange(
    lengths: SampleLengths, limits: PackLimits, packing: PackingSection, *, num_replicas: int, micro_batches: int
) -> Epoch:
    """The first epoch, as a ds_config says how to pack."""
    return arrange_epoch(
        lengths, limits, num_replicas=num_replicas, micro_batches=micro_batches, method=packing.method,
        seed=packing.seed, oversized=packing.oversized, exchange_steps=packing.exchange_steps,
    )  # fmt: skip


@dataclass(frozen=True)
class PackingTask:
    """What is packed, for whom, and how."""

    lengths: SampleLengths
    limits: PackLimits
    num_replicas: int
    micro_batches: int
    packing: PackingSection

    def run(self, method: Method) -> tuple[PackingFigures, Arranged]:
        """Arrange the epoch and measure it."""
        first = self.lengths.take(np.arange(min(len(self.lengths), SAMPLES_TO_COMPILE)))
        alone = self.packing.model_copy(update={"oversized": "alone"})
        _pack_all(replace(self, lengths=first, packing=alone).arrange(method), None)
        started = time.perf_counter()
        epoch = self.arrange(method)
        packs = _pack_all(epoch, method)
        figures = measure_packing(
            method,
            self.lengths,
            self.limits,
            packs,
            epoch.steps,
            seconds=time.perf_counter() - started,
            left_out=self.num_oversized if self.packing.oversized == "drop" else 0,
        )
        return figures, Arranged(packs.load(self.lengths), epoch.steps)

    def arrange(self, method: Method) -> Epoch:
        """The epoch, planned as it is asked for."""
        packing = self.packing.model_copy(update={"method": method})
        return arrange(
            self.lengths, self.limits, packing, num_replicas=self.num_replicas, micro_batches=self.micro_batches
        )

    @property
    def num_oversized(self) -> int:
        """Samples that exceed a limit on their own."""
        return len(self.limits.oversized(self.lengths))

    @property
    def title(self) -> str:
        """The task in a line, and a second one where samples exceed a limit."""
        task = (
            f"{len(self.lengths):,} samples, limits {self.limits.vision_units:,} vision units and "
            f"{self.limits.llm_tokens:,} LLM tokens, {self.num_replicas} ranks × {self.micro_batches} micro-batches"
        )
        if not self.num_oversized:
            return task
        return f"{task}\n{self.num_oversized:,} samples exceed a limit on their own: {FATES[self.packing.oversized]}"

    def to_record(self) -> dict[str, Any]:
        """The task as JSON values."""
        return {
            "samples": len(self.lengths),
            "limits": asdict(self.limits),
            "num_replicas": self.num_replicas,
            "micro_batches": self.micro_batches,
            "seed": self.packing.seed,
            "exchange_steps": self.packing.exchange_steps,
            "oversized": {"policy": self.packing.oversized, "samples": self.num_oversized},
        }


def _pack_all(epoch: Epoch, method: Method | None) -> Packs:
    """Plan every window of an epoch; a bar shows how far it is, where a method is given and someone is looking."""
    windows = []
    with tqdm(total=epoch.num_steps, desc=method, unit=" steps", leave=False, disable=None if method else True) as bar:
        for window in epoch:
            windows.append(window.packs)
            bar.update(window.num_steps)
    return Packs.concatenate(windows)


@dataclass(frozen=True)
class PackingReport:
    """All that `omnibal pack` says."""

    task: PackingTask
    figures: Sequence[PackingFigures]
    """One entry per method."""
    plots: Sequence[Path]

    @property
    def warnings(self) -> list[str]:
        """Whether the limits are a trap."""
        trap = find_trap(self.task.lengths, self.task.limits)
        return [] if trap is None else [trap]

    def to_record(self) -> dict[str, Any]:
        """The report as JSON values."""
        return self.task.to_record() | {
            "methods": [entry.to_record() for entry in self.figures],
            "warnings": self.warnings,
            "plots": [str(path) for path in self.plots],
        }

    def parts(self) -> list[str | Table]:
        """Tables and warnings for people."""
        return [
            self.task.title,
            packing_table(self.figures),
            *(f"warning: {warning}" for warning in self.warnings),
            *(f"drawn: {path}" for path in self.plots),
        ]
