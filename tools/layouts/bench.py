"""Which layout wins for which model, machines and trained parts: python -m tools.layouts.bench; see README.md.

Writes results.json as it goes, goes on where it was cut off, and prints the tables of RESULTS.md from the file.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from omnibal.advise.estimate import Scenario
from omnibal.advise.layouts import KINDS, weigh_layouts
from omnibal.advise.models import Model
from omnibal.cluster import Cluster
from omnibal.data.lengths import SampleLengths
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import ModelProfile
from tools.bench import machine, table
from tools.synthetic import patch_lengths, tiled_lengths

FILE: Final = Path(__file__).with_name("results.json")
PER_DEVICE: Final = 8
"""Samples of a step on each device."""
SAMPLES: Final = 60_000
MODELS: Final = (
    ("Qwen2.5-VL-7B", 1), ("InternVL3-8B", 4), ("InternVL3-38B", 8), ("InternVL3-78B", 8), ("InternVL3-78B", 16),
    ("InternVL3-78B", 64), ("Qwen2.5-VL-72B", 16),
)  # fmt: skip
"""Model, and nodes of eight devices."""
DEVICES: Final = ("A100-80GB", "H100-80GB")
FROZEN: Final[dict[str, tuple[str, ...]]] = {"trained": (), "ViT frozen": ("vision",)}


def lengths(model: str) -> SampleLengths:
    """InternVL's mix for models of tiles; made-up documents and photographs for models of patches."""
    return tiled_lengths(SAMPLES, seed=1) if model.startswith("InternVL") else patch_lengths(SAMPLES, seed=1)


def weigh(model: str, nodes: int, device: str, frozen: tuple[str, ...]) -> dict[str, Any]:
    """One cell of the table, as a record."""
    cluster, records = Cluster.parse(f"{nodes}x8x{device}"), Model.known(model).records

    def profiles(encoder: int, language: int) -> ModelProfile:
        degrees = {"vision": encoder, "language": language}
        return analytic_profile(records, cluster.device, tensor_parallel=degrees, frozen=frozen)

    scenario = Scenario(lengths(model), profiles(1, 1), cluster, PER_DEVICE * cluster.num_devices, spares_rows=True)
    begun = time.process_time()
    answer = weigh_layouts(scenario, profiles)
    return {
        "model": model,
        "cluster": str(cluster),
        "processor_seconds": round(time.process_time() - begun, 1),
        "missing_gib": {kind: round(missing / 2**30, 1) for kind, missing in answer.missing_bytes.items()},
        "winner": answer.winner and answer.winner.kind,
        "candidates": [
            {
                "kind": each.kind,
                "layout": each.layout,
                "micro_batches": each.micro_batches,
                "samples_per_second": round(each.samples_per_second, 2),
                "unhidden": each.unhidden_samples_per_second and round(each.unhidden_samples_per_second, 2),
                "peak_gib": round(each.peak_bytes / 2**30, 1),
                "shares": {cause: round(share, 3) for cause, share in each.shares.items()},
            }
            for each in answer.candidates
        ],
    }


def run() -> None:
    """Weigh all that the file does not hold yet."""
    results: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"made": machine("numpy"), "cells": {}}
    cells = [(model, nodes, device, part) for part in FROZEN for device in DEVICES for model, nodes in MODELS]
    for model, nodes, device, part in tqdm(cells):
        name = f"{model}, {nodes}x8x{device}, {part}"
        if name not in results["cells"]:
            results["cells"][name] = {"trained": part, **weigh(model, nodes, device, FROZEN[part])}
            FILE.write_text(json.dumps(results, indent=1) + "\n")


def tables() -> None:
    """Print the tables of RESULTS.md."""
    results = json.loads(FILE.read_text())
    print(f"Made {results['made']}.")
    for part in FROZEN:
        names = ["model, devices", *KINDS, "simplest of the best"]
        print(f"\n## {part[0].upper() + part[1:]}\n\n{table(names, _rows(results, part))}")


def _rows(results: dict[str, Any], part: str) -> list[list[str]]:
    rows = []
    for cell in results["cells"].values():
        if cell["trained"] != part:
            continue
        found = {each["kind"]: each for each in cell["candidates"]}
        row = [f"{cell['model']}, {cell['cluster']}"]
        for kind in KINDS:
            if kind in found:
                openly = found[kind]["unhidden"]
                shown = f"{found[kind]['samples_per_second']:.1f}" + (f" ({openly:.1f})" if openly else "")
                row.append(f"**{shown}**" if kind == cell["winner"] else shown)
            else:
                row.append(f"lacks {cell['missing_gib'][kind]} GiB")
        rows.append([*row, cell["winner"] or "none fits"])
    return rows


if __name__ == "__main__":
    if "--tables" not in sys.argv:
        run()
    tables()
