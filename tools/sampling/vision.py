"""Packers of trainers of vision-language models side by side, by what their ranks wait for; see README.md."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from omnibal.cost import FloatArray
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packs import Packs
from tools.bench import machine, table
from tools.sampling.compare import HERE, peer_version, peers_python
from tools.sampling.data import REAL, real_lengths
from tools.sampling.measure import Planned, figures_of, plan_by_peers, plan_ours
from tools.sampling.rules import Task

RESULTS = HERE / "vision.json"
SETTINGS = (PackLimits(16, 4096), PackLimits(64, 16384))
RANKS = (8, 64)
PEERS = {
    "automodel_vt_balanced": "Automodel, as shipped (packs sorted by vision)",
    "automodel_shuffled": "Automodel's packs, shuffled",
    "lmms_first_fit": "lmms-engine FirstFit",
    "lmms_best_fit": "lmms-engine BestFit",
    "lmms_balanced": "lmms-engine BalancedPacking",
    "verl_karmarkar_karp": "verl karmarkar_karp per step, no limits",
}
OURS = "**omnibal**"
GROUPED = "omnibal's packs, those of equal vision in one step"


def main(
    lengths: Annotated[
        Path, typer.Option(help="A folder of length lists; made-up lengths where there is none.")
    ] = REAL,
    python: Annotated[Path | None, typer.Option(help="The peers' interpreter; by default one that is made.")] = None,
) -> None:
    """Arrange the same lengths by each packer, write vision.json and print a table."""
    python = python or peers_python()
    found, name = real_lengths(lengths)
    rows: list[dict[str, Any]] = []
    for limits in SETTINGS:
        for ranks in RANKS:
            rows += compare(found, limits, ranks, python)
            RESULTS.write_text(json.dumps({"made_with": made_with(), "lengths": name, "rows": rows}, indent=1) + "\n")
    for limits in SETTINGS:
        print(f"\n## {limits.llm_tokens:,} tokens, {limits.vision_units} tiles\n\n{table_of(rows, limits)}")


COLUMNS = {
    "both": ("both", ".3f"), "vision": ("vision", ".3f"), "vision, least": ("vision_least", ".3f"),
    "tokens": ("tokens", ".3f"), "corr": ("corr", "+.2f"), "χ²": ("chi2", ".2f"), "packs": ("packs", ","),
    "lost": ("lost", ""), "repeated": ("repeated", ""), "over limit": ("over_limit", ".0%"),
    "seconds": ("seconds", ".2f"),
}  # fmt: skip


def made_with() -> str:
    """Date, machine and versions."""
    peers = ", ".join(f"{package} {peer_version(package)}" for package in ("nemo-automodel", "lmms-engine", "verl"))
    return f"{machine('numpy', 'numba')}; peers: {peers}"


def table_of(rows: list[dict[str, Any]], limits: PackLimits) -> str:
    """Each method's figures at 8 and 64 ranks."""
    cells = []
    for method in dict.fromkeys(row["method"] for row in rows):
        both = [row for row in rows if row["method"] == method and row["llm_tokens"] == limits.llm_tokens]
        cells.append([method, *(" / ".join(f"{row[name]:{form}}" for row in both) for name, form in COLUMNS.values())])
    return table(["method", *COLUMNS], cells)


def compare(lengths: SampleLengths, limits: PackLimits, ranks: int, python: Path) -> list[dict[str, Any]]:
    """Rows of all methods for one setting; methods without limits get as many samples a pack as ours."""
    started = time.perf_counter()
    ours = plan_ours("balanced", Task(lengths, limits, ranks, 1))
    task = Task(lengths, limits, ranks, round(len(lengths) / len(ours.packs)))
    planned = plan_by_peers(task, python, list(PEERS))
    rows = [row_of(label, name, planned[name], task) for name, label in PEERS.items()]
    rows += [
        row_of(f"{PEERS[name]}, images moved by lpt_balance", name, planned[name], task, moved=True)
        for name in PEERS
        if name.startswith("lmms")
    ]
    print(
        f"{limits.llm_tokens}/{limits.vision_units}, {ranks} ranks: {time.perf_counter() - started:.0f} s", flush=True
    )
    grouped = Planned(grouped_by_vision(ours.packs, task), ours.seconds)
    return [*rows, row_of(OURS, "balanced", ours, task), row_of(GROUPED, "balanced", grouped, task)]


def grouped_by_vision(packs: Packs, task: Task) -> Packs:
    """The same packs in steps of equal vision units, in random order; what fills no step is left out."""
    generator, units = task.generator(), packs.vision_units(task.lengths)
    order = np.lexsort((generator.random(len(packs)), units))
    steps = order[: len(order) // task.num_replicas * task.num_replicas].reshape(-1, task.num_replicas)
    picked = [packs[pack] for pack in generator.permutation(steps).ravel()]
    return Packs(np.concatenate(picked), np.cumsum([0, *map(len, picked)]))


def row_of(label: str, name: str, planned: Planned, task: Task, *, moved: bool = False) -> dict[str, Any]:
    """What ranks wait, how sorted the steps are, and what is lost."""
    load = planned.packs.load(task.lengths)
    steps = np.arange(len(planned.packs)).reshape(-1, task.num_replicas)
    units = planned.encoded if moved and planned.encoded is not None else load.vision_units
    vision, tokens = np.asarray(units, dtype=float)[steps], load.llm_tokens[steps]
    figures = figures_of(name, planned, task)
    return {
        "method": label,
        **{"llm_tokens": task.limits.llm_tokens, "vision_units": task.limits.vision_units, "ranks": task.num_replicas},
        "both": over_ideal(vision / vision.mean() + tokens / tokens.mean()),
        "vision": over_ideal(vision),
        "vision_least": float(np.ceil(vision.mean(axis=1)).sum() / vision.mean(axis=1).sum()),
        "tokens": over_ideal(tokens),
        "corr": float(np.corrcoef(np.arange(len(steps)), vision.sum(axis=1))[0, 1]),
        "chi2": figures.randomness,
        **{"packs": figures.packs, "lost": figures.lost, "repeated": figures.repeated},
        "over_limit": figures.over_limit / figures.packs,
        "seconds": planned.seconds,
    }


def over_ideal(loads: FloatArray) -> float:
    """The largest rank of each step, summed over the steps, in multiples of the mean rank; loads are (steps, ranks)."""
    return float(loads.max(axis=1).sum() / loads.mean(axis=1).sum())


if __name__ == "__main__":
    typer.run(main)
