"""What the head on target rows alone brings to a pipeline, simulated in tools/paper's setting; see README.md."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Annotated

import numpy as np
import typer

from omnibal.cost import CostModel, Load
from omnibal.planner.search import Variant
from omnibal.profile.records import LayerCost
from tools.bench import table
from tools.paper.ladder import best, fitted, gpu_days, limits_days, paper_cut, rung
from tools.paper.setting import Setting

PUBLISHED_DAYS = 21.3
"""Of the last row of the paper's Table 7, which the device's speed is fitted to, with a head on all rows."""
FACTORS = {"ViT as counted": (8, 1.0), "ViT 1.5 times as long": (64, 1.5)}
SCHEDULES = {"ours, 1F1B": "1f1b", "ours, any schedule": "auto"}


def main(factor: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(FACTORS)}; all.")] = None) -> None:
    """Print the tables as Markdown."""
    for name in factor or FACTORS:
        micro_batches, times = FACTORS[name]
        before = fitted(Setting(micro_batches=micro_batches, vision_factor=times), PUBLISHED_DAYS)
        after = replace(before, target_rows=True)
        tops = {kind: (best(before, schedule), best(after, schedule)) for kind, schedule in SCHEDULES.items()}
        print(f"### {name}\n")
        heads = ("", "all rows", "target rows", "all busy, before", "and after", "cuts", "micro-batches", "schedules")
        print(table(heads, [*_paper(before, after), *(_row(kind, before, after, *top) for kind, top in tops.items())]))
        print()
        print(table(("", "GPU days", "against"), list(_evened(after, tops["ours, any schedule"][1]))), flush=True)
        print()


def _paper(before: Setting, after: Setting) -> Iterator[tuple[str, ...]]:
    """The paper's packs and cut; its method finds another one where the head costs less."""
    levels = ("full",) * len(before.profile.layers)
    found = (rung(one, "+ model", one.packed, paper_cut(one, one.packed), levels) for one in (before, after))
    yield _row("the paper's packs and method, all recomputed", before, after, *found)


def _row(name: str, before: Setting, after: Setting, old: Variant, new: Variant) -> tuple[str, ...]:
    both = ((before, old), (after, new))
    days = (f"{gpu_days(setting, of):.2f}" for setting, of in both)
    busy = (f"{limits_days(setting, of)[1]:.2f}" for setting, of in both)
    cuts = (" ".join(map(str, of.plan.partition.boundaries)) for _, of in both)
    counts = (str(of.plan.micro_batches) for _, of in both)
    schedules = dict.fromkeys(of.plan.schedule for _, of in both)
    return name, *days, *busy, " / ".join(cuts), " / ".join(counts), " / ".join(schedules)


def _evened(setting: Setting, of: Variant) -> Iterator[tuple[str, ...]]:
    """What more would do: targets as even as can be, and weight gradients of the head that wait for their turn."""
    days = gpu_days(setting, of)
    yield "as it is", f"{days:.3f}", ""
    mean = float(of.load.target_tokens.mean())
    evened = tuple(tuple(_with_targets(load, mean) for load in step) for step in of.steps)
    for name, variant in (
        ("every micro-batch with the mean of targets", replace(of, steps=evened)),
        ("the head's weight gradients wait, as if its logits were kept", _waiting(of)),
    ):
        found = gpu_days(setting, variant)
        yield name, f"{found:.3f}", f"{found / days - 1:+.2%}"
    spread = fmean(float(load.target_tokens.std()) for step in of.steps for load in step) / mean
    yield "targets of a micro-batch: standard deviation over mean", f"{spread:.0%}", ""


def _with_targets(load: Load, number: float) -> Load:
    columns = load.vision_units, load.llm_tokens, load.llm_tokens_squared, load.vision_squared
    return Load(*columns, target_tokens=np.full(load.shape, number))


def _waiting(of: Variant) -> Variant:
    """The last layer's three products in the three passes of a split backward pass."""
    *others, head = of.profile.layers
    third: CostModel = head.forward_seconds * (1 / 3)
    split: LayerCost = replace(
        head, forward_seconds=third, backward_seconds=third, weight_seconds=third, recompute_seconds={}
    )
    return replace(of, profile=replace(of.profile, layers=(*others, split)))


if __name__ == "__main__":
    typer.run(main)
