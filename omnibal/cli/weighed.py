"""What `omnibal plan` weighed against each other, as a table and as JSON."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from omnibal.planner.search import Choice


def record_of(choice: Choice) -> dict[str, Any]:
    """A choice as JSON values."""
    model = choice.model
    return {
        "num_stages": model.num_stages,
        "schedule": model.schedule_name,
        "micro_batches": model.packing.micro_batches,
        "limits": {
            "vision_units": model.packing.limits.vision_units,
            "llm_tokens": model.packing.limits.llm_tokens,
        },
        "samples_per_step": model.packing.samples_per_step,
        "step_seconds": choice.step_seconds,
        "partition": list(choice.boundaries),
        "recomputed": _recomputed(choice),
    }


def _recomputed(choice: Choice) -> list[int]:
    """Layers of each stage that recompute."""
    levels = np.array(choice.model.levels(choice.boundaries)) != "none"
    return [int(levels[a:b].sum()) for a, b in pairwise(choice.boundaries)]


def weighed_table(choices: Sequence[Choice]) -> Table:
    """A row per packing and number of stages: packs of a replica's step, their limits, and what a step is like."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    names = ("stages", "packs", "tiles", "tokens", "samples", "step s", "samples\na second", "re-\ncompute")
    table.add_column("schedule", overflow="fold", min_width=12)  # with too little room: "zero-bubble-", "lean"
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for choice in choices:
        packing = choice.model.packing
        table.add_row(
            choice.model.schedule_name,
            f"{choice.model.num_stages}",
            f"{packing.micro_batches}",
            f"{packing.limits.vision_units:,}",
            f"{packing.limits.llm_tokens:,}",
            f"{packing.samples_per_step:,.0f}",
            f"{choice.step_seconds:.3f}",
            f"{1 / choice.sample_seconds:,.1f}",
            f"{sum(_recomputed(choice))}",
        )
    return table
