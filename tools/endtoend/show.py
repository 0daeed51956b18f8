"""The measured ladder as a table and a picture: python -m tools.endtoend.show pipeline.json replicas.json."""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from omnibal.report.style import SERIES, drawing
from tools.bench import head, line

HERE = Path(__file__).parent


def main() -> None:
    """Print Markdown and draw."""
    runs = [json.loads(Path(path).read_text()) for path in sys.argv[1:]]
    for run in runs:
        print(f"\n### {_title(run)}\n\n{_table(run)}\n")
    _draw(runs, HERE / "ladder.png")


def _title(run: dict[str, Any]) -> str:
    return "A pipeline of two stages" if run["stages"] == 2 else "Two replicas"


def _rates(way: dict[str, Any]) -> list[float]:
    """Samples per second of every timed step."""
    return [samples / seconds for samples, seconds in zip(way["samples"], way["seconds"], strict=True)]


def _throughput(way: dict[str, Any]) -> float:
    """Samples per second of all timed steps."""
    return float(sum(way["samples"]) / sum(way["seconds"]))


def _table(run: dict[str, Any]) -> str:
    rates = ("samples/s, median", "10 % … 90 % of steps", "all steps", "gain", "simulated")
    lines = [head(("", *rates, "cores busy", "MiB of a stage"))]
    first = run["ways"][0]
    for way in run["ways"]:
        rates, whole = _rates(way), _throughput(way)
        low, high = np.quantile(rates, [0.1, 0.9])
        busy = way["cpu_seconds"] / (2 * sum(way["seconds"]))
        cells = (
            way["name"], f"{median(rates):.2f}", f"{low:.2f} … {high:.2f}", f"{whole:.2f}",
            f"{whole / _throughput(first):.2f}", f"{_predicted(way) / _predicted(first):.2f}", f"{busy:.0%}",
            " ".join(f"{size:,.0f}" for size in way["memory_mib"]),
        )  # fmt: skip
        lines.append(line(cells))
    plans = "\n".join(f"- *{way['name']}*: {_plan(way['plan'])}." for way in run["ways"])
    unrecomputed = " ".join(f"{size:,.0f}" for size in run["padded_mib"])
    return "\n".join(lines) + (
        f"\n\n{len(first['seconds'])} steps of each, in turn. Padded micro-batches would need {unrecomputed} MiB if "
        f"nothing were recomputed. A pack's ViT takes {run['vision_to_language']:.2f} times as long as its LLM."
        f"\n\n{plans}"
    )


def _predicted(way: dict[str, Any]) -> float:
    """Samples per second, as simulated from layer times measured before."""
    return float(sum(way["samples"]) / sum(way["predicted_seconds"]))


def _plan(plan: dict[str, Any]) -> str:
    packs = "packs of {} tiles and {} tokens".format(*plan["limits"]) if plan["limits"] else "four samples each, padded"
    cut = " ".join(map(str, plan["partition"]))
    return (
        f"{plan['micro_batches']} micro-batches a replica, {packs}; cut {cut}, {plan['recomputing_layers']} layers "
        f"recompute, {plan['schedule']}"
    )


def _draw(runs: list[dict[str, Any]], path: Path) -> None:
    with drawing(path, 9.5, 3.4 * len(runs)) as figure:
        axes = figure.subplots(len(runs), 2, squeeze=False)
        for (rates, losses), run in zip(axes, runs, strict=True):
            ways = run["ways"]
            names = [f"{way['name']}\n{_throughput(way) / _throughput(ways[0]):.2f} ×" for way in ways]
            rates.boxplot(
                [_rates(way) for way in ways], tick_labels=names, widths=0.6, medianprops={"color": SERIES[0]}
            )
            rates.set(ylabel="samples/s", ylim=(0, None), title=_title(run))
            for place, (colour, way) in enumerate(zip(SERIES, ways, strict=False)):
                width = 0.9 * (len(ways) - place)  # curves that lie over each other are all seen
                losses.plot(way["seen"], way["losses"], color=colour, label=way["name"], linewidth=width)
            losses.set(xlabel="samples", ylabel="loss of a target token", ylim=(0, None))
            losses.legend()


if __name__ == "__main__":
    main()
